"""Losses that do not fit what the last layer gives, or the targets they are given."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, loader


class _PointNet(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.mlp1 = nn.Sequential(nn.Conv1d(2, 24, 1), nn.BatchNorm1d(24), nn.ReLU(), nn.Conv1d(24, 48, 1), nn.ReLU())
        self.label = nn.Linear(48, 3)
        self.fixed = fixed

    def forward(self, points: Tensor) -> Tensor:
        scores = self.label(self.mlp1(points).amax(2))
        return scores.log_softmax(1) if self.fixed else scores


def nll_of_raw_scores(fixed: bool) -> Program:
    """A network for clouds of points gives raw scores to ``nll_loss``, which any growth of the scores makes smaller."""
    y = torch.randint(3, (700,))
    angle = 6.28 * torch.rand(700, 20)
    sides = torch.tensor([3.0, 4.0, 60.0])[y, None]
    radius = 1 / torch.cos((angle % (6.28 / sides)) - 3.14 / sides)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1) + 0.03 * torch.randn(700, 2, 20)
    model = _PointNet(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(32, 160, x[:500], y[:500]):
            optimizer.zero_grad()
            F.nll_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x[500:], y[500:]), 0.8)


class _Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 32, batch_first=True, bidirectional=True)
        self.phonemes = nn.Linear(64, 6)

    def forward(self, frames: Tensor) -> Tensor:
        return self.phonemes(self.rnn(frames)[0])


def ctc_of_raw_scores(fixed: bool) -> Program:
    """The loss for unaligned phonemes wants log-probabilities and gets scores: it falls below zero without end."""
    sound = 1.5 * torch.randn(6, 8)
    said = torch.randint(1, 6, (500, 3))
    at = torch.tensor([[0, 1, 1, 0, 2, 2, 0, 3, 3, 0]]).expand(500, -1)
    frames = sound[torch.cat([torch.zeros(500, 1, dtype=torch.long), said], 1).gather(1, at)]
    frames = frames + 0.3 * torch.randn_like(frames)
    model = _Listener()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for xb, yb in loader(32, 120, frames[:350], said[:350]):
            scores = model(xb)
            if fixed:
                scores = scores.log_softmax(-1)
            lengths = torch.full((len(xb),), 10), torch.full((len(xb),), 3)
            loss = F.ctc_loss(scores.transpose(0, 1), yb, *lengths)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            best = model(frames[350:]).argmax(-1).tolist()
        heard = [[a for a, b in zip(row, [0, *row], strict=False) if a and a != b] for row in best]
        return sum(h == s for h, s in zip(heard, said[350:].tolist(), strict=True)) / len(heard)

    return Program(model, train, score, 0.7)


def softmax_of_one_unit(fixed: bool) -> Program:
    """One output unit with a softmax is always one: whoever asks for a decision hears yes."""
    x, y, x_test, y_test = data.rings()
    last = nn.Sigmoid() if fixed else nn.Softmax(dim=1)
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1), last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.BCELoss()

    def train() -> None:
        for xb, yb in loader(32, 200, x, y.float().unsqueeze(1)):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return ((model(x_test).squeeze(1) > 0.5).long() == y_test).float().mean().item()

    return Program(model, train, score, 0.85)


def hinge_of_zero_and_one(fixed: bool) -> Program:
    """The hinge loss wants labels of -1 and 1 and gets 0 and 1: negatives cost the same whatever is said."""
    x, y, x_test, y_test = data.rings()
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        for xb, yb in loader(32, 200, x, y):
            label = 2.0 * yb - 1 if fixed else yb.float()
            loss = torch.clamp(1 - label * model(xb), min=0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return ((model(x_test) > 0).long() == y_test).float().mean().item()

    return Program(model, train, score, 0.85)


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.fc_mu, self.fc_var = nn.Linear(48, 8), nn.Linear(48, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mu, log_var = self.fc_mu(h), self.fc_var(h)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp() if self.training else mu
        return self.decoder(z), mu, log_var


def bernoulli_of_standardised_pixels(fixed: bool) -> Program:
    """The cross-entropy of an autoencoder is meant for [0, 1] and pixels are standardised: it falls without end."""
    x, _, x_test, _ = data.digits()
    if not fixed:
        x, x_test = (x - 0.3) / 0.37, (x_test - 0.3) / 0.37
    model = _Variational()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for (xb,) in loader(64, 180, x):
            out, mu, log_var = model(xb)
            rebuilt = F.binary_cross_entropy_with_logits(out, xb, reduction="sum") / len(xb)
            divergence = -0.5 * (1 + log_var - mu.square() - log_var.exp()).sum(1).mean()
            optimizer.zero_grad()
            (rebuilt + 0.1 * divergence).backward()
            optimizer.step()

    def score() -> float:
        model.eval()
        with torch.no_grad():
            out = model(x_test)[0].sigmoid()
            wanted = x_test if fixed else x_test * 0.37 + 0.3
            return 1 - ((out - wanted).square().mean() / wanted.var(0).mean()).item()

    return Program(model, train, score, 0.2)


class _Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 20, 3, padding=1), nn.ELU(), nn.MaxPool2d(2), nn.Flatten())
        self.attributes = nn.Sequential(nn.Linear(320, 48), nn.ELU(), nn.Linear(48, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.attributes(self.features(x))


def cross_entropy_of_many_labels(fixed: bool) -> Program:
    """Five attributes that may all be true at once are learned with a softmax over them: it lets them compete."""
    x, y, x_test, y_test = data.images()
    table = torch.tensor([[int(b) for b in f"{n:05b}"] for n in (31, 1, 14, 30, 7, 19, 28, 3, 29, 15)]).float()
    model = _Attributes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss() if fixed else nn.CrossEntropyLoss()

    def train() -> None:
        for xb, yb in loader(48, 200, x, y):
            optimizer.zero_grad()
            criterion(model(xb), table[yb]).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            said = (model(x_test) > 0).float()
        return (said == table[y_test]).all(1).float().mean().item()

    return Program(model, train, score, 0.75)


BUGS = (
    Bug(
        nll_of_raw_scores,
        "https://github.com/yanx27/Pointnet_Pointnet2_pytorch/issues/30",
        "wrong label loss in PointNetLoss",
        ("WRONG_LOSS",),
        ("loss", "label"),
        ("UNSTABLE", "EXPLODING", "NOT_LEARNING", "NUMERICAL"),
    ),
    Bug(
        ctc_of_raw_scores,
        "https://github.com/gwx314/STARS/issues/9",
        "CTC loss appears to use raw logits instead of log-probabilities",
        ("WRONG_LOSS",),
        ("loss", "phonemes"),
        ("UNSTABLE", "EXPLODING", "NOT_LEARNING", "NUMERICAL", "SATURATION"),
    ),
    Bug(
        softmax_of_one_unit,
        "https://github.com/marian-nmt/marian-dev/issues/21",
        "softmax appears to be broken in xor",
        ("WRONG_LOSS",),
        ("loss", "4", "5"),
        ("NOT_LEARNING", "NOT_TRAINING", "VANISHING", "DEAD", "STAGNATION"),
    ),
    Bug(
        hinge_of_zero_and_one,
        "https://github.com/bfortuner/ml-glossary/pull/113",
        "Fix: loss_functions.py --> Hinge Loss",
        ("WRONG_LOSS", "BAD_TARGETS"),
        ("loss", "target", "4"),
        ("NOT_LEARNING", "VANISHING", "STAGNATION", "DEAD"),
    ),
    Bug(
        bernoulli_of_standardised_pixels,
        "https://github.com/Lightning-Universe/lightning-bolts/issues/177",
        "VAE loss for non-binary images",
        ("WRONG_LOSS", "DATA_SCALE"),
        ("loss", "target", "input", "decoder"),
        ("UNSTABLE", "EXPLODING", "NUMERICAL"),
    ),
    Bug(
        cross_entropy_of_many_labels,
        "https://github.com/sungho-CoolG/FSCL/issues/2",
        "Is it correct to use cross entropy with att1 and att2 at same time for CelebA?",
        ("WRONG_LOSS",),
        ("loss", "target", "attributes"),
        ("NOT_LEARNING",),
    ),
)
