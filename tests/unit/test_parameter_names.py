"""Names of parameters are found by identity, and never for a tensor that is another parameter by now."""

import pytest
import torch
from torch import nn

from gradflow_export.hooks.parameter_names import ParameterNames


class Counting(nn.Module):
    """A chain of blocks that counts how often it is listed."""

    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
        self.listed = 0

    def named_modules(self, *args, **kwargs):
        self.listed += 1
        return super().named_modules(*args, **kwargs)


@pytest.mark.parametrize("count", [1, 7, 300])
def test_a_model_of_any_size_is_listed_once(count):
    """Every parameter has the name that the model gives it, and the questions do not list the model again."""
    model = Counting(count)
    expected = {id(p): name for name, p in model.named_parameters()}
    names = ParameterNames(lambda: model)
    names.name_of(model.blocks[0].weight)
    model.listed = 0
    for _ in range(3):
        names.begin()
        assert {id(p): names.name_of(p) for b in model.blocks for p in b.parameters()} == expected
    assert model.listed == 0


def test_a_parameter_that_was_replaced_is_named_from_the_next_step_on():
    """The old tensor has no name any more; the new one has it as soon as the model may be listed again."""
    model = Counting(2)
    names, old = ParameterNames(lambda: model), model.blocks[0].weight
    assert names.name_of(old) == "blocks.0.weight"
    model.blocks[0].weight = new = nn.Parameter(torch.zeros(2, 2))
    assert names.name_of(old) is None
    names.begin()
    assert names.name_of(new) == "blocks.0.weight"
    assert names.name_of(old) is None


def test_a_stranger_does_not_list_the_model_at_every_question():
    """A tensor that is no parameter costs one listing for each sampled step at most."""
    model = Counting(3)
    names = ParameterNames(lambda: model)
    assert names.name_of(torch.zeros(2)) is None
    model.listed = 0
    for _ in range(100):
        assert names.name_of(torch.zeros(2)) is None
    assert model.listed == 0
    assert names.name_of(None) is None


def test_a_shared_parameter_goes_by_its_first_name_and_a_model_that_is_gone_names_nothing():
    """As in ``named_parameters()``."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert ParameterNames(lambda: model).name_of(model[1].weight) == "0.weight"
    assert ParameterNames(lambda: None).name_of(model[0].weight) is None
