"""State Jacobians and what follows from them, against autograd in float64, against closed forms and against SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from gradflow_export.hooks.module_calls import ModuleCalls
from gradflow_export.instruments.recurrent import RecurrentInstrument
from gradflow_export.metrics.recurrent import Layer, criticality, dynamics, largest_lyapunov, memory_length, run
from gradflow_export.metrics.spectra import spectral_norm, spectral_radius

KINDS = {
    "tanh": lambda **given: nn.RNN(3, 5, **given),
    "relu": lambda **given: nn.RNN(3, 5, nonlinearity="relu", **given),
    "gru": lambda **given: nn.GRU(3, 5, **given),
    "lstm": lambda **given: nn.LSTM(3, 5, **given),
    "projected": lambda **given: nn.LSTM(3, 5, proj_size=2, **given),
}
EACH = pytest.mark.parametrize("kind", KINDS)


def layer_of(module, suffix="_l0"):
    """Return one layer's weights in float64."""
    found = [getattr(module, name + suffix, None) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    found.append(getattr(module, "weight_hr" + suffix, None))
    return Layer(module.mode, *(None if p is None else p.detach().double().numpy() for p in found))


def state_of(module, z):
    """Split a flat state into what the module takes."""
    width = module.proj_size or module.hidden_size
    return (z[None, :width], z[None, width:]) if module.mode == "LSTM" else z[None]


def flat(state):
    """Join what a module returns as its state."""
    return torch.cat([part[0] for part in state]) if isinstance(state, tuple) else state[0]


def true_jacobian(module, x, z):
    """Derive the new state by the old one with autograd."""
    return torch.autograd.functional.jacobian(lambda s: flat(module(x[None], state_of(module, s))[1]), z)


def captured(module, *calls, model=None):
    """Return what the instrument and its analysis make of calls of a module, ``(metric, site) -> value``."""
    tap = RecurrentInstrument(ModuleCalls(), model or module)
    with tap.attach():
        tap.arm(on=True)
        for call in calls:
            call()
        out = {}
        for sample in tap.drain():
            for metric, sites in sample.analyse(sample.values.numpy()).items():
                out |= {(metric, site): value for site, value in sites.items()}
    return out


@EACH
@pytest.mark.parametrize("bias", [True, False])
def test_step_and_jacobian_are_those_of_autograd(kind, bias):
    """States and dense one-step Jacobians agree with PyTorch's own module to rounding, along a sequence."""
    torch.manual_seed(1)
    module = KINDS[kind](bias=bias).double()
    layer, x = layer_of(module), torch.randn(6, 3, dtype=torch.float64)
    steps = run(layer, x[:, None].numpy(), np.zeros((1, layer.dimension)), [6])
    z = torch.zeros(layer.dimension, dtype=torch.float64)
    for time, step in enumerate(steps):
        np.testing.assert_allclose(step.jacobian(0), true_jacobian(module, x[time], z), atol=1e-14)
        direction = np.linspace(-1, 2, layer.dimension)[None]
        np.testing.assert_allclose(step.push(direction)[0], step.jacobian(0) @ direction[0], atol=1e-13)
        z = flat(module(x[time : time + 1], state_of(module, z))[1]).detach()
        np.testing.assert_allclose(step.state[0], z, atol=1e-14)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("batched", [True, False])
def test_a_loop_over_cells_is_one_sequence(cell, batched):
    """A Python loop over a cell gives what the same weights in one layer give over the whole sequence."""
    torch.manual_seed(2)
    module = cell(3, 5)
    whole = {"RNNCell": nn.RNN, "LSTMCell": nn.LSTM, "GRUCell": nn.GRU}[cell.__name__](3, 5)
    whole.load_state_dict({f"{name}_l0": value for name, value in module.state_dict().items()})
    x = torch.randn(12, 2, 3) if batched else torch.randn(12, 3)

    def loop():
        state = None
        for now in x:
            state = module(now, state) if state is not None else module(now)

    by_cell, at_once = captured(module, loop, loop), captured(whole, lambda: whole(x), lambda: whole(x))
    assert by_cell[("recurrent.length", cell.__name__)] == 12
    for (metric, _), value in at_once.items():
        assert by_cell[(metric, cell.__name__)] == pytest.approx(value, rel=1e-4), metric


@EACH
def test_every_layer_and_direction_gets_the_inputs_it_had(kind):
    """With two layers and both directions, each layer's radius is that of autograd at the states PyTorch went through."""
    torch.manual_seed(3)
    module = KINDS[kind](num_layers=2, bidirectional=True).double()
    x = torch.randn(5, 1, 3, dtype=torch.float64)  # so few states are all sampled
    found = captured(module, lambda: module(x))
    name = type(module).__name__
    assert {site for _, site in found} == {f"{name}.l{layer}{d}" for layer in (0, 1) for d in ("", "_reverse")}
    inputs = x
    for layer in (0, 1):
        outputs = []
        for suffix in (f"_l{layer}", f"_l{layer}_reverse"):
            single = KINDS[kind]().double() if layer == 0 else _wider(module, kind)
            names = {own: own.removesuffix("_l0") + suffix for own in single.state_dict()}
            single.load_state_dict({own: module.state_dict()[other] for own, other in names.items()})
            turned = inputs.flip(0) if suffix.endswith("reverse") else inputs
            radii, z = [], torch.zeros(layer_of(single).dimension, dtype=torch.float64)
            for now in turned[:, 0]:
                radii.append(float(torch.linalg.eigvals(true_jacobian(single, now, z)).abs().max()))
                z = flat(single(now[None], state_of(single, z))[1]).detach()
            measured = found[("recurrent.spectral_radius", f"{name}.{suffix[1:]}")]
            assert measured == pytest.approx(np.median(radii), rel=1e-9)
            out = single(turned)[0]
            outputs.append(out.flip(0) if suffix.endswith("reverse") else out)
        inputs = torch.cat(outputs, dim=2).detach()


def _wider(module, kind):
    width = 2 * (module.proj_size or module.hidden_size)
    mode = {"relu": {"nonlinearity": "relu"}, "projected": {"proj_size": 2}}.get(kind, {})
    return type(module)(width, 5, **mode).double()


@EACH
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences_end_where_they_end(kind, bidirectional):
    """A packed batch gives what its sequences, unpadded, give one by one: exponents are means over them."""
    torch.manual_seed(4)
    module = KINDS[kind](bidirectional=bidirectional)
    sequences = [torch.randn(length, 3) for length in (4, 9, 6)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    together = captured(module, lambda: module(packed))
    alone = [captured(module, lambda s=s: module(s)) for s in sequences]
    name = type(module).__name__
    for site in (name,) if not bidirectional else (f"{name}.l0", f"{name}.l0_reverse"):
        mean = np.mean([each[("recurrent.lyapunov", site)] for each in alone])
        assert together[("recurrent.lyapunov", site)] == pytest.approx(mean, rel=1e-5)
        assert together[("recurrent.length", site)] == 9
    if not bidirectional:
        padded = captured(module, lambda: module(pad_sequence(sequences)))
        assert padded[("recurrent.lyapunov", name)] != pytest.approx(mean, rel=1e-3)


@EACH
def test_a_given_state_is_where_the_sequence_begins(kind):
    """A state handed to the call is used, for both orders of dimensions, and sorted with a packed batch."""
    torch.manual_seed(5)
    module = KINDS[kind]()
    first, second = torch.randn(5, 2, 3), torch.randn(6, 2, 3)
    _, state = module(first)
    turned = KINDS[kind](batch_first=True)
    turned.load_state_dict(module.state_dict())
    expected = captured(module, lambda: module(second, state))
    assert captured(turned, lambda: turned(second.transpose(0, 1), state)) == expected
    packed = pack_sequence([second[:5, 0], second[:, 1]], enforce_sorted=False)
    parts = [second[:5, :1], second[:, 1:]]
    states = [
        tuple(s[:, k : k + 1] for s in state) if isinstance(state, tuple) else state[:, k : k + 1] for k in (0, 1)
    ]
    alone = [captured(module, lambda p=p, s=s: module(p, s)) for p, s in zip(parts, states, strict=True)]
    key = ("recurrent.lyapunov", type(module).__name__)
    assert captured(module, lambda: module(packed, state))[key] == pytest.approx(
        np.mean([a[key] for a in alone]), rel=1e-5
    )
    assert expected[key] != captured(module, lambda: module(second))[key]


@pytest.mark.parametrize("rho", [0.9, 0.75, 0.5])
def test_a_permutation_times_rho_decays_by_rho(rho):
    """A ReLU layer with W_hh = rho P and positive states has radius and decay rho; memory is ln 0.1 / ln rho."""
    torch.manual_seed(6)
    module = nn.RNN(2, 8, nonlinearity="relu", bias=False)
    with torch.no_grad():
        module.weight_hh_l0.copy_(torch.eye(8)[torch.randperm(8)] * rho)
        module.weight_ih_l0.fill_(1.0)
    found = captured(module, lambda: module(torch.rand(20, 3, 2) + 0.1))
    expected = {"spectral_radius": rho, "spectral_norm": rho, "decay": rho, "lyapunov": math.log(rho)}
    expected |= {"memory_length": math.log(0.1) / math.log(rho), "effective_rank": 8.0, "rank_share": 1.0}
    for name, value in expected.items():
        assert found[(f"recurrent.{name}", "RNN")] == pytest.approx(value, rel=1e-5), name


def test_memory_lengths_are_those_of_the_catalogue():
    """Ten per cent are left after 21.85, 8.00 and 3.32 steps; nothing decays at 1, everything at 0."""
    lengths = [memory_length(math.log(rho)) for rho in (0.9, 0.75, 0.5)]
    assert lengths == pytest.approx([21.854, 8.004, 3.322], abs=1e-3)
    assert memory_length(0.0) == math.inf
    assert memory_length(-math.inf) == 0.0
    assert math.isnan(memory_length(math.nan))
    assert [criticality(r) for r in (0.749, 0.751, 1.049, 1.051)] == [
        "SUBCRITICAL", "CRITICAL", "CRITICAL", "SUPERCRITICAL",
    ]  # fmt: skip


@pytest.mark.parametrize(("bias", "left"), [(0.0, 0.03125), (1.0, 0.208815), (3.0, 0.784321)])
def test_a_weightless_lstm_keeps_its_forget_gate(bias, left):
    """With all weights 0, dc_5/dc_0 = sigma(forget bias)^5, and that is what decay and exponent say."""
    module = nn.LSTM(2, 4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.bias_ih_l0[4:8] = bias
    layer = layer_of(module)
    steps = run(layer, np.ones((5, 1, 2)), np.zeros((1, 8)), [5])
    product = np.linalg.multi_dot([step.jacobian(0) for step in reversed(steps)])
    np.testing.assert_allclose(np.diag(product)[4:], left, rtol=1e-5)
    assert math.exp(5 * largest_lyapunov([steps], [[5]])) == pytest.approx(left, rel=1e-5)


def test_a_weightless_gru_keeps_its_update_gate():
    """With all weights 0 and update bias 2, dh_5/dh_0 = sigma(2)^5: PyTorch's convention, not the other."""
    module = nn.GRU(2, 4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.bias_ih_l0[4:8] = 2.0
    found = captured(module, lambda: module(torch.ones(5, 1, 2)))
    assert found[("recurrent.decay", "GRU")] ** 5 == pytest.approx(0.530126, rel=1e-5)


@pytest.mark.parametrize(("gain", "sign"), [(0.5, -1), (2.0, 1)])
def test_a_random_tanh_network_turns_chaotic_at_gain_one(gain, sign):
    """Without input the exponent of W ~ N(0, g^2/n) is negative for g < 1 and positive for g > 1."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        layer = Layer("RNN_TANH", np.zeros((64, 1)), rng.normal(0, gain / 8, (64, 64)))
        steps = run(layer, np.zeros((200, 1, 1)), rng.normal(0, 1, (1, 64)), [200])
        assert math.copysign(1, largest_lyapunov([steps], [[200]])) == sign


def test_the_exponent_is_that_of_the_whole_product():
    """Over a long sequence the exponent is that of sigma_max(J_T ... J_1), the product taken in one piece."""
    torch.manual_seed(7)
    for kind, make in KINDS.items():
        layer = layer_of(make().double())
        steps = run(layer, np.random.default_rng(0).normal(size=(60, 1, 3)), np.zeros((1, layer.dimension)), [60])
        product = np.eye(layer.dimension)
        for step in steps:
            product = step.jacobian(0) @ product
        norm = np.linalg.svd(product, compute_uv=False)[0]
        if norm > 0:
            assert largest_lyapunov([steps], [[60]]) == pytest.approx(math.log(norm) / 60, abs=0.05), kind


def test_the_stated_error_is_that_of_the_whole_batch():
    """States of one sequence are alike: what four of 32 sequences say is off by what tells sequences apart, too."""
    off, alone = [], []
    for seed in range(40):
        torch.manual_seed(seed)
        layer = layer_of(nn.GRU(3, 5).double())
        inputs = (torch.randn(12, 32, 3) * 3 * torch.rand(32, 1)).double().numpy()
        every = run(layer, inputs, np.zeros((32, 5)), [12] * 32)
        true = np.median([np.abs(np.linalg.eigvals(step.jacobian(row))).max() for step in every for row in range(32)])
        few = run(layer, inputs[:, :4], np.zeros((4, 5)), [12] * 4)
        for batch, out in ((32, off), (4, alone)):
            found = dynamics([few], [[12] * 4], batch)
            out.append((found.spectral_radius - true) / (true * found.radius_error))
    size, before = (float(np.sqrt(np.mean(np.square(each)))) for each in (off, alone))
    assert 0.5 < size < 1.8 < 2.2 < before, (size, before)


def test_the_stated_error_of_the_exponent_is_that_of_the_whole_batch():
    """Four of 32 sequences, and 24 of their 48 steps, are off by as much as is said; all of them by nothing."""
    off = []
    for seed in range(30):
        torch.manual_seed(seed)
        layer = layer_of(nn.GRU(3, 5).double())
        inputs = (torch.randn(48, 32, 3) * 3 * torch.rand(32, 1)).double().numpy()
        true = largest_lyapunov([run(layer, inputs, np.zeros((32, 5)), [48] * 32)], [[48] * 32])
        few = run(layer, inputs[:24, :4], np.zeros((4, 5)), [24] * 4)
        found = dynamics([few], [[24] * 4], 32, 48)
        off.append((found.lyapunov - true) / found.lyapunov_error)
        assert dynamics([few], [[24] * 4], 4, 24).lyapunov_error == 0.0
        assert 0 < dynamics([few], [[24] * 4], 4, 48).lyapunov_error < found.lyapunov_error
        assert dynamics([few[:1]], [[1] * 4], 32).lyapunov_error > 0
    assert 0.5 < float(np.sqrt(np.mean(np.square(off)))) < 2.0, off


@pytest.mark.parametrize("packed", [False, True])
def test_the_error_is_zero_only_where_every_sequence_was_taken(packed):
    """Nine short sequences have no more states than are looked at in four of them."""
    for count in (4, 9):
        module = nn.GRU(3, 5)
        inputs = torch.randn(6, count, 3)
        given = pack_sequence(list(inputs.unbind(1))) if packed else inputs
        found = captured(module, lambda module=module, given=given: module(given))
        assert (found["recurrent.spectral_radius_error", "GRU"] > 0) == (count > 4)
        for name in ("lyapunov", "decay", "memory_length"):
            assert (found[f"recurrent.{name}_error", "GRU"] > 0) == (count > 4)


def test_spectral_radius_of_known_matrices():
    """A complex pair, a non-normal block, zero, and Gaussian matrices agree with algebra and NumPy."""
    rotation = 0.9 * np.array([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]])
    assert spectral_radius(rotation) == pytest.approx(0.9, rel=1e-9)
    assert spectral_radius(np.array([[0.9, 5.0], [0.0, 0.9]])) == pytest.approx(0.9, rel=1e-6)
    assert spectral_norm(np.array([[0.9, 5.0], [0.0, 0.9]])) == pytest.approx(5.15707, rel=1e-5)
    assert spectral_radius(np.zeros((300, 300))) == 0.0
    hidden = np.zeros((300, 300))
    hidden[:2, :2] = rotation
    hidden[2:, 2:] = np.diag(np.linspace(0, 0.85, 298))
    assert spectral_radius(hidden) == pytest.approx(0.9, rel=1e-4)
    for seed in range(3):
        matrix = np.random.default_rng(seed).standard_normal((200, 200)) / math.sqrt(200)
        exact = np.abs(np.linalg.eigvals(matrix)).max()
        assert spectral_radius(matrix, dense=200) == pytest.approx(exact, rel=1e-12)
        assert spectral_radius(matrix, dense=0) == pytest.approx(exact, rel=1e-3)


def test_a_wide_layer_is_measured_without_all_its_singular_values():
    """Above 512 dimensions the rank is missing and the radius is that of all eigenvalues."""
    torch.manual_seed(8)
    module = nn.GRU(4, 520)
    found = captured(module, lambda: module(torch.randn(3, 1, 4)))
    assert ("recurrent.effective_rank", "GRU") not in found
    layer = layer_of(module)
    assert 0.5 < found[("recurrent.spectral_radius", "GRU")] < 0.8
    steps = run(layer, np.zeros((1, 1, 4)), np.zeros((1, 520)), [1])
    dense = np.abs(np.linalg.eigvals(steps[0].jacobian(0))).max()
    assert dynamics([steps], [[1]]).spectral_radius == pytest.approx(dense, rel=5e-3)
