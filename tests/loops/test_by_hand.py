"""Loops whose optimizer is no torch.optim.Optimizer."""

import gc

import pytest
import torch
from torch import nn


def net():
    """Return a small float64 model, so that the twin's numbers are exact."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def backward(model):
    """One backward pass on fresh gradients."""
    model.zero_grad()
    loss = model(torch.randn(6, 4)).square().mean()
    loss.backward()
    return loss


def apply(model, lr=0.1):
    """Update the weights by hand."""
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(lr * p.grad)


def by_data(model, lr=0.1):
    """Update the weights past every count of writes."""
    for p in model.parameters():
        p.data -= lr * p.grad.data


def anew(model, lr=0.1):
    """Put other tensors in the weights' place."""
    for p in model.parameters():
        p.data = p.data - lr * p.grad


@pytest.mark.parametrize("clear", ["before", "with the update"])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("update", [apply, by_data, anew])
def test_a_loop_without_optimizer_is_recorded(update, passes, clear, watching, recorded, said):
    """Each update makes a record, with the loss, the gradients it was made with, and what it did to the weights."""
    model = net()
    exporter = watching(model)
    losses, norms = [], []
    for _ in range(30):
        of_step = []
        for _ in range(passes):
            loss = model(torch.randn(6, 4)).square().mean()
            (loss / passes).backward()
            of_step.append(loss.item())
        losses.append(sum(of_step) / passes)
        norms.append(torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters())).item())
        update(model)
        if clear == "before":
            model(torch.randn(6, 4)).mean().item()  # a call in between
        model.zero_grad()
    exporter.close()
    records = recorded(exporter)
    assert [r.step for r in records] == list(range(1, 31))
    assert [r.value("loss") for r in records] == pytest.approx(losses)
    assert [r.value("gradient.total_norm") for r in records[1:]] == pytest.approx(norms[1:])
    assert records[-1].get("parameter.update_norm") is not None
    assert not said("exporter.step()")


def by_count(gradient):
    """Clear in place, as zero_grad(set_to_none=False) does."""
    gradient.zero_()


def by_product(gradient):
    """Clear in place by a product."""
    gradient.mul_(0)


def past_count(gradient):
    """Clear in place, past every count of writes."""
    gradient.data.zero_()


@pytest.mark.parametrize("when", ["with the update", "before the pass", "told"])
@pytest.mark.parametrize("clear", [by_count, by_product, past_count])
def test_gradients_cleared_in_place_are_no_zeros(clear, when, watching, recorded):
    """What the first step was made with is not known once it is cleared; the steps after it are read as passes end."""
    model = net()
    exporter = watching(model)
    norms = []
    for number in range(5):
        if when == "before the pass" and number:
            [clear(p.grad) for p in model.parameters()]
        model(torch.randn(6, 4)).square().mean().backward()
        norms.append(torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters())).item())
        apply(model)
        if when != "before the pass":
            [clear(p.grad) for p in model.parameters()]
        if when == "told":
            exporter.step()
    exporter.close()
    found = [r.value("gradient.total_norm") for r in recorded(exporter)]
    assert len(found) == 5
    assert found[0] is None or found[0] == pytest.approx(norms[0])
    assert found[1:] == pytest.approx(norms[1:])


def test_weights_that_change_before_an_optimizer_steps_make_no_step(watching, recorded):
    """A model that is set back between passes, while its optimizer waits, is not trained by hand."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    exporter = watching(model)
    for _ in range(3):
        backward(model)
        with torch.no_grad():
            model[0].weight.mul_(0.9)
    for _ in range(4):
        backward(model)
        optimizer.step()
    records = recorded(exporter)
    assert [r.step for r in records] == [1, 2, 3, 4]
    assert all(r.value("gradient.total_norm") > 0 for r in records)


class Uncalled(nn.Sequential):
    """A model whose calls run no hook: its class has a ``__call__`` of its own, as those of Keras have."""

    def __call__(self, x):
        for layer in self:
            x = layer.forward(x)
        return x


@pytest.mark.parametrize("roots", ["scalar", "vector", "autograd.grad"])
@pytest.mark.parametrize("hooks", [True, False])
def test_every_pass_counts_once_however_it_is_seen(hooks, roots, watching, said):
    """Passes are counted by the call of backward or by the gradients at blocks, and by both of them once."""
    model = net() if hooks else Uncalled(*net())
    watching(model)
    for done in range(1, 31):
        model.zero_grad()
        squares = model(torch.randn(6, 4)).square()
        if roots == "scalar":
            squares.mean().backward()
        elif roots == "vector":
            squares.backward(torch.full_like(squares, 1 / 6))
        else:
            for p, gradient in zip(
                model.parameters(), torch.autograd.grad(squares.mean(), [*model.parameters()]), strict=True
            ):
                p.grad = gradient
        seen = done >= 20 and (hooks or roots != "autograd.grad")
        assert len(said("exporter.step()")) == seen, done


def test_a_model_that_runs_no_hooks_is_recorded_by_hand(watching, recorded):
    """exporter.step() records loss, gradients and updates of a model whose layers nobody sees being called."""
    model = Uncalled(*net())
    exporter = watching(model)
    losses = []
    for _ in range(4):
        losses.append(backward(model).item())
        norm = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters())).item()
        apply(model)
        exporter.step()
    records = recorded(exporter)
    assert [r.value("loss") for r in records] == pytest.approx(losses)
    assert records[-1].value("gradient.total_norm") == pytest.approx(norm)
    assert records[-1].get("parameter.update_norm") is not None


def test_told_of_the_loss_of_a_criterion_too(watching, recorded, said):
    """exporter.step() ends steps: gradients, updates since the last call, and the loss are right."""
    model, criterion = net(), nn.MSELoss()
    exporter = watching(model, criterion)
    names = [n for n, _ in model.named_parameters()]
    losses, gradients, updates = [], [], [dict.fromkeys(names)]
    for number in range(6):
        model.zero_grad()
        loss = criterion(model(torch.randn(6, 4)), torch.zeros(6, 1))
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: float(p.grad.double().norm()) for n, p in model.named_parameters()})
        before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
        apply(model)
        if number:
            updates.append({n: float((p.detach().double() - before[n]).norm()) for n, p in model.named_parameters()})
        exporter.step()
    records = recorded(exporter)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    for record, loss, norms, changes in zip(records, losses, gradients, updates, strict=True):
        assert record.value("loss") == pytest.approx(loss)
        for name in names:
            assert record.value("parameter.gradient_norm", name) == pytest.approx(norms[name], rel=1e-6)
            seen = record.value("parameter.update_norm", name)
            assert seen == (None if record.step == 1 else pytest.approx(changes[name], rel=1e-3))
    assert said() == []


def test_beside_an_optimizer_it_is_ignored(watching, recorded, said):
    """Where a torch optimizer steps, exporter.step() changes nothing and one line says so."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model)
    for _ in range(5):
        backward(model)
        optimizer.step()
        exporter.step()
    assert [r.step for r in recorded(exporter)] == [1, 2, 3, 4, 5]
    assert len(said("exporter.step() is ignored")) == 1
    assert len(said()) == 1


@pytest.mark.parametrize("when", ["after", "before"])
def test_beside_an_optimizer_that_has_not_stepped_yet_it_is_no_step(when, watching, recorded):
    """Calls for each micro-batch leave steps to the optimizer, the first of them too."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, losses = watching(model), []
    for number in range(8):
        loss = model(torch.randn(6, 4)).square().mean() / 2
        loss.backward()
        losses.append(loss.item())
        if when == "before":
            exporter.step()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        if when == "after":
            exporter.step()
    records = recorded(exporter)
    assert [r.step for r in records] == [1, 2, 3, 4]
    assert [r.value("loss") for r in records] == pytest.approx(
        [a + b for a, b in zip(losses[::2], losses[1::2], strict=True)]
    )


def test_between_two_marks_changed_weights_make_no_step(watching, recorded):
    """An ascent that is taken back, as in SAM by hand: each mark ends one step, and the first one counts once."""
    model = net()
    exporter, losses, norms = watching(model), [], []
    for _ in range(6):
        x = torch.randn(6, 4)
        model.zero_grad()
        model(x).square().mean().backward()
        ascent = [0.05 * p.grad for p in model.parameters()]
        with torch.no_grad():
            [p.add_(e) for p, e in zip(model.parameters(), ascent, strict=True)]
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters())).item())
        with torch.no_grad():
            [p.sub_(e) for p, e in zip(model.parameters(), ascent, strict=True)]
        apply(model)
        exporter.step()
    records = recorded(exporter)
    assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r.value("loss") for r in records] == pytest.approx(losses)
    assert [r.value("gradient.total_norm") for r in records] == pytest.approx(norms)
    assert records[0].get("parameter.update_norm") is None


@pytest.mark.parametrize(("moved", "advice"), [(4, "update 4.weight where"), (0, "change the parameters themselves")])
def test_what_never_moves_is_dated_to_where_it_was_not_read(moved, advice, watching):
    """The weights before the first update were not read, and where nothing moves there is nothing to do likewise."""
    model = net()
    exporter = watching(model, verbose=0)
    for _ in range(16):
        backward(model)
        with torch.no_grad():
            [p.sub_(0.1 * p.grad) for p in [*model.parameters()][:moved]]
        exporter.step()
    exporter.close()
    (found,) = [issue for issue in exporter.issues if issue.issue_type == "STAGNATION"]
    assert (found.step, found.before, len(found.layers)) == (2, 1, 6 - moved)
    assert advice in found.advice


def test_a_frozen_parameter_is_missing_by_hand_too(watching, recorded):
    """A frozen parameter has no gradient and no update; missing, not zero."""
    model = net()
    model[0].weight.requires_grad_(False)
    exporter = watching(model)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.sub_(0.1 * p.grad)
        exporter.step()
    for record in recorded(exporter):
        assert record.value("parameter.gradient_norm", "0.weight") is None
        assert record.value("parameter.gradient_norm", "0.bias") > 0
        assert record.value("parameter.update_norm", "0.weight") is None


def test_an_endless_loop_without_steps_keeps_nothing(watching):
    """Hundreds of losses and backward passes without any step do not pile up."""
    model, criterion = net(), nn.MSELoss()
    exporter = watching(model, criterion)
    out = model(torch.randn(6, 4))
    for _ in range(600):
        criterion(out, torch.zeros(6, 1))
    assert len(exporter._loop.instruments.loss.passes.now.losses) <= 256
    held = []
    for _ in range(2):
        for _ in range(600):
            criterion(model(torch.randn(6, 4)), torch.zeros(6, 1)).backward()
        gc.collect()
        held.append(len(gc.get_objects()))
    assert held[1] - held[0] < 600
    exporter.close()
    assert [(issue.issue_type, issue.cause) for issue in exporter.issues] == [("NOT_TRAINING", "step never called")]


def copies_of(model, kind):
    """Return tensors, their module and optimizer, that are copies of a model's parameters: of one model, or of three stacked for vmap."""
    models = [model, net(), net()]
    stacked, _ = torch.func.stack_module_state(models)
    params = stacked if kind == "stacked" else dict(model.named_parameters())
    params = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    held = nn.ParameterList(params.values())
    return dict(zip(params, held, strict=True)), held, torch.optim.SGD(held.parameters(), 0.1)


def step_copies(model, kind, params, optimizer):
    """One training step of such tensors."""
    optimizer.zero_grad()
    x = torch.randn(6, 4)
    if kind == "stacked":
        out = torch.func.vmap(lambda p: torch.func.functional_call(model, p, (x,)))(params)
    else:
        out = torch.func.functional_call(model, params, (x,))
    out.square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("stacked", [False, True])
def test_gradients_of_torch_func_are_told_of_once(stacked, watching, recorded, said):
    """torch.func.grad, by itself or under vmap: after twenty calls the ways that are recorded are named; they are."""
    model, models = net(), [net(), net(), net()]
    params = torch.func.stack_module_state(models)[0] if stacked else dict(model.named_parameters())
    params = {name: p.detach() for name, p in params.items()}

    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).square().mean()

    gradients = torch.func.grad(loss)
    gradients = torch.func.vmap(gradients, in_dims=(0, None)) if stacked else gradients
    exporter = watching(model)
    for _ in range(40):
        found = gradients(params, torch.randn(6, 4))
        params = {name: p - 0.1 * found[name] for name, p in params.items()}
    assert len(said()) == 1
    assert "20 calls of the model inside torch.func" in said()[0]
    assert recorded(exporter) == []

    held = nn.ParameterList(params.values())
    exporter, norms = watching(held), []
    for _ in range(3):
        found = gradients(dict(zip(params, held, strict=True)), torch.randn(6, 4))
        with torch.no_grad():
            for p, g in zip(held, found.values(), strict=True):
                p.grad = g.detach()
                p.sub_(0.1 * p.grad)
        norms.append(float(torch.stack([p.grad.norm() for p in held]).norm()))
        exporter.step()
    assert [r.value("gradient.total_norm") for r in recorded(exporter)] == pytest.approx(norms, rel=1e-5)
    assert len(said()) == 1


@pytest.mark.parametrize("kind", ["plain", "stacked"])
def test_copies_that_are_trained_in_the_models_place_are_told_once(kind, watching, said):
    """functional_call and ensembles under vmap: the line says what to watch, and that is recorded."""
    model = net()
    params, _, optimizer = copies_of(model, kind)
    watching(model)
    for _ in range(40):
        step_copies(model, kind, params, optimizer)
    lines = said()
    assert len(lines) == 1
    assert "20 steps of an optimizer that holds tensors shaped as this model's parameters" in lines[0]
    assert "nn.ParameterList(tensors)" in lines[0]


@pytest.mark.parametrize("kind", ["plain", "stacked"])
def test_the_way_that_is_named_for_copies_works(kind, watching, recorded):
    """A list of the trained tensors is watched like any model: every step, its loss, gradients and updates."""
    model = net()
    params, held, optimizer = copies_of(model, kind)
    exporter = watching(held)
    for _ in range(5):
        step_copies(model, kind, params, optimizer)
    records = recorded(exporter)
    assert [r.step for r in records] == [1, 2, 3, 4, 5]
    assert all(r.value("loss") > 0 and r.value("gradient.total_norm") > 0 for r in records)


def test_nothing_is_told_of_other_models_that_are_trained_first(watching, said):
    """A discriminator that has many steps before the generator's first, and shapes of its own."""
    model, other = net(), nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))
    watching(model)
    mine, its = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, other))
    for number in range(60):
        backward(other)
        its.step()
        if number > 40:
            backward(model)
            mine.step()
    assert said() == []


def test_many_passes_within_one_step_are_no_reason_to_speak(watching, said):
    """LBFGS, which makes its passes inside a step, and gradients that are gathered over 64 of them."""
    model = net()
    watching(model)
    gathering = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(64):
        model(torch.randn(6, 4)).square().mean().backward()
    gathering.step()
    other = net()
    watching(other)
    optimizer = torch.optim.LBFGS(other.parameters(), max_iter=50, tolerance_grad=0, tolerance_change=0)

    def closure():
        optimizer.zero_grad()
        loss = other(torch.ones(6, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert [line for line in said() if "step" in line] == []
