"""Metrics under the name an Exporter delivers them by, where other tests know only the function behind: plain twins."""

import itertools
import math
import statistics
import time

import numpy as np
import psutil
import pytest
import torch
from scipy import stats
from torch import nn
from torch.distributions import Categorical, Normal

from gradflow_export import Exporter, MemoryWriter

EVERY = {"updates": 1, "discrete": 1, "logits": 1, "policy": 1, "attention": 1}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def exporter_of(model, **given):
    """Return a strict exporter that reads at every step, and where its records go."""
    memory = MemoryWriter()
    return Exporter(model, backends=memory, intervals=EVERY, alerts_enabled=False, strict=True, **given), memory


def size(numbers):
    """Return the Euclidean length of some numbers."""
    return math.sqrt(math.fsum(x * x for x in numbers))


@pytest.mark.parametrize("broken", [False, True])
def test_the_gradient_that_the_loss_sends_back(broken):
    """Norm of all, mean norm of a sample, shares of zero and non-finite entries; an ignored sample sends zeros."""
    model, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = exporter_of(model)
    with exporter.watch(criterion):
        logits = model(torch.randn(5, 4))
        logits.retain_grad()
        loss = criterion(logits, torch.tensor([0, 2, -100, 1, 1]))
        (loss * (math.inf if broken else 1.0)).backward()
        optimizer.step()
    rows = logits.grad.double().tolist()
    flat = [x for row in rows for x in row]
    record = memory.records[0]
    assert record.value("upstream.zero_share") == pytest.approx(sum(x == 0 for x in flat) / 15)
    lost = sum(not math.isfinite(x) for x in flat) / 15
    assert record.value("upstream.nonfinite_share") == pytest.approx(lost)
    assert (lost > 0) is broken
    if not broken:
        assert record.value("upstream.norm") == pytest.approx(size(flat), rel=1e-6)
        assert record.value("upstream.mean_norm") == pytest.approx(sum(map(size, rows)) / 5, rel=1e-6)


def test_what_arrived_of_updates_in_bfloat16():
    """Shares, error, cosine and effectiveness are those of copies around the step and of -lr g without rounding."""
    model = nn.Linear(6, 5).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    exporter, memory = exporter_of(model)
    with exporter.watch():
        model(torch.randn(8, 6).bfloat16()).float().square().sum().backward()
        before = {n: p.detach().double().flatten().tolist() for n, p in model.named_parameters()}
        meant = {n: [-1e-4 * g for g in p.grad.double().flatten().tolist()] for n, p in model.named_parameters()}
        optimizer.step()
    record = memory.records[0]
    for name, parameter in model.named_parameters():
        after, wanted = parameter.detach().double().flatten().tolist(), meant[name]
        moved = [b - a for a, b in zip(before[name], after, strict=True)]
        some = [d for d, e in zip(moved, wanted, strict=True) if e != 0]
        cosine = math.fsum(d * e for d, e in zip(moved, wanted, strict=True)) / (size(moved) * size(wanted))
        ratio = size(moved) / size(wanted)
        expected = {
            "lost_share": some.count(0) / len(some),
            "intended_share": len(some) / len(moved),
            "changed_share": sum(d != 0 for d in moved) / len(moved),
            "update_error": size(d - e for d, e in zip(moved, wanted, strict=True)) ** 2 / size(wanted) ** 2,
            "update_cosine": cosine,
            "update_effectiveness": max(0, cosine) * min(ratio, 1 / ratio),
            "rate_effectiveness": ratio,
            "master": 0.0,
        }
        assert 0 < expected["lost_share"] < 1, name
        for key, value in expected.items():
            assert record.value(f"parameter.{key}", name) == pytest.approx(value, rel=1e-5), key


def test_rows_of_a_real_matrix_as_nodes():
    """Sizes along and across each row, changes of direction and length, the quiet row, and both correlations."""
    model = nn.Linear(5, 12, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = torch.rand(12) + 0.5
    weights[3], weights[7] = 0.0, 1e-4
    exporter, memory = exporter_of(model)
    with exporter.watch(pairs="rows"):
        start = model.weight.detach().double().tolist()
        (model(torch.randn(20, 5)).square().mean(dim=0) * weights).sum().backward()
        gradients = model.weight.grad.double().tolist()
        optimizer.step()
    end = model.weight.detach().double().tolist()
    along, across, turned, grown = [], [], [], []
    for w, g, v in zip(start, gradients, end, strict=True):
        inner = math.fsum(a * b for a, b in zip(w, g, strict=True)) / size(w)
        along.append(abs(inner))
        across.append(size(b - inner * a / size(w) for a, b in zip(w, g, strict=True)))
        chord = size(a / size(w) - b / size(v) for a, b in zip(w, v, strict=True))
        turned.append(2 * math.asin(chord / 2))
        grown.append(abs(size(v) - size(w)))
    record, mean = memory.records[0], statistics.fmean
    sizes = [math.log(math.hypot(a, b)) for a, b in zip(along, across, strict=True) if a or b]
    middle = statistics.median(sizes)
    spread = 1.4826 * statistics.median(abs(s - middle) for s in sizes)
    quiet = sum(s < middle - max(6 * spread, math.log(20)) for s in sizes) + 12 - len(sizes)
    expected = {
        "phase_gradient": mean(across),
        "magnitude_gradient": mean(along),
        "phase_change": mean(turned),
        "magnitude_change": mean(grown),
        "changed_share": 11 / 12,
        "quiet_share": quiet / 12,
        "count": 12.0,
    }
    assert quiet == 2
    for key, value in expected.items():
        assert record.value(f"node.{key}", "weight") == pytest.approx(value, rel=1e-4), key
    both = [(a, b) for a, b in zip(across, along, strict=True) if a and b]
    phase, magnitude = np.array(both).T
    assert record.value("phase.correlation") == pytest.approx(
        stats.pearsonr(np.log(phase), np.log(magnitude)).statistic, rel=1e-4
    )
    assert record.value("phase.rank_correlation") == pytest.approx(
        stats.spearmanr(phase, magnitude).statistic, rel=1e-4
    )


class Spiral(nn.Module):
    """Three weights whose gradient is a rotation of two of them and a pull on the third."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 0.2, 0.5], dtype=torch.float64))


def test_the_path_of_the_weights():
    """After 24 steps every flow metric is that of the positions and gradients the loop itself kept."""
    model = Spiral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    exporter, memory = exporter_of(model)
    positions, pulls = [], []
    with exporter.watch():
        for _ in range(24):
            x, y, z = model.w.tolist()
            model.w.grad = torch.tensor([y, -x, 0.3 * z], dtype=torch.float64)
            positions.append([x, y, z])
            pulls.append(model.w.grad.tolist())
            optimizer.step()
            exporter.step()
    (record,) = [record for record in memory.records if record.value("flow.winding") is not None]
    centre = [statistics.fmean(column) for column in zip(*positions, strict=True)]
    centred = [[a - c for a, c in zip(point, centre, strict=True)] for point in positions]
    moves = [[b - a for a, b in zip(p, q, strict=True)] for p, q in itertools.pairwise(positions)]
    dot = lambda a, b: math.fsum(x * y for x, y in zip(a, b, strict=True))  # noqa: E731 - the sign of a formula
    cosine = lambda a, b: dot(a, b) / (size(a) * size(b))  # noqa: E731 - the same
    variance, axes = np.linalg.eigh(np.cov(np.array(centred).T))
    plane = [[dot(point, axis) for axis in axes.T[1:]] for point in centred]
    turns = [math.remainder(math.atan2(*q) - math.atan2(*p), math.tau) for p, q in itertools.pairwise(plane)]
    radii = [a * a + b * b for a, b in plane]
    expected = {
        "flow.winding": abs(math.fsum(turns)) / math.tau,
        "flow.plane": variance[1:].sum() / variance.sum(),
        "flow.growth": math.sqrt(math.fsum(radii[12:]) / math.fsum(radii[:12])),
        "flow.work": math.fsum(map(dot, moves, pulls[1:]))
        / math.fsum(map(lambda m, g: size(m) * size(g), moves, pulls[1:])),
        "flow.straightness": math.dist(positions[0], positions[-1]) / math.fsum(map(size, moves)),
        "flow.turning": statistics.fmean(math.acos(cosine(a, b)) for a, b in itertools.pairwise(moves)),
        "gradient.coherence": statistics.fmean(cosine(a, b) for a, b in itertools.combinations(pulls, 2)),
    }
    assert expected["flow.winding"] > 0.8
    for name, value in expected.items():
        assert record.value(name) == pytest.approx(value, rel=1e-5), name
    spread = math.sqrt(statistics.fmean(size(point) ** 2 for point in centred))
    assert record.value("flow.radius", "w") == pytest.approx(spread, rel=1e-5)


class Heads(nn.Module):
    """Causal attention with three heads, behind a skip path."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def parts(self, x):
        return [part.unflatten(-1, (3, 2)).transpose(1, 2) for part in (3 * self.qkv(x)).chunk(3, dim=-1)]

    def forward(self, x):
        seen = nn.functional.scaled_dot_product_attention(*self.parts(x), is_causal=True)
        return x + self.out(seen.transpose(1, 2).flatten(2))


def test_attention_of_a_layer():
    """Every statistic of attention, under its name, is that of loops over the exact weights of each row."""
    model = nn.Sequential(Heads(), Heads()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = exporter_of(model)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    with exporter.watch():
        q, k, _ = model[0].parts(x)
        logits = (q @ k.transpose(-2, -1) / math.sqrt(2)).tolist()
        model(x).square().mean().backward()
        optimizer.step()
    mean = statistics.fmean
    # Row r may look at its first r + 1 keys; the first row has no choice.
    rows = {(b, h, r): logits[b][h][r][: r + 1] for b in range(2) for h in range(3) for r in range(1, 5)}
    weights = {key: [math.exp(z) / math.fsum(math.exp(y) for y in row) for z in row] for key, row in rows.items()}
    entropy = {key: -math.fsum(p * math.log(p) for p in row) for key, row in weights.items()}

    def least(row):
        n, size_ = len(row), size(z - mean(row) for z in row)
        b = math.exp(-size_ * math.sqrt(n / (n - 1)))
        return math.log(1 + (n - 1) * b) + size_ * math.sqrt(n * (n - 1)) * b / (1 + (n - 1) * b)

    def apart(b, h):
        return [p - 1 / len(weights[b, h, r]) for r in range(1, 5) for p in weights[b, h, r]]

    def cosine(u, v):
        return math.fsum(map(math.prod, zip(u, v, strict=True))) / (size(u) * size(v))

    def joint(b, r):
        row = [mean(column) for column in zip(*(weights[b, h, r] for h in range(3)), strict=True)]
        return -math.fsum(p * math.log(p) for p in row) - mean(entropy[b, h, r] for h in range(3))

    def sink(b, h):
        columns = itertools.zip_longest(*(weights[b, h, r] for r in range(1, 5)), fillvalue=0.0)
        return max(map(mean, columns))

    expected = {
        "entropy_nats": mean(entropy.values()),
        "entropy_bound": mean(map(least, rows.values())),
        "sparsity": mean(float(p < 0.1 / len(row)) for row in weights.values() for p in row),
        "sink": mean(sink(b, h) for b in range(2) for h in range(3)),
        "max_logit": max(
            abs(z) for b in range(2) for h in range(3) for r in range(5) for z in logits[b][h][r][: r + 1]
        ),
        "diversity": 1 - mean(cosine(apart(b, g), apart(b, h)) for b in range(2) for g, h in [(0, 1), (0, 2), (1, 2)]),
        "divergence": mean(joint(b, r) for b in range(2) for r in range(1, 5)),
    }
    assert expected["sparsity"] > 0
    record = memory.records[0]
    for name, value in expected.items():
        assert record.value(f"attention.{name}", "0") == pytest.approx(value, rel=1e-5), name
    for head in range(3):
        value = mean(entropy[b, head, r] / math.log(r + 1) for b in range(2) for r in range(1, 5))
        assert record.value("attention.entropy", f"0.head{head}") == pytest.approx(value, rel=1e-5)


def test_a_policy_that_is_observed():
    """Entropy over ln K of discrete actions, mean spread and nats per dimension of continuous ones, by head too."""
    model = nn.ModuleDict({"pi": nn.Linear(3, 4), "mean": nn.Linear(3, 2)})
    model.log_std = nn.Parameter(torch.tensor([-0.5, 0.3]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = exporter_of(model)
    with exporter.watch():
        x = torch.randn(6, 3)
        logits, std = model["pi"](x), model.log_std.exp().expand(6, 2)
        exporter.observe(policy=Categorical(logits=logits))
        exporter.observe(policy=Normal(model["mean"](x), std))
        (logits.square().mean() + std.mean() + model["mean"](x).mean()).backward()
        spread = std.double().flatten().tolist()
        rows = logits.double().softmax(-1).tolist()
        optimizer.step()
    record = memory.records[0]
    entropy = statistics.fmean(-math.fsum(p * math.log(p) for p in row) / math.log(4) for row in rows)
    nats = statistics.fmean(0.5 * math.log(2 * math.pi * math.e * s * s) for s in spread)
    assert record.value("policy.entropy") == pytest.approx(entropy, rel=1e-5)
    assert record.value("policy.head_entropy", "pi") == pytest.approx(entropy, rel=1e-5)
    assert record.value("policy.std") == pytest.approx(statistics.fmean(spread), rel=1e-5)
    assert record.value("policy.head_std", "log_std") == pytest.approx(statistics.fmean(spread), rel=1e-5)
    assert record.value("policy.gaussian_entropy") == pytest.approx(nats, rel=1e-5)


class SlowLoss(nn.Module):
    """A criterion that takes two seconds of a clock."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def forward(self, output):
        self.clock[0] += 2.0
        return output.square().mean()


class SlowStep(torch.optim.SGD):
    """An optimizer that takes five seconds of a clock."""

    clock = None

    @torch.no_grad()
    def step(self, closure=None):
        """Update and push the clock."""
        super().step(closure)
        self.clock[0] += 5.0


def test_times_of_loss_and_optimizer_are_those_of_the_clock(monkeypatch):
    """Two micro-batches take two seconds each in the criterion, the optimizer five, and the step nine."""
    clock = [0.0]
    model, criterion = nn.Linear(3, 2), SlowLoss(clock)
    optimizer = SlowStep(model.parameters(), lr=0.1)
    optimizer.clock = clock
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    exporter, memory = exporter_of(model)
    with exporter.watch(criterion):
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                criterion(model(torch.ones(2, 3))).backward()
            optimizer.step()
    for record in memory.records[1:]:
        assert record.value("runtime.loss_time") == 4.0
        assert record.value("runtime.optimizer_time") == 5.0
        assert record.value("runtime.step_time") == 9.0
        assert record.value("runtime.throughput") == pytest.approx(1 / 9)


def test_memory_is_what_psutil_says():
    """Resident and virtual size in units of 2^20 bytes, and a limit that is at most the machine's memory."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = exporter_of(model)
    with exporter.watch():
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        seen = psutil.Process().memory_info()
    record = memory.records[0]
    assert record.value("runtime.rss") == pytest.approx(seen.rss / 2**20, rel=0.1)
    assert record.value("runtime.vms") == pytest.approx(seen.vms / 2**20, rel=0.1)
    assert 0 < record.value("runtime.memory_limit") <= psutil.virtual_memory().total / 2**20


@pytest.mark.parametrize(
    ("kind", "site", "number"),
    [("input", "", 2), ("forward", "1", 2), ("weights", "0.weight", 0), ("loss", "", 1), ("backward", "0.bias", 3)],
)
def test_where_nan_began(kind, site, number):
    """The value is the number of the first such micro-batch, or of all of them for the backward pass; the site says where."""

    class Breaks(nn.Module):
        """Overflows for large input."""

        def forward(self, x):
            return x.exp()

    model = nn.Sequential(nn.Linear(3, 3), Breaks(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, memory = exporter_of(model)
    with exporter.watch():
        for part in range(3):
            x = torch.randn(4, 3)
            if kind == "input" and part == 1:
                x[0, 0] = math.nan
            if kind == "forward" and part == 1:
                x = 1e6 * model[0].weight.detach().sign().sum(dim=0).expand(4, 3)
            if kind == "weights":
                with torch.no_grad():
                    model[0].weight[0, 0] = math.inf
            loss = model(x).square().mean()
            if kind == "loss":
                loss = loss * math.nan
            if kind == "backward":
                loss = loss + torch.sqrt((model[0].bias * 0).sum())
            loss.backward()
            exporter.observe(loss=loss)
        optimizer.step()
    record = memory.records[0]
    found = {r.metric: r.as_dict() for r in record.readings if r.metric.startswith("origin")}
    assert found == {f"origin.{kind}": {site: float(number)}}
