"""Debuggers: what they see, what they leave alone, and how it reaches an exporter."""

import gc
import json
import logging
import math
import random
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from gradflow_export import (
    ArgumentError,
    ArgumentTypeError,
    DebugLevel,
    DiffusionModelDebugger,
    Exporter,
    IssueType,
    MemoryWriter,
    PyTorchDebugger,
    TensorInfo,
    TrainingDebugger,
    debug_context,
    read_run,
)


def net(seed=0):
    """A small model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def backward(model, scale=1.0):
    """Make gradients."""
    model.zero_grad()
    loss = model(torch.ones(3, 4)).square().mean() * scale
    loss.backward()
    return loss


def test_a_tensor_is_described():
    """Shape, type, place, memory and statistics over finite entries; counts of the others beside."""
    info = PyTorchDebugger().analyze_tensor(torch.tensor([[1.0, math.nan], [3.0, -math.inf]], requires_grad=True), "x")
    assert info == TensorInfo(
        name="x",
        shape=(2, 2),
        dtype="torch.float32",
        device="cpu",
        requires_grad=True,
        is_leaf=True,
        numel=4,
        memory_usage=16,
        has_nan=True,
        has_inf=True,
        nan_count=1,
        inf_count=1,
        zero_count=0,
        mean_value=2.0,
        std_value=pytest.approx(math.sqrt(2)),
        min_value=1.0,
        max_value=3.0,
        norm=pytest.approx(math.sqrt(10)),
    )
    assert not info.is_finite


@pytest.mark.parametrize(
    ("tensor", "bytes_held"),
    [
        (torch.empty(5, 5, device="meta"), 0),
        (torch.empty(0), 0),
        (torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(), 2 * 4 + 4 * 8),
        (torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr(), 2 * 4 + 5 * 8),
        (torch.ones(3, dtype=torch.bool), 3),
        (torch.ones(3, dtype=torch.complex64), 24),
        (torch.ones(3, dtype=torch.int16), 6),
        (torch.ones(3).half(), 6),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), 20),
    ],
)
@pytest.mark.filterwarnings("ignore")  # PyTorch calls nested and sparse tensors beta
def test_every_kind_of_tensor_has_a_description(tensor, bytes_held):
    """Nothing raises, and the description is strict JSON."""
    info = PyTorchDebugger().analyze_tensor(tensor)
    assert info.memory_usage == bytes_held
    assert info.is_finite
    json.dumps(info.as_dict(), allow_nan=False)
    assert (info.mean_value is None) == (tensor.is_meta or not tensor.numel())


def test_parameters_and_gradients_have_their_names():
    """Wrappers are looked through, and parameters without a gradient are left out of the gradients."""
    model = net()
    backward(model)
    model[0].bias.grad = None
    debugger = PyTorchDebugger()
    wrapped = nn.DataParallel(model)
    assert list(debugger.analyze_model_parameters(wrapped)) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    gradients = debugger.analyze_gradients(wrapped)
    assert list(gradients) == ["0.weight", "2.weight", "2.bias"]
    assert gradients["2.bias"].norm == pytest.approx(float(model[2].bias.grad.norm()))


def test_explosion_and_vanishing_are_literal():
    """Above or not finite is exploded, below is vanished, without a gradient is neither."""
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(6))
    for layer, value in zip(model, (10.0, 10.1, math.nan, math.inf, 1.1e-6, 9e-7), strict=True):
        layer.weight.grad = torch.tensor([[value]])
    model.append(nn.Linear(1, 1, bias=False))
    debugger = PyTorchDebugger()
    assert debugger.check_gradient_explosion(model) == ["1.weight", "2.weight", "3.weight"]
    assert debugger.check_gradient_vanishing(model) == ["5.weight"]
    assert debugger.check_gradient_explosion(model, threshold=20) == ["2.weight", "3.weight"]
    assert debugger.get_debug_summary() == {"total_anomalies": 3, "debug_history_length": 3}


def test_memory_that_is_shared_counts_once():
    """Tied weights, gradients, buffers and the state of the optimizer, in bytes."""
    model = nn.ModuleDict({"in": nn.Embedding(10, 4), "out": nn.Linear(4, 10, bias=False), "norm": nn.BatchNorm1d(4)})
    model["out"].weight = model["in"].weight
    debugger = PyTorchDebugger()
    assert debugger.profile_memory_usage(model) == {
        "parameters": (40 + 8) * 4,
        "gradients": 0,
        "buffers": 8 * 4 + 8,
        "optimizer": 0,
        "total": 48 * 4 + 40,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model["norm"](model["out"](model["in"](torch.tensor([1, 2])))[:, :4]).sum().backward()
    optimizer.step()
    held = debugger.profile_memory_usage(model, optimizer)
    assert (held["gradients"], held["optimizer"]) == (48 * 4, 48 * 4)
    assert held["total"] == sum(held.values()) // 2


def test_a_step_says_what_was_wrong():
    """NaN in loss and gradients, and a weight that is Inf, with the words that explain them."""
    model = net()
    debugger = TrainingDebugger(DebugLevel.ADVANCED)
    healthy = debugger.monitor_training_step(model, backward(model), 0)
    assert not healthy["has_anomaly"]
    assert healthy["gradient_norm"] == pytest.approx(math.hypot(*(float(p.grad.norm()) for p in model.parameters())))
    with torch.no_grad():
        model[0].weight[1, 2] = math.inf
    model[2].weight.grad[0, 3] = math.nan
    model[2].bias.grad[0] = -math.inf
    info = debugger.monitor_training_step(model, math.nan, 1)
    assert info["anomalies"] == [
        "the loss is NaN.",
        "the gradient of 2.weight, 2.bias is NaN or Inf.",
        "the weights of 0.weight are NaN or Inf.",
    ]
    assert (info["loss"], info["gradient_norm"]) == ("NaN", "NaN")
    assert (info["params_with_grad"], info["params_with_nan_grad"], info["params_with_inf_grad"]) == (4, 1, 1)
    assert [issue["issue_type"] for issue in info["issues"]] == ["NUMERICAL"]


@pytest.mark.parametrize("level", list(DebugLevel))
def test_levels_look_at_more_and_more(level):
    """Each level adds keys; no level says less of what it has read."""
    model = net()
    debugger = TrainingDebugger(level, history=2)
    backward(model)
    model[0].weight.grad[3, 1] = math.nan
    info = debugger.monitor_training_step(model, 1.0, 7)
    more = {"gradients", "parameters", "memory"} if level is not DebugLevel.BASIC else set()
    most = {"histograms", "context"} if level is DebugLevel.EXTREME else set()
    assert {key for key in info if key in {"gradients", "parameters", "memory", "histograms", "context"}} == more | most
    assert info["params_with_nan_grad"] == 1
    kept = debugger.history.entries[0].details
    assert ("gradients" in kept) == (level is DebugLevel.EXTREME)
    if most:
        assert info["context"]["first_nonfinite"] == {"0.weight": [3, 1]}
        assert "test_levels_look_at_more_and_more" in info["context"]["called_from"][0]
        assert sum(info["histograms"]["0.weight"]["counts"]) == 31


def test_the_history_is_bounded_and_cleared():
    """A hundred entries are kept by default; clearing begins to count anew."""
    debugger = PyTorchDebugger()
    for index in range(130):
        debugger.analyze_tensor(torch.tensor([math.nan if index == 5 else 1.0]), f"x{index}")
    assert debugger.get_debug_summary() == {"total_anomalies": 1, "debug_history_length": 100}
    assert debugger.history.entries[-1].name == "x129"
    debugger.clear_debug_history()
    assert debugger.get_debug_summary() == {"total_anomalies": 0, "debug_history_length": 0}


def test_no_tensor_and_no_model_is_kept():
    """After a look at every level the model can go."""
    model = net()
    reference, debugger = weakref.ref(model), TrainingDebugger(DebugLevel.EXTREME)
    debugger.monitor_training_step(model, backward(model), 0)
    debugger.validate_model_parameters(model)
    debugger.analyze_gradients(model)
    del model
    gc.collect()
    assert reference() is None


def test_looking_changes_nothing():
    """Losses, weights and every random generator are the same bits with and without a debugger."""

    def train(debugger):
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        losses = []
        with debug_context(DebugLevel.ADVANCED) if debugger else torch.enable_grad():
            for step in range(8):
                optimizer.zero_grad()
                loss = model(torch.randn(5, 4)).square().mean()
                loss.backward()
                if debugger:
                    debugger.monitor_training_step(model, loss, step)
                    debugger.check_gradient_vanishing(model)
                    debugger.validate_model_parameters(model)
                optimizer.step()
                losses.append(loss.item())
        return (
            losses,
            [p.tolist() for p in model.parameters()],
            torch.rand(3).tolist(),
            np.random.random(),  # noqa: NPY002 - the global generator
            random.random(),
        )

    results = []
    for debugger in (None, TrainingDebugger(DebugLevel.EXTREME)):
        np.random.seed(0)  # noqa: NPY002 - the global generator
        random.seed(0)
        results.append(train(debugger))
    assert results[0] == results[1]


def test_an_exporter_that_watches_is_told(tmp_path):
    """What a debugger finds at a step stands in that step's record, which TensorBoard, the panel and W&B read."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    exporter = Exporter(model, logdir=tmp_path, strict=True).watch()
    debugger = TrainingDebugger()
    for step in range(6):
        loss = backward(model, 1e4 if step in {2, 3} else 1e-2)
        debugger.monitor_training_step(model, loss, step)
        optimizer.step()
    exporter.close()
    issue = next(issue for issue in exporter.issues if issue.layer == "2.weight")
    assert (issue.issue_type, issue.step, issue.healed_step) == (IssueType.EXPLODING, 3, 5)
    told = {
        record.step: sum(each.layer == "2.weight" for each in record.issues) for record in read_run(tmp_path).records
    }
    assert told == {1: 0, 2: 0, 3: 1, 4: 0, 5: 1, 6: 0}
    assert debugger.get_training_summary()["gradient_explosions"] == 2


def test_a_given_exporter_is_told_and_a_nan_only_once():
    """``exporter=`` wins over the one that watches; what its own rules say already is not said twice."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = Exporter(model, backends=[MemoryWriter()], strict=True).watch()
    debugger = TrainingDebugger(exporter=exporter)
    for step in range(3):
        debugger.monitor_training_step(model, backward(model, math.nan if step == 1 else 1.0), step)
        if step != 1:
            optimizer.step()
        else:
            model[0].bias.grad.fill_(math.nan)
            optimizer.step()
    assert [issue.issue_type for issue in exporter.issues].count(IssueType.NUMERICAL) == 1
    exporter.close()


def test_what_is_found_by_name_reaches_the_exporter_and_heals():
    """A look by hand opens an issue in the record of the step, and the next one that finds nothing heals it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = Exporter(model, backends=[MemoryWriter()], strict=True).watch()
    debugger = PyTorchDebugger(exporter=exporter)
    for step in range(3):
        backward(model)
        threshold = 1e-9 if step == 1 else 1e9
        debugger.check_gradient_explosion(model, threshold)
        debugger.check_gradient_explosion(model, threshold)
        debugger.analyze_tensor(torch.tensor([math.nan if step == 1 else 1.0]), "batch")
        debugger.analyze_gradients(model)
        optimizer.step()
    exporter.close()
    told = {issue.issue_type: (issue.step, issue.healed_step) for issue in exporter.issues}
    assert told == {IssueType.EXPLODING: (2, 3), IssueType.NUMERICAL: (2, 3)}
    assert "tensor 'batch': 1 entries are NaN or Inf." in {issue.message for issue in exporter.issues}


def test_steps_may_begin_anew_with_each_epoch(caplog):
    """An issue opens and heals under the user's own numbers, and is logged when it opens."""
    model = net()
    debugger = TrainingDebugger()
    backward(model)
    events = []
    with caplog.at_level(logging.WARNING, logger="gradflow_export"):
        for step, norm in ((5, 1.0), (6, 50.0), (0, 50.0), (1, 1.0)):
            model[0].weight.grad.fill_(norm)
            events += debugger.monitor_training_step(model, 1.0, step)["issues"]
    assert [(event["step"], event["healed_step"]) for event in events] == [(6, None), (6, 1)]
    assert len(caplog.records) == 1


def test_zero_by_invariance_is_not_vanishing():
    """A bias before a normalisation has no gradient to speak of, and training is well."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    torch.manual_seed(0)
    model(torch.randn(16, 4)).square().mean().backward()
    model[0].bias.grad.fill_(1e-9)
    debugger = TrainingDebugger()
    assert debugger.monitor_training_step(model, 1.0, 0)["vanishing"] == []
    assert debugger.check_gradient_vanishing(model) == ["0.bias"]


def test_anomaly_mode_names_the_operation_and_ends():
    """A NaN in the backward pass raises inside the block, is remembered, and the mode is as it was."""
    debugger = PyTorchDebugger()
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="SqrtBackward0"), debugger.autograd_anomaly_detection():
        (torch.sqrt(x) * 0).sum().backward()
    assert not torch.is_anomaly_enabled()
    assert "SqrtBackward0" in debugger.history.entries[0].anomalies[0]
    with debugger.autograd_anomaly_detection(check_nan=False):
        (torch.sqrt(x) * 0).sum().backward()


def test_the_extreme_context_has_anomaly_mode_on():
    """And the others do not; hooks are gone afterwards."""
    for level in DebugLevel:
        with debug_context(level):
            assert torch.is_anomaly_enabled() is (level is DebugLevel.EXTREME)
    model = net()
    with debug_context() as debugger:
        pass
    backward(model, math.nan)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert debugger.get_debug_summary()["debug_history_length"] == 0


def test_the_context_uses_the_names_of_the_optimizer():
    """Where an optimizer was given names they are told, otherwise places."""
    model = net()
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with debug_context() as debugger:
        backward(model)
        model[2].bias.grad.fill_(math.inf)
        named.step()
        plain.step()
    assert [entry.anomalies[0] for entry in debugger.history.entries] == [
        "NaN or Inf: 2.bias",
        "NaN or Inf: group 0, parameter 3",
    ]


def test_parameters_are_validated():
    """Broken and constant weights, and tensors that came, went, were replaced or reshaped since the last call."""
    model = net()
    debugger = PyTorchDebugger()
    first = debugger.validate_model_parameters(model)
    assert (first["valid"], first["problems"]) == (True, [])
    with torch.no_grad():
        model[0].weight.fill_(0.5)
        model[2].bias.fill_(math.nan)
    model[2].weight = nn.Parameter(torch.randn(2, 8))
    model.append(nn.Linear(1, 1, bias=False))
    del model[0].bias
    model[0].register_parameter("bias", None)
    found = debugger.validate_model_parameters(model)
    assert {key: found[key] for key in ("nonfinite", "constant", "added", "removed", "replaced", "reshaped")} == {
        "nonfinite": ["2.bias"],
        "constant": ["0.weight"],
        "added": ["3.weight"],
        "removed": ["0.bias"],
        "replaced": ["2.weight"],
        "reshaped": ["2.weight"],
    }
    assert len(found["problems"]) == 6
    assert debugger.get_debug_summary()["total_anomalies"] == 1


@pytest.mark.parametrize(
    ("output", "shape", "problems"),
    [
        (torch.ones(2, 3), (-1, 3), []),
        (torch.ones(2, 3), (2, 4), ["output has shape (2, 3), expected (2, 4)"]),
        (
            {"logits": [torch.ones(2), torch.tensor([math.nan])]},
            None,
            ["1 of 1 entries of output['logits'][1] are NaN"],
        ),
        (
            types.SimpleNamespace(sample=torch.tensor([math.inf, 0.0])),
            None,
            ["1 of 2 entries of output.sample are Inf"],
        ),
        ("words", None, ["the output holds no tensor"]),
    ],
)
def test_outputs_are_validated(output, shape, problems):
    """Any nesting is searched, and the place of what is wrong is named."""
    found = PyTorchDebugger().validate_model_output(output, shape)
    assert (found["valid"], found["problems"]) == (not problems, problems)


def test_pipelines_of_three_kinds_are_understood():
    """A module, an object with ``components``, attributes, a dictionary; shared parameters count once."""
    unet, vae = nn.Linear(3, 3), nn.Linear(3, 2)
    vae.weight.requires_grad_(requires_grad=False)
    both = {"unet": unet, "vae": vae, "again": unet, "scheduler": 5}
    debugger = DiffusionModelDebugger(DebugLevel.ADVANCED)
    for pipeline in (both, types.SimpleNamespace(**both), types.SimpleNamespace(components=both)):
        found = debugger.analyze_diffusion_pipeline(pipeline)
        assert set(found["components"]) == {"unet", "vae", "again"}
        assert (found["total_parameters"], found["trainable_parameters"]) == (20, 14)
        assert found["memory_bytes"] == 80
        assert found["components"]["vae"]["tensors"]["bias"].shape == (2,)
    assert debugger.analyze_diffusion_pipeline(unet)["components"]["Linear"]["parameters"] == 12
    with torch.no_grad():
        unet.bias[0] = math.nan
    assert debugger.analyze_diffusion_pipeline(both)["nonfinite"] == ["unet.bias", "again.bias"]


def test_broken_latents_are_told():
    """NaN in the latents reaches the exporter of a component; latents without any spread are odd."""
    pipeline = types.SimpleNamespace(unet=net())
    exporter = Exporter(pipeline.unet, backends=[MemoryWriter()], strict=True).watch()
    debugger = DiffusionModelDebugger()
    output = types.SimpleNamespace(sample=torch.tensor([1.0, math.nan, 3.0]))
    info = debugger.monitor_diffusion_step(pipeline, 4, output)
    assert info["anomalies"] == ["1 of 3 entries of the latents are NaN."]
    debugger.monitor_diffusion_step(pipeline, 5, output)
    flat = debugger.monitor_diffusion_step(pipeline, 6, (torch.ones(2, 2),))
    assert flat["anomalies"] == ["all entries of the latents are 1: nothing is left of the noise."]
    exporter.close()
    assert [issue.issue_type for issue in exporter.issues] == [IssueType.NUMERICAL]
    assert "after step 4" in exporter.issues[0].message


def test_counts_are_whole_while_steps_are_counted():
    """A reader in another thread never sees a step without its anomaly."""
    model, debugger, stop = net(), TrainingDebugger(), threading.Event()
    backward(model)
    torn = []

    def read():
        while not stop.is_set():
            summary = debugger.get_training_summary()
            if summary["loss_anomalies"] != summary["total_steps"]:
                torn.append(summary)

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(200):
        debugger.monitor_training_step(model, math.nan, step)
    stop.set()
    thread.join()
    assert torn == []


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: PyTorchDebugger("loud"), ArgumentError, "level must be one of basic, advanced, extreme; got 'loud'"),
        (lambda: PyTorchDebugger(3), ArgumentTypeError, "level must be a DebugLevel, got 3"),
        (lambda: PyTorchDebugger(history=0), ArgumentError, "history must be at least 1 entry, got 0"),
        (lambda: PyTorchDebugger(history=1.5), ArgumentTypeError, "history must be a number of entries, got 1.5"),
        (lambda: PyTorchDebugger(exporter="x"), ArgumentTypeError, "exporter must be an Exporter, got str"),
        (lambda: PyTorchDebugger(gradient_explosion_threshold=-1), ArgumentError, "gradient_explosion_threshold must"),
        (lambda: PyTorchDebugger().analyze_tensor([1.0], "x"), ArgumentTypeError, "x must be a torch.Tensor, got list"),
        (lambda: PyTorchDebugger().analyze_gradients("m"), ArgumentTypeError, "model must be a torch.nn.Module"),
        (
            lambda: PyTorchDebugger().check_gradient_explosion(net(), "x"),
            ArgumentTypeError,
            "threshold must be a number",
        ),
        (lambda: PyTorchDebugger().profile_memory_usage(net(), "x"), ArgumentTypeError, "optimizer must be a torch.op"),
        (
            lambda: PyTorchDebugger().validate_model_output(torch.ones(2), 2),
            ArgumentTypeError,
            "expected_shape must be a tuple, got 2",
        ),
        (lambda: TrainingDebugger().monitor_training_step(net(), "x", 0), ArgumentTypeError, "loss must be a tensor"),
        (lambda: TrainingDebugger().monitor_training_step(net(), 1.0, 0.5), ArgumentTypeError, "step must be a whole"),
        (
            lambda: DiffusionModelDebugger().analyze_diffusion_pipeline(5),
            ArgumentTypeError,
            "pipeline must be a module",
        ),
        (lambda: DiffusionModelDebugger().monitor_diffusion_step(net(), 0, "x"), ArgumentTypeError, "latents must be"),
        (lambda: DiffusionModelDebugger().monitor_diffusion_step(net(), "0", "x"), ArgumentTypeError, "step must be a"),
    ],
)
def test_what_cannot_be_used_is_told(call, error, words):
    """What was expected, what came, what to do."""
    with pytest.raises(error, match=words):
        call()
