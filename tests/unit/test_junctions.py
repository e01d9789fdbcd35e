"""How blocks hang together, as read from the graph of a loss, for small models of known shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter


def following(model, losses, *, steps=1, blocks=None):
    """Train under an exporter; return the name of the block that each must pass, ``"loss"`` where there is none."""
    writer = MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Exporter(model, backends=[writer], strict=True) as exporter:
        exporter.watch(blocks=blocks)
        for _ in range(steps):
            optimizer.zero_grad()
            for loss in losses(model):
                exporter.observe(loss=loss)
                loss.backward(retain_graph=True)
            optimizer.step()
    reading = next(r for record in writer.records for r in record.readings if r.metric == "block.next")
    names = {-1: "loss", -2: "unknown", **dict(enumerate(reading.sites))}
    return {
        site: names[int(value)] if here else None
        for site, value, here in zip(reading.sites, reading.values, reading.present, strict=True)
    }


def layers(**names):
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in names})


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(8, 4)


def test_layers_one_after_the_other_are_one_chain(x):
    """Each of three layers leads to the next, through activations that change in place, and the last to the loss."""
    m = layers(a=1, b=1, c=1)
    found = following(m, lambda m: [m["c"](m["b"](m["a"](x).relu_()).tanh()).sum()])
    assert found == {"a": "b", "b": "c", "c": "loss"}


def test_two_heads_end_the_chain_before_them(x):
    """What a trunk gives goes to two heads, none of which it must pass."""

    def losses(m):
        h = m["b"](m["a"](x))
        return [m["c"](h).sum() + m["d"](h).square().sum()]

    assert following(layers(a=1, b=1, c=1, d=1), losses) == {"a": "b", "b": "loss", "c": "loss", "d": "loss"}


def test_branches_and_skips_meet_where_they_are_joined(x):
    """A branch with a skip around it leads to where both are added up, and so does what stands before them."""

    def losses(m):
        h = m["a"](x)
        return [m["d"](h + m["c"](m["b"](h))).sum()]

    assert following(layers(a=1, b=1, c=1, d=1), losses) == {"a": "d", "b": "c", "c": "d", "d": "loss"}


def test_a_loss_on_an_inner_layer_goes_round_those_after_it(x):
    """A layer that is in the loss itself need not pass the head."""

    def losses(m):
        h = m["b"](m["a"](x))
        return [m["c"](h).sum() + h.square().sum()]

    assert following(layers(a=1, b=1, c=1), losses) == {"a": "b", "b": "loss", "c": "loss"}


def test_a_network_that_is_also_fed_with_data_is_not_compared_with_what_feeds_it(x):
    """A critic sees what is generated and what is real: its gradient is not that of the generator alone."""

    def losses(m):
        fake = m["a"](x)
        return [m["c"](m["b"](fake)).sum(), m["c"](m["b"](x)).sum() - m["c"](m["b"](fake.detach())).sum()]

    assert following(layers(a=1, b=1, c=1), losses) == {"a": "loss", "b": "c", "c": "loss"}


def test_a_pass_whose_loss_was_not_handed_over_shows_in_the_gradients_that_arrive(x):
    """Only the generator's loss is seen; the critic gets gradients of another, and the two are not compared."""

    def losses(m):
        m["c"](m["b"](x)).sum().backward()
        yield m["c"](m["b"](m["a"](x))).sum()

    assert following(layers(a=1, b=1, c=1), losses) == {"a": "loss", "b": "c", "c": "loss"}


def test_a_layer_called_on_its_own_output_leads_on_to_the_next(x):
    """A layer that is applied three times leads to the head, and what stands before it leads to it."""

    def losses(m):
        h = m["a"](x)
        for _ in range(3):
            h = m["b"](h).tanh()
        return [m["c"](h).sum()]

    assert following(layers(a=1, b=1, c=1), losses, steps=3) == {"a": "b", "b": "c", "c": "loss"}


def test_what_follows_a_list_of_blocks_is_not_known(x):
    """Of like modules in a list, the last may have anything after it."""
    m = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    assert following(m, lambda m: [m(x).sum()]) == {"0": "1", "1": "2", "2": "unknown"}


def test_gains_are_missing_between_heads_and_kept_along_the_trunk(x):
    """A gain is given from trunk to trunk, and from head to head there is none."""

    def loss(m):
        h = m["b"](m["a"](x))
        return m["c"](h).sum() + m["d"](h).square().sum()

    m, writer = layers(a=1, b=1, c=1, d=1), MemoryWriter()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
    with Exporter(m, backends=[writer], strict=True) as exporter:
        exporter.watch()
        value = loss(m)
        exporter.observe(loss=value)
        value.backward()
        optimizer.step()
    gains = writer.records[0].get("block.gain").as_dict()
    assert gains["b"] > 0
    assert gains["c"] is None
    assert gains["d"] is None


@pytest.mark.parametrize("players", [2, 5])
def test_players_that_are_called_before_the_first_of_their_optimizers_steps_are_chains(x, players):
    """Each has a loss and an optimizer of its own; the gains are those within a player, from the first step on."""
    writer = MemoryWriter()
    model = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(players))
    optimizers = [torch.optim.SGD(player.parameters(), 0.1) for player in model]
    with Exporter(model, backends=[writer], strict=True) as exporter:
        exporter.watch()
        for _ in range(3):
            outputs = [player(x) for player in model]
            for optimizer, output in zip(optimizers, outputs, strict=True):
                optimizer.zero_grad()
                output.square().mean().backward()
                optimizer.step()
    gains = writer.records[-1].get("block.gain").as_dict()
    assert {site for site, gain in gains.items() if gain is not None} == {f"{player}.2" for player in range(players)}
    following = writer.records[-1].get("block.next")
    assert following.present.all()
