"""Names that users write as strings: type checkers know them, and an error names the one that was meant."""

from typing import get_args, get_type_hints

import pytest
from torch import nn

from gradflow_export import ArgumentError, Exporter
from gradflow_export.profiles import PROFILES, THRESHOLDS, Profile, Thresholds
from gradflow_export.schedule import INTERVALS, Instrument
from gradflow_export.writers import _WRITERS, Backend


@pytest.mark.parametrize(
    ("declared", "known"),
    [
        (get_args(Backend), [name for name, _, _ in _WRITERS]),
        (get_args(Profile), PROFILES),
        (get_args(Instrument), INTERVALS),
        (get_type_hints(Thresholds), THRESHOLDS),
    ],
    ids=["backends", "profiles", "instruments", "thresholds"],
)
def test_type_checkers_know_the_names_that_are_taken(declared, known):
    """What is declared for type checkers is what is accepted, no more and no less."""
    assert sorted(declared) == sorted(known)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ({"backends": ["wnadb"]}, "wandb"),
        ({"backends": "tensorbord"}, "tensorboard"),
        ({"profile": "robst"}, "robust"),
        ({"intervals": {"block": 5}}, "blocks"),
        ({"gradient_explosion_treshold": 1.0}, "gradient_explosion_threshold"),
        ({"backend": ["jsonl"]}, "backends"),
        ({"verbos": 1}, "verbose"),
        ({"config": {"evry": 1}}, "every"),
    ],
    ids=str,
)
def test_a_misspelt_name_is_an_error_that_names_the_right_one(arguments, meant, tmp_path):
    """Wherever the word stands, the message ends with the word that was meant."""
    with pytest.raises(ArgumentError, match=f"did you mean '{meant}'"):
        Exporter(nn.Linear(1, 1), logdir=tmp_path, **arguments)
