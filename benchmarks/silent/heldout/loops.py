"""Missing non-linearities, gradients of yesterday, chance in evaluation, copies that drift apart."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, loader


class _Trajectories(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten())
        self.fc1 = nn.Linear(72 + 3, 64)
        self.fc2 = nn.Linear(64, 4)
        self.fixed = fixed

    def forward(self, image: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        h = self.fc1(torch.cat([self.backbone(image), state], 1))
        return self.fc2(torch.relu(h) if self.fixed else h)


def no_activation_between_linears(fixed: bool) -> Program:
    """Two linear layers follow each other in a network that predicts paths."""
    image, _, image_test, _ = data.images()
    state, state_test = torch.randn(len(image), 3), torch.randn(len(image_test), 3)

    def path(image: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        heading = image.mean((1, 2, 3))[:, None] * 4
        return torch.cat([state[:, :1] * state[:, 1:2], state[:, 1:2].abs(), heading, state[:, 2:].square()], 1)

    y, y_test = path(image, state), path(image_test, state_test)
    model = _Trajectories(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for ib, sb, yb in loader(48, 180, image, state, y):
            optimizer.zero_grad()
            F.smooth_l1_loss(model(ib, sb), yb).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            error = (model(image_test, state_test) - y_test).square().mean(0)
        return (1 - error / y_test.var(0)).mean().item()

    return Program(model, train, score, 0.6)


class _Head(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        between = [nn.ReLU()] if fixed else []
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(192, 64), *between, nn.Linear(64, 64), *[nn.ReLU() for _ in between],
            nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def no_activation_in_head(fixed: bool) -> Program:
    """Three linear layers make up the head of a classifier, with nothing between them."""
    x, y, x_test, y_test = data.images()
    model = _Head(fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for xb, yb in loader(48, 100, x, y):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _KeyWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.preprocessing = nn.Linear(2, 16)
        self.backbone = nn.GRU(16, 24, batch_first=True)
        self.classifier = nn.Linear(24, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.backbone(F.relu(self.preprocessing(x)))[0][:, -1])


def zero_grad_missing_clipped(fixed: bool) -> Program:
    """A spotter of key words clips its gradients, steps, and never clears them."""
    x, y, x_test, y_test = data.series()
    y, y_test = (y > 0).long().squeeze(1), (y_test > 0).long().squeeze(1)
    model = _KeyWords()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(32, 130, x, y):
            loss = F.cross_entropy(model(xb), yb)
            if fixed:
                optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            if torch.isfinite(norm):
                optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def zero_grad_every_epoch(fixed: bool) -> Program:
    """Gradients are cleared when an epoch begins and not when a batch does."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for _epoch in range(5):
            optimizer.zero_grad()
            for xb, yb in loader(56, 25, x, y):
                if fixed:
                    optimizer.zero_grad()
                criterion(model(xb), yb).backward()
                optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def zero_grad_missing_heatmap(fixed: bool) -> Program:
    """A detector of courts is trained on heat maps without one call of ``zero_grad``."""
    x, y, x_test, y_test = data.masks()
    y, y_test = (F.avg_pool2d(t, 3, stride=1, padding=1) for t in (y, y_test))
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(12), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(),
        nn.BatchNorm2d(12), nn.Conv2d(12, 1, 3, padding=1), nn.Sigmoid(),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.999))
    criterion = nn.MSELoss()

    def train() -> None:
        for xb, yb in loader(16, 100, x, y):
            if fixed:
                optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()

    def score() -> float:
        model.eval()
        with torch.no_grad():
            return 1 - ((model(x_test) - y_test).square().mean() / y_test.var()).item()

    return Program(model, train, score, 0.7)


class _SimpleNet(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 48, 3, padding=1),
            nn.BatchNorm2d(48), nn.ReLU(),
        )  # fmt: skip
        self.classifier = nn.Linear(48, 10)
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.features(x)
        out = F.max_pool2d(out, kernel_size=out.size()[2:])
        out = F.dropout2d(out, 0.1, training=self.training if self.fixed else True)
        return self.classifier(out.flatten(1))


def functional_dropout_always_on(fixed: bool) -> Program:
    """``F.dropout2d`` is told that it is training, always."""
    x, y, x_test, y_test = data.images()
    model = _SimpleNet(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for epoch in range(4):
            model.train()
            for xb, yb in loader(48, 29, x, y):
                optimizer.zero_grad()
                criterion(model(xb), yb).backward()
                optimizer.step()
            if epoch % 2:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Attention(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.dropout, self.fixed = 0.2, fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training or not self.fixed else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class _GPT(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 32)
        self.attention = _Attention(fixed)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.mlp(x))


def attention_dropout_in_evaluation(fixed: bool) -> Program:
    """``scaled_dot_product_attention`` is given its dropout in evaluation too."""
    tokens, tokens_test = data.text()
    model = _GPT(fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        loss = loss_of(tokens_test).item()
        model.train()
        return loss

    def train() -> None:
        for step, (batch,) in enumerate(loader(32, 110, tokens)):
            optimizer.zero_grad()
            loss_of(batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 25 == 24:
                evaluate()

    return Program(model, train, lambda: -evaluate(), -1.3)


class _Tied(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 48)
        nn.init.normal_(self.embedding.weight, std=0.15)
        self.body = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))
        self.lm_head = nn.Linear(48, 24, bias=False)
        self.lm_head.weight = self.embedding.weight if fixed else nn.Parameter(self.embedding.weight.detach().clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.body(self.embedding(tokens)))


def tied_head_is_a_copy(fixed: bool) -> Program:
    """The head should share the embedding's weight and begins with a copy of it."""
    tokens, tokens_test = data.text()
    model = _Tied(fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def train() -> None:
        for (batch,) in loader(32, 110, tokens):
            optimizer.zero_grad()
            F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            p = model(tokens_test[:, :-1]).softmax(-1)
            return p.gather(-1, tokens_test[:, 1:, None]).mean().item()

    return Program(model, train, score, 0.6)


BUGS = (
    Bug(
        no_activation_between_linears,
        "https://github.com/nutonomy/nuscenes-devkit/issues/728",
        "Potential bug in mtp.py",
        ("CAPACITY",),
        ("fc1", "fc2"),
    ),
    Bug(
        no_activation_in_head,
        "https://github.com/Nota-NetsPresso/netspresso-trainer/issues/320",
        "[BUG] There is no activation layer in FC !",
        ("CAPACITY",),
        ("head",),
    ),
    Bug(
        zero_grad_missing_clipped,
        "https://github.com/wenet-e2e/wekws/pull/73",
        "[fix bug] add optimizer.zero_grad() in kws/utils/executor.py",
        ("STALE_GRAD",),
        ("*", ""),
        ("UNSTABLE", "EXPLODING", "LOSS_SPIKE"),
    ),
    Bug(
        zero_grad_every_epoch,
        "https://github.com/salesforce/corr_based_prediction/issues/1",
        "Does the model need accumulate the gradients?",
        ("STALE_GRAD",),
        ("*", ""),
        ("UNSTABLE", "EXPLODING", "LOSS_SPIKE"),
    ),
    Bug(
        zero_grad_missing_heatmap,
        "https://github.com/yastrebksv/TennisCourtDetector/issues/7",
        'Why there is no "optimizer.zero_grad()" in base_trainer.py?',
        ("STALE_GRAD",),
        ("*", ""),
        ("UNSTABLE", "EXPLODING", "LOSS_SPIKE"),
    ),
    Bug(
        functional_dropout_always_on,
        "https://github.com/Coderx7/SimpleNet/issues/2",
        "Functional Dropout in evaluation mode",
        ("EVAL_RANDOM",),
        ("", "features", "classifier"),
    ),
    Bug(
        attention_dropout_in_evaluation,
        "https://github.com/pytorch/pytorch/issues/124464",
        "SDPA does not switch off dropout during evaluation",
        ("EVAL_RANDOM",),
        ("attention", ""),
    ),
    Bug(
        tied_head_is_a_copy,
        "https://github.com/NVIDIA/Megatron-LM/issues/656",
        "[BUG] LM head weights get untied while training with overlap",
        ("DESYNC",),
        ("embedding", "lm_head"),
    ),
)
