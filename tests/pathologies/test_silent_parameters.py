"""Loops in which parameters are not connected, or gradients are not cleared, each beside one that is right."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter, Severity
from gradflow_export.errors import ArgumentError, ArgumentTypeError

KINDS = (IssueType.NOT_TRAINING, IssueType.STALE_GRAD)


class Net(nn.Module):
    """Three layers and, by name, one mistake."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.enc, self.mid, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        if mistake == "no entries":
            self.left_out = nn.Parameter(torch.empty(0))
        self.extra = {
            "list": [nn.Linear(16, 16)], "dict": {"a": nn.Linear(16, 16)}, "tensor": [torch.ones(16, requires_grad=True)],
            "frozen list": [nn.Linear(16, 16).requires_grad_(False)],
        }.get(mistake, [])  # fmt: skip

    def forward(self, x):
        h = F.relu(self.enc(x))
        if self.mistake == "detach":
            h = h.detach()
        if self.mistake == "no entries":
            h = h + self.left_out.sum()
        if self.mistake == "sign":
            h = torch.sign(h - 0.5)
        if self.mistake == "anew":
            h = nn.Linear(16, 16)(h)
        for layer in self.extra.values() if isinstance(self.extra, dict) else self.extra:
            h = h * layer if isinstance(layer, torch.Tensor) else F.relu(layer(h))
        return self.head(h if self.mistake == "unused" else F.relu(self.mid(h)))


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def adam(model):
    return torch.optim.Adam(model.parameters(), 1e-2)


def issues(model, optimizer, *, order="clear backward step", steps=30, each=lambda _step: None, zero=None, every=1):
    """Train with the calls in the order given, and return what is found of both kinds."""
    generator = torch.Generator().manual_seed(0)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for step in range(steps):
            each(step)
            x = torch.randn(32, 8, generator=generator)
            loss = F.cross_entropy(model(x), (x[:, 0] > 0).long())
            exporter.observe(loss=loss)
            for call in order.split():
                if call == "backward":
                    loss.backward()
                elif step % every == (0 if call == "clear" else every - 1):
                    (zero or optimizer.zero_grad)() if call == "clear" else optimizer.step()
        return [issue for issue in exporter.issues if issue.issue_type in KINDS]


def told(found):
    return [(str(issue.issue_type), issue.cause, issue.layer) for issue in found]


@pytest.mark.parametrize(
    ("mistake", "cause", "layer"),
    [
        ("list", "not registered", "extra[0].weight"),
        ("dict", "not registered", "extra['a'].weight"),
        ("tensor", "not registered", "extra[0]"),
        ("detach", "no gradient", "enc.weight"),
        ("sign", "zero gradient", "enc.weight"),
        ("unused", "never called", "mid.weight"),
        ("anew", "made in forward", "Linear"),
    ],
)
def test_a_layer_that_is_not_connected_is_named_with_its_reason(mistake, cause, layer):
    """Layers in plain containers, a cut graph and an unused layer are told apart, since step 1."""
    model = Net(mistake)
    found = issues(model, adam(model))
    assert told(found) == [("NOT_TRAINING", cause, layer)]
    assert found[0].step == 1


@pytest.mark.parametrize("mistake", ["none", "frozen list", "no entries"])
def test_connected_layers_and_a_frozen_stranger_are_in_order(mistake):
    """All layers learn; a frozen layer may be hidden in a list on purpose, and what has no entries has none to learn."""
    model = Net(mistake)
    assert issues(model, adam(model)) == []


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_that_a_loss_of_derivatives_does_not_know_is_in_order(bias):
    """A score is the derivative of an energy, to which the last bias adds nothing; a weight that is cut off is told."""
    model = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))
    if not bias:
        model.append(nn.Linear(1, 1))
    optimizer = adam(model)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(40):
            x = torch.randn(64, 2, requires_grad=True)
            (score,) = torch.autograd.grad(model[:5](x).sum(), x, create_graph=True)
            optimizer.zero_grad()
            (score + x.detach()).square().sum(1).mean().backward()
            optimizer.step()
        model(x)
        found = [issue for issue in exporter.issues if issue.issue_type in {*KINDS, IssueType.STAGNATION}]
    assert {issue.layer.split(".")[0] for issue in found} == (set() if bias else {"5"})


def test_the_ways_in_which_an_optimizer_misses_the_model():
    """It holds a copy, a replaced layer, too little, a learning rate of 0, or its step is never called."""
    model = mlp()
    assert told(issues(model, adam(copy.deepcopy(model)))) == [("NOT_TRAINING", "optimizer of a copy", "")]
    model = mlp()
    assert told(issues(model, adam(model), order="clear backward")) == [("NOT_TRAINING", "step never called", "")]
    model = mlp()
    optimizer = adam(model)
    model[4] = nn.Linear(16, 2)
    assert told(issues(model, optimizer)) == [("NOT_TRAINING", "left the model", "4.weight")]
    model = mlp()
    assert told(issues(model, adam(model[:4]))) == [("NOT_TRAINING", "in no optimizer", "4.weight")]
    model = mlp()
    found = issues(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert told(found) == [("NOT_TRAINING", "learning rate 0", "0.weight")]
    assert found[0].severity is Severity.CRITICAL


def test_a_frozen_head_is_a_mistake_and_a_frozen_backbone_is_none():
    """Layers near the input are frozen on purpose; the output layer alone is not."""
    model = mlp()
    model[4].requires_grad_(False)
    assert told(issues(model, adam(model))) == [("NOT_TRAINING", "frozen", "4.weight")]
    model = mlp()
    model[:3].requires_grad_(False)
    assert issues(model, adam(model)) == []


class Named(nn.Module):
    """Layers of several sizes under names of their own."""

    def __init__(self):
        super().__init__()
        self.eyes, self.mind, self.heart, self.hands = (
            nn.Linear(a, b) for a, b in ((8, 16), (16, 16), (16, 12), (12, 2))
        )

    def forward(self, x):
        """Return the answer."""
        return self.hands(self.heart(self.mind(self.eyes(x).relu()).relu()).relu())


def test_one_frozen_layer_among_others_is_a_mistake_whatever_they_are_called():
    """Layers are alike whose parameters are, not whose names are."""
    model = Named()
    model.mind.requires_grad_(False)
    assert told(issues(model, adam(model))) == [("NOT_TRAINING", "frozen", "mind.weight")]
    model = Named()
    model.eyes.requires_grad_(False)
    assert issues(model, adam(model)) == []


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("layer", ["mind", "hands"])
def test_a_frozen_matrix_is_a_frozen_layer_whatever_its_bias_does(layer, late):
    """It holds nearly all entries of its layer; that the bias goes on learning is no reason for silence."""

    def freezes(step):
        if step == 20 * late:
            weight = model.get_submodule(layer).weight.requires_grad_(False)
            weight.grad = None

    model = Named()
    (found,) = issues(model, adam(model), steps=110, each=freezes)
    assert (found.cause, found.layers) == ("frozen", (f"{layer}.weight",))
    assert found.step - found.before <= 20 * late + 1 <= found.step


class Adapted(nn.Module):
    """A frozen layer beside which two factors are trained."""

    def __init__(self, inner):
        super().__init__()
        self.weight, self.bias = nn.Parameter(inner.weight.detach(), requires_grad=False), inner.bias
        self.down, self.up = (
            nn.Parameter(torch.randn(2, inner.in_features)),
            nn.Parameter(torch.zeros(len(self.bias), 2)),
        )

    def forward(self, x):
        """Return what the layer would, and what the factors add."""
        return F.linear(x, self.weight, self.bias) + x @ self.down.T @ self.up.T


def only_biases(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("hands") or name.endswith("bias"))


def only_matrices_near_the_input(model):
    for layer in (model.eyes, model.mind):
        layer.weight.requires_grad_(False)


def adapters(model):
    model.mind = Adapted(model.mind)


def one_bias(model):
    model.mind.bias.requires_grad_(False)


def first_matrix(model):
    model.eyes.weight.requires_grad_(False)


@pytest.mark.parametrize("means", [only_biases, only_matrices_near_the_input, adapters, one_bias, first_matrix])
@pytest.mark.parametrize("begin", [0, 20])
def test_matrices_that_are_frozen_on_purpose_are_in_order(means, begin):
    """Biases trained alone, adapters, layers that are frozen from the input on; and a bias weighs nothing."""
    torch.manual_seed(0)
    model = Named()
    if means is adapters:
        means(model)
    assert (
        issues(
            model, adam(model), steps=110, each=lambda step: step == begin and means is not adapters and means(model)
        )
        == []
    )


def test_gradients_that_are_cleared_too_late_or_never():
    """Between backward and step nothing is left; without any clearing, or that of another model, all is summed up."""
    model = mlp()
    assert told(issues(model, adam(model), order="backward clear step")) == [
        ("NOT_TRAINING", "cleared before the step", "")
    ]
    for order, other in (("backward step", None), ("clear backward step", adam(mlp()))):
        model = mlp()
        zero = None if other is None else other.zero_grad
        found = issues(model, adam(model), order=order, zero=zero)
        assert told(found) == [("STALE_GRAD", "", "")]
        assert found[0].step == 2


@pytest.mark.parametrize("kind", ["clears", "adds up", "in micro-batches"])
def test_a_closure_clears_gradients_at_each_call(kind):
    """What LBFGS asks for again at other weights is stale where the closure does not clear; micro-batches are not."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x = torch.randn(32, 8)
    parts = x.chunk(4) if kind == "in micro-batches" else [x]

    def closure():
        if kind != "adds up":
            optimizer.zero_grad()
        losses = [F.cross_entropy(model(part), (part[:, 0] > 0).long()) / len(parts) for part in parts]
        for loss in losses:
            loss.backward()
        return sum(losses)

    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(8):
            optimizer.zero_grad()
            optimizer.step(closure)
    found = [issue for issue in exporter.issues if issue.issue_type in KINDS]
    assert told(found) == ([("STALE_GRAD", "", "")] if kind == "adds up" else [])


@pytest.mark.parametrize("kind", ["clears", "clears outside", "adds up", "in micro-batches"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_closure_that_is_called_once_clears_what_earlier_steps_left(make, kind):
    torch.manual_seed(0)
    model = mlp()
    optimizer = make(model.parameters(), lr=1e-2)

    def closure():
        if kind in {"clears", "in micro-batches"}:
            optimizer.zero_grad()
        x = torch.randn(32, 8)
        parts = x.chunk(4) if kind == "in micro-batches" else [x]
        losses = [F.cross_entropy(model(part), (part[:, 0] > 0).long()) / len(parts) for part in parts]
        for loss in losses:
            loss.backward()
        return sum(losses)

    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(12):
            if kind == "clears outside":
                optimizer.zero_grad()
            optimizer.step(closure)
    found = [issue for issue in exporter.issues if issue.issue_type in KINDS]
    assert told(found) == ([("STALE_GRAD", "", "")] if kind == "adds up" else [])


@pytest.mark.parametrize("none", [True, False])
def test_every_way_of_clearing_once_per_step_is_in_order(none):
    """Before the backward pass, after the step, by None or by zeros, and once for four micro-batches."""
    for order, every in (("clear backward step", 1), ("backward step clear", 1), ("clear backward step", 4)):
        model = mlp()
        optimizer = adam(model)
        zero = lambda optimizer=optimizer: optimizer.zero_grad(set_to_none=none)  # noqa: E731 - short
        assert issues(model, optimizer, order=order, zero=zero, every=every, steps=60) == []


def test_accumulation_over_many_passes_and_updates_by_hand_are_no_lonely_passes():
    """Thirty-two passes before the first step keep their gradients; updates by hand move the weights."""
    model = mlp()
    assert issues(model, adam(model), every=32, steps=96) == []
    model = mlp()

    def update(_step):
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.0 if p.grad is None else 0.1 * p.grad)

    assert issues(model, adam(model), order="clear backward", each=update) == []


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_few_rows_of_a_table_are_enough(by_hand):
    """Every entry counts, also one that no sample holds: of weights that are updated by hand, and of gradients kept."""
    torch.manual_seed(0)
    model = nn.Embedding(3001, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for step in range(30):
            if by_hand:
                optimizer.zero_grad()
            model(torch.tensor([24, 1000])).square().mean().backward()
            for row in (24, 1000) if by_hand else ():
                with torch.no_grad():
                    model.weight[row] -= optimizer.param_groups[0]["lr"] * model.weight.grad[row]
            if not by_hand and step == 24:
                optimizer.step()
    assert exporter.issues == ()


@pytest.mark.parametrize("awaited", [True, False])
def test_gradients_that_are_added_up_for_ever(awaited):
    """Two hundred passes without a step are told of, once and before the end: an optimizer waits for it, or there is none."""
    model = nn.Linear(8, 2)
    optimizer = adam(model) if awaited else None
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(210):
            model(torch.randn(4, 8)).square().mean().backward()
    assert (optimizer is not None) == awaited
    assert told(exporter.issues) == [("NOT_TRAINING", "step never called", "")]


@pytest.mark.parametrize("cut", [lambda loss: loss.detach().requires_grad_(), lambda loss: 2 * cut_off(loss), None])
def test_a_loss_that_was_told_to_require_a_gradient(cut):
    """A loss whose graph is lost leads to no parameter, whatever is made of it afterwards; it is told at the loss."""
    model = mlp()
    optimizer = adam(model)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(9):
            loss = model(torch.randn(16, 8)).square().mean()
            optimizer.zero_grad()
            (loss if cut is None else cut(loss)).backward()
            optimizer.step()
    found = [issue for issue in exporter.issues if issue.issue_type in KINDS]
    assert told(found) == ([] if cut is None else [("NOT_TRAINING", "loss without a graph", "loss")])


def cut_off(loss):
    return torch.tensor(float(loss.detach()), requires_grad=True)


class Cast(nn.Module):
    """A layer, and a tensor that was a parameter before it was cast, or an output that is kept from step to step."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(8, 2), kind
        scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.scale = nn.Parameter(scale.detach().float()) if kind == "parameter" else scale.float()
        self.kept = None

    def forward(self, x):
        out = self.layer(x)
        if self.kind == "kept":
            self.kept = x.requires_grad_() * 2.0
            return out + self.kept[:, :2]
        return out * self.scale


@pytest.mark.parametrize("kind", ["cast", "parameter", "kept"])
def test_a_parameter_that_was_cast_is_none(kind):
    """``nn.Parameter(x).to(dtype)`` is a plain tensor, told by its name; what a pass keeps of itself is in order."""
    model = Cast(kind)
    found = issues(model, adam(model), steps=20)
    assert told(found) == ([("NOT_TRAINING", "not registered", "scale")] if kind == "cast" else [])


@pytest.mark.parametrize("clears", [True, False])
def test_two_players_whose_gradients_pass_through_each_other(clears):
    """The discriminator collects gradients while the generator learns; only one that never clears them is told of."""
    torch.manual_seed(0)
    maker, judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 1))
    model = nn.ModuleDict({"maker": maker, "judge": judge})
    of_maker, of_judge = adam(maker), adam(judge)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for step in range(40):
            if clears:
                of_judge.zero_grad()
            loss = (
                F.softplus(judge(maker(torch.randn(16, 4)).detach())).mean()
                + F.softplus(-judge(torch.ones(16, 8))).mean()
            )
            loss.backward()
            of_judge.step()
            if step % 5 == 0:
                of_maker.zero_grad()
                F.softplus(-judge(maker(torch.randn(16, 4)))).mean().backward()
                of_maker.step()
        found = [issue for issue in exporter.issues if issue.issue_type in KINDS]
    assert told(found) == ([] if clears else [("STALE_GRAD", "", "judge.0.weight")])


@pytest.mark.parametrize("anew", [False, True])
def test_training_that_returns_to_its_first_weights(anew):
    """Loading the first checkpoint in each epoch loses what was learned; a new optimizer begins another training."""
    model = mlp()
    first, optimizer = copy.deepcopy(model.state_dict()), adam(model)

    def each(step):
        if step and step % 4 == 0:
            model.load_state_dict(first)

    if anew:
        found = []
        for _ in range(3):
            model.load_state_dict(first)
            found += issues(model, adam(model), steps=8)
    else:
        found = issues(model, optimizer, each=each)
    assert told(found) == ([] if anew else [("NOT_TRAINING", "taken back", "")])


class Experts(nn.Module):
    """Four experts, of which a router that is set by hand chooses the first."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 2) for _ in range(4))

    def forward(self, x):
        chosen = torch.tensor([1.0, 0.0, 0.0, 0.0])
        return sum(weight * expert(x) for weight, expert in zip(chosen, self.experts, strict=True))


def test_experts_that_are_not_chosen_are_in_order():
    """Their gradient is 0 while that of another expert is not."""
    model = Experts()
    assert issues(model, adam(model)) == []


@pytest.mark.parametrize("copied", [True, False])
def test_a_head_that_begins_as_a_copy_of_the_embedding(copied):
    """A head with the first weights of an embedding should have shared them; one of its own is in order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Tanh(), nn.Linear(8, 12, bias=False))
    if copied:
        model[2].weight.data.copy_(model[0].weight.data)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(8):
            optimizer.zero_grad()
            x = torch.randint(12, (16,))
            F.cross_entropy(model(x), (x + 1) % 12).backward()
            optimizer.step()
        found = [issue.layers for issue in exporter.issues if issue.issue_type is IssueType.DESYNC]
    assert found == ([("2.weight", "0.weight")] if copied else [])


class Twins(nn.Module):
    """Two copies of a normalisation, of which both should get the sum of their gradients."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.LayerNorm(8), nn.LayerNorm(8)
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x):
        return self.heads[0](self.left(x)) + self.heads[1](self.right(x))


@pytest.mark.parametrize(
    ("named", "shared", "apart"), [(False, True, 0.5), (True, False, 1.0), (False, True, 1.0), (False, False, 1.0)]
)
def test_copies_that_drift_apart(named, shared, apart):
    """Copies with one gradient that is scaled differently are found; others are compared where they are named."""
    torch.manual_seed(0)
    model = Twins()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    copies = [("left", "right")] if named else None
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch(copies=copies) as exporter:
        for _ in range(15):
            optimizer.zero_grad()
            x = torch.randn(16, 8)
            F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            if shared:
                for a, b in zip(model.left.parameters(), model.right.parameters(), strict=True):
                    total = a.grad + b.grad
                    a.grad, b.grad = total.clone(), total * apart
            optimizer.step()
        found = [issue for issue in exporter.issues if issue.issue_type is IssueType.DESYNC]
    assert bool(found) is (named or apart != 1.0)
    assert all({"left.weight", "right.weight"} <= set(issue.layers) for issue in found)


class Stream(nn.Module):
    """A layer, and one beside it that adds to what the first gives."""

    def __init__(self):
        super().__init__()
        self.lift, self.branch, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        for layer in (self.lift, self.branch):
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        h = self.lift(x)
        return self.head(h + self.branch(torch.tanh(h)))


def test_layers_whose_gradients_become_one_are_no_copies():
    """As what lies between them fades, biases that began at 0 get one gradient: they had their own before."""
    torch.manual_seed(0)
    model = Stream()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for step in range(15):
            optimizer.zero_grad()
            x = torch.randn(16, 8)
            F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
            if step >= 4:
                model.branch.weight.data.zero_()
        found = [issue.layers for issue in exporter.issues if issue.issue_type is IssueType.DESYNC]
    assert found == []


def test_copies_must_be_there_and_alike():
    """The message names what is unknown, or does not fit."""
    model = mlp()
    exporter = Exporter(model, backends=[])
    with pytest.raises(ArgumentError, match="no tensor and no module"):
        exporter.watch(copies=[("0", "nine")])
    with pytest.raises(ArgumentError, match="same names and shapes"):
        exporter.watch(copies=[("0", "2")])
    for wrong in (["left", "right"], 2, [2], [model, model]):
        with pytest.raises(ArgumentTypeError, match="at least two names"):
            exporter.watch(copies=wrong)
    exporter.close()


def test_hooks_are_gone_after_closing_and_a_watched_model_copies():
    """Parameters carry hooks only while they are followed, and no copy carries them on."""
    model = mlp()
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch():
        assert any(p._backward_hooks for p in model.parameters())
        twin = copy.deepcopy(model)
        assert not any(p._backward_hooks for p in twin.parameters())
    assert not any(p._backward_hooks for p in model.parameters())


def accumulated(way, steps=12, parts=4, *, divide=True, dead=False):
    """Train with micro-batches in some way; return the causes of NOT_TRAINING."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3, bias=not dead))
    if dead:
        nn.init.constant_(model[0].bias, -100.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True, verbose=0).watch() as exporter:
        for _ in range(steps):
            held = [torch.zeros_like(p) for p in model.parameters()]
            for part in range(parts):
                x, y = torch.randn(8, 6, requires_grad=way == "attack"), torch.randint(0, 3, (8,))
                if way != "added" or part == 0:
                    optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                (loss / parts if divide else loss).backward()
                if way == "by hand":
                    held = [h + p.grad for h, p in zip(held, model.parameters(), strict=True)]
            if way == "by hand":
                for p, h in zip(model.parameters(), held, strict=True):
                    p.grad = h
            optimizer.step()
        return [i.cause for i in exporter.issues if i.issue_type is IssueType.NOT_TRAINING]


def test_micro_batches_that_are_cleared_one_by_one_are_thrown_away():
    """Each loss is divided by their number, and the optimizer has the gradient of the last alone."""
    assert accumulated("cleared") == ["micro-batches thrown away"]


@pytest.mark.parametrize("parts", [2, 4, 7])
def test_a_layer_that_gets_no_gradient_says_nothing_of_micro_batches(parts):
    """That its sum is as large as the last part, and that it was 0 before, is so of zeros too."""
    assert "micro-batches thrown away" not in accumulated("added", parts=parts, dead=True)


@pytest.mark.parametrize(("way", "divide"), [("added", True), ("by hand", True), ("cleared", False), ("attack", False)])
def test_micro_batches_that_count_are_in_order(way, divide):
    """Added up by the engine or by hand; passes that were never to be added up, as those of an attack, are none."""
    assert accumulated(way, divide=divide) == []


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("since", [0, 40])
def test_a_frozen_model_whose_own_optimizer_steps(outside, since):
    """Frozen for a pass, or by a flag, and never unfrozen: nothing is trained. A head outside may be all there is."""
    torch.manual_seed(0)
    model, head = mlp(), nn.Linear(2, 3)
    optimizer = torch.optim.Adam([*model.parameters(), *(head.parameters() if outside else ())], 1e-3)
    with Exporter(model, backends=[MemoryWriter()], strict=True, synchronous=True).watch() as exporter:
        for step in range(80):
            model.requires_grad_(step < since)
            x = torch.randn(32, 8, requires_grad=True)
            out = model(x)
            optimizer.zero_grad()
            F.cross_entropy(head(out) if outside else out, x[:, :2].argmax(1)).backward()
            optimizer.step()
    found = [
        (str(each.issue_type), each.cause) for each in exporter.issues if each.issue_type is IssueType.NOT_TRAINING
    ]
    assert found == ([] if outside else [("NOT_TRAINING", "all frozen")])
