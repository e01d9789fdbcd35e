"""Hints at the end of error messages."""

from gradflow_export.errors import nearest


def test_a_close_word_is_offered():
    """One slip of the finger is enough to go by."""
    assert nearest("tensorbord", ["console", "tensorboard"]) == "; did you mean 'tensorboard'?"


def test_known_words_are_listed_up_to_a_limit():
    """A model has thousands of module names; nameless ones are left out."""
    assert nearest("zzz", ["b", "", "a"]) == "; known are: a, b"
    hint = nearest("zzz", [f"blocks.{i}" for i in range(50)])
    assert hint.endswith(" and 30 more")
    assert hint.count("blocks.") == 20
