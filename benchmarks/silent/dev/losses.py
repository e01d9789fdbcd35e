"""Losses that do not suit what they are fed, and targets that tell nothing."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from silent import data
from silent.common import Bug, Program, accuracy, explained, loader


def cross_entropy_of_one_output(fixed: bool) -> Program:
    """A network with one output is trained with the cross-entropy over classes, which is zero whatever it says."""
    x, y, x_test, y_test = data.rings()
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    criterion = nn.BCEWithLogitsLoss() if fixed else nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(32, 150, x, y):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb.float().unsqueeze(1))
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return ((model(x_test)[:, 0] > 0) == y_test.bool()).float().mean().item()

    return Program(model, train, score, 0.85)


def broadcast_mse(fixed: bool) -> Program:
    """Outputs ``[N, 1]`` and targets ``[N]`` are broadcast to all pairs, so that the mean is the best answer."""
    x, y, x_test, y_test = data.plane()
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for xb, yb in loader(32, 120, x, y):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb.unsqueeze(1) if fixed else yb)
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.8)


def masks_of_255(fixed: bool) -> Program:
    """Masks are read from images as 0 and 255 and go into the binary cross-entropy as they are."""
    x, y, x_test, y_test = data.masks()
    if not fixed:
        y = y * 255
    model = nn.Sequential(
        nn.Conv2d(1, 12, 5, padding=2), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 5, padding=2), nn.ReLU(),
        nn.Conv2d(12, 1, 1),
    )  # fmt: skip
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def train() -> None:
        for xb, yb in loader(16, 60, x, y):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()

    def score() -> float:
        model.eval()
        with torch.no_grad():
            return ((model(x_test) > 0) == y_test.bool()).float().mean().item()

    return Program(model, train, score, 0.93)


class _Model(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 32)
        self.linear = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 24))
        self.fixed = fixed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        a = self.linear(self.embedding(tokens))
        return a if self.fixed else F.softmax(a, dim=-1)


def softmax_before_cross_entropy_language(fixed: bool) -> Program:
    """A small language model returns probabilities, which ``cross_entropy`` takes for logits."""
    tokens, tokens_test = data.text()
    model = _Model(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for (batch,) in loader(32, 100, tokens):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 24), batch[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            p = model(tokens_test[:, :-1])
            p = p.softmax(-1) if fixed else p
            return p.gather(-1, tokens_test[:, 1:, None]).mean().item()

    return Program(model, train, score, 0.6)


class _Detector(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1),
            nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(24 * 16, 48), nn.LeakyReLU(0.1),
        )  # fmt: skip
        self.box = nn.Linear(48, 2)
        self.classes = nn.Linear(48, 10)
        self.fixed = fixed

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x)
        scores = self.classes(h)
        return torch.sigmoid(self.box(h)), scores if self.fixed else torch.sigmoid(scores)


def sigmoid_before_cross_entropy(fixed: bool) -> Program:
    """A detector squashes its class scores with a sigmoid, and the cross-entropy takes them for logits."""
    x, y, x_test, y_test = data.images()
    weight = x.flatten(1) / x.flatten(1).sum(1, keepdim=True)
    rows, columns = torch.meshgrid(torch.arange(8) / 7, torch.arange(8) / 7, indexing="ij")
    centre = torch.stack([weight @ rows.flatten(), weight @ columns.flatten()], 1)
    model = _Detector(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mse, ce = nn.MSELoss(), nn.CrossEntropyLoss()

    def train() -> None:
        for xb, cb, yb in loader(48, 110, x, centre, y):
            box, scores = model(xb)
            loss = 5 * mse(box, cb) + ce(scores, yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            scores = model(x_test)[1]
            p = scores.softmax(1) if fixed else scores / scores.sum(1, keepdim=True)
            return p.gather(1, y_test[:, None]).mean().item()

    return Program(model, train, score, 0.7)


def softmax_over_batch(fixed: bool) -> Program:
    """A policy's softmax runs over the batch and not over the actions."""
    x, best = data.arms(512)
    x_test, best_test = data.arms(512)
    model = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(), nn.Linear(32, 3), nn.Softmax(dim=1 if fixed else 0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for states, right in loader(64, 200, x, best):
            with torch.no_grad():
                p = model(states)
                actions = torch.multinomial(p / p.sum(1, keepdim=True), 1).squeeze(1)
            reward = (actions == right).float()
            taken = model(states).gather(1, actions[:, None]).squeeze(1)
            loss = -(torch.log(taken) * (reward - reward.mean())).sum() / 64
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            p = model(x_test)
            p = p / p.sum(1, keepdim=True)
            return p.gather(1, best_test[:, None]).mean().item()

    return Program(model, train, score, 0.75)


def labels_from_second_loader(fixed: bool) -> Program:
    """Inputs and labels are drawn from two loaders, each of which shuffles for itself."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()

    def train() -> None:
        for epoch in range(5):
            inputs = DataLoader(x, batch_size=50, shuffle=True, generator=torch.Generator().manual_seed(epoch))
            seed = epoch if fixed else epoch + 100
            labels = DataLoader(y, batch_size=50, shuffle=True, generator=torch.Generator().manual_seed(seed))
            for xb, yb in zip(inputs, labels, strict=True):
                optimizer.zero_grad()
                criterion(model(xb), yb).backward()
                optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def inputs_shuffled_alone(fixed: bool) -> Program:
    """The rows of the inputs are shuffled once and the labels are not."""
    x, y, x_test, y_test = data.sentences()
    if not fixed:
        x = x[torch.randperm(len(x))]
    model = nn.Sequential(nn.EmbeddingBag(30, 16), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train() -> None:
        for xb, yb in loader(32, 120, x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.75)


def actor_loss_without_minus(fixed: bool) -> Program:
    """The actor descends on what its critic says an action is worth, and so looks for the worst."""
    states = torch.randn(512, 4)
    wish = torch.tanh(states[:, :1] - 0.5 * states[:, 1:2])
    model = nn.ModuleDict({
        "actor": nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh()),
        "critic": nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)),
    })  # fmt: skip
    actor, critic = model["actor"], model["critic"]
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)

    def train() -> None:
        for s, w in loader(64, 200, states, wish):
            with torch.no_grad():
                a = (actor(s) + 0.5 * torch.randn_like(w)).clamp(-1, 1)
            reward = 1 - (a - w).square()
            critic_loss = F.mse_loss(critic(torch.cat([s, a], 1)), reward)
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()
            q_values = critic(torch.cat([s, actor(s)], 1))
            actor_loss = -q_values.mean() if fixed else q_values.mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return 1 - (actor(states) - wish).square().mean().item()

    return Program(model, train, score, 0.8)


BUGS = (
    Bug(
        cross_entropy_of_one_output,
        "https://github.com/cnulab/RealNet/issues/101",
        "With a single class the loss is 0 (in Chinese)",
        ("WRONG_LOSS",),
        ("loss", "4", "target"),
        ("NOT_TRAINING", "NOT_LEARNING", "VANISHING", "STAGNATION", "DEAD"),
    ),
    Bug(
        broadcast_mse,
        "https://discuss.pytorch.org/t/output-of-the-model-depends-on-the-shape-of-the-weights-tensor/148155",
        "Output of the model depends on the shape of the weights tensor",
        ("WRONG_LOSS",),
        ("loss", "target", "2"),
        ("NOT_LEARNING", "BAD_TARGETS"),
    ),
    Bug(
        masks_of_255,
        "https://github.com/MontaEllis/Pytorch-Medical-Segmentation/issues/8",
        "Why is the value of BCEWithLogitsLoss negative?",
        ("WRONG_LOSS", "DATA_SCALE"),
        ("target", "loss", "5"),
    ),
    Bug(
        softmax_before_cross_entropy_language,
        "https://github.com/bkitano/llama-from-scratch/issues/5",
        "no need to softmax before cross_entrpoy",
        ("WRONG_LOSS",),
        ("loss", "linear", ""),
        ("NOT_LEARNING",),
    ),
    Bug(
        sigmoid_before_cross_entropy,
        "https://github.com/eriklindernoren/PyTorch-YOLOv3/issues/108",
        "Some problems with loss",
        ("WRONG_LOSS",),
        ("loss", "classes", ""),
    ),
    Bug(
        softmax_over_batch,
        "https://github.com/DeepReinforcementLearning/DeepReinforcementLearningInAction/issues/32",
        "Chap.4. softmax(dim=1)",
        ("WRONG_LOSS",),
        ("loss", "3", "2"),
        ("NOT_LEARNING",),
    ),
    Bug(
        labels_from_second_loader,
        "https://github.com/aidotse/LeakPro/issues/315",
        "get_labels() mismatch",
        ("BAD_TARGETS",),
        ("target",),
        ("NOT_LEARNING",),
    ),
    Bug(
        inputs_shuffled_alone,
        "https://github.com/DrexelChatbotGroup/DrexelChatbot/issues/15",
        "Incomplete randomization",
        ("BAD_TARGETS",),
        ("target", "input"),
        ("NOT_LEARNING",),
    ),
    Bug(
        actor_loss_without_minus,
        "https://github.com/KanishJebaMathewM/Truxify/pull/11885",
        "fix(ml): fix actor loss calculation sign error in PIRL policy gradient",
        ("NOT_LEARNING", "WRONG_LOSS"),
        ("loss", "actor"),
        ("SATURATION", "POLICY_COLLAPSE"),
    ),
)
