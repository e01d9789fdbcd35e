"""Loops that nobody writes first: whatever backward, clipping and optimizers do to each other, records say what happened."""

import itertools
import math
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradflow_export.schedule import INTERVALS

NOTHING = object()
"""What a record must not say anything of."""
NAMES = ("first", "second", "third", "head")
STEPS = 6


class Chain(nn.Module):
    """Three blocks and a head."""

    def __init__(self, out=3, checkpointed=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, out)
        self.checkpointed = checkpointed

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.checkpointed is None:
            h = torch.tanh(self.second(h))
        else:
            h = checkpoint(lambda h: torch.tanh(self.second(h)), h, use_reentrant=self.checkpointed)
        return self.head(torch.tanh(self.third(h)))


class Diary:
    """The slow, obvious twin, in float64: what every update used and did, step by step.

    Args:
        model: The model.
        watch: Called with the model and settings; returns an exporter.
    """

    def __init__(self, model, watch):
        self.model, self.rows, self.previous = model, [], {}
        self.losses, self.clipped, self.passes, self.outer, self.early = [], [], 0, [], None
        self.blocks = [getattr(model, name) for name in NAMES if hasattr(model, name)]
        intervals = {name: 1 for name in INTERVALS if name != "histograms"}
        self.exporter = watch(model, blocks=self.blocks, intervals=intervals, budget=None)
        self.arrived = defaultdict(float)
        self.quiet = False
        for block in self.blocks:
            block.register_forward_hook(self.follow)

    def follow(self, block, _args, out):
        """Add up what arrives at the block's output, over all its calls."""
        if out.requires_grad and not self.quiet:
            out.register_hook(lambda g: self.add(block, g))

    def add(self, block, g):
        self.arrived[id(block)] += float(g.detach().double().square().sum())

    def backward(self, loss, *args, **kwargs):
        """Call backward, and note the loss."""
        self.losses.append(float(loss.detach().double()))
        self.passes += 1
        loss.backward(*args, **kwargs)
        self.early = self.gradients() if self.early is None else self.early

    def clip(self, parameters, limit):
        """Clip, and note what it was that was clipped."""
        parameters = list(parameters)
        before = self.gradients()
        nn.utils.clip_grad_norm_(parameters, limit)
        if not self.clipped:
            self.clipped.append(before)

    def gradients(self):
        return {n: p.grad.detach().double().clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def step(self, *optimizers, scale=1.0, beside=False):
        """Step, and write down what a record should say; where no backward pass was seen, that nothing is known of it.

        Args:
            optimizers: Who steps.
            scale: What a gradient scaler multiplied by.
            beside: Whether the record is that of the step before too, whose optimizer owns nothing of this one's.
        """
        mine = [id(p) for o in optimizers for g in o.param_groups for p in g["params"]]
        named = {n: p for n, p in self.model.named_parameters() if id(p) in mine}
        used = {n: p.grad.detach().double().clone() for n, p in named.items() if p.grad is not None}
        before = {n: g for n, g in (self.clipped[0] if self.clipped else used).items() if n in named}
        old = {n: p.detach().double().clone() for n, p in named.items()}
        for optimizer in optimizers:
            optimizer.step()
        new = {n: p.detach().double() for n, p in named.items()}
        norm = self.norm
        players = tuple(mine)
        seen = bool(self.passes)
        row = {
            "loss": sum(self.losses) if self.losses else NOTHING,
            "gradient.total_norm": norm(used),
            "gradient.norm_before_clip": norm(before) if seen or self.clipped else NOTHING,
            "gradient.clip_scale": norm(used) / norm(before) if seen or self.clipped else NOTHING,
            "gradient.max_norm": max(float(g.norm()) for g in used.values()),
            "gradient.min_norm": min(float(g.norm()) for g in used.values()),
            "gradient.with_grad": float(len(used)),
            "update.total_norm": norm({n: new[n] - old[n] for n in old}),
            "update.ratio": norm({n: new[n] - old[n] for n in old}) / norm(old),
            "learning_rate": max(g["lr"] for o in optimizers for g in o.param_groups),
            "runtime.backward_passes": float(self.passes) if seen else NOTHING,
            "gradient.cosine": None if beside else self.cosine(self.previous.get(players), used),
        }
        if self.early is not None:
            row["gradient.first_norm"] = norm({n: g for n, g in self.early.items() if n in named})
        row |= {("parameter.gradient_norm", n): float(g.norm()) for n, g in used.items()}
        row |= {("parameter.gradient_l1", n): float(g.abs().sum()) for n, g in used.items()}
        row |= {("parameter.weight_norm", n): float(w.norm()) for n, w in old.items()}
        row |= {("parameter.update_norm", n): float((new[n] - old[n]).norm()) for n in old}
        names = {id(m): n for n, m in self.model.named_modules()}
        row |= {("block.gradient_norm", names[i]): math.sqrt(v) / scale for i, v in self.arrived.items() if v}
        self.previous[players] = used
        self.rows.append(joined(self.rows.pop(), row) if beside else row)
        self.forget()

    def forget(self):
        self.losses, self.clipped, self.passes, self.early = [], [], 0, None
        self.arrived.clear()

    def norm(self, tensors):
        return math.sqrt(math.fsum(float(t.square().sum()) for t in tensors.values()))

    def cosine(self, before, used):
        if before is None or before.keys() != used.keys():
            return None
        dot = math.fsum(float((before[n] * used[n]).sum()) for n in used)
        return dot / self.norm(before) / self.norm(used)

    def differences(self, records):
        """Yield what records say otherwise."""
        if len(records) != len(self.rows):
            yield f"{len(records)} records of {len(self.rows)} steps"
        for record, row in zip(records, self.rows, strict=False):
            for key, wanted in row.items():
                metric, site = key if isinstance(key, tuple) else (key, "")
                got = record.value(metric, site)
                if wanted is None:
                    continue
                if wanted is NOTHING:
                    ok = got is None
                elif metric == "parameter.update_norm" or metric.startswith("update."):
                    ok = got is not None and got == pytest.approx(wanted, rel=1e-4, abs=1e-9)
                else:
                    ok = got is not None and got == pytest.approx(wanted, rel=1e-5, abs=1e-7)
                if not ok:
                    yield f"step {record.step}: {metric} {site} is {got}, not {wanted}"


SUMS = ("loss", "gradient.with_grad", "runtime.backward_passes", "update.total_norm", "gradient.total_norm",
        "gradient.norm_before_clip", "gradient.first_norm", "block.gradient_norm")  # fmt: skip


def joined(first, other):
    """Join what two optimizers did that step together."""
    out = {**first, **other, "gradient.clip_scale": None, "gradient.cosine": None, "update.ratio": None}
    for key in first.keys() & other.keys():
        metric, a, b = key[0] if isinstance(key, tuple) else key, first[key], other[key]
        if metric in SUMS:
            out[key] = math.hypot(a, b) if metric.endswith(("norm", "clip")) else a + b
    out["gradient.max_norm"] = max(first["gradient.max_norm"], other["gradient.max_norm"])
    out["gradient.min_norm"] = min(first["gradient.min_norm"], other["gradient.min_norm"])
    out["learning_rate"] = max(first["learning_rate"], other["learning_rate"])
    return out


def sgd(parameters, rate=0.1):
    return torch.optim.SGD(parameters, lr=rate)


def batch(n=5):
    return torch.randn(n, 6), torch.randint(3, (n,))


def twice_for_one_backward(diary, model):
    """The optimizer steps twice with the same gradients."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        diary.backward(loss)
        diary.step(optimizer)
        diary.step(optimizer)


def two_losses_by_grad(diary, model):
    """Each loss is differentiated by autograd.grad, and both are added by hand: their sum is nobody's loss."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        out = model(x)
        losses = F.cross_entropy(out, y), out.square().mean()
        parts = [torch.autograd.grad(each, list(model.parameters()), retain_graph=True) for each in losses]
        for p, a, b in zip(model.parameters(), *parts, strict=True):
            p.grad = a + b
        diary.clip(model.parameters(), 0.3)
        diary.step(optimizer)


def penalty(diary, model):
    """A gradient penalty: the norm of the gradient of the output in the input is part of the loss."""
    optimizer = sgd(model.parameters(), 0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = batch()
        x.requires_grad_()
        out = model(x)
        diary.quiet = True
        (inner,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        diary.backward(F.cross_entropy(out, y) + (inner.norm(dim=1) - 1).square().mean())
        diary.arrived.clear()
        diary.step(optimizer)


def backward_within_forward(diary, model):
    """A hook of the user's on a block's output calls backward on a loss of its own, deep supervision."""
    optimizer, aux = sgd(model.parameters()), nn.Linear(8, 3)
    target = {}

    def supervise(_module, _args, out):
        diary.backward(F.cross_entropy(aux(torch.tanh(out)), target["y"]) * 0.3, retain_graph=True)

    model.second.register_forward_hook(supervise)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, target["y"] = batch()
        diary.backward(F.cross_entropy(model(x), target["y"]))
        diary.step(optimizer)


def uneven(diary, model):
    """A number of micro-batches that does not divide: the last step has fewer, and their sizes differ."""
    optimizer, sizes = sgd(model.parameters()), itertools.cycle((5, 3, 7, 1))
    for count in (3, 3, 1, 3, 2, 1):
        optimizer.zero_grad()
        for _ in range(count):
            x, y = batch(next(sizes))
            diary.backward(F.cross_entropy(model(x), y) / count)
        diary.clip(model.parameters(), 0.1)
        diary.step(optimizer)


def alternating_overlapping(diary, model):
    """Two optimizers in turn, of sets that overlap; between them gradients are cleared only of one's own."""
    low = sgd([*model.first.parameters(), *model.second.parameters()])
    high = torch.optim.Adam([*model.second.parameters(), *model.third.parameters(), *model.head.parameters()], lr=1e-2)
    for number in range(2 * STEPS):
        optimizer = (low, high)[number % 2]
        model.zero_grad()
        x, y = batch()
        diary.backward(F.cross_entropy(model(x), y))
        if number % 3 == 0:
            diary.clip(model.parameters(), 0.2)
        diary.step(optimizer)


def list_of_losses(diary, model):
    """Losses of several batches are collected in a list, summed, and differentiated at once."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for n in (4, 2, 6):
            x, y = batch(n)
            losses.append(F.cross_entropy(model(x), y))
        diary.backward(sum(losses))
        diary.step(optimizer)


def vector_backward(diary, model):
    """A vector is differentiated with a gradient that came from elsewhere: it is no loss."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = batch()
        losses, weights = F.cross_entropy(model(x), y, reduction="none"), torch.rand(5)
        diary.passes = 1
        losses.backward(weights)
        diary.step(optimizer)


def several_roots(diary, model):
    """autograd.backward of two losses with a weight each."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = batch()
        out = model(x)
        losses = [F.cross_entropy(out, y), out.square().mean()]
        diary.losses, diary.passes = [0.5 * float(losses[0].detach()) + 0.25 * float(losses[1].detach())], 1
        torch.autograd.backward(losses, [torch.tensor(0.5), torch.tensor(0.25)])
        diary.step(optimizer)


def clipped_twice(diary, model):
    """Clipped by norm, then part of it once more, by value."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = batch()
        diary.backward(F.cross_entropy(model(x), y))
        diary.clip(model.parameters(), 0.2)
        diary.clip(model.head.parameters(), 0.05)
        nn.utils.clip_grad_value_(model.first.parameters(), 0.01)
        diary.step(optimizer)


def clipped_by_parts(diary, model):
    """Each block is clipped by itself."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = batch()
        diary.backward(F.cross_entropy(model(x), y))
        for block in diary.blocks:
            diary.clip(block.parameters(), 0.02)
        diary.step(optimizer)


def scaled(diary, model):
    """A gradient scaler, accumulation, and two optimizers that step together."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    pair = [sgd([*model.first.parameters(), *model.second.parameters()]),
            torch.optim.Adam([*model.third.parameters(), *model.head.parameters()], lr=1e-2)]  # fmt: skip

    class Both:
        param_groups = tuple(group for optimizer in pair for group in optimizer.param_groups)

        def step(self):
            for optimizer in pair:
                scaler.step(optimizer)

    both = Both()
    for _ in range(STEPS):
        for optimizer in pair:
            optimizer.zero_grad()
        for n in (4, 3):
            x, y = batch(n)
            loss = F.cross_entropy(model(x), y) / 2
            diary.losses.append(float(loss.detach()))
            diary.passes += 1
            scaler.scale(loss).backward()
        for optimizer in pair:
            scaler.unscale_(optimizer)
        diary.clip(model.parameters(), 0.1)
        diary.step(both, scale=scaler.get_scale())
        scaler.update()


def scaled_and_fused(diary, model):
    """A fused optimizer, whose scaler has unscaled the gradients before, as clipping needs it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)

    class Scaled:
        param_groups = optimizer.param_groups

        def step(self):
            scaler.step(optimizer)

    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        diary.losses, diary.passes = [float(loss.detach())], 1
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        diary.clip(model.parameters(), 0.1)
        diary.step(Scaled(), scale=scaler.get_scale())
        scaler.update()


def skipped_samples(diary, model):
    """Steps whose loss is over a limit are not taken; their gradients are cleared."""
    optimizer = sgd(model.parameters())
    for number in range(2 * STEPS):
        optimizer.zero_grad()
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        diary.backward(loss)
        if number % 3 == 1:
            diary.forget()
            optimizer.zero_grad()
            continue
        diary.step(optimizer)


def looked_at_between(diary, model):
    """Saliency maps, evaluation and second derivatives between two steps are none of the step's."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        diary.backward(F.cross_entropy(model(x), y))
        diary.step(optimizer)
        diary.quiet = True
        with torch.no_grad():
            model(x)
        z = x.clone().requires_grad_()
        torch.autograd.grad(model(z).max(1).values.sum(), z)
        diary.quiet = False


def of_a_frozen_trunk(diary, model):
    """The head alone trains for three steps, then all of it."""
    optimizer = sgd(model.parameters())
    for number in range(2 * STEPS):
        for name, p in model.named_parameters():
            p.requires_grad_(number >= STEPS or name.startswith("head"))
        optimizer.zero_grad()
        x, y = batch()
        diary.backward(F.cross_entropy(model(x), y))
        diary.step(optimizer)


def sharpness_aware(diary, model):
    """Weights climb along a first gradient, which is cleared; the step uses that of the second pass."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        diary.arrived.clear()
        diary.backward(F.cross_entropy(model(x), y))
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        diary.step(optimizer)


def never_cleared(diary, model):
    """Gradients add up for ever: each step uses those of all passes so far."""
    optimizer = sgd(model.parameters(), 0.01)
    for _ in range(STEPS):
        x, y = batch()
        diary.backward(F.cross_entropy(model(x), y))
        diary.step(optimizer)


def one_graph_twice(diary, model):
    """Two losses of one forward pass, a backward pass each, through a graph that is kept."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = batch()
        out = model(x)
        diary.backward(F.cross_entropy(out, y), retain_graph=True)
        diary.backward(0.1 * out.square().mean())
        diary.step(optimizer)


def checkpointed(diary, model):
    """The second block is computed again within the backward pass, and gradients are clipped."""
    diary.blocks.remove(model.second)
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for n in (4, 2):
            x, y = batch(n)
            diary.backward(F.cross_entropy(model(x.requires_grad_()), y) / 2)
        diary.clip(model.parameters(), 0.1)
        diary.step(optimizer)


def other_blocks_in_each_pass(diary, model):
    """Micro-batches go different ways: the first one's reaches half of the parameters."""
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        x, y = batch()
        diary.backward(F.cross_entropy(model.head(torch.tanh(model.first(x))), y) / 3)
        diary.backward(F.cross_entropy(model.head(torch.tanh(model.second(torch.tanh(model.first(x))))), y) / 3)
        diary.backward(F.cross_entropy(model(x), y) / 3)
        diary.step(optimizer)


class Adversaries(nn.Module):
    """A generator, and a critic whose trunk a classifier shares."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 8)
        self.third, self.head = nn.Linear(8, 1), nn.Linear(8, 3)

    def judge(self, x):
        return self.third(torch.tanh(self.second(x)))

    def name(self, x):
        return self.head(torch.tanh(self.second(x)))


def adversaries(diary, model):
    """Critic and classifier share a trunk that both train, and the generator's loss runs through it; all take turns."""
    makes = torch.optim.Adam(model.first.parameters(), lr=1e-2)
    judges = sgd([*model.second.parameters(), *model.third.parameters()])
    names = sgd([*model.second.parameters(), *model.head.parameters()])
    for number in range(3 * STEPS):
        x, y = torch.randn(7, 6), torch.randint(3, (7,))
        optimizer = (judges, names, makes)[number % 3]
        model.zero_grad()
        if optimizer is judges:
            diary.backward(F.softplus(-model.judge(x)).mean())
            diary.backward(F.softplus(model.judge(model.first(torch.randn(7, 4)).detach())).mean())
        elif optimizer is names:
            diary.backward(F.cross_entropy(model.name(x), y))
        else:
            diary.backward(F.softplus(-model.judge(model.first(torch.randn(7, 4)))).mean())
        diary.clip([p for group in optimizer.param_groups for p in group["params"]], 0.1)
        diary.step(optimizer, beside=optimizer is makes)


checkpointed.model = lambda: Chain(checkpointed=False)
adversaries.model = Adversaries

LOOPS = [twice_for_one_backward, two_losses_by_grad, penalty, backward_within_forward, uneven, alternating_overlapping,
         list_of_losses, vector_backward, several_roots, clipped_twice, clipped_by_parts, scaled,
         scaled_and_fused, skipped_samples,
         looked_at_between, of_a_frozen_trunk, sharpness_aware, never_cleared, one_graph_twice, checkpointed,
         other_blocks_in_each_pass, adversaries]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_every_metric_is_that_of_the_update(loop, watching, recorded):
    """Losses, gradients, clipping, updates and what arrives at blocks are those that the loop itself computed."""
    model = getattr(loop, "model", Chain)()
    diary = Diary(model, watching)
    torch.manual_seed(1)
    loop(diary, model)
    assert list(diary.differences(recorded(diary.exporter))) == []


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_pass_through_several_criteria_is_one_pass(by_hand, watching, recorded):
    """Also in the first step; what autograd.grad returns is added to no gradient, though the last step's is still there."""
    model, criterion = Chain(), nn.CrossEntropyLoss()
    optimizer, exporter = sgd(model.parameters()), watching(model, criterion, budget=None)
    for _ in range(3):
        loss = sum(criterion(model(x), y) for x, y in (batch(4), batch(2), batch(6)))
        if by_hand:
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p.grad = g
        else:
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
    records = recorded(exporter)
    assert [record.value("runtime.backward_passes") for record in records] == [1.0] * 3
    assert [record.value("runtime.accumulated_share") for record in records] == [0.0] * 3


def test_gradients_of_other_parameters_have_no_angle(watching, recorded):
    """Two layers of one shape train in turn. Torch reads the gradients here: still scaled, of a fused optimizer."""
    model, scaler = Chain(), torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    exporter = watching(model, budget=None)
    for number in range(6):
        model.second.requires_grad_(number // 2 % 2 == 0)
        model.third.requires_grad_(number // 2 % 2 == 1)
        optimizer.zero_grad()
        x, y = batch()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    known = [record.value("gradient.cosine") is not None for record in recorded(exporter)]
    assert known == [False, True, False, True, False, True]
