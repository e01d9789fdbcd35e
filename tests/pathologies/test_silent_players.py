"""Players whose gradients or toggles get in each other's way, running sums of losses, adapters that rest at zero."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, IssueType, MemoryWriter

KINDS = (IssueType.NOT_TRAINING, IssueType.STALE_GRAD)


class Players(nn.Module):
    """An actor, and a critic that its loss goes through."""

    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, state, action):
        return self.critic(torch.cat([state, action], 1))


def found(model, train):
    """Return type, cause and sites of what is found of both kinds."""
    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        train()
    return [(str(i.issue_type), i.cause, i.layers) for i in exporter.issues if i.issue_type in KINDS]


def play(order, steps=40):
    """Train both players; letters of ``order`` clear (A, C), pass (a, c, d), step (p, q), freeze and free (f, g, u)."""
    model = Players()
    actor = torch.optim.Adam(model.actor.parameters(), 1e-2)
    critic = torch.optim.Adam(model.critic.parameters(), 1e-2)
    once = itertools.chain(model.critic.parameters())

    def act():
        state = torch.randn(16, 3)
        return state, model(state, model.actor(state))

    def judge(state, value):
        F.mse_loss(value, torch.sin(state[:, :1])).backward()

    def away():
        state = torch.randn(16, 3)
        judge(state, model(state, state[:, :1]))

    does = {
        "A": actor.zero_grad,
        "C": critic.zero_grad,
        "a": lambda: torch.autograd.backward(-act()[1].mean()),
        "c": lambda: judge(*act()),
        "d": away,
        "p": actor.step,
        "q": critic.step,
        "f": lambda: [p.requires_grad_(False) for p in once],
        "g": lambda: model.critic.requires_grad_(False),
        "u": lambda: model.critic.requires_grad_(True),
    }

    def train():
        for call in order * steps:
            does[call]()

    return found(model, train)


@pytest.mark.parametrize("order", ["ACapdq", "dqCAap", "CAapAapdq"])
def test_a_critic_that_keeps_what_the_actor_left_is_told(order):
    """What another player's pass left in .grad is found, whichever of the players begins."""
    kind, cause, sites = play(order)[0]
    assert (kind, cause) == ("STALE_GRAD", "left by another loss")
    assert all(site.startswith("critic") for site in sites)


@pytest.mark.parametrize(
    "order", ["AapCdq", "CdqAap", "CdqAapAap", "CdqAapAapAap", "ACadpq", "ACacpq", "CdqgAapu", "CcqAap"]
)
def test_players_that_clear_or_step_together_are_left_in_peace(order):
    """Clearing before each pass, steps after both passes and toggles that are undone are in order."""
    assert play(order) == []


def test_a_critic_that_is_never_unfrozen_is_told():
    """What was trained in the first step and is frozen ever since, under a stepping optimizer, is found."""
    kind, cause, sites = play("CcqfAap")[0]
    assert (kind, cause) == ("NOT_TRAINING", "never unfrozen")
    assert all(site.startswith("critic") for site in sites)


@pytest.mark.parametrize("freed", [None, 200])
def test_a_critic_stays_told_of_until_it_is_unfrozen(freed):
    """What shows that it trained at first is forgotten with time; the issue is not, and ends when the critic learns."""
    model = Players()
    optimizers = [torch.optim.Adam(part.parameters(), 1e-2) for part in (model.actor, model.critic)]
    with Exporter(
        model, backends=[MemoryWriter()], strict=True, synchronous=True, intervals={"wiring": 5}
    ).watch() as exporter:
        for step in range(300):
            state = torch.randn(16, 3)
            for part, optimizer in zip((model.critic, model.actor), optimizers[::-1], strict=True):
                optimizer.zero_grad()
                value = model(state, model.actor(state))
                if part is model.critic and (step == 0 or step == freed):
                    part.requires_grad_(True)
                if part is model.actor or model.critic[0].weight.requires_grad:
                    (-value.mean() if part is model.actor else F.mse_loss(value, torch.sin(state[:, :1]))).backward()
                optimizer.step()
                if step == 0:
                    model.critic.requires_grad_(False)
    issues = [issue for issue in exporter.issues if issue.cause == "never unfrozen"]
    assert len(issues) == 1
    assert issues[0].healed_step is None if freed is None else freed < issues[0].healed_step < freed + 30


@pytest.mark.parametrize(("at", "learned"), [(7, False), (20, False), (60, False), (20, True), (60, True)])
def test_an_encoder_that_a_probe_left_frozen_is_told_where_nothing_was_learned(at, learned):
    """A network whose encoder is frozen before it has learned anything stays where it is; one that has learned is done."""
    model = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2 if learned else 1e-3)

    def train():
        for step in range(180):
            if step == at:
                model[:4].requires_grad_(False)
            x = 2 * torch.rand(64, 2) - 1
            y = x[:, :1] + x[:, 1:] if learned else torch.sin(12 * x[:, :1]) * torch.sin(12 * x[:, 1:])
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    told = [(cause, sites) for kind, cause, sites in found(model, train) if str(kind) == "NOT_TRAINING"]
    frozen = tuple(f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias"))
    assert told == ([] if learned else [("never unfrozen", frozen)])


def test_layers_that_are_frozen_later_or_in_turn_are_left_in_peace():
    """Freezing after a while, and training one layer after another, is somebody's intention."""
    for plan in (lambda step: {40: "1"}.get(step, ""), lambda step: str(step // 10 % 3) if step % 10 == 0 else ""):
        model = nn.Sequential(nn.Linear(4, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)

        def train(model=model, optimizer=optimizer, plan=plan):
            for step in range(80):
                if name := plan(step):
                    model.requires_grad_(name == "1" and step == 40)
                    model[int(name)].requires_grad_(step != 40)
                x = torch.randn(16, 4)
                optimizer.zero_grad()
                F.mse_loss(model(x), x[:, :1].sin()).backward()
                optimizer.step()

        assert found(model, train) == []


def mlp():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def summed(how, steps=24):
    """Train on three batches for each step, and on their losses in one way or another."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def train():
        epoch = 0.0
        for _ in range(steps):
            optimizer.zero_grad()
            total, losses = 0.0, []
            for _ in range(3):
                x = torch.randn(16, 4)
                losses.append(F.mse_loss(model(x), x[:, :1].sin()) / 3)
                total = total + losses[-1]
                if how == "running":
                    total.backward(retain_graph=True)
                elif how == "list":
                    torch.stack(losses).sum().backward(retain_graph=True)
                elif how == "each":
                    losses[-1].backward()
                elif how == "measured":
                    losses[-1].backward(retain_graph=True)
                    optimizer.zero_grad()
            if how in {"once", "measured"}:
                total.backward()
            epoch += float(total.detach())
            optimizer.step()

    return found(model, train)


@pytest.mark.parametrize("how", ["running", "list"])
def test_a_running_sum_of_losses_is_told(how):
    """A loss that holds the ones before it gives their gradients once more."""
    assert [(kind, cause) for kind, cause, _ in summed(how)] == [("STALE_GRAD", "running sum")]


@pytest.mark.parametrize("how", ["each", "once", "measured"])
def test_sums_that_count_each_loss_once_are_left_in_peace(how):
    """Micro-batches, one pass of a finished sum, and gradients that are measured and cleared are in order."""
    assert summed(how) == []


class Adapted(nn.Module):
    """A frozen layer with two small factors beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


@pytest.mark.parametrize("frozen", [True, False])
def test_adapters_that_rest_at_zero_are_told(frozen):
    """Factors frozen at zero add nothing; those that learn, and biases of zero, are in order."""
    model = nn.Sequential(Adapted(), nn.GELU(), nn.Linear(8, 1))
    if frozen:
        model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)

    def train():
        for _ in range(30):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :1].sin()).backward()
            optimizer.step()

    expected = [("NOT_TRAINING", "frozen at zero", ("0.lora_b.weight",))] if frozen else []
    assert found(model, train) == expected


@pytest.mark.parametrize("times", [1, 4])
def test_a_cell_without_a_state_is_told_where_it_has_steps(times):
    """The state's weights of a cell get a gradient of 0 in its first step; where more follow, it is not handed on."""
    cell = nn.ModuleDict({"cell": nn.GRUCell(4, 8), "out": nn.Linear(8, 1)})

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = cell

        def forward(self, x):
            return self.parts["out"](sum(self.parts["cell"](x) for _ in range(times)))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def train():
        for _ in range(24):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :1].sin()).backward()
            optimizer.step()

    assert [sites for _, _, sites in found(model, train)] == ([("parts.cell.weight_hh",)] if times > 2 else [])


@pytest.mark.parametrize("own", [True, False])
def test_one_answer_that_a_player_asks_for_is_meant(own):
    """Written out by hand in one module: players want one number of all samples; two parts with one loss should not."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    model = nn.ModuleDict({"maker": maker, "critic": critic})
    optimizers = [torch.optim.Adam(part.parameters(), 1e-3) for part in (critic, maker)]

    def losses():
        noise = torch.randn(32, 3)
        if own:
            yield (critic(torch.randn(32, 2)) - 1).square().mean() + critic(maker(noise).detach()).square().mean()
        yield (critic(maker(noise)) - 1).square().mean()

    with Exporter(model, backends=[MemoryWriter()], strict=True).watch() as exporter:
        for _ in range(40):
            for loss, players in zip(
                losses(), ([optimizers[:1], optimizers[1:]] if own else [optimizers]), strict=True
            ):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in players:
                    optimizer.step()
    assert [str(issue.issue_type) for issue in exporter.issues] == ([] if own else ["BAD_TARGETS"])
