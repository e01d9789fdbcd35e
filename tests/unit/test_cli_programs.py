"""The demo's programs: seeded, on real data, and each fault where it is said to be.

That they learn without one is tested where the demo trains them, in ``test_cli_demo.py``.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from gradflow_export.cli.demo import PROGRAMS
from gradflow_export.cli.programs import NAN_STEP, build
from gradflow_export.errors import MissingPackageError, StorageError


@pytest.fixture(autouse=True)
def one_thread():
    """Such small models wait for a second thread where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def depth_gain(program, fault):
    """Norm of the gradient at the first block's output over that at the last block's, in one backward pass."""
    made, norms = build(program, fault), []

    def catch(_module, _inputs, output):
        output.register_hook(lambda gradient: norms.append(gradient.norm().item()))

    for block in made.model.blocks:
        block.register_forward_hook(catch)
    inputs, targets = next(made.batches)
    made.criterion(made.model(inputs), targets).backward()
    assert len(norms) == len(made.model.blocks)
    return norms[-1] / norms[0]


def train(made, steps):
    """Train; return the losses."""
    losses = []
    for step, (inputs, targets) in enumerate(itertools.islice(made.batches, steps), start=1):
        made.before_step(step)
        made.optimizer.zero_grad()
        loss = made.criterion(made.model(inputs), targets)
        loss.backward()
        made.optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_are_seeded(program):
    """Two builds train alike, bit for bit."""
    assert train(build(program, "none"), 3) == train(build(program, "none"), 3)


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_vanish_and_explode_along_the_blocks(program):
    """A healthy chain keeps the gradient within a factor of ten; the sick ones lose or gain orders of magnitude."""
    assert 0.1 < depth_gain(program, "none") < 10
    assert depth_gain(program, "vanishing") < 1e-5
    assert depth_gain(program, "exploding") > 1e3


@pytest.mark.parametrize("program", PROGRAMS)
def test_dead_units_lie_in_block_3(program):
    """The ReLU of block 3 lets nothing through, and no other is dead."""
    made = build(program, "dead")
    dead = {}
    for name, module in made.model.named_modules():
        if isinstance(module, torch.nn.ReLU):
            module.register_forward_hook(lambda _m, _i, output, name=name: dead.update({name: not output.any()}))
    made.model(next(made.batches)[0])
    assert [name for name, is_dead in dead.items() if is_dead][:1] == ["blocks.3.activation"]
    assert not any(dead[f"blocks.{index}.activation"] for index in range(3))


@pytest.mark.parametrize("program", PROGRAMS)
def test_nan_strikes_at_its_step_in_block_3(program):
    """Losses are finite up to the step and NaN from it on, and the NaN comes out of block 3."""
    made = build(program, "nan")
    losses = torch.tensor(train(made, NAN_STEP + 1))
    assert losses.isnan().nonzero().flatten().tolist() == [NAN_STEP - 1, NAN_STEP]
    fresh, seen = build(program, "nan"), {}
    fresh.before_step(NAN_STEP)
    for index in (2, 3):
        block = fresh.model.get_submodule(f"blocks.{index}")
        block.register_forward_hook(
            lambda _m, _i, output, index=index: seen.update({index: output.isnan().any().item()})
        )
    fresh.model(next(fresh.batches)[0])
    assert seen == {2: False, 3: True}


@pytest.mark.parametrize("program", PROGRAMS)
def test_stagnation_leaves_block_3_as_it_was(program):
    """Block 3 belongs to no optimizer; everything else moves."""
    made = build(program, "stagnation")
    before = {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}
    train(made, 2)
    still = {name for name, parameter in made.model.named_parameters() if torch.equal(parameter, before[name])}
    assert still == {name for name in before if name.startswith("blocks.3.")}


def test_missing_data_is_one_clear_error(monkeypatch, tmp_path):
    """Without scikit-learn, and without standard library sources, the error says what to do."""
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(MissingPackageError, match="pip install"):
        build("mlp", "none")
    monkeypatch.setattr("gradflow_export.cli.programs.sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(StorageError, match="--program mlp"):
        build("transformer", "none")
