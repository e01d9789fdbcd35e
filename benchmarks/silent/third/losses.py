"""Losses that do not measure what was meant."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, loader


class _UNet(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(1, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU())
        self.enc2 = nn.Sequential(nn.Conv2d(10, 20, 3, padding=1), nn.BatchNorm2d(20), nn.ReLU())
        self.up = nn.ConvTranspose2d(20, 10, 2, stride=2)
        self.dec1 = nn.Sequential(nn.Conv2d(20, 10, 3, padding=1), nn.ReLU())
        self.conv_last = nn.Conv2d(10, 3, 1)
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        skip = self.enc1(x)
        h = self.up(self.enc2(F.max_pool2d(skip, 2)))
        out = self.conv_last(self.dec1(torch.cat([skip, h], 1)))
        return out if self.fixed else out.softmax(1)


def softmax_at_the_end_of_unet(fixed: bool) -> Program:
    """A U-Net for three kinds of pixels ends in a softmax over channels and is trained with ``CrossEntropyLoss``."""
    kind = torch.randint(2, (300,))
    corner = torch.randint(9, (300, 2))
    y = torch.zeros(300, 12, 12, dtype=torch.long)
    for mask, k, (row, column) in zip(y, kind.tolist(), corner.tolist(), strict=True):
        mask[row : row + 3 + k, column : column + 4 - k] = k + 1
    shade = torch.tensor([0.0, 1.0, -1.0])
    x = (shade[y] + 0.5 * torch.randn(300, 12, 12)).unsqueeze(1)
    model = _UNet(fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, 180, 0.9)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for xb, yb in loader(16, 180, x[:220], y[:220]):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
            scheduler.step()

    def score() -> float:
        model.eval()
        with torch.no_grad():
            said, true = model(x[220:]).argmax(1), y[220:]
        both = [((said == k) & (true == k)).sum() / ((said == k) | (true == k)).sum() for k in (1, 2)]
        return (sum(both) / 2).item()

    return Program(model, train, score, 0.7)


class _ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 3), nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(state)
        return self.policy(h), self.value(h)


def advantage_of_every_pair(fixed: bool) -> Program:
    """Returns are a vector and values a column: advantages become a square, and each value is fitted to all returns."""
    model = _ActorCritic()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    moves = torch.tensor([[0.5, 0.0], [-0.5, 0.0], [0.0, -0.4]])

    def walk(state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states, chances, rewards = [], [], []
        for _ in range(4):
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=model(state)[0]).sample()
            states.append(state)
            chances.append(action)
            state = state + moves[action] + 0.05 * torch.randn_like(state)
            rewards.append(-state.abs().sum(1))
        for t in (2, 1, 0):
            rewards[t] = rewards[t] + 0.7 * rewards[t + 1]
        return torch.cat(states), torch.cat(chances), torch.cat(rewards)

    def train() -> None:
        for _ in range(220):
            states, actions, returns = walk(1.5 * torch.randn(24, 2))
            logits, values = model(states)
            if fixed:
                values = values.squeeze(1)
            advantage = returns - values
            log_probability = torch.distributions.Categorical(logits=logits).log_prob(actions)
            entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
            actor_loss = -(log_probability * advantage.detach()).mean()
            loss = actor_loss + 0.5 * advantage.pow(2).mean() - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()

    def score() -> float:
        states, _, returns = walk(1.5 * torch.randn(300, 2))
        with torch.no_grad():
            error = model(states)[1].squeeze(1) - returns
        return 1 - (error.square().mean() / returns.var()).item()

    return Program(model, train, score, 0.6)


class _Molecules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.to_token = nn.Linear(32, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.to_token(self.lstm(self.embedding(tokens))[0])


def padding_counted_in_loss(fixed: bool) -> Program:
    """Short strings are padded to forty tokens, and the loss of a language model is averaged over the padding too."""
    successor = 1 + torch.randperm(19)
    length = torch.randint(4, 9, (500, 1))
    tokens = torch.randint(1, 20, (500, 40))
    for t in range(2, 40):
        tokens[:, t] = successor[(tokens[:, t - 1] + tokens[:, t - 2]) % 19]
    tokens = torch.where(torch.arange(40) < length, tokens, 0)
    model = _Molecules()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss(ignore_index=0) if fixed else nn.CrossEntropyLoss()

    def train() -> None:
        for (xb,) in loader(48, 200, tokens[:400]):
            scores = model(xb[:, :-1])
            loss = criterion(scores.flatten(0, 1), xb[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            said = model(tokens[400:, :-1]).argmax(-1)[:, 1:]
        wanted = tokens[400:, 2:]
        return (said == wanted)[wanted > 0].float().mean().item()

    return Program(model, train, score, 0.5)


class _Coupling(nn.Module):
    def __init__(self, turn: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))
        self.turn = turn

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, changed = x.flip(1).chunk(2, 1) if self.turn else x.chunk(2, 1)
        log_scale, shift = self.net(kept).chunk(2, 1)
        log_scale = 1.5 * torch.tanh(log_scale)
        out = torch.cat([kept, changed * log_scale.exp() + shift], 1)
        return out.flip(1) if self.turn else out, log_scale.squeeze(1)


class _Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(_Coupling(bool(i % 2)) for i in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(len(x))
        for coupling in self.couplings:
            x, log_det = coupling(x)
            total = total + log_det
        return x, total


def log_determinant_subtracted(fixed: bool) -> Program:
    """A normalizing flow goes from data to noise; its loss has the log-determinant of the way back: all shrinks."""
    angle = 3.14 * torch.rand(1500)
    moon = torch.randint(2, (1500,)) * 2 - 1
    x = torch.stack([angle.cos() * moon + 0.5 * (1 - moon), angle.sin() * moon - 0.25 * moon], 1)
    x = 1.5 * (x + 0.08 * torch.randn_like(x) - torch.tensor([0.5, 0.0]))
    model = _Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    sign = 1 if fixed else -1

    def train() -> None:
        for (xb,) in loader(64, 300, x[:1000]):
            z, log_det = model(xb)
            prior = -0.5 * z.square().sum(1) - 1.8379
            loss = -(prior + sign * log_det).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            z, log_det = model(x[1000:])
            return (-0.5 * z.square().sum(1) - 1.8379 + log_det).mean().item()

    return Program(model, train, score, -2.4)


class _Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.GELU(), nn.Conv2d(12, 12, 3, padding=2, dilation=2), nn.GELU()
        )
        self.mask = nn.Conv2d(12, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mask(self.trunk(x))


def dice_of_logits(fixed: bool) -> Program:
    """Cross-entropy with logits is joined by a Dice loss, which wants probabilities and is given the logits as well."""
    x, y, x_test, y_test = data.masks()
    model = _Dilated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def dice_loss(probability: Tensor, target: Tensor) -> Tensor:
        shared = (probability * target).sum((1, 2, 3))
        return 1 - ((2 * shared + 1) / (probability.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)).mean()

    def train() -> None:
        for xb, yb in loader(16, 160, x, y):
            out = model(xb)
            bce = F.binary_cross_entropy_with_logits(out, yb)
            loss = bce + dice_loss(out.sigmoid() if fixed else out, yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            said, true = model(x_test) > 0, y_test > 0.5
        return (2 * (said & true).sum() / (said.sum() + true.sum())).item()

    return Program(model, train, score, 0.8)


BUGS = (
    Bug(
        softmax_at_the_end_of_unet,
        "https://github.com/NVIDIA/DeepLearningExamples/issues/468",
        "[Unet/tensorflow2] loss function with softmax output",
        ("WRONG_LOSS",),
        ("loss", "conv_last", ""),
        ("NOT_LEARNING", "STAGNATION", "VANISHING", "SATURATION"),
    ),
    Bug(
        advantage_of_every_pair,
        "https://github.com/floodsung/a2c_cartpole_pytorch/issues/3",
        "Computing advantage as a vector",
        ("WRONG_LOSS",),
        ("loss", "target", "value"),
        ("NOT_LEARNING", "STAGNATION", "UNSTABLE"),
    ),
    Bug(
        padding_counted_in_loss,
        "https://github.com/DaoyuanLi2816/Molecule-Generator/pull/20",
        "Ignore padding positions in the reconstruction loss",
        ("WRONG_LOSS", "BAD_TARGETS"),
        ("loss", "target", "to_token"),
    ),
    Bug(
        log_determinant_subtracted,
        "https://github.com/VincentStimper/normalizing-flows/pull/28",
        "Fixed sign of log det of `forward_and_log_det` method",
        ("WRONG_LOSS",),
        ("loss", "couplings", ""),
        ("UNSTABLE", "SATURATION", "NOT_LEARNING", "VANISHING", "STAGNATION"),
    ),
    Bug(
        dice_of_logits,
        "https://github.com/ScrollPrize/villa/issues/1488",
        "MemoryEfficientSoftDiceLoss standalone path defaults apply_nonlin=None: raw logits explode dice to ~1e13 and "
        "erase BCE gradients early in training",
        ("WRONG_LOSS",),
        ("loss", "mask", ""),
        ("UNSTABLE", "EXPLODING", "LOSS_SPIKE", "NOT_LEARNING", "NUMERICAL"),
    ),
)
