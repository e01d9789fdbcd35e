"""Updates in coarse formats, phase and magnitude: slow twins, optimizers of torch in float64, and known values."""

import cmath
import math
from statistics import median

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.engine.discrete_totals import discrete_totals
from gradflow_export.instruments.discrete.expected_update import meant_update
from gradflow_export.instruments.discrete.node_history import small
from gradflow_export.metrics.arrays.samples import row_sample
from gradflow_export.metrics.discrete import SCORES, signal_to_noise, update_errors, update_scores
from gradflow_export.metrics.phase import (
    correlations,
    polar_changes,
    polar_gradients,
    quiet_share,
    row_changes,
    row_gradients,
    wrap,
)
from gradflow_export.metrics.upstream import upstream_statistics


def scores_twin(actual, expected):
    """Return the six scores of two lists of floats, written out."""
    pairs = list(zip(actual, expected, strict=True))
    meant = [d for d, e in pairs if e != 0]
    e_norm, d_norm = math.sqrt(math.fsum(e * e for _, e in pairs)), math.sqrt(math.fsum(d * d for d, _ in pairs))
    inner = math.fsum(d * e for d, e in pairs)
    cosine = inner / (d_norm * e_norm) if d_norm and e_norm else math.nan
    ratio = d_norm / e_norm if e_norm else math.nan
    return {
        "lost_share": sum(d == 0 for d in meant) / len(meant) if meant else math.nan,
        "intended_share": len(meant) / len(pairs),
        "changed_share": sum(d != 0 for d in actual) / len(pairs),
        "error": math.fsum((d - e) ** 2 for d, e in pairs) / e_norm**2 if e_norm else math.nan,
        "cosine": cosine,
        "effectiveness": 0.0 if ratio == 0 else max(0.0, cosine) * min(ratio, 1 / ratio) if e_norm else math.nan,
    }


def rounded(weight, update):
    """Return the update that bfloat16 or float16 weights really take, in float64."""
    return (weight.double() + update).to(weight.dtype).double() - weight.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0])
def test_scores_equal_the_twin(dtype, size):
    """All six scores of several tensors at once are those of plain loops."""
    torch.manual_seed(0)
    weights = [torch.randn(7, 5).to(dtype), torch.randn(3).to(dtype)]
    meant = [torch.randn(w.shape, dtype=torch.float64) * size * (torch.rand(w.shape) > 0.3) for w in weights]
    actual = [rounded(w, e) for w, e in zip(weights, meant, strict=True)]
    columns = update_scores(actual, meant).T
    for column, d, e in zip(columns, actual, meant, strict=True):
        expected = scores_twin(d.flatten().tolist(), e.flatten().tolist())
        assert tuple(expected) == SCORES
        assert column.tolist() == pytest.approx(list(expected.values()), rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("rows", [20, 1])
def test_the_stated_errors_of_scores_are_those_of_the_rows(rows):
    """Some rows of a matrix, whose rows differ, are off by as much as they say; all of them, or equal ones, by 0."""
    off = []
    for seed in range(60):
        torch.manual_seed(seed)
        scale = (0.4 * torch.randn(400, 1, dtype=torch.float64)).exp() if rows > 1 else 1.0
        weight, meant = (1 + torch.rand(400, 50)).bfloat16(), 2**-9 * scale * torch.randn(400, 50, dtype=torch.float64)
        change = rounded(weight, meant)
        chosen = torch.randperm(400)[:rows]
        whole, some = (
            update_scores([d], [e])[[0, 5], 0] for d, e in ((change, meant), (change[chosen], meant[chosen]))
        )
        errors = update_errors([change[chosen]], [meant[chosen]], [rows / 400])[:, 0]
        off.append(((some - whole) / errors).abs())
        assert (update_errors([change], [meant], [1.0]) == 0).all()
    size = torch.stack(off).median(dim=0).values  # 0.67 of a normal error
    assert ((size > 0.4) & (size < 1.1)).all(), size


def test_the_ends_of_the_scores():
    """Exact is 1, lost is 0, reversed is 0, twice too long is a half, and nothing meant is undefined."""
    e = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    rows = dict(zip(SCORES, update_scores([e, 0 * e, -e, 2 * e, e], [e, e, e, e, 0 * e]), strict=True))
    assert rows["effectiveness"].tolist() == pytest.approx([1, 0, 0, 0.5, math.nan], nan_ok=True)
    assert rows["lost_share"].tolist() == pytest.approx([0, 1, 0, 0, math.nan], nan_ok=True)
    assert rows["cosine"].tolist() == pytest.approx([1, math.nan, -1, 1, math.nan], nan_ok=True)
    assert [signal_to_noise(x) for x in (0.0, 1.0, 0.01)] == [math.inf, 0.0, pytest.approx(20.0)]


def test_bfloat16_loses_what_is_below_half_a_spacing():
    """With weights in (1, 2) and updates of standard deviation 2^-9 erf(sqrt 2) of all updates are lost (Zamirai)."""
    torch.manual_seed(0)
    weight = (1 + torch.rand(200_000)).bfloat16()
    meant = torch.randn(200_000, dtype=torch.float64) * 2**-9
    lost = update_scores([rounded(weight, meant)], [meant])[0, 0].item()
    assert lost == pytest.approx(math.erf(math.sqrt(2)), abs=0.003)


def test_half_of_the_binades_lose_an_update_of_fixed_size():
    """Weights spread evenly over the binades from 2^-8 to 1 lose an update of 2^-12.5 in the upper four."""
    torch.manual_seed(0)
    weight = torch.exp2(-8 * torch.rand(200_000)).bfloat16()
    meant = torch.full((200_000,), 2**-12.5, dtype=torch.float64)
    assert update_scores([rounded(weight, meant)], [meant])[0, 0].item() == pytest.approx(0.5, abs=0.005)


@pytest.mark.parametrize("update", [0.001, 2**-9, -(2**-9)])
def test_updates_of_one_that_are_lost_exactly(update):
    """1 + 0.001 and 1 + 2^-9 round back, and 1 - 2^-9 is a tie that goes to even."""
    meant = torch.tensor([update], dtype=torch.float64)
    assert update_scores([rounded(torch.ones(1).bfloat16(), meant)], [meant])[0, 0].item() == 1.0


def test_the_sign_keeps_four_fifths_of_the_direction():
    """cos(sign g, g) of normal entries is sqrt(2 / pi)."""
    torch.manual_seed(0)
    g = torch.randn(1_000_000, dtype=torch.float64)
    assert update_scores([g.sign()], [g])[4, 0].item() == pytest.approx(math.sqrt(2 / math.pi), abs=0.002)


def test_rounding_to_a_fine_grid_makes_the_error_of_bennett():
    """The mean squared error is D^2 / 12, and one bit more is worth 6.02 dB."""
    torch.manual_seed(0)
    e = torch.randn(400_000, dtype=torch.float64)
    errors = [update_scores([torch.round(e / d) * d], [e])[3, 0].item() for d in (0.25, 0.125)]
    assert errors[0] * e.square().mean().item() == pytest.approx(0.25**2 / 12, rel=0.01)
    assert signal_to_noise(errors[1]) - signal_to_noise(errors[0]) == pytest.approx(6.02, abs=0.05)


def test_polar_gradients_are_those_of_autograd_through_polar():
    """G26, and any other complex weight: the chain rule through torch.polar."""
    w = torch.tensor([1.2 + 0.7j], dtype=torch.complex128)
    g = 2 * (w - (0.3 - 0.4j))
    phase, magnitude = polar_gradients(w, g)
    assert (magnitude.item(), phase.item()) == pytest.approx((2.66332, 1.38), abs=1e-5)
    torch.manual_seed(0)
    w, target = torch.randn(2, 6, 3, dtype=torch.complex128).unbind()
    r, phi = w.abs().requires_grad_(), w.angle().requires_grad_()
    (torch.polar(r, phi) - target).abs().square().sum().backward()
    phase, magnitude = polar_gradients(w, 2 * (w - target))
    assert torch.allclose(phase, phi.grad, rtol=1e-10)
    assert torch.allclose(magnitude, r.grad, rtol=1e-10)
    assert [t.item() for t in polar_gradients(torch.zeros(1, dtype=w.dtype), g)] == [0.0, 0.0]


def test_changes_of_phase_take_the_short_way():
    """Across the cut at pi a phase changes by little, as plain complex numbers say."""
    before, after = [cmath.rect(2.0, 3.1), 1j, 0j], [cmath.rect(3.0, -3.1), -1 + 0j, 1 + 0j]
    phase, magnitude = polar_changes(torch.tensor(before), torch.tensor(after))
    assert phase.tolist() == pytest.approx([2 * (math.pi - 3.1), math.pi / 2, 0.0], abs=1e-6)
    assert magnitude.tolist() == pytest.approx([1.0, 0.0, 1.0], abs=1e-6)
    angles = torch.tensor([0.1, -0.1, 4.0, -4.0, math.pi, -math.pi, 1e-12], dtype=torch.float64)
    expected = [math.atan2(math.sin(a), math.cos(a)) for a in angles.tolist()]
    assert wrap(angles).abs().tolist() == pytest.approx([abs(a) for a in expected], rel=1e-9)
    assert wrap(angles)[-1].item() == 1e-12


def test_rows_split_into_direction_and_length():
    """Along and across a row equal plain loops; a zero row has no direction."""
    torch.manual_seed(0)
    w, g = torch.randn(2, 5, 4, dtype=torch.float64).unbind()
    w[4] = 0
    across, along = row_gradients(w, g)
    for row in range(4):
        size = math.hypot(*w[row].tolist())
        inner = math.fsum(a * b / size for a, b in zip(w[row].tolist(), g[row].tolist(), strict=True))
        assert along[row].item() == pytest.approx(inner)
        assert across[row].item() ** 2 + inner**2 == pytest.approx(math.hypot(*g[row].tolist()) ** 2)
    assert (along[4].item(), across[4].item()) == (0.0, pytest.approx(math.hypot(*g[4].tolist())))
    angle, length = row_changes(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[0.0, 3.0], [2.0, 2e-6]]))
    assert angle.tolist() == pytest.approx([math.pi / 2, 1e-6], rel=1e-5)
    assert length.tolist() == pytest.approx([2.0, 0.0], abs=1e-6)


def test_a_normalised_layer_has_no_gradient_along_its_rows():
    """The gradient along a row that layer normalisation of its output makes irrelevant is 0 up to rounding."""
    torch.manual_seed(0)
    w = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    h = torch.randn(16, 6, dtype=torch.float64) @ w.T
    normal = nn.functional.layer_norm(h.T, (16,), eps=0.0)
    normal.square().mul(torch.rand(16, dtype=torch.float64)).sum().backward()
    across, along = row_gradients(w.detach(), w.grad)
    assert abs(along.item()) < 1e-4 * across.item()


def test_correlations_are_those_of_scipy():
    """Pearson of the logarithms and Spearman; fewer than eight nodes say nothing."""
    rng = np.random.default_rng(0)
    a = np.exp(rng.normal(size=40))
    b = a * np.exp(rng.normal(size=40))
    got = correlations(torch.from_numpy(a), torch.from_numpy(b)).tolist()
    assert got[0] == pytest.approx(stats.pearsonr(np.log(a), np.log(b)).statistic)
    assert got[1] == pytest.approx(stats.spearmanr(a, b).statistic)
    assert all(math.isnan(x) for x in correlations(torch.from_numpy(a[:7]), torch.from_numpy(b[:7])).tolist())
    a[0] = 0.0
    assert correlations(torch.from_numpy(a), torch.from_numpy(b))[0].item() == pytest.approx(
        stats.pearsonr(np.log(a[1:]), np.log(b[1:])).statistic
    )


def test_nodes_without_a_gradient_do_not_correlate():
    """Whole rows of dead units are equal on both sides by nature; neither correlation is about them."""
    rng = np.random.default_rng(1)
    a, b = rng.random(30) + 0.1, rng.random(30) + 0.1
    got = correlations(*(torch.from_numpy(np.concatenate([np.zeros(40), x])) for x in (a, b))).tolist()
    assert got[0] == pytest.approx(stats.pearsonr(np.log(a), np.log(b)).statistic)
    assert got[1] == pytest.approx(stats.spearmanr(a, b).statistic)


def quiet_twin(sizes):
    """Return the share of sizes far below the median, by plain loops."""
    logs = [math.log(s) if s > 0 else -math.inf for s in sizes]
    centre = math.log(median(sizes))
    spread = 1.4826 * median(abs(x - centre) for x in logs)
    return sum(x < centre - max(6 * spread, math.log(20)) for x in logs) / len(logs)


@pytest.mark.parametrize("sizes", [[1.0] * 9 + [0.01], [1.0] * 9 + [0.0], [1.0] * 9 + [0.2], [0.5, 1, 2, 4, 1e-9]])
def test_quiet_nodes_equal_the_twin(sizes):
    """One node far below its layer's median is told, one that is a little below is not."""
    assert quiet_share(torch.tensor(sizes, dtype=torch.float64)).item() == pytest.approx(quiet_twin(sizes))
    assert median(sizes) > 0


@pytest.mark.parametrize("count", [6, 7, 8, 31])
def test_as_many_nodes_are_quiet_as_are_named(count):
    """The share and the names come from different places, and from one rule: also where a node is on the edge."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        sizes = np.exp(rng.normal(0, rng.uniform(0, 1), count))
        sizes[0] = np.median(sizes) * np.exp(-rng.uniform(2.5, 5))
        named = list(small(sizes))
        assert quiet_share(torch.from_numpy(sizes)).item() == pytest.approx(len(named) / count)


def test_nodes_of_a_silent_layer_are_not_unusual():
    """Where no node has a gradient none is smaller than the others."""
    assert quiet_share(torch.zeros(12, dtype=torch.float64)).item() == 0.0


@pytest.mark.parametrize("shape", [(), (5,), (6, 4), (6, 2, 3)])
def test_samples_hold_whole_rows(shape):
    """Rows are complete and evenly spaced, and at least one is taken."""
    tensor = torch.arange(float(math.prod(shape))).reshape(shape)
    flat = tensor.reshape(shape[0], -1) if shape else tensor.reshape(1, 1)
    assert torch.equal(row_sample(tensor, 10_000), flat)
    assert torch.equal(row_sample(tensor, 1), flat[:: tensor.numel()])


def test_the_gradient_at_the_logits_is_softmax_minus_onehot():
    """For mean cross-entropy each sample's gradient is (softmax - onehot) / samples."""
    torch.manual_seed(0)
    z, y = torch.randn(8, 5, dtype=torch.float64, requires_grad=True), torch.arange(8) % 5
    nn.functional.cross_entropy(z, y).backward()
    closed = (z.detach().softmax(1) - nn.functional.one_hot(y, 5)) / 8
    norms = [math.hypot(*row) for row in closed.tolist()]
    got = upstream_statistics(z.grad).tolist()
    assert got == pytest.approx([math.hypot(*norms), math.fsum(norms) / 8, 0.0, 0.0], abs=1e-15)
    got = upstream_statistics(torch.tensor([[0.0, math.nan], [0.0, 1.0]])).tolist()
    assert got[2:] == [0.5, 0.25]


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01, maximize=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1),
    "NAdam": torch.optim.NAdam,
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_meant_update_is_the_one_that_float64_weights_take(name, dtype):
    """Closed forms and shadow copies equal the step that torch takes where nothing is rounded."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(4, 3, dtype=dtype))
    optimizer = OPTIMIZERS[name]([parameter])
    fused_complex = name == "AdamW" and dtype.is_complex
    optimizer = torch.optim.AdamW([parameter], lr=0.01) if fused_complex else optimizer

    def take(tensor):
        """Copy everything, real and imaginary parts apart."""
        copied = tensor.detach().clone()
        return torch.view_as_real(copied) if copied.is_complex() else copied

    for _ in range(4):
        parameter.grad = torch.randn(4, 3, dtype=dtype)
        meant, before = meant_update(optimizer, parameter, optimizer.param_groups[0], take), take(parameter)
        optimizer.step()
        assert torch.allclose(meant(take(parameter.grad)), take(parameter) - before, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_calls_its_base_class_means_what_that_means(name):
    """Whatever it does to the weights afterwards; a subclass with no step of its own is its base class."""
    plain = nn.Parameter(torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    base = type(OPTIMIZERS[name]([plain]))

    class Rounded(base):
        """Lays the weights on a grid after each step."""

        def step(self, closure=None):
            """Step."""
            loss = super().step(closure)
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.copy_(torch.round(p * 4) / 4)
            return loss

    class Named(base):
        """Has no step of its own."""

    for kind in (Rounded, Named):
        parameter = nn.Parameter(plain.detach().clone())
        optimizer = kind([parameter], lr=0.05)
        for _ in range(3):
            parameter.grad = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            twin = nn.Parameter(parameter.detach().clone())
            twin.grad = parameter.grad.clone()
            other = base([twin], lr=0.05)
            other.state[twin] = {
                k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[parameter].items()
            }
            before = twin.detach().clone()
            meant = meant_update(optimizer, parameter, optimizer.param_groups[0], lambda t: t.detach().clone())
            optimizer.step()
            base.step(other)
            assert torch.allclose(meant(parameter.grad), twin.detach() - before, rtol=1e-6, atol=1e-12)


def test_master_weights_say_what_was_meant():
    """An optimizer that keeps float32 weights means their change, whatever its rule."""

    class Master(torch.optim.Optimizer):
        """Adds 1e-4 to weights in float32, and rounds."""

        def step(self, closure=None):
            """Step."""
            for p in self.param_groups[0]["params"]:
                master = self.state[p].setdefault("master_param", p.detach().float().clone())
                master += 1e-4
                p.data.copy_(master)

    parameter = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = Master([parameter], {})
    parameter.grad = torch.ones(3).bfloat16()
    group = optimizer.param_groups[0]
    assert meant_update(optimizer, parameter, group, torch.Tensor.double) is None
    optimizer.step()
    meant = meant_update(optimizer, parameter, group, lambda t: t.detach().double().clone())
    optimizer.step()
    assert meant(parameter.grad).tolist() == pytest.approx([1e-4] * 3, rel=1e-3)


def watched(model, optimizer, x, *, pairs=None, steps=3, loss=lambda out: out.float().square().sum()):
    """Return the last record of a short run."""
    memory = MemoryWriter()
    with Exporter(model, backends=[memory], strict=True).watch(pairs=pairs):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
    return memory.records[-1]


def test_a_bfloat16_model_that_stands_still_is_told_so():
    """Everything is lost at a tiny learning rate; the run-level share is that of all entries."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4).bfloat16()
    record = watched(model, torch.optim.SGD(model.parameters(), lr=1e-7), torch.randn(8, 6).bfloat16())
    assert record.get("parameter.lost_share").as_dict() == {"weight": 1.0, "bias": 1.0}
    assert record.get("parameter.update_cosine").as_dict() == {"weight": None, "bias": None}
    assert (record.value("update.lost_share"), record.value("update.effectiveness")) == (1.0, 0.0)
    assert record.get("node.count") is None


def test_complex_weights_have_phases_and_magnitudes():
    """Means over nodes equal those of plain loops over the weights of the run."""

    class Turn(nn.Module):
        """Multiplies by complex weights."""

        def __init__(self):
            """Make nine nodes of two entries."""
            super().__init__()
            self.w = nn.Parameter(torch.randn(9, 2, dtype=torch.complex128))

        def forward(self, x):
            """Return |x w|."""
            return (self.w @ x.to(self.w.dtype)).abs()

    torch.manual_seed(0)
    model, x = Turn(), torch.randn(2, 5, dtype=torch.float64)
    start = model.w.detach().clone()
    record = watched(model, torch.optim.SGD(model.parameters(), lr=1e-2), x, steps=1)
    end = model.w.detach()
    gradient = (start - end) / 1e-2
    phase, magnitude, turned = [], [], []
    for before, after, g in zip(start.tolist(), end.tolist(), gradient.tolist(), strict=True):
        parts = [(w.conjugate() / abs(w) * one, abs(w)) for w, one in zip(before, g, strict=True)]
        phase.append(math.hypot(*(size * part.imag for part, size in parts)))
        magnitude.append(math.hypot(*(part.real for part, _ in parts)))
        angles = [cmath.phase(b / a) for a, b in zip(before, after, strict=True)]
        turned.append(math.sqrt(math.fsum(angle * angle for angle in angles) / len(angles)))
    assert record.value("phase.gradient") == pytest.approx(sum(phase) / 9, rel=1e-6)
    assert record.value("magnitude.gradient") == pytest.approx(sum(magnitude) / 9, rel=1e-6)
    assert record.value("phase.change") == pytest.approx(sum(turned) / 9, rel=1e-6)
    assert record.value("update.changed_nodes") == 9.0
    expected = stats.pearsonr(np.log(phase), np.log(magnitude)).statistic
    assert record.value("phase.correlation") == pytest.approx(expected, rel=1e-5)
    assert record.get("parameter.lost_share") is None


def test_named_pairs_are_phase_and_magnitude():
    """The gradients of a pair are read from its two parameters; the phase changes the short way round."""

    class Pair(nn.Module):
        """Holds phases and magnitudes."""

        def __init__(self):
            """Make three nodes."""
            super().__init__()
            self.phase = nn.Parameter(torch.tensor([3.0, 0.5, -1.0], dtype=torch.float64))
            self.size = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))

        def forward(self, x):
            """Return a sum of cosines."""
            return (self.size * torch.cos(self.phase) * x).sum()

    model, x = Pair(), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    record = watched(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), x, pairs=[("phase", "size")], steps=1, loss=lambda out: out
    )
    phases = [s * math.sin(p) * k for s, p, k in zip((1, 2, 3), (3.0, 0.5, -1.0), (1, 2, 3), strict=True)]
    sizes = [math.cos(p) * k for p, k in zip((3.0, 0.5, -1.0), (1, 2, 3), strict=True)]
    assert record.value("phase.gradient") == pytest.approx(sum(map(abs, phases)) / 3)
    assert record.value("magnitude.gradient") == pytest.approx(sum(map(abs, sizes)) / 3)
    assert record.value("phase.change") == pytest.approx(1e-3 * sum(map(abs, phases)) / 3)
    assert record.get("node.count").as_dict() == {"phase": 3.0}
    assert record.value("phase.correlation") is None


def test_totals_are_weighted_by_what_they_stand_for():
    """Lost shares by entries meant to change, effectiveness by entries, nodes by their number."""

    class Column:
        """Values at two sites."""

        sites = ("a", "b")

        def __init__(self, values, present=(True, True)):
            """Keep them."""
            self.values, self.present = np.array(values, dtype=float), np.array(present)

    columns = {
        "parameter.numel": Column([10, 30]), "parameter.master": Column([0, 0]), "parameter.intended_share": Column([1.0, 0.5]),
        "parameter.lost_share": Column([1.0, 0.2]), "parameter.update_effectiveness": Column([0.0, 0.8]),
        "parameter.lost_share_error": Column([0.0, 0.1]),
        "parameter.update_effectiveness_error": Column([0.04, 0.02], (True, False)),
        "node.count": Column([1, 3]), "node.changed_share": Column([1.0, 2 / 3]),
        "node.phase_gradient": Column([4.0, 8.0]), "node.magnitude_gradient": Column([1.0, 0.0], (True, False)),
        "node.phase_change": Column([0.0, 4.0]), "node.magnitude_change": Column([1.0, 1.0]),
    }  # fmt: skip
    got = {reading.metric: float(reading.values[0]) for reading in discrete_totals(columns)}
    assert got == pytest.approx(
        {
            "update.lost_share": (10 * 1.0 + 15 * 0.2) / 25, "update.effectiveness": 0.6, "phase.gradient": 7.0,
            "update.lost_share_error": 0.06, "update.effectiveness_error": 0.01,
            "phase.change": 3.0, "magnitude.gradient": 1.0, "magnitude.change": 1.0, "update.changed_nodes": 3.0,
        }
    )  # fmt: skip


def test_updates_of_master_weights_do_not_count_as_lost():
    """A parameter that the optimizer keeps in float32 is left out of the totals."""

    class Master(torch.optim.Optimizer):
        """Takes small steps in float32, and rounds."""

        def step(self, closure=None):
            """Step."""
            for p in self.param_groups[0]["params"]:
                master = self.state[p].setdefault("master_param", p.detach().float().clone())
                master -= 1e-7 * p.grad
                p.data.copy_(master)

    torch.manual_seed(0)
    model = nn.Linear(6, 4).bfloat16()
    record = watched(model, Master(model.parameters(), {}), torch.randn(8, 6).bfloat16())
    assert record.get("parameter.lost_share").as_dict() == {"weight": 1.0, "bias": 1.0}
    assert record.get("parameter.master").as_dict() == {"weight": 1.0, "bias": 1.0}
    assert record.value("update.lost_share") is None
