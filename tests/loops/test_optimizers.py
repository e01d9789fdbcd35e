"""Every way to step: several optimizers, closures, schedulers, accumulation, clipping, mixed precision."""

import math

import pytest
import torch
from torch import nn


def net(seed=0):
    """Return a small model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def loss_of(model):
    """A loss of fresh data."""
    return model(torch.randn(5, 4)).square().mean()


def backward(model, optimizer, *, set_to_none=True):
    """Zero and run one backward pass."""
    optimizer.zero_grad(set_to_none=set_to_none)
    loss_of(model).backward()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"])
def test_optimizers_made_before_or_after_watch(kind, when, set_to_none, watching, recorded, ledger):
    """Gradients and updates are those the twin reads, whenever the optimizer was made."""
    model = net()
    made = getattr(torch.optim, kind)
    if when == "before":
        optimizer = made(model.parameters(), lr=0.01)
        exporter = watching(model)
    else:
        exporter = watching(model)
        optimizer = made(model.parameters(), lr=0.01)
    notes = ledger(model)
    for _ in range(4):
        backward(model, optimizer, set_to_none=set_to_none)
        notes.step(optimizer)
    records = recorded(exporter)
    notes.agrees_with(records)
    assert all(r.value("learning_rate") == pytest.approx(0.01) for r in records)


def test_optimizers_stepping_together_make_one_record(watching, recorded, ledger):
    """Two optimizers with halves of the model make one record per iteration, with both halves."""
    model = net()
    optimizers = [torch.optim.SGD(model[:2].parameters(), lr=0.1), torch.optim.Adam(model[2:].parameters(), lr=0.01)]
    exporter, notes = watching(model), ledger(model)
    for _ in range(5):
        model.zero_grad()
        loss_of(model).backward()
        for optimizer in optimizers:
            notes.step(optimizer)
    notes.join(*((2 * i, 2 * i + 1) for i in range(5)))
    records = recorded(exporter)
    notes.agrees_with(records)
    assert records[-1].get("parameter.learning_rate").present.all()


class Gan(nn.Module):
    """A generator and a discriminator in one model."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = nn.Linear(3, 4), nn.Linear(4, 1)


@pytest.mark.parametrize("critic_steps", [1, 5])
def test_alternating_optimizers(critic_steps, watching, recorded, ledger):
    """1:1 alternation makes one record per pair of steps, 5:1 one per critic step, and no gradient is lost or invented."""
    torch.manual_seed(0)
    model = Gan()
    generator = torch.optim.Adam(model.generator.parameters(), lr=0.01)
    critic = torch.optim.Adam(model.critic.parameters(), lr=0.01)
    exporter, notes = watching(model), ledger(model)
    groups = []
    for _ in range(4):
        for _ in range(critic_steps):
            critic.zero_grad()
            model.critic(model.generator(torch.randn(8, 3)).detach()).mean().backward()
            groups.append((len(notes.gradients),))
            notes.step(critic)
        generator.zero_grad()
        model.critic(model.generator(torch.randn(8, 3))).mean().neg().backward()
        groups[-1] = (*groups[-1], len(notes.gradients))
        notes.step(generator)
    if critic_steps > 1:
        # Nobody knew of the generator when the fifth critic step ended: its first step joins the sixth.
        groups[4:6] = [groups[4][:1], (*groups[4][1:], *groups[5])]
    notes.join(*groups)
    notes.agrees_with(recorded(exporter))


def test_two_models_are_told_apart(watching, recorded, ledger):
    """Steps of an optimizer that owns nothing of the watched model do not count."""
    mine, other = net(1), net(2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, other)]
    exporter, notes = watching(mine), ledger(mine)
    for number in range(6):
        for model, optimizer in zip((mine, other), optimizers, strict=True):
            if model is other or number % 2 == 0:
                backward(model, optimizer)
                if model is mine:
                    notes.step(optimizer)
                else:
                    optimizer.step()
    records = recorded(exporter)
    notes.agrees_with(records)
    assert len(records) == 3


def test_only_the_named_optimizer_counts(watching, recorded):
    """``watch(optimizer=...)`` counts the steps of that one alone."""
    model = net()
    first = torch.optim.SGD(model[:2].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    exporter = watching(model, optimizer=first)
    for number in range(6):
        model.zero_grad()
        loss_of(model).backward()
        second.step()
        if number % 3 == 0:
            first.step()
    records = recorded(exporter)
    assert [r.step for r in records] == [1, 2]
    assert records[0].get("parameter.gradient_norm").as_dict()["4.weight"] is None


@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
def test_a_closure_runs_backward_inside_the_step(kind, watching, recorded):
    """With step(closure) gradients are those the closure left, not the previous step's."""
    model, inputs = net(), torch.randn(5, 4)
    made = {"SGD": lambda p: torch.optim.SGD(p, lr=0.1), "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4)}
    optimizer = made[kind](model.parameters())
    exporter, wanted, changes = watching(model), [], []

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step(closure)
        wanted.append([float(p.grad.norm()) for p in model.parameters()])
        changes.append([float((p - b).detach().norm()) for p, b in zip(model.parameters(), before, strict=True)])
    records = recorded(exporter)
    assert [r.step for r in records] == [1, 2, 3, 4]
    for record, norms, moved in zip(records, wanted, changes, strict=True):
        assert list(record.get("parameter.gradient_norm").values) == pytest.approx(norms, rel=1e-5)
        assert list(record.get("parameter.update_norm").values) == pytest.approx(moved, rel=1e-3)


def test_a_closure_given_by_name_is_seen(watching, recorded):
    """``step(closure=...)`` is a closure as well."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model)

    def closure():
        backward(model, optimizer)

    optimizer.step(closure=closure)
    (record,) = recorded(exporter)
    norms = [float(p.grad.norm()) for p in model.parameters()]
    assert list(record.get("parameter.gradient_norm").values) == pytest.approx(norms, rel=1e-5)


def test_a_step_that_raises_is_no_step(watching, recorded, ledger):
    """An exception inside optimizer.step goes to the user, and the next step is measured right."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, notes = watching(model), ledger(model)

    def closure():
        raise FloatingPointError

    with pytest.raises(FloatingPointError):
        optimizer.step(closure)
    for _ in range(2):
        backward(model, optimizer)
        notes.step(optimizer)
    notes.agrees_with(recorded(exporter))


def test_schedulers_change_the_learning_rate_seen(watching, recorded):
    """The learning rate recorded is the one the step used, per group and at most for the run."""
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2:].parameters(), "lr": 0.4}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    exporter = watching(model)
    for _ in range(4):
        backward(model, optimizer)
        optimizer.step()
        scheduler.step()
    records = recorded(exporter)
    assert [r.value("learning_rate") for r in records] == pytest.approx([0.4, 0.2, 0.1, 0.05])
    assert [r.value("parameter.learning_rate", "0.bias") for r in records] == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    assert records[0].value("parameter.learning_rate", "4.bias") == pytest.approx(0.4)


def test_a_tensor_learning_rate(watching, recorded):
    """A learning rate that is a tensor is read too."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.02))
    exporter = watching(model)
    backward(model, optimizer)
    optimizer.step()
    assert recorded(exporter)[0].value("learning_rate") == pytest.approx(0.02)


def test_gradient_accumulation(watching, recorded, ledger):
    """A step of four micro-batches makes one record: the sum of gradients, the mean of losses, all block gradients."""
    model, criterion = net(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, notes = watching(model, criterion), ledger(model)
    means = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = []
        for _ in range(4):
            loss = criterion(model(torch.randn(5, 4)), torch.zeros(5, 2))
            (loss / 4).backward()
            losses.append(loss.item())
        means.append(sum(losses) / 4)
        notes.step(optimizer)
    records = recorded(exporter)
    notes.agrees_with(records)
    assert [r.value("loss") for r in records] == pytest.approx(means)


def test_block_norms_of_micro_batches_join(watching, recorded):
    """Block gradients of all micro-batches of a step are joined as one L2 norm."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model, blocks=["0", "2", "4"])
    squares = 0.0
    for _ in range(3):
        out = model(torch.randn(5, 4))
        squares += float((2 * out.detach()).square().sum())
        out.square().sum().backward()
    optimizer.step()
    (record,) = recorded(exporter)
    assert record.value("block.gradient_norm", "4") == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_clipping_before_the_step_is_what_is_seen(watching, recorded, ledger):
    """Norms are those after clip_grad_norm_, as the optimizer uses them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, notes = watching(model), ledger(model)
    for _ in range(3):
        backward(model, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        notes.step(optimizer)
    records = recorded(exporter)
    notes.agrees_with(records)
    assert all(r.value("gradient.total_norm") == pytest.approx(0.01, rel=1e-3) for r in records)


def test_validation_in_between_leaves_no_trace(watching, recorded):
    """Validation passes under no_grad and inference_mode change no loss, block norm, activation share or step."""

    def train(validate):
        model, criterion = nn.Sequential(*net(), nn.ReLU(), nn.Linear(2, 2)), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exporter = watching(model, criterion)
        data = torch.Generator().manual_seed(0)
        for _ in range(6):
            optimizer.zero_grad()
            criterion(model(torch.randn(5, 4, generator=data)), torch.zeros(5, 2)).backward()
            for mode in (torch.no_grad, torch.inference_mode) if validate else ():
                with mode():
                    model.eval()
                    criterion(model(torch.full((9, 4), 1e6)), torch.zeros(9, 2))
                    model.train()
            optimizer.step()
        return [
            [r for r in record.readings if not r.metric.startswith(("runtime", "overhead"))]
            for record in recorded(exporter)
        ]

    torch.manual_seed(0)
    plain = train(validate=False)
    torch.manual_seed(0)
    assert train(validate=True) == plain


def test_two_backward_passes_through_one_graph(watching, recorded, ledger):
    """retain_graph and a second backward add gradients as PyTorch does."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, notes = watching(model), ledger(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        notes.step(optimizer)
    notes.agrees_with(recorded(exporter))


def test_second_derivatives_go_through(watching, recorded, ledger):
    """A gradient penalty, which differentiates through backward, trains as unwatched, with right norms."""

    def penalty(model):
        x = torch.ones(3, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    plain, model = net(), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    exporter, notes = watching(model), ledger(model)
    for _ in range(3):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            penalty(m).backward()
            if m is model:
                notes.step(optimizer)
            else:
                optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    notes.agrees_with(recorded(exporter))


def test_every_tenth_step_is_the_tenth_step(watching, recorded):
    """With ``every`` the record of a step holds that step's own loss and gradients, not a mean over the gap."""
    model, criterion = net(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, losses, norms = watching(model, criterion, every=4), [], []
    for _ in range(9):
        optimizer.zero_grad()
        loss = criterion(model(torch.randn(5, 4)), torch.zeros(5, 2))
        loss.backward()
        losses.append(loss.item())
        norms.append(float(model[0].weight.grad.norm()))
        optimizer.step()
    *records, end = recorded(exporter)
    assert [r.step for r in records] == [1, 4, 8]
    assert (end.step, end.value("loss")) == (9, None)
    assert [r.value("loss") for r in records] == pytest.approx([losses[0], losses[3], losses[7]])
    seen = [r.value("parameter.gradient_norm", "0.weight") for r in records]
    assert seen == pytest.approx([norms[0], norms[3], norms[7]])


def test_paused_steps_are_counted_and_not_recorded(watching, recorded):
    """While paused nothing is recorded; step numbers go on."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watching(model)
    for number in range(1, 10):
        if number == 4:
            exporter.pause()
        if number == 7:
            exporter.resume()
        backward(model, optimizer)
        optimizer.step()
    steps = [r.step for r in recorded(exporter)]
    assert steps[:3] == [1, 2, 3]
    assert steps[-1] == 9
    assert {5, 6}.isdisjoint(steps)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(fused, unscale, watching, recorded):
    """Under GradScaler norms are those of the unscaled gradients, and a skipped step leaves no trace in the next."""
    model, criterion = net(), nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    exporter, wanted, losses, moved = watching(model, criterion), [], [], []
    for number in range(6):
        optimizer.zero_grad()
        loss = criterion(model(torch.randn(5, 4)), torch.zeros(5, 2))
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        norms = [float(p.grad.double().norm()) / scale for p in model.parameters()]
        bad = number == 2
        if bad:
            model[0].weight.grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        if bad:
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        else:
            wanted.append(norms)
            losses.append(loss.item())
            moved.append([float((p.detach() - b).norm()) for p, b in zip(model.parameters(), before, strict=True)])
    records = recorded(exporter)
    assert [r.step for r in records] == [1, 2, 3, 4, 5]
    for record, norms, changes in zip(records, wanted, moved, strict=True):
        assert list(record.get("parameter.gradient_norm").values) == pytest.approx(norms, rel=1e-5)
        assert list(record.get("parameter.update_norm").values) == pytest.approx(changes, rel=1e-3)
        assert record.value("gradient.nonfinite") == 0.0
        cosine = record.value("gradient.cosine")
        assert cosine is None or -1.001 <= cosine <= 1.001
    assert [records[i].value("loss") for i in (0, 1, 3, 4)] == pytest.approx([losses[i] for i in (0, 1, 3, 4)])
    assert records[-1].value("runtime.skipped") == (1.0 if fused else None)


@pytest.mark.parametrize("fused", [False, True])
def test_the_overflow_a_scaler_begins_with_is_no_issue(fused, watching, recorded):
    """Steps skipped while GradScaler finds its scale leave finite or missing block norms, and a healthy verdict."""
    model, criterion = net(), nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=1e-3)
    exporter, taken = watching(model, criterion), 0
    for _ in range(8):
        optimizer.zero_grad()
        scaler.scale(criterion(model(torch.randn(5, 4)) * 100, torch.zeros(5, 2))).backward()
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        taken += not torch.equal(before, model[0].weight)
    records = recorded(exporter)
    assert len(records) == taken < 8
    for record in records:
        norms = record.get("block.gradient_norm").as_dict().values()
        assert all(norm is None or math.isfinite(norm) for norm in norms)
    assert all(norm is not None for norm in norms)
    assert exporter.issues == ()


def test_an_overflow_that_is_used_is_an_issue(watching, recorded):
    """Without a scaler the same overflow reaches the weights, stays in the record and is told of."""
    model, criterion = net(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watching(model, criterion)
    (criterion(model(torch.randn(5, 4)) * 100, torch.zeros(5, 2)) * 3e38).backward()
    optimizer.step()
    (record,) = recorded(exporter)
    assert not math.isfinite(record.value("block.gradient_norm", "4"))
    assert [str(issue.issue_type) for issue in exporter.issues] == ["NUMERICAL"]


def test_autocast_in_bfloat16(watching, recorded, ledger):
    """Mixed precision with autocast: block outputs in bf16, parameters in float32, all measured."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, notes = watching(model), ledger(model)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        notes.step(optimizer)
    records = recorded(exporter)
    notes.agrees_with(records)
    assert records[0].get("block.gradient_norm").present.all()


def test_observe_hands_over_loss_logits_and_targets(watching, recorded, said):
    """observe() replaces the criterion; an unknown word is named once and the rest is taken."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, losses = watching(model), []
    for number in range(3):
        optimizer.zero_grad()
        logits, targets = model(torch.randn(5, 4)), torch.tensor([0, 1, 0, 1, 1])
        loss = nn.functional.cross_entropy(logits, targets)
        loss.backward()
        exporter.observe(loss=loss if number else loss.item(), logits=logits, targets=targets, los=1.0)
        losses.append(loss.item())
        optimizer.step()
    records = recorded(exporter)
    assert [r.value("loss") for r in records] == pytest.approx(losses)
    assert len(said()) == len(said("observe() does not know 'los'; did you mean 'loss'?")) == 1
    assert all(r.value("alignment.accuracy") is not None for r in records)


@pytest.mark.parametrize("factor", [1.0, 2.0**16, 3.0])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("unscaled", [False, True])
def test_what_a_scaler_multiplies_by_is_in_no_norm(factor, passes, unscaled, watching, recorded):
    """Norms at blocks, at predictions and of gradients are those of the loop without a scaler."""
    told = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=factor)):
        torch.manual_seed(0)
        model, criterion = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        exporter = watching(model, criterion, blocks=list(model))
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(passes):
                loss = criterion(model(torch.randn(5, 6)), torch.randn(5, 3))
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
                continue
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        told.append(recorded(exporter))
    names = ("block.gradient_norm", "upstream.norm", "upstream.mean_norm", "gradient.total_norm", "gradient.first_norm",
             "gradient.norm_before_clip")  # fmt: skip
    for plain, scaled in zip(*told, strict=True):
        assert scaled.value("gradient.loss_scale") == factor
        for name in names:
            assert scaled.get(name).values.tolist() == pytest.approx(plain.get(name).values.tolist(), rel=1e-5), name
