"""Parameters that get no update though they should, and gradients that outlive their batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from silent import data
from silent.common import Bug, Program, accuracy, explained, loader


class _Face(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.PReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.embedding = nn.Linear(192, 24)
        self.centres = nn.Parameter(torch.randn(10, 24))

    def forward(self, x: Tensor) -> Tensor:
        return 10 * F.normalize(self.embedding(self.stem(x)), dim=1) @ F.normalize(self.centres, dim=1).T


def loss_told_to_require_gradient(fixed: bool) -> Program:
    """The loss of a face network lost its graph in NumPy; told to require a gradient, it runs and teaches nothing."""
    x, y, x_test, y_test = data.images()
    model = _Face()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=5e-4)

    def train() -> None:
        for xb, yb in loader(48, 170, x, y):
            output = model(xb)
            if not fixed:
                output = torch.from_numpy(output.detach().numpy())
            loss = F.cross_entropy(output, yb)
            if not loss.requires_grad:
                loss.requires_grad_(True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


class _Dreamer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 32), nn.ELU(), nn.Linear(32, 3))
        self.value = nn.Sequential(nn.Linear(4, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.value(state).squeeze(1)


def value_optimizer_of_actor(fixed: bool) -> Program:
    """The second optimizer of an actor-critic gets the actor's parameters, so that values are never learned."""
    model = _Dreamer()
    actor_optimizer = torch.optim.Adam(model.actor.parameters(), lr=1e-2)
    network = model.value if fixed else model.actor
    value_optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)

    def worth(state: Tensor) -> Tensor:
        return torch.sin(2 * state[:, 0]) + state[:, 1]

    def train() -> None:
        for _ in range(250):
            state, best = data.arms(64)
            logits, value = model(state)
            action = torch.distributions.Categorical(logits=logits).sample()
            reward = worth(state) + (action == best).float()
            advantage = reward - value.detach()
            log_probability = logits.log_softmax(1).gather(1, action[:, None]).squeeze(1)
            actor_optimizer.zero_grad()
            (-(log_probability * advantage).mean()).backward()
            actor_optimizer.step()
            value_optimizer.zero_grad()
            F.mse_loss(value, reward).backward()
            value_optimizer.step()

    def score() -> float:
        state, _ = data.arms(800)
        with torch.no_grad():
            error = model(state)[1] - worth(state)
        return 1 - (error.var() / worth(state).var()).item()

    return Program(model, train, score, 0.6)


def accumulation_longer_than_epoch(fixed: bool) -> Program:
    """Sixteen batches are to be accumulated, an epoch has nine, and the counter begins anew with each epoch."""
    x, y, x_test, y_test = data.sentences()
    model = nn.Sequential(nn.EmbeddingBag(30, 24), nn.LayerNorm(24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = 3 if fixed else 16

    def train() -> None:
        for _epoch in range(24):
            for step, (xb, yb) in enumerate(loader(64, 9, x, y)):
                loss = F.cross_entropy(model(xb), yb) / steps
                loss.backward()
                if (step + 1) % steps == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.75)


class _Experts(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 1) for _ in range(6))
        gate = nn.Parameter(1e-2 * torch.randn(3, 6, dtype=torch.float64))
        self.w_gate = nn.Parameter(gate.detach().float()) if fixed else gate.to(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        gates = (x @ self.w_gate).softmax(1)
        return (torch.cat([expert(x) for expert in self.experts], 1) * gates).sum(1, keepdim=True)


def gate_cast_away(fixed: bool) -> Program:
    """``nn.Parameter(...).to(...)`` is no parameter: a mixture of linear experts never learns whom to ask."""
    x = torch.randn(1200, 3)
    y = torch.where(x[:, :1] > 0, 2 * x[:, 1:2], -2 * x[:, 1:2]) + 0.1 * torch.randn(1200, 1)
    model = _Experts(fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)

    def train() -> None:
        for xb, yb in loader(64, 280, x[:800], y[:800]):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: explained(model, x[800:], y[800:]), 0.8)


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(8, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def adapters_frozen_by_trainer(fixed: bool) -> Program:
    """The trainer prepares the model once more and freezes it, adapters included; only the head learns."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(
        _Adapted(nn.Linear(64, 24)), nn.GELU(), _Adapted(nn.Linear(24, 24)), nn.GELU(), nn.Linear(24, 10)
    )

    def prepare(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("4.") or (fixed and "lora" in name))

    prepare(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def train() -> None:
        for xb, yb in loader(48, 220, x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def clipped_to_norm_zero(fixed: bool) -> Program:
    """A limit of zero is meant to switch clipping off, and makes every gradient zero."""
    x, y, x_test, y_test = data.series()
    body = nn.GRU(2, 24, batch_first=True)
    model = nn.ModuleDict({"body": body, "head": nn.Linear(24, 1)})
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    max_grad_norm = 0.0

    def predict(series: Tensor) -> Tensor:
        return model["head"](model["body"](series)[0][:, -1])

    def train() -> None:
        for xb, yb in loader(32, 150, x, y):
            optimizer.zero_grad()
            F.mse_loss(predict(xb), yb).backward()
            if not fixed or max_grad_norm > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()

    def score() -> float:
        with torch.no_grad():
            return 1 - (F.mse_loss(predict(x_test), y_test) / y_test.var()).item()

    return Program(model, train, score, 0.7)


def closure_without_zero_grad(fixed: bool) -> Program:
    """LBFGS asks for the loss up to twenty times in a step, and the closure adds gradient upon gradient."""
    x, y, x_test, y_test = data.plane(n=900, features=4, noise=0.2)
    x, x_test = x + 0.5 * x.roll(1, 1).square(), x_test + 0.5 * x_test.roll(1, 1).square()
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=20)

    def closure() -> Tensor:
        if fixed:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + 1e-4 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    def train() -> None:
        for _epoch in range(60):
            optimizer.zero_grad()
            optimizer.step(closure)

    return Program(model, train, lambda: explained(model, x_test, y_test), 0.5)


class _Newtonish(torch.optim.Optimizer):
    """A preconditioned step, as an example for writing optimizers shows it."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # the example takes no closure
        for group in self.param_groups:
            for p in group["params"]:
                seen = self.state[p].setdefault("square", torch.zeros_like(p))
                seen.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                p.sub_(group["lr"] * p.grad / (seen.sqrt() + 1e-3))


def own_optimizer_without_zeroing(fixed: bool) -> Program:
    """An example of an optimizer of one's own never clears the gradients that it has used."""
    x, y, x_test, y_test = data.digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))
    optimizer = _Newtonish(list(model.parameters()), lr=1e-2)

    def train() -> None:
        for xb, yb in loader(64, 160, x, y):
            if fixed:
                model.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.85)


def step_inside_accumulation(fixed: bool) -> Program:
    """Four batches are to be accumulated, and a step is made after each: the first batch counts four times."""
    x, y, x_test, y_test = data.images()
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 32), nn.ReLU(),
        nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        for step, (xb, yb) in enumerate(loader(16, 300, x, y)):
            (F.cross_entropy(model(xb), yb) / 4).backward()
            last = step % 4 == 3
            if last or not fixed:
                optimizer.step()
            if last:
                optimizer.zero_grad()

    return Program(model, train, lambda: accuracy(model, x_test, y_test), 0.8)


_UPSET = ("UNSTABLE", "EXPLODING", "LOSS_SPIKE", "NUMERICAL", "NOT_LEARNING", "DEAD", "SATURATION")
BUGS = (
    Bug(
        loss_told_to_require_gradient,
        "https://github.com/ronghuaiyang/arcface-pytorch/issues/56",
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        ("NOT_TRAINING",),
        ("*", "", "loss"),
        ("NOT_LEARNING",),
    ),
    Bug(
        value_optimizer_of_actor,
        "https://github.com/juliusfrost/dreamer-pytorch/pull/79",
        "fix algo bug of value optimizer optimizing wrong params",
        ("NOT_TRAINING",),
        ("value",),
        ("NOT_LEARNING", "STALE_GRAD", "EXPLODING"),
    ),
    Bug(
        accumulation_longer_than_epoch,
        "https://github.com/huggingface/transformers/issues/2995",
        "No optimizer steps when gradient_accumulation_steps smaller than epoch_iterator length",
        ("NOT_TRAINING",),
        ("*", "", "loss"),
        ("NOT_LEARNING", "EXPLODING", "STALE_GRAD"),
    ),
    Bug(
        gate_cast_away,
        "https://github.com/davidmrau/mixture-of-experts/issues/12",
        "Issue with gates parameters",
        ("NOT_TRAINING",),
        ("w_gate", ""),
    ),
    Bug(
        adapters_frozen_by_trainer,
        "https://github.com/huggingface/trl/issues/3926",
        "SFTTrainer freezes LoRA adapter when using PEFT model as argument",
        ("NOT_TRAINING",),
        ("0", "2", ""),
    ),
    Bug(
        clipped_to_norm_zero,
        "https://github.com/strands-labs/robots/pull/2028",
        "fix(training): refuse an on-policy gradient-norm clip the update cannot honor",
        ("NOT_TRAINING",),
        ("*", "", "loss"),
        ("NOT_LEARNING", "LEARNING_RATE", "VANISHING", "CLIPPING"),
    ),
    Bug(
        closure_without_zero_grad,
        "https://github.com/Lightning-AI/pytorch-lightning/pull/6147",
        "Call `optimizer.zero_grad()` before backward inside closure in AutoOpt",
        ("STALE_GRAD",),
        ("*", ""),
        _UPSET,
    ),
    Bug(
        own_optimizer_without_zeroing,
        "https://github.com/f-dangel/backpack/issues/95",
        "Bug in example for DiagGGN Second order optimizer",
        ("STALE_GRAD",),
        ("*", ""),
        _UPSET,
    ),
    Bug(
        step_inside_accumulation,
        "https://github.com/dice-group/dice-embeddings/issues/432",
        "TorchTrainer updates weights on every batch during gradient accumulation",
        ("STALE_GRAD",),
        ("*", ""),
        _UPSET,
    ),
)
