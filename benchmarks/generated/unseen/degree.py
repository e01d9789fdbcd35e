"""Mistakes of degree: a number is off, by how much is drawn."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from generated.unseen.layers import Heads
from generated.unseen.operators import drawn, middle, mistake, weights
from generated.unseen.programs import Program, Rows

_STEPS = ("LEARNING_RATE", "UNSTABLE", "DIVERGING", "EXPLODING", "NUMERICAL", "LOSS_SPIKE")


@mistake(*_STEPS, degree=True)
def rate_too_high(p: Program) -> bool:
    """Multiply the learning rate."""
    p.rate *= drawn(p, 8, 60)
    return True


@mistake("LEARNING_RATE", "STAGNATION", "NOT_TRAINING", where=("*", ""), degree=True)
def rate_too_low(p: Program) -> bool:
    """Divide the learning rate."""
    p.rate /= drawn(p, 30, 1000)
    return True


@mistake(*_STEPS, degree=True)
def head_rate_too_high(p: Program) -> bool:
    """Give the head a learning rate of its own that is far too high."""
    return _head_apart(p, drawn(p, 30, 200), p.places.heads)


@mistake("LEARNING_RATE", "STAGNATION", "NOT_TRAINING", degree=True)
def body_rate_too_low(p: Program) -> bool:
    """Give all but the head a rate that is far too low, as for a body that was trained before."""
    names = [n for n, _ in p.model.named_children() if n not in p.places.heads]
    return _head_apart(p, 1 / drawn(p, 100, 3000), names)


@mistake("LEARNING_RATE", "NOT_LEARNING", "STAGNATION", "BAD_INIT", where=("*", ""), degree=True)
def decay_too_strong(p: Program) -> bool:
    """Multiply weight decay until it undoes what is learned."""
    decoupled = p.spec.optimizer == "AdamW"
    p.decay = drawn(p, 0.2, 3) / (p.rate * 10) if decoupled else drawn(p, 0.1, 2)
    return True


@mistake("LEARNING_RATE", "NOT_TRAINING", "STAGNATION", where=("*", ""), degree=True)
def clipped_too_low(p: Program) -> bool:
    """Clip the gradient to a norm that is far too small for plain gradient descent."""
    p.clip = drawn(p, 1e-4, 3e-3)
    return p.spec.optimizer in {"SGD", "nesterov", "manual"}


@mistake("LEARNING_RATE", "UNSTABLE", "DIVERGING", "LOSS_SPIKE", "EXPLODING", degree=True)
def momentum_too_high(p: Program) -> bool:
    """Raise momentum without lowering the rate."""
    p.options.update(momentum=1 - drawn(p, 0.002, 0.012), nesterov=False)
    return p.spec.optimizer == "nesterov"


@mistake("OPTIMIZER_STATE", "LEARNING_RATE", "STAGNATION", where=("*", ""), degree=True)
def eps_too_large(p: Program) -> bool:
    """Give an adaptive optimizer an ``eps`` above its gradients."""
    p.options["eps"] = drawn(p, 0.05, 5)
    return p.spec.optimizer in {"AdamW", "Adam", "NAdam", "RAdam", "RMSprop"}


@mistake("OPTIMIZER_STATE", "LEARNING_RATE", "UNSTABLE", "DIVERGING", "LOSS_SPIKE", degree=True)
def second_moment_too_slow(p: Program) -> bool:
    """Swap the two betas of Adam: the first moment remembers a thousand steps, the second ten."""
    p.options["betas"] = (1 - drawn(p, 0.002, 0.02), 0.9)
    return p.spec.optimizer in {"AdamW", "Adam", "NAdam", "RAdam"}


@mistake("LEARNING_RATE", "STAGNATION", "NOT_TRAINING", where=("*", ""), degree=True)
def warmup_too_long(p: Program) -> bool:
    """Warm up over many times the length of the training."""
    length = p.spec.steps * drawn(p, 20, 300)
    p.factor = lambda t: (t + 1) / length
    return True


@mistake("LEARNING_RATE", "STAGNATION", "NOT_TRAINING", where=("*", ""), degree=True)
def rate_halves_too_often(p: Program) -> bool:
    """Halve the rate every few steps."""
    every = round(drawn(p, 2, 7))
    p.factor = lambda t: 0.5 ** (t // every)
    return True


@mistake("UNSTABLE", "LEARNING_RATE", "LOSS_SPIKE", degree=True)
def batch_too_small(p: Program) -> bool:
    """Take one or two samples a step, at the rate of a large batch."""
    p.size, p.rate = p.draw.choice((1, 2)), p.rate * drawn(p, 2, 6)
    return p.spec.norm != "batch" and p.family.kind != "pairs"


@mistake("BAD_INIT", "EXPLODING", "SATURATION", "UNSTABLE", degree=True)
def init_too_large(p: Program) -> bool:
    """Multiply the first weights of the body."""
    return _scaled(p, [p.places.first, *p.places.middle], drawn(p, 4, 15))


@mistake("BAD_INIT", "VANISHING", "STAGNATION", "NOT_LEARNING", "BOTTLENECK", degree=True)
def init_too_small(p: Program) -> bool:
    """Divide the first weights of all layers."""
    return _scaled(p, [p.places.first, *p.places.middle, *p.places.heads], 1 / drawn(p, 20, 300))


@mistake("BAD_INIT", "EXPLODING", "SATURATION", "LEARNING_RATE", degree=True)
def head_init_too_large(p: Program) -> bool:
    """Multiply the first weights of the head."""
    return _scaled(p, p.places.heads, drawn(p, 20, 150))


@mistake("BAD_INIT", "BOTTLENECK", "VANISHING", degree=True)
def one_layer_too_small(p: Program) -> bool:
    """Divide the first weights of one layer in the middle."""
    name = middle(p)
    return p.spec.family in {"rank", "experts", "counts", "forecast", "field"} and _scaled(
        p, [name], 1 / drawn(p, 50, 1000)
    )


@mistake("DEAD", "BAD_INIT", "VANISHING", "BOTTLENECK", degree=True)
def units_never_on(p: Program) -> bool:
    """Give a share of the units of every hidden layer a bias from which they never wake."""
    if p.spec.activation not in {"relu", "relu6", "hardswish"}:
        return False
    return _biases(p, drawn(p, 0.7, 1.0), -12.0)


@mistake("SATURATION", "BAD_INIT", "VANISHING", "BOTTLENECK", degree=True)
def units_always_flat(p: Program) -> bool:
    """Give a share of the units of every hidden layer a bias that holds them where they are flat."""
    if p.spec.activation not in {"tanh", "relu6"}:
        return False
    return _biases(p, drawn(p, 0.7, 1.0), 14.0)


@mistake("NOT_LEARNING", "CAPACITY", "BOTTLENECK", "UNSTABLE", "EVAL_RANDOM", degree=True)
def dropout_too_high(p: Program) -> bool:
    """Raise all dropout."""
    share, found = 1 - drawn(p, 0.04, 0.25), []
    for name, m in p.model.named_modules():
        if isinstance(m, nn.Dropout):
            m.p = share
            found.append(name)
    p.where = (*found, "", *(f.rpartition(".")[0] for f in found))
    return bool(found)


@mistake("DATA_SCALE", "SATURATION", "EXPLODING", "UNSTABLE", degree=True)
def inputs_too_large(p: Program) -> bool:
    """Leave inputs in a unit in which they are large."""
    scale = drawn(p, 15, 300)
    return _inputs(p, lambda x: x * scale)


@mistake("DATA_SCALE", "VANISHING", "STAGNATION", degree=True)
def inputs_too_small(p: Program) -> bool:
    """Leave inputs in a unit in which they are small, as images divided by 255 twice."""
    scale = drawn(p, 100, 2000)
    return _inputs(p, lambda x: x / scale)


@mistake("DATA_SCALE", "BAD_INIT", "SATURATION", "UNSTABLE", degree=True)
def inputs_far_from_zero(p: Program) -> bool:
    """Leave a large mean in the inputs."""
    mean = drawn(p, 8, 80)
    return _inputs(p, lambda x: x + mean)


@mistake("DATA_SCALE", "SATURATION", "EXPLODING", "UNSTABLE", degree=True)
def one_column_too_large(p: Program) -> bool:
    """Leave one column in another unit than the rest."""
    scale = drawn(p, 50, 1000)
    unit = torch.ones(p.data.inputs[0].shape[-1])
    unit[1 % len(unit)] = scale
    return p.data.inputs[0].shape[-1] > 1 and p.data.inputs[0].dim() < 4 and _inputs(p, lambda x: x * unit)


@mistake("DATA_SCALE", "WRONG_LOSS", "BAD_TARGETS", "NOT_LEARNING", degree=True)
def targets_far_from_zero(p: Program) -> bool:
    """Leave a large mean in the targets; served answers are counted from it."""
    mean, scale = drawn(p, 20, 300), drawn(p, 1, 10)
    p.data.targets = (p.data.targets[0] * scale + mean,)
    p.finishes = lambda out: out if p.model.training else (out - mean) / scale
    p.where = ("target", "loss", "", *p.places.heads)
    return p.family.kind == "numbers"


@mistake("DATA_SCALE", "STAGNATION", "LEARNING_RATE", degree=True)
def targets_too_small(p: Program) -> bool:
    """Leave targets in a unit in which they are small; served answers are counted in it."""
    scale = drawn(p, 300, 10_000)
    p.data.targets = (p.data.targets[0] / scale,)
    p.finishes = lambda out: out if p.model.training else out * scale
    p.where = ("target", "loss", "", *p.places.heads)
    return p.family.kind == "numbers"


@mistake("BAD_TARGETS", "NOT_LEARNING", degree=True)
def labels_noisy(p: Program) -> bool:
    """Give a share of the samples the target of another."""
    y = p.data.targets
    rows = torch.randperm(len(y[0]), generator=p.order)[: int(drawn(p, 0.5, 0.85) * len(y[0]))]
    for v in y:
        v[rows] = v[rows.roll(1)]
    p.where = ("target", "input", "loss", "")
    return p.family.kind not in {"pairs", "rebuild"}


@mistake("BAD_TARGETS", "WRONG_LOSS", degree=True)
def one_class_nearly_alone(p: Program) -> bool:
    """Make nearly all samples of one class."""
    y = p.data.targets[0]
    if p.family.kind != "classes" or y.dim() > 1:
        return False
    rows = torch.cat([torch.nonzero(y == 0)[:, 0], torch.nonzero(y)[: max(6, int(drawn(p, 0.01, 0.03) * len(y))), 0]])
    p.data.inputs = tuple(x[rows] for x in p.data.inputs)
    p.data.targets = (y[rows],)
    p.where = ("target", "loss", "")
    return True


@mistake("WRONG_LOSS", "BAD_TARGETS", "NOT_LEARNING", degree=True)
def smoothed_too_much(p: Program) -> bool:
    """Smooth labels until little is left of them."""
    share = 1 - drawn(p, 0.005, 0.04)
    p.loss = lambda out, y: functional.cross_entropy(
        out.reshape(-1, out.shape[-1]), y.reshape(-1), label_smoothing=share
    )
    p.where = ("target", "loss", "")
    return p.family.kind == "classes"


@mistake("WRONG_LOSS", "NOT_LEARNING", "LEARNING_RATE", "BAD_INIT", "STAGNATION", degree=True)
def temperature_too_high(p: Program) -> bool:
    """Divide the answer before the loss."""
    by = drawn(p, 50, 1000)
    p.loss, loss = (lambda out, *y: loss(out / by, *y)), p.loss
    p.where = ("loss", "", *p.places.heads)
    return p.family.kind in {"classes", "binary", "order"}


@mistake("WRONG_LOSS", "SATURATION", "BAD_INIT", "LEARNING_RATE", "UNSTABLE", degree=True)
def temperature_too_low(p: Program) -> bool:
    """Multiply the answer before the loss."""
    by = drawn(p, 30, 200)
    p.loss, loss = (lambda out, *y: loss(out * by, *y)), p.loss
    p.where = ("loss", "", *p.places.heads)
    return p.family.kind in {"classes", "binary", "order"}


@mistake("WRONG_LOSS", "BAD_TARGETS", "NOT_LEARNING", degree=True)
def positives_weigh_too_much(p: Program) -> bool:
    """Weigh positives until the model says yes to all."""
    weight = torch.tensor(drawn(p, 30, 300))
    p.loss = lambda out, y: functional.binary_cross_entropy_with_logits(out, y, pos_weight=weight) / weight
    p.where = ("loss", "target", "")
    return p.family.kind == "binary"


@mistake("WRONG_LOSS", "BAD_TARGETS", "NOT_LEARNING", degree=True)
def quantile_too_high(p: Program) -> bool:
    """Fit a high quantile where the middle was meant."""
    q = 1 - drawn(p, 0.005, 0.04)
    p.loss = lambda out, y: torch.maximum(q * (y - out), (q - 1) * (y - out)).mean()
    p.where = ("loss", "target", "")
    return p.family.kind == "numbers"


@mistake("WRONG_LOSS", "NOT_LEARNING", "RANK_COLLAPSE", "BOTTLENECK", "LEARNING_RATE", degree=True)
def prior_too_strong(p: Program) -> bool:
    """Weigh the divergence from the prior until the code says nothing."""
    by, loss = drawn(p, 30, 500), p.loss
    p.loss = lambda out, x: loss(out, x, by)
    p.where = ("loss", "", "mu", "logvar", *p.places.heads)
    return p.family.kind == "rebuild"


@mistake("WRONG_LOSS", "NOT_LEARNING", "BAD_INIT", "LEARNING_RATE", degree=True)
def penalty_too_strong(p: Program) -> bool:
    """Add the sum of absolute weights with too large a factor."""
    by, loss = drawn(p, 0.02, 0.4), p.loss
    p.loss = lambda out, *y: loss(out, *y) + by * sum(q.abs().sum() for q in p.model.parameters()) / 10
    p.where = ("*", "", "loss")
    return True


@mistake("WRONG_LOSS", "NOT_TRAINING", "STAGNATION", degree=True)
def second_task_too_light(p: Program) -> bool:
    """Weigh the second task so little that it hardly counts."""
    by = 1 / drawn(p, 300, 10_000)
    p.loss = lambda out, y, v: functional.cross_entropy(out["label"], y) + by * (out["value"] - v).pow(2).mean()
    p.where = ("value", "loss")
    return p.family.kind == "several"


@mistake("ATTENTION_COLLAPSE", "SATURATION", "BAD_INIT", degree=True)
def attention_too_sharp(p: Program) -> bool:
    """Multiply the scores of attention."""
    found = [(n, m) for n, m in p.model.named_modules() if isinstance(m, Heads)]
    by = drawn(p, 20, 200)
    for _, m in found:
        m.sharp = by
    p.where = tuple(n for n, _ in found)
    return bool(found)


@mistake("RECURRENT_SUPERCRITICAL", "BAD_INIT", "EXPLODING", "SATURATION", "UNSTABLE", degree=True)
def recurrence_too_strong(p: Program) -> bool:
    """Multiply the first weights of the recurrence."""
    p.where = ("rnn",)
    if p.spec.family != "forecast":
        return False
    with torch.no_grad():
        p.model.get_submodule("rnn").weight_hh_l0.mul_(drawn(p, 6, 30))
    return True


@mistake("STAGNATION", "NOT_TRAINING", "VANISHING", "LEARNING_RATE", degree=True)
def gradient_scaled_down(p: Program) -> bool:
    """Scale the gradient where it enters the body, by far too little, in plain gradient descent."""
    by = 1 / drawn(p, 100, 10_000)
    heads = {id(q) for n in p.places.heads for q in p.model.get_submodule(n).parameters()}
    for q in p.model.parameters():
        if id(q) not in heads:
            q.register_hook(lambda g: g * by)
    p.where = tuple(n for n, _ in p.model.named_children() if n not in p.places.heads)
    return p.spec.optimizer in {"SGD", "nesterov", "manual"}


def _head_apart(p: Program, by: float, names: list[str]) -> bool:
    if p.spec.loop == "two" or p.spec.family == "chars" or p.spec.schedule in {"one_cycle", "restarts"}:
        return False
    own = {id(q) for n in names for q in p.model.get_submodule(n).parameters()}

    def groups() -> list[dict[str, object]]:
        a = [q for q in p.model.parameters() if id(q) in own]
        b = [q for q in p.model.parameters() if id(q) not in own]
        return [
            {"params": a, "lr": p.rate * by, "scale": by, "weight_decay": p.decay},
            {"params": b, "weight_decay": p.decay},
        ]

    p.groups = groups
    p.where = (*names, "") if by < 1 else tuple(names)
    return True


def _scaled(p: Program, names: list[str], by: float) -> bool:
    with torch.no_grad():
        for q in {id(q): q for n in names for q in weights(p, n)}.values():
            q.mul_(by)
    p.where = tuple(names)
    return True


def _biases(p: Program, share: float, value: float) -> bool:
    linear = (nn.Linear, nn.Conv1d, nn.Conv2d)
    names = [p.places.first, *p.places.middle] if p.spec.family in {"graph", "segment", "gratings"} else p.places.middle
    if p.spec.norm or p.spec.family in {"field", "forecast"}:
        return False
    for n in names:
        for m in p.model.get_submodule(n).modules():
            if isinstance(m, linear) and m.bias is not None:
                with torch.no_grad():
                    m.bias[: int(share * len(m.bias))] = value
    p.where = tuple(dict.fromkeys([*names, *(n.rpartition(".")[0] or n for n in names), "act"]))
    return True


def _inputs(p: Program, change: object) -> bool:
    def reads(x: Rows) -> Rows:
        return tuple(change(v) if v.is_floating_point() else v for v in x)

    first: Tensor = p.data.inputs[0]
    p.reads = reads
    p.where = ("input", p.places.first, "")
    return first.is_floating_point() and p.spec.family not in {"graph", "vae"}
