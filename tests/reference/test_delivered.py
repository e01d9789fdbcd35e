"""What an Exporter delivers equals what the test's own loop computes from retain_grad and explicit copies."""

import copy
import math
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.instruments.activations.modules import WINDOW
from gradflow_export.metrics.arrays.samples import rows_of

STEPS = 12


class Branches(nn.Module):
    """Three convolutional blocks, a head whose second branch is never used, and one frozen layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, 6, 3, padding=1), nn.ReLU() if c == 2 else nn.Tanh()) for c in (2, 6, 6)
        )
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 4)
        self.spare = nn.Linear(6, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x.mean(dim=(2, 3))))


class Tokens(nn.Module):
    """Three blocks over positions, behind a sparse embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, sparse=True)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Sigmoid()) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x) if x.shape[1] > 99 else block(x)
        return self.head(x).movedim(-1, 1)


def images():
    """Return batches of images and class numbers."""
    torch.manual_seed(1)
    return [(torch.randn(2, 2, 4, 4), torch.randint(4, (2,))) for _ in range(STEPS)]


def tokens():
    """Return batches of tokens and class numbers, some of them ignored."""
    torch.manual_seed(1)
    targets = [torch.randint(5, (4, 7)) for _ in range(STEPS)]
    for batch in targets:
        batch[0, :3] = -100
    return [(torch.randint(20, (4, 7)), batch) for batch in targets]


CASES = {
    "convolutions, SGD": (Branches, images, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9), torch.float32),
    "convolutions, AdamW": (Branches, images, lambda p: torch.optim.AdamW(p, lr=1e-2), torch.float32),
    "positions, float64": (Tokens, tokens, lambda p: torch.optim.SGD(p, lr=0.5), torch.float64),
    "positions, bfloat16": (Tokens, tokens, lambda p: torch.optim.SGD(p, lr=0.5), torch.bfloat16),
}


def train_by_hand(model, batches, optimizer):
    """Train and keep, per step, everything the twins need: outputs with their gradients, weights before and after."""
    seen, criterion = [], nn.CrossEntropyLoss()
    kinds = (nn.ReLU, nn.Tanh, nn.Sigmoid)
    chosen = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    chosen |= {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    for x, y in batches:
        outputs = {}

        def keep(name, output, outputs=outputs):
            output.retain_grad()
            outputs[name] = output

        handles = [m.register_forward_hook(lambda _m, _a, o, n=n, k=keep: k(n, o)) for n, m in chosen.items()]
        optimizer.zero_grad()
        logits = model(x if not x.is_floating_point() else x.to(next(model.parameters()).dtype))
        loss = criterion(logits, y)
        loss.backward()
        for handle in handles:
            handle.remove()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        after = {n: p.detach().clone() for n, p in model.named_parameters()}
        seen.append((loss.detach(), logits.detach(), y, outputs, gradients, before, after))
    return seen


@pytest.fixture(scope="module", params=list(CASES))
def run(request):
    """Train twins of one model, one watched and one by hand; return records, the hand's notes and the model."""
    build, data, optimizer_of, dtype = CASES[request.param]
    torch.manual_seed(0)
    model = build().to(dtype)
    by_hand = copy.deepcopy(model)
    batches, criterion, memory = data(), nn.CrossEntropyLoss(), MemoryWriter()
    with Exporter(model, backends=memory, alerts_enabled=False, strict=True).watch(criterion):
        optimizer = optimizer_of([p for n, p in model.named_parameters() if "spare" not in n])
        for x, y in batches:
            optimizer.zero_grad()
            criterion(model(x.to(dtype) if x.is_floating_point() else x), y).backward()
            optimizer.step()
    hand_optimizer = optimizer_of([p for n, p in by_hand.named_parameters() if "spare" not in n])
    seen = train_by_hand(by_hand, batches, hand_optimizer)
    assert [r.step for r in memory.records] == list(range(1, STEPS + 1))
    return memory.records, seen, by_hand, hand_optimizer, dtype


def rel(dtype):
    """Return the relative tolerance for a dtype; values are stored as float32."""
    return 2e-6 if dtype is not torch.bfloat16 else 1e-4


def test_losses_and_logits(run, twin):
    """Loss, logit, confidence and alignment metrics of every step are those of plain loops."""
    records, seen, _, _, dtype = run
    for record, (loss, logits, y, *_) in zip(records, seen, strict=True):
        assert record.value("loss") == pytest.approx(loss.item(), rel=1e-6)
        if record.step > 10:
            assert record.get("logits.max") is None
            continue
        rows = logits.movedim(1, -1).reshape(-1, logits.shape[1]).double().tolist()
        expected = twin.logit_metrics(rows) | twin.target_metrics(rows, y.flatten().tolist())
        for name, value in expected.items():
            assert record.value(name) == pytest.approx(value, rel=rel(dtype) * 10, abs=1e-6), (record.step, name)


def test_parameter_gradients(run, twin):
    """Per-parameter gradient statistics are those of the gradients the optimizer saw; no gradient is missing."""
    records, seen, _, _, dtype = run
    for record, (*_, gradients, _before, _after) in zip(records, seen, strict=True):
        names = {"gradient_norm": twin.l2}
        if record.step in {1, 10}:
            names |= {"gradient_l1": twin.l1, "gradient_linf": twin.linf, "gradient_mean": twin.mean}
            names |= {"zero_share": twin.zero_share, "nonfinite": twin.nonfinite}
        else:
            assert record.get("parameter.gradient_l1") is None
        for name, function in names.items():
            delivered = record.get(f"parameter.{name}").as_dict()
            assert list(delivered) == list(gradients)
            for site, gradient in gradients.items():
                expected = None if gradient is None else pytest.approx(function(gradient), rel=rel(dtype))
                assert delivered[site] == expected, (record.step, name, site)


def test_gradient_totals(run, twin):
    """The run-level gradient statistics follow from the per-parameter norms and equal torch's total norm."""
    records, seen, _, _, dtype = run
    for record, (*_, gradients, _before, _after) in zip(records, seen, strict=True):
        there = [g for g in gradients.values() if g is not None]
        norms = [twin.l2(g) for g in there]
        mean, std = twin.stats(norms)
        flat = torch.cat([(g.to_dense() if g.is_sparse else g).double().flatten() for g in there])
        expected = {
            "gradient.total_norm": flat.norm().item(),
            "gradient.mean_norm": mean,
            "gradient.std_norm": std,
            "gradient.max_norm": max(norms),
            "gradient.min_norm": min(norms),
            "gradient.with_grad": len(there),
            "gradient.nonfinite": 0.0,
        }
        for name, value in expected.items():
            assert record.value(name) == pytest.approx(value, rel=rel(dtype)), name


def test_gradient_cosine(run, twin):
    """The cosine is between evenly spaced tensors of two consecutive gradients; a sparse gradient has none."""
    records, seen, model, *_ = run
    assert records[0].value("gradient.cosine") is None
    flat = []
    for *_, gradients, _before, _after in seen:
        there = [g for g in gradients.values() if g is not None]
        flat.append([x for g in there for x in twin.numbers(g)])
    for t in range(1, STEPS):
        if isinstance(model, Tokens):
            assert records[t].value("gradient.cosine") is None
        else:
            expected = twin.cosine(flat[t], flat[t - 1])
            assert records[t].value("gradient.cosine") == pytest.approx(expected, abs=1e-5)


def test_blocks(run, twin):
    """Gradient norms at block outputs, and size and spread of the outputs, are those of retained tensors."""
    records, seen, model, _, dtype = run
    names = [f"blocks.{i}" for i in range(len(model.blocks))]
    for record, (*_, outputs, _gradients, _before, _after) in zip(records, seen, strict=True):
        if record.step > 10:
            assert record.get("block.gradient_norm") is None
            continue
        expected = {
            "block.gradient_norm": [twin.l2(outputs[n].grad) for n in names],
            "block.output_rms": [twin.rms(outputs[n]) for n in names],
            "block.output_spread": [twin.spread(twin.rows_of(outputs[n].detach().double())) for n in names],
        }
        norms = expected["block.gradient_norm"]
        for name, values in expected.items():
            delivered = record.get(name)
            assert delivered.sites == tuple(names)
            assert delivered.values.tolist() == pytest.approx(values, rel=rel(dtype) * 5), (record.step, name)
        gains, logs = twin.gains(norms), twin.log_gains(norms)
        assert record.get("block.gain").sites == tuple(names[1:])
        assert record.get("block.gain").values.tolist() == pytest.approx(gains, rel=rel(dtype) * 2)
        assert record.get("block.log_gain").values.tolist() == pytest.approx(logs, abs=rel(dtype) * 2)
        run_level = {
            "gain.depth": math.fsum(logs),
            "gain.slope": twin.depth_slope(norms),
            "gain.min": min(gains),
            "gain.max": max(gains),
            "gain.mean_log": twin.stats(logs)[0],
        }
        for name, value in run_level.items():
            assert record.value(name) == pytest.approx(value, rel=rel(dtype) * 2, abs=rel(dtype) * 2), name


def test_effective_ranks(run, twin):
    """The rank of a block is that of its outputs pooled over the last four sampled batches."""
    records, seen, model, _, _ = run
    names = [f"blocks.{i}" for i in range(len(model.blocks))]
    pools = {name: deque(maxlen=4) for name in names}
    for record, (*_, outputs, _gradients, _before, _after) in zip(records, seen, strict=True):
        if record.step not in {1, 2, 3, 4}:
            assert record.get("block.effective_rank") is None
            continue
        for name in names:
            pools[name].append(np.array(twin.rows_of(outputs[name].detach().double())))
            expected = twin.effective_rank(np.concatenate(pools[name]))
            assert record.value("block.effective_rank", name) == pytest.approx(expected, rel=1e-3)
            stable = twin.stable_rank(np.concatenate(pools[name]))
            assert record.value("block.stable_rank", name) == pytest.approx(stable, rel=1e-3)
            assert record.value("block.rank_rows", name) == len(np.concatenate(pools[name]))
            greatest = max(abs(x) for x in outputs[name].detach().double().reshape(-1).tolist())
            assert record.value("block.output_max", name) == pytest.approx(greatest, rel=1e-2)
            size = record.value("block.output_rms", name)
            assert record.value("block.peak_ratio", name) == pytest.approx(greatest / size, rel=1e-2)


def test_updates(run, twin):
    """Weight norms, update norms and their ratios are those of explicit copies around the step."""
    records, seen, model, optimizer, _ = run
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = dict(model.named_parameters())
    for record, (*_, before, after) in zip(records, seen, strict=True):
        if record.step > 10:
            assert record.get("parameter.update_norm") is None
            continue
        sizes, changes = [], []
        for name, parameter in parameters.items():
            mine = id(parameter) in owned
            weight = twin.l2(before[name])
            change = twin.l2(after[name].double() - before[name].double())
            expected = {
                "weight_norm": weight,
                "update_norm": change,
                "update_ratio": change / weight if weight else None,
            }
            expected["learning_rate"] = optimizer.param_groups[0]["lr"]
            for key, value in expected.items():
                close = pytest.approx(value, rel=2e-5, abs=1e-9) if mine and value is not None else None
                assert record.value(f"parameter.{key}", name) == close, (record.step, key, name)
            assert record.value("parameter.trainable", name) == float(parameter.requires_grad)
            assert record.value("parameter.numel", name) == parameter.numel()
            sizes += [weight] if mine else []
            changes += [change] if mine else []
        total, size = math.sqrt(math.fsum(c * c for c in changes)), math.sqrt(math.fsum(s * s for s in sizes))
        assert record.value("update.total_norm") == pytest.approx(total, rel=2e-5)
        assert record.value("update.ratio") == pytest.approx(total / size, rel=2e-5)
        assert record.value("learning_rate") == pytest.approx(optimizer.param_groups[0]["lr"])


def test_activations(run, twin):
    """Dead, zero and saturated shares are those of the retained outputs; dead means dead since the first step."""
    records, seen, model, _, _ = run
    known = []
    for record, (*_, outputs, _gradients, _before, _after) in zip(records, seen, strict=True):
        if record.step > 10:
            assert record.get("activation.zero_share") is None
            continue
        for name, output in outputs.items():
            module = model.get_submodule(name)
            if isinstance(module, nn.ReLU):
                known.append(output.detach())
                assert record.value("activation.dead_share", name) == pytest.approx(twin.dead_share(known))
                assert record.value("activation.zero_share", name) == pytest.approx(twin.zero_share(output))
            if isinstance(module, nn.Tanh):
                share = twin.saturated_share(output, lambda o: 1 - o * o, 1.0)
                assert record.value("activation.saturated_share", name) == pytest.approx(share, abs=1e-6)
            if isinstance(module, nn.Sigmoid):
                share = twin.saturated_share(output, lambda o: o * (1 - o), 0.25)
                assert record.value("activation.saturated_share", name) == pytest.approx(share, abs=1e-6)


def test_histograms(run, twin):
    """Histograms at steps 1 and 10 count every entry of gradients and weights into even bins over their range."""
    records, seen, _, _, _ = run
    for record, (*_, gradients, before, _after) in zip(records, seen, strict=True):
        if record.step not in {1, 10}:
            assert record.histograms == ()
            continue
        assert {h.metric for h in record.histograms} == {"parameter.gradient", "parameter.weight"}
        for histogram in record.histograms:
            tensor = (gradients if histogram.metric == "parameter.gradient" else before)[histogram.site]
            entries = twin.numbers(tensor)
            assert histogram.counts.sum() == len(entries)
            assert histogram.edges[0] == pytest.approx(min(entries))
            assert np.diff(histogram.edges) == pytest.approx(np.diff(histogram.edges)[0], rel=1e-6)
            assert histogram.counts.tolist() == twin.bin_counts(entries, histogram.edges.tolist())
            assert histogram.nonfinite == 0


def test_row_samples_are_what_the_twin_takes(run, twin):
    """At these sizes the rows the package samples are all rows there are."""
    _, seen, *_ = run
    for *_, outputs, _gradients, _before, _after in seen[:2]:
        output = outputs["blocks.0"].detach().double()
        assert rows_of(output, 256, 512).tolist() == twin.rows_of(output)


def test_steps_without_a_record_leave_nothing_behind(twin):
    """With every=4, block norms and output sizes of a recorded step are those of that step alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    memory, optimizer = MemoryWriter(), torch.optim.SGD(model.parameters(), lr=0.05)
    norms, sizes = {}, {}
    with Exporter(model, backends=memory, every=4, alerts_enabled=False, strict=True).watch():
        for step in range(1, 9):
            outputs = [torch.randn(5, 4)]
            for layer in model:
                outputs.append(layer(outputs[-1]))
                outputs[-1].retain_grad()
            optimizer.zero_grad()
            outputs[-1].square().sum().backward()
            optimizer.step()
            norms[step] = [twin.l2(o.grad) for o in outputs[1:]]
            sizes[step] = [twin.rms(o) for o in outputs[1:]]
    assert [r.step for r in memory.records] == [1, 4, 8]
    for record in memory.records:
        assert record.get("block.gradient_norm").values.tolist() == pytest.approx(norms[record.step], rel=1e-5)
        assert record.get("block.output_rms").values.tolist() == pytest.approx(sizes[record.step], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_micro_batches_join_to_the_norm_over_all_of_them(dtype, twin):
    """Block norms of accumulated backward passes are the L2 norm over all of their gradients; the loss is the mean."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(dtype)
    memory, optimizer, criterion = MemoryWriter(), torch.optim.SGD(model.parameters(), lr=0.05), nn.MSELoss()
    parts, losses = [[], [], []], []
    with Exporter(model, backends=memory, strict=True).watch(criterion):
        # The first two gradients are beyond what a float32 norm can hold, in either direction.
        for scale in (1e-24, 1e24, 1.0) if dtype is torch.float32 else (1e-180, 1e180, 1.0):
            outputs = [torch.randn(5, 4, dtype=dtype)]
            for layer in model:
                outputs.append(layer(outputs[-1]))
                outputs[-1].retain_grad()
            loss = criterion(outputs[-1], torch.zeros(5, 4, dtype=dtype))
            losses.append(loss.item() * scale)
            (loss * scale).backward()
            for kept, output in zip(parts, outputs[1:], strict=True):
                kept.append(output.grad)
        optimizer.step()
    expected = [twin.l2(torch.stack(kept)) for kept in parts]
    largest = float(np.finfo(np.float32).max)
    delivered = memory.records[0].get("block.gradient_norm").values.tolist()
    assert delivered == pytest.approx([min(e, largest) for e in expected], rel=1e-5)
    assert memory.records[0].value("loss") == pytest.approx(min(math.fsum(losses), largest), rel=1e-6)


def test_complex_parameters_are_read(twin):
    """Gradient, weight and update norms of a complex parameter, conjugated lazily or not, are those of |x|."""
    torch.manual_seed(0)

    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, dtype=torch.complex64))

        def forward(self, x):
            return (self.w.conj() * x).abs().sum()

    model, memory = Waves(), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=memory, strict=True).watch():
        before = model.w.detach().clone()
        model(torch.randn(5, dtype=torch.complex64)).backward()
        gradient = model.w.grad.clone()
        optimizer.step()
    record = memory.records[0]
    assert record.value("parameter.gradient_norm", "w") == pytest.approx(twin.l2(gradient), rel=1e-5)
    assert record.value("parameter.gradient_l1", "w") == pytest.approx(twin.l1(gradient), rel=1e-5)
    assert record.value("parameter.weight_norm", "w") == pytest.approx(twin.l2(before), rel=1e-5)
    assert record.value("parameter.update_norm", "w") == pytest.approx(twin.l2(model.w - before), rel=1e-5)


def test_a_unit_is_dead_when_it_fired_in_neither_this_window_nor_the_one_before(twin):
    """Dead shares follow windows of samples: a unit that stopped firing is dead once two windows passed without it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 1))
    nn.init.eye_(model[0].weight)
    memory, optimizer = MemoryWriter(), torch.optim.SGD(model.parameters(), lr=0.0)
    outputs, shares = [], []
    intervals = {"activations": 1}
    with Exporter(model, backends=memory, intervals=intervals, alerts_enabled=False, strict=True).watch():
        for step in range(4 * WINDOW):
            # Unit k fires at steps that are multiples of 7 k, unit 0 never; one fires at the very first step only.
            row = [float(k > 0 and step % (7 * k) == 0) for k in range(5)] + [float(step == 0)]
            outputs.append(torch.relu(torch.tensor([row])))
            model(torch.tensor([row])).sum().backward()
            optimizer.step()
            first = max((step // WINDOW - 1) * WINDOW, 0)
            shares.append(twin.dead_share(outputs[first:]))
    delivered = [record.value("activation.dead_share", "1") for record in memory.records]
    assert delivered == pytest.approx(shares)
    assert len(set(shares)) > 2


def test_observed_logits_and_soft_targets(twin):
    """What is handed over with observe() is read like what a criterion shows; probabilities count by their greatest."""
    torch.manual_seed(0)
    model, memory = nn.Linear(4, 3), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    targets = torch.softmax(torch.randn(6, 3), dim=1)
    with Exporter(model, backends=memory, strict=True).watch() as exporter:
        logits = model(torch.randn(6, 4))
        loss = nn.functional.cross_entropy(logits, targets)
        exporter.observe(loss=loss, logits=logits, targets=targets)
        loss.backward()
        optimizer.step()
    rows = logits.detach().tolist()
    expected = twin.logit_metrics(rows) | twin.target_metrics(rows, targets.argmax(dim=1).tolist())
    for name, value in {**expected, "loss": loss.item()}.items():
        assert memory.records[0].value(name) == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_two_optimizers_make_one_record_of_all_parameters(twin):
    """Gradients, updates and learning rates of both halves stand in one record per step."""
    torch.manual_seed(0)
    model, memory = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), MemoryWriter()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.Adam(model[1].parameters(), lr=0.01)
    with Exporter(model, backends=memory, strict=True).watch():
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            model(torch.randn(5, 4)).square().sum().backward()
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            first.step()
            second.step()
    assert len(memory.records) == 3
    record = memory.records[-1]
    for name, parameter in model.named_parameters():
        assert record.value("parameter.gradient_norm", name) == pytest.approx(twin.l2(gradients[name]), rel=1e-5)
        change = twin.l2(parameter - before[name])
        assert record.value("parameter.update_norm", name) == pytest.approx(change, rel=1e-4)
        rate = 0.1 if name.startswith("0") else 0.01
        assert record.value("parameter.learning_rate", name) == pytest.approx(rate)
    assert record.value("learning_rate") == pytest.approx(0.1)
    total = math.sqrt(sum(twin.l2(g) ** 2 for g in gradients.values()))
    assert record.value("gradient.total_norm") == pytest.approx(total, rel=1e-5)
