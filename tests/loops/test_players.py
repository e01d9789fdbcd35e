"""Several optimizers, and several models with shared parameters: whose loss, whose gradient, whose record."""

import itertools
import random

import pytest
import torch
from torch import nn

OWN = ("optimizer.loss", "optimizer.gradient_norm", "optimizer.steps")


def norm_of(optimizer):
    """The gradient norm that an optimizer is about to use."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return float(torch.stack([g.norm() for g in gradients]).norm())


def own(record, metric):
    """What a record says of each optimizer, by number."""
    reading = record.get(metric)
    return None if reading is None else {int(k.rpartition(".")[2]): v for k, v in reading.as_dict().items()}


def trunk(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("players", [2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_optimizers_that_take_turns_over_the_same_parameters_make_a_record_each(
    players, set_to_none, watching, recorded
):
    """No update is lost: as many records as updates, each with the loss and the norm that its optimizer used."""
    model = trunk()
    kinds = itertools.cycle((torch.optim.SGD, torch.optim.Adam))
    optimizers = [next(kinds)(model.parameters(), lr=1e-3) for _ in range(players)]
    exporter, losses, norms = watching(model), [], []
    for number in range(40):
        optimizer = optimizers[number % players]
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(norm_of(optimizer))
        optimizer.step()
    records = recorded(exporter)
    assert [record.step for record in records] == list(range(1, 41))
    assert [record.value("loss") for record in records] == pytest.approx(losses, rel=1e-6)
    assert [record.value("gradient.total_norm") for record in records] == pytest.approx(norms, rel=1e-5)
    assert [record.value("runtime.backward_passes") for record in records] == [1.0] * 40
    for number, record in list(enumerate(records))[players:]:
        player = number % players
        assert own(record, "optimizer.loss")[player] == pytest.approx(losses[number], rel=1e-6)
        assert own(record, "optimizer.gradient_norm")[player] == pytest.approx(norms[number], rel=1e-5)
        assert own(record, "optimizer.steps")[player] == number // players + 1


def test_optimizers_that_share_some_parameters_make_a_record_each(watching, recorded, ledger):
    """An optimizer of all parameters and one of the head alternate: each record has what its own step used."""
    model = trunk()
    whole, head = torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.01)
    exporter, notes = watching(model), ledger(model)
    for number in range(9):
        optimizer = head if number % 3 == 2 else whole
        model.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        notes.step(optimizer)
    notes.agrees_with(recorded(exporter))


@pytest.mark.parametrize("together", [True, False])
def test_each_optimizer_has_its_own_loss_from_the_first_step_on(together, watching, recorded):
    """Nobody knows yet that there are two: which gradients the first passes changed is looked at all the same."""
    model = nn.ModuleDict({"trunk": trunk(), "head": nn.Linear(2, 1)})
    first = torch.optim.Adam(model["trunk"].parameters(), lr=1e-3)
    second = torch.optim.SGD(model["head"].parameters(), lr=1e-2)
    exporter, losses = watching(model), []
    for _ in range(3):
        model.zero_grad()
        features = model["trunk"](torch.randn(16, 8))
        one, other = features.square().mean(), model["head"](features.detach()).square().mean()
        one.backward()
        if not together:
            first.step()
        other.backward()
        if together:
            first.step()
        second.step()
        losses.append({0: pytest.approx(one.item(), rel=1e-6), 1: pytest.approx(other.item(), rel=1e-6)})
    assert [own(record, "optimizer.loss") for record in recorded(exporter)] == losses


class Agent(nn.Module):
    """Actor and critic in one module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def judge(self, state, action):
        """Return what the critic thinks."""
        return self.critic(torch.cat([state, action], 1))


def through_data(optimizer):
    """Clear gradients by zeros that no version counter tells of."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.data.zero_()


CLEARED = {
    "None": lambda optimizer: optimizer.zero_grad(),
    "zeros": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "zeros through .data": through_data,
}


def play(agent, optimizers, turns, *, clear=CLEARED["None"], micro_batches=1, note=None):
    """Train; call ``note(name, loss, norm)`` before each step of a player."""
    for name in turns:
        optimizer, total = optimizers[name], 0.0
        clear(optimizer)
        for _ in range(micro_batches):
            state, action = torch.randn(16, 4), torch.rand(16, 2)
            if name == "critic":
                loss = (agent.judge(state, action) - state.sum(1, keepdim=True)).square().mean()
            else:
                loss = -agent.judge(state, agent.actor(state)).mean()
            loss = loss / micro_batches
            loss.backward()
            total += loss.item()
        if note is not None:
            note(name, total, norm_of(optimizer))
        optimizer.step()


ORDERS = {
    "critic first": ("critic", "actor"),
    "actor first": ("actor", "critic"),
    "critic twice": ("critic", "critic", "actor"),
    "five critic steps for one of the actor": (*["critic"] * 5, "actor"),
}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("clear", CLEARED.values(), ids=CLEARED)
@pytest.mark.parametrize("order", ORDERS)
def test_each_player_of_one_module_has_its_own_loss(order, clear, micro_batches, watching, recorded):
    """The actor's loss runs through the critic and is the actor's alone; the record's loss is that of all who stepped."""
    agent = Agent()
    optimizers = {name: torch.optim.Adam(getattr(agent, name).parameters(), lr=1e-3) for name in ("critic", "actor")}
    exporter, notes = watching(agent), []
    turns = ORDERS[order] * 4
    play(
        agent,
        optimizers,
        turns,
        clear=clear,
        micro_batches=micro_batches,
        note=lambda *what: notes.append(what),
    )
    records = recorded(exporter)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(turns))}
    left, counts = list(notes), dict.fromkeys(numbers, 0)
    for record in records:
        steps = own(record, "optimizer.steps")
        stepped = 1 if steps is None else sum(value is not None for value in steps.values())
        here, left = left[:stepped], left[stepped:]
        assert record.value("loss") == pytest.approx(sum(loss for _, loss, _ in here), rel=1e-5)
        assert record.value("runtime.backward_passes") == micro_batches * stepped
        for name, loss, norm in here:
            counts[name] += 1
            if steps is not None:
                assert own(record, "optimizer.loss")[numbers[name]] == pytest.approx(loss, rel=1e-5)
                assert own(record, "optimizer.gradient_norm")[numbers[name]] == pytest.approx(norm, rel=1e-5)
                assert steps[numbers[name]] == counts[name]
    assert left == []
    assert set(records[-1].get("optimizer.loss").sites) == {"Adam.0", "Adam.1"}


@pytest.mark.parametrize("players", [2, 4])
def test_a_common_loss_is_each_ones_and_counts_once(players, watching, recorded):
    """Where one loss trains the parts of several optimizers, it is the loss of each, and of the record."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(players)))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model]
    exporter, losses = watching(model), []
    for _ in range(5):
        model.zero_grad()
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
    records = recorded(exporter)
    assert [record.value("loss") for record in records] == pytest.approx(losses, rel=1e-6)
    for record, loss in zip(records, losses, strict=True):
        assert list(record.get("optimizer.loss").values) == pytest.approx([loss] * players, rel=1e-6)
        total = float(torch.tensor(record.get("optimizer.gradient_norm").values).norm())
        assert record.value("gradient.total_norm") == pytest.approx(total, rel=1e-5)


def test_losses_whose_gradients_are_added_up_belong_to_all_who_use_them(watching, recorded):
    """Both passes before both steps: the critic's gradient is that of both losses, and so is its loss."""
    agent = Agent()
    optimizers = {name: torch.optim.SGD(getattr(agent, name).parameters(), lr=1e-3) for name in ("critic", "actor")}
    exporter, wanted = watching(agent), []
    for _ in range(5):
        agent.zero_grad()
        state, action = torch.randn(16, 4), torch.rand(16, 2)
        critic = agent.judge(state, action).square().mean()
        actor = -agent.judge(state, agent.actor(state)).mean()
        critic.backward()
        actor.backward()
        optimizers["critic"].step()
        optimizers["actor"].step()
        wanted.append((critic.item(), actor.item()))
    for record, (critic, actor) in list(zip(recorded(exporter), wanted, strict=True))[1:]:
        assert own(record, "optimizer.loss") == pytest.approx({0: critic + actor, 1: actor}, rel=1e-5)
        assert record.value("loss") == pytest.approx(critic + actor, rel=1e-5)


def test_players_whose_losses_a_criterion_tells_of(watching, recorded):
    """With a criterion each player's loss is the sum of its passes, and predictions of all players count."""
    agent, criterion = Agent(), nn.MSELoss()
    optimizers = {name: torch.optim.SGD(getattr(agent, name).parameters(), lr=1e-3) for name in ("critic", "actor")}
    exporter, wanted = watching(agent, criterion), []
    for _ in range(5):
        sums, back = {}, []
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            losses = []
            for _ in range(2):
                state = torch.randn(8, 4)
                action = agent.actor(state) if name == "actor" else torch.rand(8, 2)
                predicted = agent.judge(state, action)
                predicted.retain_grad()
                loss = criterion(predicted, torch.zeros(8, 1))
                loss.backward()
                losses.append(loss.item())
                back.append(predicted)
            sums[name] = sum(losses)
            optimizer.step()
        wanted.append((sums, float(torch.cat([p.grad for p in back]).norm())))
    for record, (sums, upstream) in zip(recorded(exporter), wanted, strict=True):
        assert own(record, "optimizer.loss") == pytest.approx({0: sums["critic"], 1: sums["actor"]}, rel=1e-5)
        assert record.value("loss") == pytest.approx(sum(sums.values()), rel=1e-5)
        assert record.value("upstream.norm") == pytest.approx(upstream, rel=1e-5)


def test_one_optimizer_has_no_metrics_of_its_own(watching, recorded):
    """With a single optimizer, also one made anew in place of another, the record itself says all."""
    model = trunk()
    exporter = watching(model)
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    records = recorded(exporter)
    assert len(records) == 9
    assert all(record.get(metric) is None for record in records for metric in OWN)


def test_with_one_optimizer_nobody_asks_which_parameters_a_pass_reaches(watching, recorded, monkeypatch):
    """A plain loop, with micro-batches or not, pays nothing for what only several optimizers need."""
    from gradflow_export.instruments.gradients.stamps import GradientStamps

    model = trunk()
    optimizer, exporter, looks = torch.optim.SGD(model.parameters(), lr=0.1), watching(model), []
    read = GradientStamps.read
    monkeypatch.setattr(GradientStamps, "read", lambda self: looks.append(exporter._loop.steps) or read(self))
    for _ in range(6):
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    assert len(recorded(exporter)) == 6
    assert all(step < 2 for step in looks)


def two_tasks():
    """An encoder and two heads, as two models."""
    torch.manual_seed(16)
    encoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    return nn.Sequential(encoder, nn.Linear(8, 5)), nn.Sequential(encoder, nn.Linear(8, 3))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_models_with_a_shared_encoder_show_their_own_loss(first, set_to_none, watching, recorded):
    """Each of two watched models has the records of its own optimizer: its loss, its norms, its number of passes."""
    models = two_tasks()
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    exporters, notes = [watching(model) for model in models], [[], []]
    for _ in range(20):
        for task in (first, 1 - first):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss = models[task](torch.randn(6, 8)).square().mean() * (1 + 9 * task)
            loss.backward()
            notes[task].append((loss.item(), norm_of(optimizers[task])))
            optimizers[task].step()
    for exporter, known in zip(exporters, notes, strict=True):
        records = recorded(exporter)
        assert [record.value("loss") for record in records] == pytest.approx([loss for loss, _ in known], rel=1e-5)
        norms = [record.value("gradient.total_norm") for record in records]
        assert norms == pytest.approx([norm for _, norm in known], rel=1e-5)
        assert [record.value("runtime.backward_passes") for record in records] == [1.0] * 20
        assert all(record.get(metric) is None for record in records for metric in OWN)


def test_tasks_that_step_together_use_each_others_gradient(watching, recorded):
    """Both losses before both steps: the encoder's gradient is of both, and so is the loss of both models."""
    models = two_tasks()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    exporters, sums = [watching(model) for model in models], []
    for _ in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [model(torch.randn(6, 8)).square().mean() for model in models]
        for loss in losses:
            loss.backward()
        sums.append(sum(loss.item() for loss in losses))
        for optimizer in optimizers:
            optimizer.step()
    for exporter in exporters:
        losses = [record.value("loss") for record in recorded(exporter)]
        assert losses[1:] == pytest.approx(sums[1:], rel=1e-5)


def test_parameters_of_the_loss_do_not_make_an_optimizer_another_models(watching, recorded, ledger):
    """An optimizer that also trains a temperature outside the model is the model's own, alone or beside another."""
    model, temperature = trunk(), nn.Parameter(torch.ones(()))
    body = torch.optim.SGD([*model[0].parameters(), temperature], lr=0.01)
    head = torch.optim.SGD(model[2].parameters(), lr=0.01)
    exporter, notes = watching(model), ledger(model)
    for _ in range(5):
        model.zero_grad()
        (model(torch.randn(4, 8)) * temperature).square().mean().backward()
        notes.step(body)
        notes.step(head)
    notes.join(*((2 * i, 2 * i + 1) for i in range(5)))
    notes.agrees_with(recorded(exporter))


@pytest.mark.parametrize("watch", [True, False])
def test_players_train_bit_for_bit_as_unwatched(watch, watching, request):
    """Weights after many turns of players with micro-batches do not depend on being watched."""
    agent = Agent()
    optimizers = {name: torch.optim.Adam(getattr(agent, name).parameters(), lr=1e-2) for name in ("critic", "actor")}
    if watch:
        watching(agent)
    torch.manual_seed(1)
    play(agent, optimizers, ORDERS["critic twice"] * 5, micro_batches=2)
    weights = b"".join(p.detach().numpy().tobytes() for p in agent.parameters())
    plain = Agent()
    optimizers = {name: torch.optim.Adam(getattr(plain, name).parameters(), lr=1e-2) for name in ("critic", "actor")}
    torch.manual_seed(1)
    play(plain, optimizers, ORDERS["critic twice"] * 5, micro_batches=2)
    assert weights == b"".join(p.detach().numpy().tobytes() for p in plain.parameters())


class Ground:
    """The slow, obvious twin: which losses are in each parameter's gradient, and which of them were used."""

    def __init__(self, names):
        self.held = {name: {} for name in names}

    def backward(self, names, number):
        """Add a loss to the gradients of these parameters; what was used before counts no more."""
        for losses in self.held.values():
            for known in [known for known, used in losses.items() if used]:
                del losses[known]
        for name in names:
            self.held[name][number] = False

    def clear(self, names):
        """Forget the gradients of these parameters."""
        for name in names:
            self.held[name].clear()

    def step(self, names):
        """Return the losses in the gradients of these parameters."""
        found = {number for name in names for number in self.held[name]}
        for name in names:
            self.held[name] = dict.fromkeys(self.held[name], True)
        return found


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_any_players(seed, watching, recorded):
    """Whatever is owned, passed, cleared and stepped in whatever order, each step's loss is that of its gradients."""
    draw = random.Random(seed)
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(2)) for name in "abcd"})
    owners = [draw.sample("abcd", draw.randint(1, 3)) for _ in range(draw.randint(2, 4))]
    optimizers = [torch.optim.SGD([model[name] for name in names], lr=0.01) for names in owners]
    exporter, ground, losses, numbers, wanted = watching(model), Ground("abcd"), [], {}, []
    for player, optimizer in enumerate(optimizers):  # so that all are known
        model.zero_grad()
        sum(p.square().sum() for p in model.values()).backward()
        optimizer.step()
        numbers[player] = player
    model.zero_grad()
    ground.clear("abcd")
    counts, what = [1] * len(owners), "clear"
    for _ in range(80):
        # A step right after clearing has no gradient and is no training.
        what = draw.choice(("backward", "clear") if what == "clear" else ("backward", "clear", "step", "step"))
        player = draw.randrange(len(owners))
        if what == "backward":
            names = draw.sample("abcd", draw.randint(1, 4))
            loss = sum(model[name].square().sum() for name in names) + draw.random()
            ground.backward(names, len(losses))
            losses.append(loss.item())
            loss.backward()
        elif what == "clear":
            optimizers[player].zero_grad()
            ground.clear(owners[player])
        else:
            used = ground.step(owners[player])
            counts[player] += 1
            wanted.append((player, counts[player], used))
            optimizers[player].step()
    found = {}
    for record in recorded(exporter):
        steps, own_losses = own(record, "optimizer.steps"), own(record, "optimizer.loss") or {}
        for number, step in (steps or {}).items():
            if step is not None:
                found[number, int(step)] = own_losses.get(number)
    again = set()
    for player, step, used in wanted:
        new = frozenset(used) - {number for key, number in again if key == player}
        again |= {(player, number) for number in used}
        value = found[numbers[player], step]
        expected = sum(losses[number] for number in new) if new else None
        assert value == (None if expected is None else pytest.approx(expected, rel=1e-4)), (player, step, new)


def test_the_cosine_of_players_that_take_turns_is_their_own(watching, recorded):
    """Each one's gradient is compared with its own before, not with that of another over the same parameters."""
    model = trunk().double()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for _ in range(2)]
    exporter, before, cosines = watching(model), {}, []
    for number in range(20):
        optimizer = optimizers[number % 2]
        optimizer.zero_grad()
        ((-1.0) ** number * model(torch.randn(16, 8, dtype=torch.float64)).square().mean()).backward()
        now = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        known = before.get(number % 2)
        cosines.append(None if known is None else float(now @ known / (now.norm() * known.norm())))
        before[number % 2] = now
        optimizer.step()
    told = [record.value("gradient.cosine") for record in recorded(exporter)]
    assert told[:2] == [None, None]
    assert told[2:] == pytest.approx(cosines[2:], abs=1e-5)
