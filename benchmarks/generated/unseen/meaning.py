"""Mistakes of structure in data, model and loss: something else is computed than was meant."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from generated.unseen.layers import Heads
from generated.unseen.operators import mistake, put
from generated.unseen.programs import Program, Rows, batches


@mistake("BAD_TARGETS", "NOT_LEARNING")
def rows_shuffled_apart(p: Program) -> bool:
    """Shuffle the rows of a batch without those of its targets."""
    p.alters = lambda x, y: (tuple(v[torch.randperm(len(v), generator=p.order)] for v in x[:1]) + x[1:], y)
    p.where = ("target", "input", "loss", "")
    return p.family.kind not in {"pairs", "rebuild"}


@mistake("BAD_TARGETS", "NOT_LEARNING")
def joined_by_sorted_key(p: Program) -> bool:
    """Join inputs and targets that were sorted by different keys."""
    y = p.data.targets[0]
    order = y.reshape(len(y), -1).float().mean(1).argsort(stable=True)
    p.data.targets = tuple(v[order] for v in p.data.targets)
    p.where = ("target", "input", "loss", "")
    return p.family.kind not in {"pairs", "rebuild"}


@mistake("BAD_TARGETS", "NOT_LEARNING")
def same_batch_for_ever(p: Program) -> bool:
    """Take ``next(iter(loader))`` in each step of a loader that does not shuffle."""

    def first(q: Program) -> Iterator[tuple[Rows, Rows]]:
        one = next(batches(q))
        while True:
            yield one

    p.batches = first
    return True


@mistake("BAD_TARGETS")
def target_among_inputs(p: Program) -> bool:
    """Leave the target among the inputs; where the model serves, that column is empty."""
    if p.spec.family not in {"experts", "counts", "tasks"}:
        return False
    x, y = p.data.inputs[0], p.data.targets[-1]
    x[:, -1] = y.reshape(len(y), -1)[:, 0]

    def served(rows: Rows) -> Rows:
        return rows if p.model.training else (torch.cat([rows[0][:, :-1], 0 * rows[0][:, -1:]], 1), *rows[1:])

    p.reads = served
    p.where = ("input", "target", "loss", "")
    return True


@mistake("WRONG_LOSS", "NOT_LEARNING", "SATURATION")
def probabilities_as_logits(p: Program) -> bool:
    """Give probabilities where the loss wants logits."""
    if p.family.kind not in {"classes", "binary"}:
        return False
    squash = torch.sigmoid if p.family.kind == "binary" else (lambda out: torch.softmax(out, -1))
    p.finishes = lambda out: squash(out) if p.model.training else out
    p.where = ("", "loss", *p.places.heads)
    return True


@mistake("WRONG_LOSS", "NOT_LEARNING", "SATURATION")
def answer_squashed(p: Program) -> bool:
    """End with a sigmoid where targets have both signs."""
    p.finishes = torch.sigmoid
    p.where = ("", "loss", "target", *p.places.heads)
    return p.family.kind == "numbers"


@mistake("WRONG_LOSS", "NOT_LEARNING", "BOTTLENECK", "VANISHING", "NOT_TRAINING", "CAPACITY")
def norm_of_one_number(p: Program) -> bool:
    """Put a LayerNorm behind a head of one unit: its answer is a constant."""
    last = p.model.get_submodule(p.places.heads[0])
    if not isinstance(last, nn.Linear) or last.out_features != 1:
        return False
    put(p, p.places.heads[0], nn.Sequential(last, nn.LayerNorm(1)))
    p.where = (p.places.heads[0], "", "loss")
    return True


@mistake("NOT_LEARNING", "CAPACITY", "BOTTLENECK", "WRONG_LOSS", "RANK_COLLAPSE")
def mean_over_the_batch(p: Program) -> bool:
    """Take the mean over the batch in place of that over features."""
    name = p.places.heads[0]
    p.model.get_submodule(name).register_forward_pre_hook(lambda _m, x: (x[0].mean(0, keepdim=True).expand_as(x[0]),))
    p.where = (name, *p.places.middle[-1:], "")
    return p.spec.family not in {"pairs", "vae"}


@mistake("WRONG_LOSS", "ATTENTION_COLLAPSE", "NOT_LEARNING", "HEAD_REDUNDANCY")
def attention_over_batch(p: Program) -> bool:
    """Take the softmax of attention over the batch."""
    found = [(n, m) for n, m in p.model.named_modules() if isinstance(m, Heads)]
    for _, m in found:
        m.dim = 0
    p.where = tuple(n for n, _ in found)
    return bool(found)


@mistake("NOT_LEARNING", "BAD_TARGETS", "WRONG_LOSS")
def causal_mask_inverted(p: Program) -> bool:
    """Let each position see the future and not the past."""
    found = [(n, m) for n, m in p.model.named_modules() if isinstance(m, Heads) and m.causal]
    for _, m in found:
        m.keep = False
    p.where = (*(n for n, _ in found), "", "loss", "target")
    return bool(found)


@mistake("RANK_COLLAPSE", "WRONG_LOSS", "NOT_LEARNING", "BOTTLENECK")
def no_negatives(p: Program) -> bool:
    """Pull pairs together and push nothing apart."""
    p.loss = lambda out, _ids: (1 - (out[0] * out[1]).sum(1)).mean()
    p.where = (*p.places.heads, "", "loss")
    return p.family.kind == "pairs"


@mistake("WRONG_LOSS", "DIVERGING", "EXPLODING", "NUMERICAL", "UNSTABLE", "LEARNING_RATE")
def penalty_with_wrong_sign(p: Program) -> bool:
    """Subtract a penalty on the answer in place of adding it."""
    loss = p.loss

    def wrong(out: Tensor, *y: Tensor) -> Tensor:
        return loss(out, *y) - 0.6 * (out**2).mean()

    p.loss = wrong
    p.where = ("", "loss", *p.places.heads)
    return p.family.kind == "numbers"


@mistake("WRONG_LOSS", "DIVERGING", "EXPLODING", "LEARNING_RATE", "NUMERICAL", "UNSTABLE")
def maximised(p: Program) -> bool:
    """Give the optimizer ``maximize=True``."""
    p.options["maximize"] = True
    return p.spec.optimizer != "manual"


@mistake("NOT_TRAINING", "WRONG_LOSS")
def second_head_forgotten(p: Program) -> bool:
    """Leave the second task out of the loss."""
    p.loss = lambda out, y, _v: functional.cross_entropy(out["label"], y)
    p.where = ("value", "loss")
    return p.family.kind == "several"


@mistake("WRONG_LOSS", "NOT_LEARNING", "NOT_TRAINING")
def scores_before_last_layer(p: Program) -> bool:
    """Compare with the mean of all targets, as they were averaged before the loss."""
    p.loss, loss = (lambda out, *y: loss(out, *(v.mean(0, keepdim=True).expand_as(v) for v in y))), p.loss
    p.where = ("loss", "target", "")
    return p.family.kind in {"numbers", "binary"}


@mistake("NUMERICAL", "DATA_SCALE", where=("input", "", "*"))
def constant_feature_divided(p: Program) -> bool:
    """Divide each feature by its spread; one never varies, and its spread is 0."""
    x = p.data.inputs[0]
    p.where = ("input", "", p.places.first)
    if not x.is_floating_point() or x.dim() != 2 or x.shape[1] < 5:
        return False
    x[:, 3] = 0.0
    spread = x.std(0)
    p.reads = lambda r: (r[0] / spread, *r[1:])
    return True


@mistake("NUMERICAL", where=("*", "", "loss"))
def distance_at_zero(p: Program) -> bool:
    """Add a root of a distance that is 0 for some: its gradient is infinite."""
    loss = p.loss
    p.loss = lambda out, *y: loss(out, *y) + 0.1 * torch.sqrt(((out - out.detach()) ** 2).sum()) * 1.0
    p.where = ("loss", "", *p.places.heads)
    return p.family.kind in {"numbers", "classes", "binary", "counts", "order"}


@mistake("NUMERICAL", "LOSS_SPIKE", where=("*", "", "loss", "target"))
def empty_group_averaged(p: Program) -> bool:
    """Average over the rows of a batch that meet a condition; now and then none does."""
    loss = p.loss
    seen = {"calls": 0}

    def of_some(out: Tensor, y: Tensor) -> Tensor:
        seen["calls"] += 1
        keep = y.reshape(len(y), -1).float().mean(1) > (-9.0 if seen["calls"] % 40 else 1e9)
        return loss(out[keep], y[keep])

    p.loss = of_some
    return p.family.kind in {"numbers", "binary", "classes"}


@mistake("NOT_TRAINING", "WRONG_LOSS", "NOT_LEARNING", "BAD_TARGETS")
def all_targets_masked(p: Program) -> bool:
    """Multiply the loss with a mask that was meant the other way round."""
    p.loss, loss = (lambda out, *y: loss(out, *y) * (y[0] != y[0]).float().mean()), p.loss
    return True


@mistake("DATA_SCALE", "NOT_LEARNING", "BAD_TARGETS", "NOT_TRAINING", "VANISHING")
def inputs_masked_away(p: Program) -> bool:
    """Multiply the inputs with an inverted mask: all that was measured becomes 0."""
    if not p.data.inputs[0].is_floating_point() or p.family.kind == "pairs":
        return False
    p.reads = lambda x: (x[0] * torch.isnan(x[0]), *x[1:])
    p.where = ("input", p.places.first, "")
    return True


@mistake("NOT_LEARNING", "CAPACITY", "BOTTLENECK", "RECURRENT_SUBCRITICAL", "BAD_TARGETS")
def window_cut(p: Program) -> bool:
    """Cut the oldest four values from a series, again and again, where the newest were meant."""
    p.reads = lambda x: (x[0][:, :4].repeat(1, 5, 1)[:, :18],)
    p.where = ("rnn", "input", "", "ahead")
    return p.spec.family == "forecast"


@mistake("NOT_LEARNING", "DATA_SCALE", "WRONG_LOSS", "CAPACITY", "BAD_TARGETS")
def reshaped_not_transposed(p: Program) -> bool:
    """Change batch and features with ``view`` where ``transpose`` was meant: samples mix."""
    x = p.data.inputs[0]
    if not x.is_floating_point() or x.dim() > 3 or p.family.kind in {"pairs", "rebuild"}:
        return False

    def mix(rows: Rows) -> Rows:
        v = rows[0]
        return v.transpose(0, -1).reshape(v.shape), *rows[1:]

    p.reads = mix
    p.where = ("input", "target", p.places.first, "", "loss")
    return True
