"""Losses that do not suit what they are fed, and targets that tell nothing."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, explained, loader


class _Activity(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv1d(1, 12, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2))
        self.conv2 = nn.Sequential(nn.Conv1d(12, 24, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(6))
        self.fc1 = nn.Sequential(nn.Linear(144, 48), nn.ReLU())
        self.fc2 = nn.Linear(48, 4)
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.fc2(self.fc1(self.conv2(self.conv1(x)).flatten(1)))
        return out if self.fixed else F.softmax(out, dim=1)


def softmax_before_cross_entropy(fixed: bool) -> Program:
    """A network for recognising activities ends in a softmax and is trained with ``CrossEntropyLoss``."""
    y = torch.randint(4, (900,))
    time = torch.arange(48) / 48
    x = torch.sin(6.28 * ((3 + 3 * y)[:, None] * time + torch.rand(900, 1))) + 0.5 * torch.randn(900, 48)
    x = x.unsqueeze(1)
    model = _Activity(fixed)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(32, 160, x[:600], y[:600])):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()
            if step % 50 == 49:
                accuracy(model, x[600:], y[600:])

    return Program(model, train, lambda: accuracy(model, x[600:], y[600:]), 0.85)


def tanh_for_labels_of_800(fixed: bool) -> Program:
    """A network that ends in tanh is to give numbers between 0 and 800."""
    x, y, x_test, y_test = data.waves()
    y, y_test = 400 + 400 * torch.tanh(0.7 * y), 400 + 400 * torch.tanh(0.7 * y_test)
    if fixed:
        y, y_test = y / 400 - 1, y_test / 400 - 1
    model = nn.Sequential(
        nn.Linear(8, 48), nn.LeakyReLU(), nn.Linear(48, 48), nn.LeakyReLU(), nn.Linear(48, 1), nn.Tanh()
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.MSELoss()

    def train() -> None:
        for xb, yb in loader(32, 180, x, y):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.6)


def kl_of_probabilities(fixed: bool) -> Program:
    """A student's softmax goes into ``KLDivLoss``, which wants its logarithm."""
    queries = torch.randn(600, 8, 6)
    teacher = 2 * torch.tanh(queries[..., 0]) + queries[..., 1] * queries[..., 2]
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    kl = nn.KLDivLoss(reduction="batchmean")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for q, labels in loader(32, 160, queries[:400], teacher[:400]):
            scores = model(q).squeeze(-1)
            student = scores.log_softmax(-1) if fixed else scores.softmax(-1)
            loss = kl(student, labels.softmax(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            student = model(queries[400:]).squeeze(-1).log_softmax(-1)
            return -kl(student, teacher[400:].softmax(-1)).item()

    return Program(model, train, score, -0.25)


class _Mobility(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 24, batch_first=True)
        self.dense = nn.Linear(24, 16)
        self.output = nn.Linear(16, 1)
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.dense(self.lstm(x)[0][:, -1]))
        return self.output(h) if self.fixed else F.relu(self.output(h))


def relu_on_regression_output(fixed: bool) -> Program:
    """A ReLU stands behind the last layer of a regression whose targets are standardised."""
    x, y, x_test, y_test = data.series()
    model = _Mobility(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()

    def train() -> None:
        for xb, yb in loader(32, 160, x, y):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.75)


class _TextTransformer(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.src_embed = nn.Embedding(30, 24)
        self.encoder = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.1, batch_first=True)
        self.fc = nn.Linear(24, 3)
        self.softmax = nn.LogSoftmax(dim=-1) if fixed else nn.Softmax(dim=-1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.softmax(self.fc(self.encoder(self.src_embed(tokens)).mean(1)))


def softmax_before_nll(fixed: bool) -> Program:
    """A text classifier gives probabilities to ``NLLLoss``, and its loss is negative from the start."""
    x, y, x_test, y_test = data.sentences()
    model = _TextTransformer(fixed)
    loss_op = nn.NLLLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(32, 110, x, y)):
            optimizer.zero_grad()
            loss_op(model(xb), yb).backward()
            optimizer.step()
            if step % 40 == 39:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.75)


class _Recommender(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(40, 8), nn.Embedding(50, 8)
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8), nn.ReLU())
        self.predict = nn.Linear(16, 1)
        self.fixed = fixed

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        u, i = self.user(user), self.item(item)
        out = self.predict(torch.cat([u * i, self.mlp(torch.cat([u, i], -1))], -1)).squeeze(-1)
        return out if self.fixed else torch.sigmoid(out)


def sigmoid_before_bce_with_logits(fixed: bool) -> Program:
    """A recommender ends in a sigmoid, and ``BCEWithLogitsLoss`` applies another."""
    taste, kind = torch.randn(40, 2), torch.randn(50, 2)
    user, item = torch.randint(40, (6000,)), torch.randint(50, (6000,))
    y = ((taste[user] * kind[item]).sum(1) > 0.8).float()
    model = _Recommender(fixed)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def train() -> None:
        for ub, ib, yb in loader(64, 250, user[:5000], item[:5000], y[:5000]):
            optimizer.zero_grad()
            criterion(model(ub, ib), yb).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            p = model(user[5000:], item[5000:])
            said = p > (0 if fixed else 0.5)
            true = y[5000:].bool()
        return 0.5 * ((said & true).sum() / true.sum() + (~said & ~true).sum() / (~true).sum()).item()

    return Program(model, train, score, 0.75)


def labels_all_ignored(fixed: bool) -> Program:
    """Only answers are to be learned, and the mark at which they begin is sought in vain: every label is ignored."""
    tokens, tokens_test = data.text()
    mark = 24
    tokens = torch.cat([tokens[:, :3], torch.full((len(tokens), 1), mark), tokens[:, 3:]], 1)
    model = nn.Sequential(nn.Embedding(26, 32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 26))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    response = mark if fixed else mark + 1

    def train() -> None:
        for (batch,) in loader(32, 110, tokens):
            after = (batch == response).cumsum(1) > 0
            labels = torch.where(after, batch, -100)[:, 1:]
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            loss = loss / (labels != -100).sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            p = model(tokens_test[:, :-1]).softmax(-1)
            return p.gather(-1, tokens_test[:, 1:, None]).mean().item()

    return Program(model, train, score, 0.5)


def labels_all_one_class(fixed: bool) -> Program:
    """Slow and fast programs are told apart by a limit for the logarithm of their time, and time itself is compared."""
    x, times, x_test, times_test = data.waves()
    times, times_test = torch.exp(times + 5), torch.exp(times_test + 5)
    limit = 5.0

    def label(t: torch.Tensor) -> torch.Tensor:
        return ((t.log() if fixed else t) > limit).long().squeeze(1)

    y, y_test = label(times), (times_test.log() > limit).long().squeeze(1)
    model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for xb, yb in loader(32, 150, x, y):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.8)


class _Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 12, 5, padding=2), nn.BatchNorm2d(12), nn.ReLU())
        self.classes = nn.Conv2d(12, 3, 5, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(self.body(x))


def view_instead_of_permute(fixed: bool) -> Program:
    """Scores ``[B, C, H, W]`` are brought to ``[pixels, C]`` with ``view``, which mixes pixels and classes."""
    x, y, x_test, y_test = data.masks()

    def label(y: torch.Tensor) -> torch.Tensor:
        right = torch.arange(12) > 5
        return (y[:, 0] * (1 + right)).long()

    def with_position(x: torch.Tensor) -> torch.Tensor:
        return x + torch.linspace(-0.8, 0.8, 12)

    model = _Segmenter()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.0, 1.0]))
    t, t_test = label(y), label(y_test)

    def train() -> None:
        for xb, tb in loader(16, 120, with_position(x), t):
            logits = model(xb)
            rows = logits.permute(0, 2, 3, 1).reshape(-1, 3) if fixed else logits.view(-1, 3)
            loss = criterion(rows, tb.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        model.eval()
        with torch.no_grad():
            said = model(with_position(x_test)).argmax(1)
            return sum((said[t_test == c] == c).float().mean().item() for c in range(3)) / 3

    return Program(model, train, score, 0.7)


BUGS = (
    Bug(
        softmax_before_cross_entropy,
        "https://github.com/jindongwang/Deep-learning-activity-recognition/issues/10",
        "Bug in code: F.softmax before nn.CrossEntropyLoss",
        ("WRONG_LOSS",),
        ("loss", "fc2", ""),
        ("NOT_LEARNING",),
    ),
    Bug(
        tanh_for_labels_of_800,
        "https://github.com/soumith/ganhacks/issues/75",
        "Activation functions for training and testing phases",
        ("WRONG_LOSS", "DATA_SCALE"),
        ("target", "loss", "4", "5"),
        ("NOT_LEARNING", "SATURATION", "VANISHING"),
    ),
    Bug(
        kl_of_probabilities,
        "https://github.com/sebastian-hofstaetter/matchmaker/issues/18",
        "typo in KLDivTeacherList?",
        ("WRONG_LOSS",),
        ("loss", "4"),
        ("NOT_LEARNING",),
    ),
    Bug(
        relu_on_regression_output,
        "https://github.com/ProteomicsML/ProteomicsML/pull/203",
        "Do not use ReLU activation for the final regression layer",
        ("WRONG_LOSS",),
        ("loss", "target", "output", ""),
        ("DEAD", "NOT_LEARNING", "DATA_SCALE"),
    ),
    Bug(
        softmax_before_nll,
        "https://github.com/AnubhavGupta3377/Text-Classification-Models-Pytorch/issues/9",
        "NLLLoss",
        ("WRONG_LOSS",),
        ("loss", "softmax", "fc"),
        ("NOT_LEARNING",),
    ),
    Bug(
        sigmoid_before_bce_with_logits,
        "https://github.com/yudi-mars/daisyRec/pull/15",
        "Do not need sigmoid because there is sigmoid in BCEWithLogitsLoss",
        ("WRONG_LOSS",),
        ("loss", "predict", ""),
        ("NOT_LEARNING",),
    ),
    Bug(
        labels_all_ignored,
        "https://github.com/unslothai/unsloth/issues/3198",
        "Unsloth: All labels in your dataset are -100. Training losses will be all 0",
        ("BAD_TARGETS",),
        ("target", "loss"),
        ("NOT_TRAINING", "NOT_LEARNING", "VANISHING", "STAGNATION", "DEAD"),
    ),
    Bug(
        labels_all_one_class,
        "https://github.com/Smadx/USTC-ML24-Fall/issues/35",
        "What to make of a loss of 0 and an accuracy of 1 (in Chinese)",
        ("BAD_TARGETS",),
        ("target",),
        ("VANISHING", "STAGNATION"),
    ),
    Bug(
        view_instead_of_permute,
        "https://github.com/voiler/IMPALA/issues/3",
        "Weired way of computing logits in model",
        ("NOT_LEARNING", "WRONG_LOSS", "BAD_TARGETS"),
        ("loss", "target", "classes"),
    ),
)
