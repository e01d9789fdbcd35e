"""Parameters that should learn and do not."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, loader


def weights_reset_every_epoch(fixed: bool) -> Program:
    """Each epoch begins with the initial weights again, because the training script starts anew from its checkpoint."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    initial = copy.deepcopy(model.state_dict())
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _epoch in range(12):
            if not fixed:
                model.load_state_dict(initial)
            for xb, yb in loader(64, 10, x, y):
                optimizer.zero_grad()
                loss = criterion(model(xb), yb)
                loss.backward()
                optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _FrontEnd(nn.Module):
    def __init__(self, learns: bool) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 1, 9))
        self.learns = learns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            unit = self.kernel / self.kernel.norm(dim=-1, keepdim=True)
        return F.conv1d(x, unit, stride=2).abs()


def filters_under_no_grad(fixed: bool) -> Program:
    """A learnable filter bank is normalised under ``no_grad``, so that its kernel never gets a gradient."""
    y = torch.randint(4, (600,))
    time = torch.arange(48) / 48
    x = torch.sin(6.28 * ((4 + 5 * y)[:, None] * time + torch.rand(600, 1))) + 0.7 * torch.randn(600, 48)
    x = x.unsqueeze(1)
    model = nn.Sequential(
        _FrontEnd(learns=fixed), nn.BatchNorm1d(8), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for xb, yb in loader(32, 120, x[:400], y[:400]):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x[400:], y[400:]), 0.75)


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(32, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.encoder(self.embedding(tokens))
        return self.fc(states.mean(1))


def groups_not_appended(fixed: bool) -> Program:
    """Of three groups of parameters with rates of their own the last one is built and never handed to the optimizer."""
    x, y, x_test, y_test = data.sentences()
    model = _Tagger()
    groups = []
    group = {"params": list(model.embedding.parameters()), "lr": 1e-2}
    groups.append(group)
    group = {"params": list(model.encoder.parameters()), "lr": 5e-3}
    groups.append(group)
    group = {"params": list(model.fc.parameters()), "lr": 1e-2}
    if fixed:
        groups.append(group)
    optimizer = torch.optim.AdamW(groups)

    def train() -> None:
        for xb, yb in loader(32, 100, x, y):
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.8)


class _Backboned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def unfreezing_skips_frozen(fixed: bool) -> Program:
    """The backbone is to be unfrozen after warm-up, by a function that passes over whatever is frozen."""
    x, y, x_test, y_test = data.images()
    model = _Backboned()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def set_trainable(flag: bool) -> None:
        for p in model.backbone.parameters():
            if p.requires_grad or fixed:
                p.requires_grad = flag

    def train() -> None:
        set_trainable(False)
        for step, (xb, yb) in enumerate(loader(48, 130, x, y)):
            if step == 20:
                set_trainable(True)
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def zero_grad_before_step(fixed: bool) -> Program:
    """The gradients are cleared between the backward pass and the step."""
    x, y, x_test, y_test = data.waves()
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train() -> None:
        for xb, yb in loader(32, 150, x, y):
            if fixed:
                optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            if not fixed:
                optimizer.zero_grad(set_to_none=False)
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return 1 - (criterion(model(x_test), y_test) / y_test.var()).item()

    return Program(model, train, score, 0.5)


class _Unmixing(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU())
        self.layer3 = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU())
        self.decoder = nn.Conv2d(16, 1, 1)
        self.whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer1(x)
        if self.whole:
            x = self.layer2(x)
        return self.decoder(self.layer3(x))


def layer_never_called(fixed: bool) -> Program:
    """A denoising network has three blocks, and its forward pass forgets the second."""
    x, _, x_test, _ = data.images()
    model = _Unmixing(whole=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for (xb,) in loader(32, 80, x):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb + 0.3 * torch.randn_like(xb)), xb)
            loss.backward()
            optimizer.step()

    def score() -> float:
        model.eval()
        with torch.no_grad():
            error = F.mse_loss(model(x_test + 0.3 * torch.randn_like(x_test)), x_test)
        return 1 - (error / x_test.var()).item()

    return Program(model, train, score, 0.5)


class _Listed(nn.Module):
    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.first = nn.Linear(64, 48)
        self.hidden = [nn.Linear(48, 48) for _ in range(3)]
        if registered:
            self.hidden = nn.ModuleList(self.hidden)
        self.head = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.head(x)


def layers_in_plain_list(fixed: bool) -> Program:
    """Three hidden layers stand in a Python list, where ``parameters()`` does not find them."""
    x, y, x_test, y_test = data.digits()
    model = _Listed(registered=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for xb, yb in loader(48, 180, x, y):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def pure_bfloat16(fixed: bool) -> Program:
    """The weights themselves are kept in bfloat16, where steps of a small rate are rounded away."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.uniform_(0.1, 0.2).mul_(torch.randn_like(layer.weight).sign())
    if not fixed:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, weight_decay=0.0)

    def train() -> None:
        for xb, yb in loader(64, 160, x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(xb if fixed else xb.bfloat16())
            loss = F.cross_entropy(logits.float(), yb)
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test if fixed else x_test.bfloat16(), y_test), 0.75)


class _Inverted(nn.Module):
    def __init__(self, inside: int, outside: int, kept: bool) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())
        self.project = nn.Sequential(nn.Conv2d(outside, outside, 1), nn.BatchNorm2d(outside))
        self.inside, self.outside, self.kept = inside, outside, kept
        if kept:
            self.shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.shortcut(x) if self.kept else nn.Conv2d(self.inside, self.outside, 1)(x)
        return self.project(self.expand(x)) + skip


def layer_made_in_forward(fixed: bool) -> Program:
    """The convolution of a residual block's shortcut is made anew in each forward pass."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        _Inverted(1, 12, kept=fixed), nn.MaxPool2d(2), _Inverted(12, 24, kept=fixed), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 110, x, y)):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            if step % 25 == 24:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


BUGS = (
    Bug(
        weights_reset_every_epoch,
        "https://github.com/flairNLP/flair/issues/1899",
        "After every batch weights get initialized from beginning? Can't we load the weights of last trained batch?",
        ("NOT_TRAINING",),
        ("*", ""),
        ("NOT_LEARNING", "LOSS_SPIKE", "UNSTABLE"),
    ),
    Bug(
        filters_under_no_grad,
        "https://github.com/denfed/leaf-audio-pytorch/issues/3",
        "Backpropagation doesn't change weights of the convolutional layer",
        ("NOT_TRAINING",),
        ("0",),
    ),
    Bug(
        groups_not_appended,
        "https://github.com/zjunlp/HVPNeT/issues/5",
        "Not putting parameters into optimizer but still trainable",
        ("NOT_TRAINING",),
        ("fc",),
    ),
    Bug(
        unfreezing_skips_frozen,
        "https://github.com/nttcslab/byol-a/issues/7",
        "Model parameters cannot be trainable once they become requires_grad=False",
        ("NOT_TRAINING",),
        ("backbone",),
    ),
    Bug(
        zero_grad_before_step,
        "https://velog.io/@rhss10/기본-optimizer.zerograd는-어디에-넣어주어야-할까",
        "Where does optimizer.zero_grad() have to stand? (in Korean)",
        ("NOT_TRAINING",),
        ("*", "", "loss"),
        ("NOT_LEARNING",),
    ),
    Bug(
        layer_never_called,
        "https://github.com/inria-thoth/HySUPP/issues/3",
        "layer2 is defined but not used in MiSiCNet forward pass",
        ("NOT_TRAINING",),
        ("layer2",),
    ),
    Bug(
        layers_in_plain_list,
        "https://github.com/pytorch/pytorch/issues/59925",
        "Implicit module registration permits silent programming errors in torch.nn.Module",
        ("NOT_TRAINING",),
        ("hidden", ""),
    ),
    Bug(
        pure_bfloat16,
        "https://github.com/workofart/ml-by-hand/pull/85",
        "Create FP32 master copy of weights for mixed-precision training",
        ("NOT_TRAINING",),
        ("*", ""),
        ("LEARNING_RATE", "NOT_LEARNING", "STAGNATION"),
    ),
    Bug(
        layer_made_in_forward,
        "https://github.com/lafith/Mobile-UNet/issues/1",
        "A dangling layer in forward call?",
        ("NOT_TRAINING", "EVAL_RANDOM"),
        ("0", "2", ""),
    ),
)
