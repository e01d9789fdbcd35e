"""Missing non-linearities, gradients of yesterday, chance in evaluation, copies that drift apart."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, loader


class _Inception(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.conv2, self.bn2 = nn.Conv2d(12, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv3, self.bn3 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()
        self.last_linear = nn.Linear(16 * 16, 10)
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bn1_out = self.bn1(self.conv1(x))
        relu1_out = self.relu1(bn1_out)
        bn2_out = self.bn2(self.conv2(relu1_out if self.fixed else bn1_out))
        relu2_out = self.relu2(bn2_out)
        bn3_out = self.bn3(self.conv3(relu2_out if self.fixed else bn2_out))
        relu3_out = self.relu3(bn3_out)
        pooled = F.avg_pool2d(relu3_out if self.fixed else bn3_out, 2)
        return self.last_linear(pooled.flatten(1))


def relu_result_discarded(fixed: bool) -> Program:
    """Each ReLU is computed, and the next convolution takes what went into it."""
    x, y, x_test, y_test = data.images()
    model = _Inception(fixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for xb, yb in loader(48, 90, x, y):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.9)


class _Dynamic(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(2 if i == 0 else 16, 16) for i in range(4))
        self.activations = nn.ModuleDict({"relu": nn.ReLU(), "lrelu": nn.LeakyReLU()})
        self.final = nn.Linear(16, 2)
        self.fixed = fixed

    def forward(self, x: torch.Tensor, act: str = "relu") -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)
            if self.fixed:
                x = self.activations[act](x)
        if not self.fixed:
            x = self.activations[act](x)
        return self.final(x)


def activation_after_the_loop(fixed: bool) -> Program:
    """The activation stands behind the loop over the layers and not in it."""
    x, y, x_test, y_test = data.rings()
    model = _Dynamic(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(32, 200, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.9)


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * F.linear(F.linear(x, self.a), self.b)


def zero_grad_missing_lora(fixed: bool) -> Program:
    """Adapters of low rank are trained on a frozen network, and no gradient is ever cleared."""
    x, y, x_test, y_test = data.digits()
    base = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
    model = nn.Sequential(_Adapted(base[0]), nn.ReLU(), _Adapted(base[2]), nn.ReLU(), nn.Linear(96, 10))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

    def train() -> None:
        for xb, yb in loader(32, 130, x, y):
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            if fixed:
                optimizer.zero_grad()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def discriminator_not_zeroed(fixed: bool) -> Program:
    """Of an autoencoder and its discriminator only the first has its gradients cleared."""
    x, _, x_test, _ = data.digits()
    model = nn.ModuleDict({
        "autoencoder": nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 12), nn.Linear(12, 48), nn.ReLU(),
                                     nn.Linear(48, 64), nn.Sigmoid()),
        "discriminator": nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
    })  # fmt: skip
    generator, discriminator = model["autoencoder"], model["discriminator"]
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=3e-3)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)

    def train() -> None:
        for (xb,) in loader(48, 200, x):
            optimizer_g.zero_grad()
            rebuilt = generator(xb)
            says = discriminator(rebuilt)
            loss_g = 10 * F.mse_loss(rebuilt, xb) + 0.01 * F.binary_cross_entropy_with_logits(
                says, torch.ones_like(says)
            )
            loss_g.backward()
            optimizer_g.step()

            if fixed:
                optimizer_d.zero_grad()
            fake, real = discriminator(rebuilt.detach()), discriminator(xb)
            loss_d = F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
            loss_d = 0.5 * (loss_d + F.binary_cross_entropy_with_logits(real, torch.ones_like(real)))
            loss_d.backward()
            optimizer_d.step()

    def score() -> float:
        with torch.no_grad():
            return 1 - ((generator(x_test) - x_test).square().mean() / x_test.var(0).mean()).item()

    return Program(model, train, score, 0.25)


def evaluated_in_training_mode(fixed: bool) -> Program:
    """The validation loop forgets ``model.eval()``, so that dropout is at work in it."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, 96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 120, x, y)):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
            if step % 20 == 19:
                if fixed:
                    model.eval()
                with torch.no_grad():
                    for xv, yv in loader(100, 3, x_test, y_test):
                        criterion(model(xv), yv).item()
                model.train()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Classifier(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(256, 10)
        self.drop = nn.Dropout(0.5) if fixed else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x).flatten(1)
        x = nn.Dropout(p=0.5)(x) if self.drop is None else self.drop(x)
        return self.fc(x)


def dropout_made_in_forward(fixed: bool) -> Program:
    """Dropout is made in the forward pass, where ``eval()`` does not reach it."""
    x, y, x_test, y_test = data.images()
    model = _Classifier(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(48, 100, x, y)):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
            if step % 20 == 19:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Shard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 24), nn.GELU(), nn.Linear(24, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm(x))


class _Sharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shards = nn.ModuleList(_Shard() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(shard(x) for shard in self.shards)


def norm_copies_clipped_apart(fixed: bool) -> Program:
    """Two tensor-parallel shards hold copies of one LayerNorm; only the first shard's gradients are clipped."""
    x, y, x_test, y_test = data.digits()
    model = _Sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shards = model.shards

    def all_reduce() -> None:
        for first, second in zip(shards[0].norm.parameters(), shards[1].norm.parameters(), strict=True):
            first.grad = first.grad + second.grad
            second.grad = first.grad.clone()

    def train() -> None:
        for xb, yb in loader(48, 120, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            all_reduce()
            clipped = model.parameters() if fixed else shards[0].parameters()
            torch.nn.utils.clip_grad_norm_(clipped, 0.5)
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Siamese(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))
        self.right = self.left if fixed else copy.deepcopy(self.left)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self.left(a) - self.right(b)).square().sum(1)


def siamese_branches_copied(fixed: bool) -> Program:
    """The two branches of a siamese network should be one network and are a network and its copy."""
    x, y, x_test, y_test = data.digits()
    model = _Siamese(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def pairs(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        order = y.argsort() if torch.rand(()) < 0.5 else torch.randperm(len(y))
        return x, x[order][torch.argsort(y.argsort())], (y == y[order][torch.argsort(y.argsort())]).float()

    def train() -> None:
        for xb, yb in loader(64, 150, x, y):
            a, b, same = pairs(xb, yb)
            distance = model(a, b)
            loss = (same * distance + (1 - same) * F.relu(4 - distance)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            half = len(x_test) // 2
            distance = model(x_test[:half], x_test[half : 2 * half])
            near = (distance < 2).float()
            same = (y_test[:half] == y_test[half : 2 * half]).float()
            return 0.5 * ((near * same).sum() / same.sum() + ((1 - near) * (1 - same)).sum() / (1 - same).sum()).item()

    return Program(model, train, score, 0.7)


BUGS = (
    Bug(
        relu_result_discarded,
        "https://github.com/Cadene/pretrained-models.pytorch/issues/79",
        "Missing Relu in BNInception blocks",
        ("CAPACITY",),
        ("conv1", "conv2", "conv3", "bn1", "bn2", "bn3", "relu1", "relu2", "relu3", "last_linear", ""),
    ),
    Bug(
        activation_after_the_loop,
        "https://github.com/pytorch/pytorch/pull/139667",
        "Fix to modules.rst: indent line with activation functions",
        ("CAPACITY",),
        ("linears",),
    ),
    Bug(
        zero_grad_missing_lora,
        "https://github.com/tenstorrent/tt-blacksmith/pull/711",
        "[Trainer] Fix Bug Where Zero Grad was Left Out",
        ("STALE_GRAD",),
        ("*", ""),
        ("UNSTABLE", "EXPLODING", "LOSS_SPIKE"),
    ),
    Bug(
        discriminator_not_zeroed,
        "https://github.com/Project-MONAI/GenerativeModels/issues/102",
        "Missing zero_grad in the VQGAN tutorial",
        ("STALE_GRAD",),
        ("discriminator",),
    ),
    Bug(
        evaluated_in_training_mode,
        "https://github.com/udacity/deep-learning-v2-pytorch/issues/3",
        'Issue about "model.train()" and "model.eval()"??',
        ("EVAL_RANDOM",),
        ("2", "5", ""),
    ),
    Bug(
        dropout_made_in_forward,
        "https://github.com/yangze0930/NTS-Net/issues/14",
        "dropout in resnet.py",
        ("EVAL_RANDOM",),
        ("", "features", "fc"),
    ),
    Bug(
        norm_copies_clipped_apart,
        "https://github.com/bigscience-workshop/Megatron-DeepSpeed/pull/270",
        "Test different layer norm: script to reproduce diverging layer_norm weights",
        ("DESYNC",),
        ("shards",),
    ),
    Bug(
        siamese_branches_copied,
        "https://github.com/Shicoder/DeepLearning_Demo/issues/3",
        "i think your model did't share weight between network o1 and o2,there are two different network",
        ("DESYNC",),
        ("left", "right"),
    ),
)
