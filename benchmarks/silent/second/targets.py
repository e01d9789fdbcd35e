"""Targets that tell nothing, and numbers on a scale that a network cannot use."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, explained, loader


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.deep = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2)
        )
        self.outc = nn.Conv2d(28, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.outc(torch.cat([skip, self.deep(skip)], 1))


def _overlap(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        said, true = model(x).argmax(1) == 1, y[:, 0] > 0.5
    return (2 * (said & true).sum() / (said.sum() + true.sum())).item()


def masks_divided_to_nothing(fixed: bool) -> Program:
    """Masks of class numbers are divided by 255 like images and then made whole numbers: all is background."""
    x, y, x_test, y_test = data.masks()
    model = _UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, momentum=0.9)
    masks = y[:, 0].to(torch.uint8)

    def train() -> None:
        for xb, mask in loader(16, 110, x, masks):
            true = mask if fixed else mask / 255
            loss = F.cross_entropy(model(xb), true.to(torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: _overlap(model, x_test, y_test), 0.75)


def files_in_two_orders(fixed: bool) -> Program:
    """Images are listed by number and masks by name, in which 10 comes before 2: hardly an image has its own mask."""
    x, y, x_test, y_test = data.masks()
    files = [str(n) for n in range(len(x))]
    by_number = sorted(files, key=int)
    by_name = by_number if fixed else sorted(files)
    images = torch.stack([x[int(name)] for name in by_number])
    masks = torch.stack([y[int(name)] for name in by_name])
    model = nn.Sequential(nn.Conv2d(1, 12, 5, padding=2), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 2, 5, padding=2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(16, 110, images, masks):
            loss = F.cross_entropy(model(xb), yb[:, 0].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: _overlap(model, x_test, y_test), 0.75)


class _Sentence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(30, 24)
        self.encoder = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.prediction = nn.Linear(24, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.prediction(self.encoder(self.embeddings(tokens)).mean(1)).squeeze(1)


def scores_made_whole_numbers(fixed: bool) -> Program:
    """Likenesses between 0 and 1 are stored as whole numbers, and every one of them becomes 0."""
    worth = torch.rand(30)
    tokens = torch.randint(30, (900, 10))
    y = (worth[tokens].mean(1) - 0.5).mul(5).sigmoid()
    labels = y if fixed else y.long().float()
    model = _Sentence()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train() -> None:
        for xb, yb in loader(32, 130, tokens[:600], labels[:600]):
            loss = F.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, tokens[600:], y[600:]), 0.6)


class _Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decide = nn.Linear(16, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.decide((self.net(a) - self.net(b)).square()).squeeze(1)


def pairs_all_alike(fixed: bool) -> Program:
    """Only pairs of the same class are drawn for a network that compares: it learns to say yes."""
    x, y, x_test, y_test = data.digits()
    model = _Siamese()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def partner(y: Tensor, of: Tensor, same: Tensor) -> Tensor:
        fits = (y[:, None] == of[None]) == same[:, None]
        return torch.multinomial(fits.float(), 1).squeeze(1)

    def train() -> None:
        for xb, yb in loader(64, 200, x, y):
            same = torch.rand(len(yb)) < (0.5 if fixed else 1.1)
            other = x[partner(yb, y, same)]
            loss = F.binary_cross_entropy_with_logits(model(xb, other), same.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        same = torch.rand(len(y_test)) < 0.5
        with torch.no_grad():
            said = model(x_test, x_test[partner(y_test, y_test, same)]) > 0
        return (said == same).float().mean().item()

    return Program(model, train, score, 0.8)


def replay_of_one_list(fixed: bool) -> Program:
    """A memory keeps references to one array of states, which is overwritten: rewards stand beside the last state."""
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    memory: list[tuple[Tensor, int, float]] = []

    def play(n: int) -> None:
        state = torch.empty(4)
        for row, best in zip(*data.arms(n), strict=True):
            state.copy_(row)
            action = int(torch.randint(3, ()))
            memory.append((state.clone() if fixed else state, action, float(action == int(best))))

    def train() -> None:
        for step in range(200):
            if step % 20 == 0:
                play(150)
            drawn = [memory[i] for i in torch.randint(len(memory), (64,)).tolist()]
            states = torch.stack([state for state, _, _ in drawn])
            actions = torch.tensor([action for _, action, _ in drawn])
            rewards = torch.tensor([reward for _, _, reward in drawn])
            q = model(states).gather(1, actions[:, None]).squeeze(1)
            optimizer.zero_grad()
            F.smooth_l1_loss(q, rewards).backward()
            optimizer.step()

    def score() -> float:
        return accuracy(model, *data.arms(600))

    return Program(model, train, score, 0.8)


def samples_of_sixteen_bits(fixed: bool) -> Program:
    """Sound is read as whole numbers up to 32767 and goes so into a convolution, where [-1, 1] was meant."""
    y = torch.randint(4, (900,))
    time = torch.arange(64) / 64
    wave = torch.sin(6.28 * ((4 + 4 * y)[:, None] * time + torch.rand(900, 1)))
    x = (wave + 0.4 * torch.randn(900, 64)).clamp(-2, 2).unsqueeze(1) / 2.1
    x = (x * 32767).to(torch.int16).float()
    if fixed:
        x = x / 32768
    model = nn.Sequential(
        nn.Conv1d(1, 16, 9, padding=4), nn.PReLU(), nn.MaxPool1d(2), nn.Conv1d(16, 16, 9, padding=4), nn.PReLU(),
        nn.AdaptiveMaxPool1d(2), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train() -> None:
        for xb, yb in loader(32, 200, x[:600], y[:600]):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x[600:], y[600:]), 0.85)


class _Gaze(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eye = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(432, 48), nn.ReLU(), nn.Linear(48, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.eye(x))


def mean_of_another_scale(fixed: bool) -> Program:
    """From pixels in [0, 1] a mean is taken that was measured on pixels up to 255: every image is about -120."""
    n = 900
    centre = torch.rand(n, 2) * 7 + 2
    grid = torch.arange(12.0)
    rows, columns = (torch.exp(-(grid - centre[:, i : i + 1]).square() / 3) for i in range(2))
    x = (0.3 + 0.6 * rows[:, :, None] * columns[:, None] + 0.05 * torch.randn(n, 12, 12)).clamp(0, 1).unsqueeze(1)
    y = (centre - 5.5) / 2
    mean = 255 * x[:600].mean(0)
    x = x - (mean / 255 if fixed else mean)
    model = _Gaze()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    def train() -> None:
        for xb, yb in loader(48, 220, x[:600], y[:600]):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return Program(model, train, lambda: explained(model, x[600:], y[600:]), 0.7)


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(state)
        return self.actor(h), self.critic(h).squeeze(1)


def rewards_of_a_pendulum(fixed: bool) -> Program:
    """Returns of -1600 to 0 go unscaled into a network that policy and value share: the value's error rules it."""
    model = _Shared()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for _ in range(280):
            state, best = data.arms(96)
            logits, value = model(state)
            action = torch.distributions.Categorical(logits=logits).sample()
            reward = 1600 * ((action == best).float() - 1) * (0.7 + 0.3 * torch.rand(96))
            if fixed:
                reward = (reward + 800) / 800
            advantage = (reward - value).detach()
            log_probability = logits.log_softmax(1).gather(1, action[:, None]).squeeze(1)
            loss = -(log_probability * advantage).mean() + 0.5 * F.mse_loss(value, reward)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    def score() -> float:
        state, best = data.arms(800)
        with torch.no_grad():
            return (model(state)[0].argmax(1) == best).float().mean().item()

    return Program(model, train, score, 0.75)


_CONSTANT = ("VANISHING", "STAGNATION", "NOT_LEARNING", "DEAD", "LEARNING_RATE")
_LARGE = ("EXPLODING", "UNSTABLE", "LOSS_SPIKE", "NUMERICAL", "DEAD", "SATURATION", "NOT_LEARNING", "LEARNING_RATE")
BUGS = (
    Bug(
        masks_divided_to_nothing,
        "https://github.com/milesial/Pytorch-UNet/issues/228",
        "My imput mask is 0",
        ("BAD_TARGETS",),
        ("target",),
        _CONSTANT,
    ),
    Bug(
        files_in_two_orders,
        "https://github.com/advaitsave/Multiclass-Semantic-Segmentation-CamVid/issues/3",
        "mask and image not necessarily synchronized",
        ("BAD_TARGETS",),
        ("target", "input"),
        ("NOT_LEARNING",),
    ),
    Bug(
        scores_made_whole_numbers,
        "https://github.com/deepset-ai/FARM/issues/395",
        "Regression label float to int conversion bug",
        ("BAD_TARGETS",),
        ("target",),
        _CONSTANT,
    ),
    Bug(
        pairs_all_alike,
        "https://github.com/bertinetto/siamese-fc/issues/49",
        "all training pair are positive?",
        ("BAD_TARGETS",),
        ("target",),
        _CONSTANT,
    ),
    Bug(
        replay_of_one_list,
        "https://github.com/Itomigna2/Muesli-lunarlander/issues/1",
        "Replay buffer is storing multiple copies of the most recent episode",
        ("BAD_TARGETS", "NOT_LEARNING"),
        ("target", "input", "loss", ""),
    ),
    Bug(
        samples_of_sixteen_bits,
        "https://github.com/JusperLee/Dual-Path-RNN-Pytorch/issues/16",
        "Input Normalization",
        ("DATA_SCALE",),
        ("input", "0"),
        _LARGE,
    ),
    Bug(
        mean_of_another_scale,
        "https://github.com/CSAILVision/GazeCapture/issues/32",
        "Division by 255 in SubtractMean",
        ("DATA_SCALE",),
        ("input", "eye"),
        _LARGE,
    ),
    Bug(
        rewards_of_a_pendulum,
        "https://github.com/MorvanZhou/Reinforcement-learning-with-tensorflow/issues/2",
        "A3C_continuous_action - reward normalisation",
        ("DATA_SCALE",),
        ("target", "critic", "loss"),
        _LARGE,
    ),
)
