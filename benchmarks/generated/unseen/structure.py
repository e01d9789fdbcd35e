"""Mistakes of structure in loop, optimizer and graph: something is missing, or in the wrong order."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from generated.unseen.operators import middle, mistake, put
from generated.unseen.programs import Program


@mistake("NOT_TRAINING", where=("*", ""))
def step_forgotten(p: Program) -> bool:
    """Forget ``step()``."""
    p.steps_at = lambda _t: False
    return True


@mistake("NOT_TRAINING", "WRONG_LOSS", where=("*", "", "loss"))
def loss_made_anew(p: Program) -> bool:
    """Wrap the value of the loss in a new tensor that requires a gradient."""
    p.propagates = lambda loss: torch.tensor(loss.item(), requires_grad=True).backward()
    return True


@mistake("NOT_TRAINING", "LEARNING_RATE", where=("*", ""))
def warmup_never_stepped(p: Program) -> bool:
    """Make a linear warm-up from 0 and forget ``scheduler.step()``."""
    p.factor = lambda _t: 0.0
    return True


@mistake("NOT_TRAINING", "LEARNING_RATE", where=("*", ""))
def schedule_counts_epochs(p: Program) -> bool:
    """Step at every batch a schedule whose end was given in epochs, so that the rate is 0 soon."""
    last = max(3, p.spec.steps // 40)
    p.factor = lambda t: max(0.0, 1 - t / last)
    return True


@mistake("STALE_GRAD", where=("*", ""))
def second_group_never_cleared(p: Program) -> bool:
    """Clear the gradients of one of two optimizers alone."""
    if p.spec.loop != "two" or (not p.optimizers and p.spec.optimizer == "manual"):
        return False
    p.clears_at = lambda _t, which: which == 1
    p.where = (p.places.first, *p.places.middle, *_others(p))
    return True


@mistake("STALE_GRAD", where=("*", ""))
def cleared_every_eighth_step(p: Program) -> bool:
    """Clear as for accumulation, and step each time."""
    p.clears_at = lambda t, _which: t % 8 == 0
    return True


@mistake("NOT_TRAINING", "VANISHING", "STAGNATION")
def code_rounded(p: Program) -> bool:
    """Round what a layer gives; nothing before it gets a gradient."""
    name = p.places.middle[-1]
    p.model.get_submodule(name).register_forward_hook(lambda _m, _x, out: torch.round(out * 4) / 4)
    at = p.places.middle.index(name)
    p.where = (p.places.first, *p.places.middle[: at + 1])
    return p.spec.family in {"rank", "experts", "field", "counts", "forecast", "vae"}


@mistake("NOT_TRAINING", "STAGNATION")
def encoder_without_grad(p: Program) -> bool:
    """Run the first layers in ``no_grad``, with first weights so small that they must learn."""
    layer = p.model.get_submodule(p.places.first)
    if not isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
        return False
    forward = layer.forward
    with torch.no_grad():
        layer.weight[1:] = layer.weight[:1]
    layer.forward = torch.no_grad()(forward)
    p.where = (p.places.first,)
    return True


@mistake("NOT_TRAINING", "EVAL_RANDOM", "NOT_LEARNING", "UNSTABLE")
def layer_made_in_forward(p: Program) -> bool:
    """Make a layer anew in each call of forward."""
    name = p.places.heads[0]
    old = p.model.get_submodule(name)
    if not isinstance(old, nn.Linear):
        return False
    a, b = old.in_features, old.out_features

    class Fresh(nn.Module):
        """A head that is made when it is called."""

        def forward(self, x: Tensor) -> Tensor:
            return nn.Linear(a, b)(x)

    put(p, name, Fresh())
    p.where = (name, "")
    return p.spec.family not in {"chars", "pairs"}


@mistake("NOT_TRAINING", "STAGNATION")
def weights_as_buffers(p: Program) -> bool:
    """Register all weights between the ends as buffers."""
    names = [*p.places.middle, p.places.first]
    for name in names:
        for m in p.model.get_submodule(name).modules():
            for key, value in list(m.named_parameters(recurse=False)):
                delattr(m, key)
                m.register_buffer(key, 0.3 * value.detach())
    p.where = (*names, "")
    return p.spec.family not in {"chars", "forecast"} and p.spec.loop != "average"


@mistake("NOT_TRAINING", "DESYNC")
def replaced_after_optimizer(p: Program) -> bool:
    """Make the optimizer, then put new layers in the places of old ones."""
    old = [q for q in p.model.parameters() if q.requires_grad]
    if p.spec.loop == "two" or p.spec.family in {"chars", "forecast"}:
        return False
    names = [p.places.first, *p.places.middle, *p.places.heads]
    for name in names:
        put(p, name, copy.deepcopy(p.model.get_submodule(name)))
    p.groups = lambda: [{"params": old, "weight_decay": p.decay}]
    p.where = tuple(names)
    return p.spec.optimizer != "manual"


@mistake("OPTIMIZER_STATE", "LEARNING_RATE", "UNSTABLE")
def optimizer_made_each_step(p: Program) -> bool:
    """Make the optimizer within the loop, so that it never has a past."""
    if p.spec.optimizer not in {"AdamW", "Adam", "NAdam", "Adamax", "RMSprop"} or p.spec.schedule:
        return False

    def renew(_t: int) -> None:
        for o in p.optimizers:
            o.state.clear()

    p.before.append(renew)
    return True


@mistake("NOT_TRAINING", "NOT_LEARNING", "LOSS_SPIKE", "STAGNATION", "UNSTABLE")
def restored_after_validation(p: Program) -> bool:
    """Load the first checkpoint after every validation."""
    first = copy.deepcopy(p.model.state_dict())
    p.after.append(lambda t: p.model.load_state_dict(first) if t % 12 == 11 else None)
    return True


@mistake("NOT_TRAINING", "STAGNATION", "LEARNING_RATE", "NOT_LEARNING")
def average_copied_back(p: Program) -> bool:
    """Copy the slow average of the weights back into the model after each step."""
    slow = [q.detach().clone() for q in p.model.parameters()]

    @torch.no_grad()
    def copy_back(_t: int) -> None:
        for s, q in zip(slow, p.model.parameters(), strict=True):
            s.lerp_(q, 0.002)
            q.copy_(s)

    p.after.append(copy_back)
    return True


@mistake("NOT_TRAINING", "STAGNATION")
def optimizer_of_norms_and_biases(p: Program) -> bool:
    """Filter the parameters the wrong way: only vectors are trained."""
    p.groups = lambda: [{"params": [q for q in p.model.parameters() if q.dim() < 2], "weight_decay": p.decay}]
    p.where = ("*", "")
    return p.spec.loop != "two"


@mistake("CAPACITY", "BOTTLENECK")
def layer_of_two_units(p: Program) -> bool:
    """Send all through two units in the middle."""
    name = middle(p)
    last = p.model.get_submodule(name)
    if not isinstance(last, nn.Linear):
        return False
    put(p, name, nn.Sequential(nn.Linear(last.in_features, 2), nn.Linear(2, last.out_features)))
    p.where = (name, "")
    return p.spec.family not in {"graph", "experts"}


def _others(p: Program) -> list[str]:
    heads = tuple(p.places.heads)
    return [n for n, _ in p.model.named_children() if n not in heads]
