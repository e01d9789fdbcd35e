"""The norm before clipping at every step, whoever clips and however."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from gradflow_export import Exporter, IssueType, MemoryWriter
from gradflow_export.diagnostics import BackwardPassDiagnostics
from gradflow_export.instruments.gradients.clipping import WATCHED_STEPS
from gradflow_export.records.catalog import CATALOG
from gradflow_export.rules.unclipped import before_clipping
from gradflow_export.schedule import DENSE_STEPS, INTERVALS, SETTLING_INTERVAL
from gradflow_export.writers.stock import StockPages
from gradflow_export.writers.wandb.picks import Picks

SELDOM = dict.fromkeys(INTERVALS, 10**6)
STEPS = 16
NORMS = ("parameter.gradient_norm", *(f"gradient.{name}_norm" for name in ("total", "mean", "max", "min", "std")))
SAMPLED = DENSE_STEPS


def total(parameters):
    """The norm of the gradients there are now, in float64."""
    gradients = [p.grad.double() for p in parameters if p.grad is not None]
    return float(torch.stack([g.norm() for g in gradients]).norm())


def in_two_steps(model):
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)


def by_hand(model, data=False):
    norm = total(model.parameters())
    for p in model.parameters():
        (p.grad.data if data else p.grad).mul_(min(1.0, 0.1 / norm))


def layer_by_layer(model):
    for layer in model:
        clip_grad_norm_(layer.parameters(), 0.05)


def twice(model):
    clip_grad_norm_(model.parameters(), 0.2)
    clip_grad_norm_(model.parameters(), 0.1, norm_type=1.0)


TURNS = itertools.cycle((True, False))
HOW = {
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "norm, by a name of its own": lambda model: clip_grad_norm_(list(model.parameters()), 0.1),
    "norm, of one tensor": lambda model: clip_grad_norm_(model[0].weight, 0.01),
    "norm, not reached": lambda model: clip_grad_norm_(model.parameters(), 1e6),
    "greatest norm": lambda model: clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf")),
    "without foreach": lambda model: clip_grad_norm_(model.parameters(), 0.1, foreach=False),
    "layer by layer": layer_by_layer,
    "twice": twice,
    "norm first, clipping then": in_two_steps,
    "value": lambda model: clip_grad_value_(model.parameters(), 0.01),
    "value, then norm": lambda model: (clip_grad_value_(model.parameters(), 0.01), HOW["norm"](model)),
    "by hand": by_hand,
    "by hand, through .data": functools.partial(by_hand, data=True),
    "by hand, every other step": lambda model: by_hand(model) if next(TURNS) else None,
    "a new gradient": lambda model: [setattr(p, "grad", p.grad * 0.5) for p in model.parameters()],
}


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)).to(dtype)


def train(model, clip, steps=STEPS, passes=1, scaler=None, fused=None):
    """Train; return the norms before and after clipping."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused), []
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            loss = model(torch.randn(8, 6, dtype=dtype)).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        before = total(model.parameters())
        clip(model)
        seen.append((before, total(model.parameters())))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return seen


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("how", HOW)
def test_the_norm_before_clipping_is_there_at_every_step(how, passes, watching, recorded):
    """Sampled or not, each record has the norm that backward left, the share that is left of it, and how many did."""
    model = network()
    exporter = watching(model, intervals=SELDOM)
    seen = train(model, HOW[how], passes=passes)
    records, clipped = recorded(exporter), []
    assert len(records) == STEPS
    for record, (before, after) in zip(records, seen, strict=True):
        clipped.append(after / before < 0.999)
        assert record.value("gradient.norm_before_clip") == pytest.approx(before, rel=1e-5), record.step
        assert record.value("gradient.clip_scale") == pytest.approx(after / before, rel=1e-5)
        assert record.value("gradient.total_norm") == pytest.approx(after, rel=1e-5)
        assert record.value("gradient.clipped_share") == pytest.approx(sum(clipped) / len(clipped))


@pytest.mark.parametrize("scale", [None, 512.0])
def test_between_sampled_steps_nothing_is_read_where_nobody_clips(scale, watching, recorded):
    """The norm at the end of backward is there on sampled steps; that a scaler writes to gradients is not clipping."""
    model = network()
    exporter = watching(model, intervals=SELDOM)
    seen = train(model, lambda _model: None, scaler=scale and torch.amp.GradScaler("cpu", init_scale=scale))
    for record, (before, _) in zip(recorded(exporter), seen, strict=True):
        sampled = record.step <= SAMPLED or record.step % SETTLING_INTERVAL == 0
        wanted = pytest.approx(before, rel=1e-5) if sampled else None
        assert record.value("gradient.norm_before_clip") == wanted


def test_clipping_by_hand_that_ends_is_looked_for_no_more(watching, recorded):
    """When gradients were left alone for a while, norms at the end of backward are read on sampled steps only."""
    model = network()
    exporter = watching(model, intervals=SELDOM)
    train(model, by_hand, steps=SAMPLED)
    train(model, lambda _model: None, steps=WATCHED_STEPS + SETTLING_INTERVAL)
    told = [r.step for r in recorded(exporter) if r.value("gradient.norm_before_clip") is None]
    assert min(told) == SAMPLED + WATCHED_STEPS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype, watching, recorded):
    """In half precision the factor is rounded as torch rounds it; in double precision it is exact."""
    model = network(dtype)
    exporter = watching(model, intervals=SELDOM)
    seen = train(model, HOW["norm"])
    rel = 5e-3 if dtype is torch.bfloat16 else 1e-6
    for record, (before, _) in zip(recorded(exporter), seen, strict=True):
        assert record.value("gradient.norm_before_clip") == pytest.approx(before, rel=rel)


def test_gradients_that_are_not_finite(watching, recorded):
    """A norm that is Inf before clipping is told as it is, though clipping leaves NaN."""
    model = network()
    exporter = watching(model, intervals=SELDOM)

    def clip(model):
        model[0].weight.grad[0, 0] = float("inf")
        clip_grad_norm_(model.parameters(), 0.1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, HOW["norm"], steps=SAMPLED + 2)
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    clip(model)
    optimizer.step()
    assert recorded(exporter)[-1].value("gradient.norm_before_clip") == float("inf")


@pytest.mark.parametrize("how", ["norm", "value", "value, then norm", "by hand", "by hand, through .data"])
@pytest.mark.parametrize("fused", [False, True])
def test_under_a_gradient_scaler(fused, how, watching, recorded):
    """After ``unscale_`` the norm is that of the gradients without the scale."""
    model = network()
    exporter = watching(model, intervals=SELDOM)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    seen = train(model, HOW[how], scaler=scaler, fused=fused)
    for record, (before, _) in zip(recorded(exporter), seen, strict=True):
        assert record.value("gradient.norm_before_clip") == pytest.approx(before, rel=1e-5)


def test_inside_a_closure(watching, recorded):
    """Trainers that run backward and clipping inside the step are read too."""
    model, seen = network(), []
    exporter = watching(model, intervals=SELDOM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def closure():
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        seen.append(total(model.parameters()))
        clip_grad_norm_(model.parameters(), 0.1)

    for _ in range(STEPS):
        optimizer.step(closure)
    assert [r.value("gradient.norm_before_clip") for r in recorded(exporter)] == pytest.approx(seen, rel=1e-5)


class Clipping(torch.optim.SGD):
    """Clips in its own step, and clears the gradients there."""

    def step(self, closure=None):
        self.before(self, (), {})
        out = super().step(closure)
        self.after()
        return out


@pytest.mark.parametrize("inside", ["a hook before the step", "a step of its own", "one that clears gradients"])
@pytest.mark.parametrize("clip", ["norm", "layer by layer", "twice", "norm, not reached"])
def test_inside_the_step(clip, inside, watching, recorded):
    """Where the step itself clips, what was read before it is multiplied by what the calls leave of it."""
    model, seen, greatest = network(), [], []

    def clipping(*_step):
        seen.append(total(model.parameters()))
        HOW[clip](model)
        greatest.append((total(model.parameters()), max(float(p.grad.abs().max()) for p in model.parameters())))

    if inside == "a hook before the step":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(clipping)
    else:
        optimizer = Clipping(model.parameters(), lr=0.01)
        optimizer.before = clipping
        optimizer.after = optimizer.zero_grad if inside == "one that clears gradients" else lambda: None
    exporter = watching(model, intervals=SELDOM | {"statistics": 1})
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    for record, before, (after, largest) in zip(recorded(exporter), seen, greatest, strict=True):
        assert record.value("gradient.norm_before_clip") == pytest.approx(before, rel=1e-5), record.step
        assert record.value("gradient.total_norm") == pytest.approx(after, rel=1e-5), record.step
        assert record.value("gradient.clip_scale") == pytest.approx(after / before, rel=1e-5), record.step
        assert record.get("parameter.gradient_linf").values.max() == pytest.approx(largest, rel=1e-5), record.step


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("passes", [1, 3])
def test_without_an_optimizer(passes, told, watching, recorded):
    """Gradients that are read when a backward pass is over are not clipped yet; those read at ``step()`` are."""
    model, seen = network(), []
    exporter = watching(model, intervals=SELDOM)
    for _ in range(STEPS):
        for p in model.parameters():
            p.grad = None
        for _ in range(passes):
            loss = model(torch.randn(8, 6)).square().mean()
            exporter.observe(loss=loss)
            loss.backward()
        before = total(model.parameters())
        layer_by_layer(model)
        seen.append((before, total(model.parameters())))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.01 * p.grad)
        if told:
            exporter.step()
    known = [record for record in recorded(exporter) if record.value("gradient.total_norm") is not None]
    assert len(known) >= STEPS - 1  # of the first step nobody knows before it that no optimizer will come
    for record in known:
        before, after = seen[record.step - 1]
        assert record.value("gradient.norm_before_clip") == pytest.approx(before, rel=1e-5), record.step
        assert record.value("gradient.total_norm") == pytest.approx(after, rel=1e-5), record.step


@pytest.mark.parametrize("together", [True, False])
def test_of_several_optimizers(together, watching, recorded):
    """The record's norm is that of all its optimizers' gradients, clipped at once or each on its own."""
    model, seen = network(), []
    exporter = watching(model, intervals=SELDOM)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model]
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        seen.append(total(model.parameters()))
        if together:
            clip_grad_norm_(model.parameters(), 0.1)
        for layer, optimizer in zip(model, optimizers, strict=True):
            if not together:
                clip_grad_norm_(layer.parameters(), 0.05)
            optimizer.step()
    assert [r.value("gradient.norm_before_clip") for r in recorded(exporter)] == pytest.approx(seen, rel=1e-5)


def test_of_players_that_clip_each_others_gradients(watching, recorded):
    """What one player's clipping does to gradients that another has used already is not counted for that one."""
    torch.manual_seed(0)
    model, seen = nn.ModuleDict({"critic": nn.Linear(6, 6), "actor": nn.Linear(6, 6)}), []
    exporter = watching(model, intervals=SELDOM)
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.01) for name in model}
    for _ in range(STEPS):
        norms = []
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            (10.0 * model[name](torch.randn(8, 6)).square().mean()).backward()
            norms.append(total(model[name].parameters()))
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        seen.append(float(torch.tensor(norms).norm()))
    assert [r.value("gradient.norm_before_clip") for r in recorded(exporter)] == pytest.approx(seen, rel=1e-5)


CHANGES = {
    "a scale of the loss is taken out": (lambda p: p.grad.div_(1024.0), 1024.0),
    "micro-batches are averaged": (lambda p: setattr(p, "grad", p.grad / 4), 1.0),
    "noise is added": (lambda p: p.grad.add_(0.1 * torch.randn_like(p)), 1.0),
}


@pytest.mark.parametrize("scaled", [None, 512.0])
@pytest.mark.parametrize("how", ["norm", "norm, not reached", "layer by layer", "twice", "value, then norm"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_by_hand_before_clipping_is_not_clipped(change, how, scaled, watching, recorded):
    """The norm before clipping is that of the gradients which the first call is given, whoever made them."""
    by, factor = CHANGES[change]
    model, seen = network(), []
    exporter = watching(model, intervals=SELDOM)
    scaler = torch.amp.GradScaler("cpu", init_scale=scaled or 1.0, enabled=scaled is not None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(SAMPLED + STEPS):
        optimizer.zero_grad()
        scaler.scale(factor * model(torch.randn(8, 6)).square().mean()).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            by(p)
        if how == "value, then norm":
            clip_grad_value_(model.parameters(), 0.01)
        before = total(model.parameters())
        HOW["norm" if how == "value, then norm" else how](model)
        seen.append((before, total(model.parameters())))
        scaler.step(optimizer)
        scaler.update()
    for record, (before, after) in zip(recorded(exporter), seen, strict=True):
        assert record.value("gradient.norm_before_clip") == pytest.approx(before, rel=1e-5), record.step
        assert record.value("gradient.clip_scale") == pytest.approx(after / before, rel=1e-5), record.step
        assert record.value("gradient.total_norm") == pytest.approx(after, rel=1e-5), record.step


def test_torchs_functions_are_put_back():
    """Whatever the order in which exporters come and go, torch has its own functions afterwards."""
    from torch.nn.utils import clip_grad

    home = dict(vars(clip_grad)), torch.nn.utils.clip_grads_with_norm_
    models = [network() for _ in range(3)]
    exporters = [Exporter(model, backends=[MemoryWriter()], strict=True).watch() for model in models]
    assert torch.nn.utils.clip_grads_with_norm_ is not home[1]
    for exporter in (exporters[1], exporters[0], exporters[2]):
        exporter.close()
    assert (dict(vars(clip_grad)), torch.nn.utils.clip_grads_with_norm_) == home


def test_clipping_returns_and_leaves_what_it_would(watching):
    """The total norm and the gradients after clipping are bit for bit those without an exporter."""
    results = []
    for watch in (False, True):
        model = network()
        exporter = watching(model) if watch else None
        model(torch.ones(8, 6)).square().mean().backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        results.append((norm.item(), [p.grad.clone() for p in model.parameters()]))
        if exporter is not None:
            exporter.close()
    (plain, gradients), (norm, watched) = results
    assert plain == norm
    assert all(torch.equal(a, b) for a, b in zip(gradients, watched, strict=True))


def test_it_is_a_headline(tmp_path):
    """It is a TensorBoard scalar, a W&B scalar, and a line of the report."""
    assert CATALOG["gradient.norm_before_clip"].headline
    model, memory = network(), MemoryWriter()
    exporter = Exporter(model, backends=[memory], logdir=tmp_path, intervals=SELDOM, strict=True).watch()
    seen = train(model, HOW["norm"])
    exporter.close()
    last = memory.records[-1]
    assert b"gradflow_gradient/gradient.norm_before_clip" in b"".join(StockPages().events(last))
    picked = Picks((), 1, ()).scalars(last)
    assert picked["gradient.norm_before_clip"] == pytest.approx(seen[-1][0], rel=1e-5)
    lines = [line.split() for line in exporter.report().splitlines() if "gradient.norm_before_clip" in line]
    assert len(lines) == 1
    assert float(lines[0][1]) == pytest.approx(seen[-1][0], rel=1e-3)


def test_rules_judge_what_was_there_before_clipping(watching, recorded):
    """Whatever a loop is clipped to, rules are told the same norms as of the loop that is not clipped."""
    judged = []
    for limit in (1e9, 0.1, 1e-3):
        model = network()
        exporter = watching(model, intervals=SELDOM)
        train(model, lambda model, limit=limit: nn.utils.clip_grad_norm_(model.parameters(), limit), steps=1)
        (record,) = map(before_clipping, recorded(exporter))
        judged.append({name: record.get(name).values.tolist() for name in NORMS})
    for name in NORMS:
        assert judged[1][name] == pytest.approx(judged[0][name], rel=1e-5)
        assert judged[2][name] == pytest.approx(judged[0][name], rel=1e-5)


def test_rules_judge_what_was_there_before_a_part_was_clipped(watching, recorded):
    """Where layers are clipped each by itself, each has its own norm back, and what is summed up of them."""
    model = network()
    exporter = watching(model, intervals=SELDOM)
    norms = []

    def clip(model):
        norms.extend(float(p.grad.norm()) for p in model.parameters())
        layer_by_layer(model)

    train(model, clip, steps=1)
    (record,) = recorded(exporter)
    assert record.get("parameter.clip_scale") is not None
    record = before_clipping(record)
    assert record.get("parameter.gradient_norm").values.tolist() == pytest.approx(norms, rel=1e-5)
    assert record.value("gradient.max_norm") == pytest.approx(max(norms), rel=1e-5)
    assert record.value("gradient.min_norm") == pytest.approx(min(norms), rel=1e-5)


def test_clipping_does_not_hide_a_fixed_threshold(watching):
    """Gradients of a hundred times the threshold are told of, whatever is left of them."""
    model = network()
    for p in model.parameters():
        p.data *= 10
    exporter = watching(model, profile="seed")
    train(model, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), steps=3)
    exporter.close()
    assert IssueType.EXPLODING in {issue.issue_type for issue in exporter.issues}


def test_diagnostics_show_what_was_there_before_clipping():
    """The report's gradient norms are those of the loss, not the limit."""
    model = network()
    with BackwardPassDiagnostics(model) as diagnostics:
        seen = train(model, HOW["norm"], steps=5)
        told = diagnostics.get_diagnostic_summary()["backward_pass_diagnostics"]["gradient_statistics"]
    assert told["total_norm"]["mean"] == pytest.approx(sum(before for before, _ in seen) / 5, rel=1e-5)
