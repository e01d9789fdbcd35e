"""Inputs, targets, rates and first weights on an unsuitable scale."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, explained, loader


def divided_by_255_twice(fixed: bool) -> Program:
    """Pixels are brought to [0, 1] by one function and divided by 255 once more by the next."""
    x, y, x_test, y_test = data.images()
    if not fixed:
        x, x_test = x / 255, x_test / 255
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1),
        nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(384, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for xb, yb in loader(48, 130, x, y):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def autoencoder_of_raw_pixels(fixed: bool) -> Program:
    """An autoencoder that ends in a sigmoid is given, and has to give, pixels from 0 to 255."""
    x, _, x_test, _ = data.digits()
    if not fixed:
        x, x_test = 255 * x, 255 * x_test
    model = nn.Sequential(
        nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 12), nn.ReLU(), nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 64),
        nn.Sigmoid(),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for (xb,) in loader(48, 180, x):
            optimizer.zero_grad()
            loss = F.mse_loss(model(xb), xb)
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return 1 - ((model(x_test) - x_test).square().mean() / x_test.var(0).mean()).item()

    return Program(model, train, score, 0.25)


def energies_unscaled(fixed: bool) -> Program:
    """The targets are total energies of about minus forty thousand, neither shifted nor scaled."""
    x, y, x_test, y_test = data.waves()
    if not fixed:
        y, y_test = 1200 * y - 41000, 1200 * y_test - 41000
    model = nn.Sequential(nn.Linear(8, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.MSELoss()

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(32, 200, x, y)):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()
            if step % 50 == 49:
                explained(model, x_test, y_test)

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.6)


def sum_instead_of_mean(fixed: bool) -> Program:
    """The loss is the sum over a batch of 128, with a rate that suits its mean."""
    x, y, x_test, y_test = data.digits()
    one_hot = F.one_hot(y, 10).float()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def train() -> None:
        for xb, targets in loader(128, 150, x, one_hot):
            predicted = model(xb).log_softmax(1)
            loss = -(predicted * targets).sum(1)
            loss = loss.mean() if fixed else loss.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 24)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(24, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def lambda_returns_rate(fixed: bool) -> Program:
    """The function of a ``LambdaLR`` returns the rate itself, which is then multiplied with the rate."""
    x, y, x_test, y_test = data.sentences()
    model = _Encoder()
    peak, warmup = 4e-3, 20
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak)

    def schedule(step: int) -> float:
        factor = min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
        return factor if fixed else peak * factor

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=schedule)

    def train() -> None:
        for xb, yb in loader(32, 130, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            scheduler.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.75)


def adam_rate_too_high(fixed: bool) -> Program:
    """Adam is given a rate of 0.3."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(192, 48), nn.ReLU(), nn.Linear(48, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3 if fixed else 0.3)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for xb, yb in loader(48, 120, x, y):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.language = nn.Embedding(10, 48)
        self.res_gate = nn.Sequential(
            nn.Linear(48, 48, bias=False), nn.ReLU(), nn.Linear(48, 48, bias=False), nn.Tanh()
        )
        self.head = nn.Linear(48, 2)

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        h = self.image(x)
        fused = h * self.language(word)
        return self.head(h + self.res_gate(fused) * fused + 0.1 * fused)


def gate_zero_twice(fixed: bool) -> Program:
    """Both layers of a gate begin at zero, so that neither ever gets a gradient."""
    x, y, x_test, y_test = data.digits()
    model = _Gated()
    nn.init.zeros_(model.res_gate[2].weight)
    if not fixed:
        nn.init.zeros_(model.res_gate[0].weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def pairs(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        other = (y + torch.randint(1, 10, y.shape)) % 10
        true = torch.rand(len(y)) < 0.5
        return torch.where(true, y, other), true.long()

    def train() -> None:
        for xb, yb in loader(64, 250, x, y):
            word, true = pairs(yb)
            optimizer.zero_grad()
            F.cross_entropy(model(xb, word), true).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            word, true = pairs(y_test)
            return (model(x_test, word).argmax(1) == true).float().mean().item()

    return Program(model, train, score, 0.8)


class _LanguageModel(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 64)
        self.block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        self.norm = nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, 24, bias=False)
        nn.init.normal_(self.lm_head.weight, std=64**-0.5 if fixed else 1.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.lm_head(self.norm(x + self.block(x)))


def head_of_variance_one(fixed: bool) -> Program:
    """The weights of a language model's head have variance one, and the first loss is many times that of guessing."""
    tokens, tokens_test = data.text()
    model = _LanguageModel(fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train() -> None:
        for (batch,) in loader(32, 100, tokens):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            p = model(tokens_test[:, :-1]).softmax(-1)
            return p.gather(-1, tokens_test[:, 1:, None]).mean().item()

    return Program(model, train, score, 0.6)


BUGS = (
    Bug(
        divided_by_255_twice,
        "https://github.com/calmiLovesAI/YOLOv3_TensorFlow2/issues/21",
        "a small bug on test_on_single_image.py: the image is divided by 255 twice",
        ("DATA_SCALE",),
        ("input", "0"),
        ("NOT_LEARNING", "STAGNATION", "VANISHING", "LEARNING_RATE"),
    ),
    Bug(
        autoencoder_of_raw_pixels,
        "https://github.com/www0wwwjs1/Matrix-Capsules-EM-Tensorflow/issues/51",
        'why use "batch_squash = tf.divide(batch_x, 255.)" rather than just batch_x',
        ("DATA_SCALE", "WRONG_LOSS"),
        ("input", "target", "loss", "0", "6", "7"),
        ("SATURATION", "NOT_LEARNING", "VANISHING", "EXPLODING"),
    ),
    Bug(
        energies_unscaled,
        "https://github.com/atomistic-machine-learning/schnetpack/issues/336",
        "The value of loss is very large",
        ("DATA_SCALE",),
        ("target", "4"),
        ("NOT_LEARNING", "LEARNING_RATE", "EXPLODING"),
    ),
    Bug(
        sum_instead_of_mean,
        "https://github.com/jax-ml/jax/pull/3113",
        "Correct notebooks for neural networks in docs",
        ("LEARNING_RATE",),
        ("*", "", "loss"),
        ("EXPLODING", "UNSTABLE", "LOSS_SPIKE", "NUMERICAL", "DEAD", "NOT_LEARNING", "STAGNATION"),
    ),
    Bug(
        lambda_returns_rate,
        "https://github.com/gao-hongnan/omniverse/issues/82",
        "hotfix: lambdalr should return multiplicative factor and not the real lr.",
        ("LEARNING_RATE",),
        ("*", ""),
        ("NOT_TRAINING", "NOT_LEARNING", "STAGNATION"),
    ),
    Bug(
        adam_rate_too_high,
        "https://github.com/thtrieu/darkflow/issues/1059",
        "Loss and ave loss NaN",
        ("LEARNING_RATE",),
        ("*", ""),
        ("EXPLODING", "UNSTABLE", "LOSS_SPIKE", "NUMERICAL", "DEAD", "NOT_LEARNING", "STAGNATION", "VANISHING"),
    ),
    Bug(
        gate_zero_twice,
        "https://github.com/yz93/LAVT-RIS/issues/25",
        "About zero initialization",
        ("BAD_INIT", "NOT_TRAINING"),
        ("res_gate",),
        ("DEAD", "STAGNATION", "VANISHING"),
    ),
    Bug(
        head_of_variance_one,
        "https://github.com/huggingface/transformers/pull/26441",
        "[T5] lm_head weights initialization: set variance to reciprocal of hidden dim",
        ("BAD_INIT",),
        ("lm_head", "loss", ""),
    ),
)
