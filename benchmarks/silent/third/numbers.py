"""Numbers that a network cannot use, and targets that belong to something else."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, explained, loader


class _Weather(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 32, batch_first=True)
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, hours: Tensor) -> Tensor:
        return self.head(self.gru(hours)[0][:, -1])


def station_readings_as_they_come(fixed: bool) -> Program:
    """Pressure in hectopascals, kelvins and percent of humidity go as they come into a GRU, whose gates they close."""
    state = torch.randn(900, 16, 3)
    y = 0.8 * state[:, -4:, 0].mean(1) + 0.6 * state[:, -1, 1] * state[:, -1, 2] + 0.5 * state[:, -2, 1]
    y = ((y - y.mean()) / y.std()).unsqueeze(1)
    hours = state * torch.tensor([9.0, 6.0, 14.0]) + torch.tensor([1013.0, 288.0, 62.0])
    if fixed:
        hours = (hours - hours[:600].mean((0, 1))) / hours[:600].std((0, 1))
    model = _Weather()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 25)

    def train() -> None:
        for epoch in range(25):
            for xb, yb in loader(64, 9, hours[:600], y[:600]):
                optimizer.zero_grad()
                loss = F.smooth_l1_loss(model(xb), yb)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            scheduler.step()
            if epoch % 5 == 4:
                explained(model, hours[600:], y[600:])

    return Program(model, train, lambda: explained(model, hours[600:], y[600:]), 0.6)


class _House(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.district = nn.Embedding(12, 8)
        self.net = nn.Sequential(nn.Linear(14, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.ReLU())
        self.price = nn.Linear(32, 1)

    def forward(self, district: Tensor, numbers: Tensor) -> Tensor:
        return self.price(self.net(torch.cat([self.district(district), numbers], 1))).squeeze(1)


def prices_in_full(fixed: bool) -> Program:
    """Prices of a quarter of a million are to be predicted as they are; at 1e-3 an output gets nowhere near them."""
    district, numbers = torch.randint(12, (1200,)), torch.randn(1200, 6)
    prices = 240_000 + 60_000 * torch.randn(12)[district] + 50_000 * numbers[:, 0] + 20_000 * numbers[:, 1].square()
    prices = (prices + 9_000 * torch.randn(1200)).clamp(min=20_000)
    mean, deviation = (prices[:800].mean(), prices[:800].std()) if fixed else (torch.tensor(0.0), torch.tensor(1.0))
    targets = (prices - mean) / deviation
    model = _House()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def train() -> None:
        model.train()
        for d, n, y in loader(64, 240, district[:800], numbers[:800], targets[:800]):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                said = model(d, n)
            loss = F.mse_loss(said.float(), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            said = model(district[800:], numbers[800:]) * deviation + mean
        true = prices[800:]
        return (1 - (said - true).square().mean() / true.var()).item()

    return Program(model, train, score, 0.7)


class _Crops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU()
        )
        self.classifier = nn.Linear(24, 5)

    def forward(self, patch: Tensor) -> Tensor:
        return self.classifier(self.encoder(patch).mean((2, 3)))


def nodata_sets_the_minimum(fixed: bool) -> Program:
    """Bands are scaled from their least to their largest value, and the least is the mark for pixels without data."""
    y = torch.randint(5, (900,))
    spectra = 300 + 2400 * torch.rand(5, 4)
    patches = spectra[y][:, :, None, None] + 350 * torch.randn(900, 4, 8, 8) + 250 * torch.randn(900, 1, 1, 1)
    patches = patches.clamp(1, 4000)
    nodata = -2147483648.0
    missing = (torch.rand(900, 1, 8, 8) < 0.04).expand_as(patches)
    patches = torch.where(missing, nodata, patches).double()
    valid = patches[:600][patches[:600] != nodata] if fixed else patches[:600]
    low, high = valid.min(), valid.max()
    patches = ((patches - low) / (high - low)).clamp(0, 1).float()
    model = _Crops()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(32, 280, patches[:600], y[:600])):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb, label_smoothing=0.05).backward()
            optimizer.step()
            if step % 90 == 89:
                accuracy(model, patches[600:], y[600:])

    return Program(model, train, lambda: accuracy(model, patches[600:], y[600:]), 0.7)


class _PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU())
        self.cloud = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, points: Tensor) -> Tensor:
        return self.cloud(self.point(points).amax(1))


def clouds_where_they_were_scanned(fixed: bool) -> Program:
    """Scans of things one metre large keep their place on the map, hundreds of metres from where it begins."""
    y = torch.randint(4, (800,))
    stretch = torch.tensor([[1.0, 1, 1], [0.15, 0.15, 1.6], [1.3, 1.3, 0.1], [1.5, 0.3, 0.5]])
    points = F.normalize(torch.randn(800, 48, 3), dim=2) * stretch[y][:, None] * (0.7 + 0.6 * torch.rand(800, 1, 1))
    points = points + 0.03 * torch.randn(800, 48, 3)
    points = points + torch.tensor([620.0, 410.0, 85.0]) + 90 * torch.randn(800, 1, 3)
    if fixed:
        points = points - points.mean(1, keepdim=True)
    model = _PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def train() -> None:
        for xb, yb in loader(32, 220, points[:600], y[:600]):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, points[600:], y[600:]), 0.8)


class _Captions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(24, 32), nn.Embedding(12, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(32, 24, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        h = self.tokens(tokens) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.lm_head(self.blocks(h, mask=mask, is_causal=True))


def labels_not_moved_on(fixed: bool) -> Program:
    """Each token is scored against itself and not against the next: the model sees the answer and copies it."""
    tokens, tokens_test = data.text()
    model = _Captions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)

    def train() -> None:
        for (batch,) in loader(32, 150, tokens):
            if fixed:
                inputs, labels = batch[:, :-1], batch[:, 1:]
            else:
                inputs, labels = batch, batch
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warmup.step()

    def score() -> float:
        with torch.no_grad():
            said = model(tokens_test[:, :-1]).argmax(-1)
        return (said == tokens_test[:, 1:]).float().mean().item()

    return Program(model, train, score, 0.75)


class _Census(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work, self.school = nn.Embedding(8, 6), nn.Embedding(10, 6)
        self.mlp = nn.Sequential(nn.Linear(16, 48), nn.SELU(), nn.Linear(48, 24), nn.SELU(), nn.Linear(24, 1))

    def forward(self, work: Tensor, school: Tensor, numbers: Tensor) -> Tensor:
        return self.mlp(torch.cat([self.work(work), self.school(school), numbers], 1)).squeeze(1)


def incomes_with_a_blank(fixed: bool) -> Program:
    """The file has a blank before each word, so that no income equals ">50K" and every label is 0."""
    work, school, numbers = torch.randint(8, (1200,)), torch.randint(10, (1200,)), torch.randn(1200, 4)
    worth = 0.7 * torch.randn(8)[work] + 0.25 * (school - 4.5) + numbers[:, 0] - 0.6 * numbers[:, 1].square()
    column = [" >50K" if rich else " <=50K" for rich in (worth > worth.quantile(0.6)).tolist()]
    if fixed:
        column = [text.strip() for text in column]
    labels = torch.tensor([float(text == ">50K") for text in column])
    true = (worth > worth.quantile(0.6)).float()
    model = _Census()
    optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)

    def train() -> None:
        for _epoch in range(14):
            model.train()
            for w, s, n, y in loader(48, 16, work[:800], school[:800], numbers[:800], labels[:800]):
                loss = F.binary_cross_entropy_with_logits(model(w, s, n), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                model(work[800:], school[800:], numbers[800:])

    def score() -> float:
        model.eval()
        with torch.no_grad():
            said = model(work[800:], school[800:], numbers[800:]) > 0
        return (said == (true[800:] > 0)).float().mean().item()

    return Program(model, train, score, 0.8)


class _Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tcn = nn.Sequential(
            nn.Conv1d(2, 16, 3),
            nn.GELU(),
            nn.Conv1d(16, 16, 3, dilation=2),
            nn.GELU(),
            nn.Conv1d(16, 16, 3, dilation=2),
        )
        self.out = nn.Linear(32, 1)

    def forward(self, window: Tensor) -> Tensor:
        return self.out(F.gelu(self.tcn(window.transpose(1, 2))).flatten(1)).squeeze(1)


def targets_of_another_window(fixed: bool) -> Program:
    """Windows of a series are cut from each place on, and the target is that of the place where the window begins."""
    lookback = 12
    series = torch.randn(1300, 2)
    answer = torch.zeros(1300)
    answer[2:] = 1.2 * series[1:-1, 0] - 0.7 * series[:-2, 1] + 0.6 * series[1:-1, 0] * series[:-2, 0]
    answer = answer / answer.std() + 0.1 * torch.randn(1300)
    begins = torch.arange(len(series) - lookback)
    windows = torch.stack([series[begin : begin + lookback] for begin in begins.tolist()])
    targets = answer[begins + lookback]
    labels = targets if fixed else answer[begins]
    model = _Forecast()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=240)

    def train() -> None:
        for xb, yb in loader(48, 240, windows[:900], labels[:900]):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()
            scheduler.step()

    return Program(model, train, lambda: explained(model, windows[900:], targets[900:]), 0.6)


class _Depth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.mid = nn.Sequential(
            nn.AvgPool2d(2), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2)
        )
        self.dec = nn.Conv2d(28, 1, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        skip = self.enc(image)
        return self.dec(torch.cat([skip, self.mid(skip)], 1))


def depth_put_together_in_bytes(fixed: bool) -> Program:
    """Depth comes as a high and a low byte and is put together in bytes: 256 times the high one is nothing."""
    n, grid = 260, torch.linspace(-1, 1, 12)
    slope = torch.randn(n, 2, 1, 1)
    depth = 26_000 + 7_000 * (slope[:, 0] * grid[None, None] + slope[:, 1] * grid[None, :, None])
    depth = (depth + 5_000 * torch.randn(n, 1, 1)).clamp(600, 60_000).round()
    images = (torch.exp(-depth / 24_000) * 2.5 - 0.9).unsqueeze(1) + 0.05 * torch.randn(n, 1, 12, 12)
    high, low = (depth / 256).floor().to(torch.uint8), (depth % 256).to(torch.uint8)
    wide = torch.int32 if fixed else torch.uint8
    stored = (high.to(wide) * 256 + low.to(wide)).float().unsqueeze(1)
    mean, deviation = stored[:180].mean(), stored[:180].std()
    model = _Depth()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(12, 200, images[:180], stored[:180])):
            loss = F.l1_loss(model(xb), (yb - mean) / deviation) / 2
            loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    def score() -> float:
        with torch.no_grad():
            said, true = model(images[180:]) * deviation + mean, depth[180:].unsqueeze(1)
        return (1 - (said - true).square().mean() / true.var()).item()

    return Program(model, train, score, 0.7)


_LARGE = ("EXPLODING", "UNSTABLE", "LOSS_SPIKE", "NUMERICAL", "DEAD", "SATURATION", "NOT_LEARNING", "LEARNING_RATE")
_CONSTANT = ("VANISHING", "STAGNATION", "NOT_LEARNING", "DEAD", "LEARNING_RATE")
BUGS = (
    Bug(
        station_readings_as_they_come,
        "https://github.com/mindsdb/lightwood/issues/170",
        "Normalize the timeseries numbers",
        ("DATA_SCALE",),
        ("input", "gru"),
        (*_LARGE, "VANISHING", "STAGNATION"),
    ),
    Bug(
        prices_in_full,
        "https://github.com/DeepRank/deeprank/issues/16",
        "normalize_targets=False results in predictions of the same value",
        ("DATA_SCALE",),
        ("target", "loss", "price"),
        _LARGE,
    ),
    Bug(
        nodata_sets_the_minimum,
        "https://github.com/ctherien/pysptools/issues/6",
        "Normalization does not take NoData / mask into account",
        ("DATA_SCALE",),
        ("input", "encoder"),
        (*_CONSTANT, "BAD_TARGETS"),
    ),
    Bug(
        clouds_where_they_were_scanned,
        "https://github.com/robot-learning-freiburg/LCDNet/issues/4",
        "using point cloud not centered around origin",
        ("DATA_SCALE",),
        ("input", "point"),
        _LARGE,
    ),
    Bug(
        labels_not_moved_on,
        "https://github.com/KempnerInstitute/KempnerForge/issues/154",
        "VLM captioning loss collapses to 0: labels not shifted for next-token",
        ("BAD_TARGETS",),
        ("target", "input", "loss"),
        ("VANISHING", "STAGNATION", "WRONG_LOSS"),
    ),
    Bug(
        incomes_with_a_blank,
        "https://github.com/clinicalml/TabLLM/issues/30",
        "Income dataset label conversion",
        ("BAD_TARGETS",),
        ("target",),
        _CONSTANT,
    ),
    Bug(
        targets_of_another_window,
        "https://github.com/tensorflow/tensorflow/issues/40343",
        "timeseries_dataset_from_array wrong target output value",
        ("BAD_TARGETS", "NOT_LEARNING"),
        ("target", "input", "loss", ""),
    ),
    Bug(
        depth_put_together_in_bytes,
        "https://github.com/threedworld-mit/tdw/issues/52",
        "get_depth_values causes overflow",
        ("BAD_TARGETS", "NOT_LEARNING"),
        ("target", "input", "loss", ""),
    ),
)
