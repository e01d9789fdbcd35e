"""Recurrent programs: cells in loops, stacked and bidirectional layers, long and short memory, chaos."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from common import Case, Program, Proof, Stack, adamw, cut, fault, healthy, names, scale, sgd, squared_loss, wide
from proofs import learns, spikes, vanishing
from torch import Tensor, nn


class Reader(nn.Module):
    """A recurrent layer and a linear read-out of every state."""

    def __init__(self, rnn: nn.Module, out: int = 2) -> None:
        super().__init__()
        self.rnn = rnn
        self.read = nn.Linear(rnn.hidden_size * (2 if rnn.bidirectional else 1), out)

    def forward(self, x: Tensor) -> Tensor:
        """Read out every state."""
        return self.read(self.rnn(x)[0])


class Loop(nn.Module):
    """A cell in a Python loop."""

    def __init__(self, cell: nn.Module, out: int = 2) -> None:
        super().__init__()
        self.cell, self.read = cell, nn.Linear(cell.hidden_size, out)

    def forward(self, x: Tensor) -> Tensor:
        """Read out every state."""
        state, out = None, []
        for piece in x.unbind(1):
            state = self.cell(piece, state)
            out.append(self.read(state[0] if isinstance(state, tuple) else state))
        return torch.stack(out, 1)


class Layer(nn.Module):
    """One recurrent layer that hands on its outputs alone."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        return self.rnn(x)[0]


def echo(lag: int, n: int = 64, length: int = 24, d: int = 3) -> list[Any]:
    """Repeat an input some steps later."""
    x = torch.randn(n, length, d)
    y = torch.cat([torch.zeros(n, lag, 2), x[:, : length - lag, :2]], 1)
    return cut(16, x, y)


def signs(n: int = 64, length: int = 24) -> list[Any]:
    """Say at every step after the first half what the first input was."""
    x = 0.3 * torch.randn(n, length, 3)
    first = torch.randint(2, (n, 1, 2)) * 2.0 - 1
    x[:, :1, :2] = first
    y = torch.zeros(n, length, 2)
    y[:, length // 2 :] = first
    return cut(16, x, y)


def one_way(rnn: nn.Module) -> nn.Module:
    """Return layer 0 of a recurrent module, forward direction, as a module of its own in float64."""
    single = type(rnn)(
        rnn.input_size, rnn.hidden_size, **({"nonlinearity": rnn.nonlinearity} if isinstance(rnn, nn.RNN) else {})
    )
    state = rnn.state_dict()
    single.load_state_dict({name: state[name] for name in single.state_dict()})
    return single.double()


def dynamics(program: Program, find: str) -> tuple[float, float]:
    """Return median spectral radius of the exact state Jacobians of a sequence, and the largest Lyapunov exponent."""
    found = copy.deepcopy(program.model.get_submodule(find))
    module = found.double() if isinstance(found, nn.RNNCellBase) else one_way(found)
    hidden = module.hidden_size
    pair = isinstance(module, nn.LSTM | nn.LSTMCell)

    def advance(x: Tensor, z: Tensor) -> Tensor:
        parts = [p[None] for p in z.split(hidden)]
        if isinstance(module, nn.RNNCellBase):
            out = module(x[None], tuple(parts) if pair else parts[0])
        else:
            parts = [p[None] for p in parts]
            out = module(x[None, None], tuple(parts) if pair else parts[0])[1]
        return torch.cat([p.flatten() for p in out]) if pair else out.flatten()

    inputs = wide(program.batches[0][0])[0]
    z = torch.zeros(hidden * (2 if pair else 1), dtype=torch.float64)
    frame, total, radii = torch.eye(len(z), dtype=torch.float64), torch.zeros(len(z), dtype=torch.float64), []
    for x in inputs:
        matrix = torch.autograd.functional.jacobian(lambda s, x=x: advance(x, s), z)
        radii.append(float(torch.linalg.eigvals(matrix).abs().max()))
        frame, upper = torch.linalg.qr(matrix @ frame)
        total += upper.diagonal().abs().clamp_min(1e-300).log()
        z = advance(x, z).detach()
    return sorted(radii)[len(radii) // 2], float(total.max()) / len(inputs)


def forgets(find: str) -> Proof:
    """Return the proof that radius and growth are under 0.5 per step, and that the run fails at what needs memory."""

    def proof(case: Case) -> tuple[bool, dict[str, Any]]:
        radius, exponent = dynamics(case.build(), find)
        losses = case.build().train()
        good = radius < 0.5 and math.exp(exponent) < 0.5 and losses[-1] > 0.6 * losses[0]
        return good, {"radius": radius, "growth": math.exp(exponent), "loss": (losses[0], losses[-1])}

    return proof


def chaotic(find: str) -> Proof:
    """Return the proof that disturbances grow by over 12 % per step."""

    def proof(case: Case) -> tuple[bool, dict[str, Any]]:
        radius, exponent = dynamics(case.build(), find)
        return math.exp(exponent) > 1.12, {"radius": radius, "growth": math.exp(exponent)}

    return proof


def remembers(find: str, low: float = 0.78, high: float = 1.03) -> Any:
    """Return the proof that growth per step, composed over the sequence, lies well inside 0.75 to 1.05."""

    def proof(case: Case) -> tuple[bool, dict[str, Any]]:
        radius, exponent = dynamics(case.build(), find)
        return low < math.exp(exponent) < high, {"radius": radius, "growth": math.exp(exponent)}

    return proof


def gru_forgets() -> Program:
    """GRU whose update gate is shut by its bias: no state is carried."""
    m = Reader(nn.GRU(3, 24, batch_first=True))
    with torch.no_grad():
        m.rnn.bias_ih_l0[24:48] = -9.0
        m.rnn.weight_hh_l0.mul_(0.5)
    return Program(m, squared_loss, echo(10), adamw(m, 3e-3))


def bidirectional_forgets() -> Program:
    """Bidirectional LSTM with forget gates shut both ways."""
    m = Reader(nn.LSTM(3, 16, batch_first=True, bidirectional=True))
    with torch.no_grad():
        m.rnn.bias_ih_l0[16:32] = -9.0
        m.rnn.bias_ih_l0_reverse[16:32] = -9.0
    return Program(m, squared_loss, signs(), adamw(m, 3e-3))


def cell_forgets() -> Program:
    """Tanh cell in a loop whose recurrent weights are three tenths of the default."""
    m = Loop(nn.RNNCell(3, 24))
    scale(0.3, m.cell.weight_hh)
    return Program(m, squared_loss, echo(12), adamw(m, 3e-3))


def gru_chaos() -> Program:
    """GRU with recurrent weights twelve times the default: small differences grow."""
    m = Reader(nn.GRU(3, 32, batch_first=True))
    scale(12.0, m.rnn.weight_hh_l0)
    with torch.no_grad():
        m.rnn.bias_ih_l0[32:64] = -3.0
    return Program(m, squared_loss, echo(3, length=30), adamw(m, 1e-4))


def tanh_chaos() -> Program:
    """Tanh layer with Gaussian recurrent weights of gain 2.5 and weak inputs."""
    m = Reader(nn.RNN(3, 48, batch_first=True))
    with torch.no_grad():
        m.rnn.weight_hh_l0.copy_(2.5 * torch.randn(48, 48) / math.sqrt(48))
        m.rnn.weight_ih_l0.mul_(0.3)
    return Program(m, squared_loss, echo(3, length=40), adamw(m, 1e-4))


def relu_cell_grows() -> Program:
    """ReLU cell in a loop whose recurrent weights are a rotation of coordinates times 1.25."""
    m = Loop(nn.RNNCell(3, 24, nonlinearity="relu"))
    with torch.no_grad():
        m.cell.weight_hh.copy_(1.25 * torch.eye(24).roll(1, 0))
    return Program(m, squared_loss, echo(3, length=25), adamw(m, 1e-4))


def vanish_stacked_gru() -> Program:
    """Nine GRU layers on top of each other with weights a fifth of the default."""
    m = Stack([Layer(nn.GRU(3 if i == 0 else 16, 16, batch_first=True)) for i in range(9)], nn.Linear(16, 2))
    scale(0.2, *(p for n, p in m.layers.named_parameters() if "weight" in n))
    return Program(m, squared_loss, echo(1, length=10), sgd(m, 0.1), steps=25, blocks=names("layers", 9))


def spike_gru_target() -> Program:
    """A GRU's targets come in other units for one batch."""
    m = Reader(nn.GRU(3, 16, batch_first=True))

    def spoil(t: int, batch: Any) -> Any:
        return batch[0], batch[1] * (20 if t == 41 else 1)

    return Program(m, squared_loss, echo(1, length=12), adamw(m, 1e-2), spoil=spoil, steps=60, facts={"step": 41})


def ok_orthogonal_rnn() -> Program:
    """Tanh layer with orthogonal recurrent weights that repeats an input of two steps ago."""
    m = Reader(nn.RNN(3, 32, batch_first=True))
    nn.init.orthogonal_(m.rnn.weight_hh_l0)
    scale(0.7, m.rnn.weight_ih_l0)
    return Program(m, squared_loss, echo(2, length=16), adamw(m, 5e-3), steps=100)


def ok_open_lstm() -> Program:
    """LSTM with open forget gates that keeps a sign over half a sequence."""
    m = Reader(nn.LSTM(3, 24, batch_first=True))
    with torch.no_grad():
        m.rnn.bias_ih_l0[24:48] = 3.0
    return Program(m, squared_loss, signs(length=16), adamw(m, 1e-2), steps=80)


def ok_short_memory() -> Program:
    """Tanh layer of default weights for a task that needs the last input alone."""
    m = Reader(nn.RNN(3, 24, batch_first=True))
    return Program(m, squared_loss, echo(1, length=16), adamw(m, 1e-2), steps=80)


def ok_gru_cell() -> Program:
    """GRU cell in a loop, gradient clipped at 0.1, a slow gate."""
    m = Loop(nn.GRUCell(3, 24))
    with torch.no_grad():
        m.cell.bias_ih[24:48] = 2.0
    return Program(m, squared_loss, signs(length=14), adamw(m, 1e-2), clip=0.1, steps=80)


def ok_bidirectional_tagger() -> Program:
    """Bidirectional LSTM that smooths a signal with its future."""
    x = torch.randn(64, 16, 3)
    y = (x.roll(1, 1) + x.roll(-1, 1))[..., :2]
    y[:, 0], y[:, -1] = x[:, 1, :2], x[:, -2, :2]
    m = Reader(nn.LSTM(3, 24, batch_first=True, bidirectional=True))
    with torch.no_grad():
        m.rnn.bias_ih_l0[24:48] = 2.5
        m.rnn.bias_ih_l0_reverse[24:48] = 2.5
    return Program(m, squared_loss, cut(16, x, y), adamw(m, 1e-2), steps=120)


def ok_stacked_lstm_dropout() -> Program:
    """Two LSTM layers with dropout between, batches of four."""
    m = Reader(nn.LSTM(3, 24, num_layers=2, dropout=0.2, batch_first=True))
    with torch.no_grad():
        m.rnn.bias_ih_l0[24:48] = 2.5
        m.rnn.bias_ih_l1[24:48] = 2.5
    x, y = (torch.cat(part) for part in zip(*signs(length=12), strict=True))
    return Program(m, squared_loss, cut(8, x, y), adamw(m, 1e-2), steps=100)


WILD = "EXPLODING NUMERICAL LOSS_SPIKE UNSTABLE SATURATION"

CASES = (
    fault("RECURRENT_SUBCRITICAL", gru_forgets, forgets("rnn"), "rnn", "VANISHING SATURATION"),
    fault("RECURRENT_SUBCRITICAL", bidirectional_forgets, forgets("rnn"), "rnn", "VANISHING SATURATION"),
    fault("RECURRENT_SUBCRITICAL", cell_forgets, forgets("cell"), "cell", "VANISHING"),
    fault("RECURRENT_SUPERCRITICAL", gru_chaos, chaotic("rnn"), "rnn", WILD),
    fault("RECURRENT_SUPERCRITICAL", tanh_chaos, chaotic("rnn"), "rnn", WILD),
    fault("RECURRENT_SUPERCRITICAL", relu_cell_grows, chaotic("cell"), "cell", WILD),
    fault("VANISHING", vanish_stacked_gru, vanishing, " ".join(names("layers", 6)), "STAGNATION RECURRENT_SUBCRITICAL"),
    fault("LOSS_SPIKE", spike_gru_target, spikes, "", "UNSTABLE EXPLODING RECURRENT_SUBCRITICAL"),
    healthy(ok_orthogonal_rnn, learns(0.5, more=remembers("rnn"))),
    healthy(ok_open_lstm, learns(0.5, more=remembers("rnn"))),
    healthy(ok_short_memory, learns(0.3), "RECURRENT_SUBCRITICAL", "its radius is low, and the task asks for no more"),
    healthy(ok_gru_cell, learns(0.5, more=remembers("cell"))),
    healthy(ok_bidirectional_tagger, learns(0.5, more=remembers("rnn"))),
    healthy(ok_stacked_lstm_dropout, learns(0.6, more=remembers("rnn"))),
)
