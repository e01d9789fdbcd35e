"""Chance that goes on in evaluation, and wiring that hides from a network what it needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, explained, loader


class _Tasks(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 24)
        self.encoder = nn.GRU(24, 24, batch_first=True)
        self.scoring_list = nn.ModuleList([nn.Linear(24, 3), nn.Linear(24, 2)])
        dropouts = [nn.Dropout(0.4), nn.Dropout(0.4)]
        self.dropout_list = nn.ModuleList(dropouts) if fixed else dropouts

    def forward(self, tokens: Tensor) -> list[Tensor]:
        h = self.encoder(self.embedding(tokens))[0].mean(1)
        return [score(drop(h)) for score, drop in zip(self.scoring_list, self.dropout_list, strict=True)]


def dropout_in_plain_list(fixed: bool) -> Program:
    """Dropouts of several tasks stand in a Python list, where ``eval()`` does not reach them: answers vary."""
    x, y, x_test, y_test = data.sentences()
    model = _Tasks(fixed)
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)

    def right() -> float:
        model.eval()
        with torch.no_grad():
            share = (model(x_test)[0].argmax(1) == y_test).float().mean().item()
        model.train()
        return share

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(32, 120, x, y)):
            first, second = model(xb)
            loss = F.cross_entropy(first, yb) + 0.5 * F.cross_entropy(second, (yb > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 25 == 24:
                right()

    return Program(model, train, right, 0.75)


class _NoisyDense(nn.Module):
    def __init__(self, inputs: int, outputs: int, fixed: bool) -> None:
        super().__init__()
        self.mean = nn.Linear(inputs, outputs)
        self.sigma = nn.Parameter(torch.full((outputs, inputs), 0.5 / inputs**0.5))
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        if self.fixed and not self.training:
            return self.mean(x)
        return F.linear(x, self.mean.weight + self.sigma * torch.randn_like(self.sigma), self.mean.bias)


def exploration_noise_in_evaluation(fixed: bool) -> Program:
    """Noisy layers explore in training and go on exploring when the agent is judged: the same play ends differently."""
    model = nn.Sequential(_NoisyDense(4, 32, fixed), nn.ReLU(), _NoisyDense(32, 3, fixed))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def judge() -> float:
        return accuracy(model, *data.arms(600))

    def train() -> None:
        for step in range(240):
            model.train()
            state, best = data.arms(64)
            with torch.no_grad():
                action = model(state).argmax(1)
            reward = (action == best).float()
            q = model(state).gather(1, action[:, None]).squeeze(1)
            optimizer.zero_grad()
            F.mse_loss(q, reward).backward()
            optimizer.step()
            if step % 40 == 39:
                judge()

    return Program(model, train, judge, 0.75)


class _Router(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 32)
        self.choose = nn.Linear(32, 4)
        self.paths = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)
        self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.embed(x))
        logits = self.choose(h)
        if self.fixed and not self.training:
            gate = F.one_hot(logits.argmax(1), 4).float()
        else:
            gate = F.gumbel_softmax(logits, hard=True)
        mixed = sum(gate[:, i : i + 1] * path(h) for i, path in enumerate(self.paths))
        return self.head(self.norm(h + mixed))


def gumbel_route_in_evaluation(fixed: bool) -> Program:
    """A path through the network is drawn by Gumbel noise in evaluation too, where the best one was to be taken."""
    x, y, x_test, y_test = data.digits()
    model = _Router(fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 180, x, y)):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            if step % 40 == 39:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Video(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.cnn = nn.Sequential(nn.Linear(2, 16), nn.ReLU())
        self.LSTM = nn.LSTM(16, 32, batch_first=fixed)
        self.fc = nn.Linear(32, 1)

    def forward(self, clips: Tensor) -> Tensor:
        return self.fc(self.LSTM(self.cnn(clips))[0][:, -1])


def batch_taken_for_time(fixed: bool) -> Program:
    """An LSTM without ``batch_first`` runs from clip to clip, and the answer knows only the last frame of each clip."""
    x = torch.randn(700, 8, 2)
    y = x[:, :4, 0].mean(1, keepdim=True) * 2 + 0.1 * torch.randn(700, 1)
    model = _Video(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for xb, yb in loader(32, 200, x[:500], y[:500]):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x[500:], y[500:]), 0.7)


class _Padded(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 24, padding_idx=30)
        self.query = nn.Parameter(0.1 * torch.randn(1, 1, 24))
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.norm, self.classify = nn.LayerNorm(24), nn.Linear(24, 3)
        self.fixed = fixed

    def forward(self, tokens: Tensor) -> Tensor:
        x, padding = self.embedding(tokens), tokens == 30
        mask = padding if self.fixed else ~padding
        pooled = self.attention(self.query.expand(len(x), -1, -1), x, x, mask, need_weights=False)[0]
        return self.classify(self.norm(pooled.squeeze(1)))


def mask_the_wrong_way_round(fixed: bool) -> Program:
    """True in ``key_padding_mask`` means to look away; given for the words, it leaves only padding to look at."""
    x, y, x_test, y_test = data.sentences()

    def padded(x: Tensor) -> Tensor:
        places = torch.arange(14)
        x = F.pad(x, (0, 2), value=30)
        return torch.where(places < torch.randint(8, 13, (len(x), 1)), x, 30)

    x, x_test = padded(x), padded(x_test)
    model = _Padded(fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(32, 140, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.7)


def keep_probability_as_dropout(fixed: bool) -> Program:
    """A network comes from a library that names the share it keeps; here 0.95 is the share that is dropped."""
    x, y, x_test, y_test = data.waves()
    keep = 0.95
    drop = 1 - keep if fixed else keep
    model = nn.Sequential(
        nn.Linear(8, 48), nn.ReLU(), nn.Dropout(drop), nn.Linear(48, 48), nn.ReLU(), nn.Dropout(drop), nn.Linear(48, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(32, 200, x, y)):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()
            if step % 50 == 49:
                explained(model, x_test, y_test)

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.6)


BUGS = (
    Bug(
        dropout_in_plain_list,
        "https://github.com/namisan/mt-dnn/issues/45",
        "Evaluation mode ignored for dropout list",
        ("EVAL_RANDOM",),
        ("", "dropout_list", "scoring_list"),
    ),
    Bug(
        exploration_noise_in_evaluation,
        "https://github.com/IntelLabs/coach/issues/368",
        "NoisyNetDense noise added to evaluations",
        ("EVAL_RANDOM",),
        ("", "0", "2"),
    ),
    Bug(
        gumbel_route_in_evaluation,
        "https://github.com/uzh-rpg/svit/issues/8",
        "Different strategies during training and inference",
        ("EVAL_RANDOM",),
        ("", "choose"),
    ),
    Bug(
        batch_taken_for_time,
        "https://github.com/HHTseng/video-classification/issues/42",
        "Possible bug in DecoderRNN class",
        ("NOT_LEARNING",),
        ("", "loss", "LSTM", "input"),
    ),
    Bug(
        mask_the_wrong_way_round,
        "https://github.com/facebookresearch/detr/issues/96",
        "Question about mask variable in transformer",
        ("NOT_LEARNING", "NOT_TRAINING"),
        ("", "loss", "embedding", "query", "attention"),
        ("VANISHING", "DEAD", "STAGNATION"),
    ),
    Bug(
        keep_probability_as_dropout,
        "https://github.com/hassony2/kinetics_i3d_pytorch/issues/6",
        "Dropout: opposite meaning?",
        ("NOT_LEARNING",),
        ("", "loss", "2", "5"),
        ("UNSTABLE",),
    ),
)
