"""Values known from theory or publications, within the stated tolerance."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from gradflow_export import Exporter, GradientGainMonitor, MemoryWriter
from gradflow_export.metrics.arrays.norms import l2_norms
from gradflow_export.metrics.gains import depth_gain, gains, log_gains, summary_stats
from gradflow_export.metrics.logits import LOGIT_METRICS, logit_statistics
from gradflow_export.metrics.outputs import rank_of_spectrum, ranks
from gradflow_export.metrics.units import dead_shares, greatest_outputs, zero_share
from gradflow_export.records.statistics import Welford, theil_sen, theil_sen_bounds

DEPTH = 12


def chain(weights, dtype):
    """Return linear layers without bias that hold the given weights."""
    layers = nn.ModuleList(nn.Linear(w.shape[1], w.shape[0], bias=False) for w in weights).to(dtype)
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data = weight.to(dtype)
    return layers


def gains_of(layers, x, activation=lambda h: h, **arguments):
    """Return the monitor after one backward pass through layers."""
    with GradientGainMonitor(layers, **arguments) as monitor:
        for layer in layers:
            x = activation(layer(x))
        x.square().sum().backward()
    return monitor


def orthogonal(width, count):
    """Return random orthogonal float64 matrices."""
    torch.manual_seed(0)
    return [torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q for _ in range(count)]


@pytest.mark.parametrize("g", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_a_deep_linear_net_has_gain_g(g, dtype, tolerance):
    """With W = g times orthogonal every gain is g and the depth gain (N - 1) ln g (Saxe et al. 2014)."""
    layers = chain([g * q for q in orthogonal(16, DEPTH)], dtype)
    monitor = gains_of(layers, torch.randn(7, 16, dtype=dtype))
    assert monitor.gains() == pytest.approx([g] * (DEPTH - 1), rel=tolerance * (1 if dtype is torch.float64 else 2))
    whole = depth_gain(monitor.norms())
    assert whole.total == pytest.approx((DEPTH - 1) * math.log(g), abs=tolerance * DEPTH)
    assert whole.slope == pytest.approx(-math.log(g), abs=tolerance * DEPTH)


@pytest.mark.parametrize("kind", ["l2", "l1", "linf", "mean"])
def test_every_norm_type_gives_the_gain_of_a_scaled_identity(kind):
    """Norms are homogeneous: W = 0.7 I has gain 0.7 in all four."""
    layers = chain([0.7 * torch.eye(8) for _ in range(5)], torch.float32)
    torch.manual_seed(0)
    assert gains_of(layers, torch.randn(3, 8), norm_type=kind).gains() == pytest.approx([0.7] * 4, rel=1e-6)


def test_weight_gradients_do_not_show_uniform_vanishing():
    """First and last weight gradient are equal although the gradient halves per layer: gains must use dL/dh."""
    layers = chain([0.5 * q for q in orthogonal(16, DEPTH)], torch.float64)
    monitor = gains_of(layers, torch.randn(7, 16, dtype=torch.float64))
    first, last = l2_norms([layers[0].weight.grad, layers[-1].weight.grad]).tolist()
    assert first / last == pytest.approx(1.0, rel=1e-9)
    assert monitor.norms()[0] / monitor.norms()[-1] == pytest.approx(0.5 ** (DEPTH - 1), rel=1e-9)


def test_hand_made_norms_are_counted_by_the_rules():
    """Norms 0.5, 1, 0, 2, none, 4 give gains 0.5, inf, 0, none, none, each counted once."""
    norms = [0.5, 1.0, 0.0, 2.0, None, 4.0]
    assert gains(norms) == [0.5, math.inf, 0.0, None, None]
    counted = summary_stats(norms)
    assert [counted[f"num_{k}"] for k in ("healthy", "vanishing", "damping", "missing", "amplifying")] == [
        1,
        1,
        1,
        2,
        0,
    ]
    assert counted["mean_gain"] == 0.25
    assert (counted["min_gain"], counted["max_gain"]) == (0.0, 0.5)
    assert gains([2.0, 1.0]) == [2.0]
    assert summary_stats([2.0, 1.0])["num_healthy"] == 1


def test_the_printed_logarithms_of_the_document():
    """ln 0.9542, ln 1.0234, ln 0.8876 and their mean are those printed, correctly rounded."""
    ratios = [0.9542, 1.0234, 0.8876]
    norms = [math.prod(ratios[k:]) for k in range(4)]
    assert log_gains(norms) == pytest.approx([-0.0469, 0.0231, -0.1192], abs=1e-4)
    assert summary_stats(norms)["mean_gain"] == pytest.approx(0.95507, abs=1e-4)


def test_the_total_norm_is_that_of_torch_in_float64():
    """Norms of all parameters together equal get_total_norm and the norm of everything joined."""
    torch.manual_seed(0)
    gradients = [torch.randn(s) for s in ((40, 30), (7,), (3, 4, 5), (100,))]
    wide = [g.double() for g in gradients]
    together = l2_norms([l2_norms(gradients)]).item()
    assert together == pytest.approx(nn.utils.get_total_norm(wide).item(), rel=1e-6)
    assert together == pytest.approx(torch.cat([g.flatten() for g in wide]).norm().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.full((4,), 1e-25), 2e-25),
        (torch.full((4,), 1e25), 2e25),
        (torch.full((70_000,), 300.0, dtype=torch.float16), math.sqrt(70_000) * 300),
        (torch.full((70_000,), 1.0, dtype=torch.bfloat16), math.sqrt(70_000)),
        (torch.full((4,), 1e-200, dtype=torch.float64), 2e-200),
        (torch.full((4,), 5e-23), 1e-22),
    ],
)
def test_norms_where_plain_float32_fails(tensor, expected):
    """No square under- or overflows; half precision is summed in float32, which rounds by up to 1e-4."""
    tolerance = 1e-4 if tensor.itemsize == 2 else 1e-5
    assert l2_norms([tensor]).item() == pytest.approx(expected, rel=tolerance)


def mean_field(sigma_w, activation, derivative):
    """Return sqrt(chi) at the fixed point of the length map (Schoenholz et al. 2017), by quadrature."""
    from scipy import integrate, optimize  # here, as every process collects this file, and few run it

    def expected(f, q):
        def integrand(z):
            return f(math.sqrt(q) * z) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

        return integrate.quad(integrand, -10, 10)[0]

    def residual(q):
        return sigma_w**2 * expected(lambda h: activation(h) ** 2, q) - q

    q = optimize.brentq(residual, 1e-9, 50) if residual(1e-9) > 0 > residual(50) else 1e-12
    return math.sqrt(sigma_w**2 * expected(lambda h: derivative(h) ** 2, q))


def sigmoid(h):
    """Return the logistic function of a number."""
    return 1 / (1 + math.exp(-h))


FIELDS = [
    ("relu", math.sqrt(2), 1.0),
    ("relu", 1.0, math.sqrt(0.5)),
    ("relu", math.sqrt(18), 3.0),
    ("sigmoid", 1.0, 0.23605),
    ("sigmoid", 4.0, 0.63157),
    ("tanh", 0.5, 0.5),
    ("tanh", 2.0, 1.16734),
]


@pytest.mark.parametrize(("name", "sigma_w", "root_chi"), FIELDS)
def test_random_nets_have_the_gain_of_mean_field_theory(name, sigma_w, root_chi):
    """At width 1000 the gains are sqrt(chi) within 3 % (He et al. 2015, Glorot and Bengio 2010, Schoenholz et al.)."""
    torch.manual_seed(0)
    width, depth = 1000, 14
    layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
    for layer in layers:
        nn.init.normal_(layer.weight, std=sigma_w / math.sqrt(width))
    x = torch.randn(8, width) * 0.5
    with GradientGainMonitor(layers) as monitor:
        for layer in layers:
            x = getattr(torch, name)(layer(x))
        (x * torch.randn_like(x)).sum().backward()
    measured = monitor.gains()[3:-2]
    assert math.exp(np.mean(np.log(measured))) == pytest.approx(root_chi, rel=0.03)


def test_the_mean_field_numbers_are_those_of_quadrature():
    """The constants above follow from the length map and its slope."""
    for sigma_w, root_chi in ((1.0, 0.23605), (4.0, 0.63157)):
        slope = mean_field(sigma_w, sigmoid, lambda h: sigmoid(h) * (1 - sigmoid(h)))
        assert slope == pytest.approx(root_chi, rel=1e-3)
    for sigma_w, root_chi in ((0.5, 0.5), (2.0, 1.16734)):
        slope = mean_field(sigma_w, math.tanh, lambda h: 1 - math.tanh(h) ** 2)
        assert slope == pytest.approx(root_chi, rel=1e-3)


def test_zero_and_dead_shares_of_shifted_units():
    """With b = -0.5 |w| a unit is zero with probability Phi(0.5) but alive; with b = -30 |w| it is dead for sure."""
    torch.manual_seed(0)
    x, weights = torch.randn(200_000, 16), torch.randn(8, 16)
    size = weights.norm(dim=1)
    sparse = torch.relu(x @ weights.T - 0.5 * size)
    assert zero_share(sparse).item() == pytest.approx(0.69146, abs=0.005)
    assert dead_shares([greatest_outputs(sparse, -1)]).item() == 0.0
    dead = torch.relu(x @ weights.T - 30 * size)
    assert zero_share(dead).item() == 1.0
    assert dead_shares([greatest_outputs(dead, -1)]).item() == 1.0
    assert dead_shares([torch.tensor([math.nan, 0.0, 1.0, -math.inf])]).item() == 0.5


@pytest.mark.parametrize(
    ("logits", "entropy"),
    [([2.0] + [0.0] * 7, 0.788399), ([0.3] * 8, 1.0), ([1000.0] + [0.0] * 7, 0.0), ([1e4, -1e4], 0.0)],
)
def test_normalised_entropy_of_known_logits(logits, entropy):
    """ln Z - E[logit] over ln K: 1 when uniform, 0 when one-hot, and finite at extreme logits."""
    measured = logit_statistics(torch.tensor([logits]))[LOGIT_METRICS.index("confidence.entropy")]
    assert measured.item() == pytest.approx(entropy, abs=1e-6)


def test_effective_ranks_of_known_spectra():
    """n for equal singular values, 1 for one, 1.88988 for (2, 1) (Roy and Vetterli 2007)."""
    assert rank_of_spectrum(np.ones(7)) == pytest.approx(7, rel=1e-5)
    assert rank_of_spectrum(np.array([3.0, 0.0, 0.0])) == pytest.approx(1, rel=1e-5)
    assert rank_of_spectrum(np.array([2.0, 1.0])) == pytest.approx(1.88988, rel=1e-5)
    assert ranks(np.vstack([np.eye(5), -np.eye(5)]))[0] == pytest.approx(5, rel=1e-5)
    assert ranks(np.outer([1.0, 2.0, -3.0], [1.0, 1.0]))[0] == pytest.approx(1, rel=1e-5)
    assert ranks(np.array([[2.0, 0], [-2, 0], [0, 1], [0, -1]]))[0] == pytest.approx(1.88988, rel=1e-5)


class Constant(nn.Module):
    """A model whose gradient is the same in every step."""

    def __init__(self, slope):
        super().__init__()
        self.w, self.slope = nn.Parameter(torch.zeros(len(slope))), slope

    def forward(self):
        return (self.w * self.slope).sum()


def update_norms(make, steps):
    """Return update norms and gradient norm of a constant gradient under an optimizer."""
    torch.manual_seed(0)
    model, memory = Constant(torch.randn(1000)), MemoryWriter()
    optimizer = make(model.parameters())
    with Exporter(model, backends=memory, intervals={"updates": 1}, alerts_enabled=False, strict=True).watch():
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
    updates = [record.value("parameter.update_norm", "w") for record in memory.records]
    return updates, memory.records[0].value("parameter.gradient_norm", "w")


def test_an_sgd_update_is_lr_times_gradient():
    """Update norm over lr times gradient norm is 1 for SGD and tends to 1 / (1 - beta) with momentum."""
    updates, gradient = update_norms(lambda p: torch.optim.SGD(p, lr=0.125), 3)
    assert [u / (0.125 * gradient) for u in updates] == pytest.approx([1, 1, 1], rel=1e-5)
    updates, gradient = update_norms(lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.9), 5)
    expected = [(1 - 0.9**t) / 0.1 for t in range(1, 6)]
    assert [u / (0.125 * gradient) for u in updates] == pytest.approx(expected, rel=1e-5)


def test_adams_first_update_is_lr_times_root_n():
    """Every entry moves by lr in the first step of Adam."""
    updates, _ = update_norms(lambda p: torch.optim.Adam(p, lr=1e-3), 1)
    assert updates[0] == pytest.approx(1e-3 * math.sqrt(1000), rel=1e-3)


def test_one_spike_in_twenty_has_the_greatest_possible_variation():
    """CV is at most sqrt(n): 4.472 with ddof=1 for n = 20 (Katsnelson and Kotz 1957)."""
    running = Welford()
    for value in [1.0] + [0.0] * 19:
        running.add(value)
    assert running.std / running.mean == pytest.approx(math.sqrt(20), rel=1e-12)


@pytest.mark.parametrize("offset", [0.0, 1e9])
def test_welford_equals_numpy(offset):
    """Mean, deviation and extremes are those of numpy, also far from zero; NaN and Inf are counted apart."""
    values = np.random.default_rng(0).normal(size=500) + offset
    running = Welford()
    for value in [*values, math.nan, math.inf]:
        running.add(float(value))
    assert (running.count, running.nonfinite) == (500, 2)
    assert running.mean == pytest.approx(values.mean(), rel=1e-12)
    assert running.std == pytest.approx(values.std(ddof=1), rel=1e-6)
    assert (running.low, running.high) == (values.min(), values.max())


def test_theil_sen_ignores_spikes_that_bias_least_squares():
    """Slope 2 with unit noise and three spikes of 300 is found within 0.05."""
    generator = np.random.default_rng(0)
    x = np.arange(60.0)
    y = 2 * x + generator.normal(size=60)
    y[[40, 50, 55]] += 300
    assert theil_sen(x, y) == pytest.approx(2.0, abs=0.05)
    assert abs(np.polyfit(x, y, 1)[0] - 2) > 0.3


@pytest.mark.parametrize("n", [2, 3, 10, 41])
def test_theil_sen_equals_scipy(n):
    """Slope and 95 % bounds are those of scipy.stats.theilslopes."""
    from scipy import stats

    generator = np.random.default_rng(n)
    x, y = np.sort(generator.normal(size=n)), generator.normal(size=n)
    slope, low, high = theil_sen_bounds(x, y)
    reference = stats.theilslopes(y, x, 0.95)
    assert theil_sen(x, y) == slope == pytest.approx(reference.slope)
    if n >= 10:
        assert (low, high) == pytest.approx((reference.low_slope, reference.high_slope))
