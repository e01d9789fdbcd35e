"""A target network, which copies of another network are written to, rests between two copies and is no fault."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradflow_export import Exporter, MemoryWriter

STEPS = 60


def network():
    """A network of values of actions."""
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


class Agent(nn.Module):
    """Two networks; what follows is a copy of the other or begins with weights of its own."""

    def __init__(self, *, copied=True):
        super().__init__()
        torch.manual_seed(0)
        self.values = network()
        self.follower = copy.deepcopy(self.values) if copied else network()


class Layers(nn.Module):
    """Two layers of one list that begin alike, of which the second is never called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.layers = nn.ModuleList([layer, copy.deepcopy(layer)])
        self.head = nn.Linear(6, 3)


def stagnant(agent, loss_of, owned, every=None):
    """Train, and return the layers that were reported to rest or to get no update."""
    optimizer, writer = torch.optim.Adam(owned, 1e-3), MemoryWriter()
    with Exporter(agent, backends=[writer], synchronous=True, strict=True).watch() as exporter:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(agent, torch.randn(32, 6), torch.randn(32, 6)).backward()
            optimizer.step()
            if every is not None and step % every == every - 1:
                agent.follower.load_state_dict(agent.values.state_dict())
    return {
        layer
        for issue in exporter.issues
        if issue.issue_type.value in {"STAGNATION", "NOT_TRAINING"}
        for layer in issue.layers
    }


def temporal_difference(agent, here, there):
    """Q-learning: values are compared with what the follower says of the next state."""
    with torch.no_grad():
        aim = here[:, :1] + 0.9 * agent.follower(there).amax(1, keepdim=True)
    return F.smooth_l1_loss(agent.values(here)[:, :1], aim)


@pytest.mark.parametrize("every", [None, 25, 4])
@pytest.mark.parametrize("together", [True, False])
def test_a_target_network_is_not_accused(together, every):
    """Whether its optimizer was given both networks or one, and however rarely the copy comes."""
    agent = Agent()
    owned = agent.parameters() if together else agent.values.parameters()
    assert stagnant(agent, temporal_difference, list(owned), every) == set()


def test_a_network_of_its_own_that_never_learns_is_still_found():
    """It gets no gradient either, and nobody wrote it from another one."""
    agent = Agent(copied=False)
    assert any(name.startswith("follower") for name in stagnant(agent, temporal_difference, list(agent.parameters())))


def test_a_copy_that_gets_gradients_and_no_optimizer_is_still_found():
    """Twins of which one was forgotten: gradients arrive in it, so that it was meant to learn."""
    agent = Agent()
    found = stagnant(
        agent, lambda a, x, y: (a.values(x) - a.follower(y)).square().mean(), list(agent.values.parameters())
    )
    assert any(name.startswith("follower") for name in found)


def test_a_part_of_a_copy_that_rests_is_still_found():
    """The rest of the copy learns, so that it is no target network."""
    agent = Agent()

    def loss_of(agent, here, there):
        return F.mse_loss(agent.values(here), agent.follower[2](agent.follower[:2](there).detach()))

    assert stagnant(agent, loss_of, list(agent.parameters())) == {"follower.0.weight", "follower.0.bias"}


def test_layers_of_one_list_that_begin_alike_are_no_networks():
    """A layer that is never called is found though it began as a copy of the one before it."""
    model = Layers()
    found = stagnant(model, lambda m, x, _: m.head(m.layers[0](x)).square().mean(), list(model.parameters()))
    assert any(name.startswith("layers.1") for name in found)


def test_copies_of_one_list_that_are_made_at_each_step_are_meant():
    """Only what is trained beside what it equals should be made anew; here the second is written to by the first."""
    torch.manual_seed(0)
    both = nn.ModuleList([network(), network()])
    optimizer, memory = torch.optim.Adam(both[0].parameters(), lr=1e-2), MemoryWriter()
    with Exporter(both, backends=[memory], verbose=0, budget=None) as exporter:
        exporter.watch()
        for _ in range(STEPS):
            both[1].load_state_dict(both[0].state_dict())
            x, after = torch.randn(64, 6), torch.randn(64, 6)
            with torch.no_grad():
                wanted = x[:, :3] + 0.5 * both[1](after)
            optimizer.zero_grad()
            F.mse_loss(both[0](x), wanted).backward()
            optimizer.step()
    assert [issue.layers for issue in exporter.issues] == []
