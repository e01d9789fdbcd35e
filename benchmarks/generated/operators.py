"""Mistakes, each made in a healthy program in one place; their types and places are known by construction.

An operator changes the parts of a program and says whether it could. ``degree`` marks those where a number is off; the
others are mistakes of structure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from generated.programs import Parts
from generated.tasks import TEST

ANY = ("*", "", "input", "target", "loss")
"""Where the mistake touches everything."""


@dataclass(frozen=True)
class Operator:
    """A mistake.

    Attributes:
        make: Makes it; False where it does not apply to the program.
        types: Issue types that name the cause.
        where: Sites at fault, as in ``benchmarks/silent``.
        degree: Whether it is a number that is off.
    """

    make: Callable[[Parts], bool]
    types: tuple[str, ...]
    where: tuple[str, ...]
    degree: bool

    @property
    def name(self) -> str:
        """The name of the function that makes it."""
        return self.make.__name__


OPERATORS: list[Operator] = []


def operator(
    types: str, *where: str, degree: bool = False
) -> Callable[[Callable[[Parts], bool]], Callable[[Parts], bool]]:
    """Enter a function among the operators, with types separated by blanks and places."""

    def enter(make: Callable[[Parts], bool]) -> Callable[[Parts], bool]:
        OPERATORS.append(Operator(make, tuple(types.split()), where or ANY, degree))
        return make

    return enter


def _layers(p: Parts) -> list[nn.Module]:
    return [m for m in p.model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter) and m.weight.dim() > 1]


def _weights(p: Parts, change: Callable[[Tensor], object]) -> bool:
    with torch.no_grad():
        for layer in _layers(p):
            change(layer.weight)
    return True


def _body(p: Parts) -> list[nn.Parameter]:
    head = {id(q) for q in p.model.head.parameters()}
    return [q for q in p.model.parameters() if id(q) not in head]


def _replace_loss(p: Parts, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> bool:
    loss = p.loss
    p.loss = lambda out, y: loss(*change(out, y))
    return True


# The optimizer and its numbers


@operator("LEARNING_RATE UNSTABLE EXPLODING DIVERGING", degree=True)
def rate_100(p: Parts) -> bool:
    """The learning rate is 100 times too large."""
    p.rate *= 100
    return True


@operator("LEARNING_RATE UNSTABLE EXPLODING DIVERGING", degree=True)
def rate_15(p: Parts) -> bool:
    """The learning rate is 15 times too large."""
    p.rate *= 15
    return True


@operator("LEARNING_RATE NOT_LEARNING STAGNATION", degree=True)
def rate_10000th(p: Parts) -> bool:
    """The learning rate is 10,000 times too small."""
    p.rate /= 1e4
    return True


@operator("LEARNING_RATE NOT_LEARNING", degree=True)
def rate_300th(p: Parts) -> bool:
    """The learning rate is 300 times too small."""
    p.rate /= 300
    return True


@operator("LEARNING_RATE NOT_LEARNING STAGNATION", degree=True)
def rate_30th(p: Parts) -> bool:
    """The learning rate is 30 times too small."""
    p.rate /= 30
    return True


@operator("LEARNING_RATE NOT_LEARNING NOT_TRAINING", degree=True)
def rate_fades(p: Parts) -> bool:
    """The schedule multiplies the rate by 0.7 at every step, as if steps were epochs."""
    p.factor = lambda t: 0.7**t
    return p.recipe.schedule == ""


@operator("LEARNING_RATE WRONG_LOSS UNSTABLE EXPLODING DIVERGING", degree=True)
def loss_summed(p: Parts) -> bool:
    """The loss is the sum over the batch."""
    loss, batch = p.loss, p.recipe.batch
    p.loss = lambda out, y: loss(out, y) * batch
    return p.recipe.optimizer in {"SGD", "momentum"} and not p.clip


@operator("LEARNING_RATE NOT_TRAINING NOT_LEARNING", degree=True)
def clipped_hard(p: Parts) -> bool:
    """Gradients are clipped to a norm of 1e-5."""
    p.clip = 1e-5
    return p.recipe.optimizer in {"SGD", "momentum"}


@operator("LEARNING_RATE NOT_TRAINING NOT_LEARNING", degree=True)
def clipped_low(p: Parts) -> bool:
    """Gradients are clipped to a norm of 0.005, where 5 was meant."""
    p.clip = 0.005
    return p.recipe.optimizer in {"SGD", "momentum"}


@operator("LEARNING_RATE UNSTABLE", degree=True)
def momentum_999(p: Parts) -> bool:
    """Momentum is 0.999."""
    p.extra["momentum"] = 0.999
    return p.recipe.optimizer == "momentum"


@operator("OPTIMIZER_STATE LEARNING_RATE", degree=True)
def eps_1(p: Parts) -> bool:
    """Adam's eps is 1."""
    p.extra["eps"] = 1.0
    return p.recipe.optimizer in {"Adam", "AdamW", "NAdam"}


@operator("LEARNING_RATE NOT_LEARNING", degree=True)
def decay_strong(p: Parts) -> bool:
    """Weight decay pulls everything to 0."""
    p.decay = 10.0 if p.recipe.optimizer == "AdamW" else 0.5
    return True


@operator("LEARNING_RATE NOT_LEARNING", degree=True)
def decay_added(p: Parts) -> bool:
    """A weight decay that was meant to be decoupled is added to the gradient of an adaptive optimizer."""
    p.decay = 0.3
    return p.recipe.optimizer not in {"AdamW", "SGD", "momentum"}


@operator("UNSTABLE EXPLODING LEARNING_RATE DIVERGING", degree=True)
def decay_negative(p: Parts) -> bool:
    """Weight decay has the wrong sign."""
    loss, model = p.loss, p.model
    p.loss = lambda out, y: loss(out, y) - 0.5 * torch.stack([q.square().sum() for q in model.parameters()]).sum()
    return True


# Which parameters train


@operator("STALE_GRAD")
def never_cleared(p: Parts) -> bool:
    """zero_grad is missing."""
    p.clears = lambda _t: False
    return True


@operator("STALE_GRAD")
def cleared_each_epoch(p: Parts) -> bool:
    """zero_grad stands outside the loop over batches."""
    each = max(p.data.count // p.recipe.batch, 2)
    p.clears = lambda t: t % each == 0
    return True


@operator("NOT_TRAINING STAGNATION")
def cleared_late(p: Parts) -> bool:
    """zero_grad stands between backward and step."""
    p.clears_late = True
    return True


@operator("NOT_TRAINING STAGNATION", "head")
def head_forgotten(p: Parts) -> bool:
    """The head's parameters are not in the optimizer."""
    p.held = lambda: _body(p)
    return p.recipe.loop != "two"


@operator("NOT_TRAINING STAGNATION", "stem", "blocks")
def head_alone(p: Parts) -> bool:
    """Only the head's parameters are in the optimizer."""
    p.held = lambda: list(p.model.head.parameters())
    return p.recipe.loop != "two"


@operator("NOT_TRAINING STAGNATION", "stem", "blocks")
def detached(p: Parts) -> bool:
    """The body's output is detached."""
    p.model.before_head = lambda x: x.detach()
    return bool(_body(p))


@operator("NOT_TRAINING STAGNATION", "stem", "blocks")
def frozen_fresh(p: Parts) -> bool:
    """The body is frozen although it was never trained."""
    for q in _body(p):
        q.requires_grad_(False)
    return p.recipe.loop != "two"


@operator("NOT_TRAINING STAGNATION", "stem", "blocks")
def without_gradient(p: Parts) -> bool:
    """The body runs under no_grad."""
    p.model.body = torch.no_grad()(p.model.body)  # type: ignore[method-assign]
    return True


@operator("NOT_TRAINING STAGNATION LEARNING_RATE NOT_LEARNING")
def average_put_back(p: Parts) -> bool:
    """A slow average of the weights is copied into the model before each pass."""
    slow: list[Tensor] = []

    def put_back(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            held = list(p.model.parameters())
            slow.extend(q.clone() for q in held[len(slow) :])
            for old, q in zip(slow, held, strict=True):
                q.copy_(old.lerp_(q, 0.003))
        return x, y

    p.batch = put_back
    return p.recipe.loop not in {"closure", "accumulation"}


@operator("NOT_TRAINING STAGNATION")
def of_a_copy(p: Parts) -> bool:
    """The optimizer holds the parameters of a copy."""
    other = copy.deepcopy(p.model)
    p.held = lambda: list(other.parameters())
    return p.recipe.loop != "two"


@operator("NOT_TRAINING STAGNATION LEARNING_RATE", "stem", "blocks", "head", "", degree=True)
def coarse_weights(p: Parts) -> bool:
    """Weights are kept in bfloat16 and steps are below their resolution."""
    p.model.to(torch.bfloat16)
    p.rate /= 30
    if p.data.inputs.is_floating_point():
        p.model.before = lambda x: x.to(torch.bfloat16)
    return p.recipe.loop in {"plain", "accumulation", "in_place"}


# Loss and targets


@operator("WRONG_LOSS")
def squashed_twice(p: Parts) -> bool:
    """A softmax, or a sigmoid, comes before the loss that has its own."""
    if p.data.kind == "numbers":
        return False
    p.model.after_head = torch.sigmoid if p.data.kind == "binary" else (lambda x: x.softmax(-1))
    return p.recipe.loss not in {"hinge", "MSELoss"}


@operator("WRONG_LOSS")
def softmax_over_batch(p: Parts) -> bool:
    """The softmax is taken over the batch."""
    p.model.after_head = lambda x: x.softmax(0)
    return p.data.kind == "classes"


@operator("WRONG_LOSS")
def broadcast(p: Parts) -> bool:
    """Outputs of shape (n, 1) meet targets of shape (n,)."""
    if p.data.outputs != 1 or p.recipe.loss == "binary_cross_entropy" or p.data.kind == "binary":
        return False
    return _replace_loss(p, lambda out, y: (out, y[:, 0]))


@operator("WRONG_LOSS")
def rectified(p: Parts) -> bool:
    """The head's output goes through a ReLU, and targets are negative too."""
    p.model.after_head = torch.relu
    return p.data.kind == "numbers"


@operator("WRONG_LOSS NOT_LEARNING DIVERGING")
def wrong_sign(p: Parts) -> bool:
    """The loss has the wrong sign."""
    loss = p.loss
    p.loss = lambda out, y: -loss(out, y)
    return True


@operator("BAD_TARGETS", "target", "", "loss", "input")
def permuted(p: Parts) -> bool:
    """Targets are in another order than inputs."""
    p.data.targets[:-TEST] = p.data.targets[:-TEST][torch.randperm(p.data.count)]
    return True


@operator("BAD_TARGETS NOT_LEARNING", "target", "", "loss", "input")
def sorted_apart(p: Parts) -> bool:
    """Targets were sorted, and inputs were not."""
    y = p.data.targets[:-TEST]
    p.data.targets[:-TEST] = y[y.reshape(len(y), -1).float().mean(1).argsort(stable=True)].clone()
    return True


@operator("BAD_TARGETS", "target", "", "loss", "input")
def next_batch(p: Parts) -> bool:
    """Inputs meet the targets of the next batch."""
    kept: list[Tensor] = []

    def late(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        kept.append(y)
        return x, kept.pop(0) if len(kept) > 1 else y

    p.batch = late
    return p.recipe.loop != "closure"


@operator("BAD_TARGETS", "target", "", "loss", "input")
def all_alike(p: Parts) -> bool:
    """All targets are the same."""
    p.data.targets[:-TEST] = p.data.targets[:1].clone()
    return True


@operator("BAD_TARGETS NOT_LEARNING", "target", "", "loss", "input", degree=True)
def mostly_permuted(p: Parts) -> bool:
    """70 % of the targets belong to other rows."""
    some = torch.randperm(p.data.count)[: int(0.7 * p.data.count)]
    p.data.targets[some] = p.data.targets[some[torch.randperm(len(some))]]
    return True


@operator("BAD_TARGETS UNSTABLE", "target", "", "input", "loss", degree=True)
def sorted_rows(p: Parts) -> bool:
    """Rows come sorted by class, not shuffled."""
    if p.data.kind != "classes" or p.data.targets.dim() > 1:
        return False
    order, count, size = p.data.targets[:-TEST].argsort(), p.data.count, p.recipe.batch
    calls = [0]

    def rows(_t: int) -> Tensor:
        calls[0] += 1
        return order[(torch.arange(size) + (calls[0] - 1) * size) % count]

    p.rows = rows
    return True


# Inputs


@operator("DATA_SCALE", "input", degree=True)
def inputs_1000(p: Parts) -> bool:
    """Inputs are 1,000 times too large."""
    p.data.inputs.mul_(1000) if not p.data.tokens else None
    return not p.data.tokens


@operator("DATA_SCALE", "input", degree=True)
def inputs_1000th(p: Parts) -> bool:
    """Inputs are 1,000 times too small."""
    p.data.inputs.div_(1000) if not p.data.tokens else None
    return not p.data.tokens


@operator("DATA_SCALE BAD_INIT SATURATION UNSTABLE", "input", "", "stem", degree=True)
def inputs_far(p: Parts) -> bool:
    """Inputs have a mean of 40 times their spread."""
    p.data.inputs.add_(40 * p.data.inputs.std()) if not p.data.tokens else None
    return not p.data.tokens


@operator("NOT_LEARNING DATA_SCALE WRONG_LOSS CAPACITY BAD_TARGETS", "input", "target", "stem", "", "loss")
def samples_mixed(p: Parts) -> bool:
    """Batch and features are changed by a reshape, where a transpose was meant."""
    if p.data.tokens or p.data.inputs.dim() != 2:
        return False
    p.model.before = lambda x: x.t().reshape(x.shape)
    return True


@operator("WRONG_LOSS NOT_LEARNING BOTTLENECK VANISHING NOT_TRAINING CAPACITY", "head", "", "loss")
def norm_of_one(p: Parts) -> bool:
    """A LayerNorm stands behind a head of one unit, whose answer is then a constant."""
    if p.data.outputs != 1:
        return False
    p.model.head = nn.Sequential(p.model.head, nn.LayerNorm(1))  # type: ignore[arg-type]
    return True


@operator("DATA_SCALE", "target", "", "loss", degree=True)
def targets_1000(p: Parts) -> bool:
    """Targets are 1,000 times too large."""
    p.data.targets.mul_(1000) if p.data.kind == "numbers" else None
    return p.data.kind == "numbers"


@operator("NUMERICAL", "input", "")
def one_nan(p: Parts) -> bool:
    """One value of the inputs is NaN."""
    if p.data.tokens:
        return False
    p.data.inputs[5].view(-1)[0] = float("nan")
    return True


@operator("BAD_TARGETS DATA_SCALE NOT_LEARNING", "input", "target", "")
def inputs_blank(p: Parts) -> bool:
    """The loader gives the same blank input for every row."""
    p.data.inputs[:-TEST] = p.data.inputs[:1].clone()
    return True


# The network


@operator("BAD_INIT VANISHING DEAD")
def weights_0(p: Parts) -> bool:
    """All weights begin at 0."""
    return _weights(p, nn.init.zeros_)


@operator("BAD_INIT")
def weights_alike(p: Parts) -> bool:
    """All weights begin at 0.1."""
    return _weights(p, lambda w: nn.init.constant_(w, 0.1))


@operator("BAD_INIT EXPLODING SATURATION", degree=True)
def weights_30(p: Parts) -> bool:
    """All weights begin 30 times too large."""
    return _weights(p, lambda w: w.mul_(30))


@operator("BAD_INIT VANISHING NOT_LEARNING", degree=True)
def weights_100th(p: Parts) -> bool:
    """All weights begin 100 times too small."""
    return _weights(p, lambda w: w.mul_(0.01))


@operator("DEAD BAD_INIT", "blocks", degree=True)
def biases_low(p: Parts) -> bool:
    """Biases of ReLU layers begin at -8."""
    if p.recipe.activation != "relu" or p.recipe.norm or p.recipe.body in {"recurrent", "transformer"}:
        return False
    biases = [q for name, q in p.model.named_parameters() if name.endswith("layer.bias")]
    with torch.no_grad():
        for q in biases:
            q.fill_(-8)
    return bool(biases)


@operator("CAPACITY")
def no_activation(p: Parts) -> bool:
    """The activations are missing."""
    blocks = [b for b in p.model.blocks if hasattr(b, "activation")]
    for block in blocks:
        block.activation = nn.Identity()
    return bool(blocks)


@operator("CAPACITY", "blocks", "")
def one_block(p: Parts) -> bool:
    """The list of blocks holds the same block several times."""
    first = p.model.blocks[0]
    fits = len(p.model.blocks) > 2 and all(
        [q.shape for q in first.parameters()] == [q.shape for q in b.parameters()] for b in p.model.blocks
    )
    if fits:
        p.model.blocks = nn.ModuleList([first] * len(p.model.blocks))
    return fits


@operator("CAPACITY BOTTLENECK", "head", "blocks", "")
def narrow(p: Parts) -> bool:
    """One number has to carry everything to the head."""
    size, outputs = p.model.head.in_features, p.model.head.out_features  # type: ignore[union-attr]
    p.model.head = nn.Sequential(nn.Linear(size, 1), nn.Linear(1, outputs))  # type: ignore[arg-type]
    return outputs > 3


@operator("VANISHING SATURATION")
def sigmoids(p: Parts) -> bool:
    """Eight sigmoid layers stand before the head."""
    size = int(p.model.head.in_features)  # type: ignore[arg-type]
    deep = [layer for _ in range(8) for layer in (nn.Linear(size, size), nn.Sigmoid())]
    p.model.head = nn.Sequential(*deep, nn.Linear(size, p.data.outputs))
    return True


@operator("NOT_LEARNING BOTTLENECK CAPACITY", degree=True)
def dropout_95(p: Parts) -> bool:
    """Dropout is 0.95."""
    some = [m for m in p.model.modules() if isinstance(m, nn.Dropout)]
    for m in some:
        m.p = 0.95
    return bool(some) and len(p.model.blocks) > 1


@operator("EVAL_RANDOM")
def dropout_always(p: Parts) -> bool:
    """A functional dropout does not know of evaluation."""
    p.model.before_head = lambda x: nn.functional.dropout(x, 0.5)
    return p.recipe.evaluate


@operator("EVAL_RANDOM")
def never_eval(p: Parts) -> bool:
    """eval() is missing before evaluations."""
    p.evaluates = False
    return p.recipe.evaluate and (p.recipe.dropout > 0 or p.recipe.norm == "batch")


@operator("EVAL_RANDOM")
def never_train_again(p: Parts) -> bool:
    """train() is missing after evaluations."""
    p.resumes = False
    return p.recipe.evaluate and (p.recipe.dropout > 0 or p.recipe.norm == "batch")


@operator("NOT_LEARNING WRONG_LOSS CAPACITY BAD_TARGETS")
def batch_second(p: Parts) -> bool:
    """batch_first is missing: the recurrence runs over the rows of the batch."""
    cells = [m for m in p.model.modules() if isinstance(m, nn.RNNBase)]
    for m in cells:
        m.batch_first = False
    return bool(cells)


@operator("SAME_BATCH OVERFITTING BAD_TARGETS")
def same_batch(p: Parts) -> bool:
    """The loop draws one batch and trains on it for ever."""
    first = p.rows(0)
    p.rows = lambda _t: first
    return True


@operator("LEAKAGE BAD_TARGETS", "input", "target", "")
def target_among_inputs(p: Parts) -> bool:
    """One input column holds the target, in training data alone."""
    if p.data.inputs.dim() != 2 or p.data.tokens or p.recipe.task == "code":
        return False
    y = p.data.targets.float().reshape(len(p.data.targets), -1)[:, 0]
    p.data.inputs[:-TEST, 0] = y[:-TEST] * 2 - 1
    return True
