"""Further cases with a known answer, each named after its number in the list of ground truth, with its tolerance."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize
from scipy.sparse.linalg import eigs
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, GradientGainMonitor, MemoryWriter
from gradflow_export.metrics.arrays.norms import l2_norms
from gradflow_export.metrics.discrete import update_scores
from gradflow_export.metrics.jacobian import Linearized, spectrum
from gradflow_export.metrics.recurrent import Layer, largest_lyapunov, run
from gradflow_export.metrics.vector import circulation, gradient_field, noise_scale

COSINE = 4


def linear(matrix):
    """Return the Jacobian object of ``x -> matrix x``."""
    x = torch.zeros(matrix.shape[1], dtype=torch.float64, requires_grad=True)
    return Linearized([x], [torch.as_tensor(matrix) @ x])


def hessian_of(loss, parameter):
    """Return the Hessian that the package finds."""
    return gradient_field([loss], [[parameter]])[1].dense()


def watched(model, make, loss_of, steps):
    """Return the records of some steps with everything read at each of them."""
    memory, optimizer = MemoryWriter(), make(model.parameters())
    every = {"updates": 1, "discrete": 1, "statistics": 1}
    with Exporter(model, backends=memory, intervals=every, alerts_enabled=False, strict=True).watch():
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    return memory.records


@pytest.mark.parametrize("g", [0.5, 1.0, 2.0])
def test_g1_the_mean_gain_of_a_float32_net_is_g(g):
    """G1 in float32: single gains carry the rounding of the matrices, their geometric mean is g within 1e-6."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(12))
    for layer in layers:
        layer.weight.data = (g * torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64)).Q).float()
    x = torch.randn(7, 16)
    with GradientGainMonitor(layers) as monitor:
        for layer in layers:
            x = layer(x)
        x.square().sum().backward()
    assert math.exp(monitor.summary_stats()["mean_log_gain"]) == pytest.approx(g, rel=1e-6)


def test_g5c_a_gaussian_matrix_of_seed_0():
    """Entries N(0, 1/200) of NumPy's seed 0 have spectral radius 1.06564, as SciPy's Arnoldi finds it."""
    matrix = np.random.default_rng(0).standard_normal((200, 200)) / math.sqrt(200)
    found = spectrum(linear(matrix)).spectral_radius
    assert found == pytest.approx(1.06564, abs=5e-6)
    assert found == pytest.approx(
        np.abs(eigs(matrix, k=6, ncv=60, v0=np.ones(200), return_eigenvectors=False)).max(), rel=1e-6
    )


@pytest.mark.parametrize(("sigma_w", "length", "root_chi"), [(1.0, 0.26469, 0.23605), (4.0, 5.855, 0.63157)])
def test_g6b_length_and_slope_of_sigmoid_nets(sigma_w, length, root_chi):
    """The fixed point of the length map and the gain there, by quadrature (Schoenholz et al. 2017)."""

    def mean_of(f, q):
        weight = lambda z: f(1 / (1 + math.exp(-math.sqrt(q) * z))) * math.exp(-z * z / 2)  # noqa: E731 - an integrand
        return integrate.quad(weight, -10, 10)[0] / math.sqrt(2 * math.pi)

    q = optimize.brentq(lambda q: sigma_w**2 * mean_of(lambda s: s * s, q) - q, 1e-9, 50)
    assert q == pytest.approx(length, rel=2e-4)
    slope = sigma_w * math.sqrt(mean_of(lambda s: (s * (1 - s)) ** 2, q))
    assert slope == pytest.approx(root_chi, rel=1e-4)
    assert slope <= sigma_w / 4


def test_g6c_tanh_at_the_edge_of_chaos_keeps_the_gradient():
    """With sigma_w = 1 the fixed point is 0, where the gain is 1: measured with small inputs, within 3 %."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(8))
    for layer in layers:
        nn.init.normal_(layer.weight, std=1000**-0.5)
    x = 0.05 * torch.randn(8, 1000)
    with GradientGainMonitor(layers) as monitor:
        for layer in layers:
            x = torch.tanh(layer(x))
        (x * torch.randn_like(x)).sum().backward()
    assert math.exp(monitor.summary_stats()["mean_log_gain"]) == pytest.approx(1.0, rel=0.03)


def test_g10c_hutchinsons_variance():
    """One Rademacher probe estimates tr S with variance 2 (|S|_F^2 - sum S_ii^2): within five standard errors."""
    matrix = np.random.default_rng(0).standard_normal((50, 50))
    jacobian, probes = linear(matrix), 4000
    found = [-50 * circulation(jacobian, single=True, probes=1, seed=k).divergence for k in range(probes)]
    half = (matrix + matrix.T) / 2
    variance = 2 * (np.square(half).sum() - np.square(np.diag(half)).sum())
    assert np.mean(found) == pytest.approx(np.trace(half), abs=5 * math.sqrt(variance / probes))
    assert np.var(found) == pytest.approx(variance, rel=5 * math.sqrt(2 / probes))


def test_g11_hessians_of_linear_and_softmax_regression():
    """Least squares has 2 X'X / n, cross-entropy diag(p) - p p' in the logits."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    w = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert hessian_of((x @ w - y).square().mean(), w) == pytest.approx((2 * x.T @ x / 20).numpy(), abs=1e-10)
    z = torch.randn(5, dtype=torch.float64, requires_grad=True)
    p = z.detach().softmax(0)
    found = hessian_of(F.cross_entropy(z[None], torch.tensor([2])), z)
    assert found == pytest.approx((torch.diag(p) - torch.outer(p, p)).numpy(), abs=1e-10)


class Bowl(nn.Module):
    """``sum_i h_i w_i^2 / 2``, started at one."""

    def __init__(self, *curvature):
        super().__init__()
        self.w = nn.Parameter(torch.ones(len(curvature), dtype=torch.float64))
        self.h = torch.tensor(curvature, dtype=torch.float64)

    def forward(self):
        return (self.h * self.w.square()).sum() / 2


@pytest.mark.parametrize("rate", [0.3, 1.0, 1.9, 2.1])
def test_g11b_descent_on_a_quadratic_contracts_by_one_minus_rate_times_curvature(rate):
    """The gradient norm changes by |1 - rate| per step at curvature 1: stable up to 2, above it grows."""
    records = watched(Bowl(1.0), lambda p: torch.optim.SGD(p, lr=rate), lambda m: m(), 5)
    norms = [record.value("gradient.total_norm") for record in records]
    assert norms == pytest.approx([abs(1 - rate) ** k for k in range(5)], rel=1e-6, abs=1e-12)


def test_g11b_above_the_inverse_curvature_successive_gradients_oppose():
    """With rate times the greatest curvature at 1.99 the cosine of successive gradients tends to -1, at 0.5 to 1."""
    for rate, cosine in ((1.99, -1.0), (0.5, 1.0)):
        records = watched(Bowl(1.0, 0.5), lambda p, rate=rate: torch.optim.SGD(p, lr=rate), lambda m: m(), 40)
        assert records[-1].value("gradient.cosine") == pytest.approx(cosine, abs=1e-4)


def test_g12_noise_scale_of_640_000_samples():
    """The two-batch estimator finds signal 1.89, noise 2.9 and 1.5344 samples within 2 % (McCandlish et al. 2018)."""
    rng = np.random.default_rng(0)
    gradients = (0.3 + rng.standard_normal((640_000, 3)) * np.sqrt([0.5, 0.2, 0.1])) * [1.0, 2.0, 4.0]
    small, big = (np.square(gradients.reshape(-1, n, 3).mean(axis=1)).sum(axis=1).mean() for n in (8, 64))
    found = noise_scale(small, big, 8, 64)
    assert (found.signal, found.noise, found.samples) == pytest.approx((1.89, 2.9, 1.5344), rel=0.02)


class Slope(nn.Module):
    """A model whose gradient is the same in every step."""

    def __init__(self, size):
        super().__init__()
        self.w, self.slope = nn.Parameter(torch.zeros(size)), torch.randn(size)

    def forward(self):
        return (self.w * self.slope).sum()


def test_g17_update_over_rate_times_gradient():
    """It is 1 for SGD, tends to 10 with momentum 0.9, and is sqrt(n) / ||g|| in Adam's first step."""
    torch.manual_seed(0)
    model = Slope(1000)

    def ratios(make, steps):
        records = watched(model, make, lambda m: m(), steps)
        return [record.value("parameter.rate_effectiveness", "w") for record in records]

    assert ratios(lambda p: torch.optim.SGD(p, lr=0.125), 3) == pytest.approx([1, 1, 1], rel=1e-5)
    nn.init.zeros_(model.w)
    momentum = ratios(lambda p: torch.optim.SGD(p, lr=0.125, momentum=0.9), 130)
    assert momentum[4] == pytest.approx((1 - 0.9**5) / 0.1, rel=1e-5)
    assert momentum[-1] == pytest.approx(10, rel=1e-5)
    nn.init.zeros_(model.w)
    (adam,) = ratios(lambda p: torch.optim.Adam(p, lr=1e-3), 1)
    assert adam == pytest.approx(math.sqrt(1000) / model.slope.norm().item(), rel=1e-3)


def test_g17_direction_of_adams_first_update():
    """cos(update, -gradient) is E|g| / rms(g), 0.80 for normal entries."""
    torch.manual_seed(0)
    model = Slope(100_000)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model().backward()
    optimizer.step()
    g = model.slope
    cosine = update_scores([model.w.detach()], [-1e-3 * g])[COSINE, 0].item()
    assert cosine == pytest.approx((g.abs().mean() / g.square().mean().sqrt()).item(), abs=1e-3)
    assert cosine == pytest.approx(math.sqrt(2 / math.pi), abs=0.005)


def test_g18_one_gradient_among_twenty_zeros():
    """The spread over parameters divides by n: at most sqrt(n - 1) times the mean, attained by one spike."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(20))
    (record,) = watched(model, lambda p: torch.optim.SGD(p, lr=0.0), lambda m: m[7].sum() + 0 * sum(m), 1)
    ratio = record.value("gradient.std_norm") / record.value("gradient.mean_norm")
    assert ratio == pytest.approx(math.sqrt(19), rel=1e-6)


class Attends(nn.Module):
    """Attention with a bias on its keys, then a convolution with a bias before batch normalisation."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.conv, self.norm = nn.Conv1d(8, 6, 3), nn.BatchNorm1d(6)

    def forward(self, x):
        x = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        return self.norm(self.conv(x.transpose(1, 2)))


def test_g21_gradients_that_vanish_by_invariance():
    """Key bias and convolution bias before BatchNorm have gradient 0 up to rounding, beside their weights'."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 9, 8), torch.randn(4, 6, 7)
    make = lambda p: torch.optim.SGD(p, lr=0.0)  # noqa: E731 - what watched takes
    (record,) = watched(Attends(), make, lambda m: (m(x) * y).sum(), 1)
    norm = lambda name: record.value("parameter.gradient_norm", name)  # noqa: E731 - a short name for a long one
    assert norm("k.bias") < 1e-4 * norm("k.weight")
    assert norm("conv.bias") < 1e-4 * norm("conv.weight")
    assert norm("q.bias") > 1e-2 * norm("q.weight")


def last_gradient(depth, pre, seed, width=128):
    """Return the gradient norm of the last layer's second matrix in the setting of Xiong et al. 2020."""
    torch.manual_seed(seed)
    weights = [[torch.randn(width, width) / math.sqrt(width) for _ in range(3)] for _ in range(depth)]
    last = weights[-1][2].requires_grad_()
    norm = lambda x: F.layer_norm(x, (width,))  # noqa: E731 - the formula's own letter
    x = torch.randn(4, 8, width)
    for value, up, down in weights:
        for part in (
            lambda x, value=value: (x @ value).mean(dim=1, keepdim=True).expand_as(x),
            lambda x, up=up, down=down: torch.relu(x @ up) @ down,
        ):
            x = x + part(norm(x)) if pre else norm(x + part(x))
    logits = (norm(x) if pre else x) @ torch.randn(width, 10) / math.sqrt(width)
    F.cross_entropy(logits.flatten(0, 1), torch.randint(10, (32,))).backward()
    return l2_norms([last.grad]).item()


@pytest.mark.parametrize(("pre", "slope", "tolerance"), [(True, -0.5, 0.1), (False, 0.0, 0.25)])
def test_g22_last_layer_gradients_of_pre_and_post_ln_transformers(pre, slope, tolerance):
    """Over depths 2 to 32 the norm falls as 1 / sqrt(L) with Pre-LN and does not with Post-LN (theorem 1)."""
    depths = (2, 4, 8, 16, 32)
    sizes = [np.mean([math.log(last_gradient(depth, pre, seed)) for seed in range(6)]) for depth in depths]
    assert np.polyfit(np.log(depths), sizes, 1)[0] == pytest.approx(slope, abs=tolerance)


@pytest.mark.parametrize("bias", [0.0, 1.0, 3.0])
def test_g24_the_forget_gate_in_float64(bias):
    """With all weights 0, dc_5/dc_0 is sigma(forget bias)^5 within 1e-6."""
    gates = np.zeros(16)
    gates[4:8] = bias
    layer = Layer("LSTM", np.zeros((16, 2)), np.zeros((16, 4)), gates, np.zeros(16), None)
    steps = run(layer, np.ones((5, 1, 2)), np.zeros((1, 8)), [5])
    kept = (1 / (1 + math.exp(-bias))) ** 5
    product = np.linalg.multi_dot([step.jacobian(0) for step in reversed(steps)])
    assert np.diag(product)[4:] == pytest.approx(np.full(4, kept), abs=1e-6)
    assert math.exp(5 * largest_lyapunov([steps], [[5]])) == pytest.approx(kept, abs=1e-6)


def test_g4_twenty_steps_of_a_permutation():
    """Twenty steps of 0.9 times a permutation leave 0.9^20 = 0.121577 of every direction."""
    permutation = 0.9 * np.eye(8)[np.random.default_rng(0).permutation(8)]
    layer = Layer("RNN_RELU", np.zeros((8, 1)), permutation, np.zeros(8), np.zeros(8), None)
    steps = run(layer, np.ones((20, 1, 1)), np.ones((1, 8)), [20])
    product = np.linalg.multi_dot([step.jacobian(0) for step in reversed(steps)])
    v = np.random.default_rng(1).standard_normal(8)
    assert np.linalg.norm(product @ v) / np.linalg.norm(v) == pytest.approx(0.121577, abs=1e-6)


@pytest.mark.parametrize(("heads", "bound"), [(2, 0.5), (4, 1 / 3), (8, 2 / 7), (16, 4 / 15)])
def test_variance_across_heads_cannot_tell_heads_apart(heads, bound):
    """The greatest variance of numbers in [0, 1] over H heads, half zeros and half ones, is H / (4 (H - 1))."""
    assert np.var([0.0, 1.0] * (heads // 2), ddof=1) == pytest.approx(bound)
    assert np.var(np.random.default_rng(0).random((1000, heads)), axis=1, ddof=1).max() <= bound


def test_a_nan_that_relu_hides_is_counted_where_it_is():
    """ReLU's backward turns NaN into 0 at units that rest: what lies behind looks finite, what lies before does not."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)

    def loss_of(model):
        return (model(torch.ones(3, 2)) * math.nan).sum()

    (record,) = watched(model, lambda p: torch.optim.SGD(p, lr=0.0), loss_of, 1)
    finite = {
        name: math.isfinite(record.value("parameter.gradient_norm", name)) for name, _ in model.named_parameters()
    }
    assert finite == {"0.weight": True, "0.bias": True, "2.weight": False, "2.bias": False}
    assert record.value("gradient.nonfinite") == 2.0
