"""The caches keep to their budgets and to their time."""

import numpy as np
import pytest

from tensorboard_plugin_gradflow.cache import IndexCache, TensorCache
from tensorboard_plugin_gradflow.index import RunIndex, Session


def index_of(tensors):
    """Return the index of a run with so many tensors."""
    return RunIndex("a", (Session("1-0", dict.fromkeys(map(str, range(tensors))), 9),), 0.0, 0)


def test_what_was_used_longest_ago_goes_first():
    """Using a tensor keeps it."""
    cache = TensorCache(800)
    for name in "ab":
        cache.put(name, np.zeros(50))
    cache.get("a")
    cache.put("c", np.zeros(50))
    assert [cache.get(name) is not None for name in "abc"] == [True, False, True]
    assert cache.used <= 800


def test_what_is_larger_than_the_budget_is_not_kept():
    """One huge tensor does not empty the cache."""
    cache = TensorCache(800)
    cache.put("a", np.zeros(50))
    cache.put("b", np.zeros(5000))
    assert cache.get("a") is not None
    assert cache.get("b") is None


def test_putting_a_name_twice_counts_once():
    """Two requests may read the same tensor at the same time."""
    cache = TensorCache(800)
    for _ in range(9):
        cache.put("a", "x" * 100)
    assert cache.used == 400


def test_the_index_put_longest_ago_goes_first():
    """What counts is how many tensors all of them describe."""
    cache = IndexCache(tensors=10)
    for name, tensors in (("a", 4), ("b", 4), ("a", 6), ("c", 4)):
        cache.put(name, index_of(tensors))
    assert [cache.get(name) is not None for name in "abc"] == [True, False, True]
    assert cache.used == 10


def test_one_run_above_the_budget_is_kept_alone():
    """The longer a run, the more a listing of it takes."""
    cache = IndexCache(tensors=10)
    cache.put("a", index_of(4))
    cache.put("b", index_of(400))
    assert [cache.get(name) is not None for name in "ab"] == [False, True]


@pytest.mark.parametrize(("later", "kept"), [(4.9, True), (5.0, False)])
def test_an_index_is_used_for_a_moment(monkeypatch, later, kept):
    """Whoever never asks for the list of runs learns what is new all the same."""
    monkeypatch.setattr("tensorboard_plugin_gradflow.cache.time.monotonic", lambda: 100.0)
    cache = IndexCache()
    cache.put("a", index_of(1))
    monkeypatch.setattr("tensorboard_plugin_gradflow.cache.time.monotonic", lambda: 100.0 + later)
    assert (cache.get("a") is not None) is kept
