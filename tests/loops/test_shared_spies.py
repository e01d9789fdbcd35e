"""Several models watch the same functions of torch, and leave in any order."""

import itertools

import pytest
import torch

from gradflow_export.hooks.function_spy import Spy


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("again", [False, True])
def test_watchers_leave_in_any_order(order, again):
    before, seen = torch.relu, []
    spies = [Spy(torch, "relu", lambda args, kwargs, n=n: seen.append(n)) for n in range(3)]
    for _round in range(1 + again):
        for spy in spies:
            spy.install()
        torch.relu(torch.ones(1))
        assert seen == [0, 1, 2]
        seen.clear()
        for gone, number in enumerate(order, 1):
            spies[number].remove()
            torch.relu(torch.ones(1))
            assert seen == [n for n in range(3) if n not in order[:gone]]
            seen.clear()
            if again and gone == 2:  # one comes back while another is still there
                spies[order[0]].install()
                spies[order[0]].remove()
        assert torch.relu is before


def test_who_wraps_a_stand_in_keeps_its_place():
    before, seen = torch.relu, []
    spies = [Spy(torch, "relu", lambda args, kwargs, n=n: seen.append(n)) for n in range(2)]
    spies[0].install()
    below = torch.relu

    def mine(x):
        return below(x)

    mine.__dict__.update(below.__dict__)  # as functools.wraps does
    torch.relu = mine
    try:
        spies[0].remove()
        spies[1].install()
        torch.relu(torch.ones(1))
        spies[1].remove()
        assert torch.relu is mine
        assert seen == [1]
    finally:
        torch.relu = before
