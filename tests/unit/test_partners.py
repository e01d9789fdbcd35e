"""A record of several optimizers is complete when each of those that are awaited has stepped."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradflow_export.engine.optimizer_groups import GONE, Joins, Partners


class Optimizer:
    """Nothing but an identity."""


class Plain:
    """The same rules, written down as they are said, with a look at everybody in each step."""

    def __init__(self):
        self.awaited, self.absent, self.stepped = set(), {}, []

    def begin(self, places):
        """Forget what never completed, and who has long not stepped."""
        for one in [one for one in self.awaited if self.stepped and one not in self.stepped]:
            self.absent[one] = self.absent.get(one, 0) + 1
            self.awaited -= {one} if self.absent[one] >= GONE else set()
        self.stepped = []

    def anew(self, one, places):
        return any(places[one] & places[other] for other in self.stepped)

    def step(self, one, places):
        self.stepped.append(one)
        if one not in self.awaited:
            self.awaited.add(one)
            self.absent[one] = 0
            return False
        taken = set().union(*(places[other] for other in self.stepped))
        if any(not places[other] & taken for other in self.awaited):
            return False
        self.absent |= dict.fromkeys(self.awaited, 0)
        self.stepped = []
        return True


OWNED = st.lists(st.frozensets(st.integers(0, 5), min_size=1, max_size=3), min_size=2, max_size=5)


@given(OWNED, st.lists(st.integers(0, 4), min_size=1, max_size=120))
def test_who_is_awaited_is_as_if_everybody_was_asked_in_each_step(owned, order):
    """In any order, with any parameters in common."""
    every = [Optimizer() for _ in owned]
    sources = [SimpleNamespace(places=places, outside=False, parameters=()) for places in owned]
    partners, plain, places = Partners(), Plain(), dict(enumerate(owned))
    for one in (index % len(owned) for index in order):
        step = SimpleNamespace(optimizer=every[one], owned=sources[one])
        joins = partners.admit(step)
        assert (joins is Joins.ANEW) == plain.anew(one, places)
        if joins is Joins.ANEW:
            partners.begin()
            plain.begin(places)
        assert partners.step(every[one]) == plain.step(one, places)
    came = {index % len(owned) for index in order}
    assert len(partners.sites) == (len(came) if len(came) > 1 else 0)


def test_names_follow_those_that_come_and_go():
    """One that is gone leaves its number to the next."""
    partners, every = Partners(), [Optimizer() for _ in range(3)]
    for number, one in enumerate(every):
        places = frozenset({number})
        partners.admit(
            SimpleNamespace(optimizer=one, owned=SimpleNamespace(places=places, outside=False, parameters=()))
        )
        partners.step(one)
    assert partners.sites == ("Optimizer.0", "Optimizer.1", "Optimizer.2")
    del one
    every.pop(1)
    assert partners.sites == ("Optimizer.0", "optimizer.1", "Optimizer.2")


@pytest.mark.parametrize("several", [False, True])
def test_parameters_of_optimizers_that_are_gone_are_kept_by_nobody(several):
    """A model that was trained and let go is freed, though its exporter is there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    parts = [model[0], model[2]] if several else [model]
    optimizers = [torch.optim.Adam(part.parameters()) for part in parts]
    partners = Partners()
    for _ in range(4):
        for number, optimizer in enumerate(optimizers):
            own = [*parts[number].parameters()]
            owned = SimpleNamespace(places=frozenset({number}), outside=False, parameters=own)
            if not partners.is_sole(optimizer):
                joins = partners.admit(SimpleNamespace(optimizer=optimizer, owned=owned))
                if joins is Joins.ANEW:
                    partners.begin()
            partners.step(optimizer)
    left = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, parts, optimizers, optimizer, own, owned
    gc.collect()
    assert [reference() for reference in left] == [None] * 4
    assert partners.sites == ()
