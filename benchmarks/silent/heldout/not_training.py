"""Parameters that should learn and do not."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from silent import data
from silent.common import Bug, Program, accuracy, loader


class _Prunable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.fc = nn.Linear(24 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.adaptive_avg_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))

    def speed_up(self) -> None:
        """Halve the second convolution, and give the classifier a fresh layer that fits."""
        narrow = nn.Conv2d(12, 12, 3, padding=1)
        keep = self.conv2.weight.detach().flatten(1).norm(dim=1).topk(12).indices
        narrow.weight.data.copy_(self.conv2.weight.data[keep])
        narrow.bias.data.copy_(self.conv2.bias.data[keep])
        self.conv2, self.fc = narrow, nn.Linear(12 * 4, 10)


def layer_replaced_after_optimizer(fixed: bool) -> Program:
    """A trained network is pruned, which replaces layers, and tuned with the optimizer of the old ones."""
    x, y, x_test, y_test = data.images()
    model = _Prunable()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def fit(steps: int) -> None:
        for xb, yb in loader(48, steps, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    fit(40)
    model.speed_up()
    if fixed:
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return Program(model, lambda: fit(160), lambda: accuracy(model, x_test, y_test), 0.85)


class _Context(nn.Module):
    def __init__(self, vectors: torch.Tensor, freeze: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(vectors, freeze=freeze)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.embedding(tokens).mean(1))


def pretrained_embedding_frozen(fixed: bool) -> Program:
    """Embeddings are loaded to be tuned, by a function that freezes what it loads."""
    x, y, x_test, y_test = data.sentences()
    model = _Context(0.3 * torch.randn(30, 12), freeze=not fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(32, 130, x, y)):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            if step % 40 == 39:
                accuracy(model, x_test, y_test)

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.75)


class _TwoNetworks(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 20))
        self.symbols = nn.Embedding(20, 16)
        self.second = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y_p = self.first(x)
        symbol = y_p.softmax(1) @ self.symbols.weight if self.fixed else self.symbols(torch.max(y_p, 1)[1])
        return self.second(symbol)


def argmax_between_networks(fixed: bool) -> Program:
    """A second network reads the argmax of the first, through which no gradient passes."""
    x, y, x_test, y_test = data.digits()
    model = _TwoNetworks(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(48, 150, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Relations(nn.Module):
    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.waggrs = {str(r): nn.Linear(6, 12) for r in range(4)}
        if registered:
            self.waggrs = nn.ModuleDict(self.waggrs)
        self.shared = nn.Linear(6, 12)
        self.out = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
        own = torch.stack([self.waggrs[str(r)](x) for r in range(4)], 1)
        return self.out(torch.tanh(own[torch.arange(len(x)), relation] + self.shared(x)))


def parameters_in_plain_dict(fixed: bool) -> Program:
    """The weights of each relation stand in a Python dictionary, where ``parameters()`` does not find them."""
    x, relation = torch.randn(900, 6), torch.randint(4, (900,))
    y = ((x * torch.randn(4, 6)[relation]).sum(1) > 0).long()
    model = _Relations(registered=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for xb, rb, yb in loader(32, 180, x[:600], relation[:600], y[:600]):
            optimizer.zero_grad()
            F.cross_entropy(model(xb, rb), yb).backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return (model(x[600:], relation[600:]).argmax(1) == y[600:]).float().mean().item()

    return Program(model, train, score, 0.85)


class _Bert(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 24).requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.classifier = nn.Linear(24, 3)
        self.fixed = fixed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=not self.fixed) if self.training else block(x)
        return self.classifier(x.mean(1))


def checkpoint_of_frozen_input(fixed: bool) -> Program:
    """Checkpointed blocks follow a frozen embedding: their input needs no gradient, and so they get none."""
    x, y, x_test, y_test = data.sentences()
    model = _Bert(fixed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)

    def train() -> None:
        for xb, yb in loader(32, 110, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.75)


class _Enhanced(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.reconstruct = nn.Conv2d(16, 1, 3, padding=1)
        self.learnable_thresh = nn.Parameter(torch.tensor(0.2))
        self.head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.encoder(x)
        rebuilt = self.reconstruct(h)
        difference = (x - rebuilt).abs()
        if self.fixed:
            mask = torch.sigmoid(10 * (difference - self.learnable_thresh))
        else:
            mask = (torch.sign(difference - self.learnable_thresh) + 1) * 0.5
        return self.head(h * (1 + mask)), rebuilt


def threshold_by_sign(fixed: bool) -> Program:
    """A learnable threshold acts through ``sign``, whose gradient is zero everywhere."""
    x, y, x_test, y_test = data.images()
    model = _Enhanced(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train() -> None:
        for xb, yb in loader(48, 110, x, y):
            logits, rebuilt = model(xb)
            loss = F.cross_entropy(logits, yb) + F.mse_loss(rebuilt, xb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return (model(x_test)[0].argmax(1) == y_test).float().mean().item()

    return Program(model, train, score, 0.85)


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 64), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean
        if self.training:
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


def optimizer_of_encoder_only(fixed: bool) -> Program:
    """The optimizer of a variational autoencoder is given the encoder, and not the decoder."""
    x, _, x_test, _ = data.digits()
    model = _Shared()
    optimizer = torch.optim.Adam(model.parameters() if fixed else model.encoder.parameters(), lr=5e-3)

    def train() -> None:
        for (xb,) in loader(64, 150, x):
            rebuilt, mean, log_variance = model(xb)
            loss = F.mse_loss(rebuilt, xb, reduction="sum") / len(xb)
            loss = loss - 0.02 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        model.eval()
        with torch.no_grad():
            return 1 - ((model(x_test)[0] - x_test).square().mean() / x_test.var(0).mean()).item()

    return Program(model, train, score, 0.3)


class _Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 32)
        self.down = nn.Linear(64, 96)
        self.middle = nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 96))
        self.up = nn.Linear(96, 64)
        self.mix = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.down(x) + self.mix(torch.sin(self.time(t)))
        return self.up(h + self.middle(h))


def step_missing(fixed: bool) -> Program:
    """The loop of a diffusion model steps its schedule and clears gradients, and never steps the optimizer."""
    x, _, x_test, _ = data.digits()
    x, x_test = 2 * x - 1, 2 * x_test - 1
    model = _Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200, eta_min=1e-3)

    def noised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        return x * (1 - t).sqrt() + noise * t.sqrt(), t, noise

    def train() -> None:
        for (xb,) in loader(64, 150, x):
            noisy, t, noise = noised(xb)
            loss = F.mse_loss(model(noisy, t), noise)
            loss.backward()
            if fixed:
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def score() -> float:
        with torch.no_grad():
            noisy, t, noise = noised(x_test)
            return 1 - F.mse_loss(model(noisy, t), noise).item()

    return Program(model, train, score, 0.4)


BUGS = (
    Bug(
        layer_replaced_after_optimizer,
        "https://github.com/microsoft/nni/issues/4521",
        "The parameters are not updated when the pruned model is finetuned",
        ("NOT_TRAINING",),
        ("conv2", "fc"),
    ),
    Bug(
        pretrained_embedding_frozen,
        "https://github.com/RUCAIBox/RecBole/issues/2046",
        "Context-aware D not learning",
        ("NOT_TRAINING",),
        ("embedding",),
    ),
    Bug(
        argmax_between_networks,
        "https://github.com/pytorch/pytorch/issues/1339",
        "Backprop through argmax",
        ("NOT_TRAINING",),
        ("first",),
    ),
    Bug(
        parameters_in_plain_dict,
        "https://github.com/pytorch/pytorch/issues/632",
        "parameters not registered in module",
        ("NOT_TRAINING",),
        ("waggrs", ""),
    ),
    Bug(
        checkpoint_of_frozen_input,
        "https://github.com/huggingface/transformers/issues/21381",
        "gradient checkpointing disables requires_grad when freezing part of models (fix with use_reentrant=False)",
        ("NOT_TRAINING",),
        ("blocks",),
    ),
    Bug(
        threshold_by_sign,
        "https://github.com/Hiyuur/SR-TOD/issues/5",
        "Inquiry About Gradient Flow in Learnable Threshold Implementation",
        ("NOT_TRAINING",),
        ("learnable_thresh", ""),
    ),
    Bug(
        optimizer_of_encoder_only,
        "https://github.com/zdebruine/MMVAE/issues/39",
        "Shared VAE Optimizer Only Given Encoder Parameters",
        ("NOT_TRAINING",),
        ("decoder",),
    ),
    Bug(
        step_missing,
        "https://github.com/tedlasai/learn2refocus/issues/5",
        "Training script potential bug",
        ("NOT_TRAINING",),
        ("*", "", "loss"),
        ("NOT_LEARNING",),
    ),
)
