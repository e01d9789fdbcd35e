"""The cache keeps to its budget."""

import numpy as np

from tensorboard_plugin_gradflow.cache import TensorCache


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
