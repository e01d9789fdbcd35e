"""Which models are players of a game: known by the graphs of losses and by who steps with them, never by names."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradflow_export import Exporter, MemoryWriter

TOLD = "wiring.game"


class _Pair:
    """Two networks with an optimizer each; one is watched."""

    def __init__(self, watched: str, rate: float = 1e-3) -> None:
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.b = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.first = torch.optim.Adam(self.a.parameters(), 1e-3 if watched == "b" else rate)
        self.second = torch.optim.Adam(self.b.parameters(), 1e-3 if watched == "a" else rate)
        self.model = {"a": self.a, "b": self.b}[watched]

    def watch(self, steps, play):
        """Return the records of some steps."""
        writer = MemoryWriter()
        with Exporter(self.model, backends=[writer], verbose=0, strict=True).watch() as exporter:
            for step in range(steps):
                play(self, step)
        return writer.records, exporter.issues


def _critic(pair, _step=0, **clear):
    pair.second.zero_grad(**clear)
    made = pair.a(torch.randn(32, 4)).detach()
    (functional.softplus(-pair.b(torch.randn(32, 2) + 1)).mean() + functional.softplus(pair.b(made)).mean()).backward()
    pair.second.step()


def _maker(pair, _step=0, **clear):
    pair.first.zero_grad(**clear)
    functional.softplus(-pair.b(pair.a(torch.randn(32, 4)))).mean().backward()
    pair.first.step()


def _turns(pair, _step):
    _critic(pair)
    _maker(pair)


def _other_order(pair, _step):
    _maker(pair)
    _critic(pair)


def _often(pair, step):
    _critic(pair)
    if step % 3 == 2:
        _maker(pair)


def _seldom(pair, step):
    _maker(pair)
    if step % 3 == 2:
        _critic(pair)


def _by_zeros(pair, _step):
    _critic(pair, set_to_none=False)
    _maker(pair, set_to_none=False)


def _toggled(pair, _step):
    pair.b.requires_grad_(True)
    _critic(pair)
    pair.b.requires_grad_(False)
    _maker(pair)
    pair.b.requires_grad_(True)


@pytest.mark.parametrize("watched", ["a", "b"])
@pytest.mark.parametrize("play", [_turns, _other_order, _often, _seldom, _by_zeros, _toggled])
def test_players_are_known_from_the_first_turns(watched, play):
    """A loss goes through the weights of one that has a loss of its own, however often each has its turn."""
    records, _ = _Pair(watched).watch(30, play)
    assert records[-1].fact(TOLD, "") == 1


def _beside(pair, _step):
    for model, optimizer, width in ((pair.a, pair.first, 4), (pair.b, pair.second, 2)):
        optimizer.zero_grad()
        model(torch.randn(32, width)).square().mean().backward()
        optimizer.step()


def _together(pair, _step):
    pair.first.zero_grad()
    pair.second.zero_grad()
    pair.b(pair.a(torch.randn(32, 4))).square().mean().backward()
    pair.second.step()
    pair.first.step()


def _gathered(pair, step):
    pair.b(pair.a(torch.randn(32, 4))).square().mean().backward()
    if step % 2:
        pair.first.step()
        pair.first.zero_grad()
        pair.second.step()
        pair.second.zero_grad()


def _one_later(pair, step):
    pair.first.zero_grad()
    pair.b(pair.a(torch.randn(32, 4))).square().mean().backward()
    pair.first.step()
    if step % 2:
        pair.second.step()
        pair.second.zero_grad()


def _begins_late(pair, step):
    pair.first.zero_grad()
    pair.second.zero_grad()
    pair.b(pair.a(torch.randn(32, 4))).square().mean().backward()
    pair.first.step()
    if step > 20:
        pair.second.step()


def _taught(pair, step):
    x = torch.randn(32, 2)
    with torch.no_grad():
        wanted = pair.b(x)
    pair.first.zero_grad()
    functional.mse_loss(pair.a(torch.cat([x, x], 1)).sum(1, keepdim=True), wanted).backward()
    pair.first.step()
    pair.second.zero_grad()
    pair.b(x).square().mean().backward()
    pair.second.step()


@pytest.mark.parametrize("watched", ["a", "b"])
@pytest.mark.parametrize("play", [_beside, _together, _gathered, _one_later, _begins_late, _taught])
def test_models_that_share_passes_or_nothing_play_no_game(watched, play):
    """Beside each other, with an optimizer for each part of one loss, or with what the other has said: no game."""
    records, _ = _Pair(watched).watch(40, play)
    assert len(records) >= 10
    assert not any(record.fact(TOLD, "") for record in records)


@pytest.mark.parametrize("watched", ["a", "b"])
def test_a_player_that_does_not_move_is_named(watched):
    """That its loss may stay is no excuse for weights that stay."""
    _, issues = _Pair(watched, rate=0.0).watch(60, _turns)
    assert {"STAGNATION", "NOT_TRAINING"} & {issue.issue_type.value for issue in issues}


@pytest.mark.parametrize("seed", [5, 6, 10])
def test_the_loss_of_a_player_need_not_fall(seed):
    """A game that goes well: the losses of both stay, or rise to where neither wins; nothing is reported of that."""
    torch.manual_seed(seed)
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    exporters = [Exporter(model, backends=[], verbose=0, strict=True).watch() for model in (maker, critic)]
    first, second = (torch.optim.Adam(model.parameters(), 1e-3, betas=(0.5, 0.9)) for model in (maker, critic))
    for _ in range(700):
        real, noise = 0.3 * torch.randn(64, 2) + torch.tensor([1.0, -1.0]), torch.randn(64, 4)
        second.zero_grad()
        made = maker(noise).detach()
        (functional.softplus(-critic(real)).mean() + functional.softplus(critic(made)).mean()).backward()
        second.step()
        first.zero_grad()
        functional.softplus(-critic(maker(torch.randn(64, 4)))).mean().backward()
        first.step()
    for exporter in exporters:
        exporter.close()
        assert not {"NOT_LEARNING", "DIVERGING"} & {issue.issue_type.value for issue in exporter.issues}
