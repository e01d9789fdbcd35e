"""Learning rates that change while a run goes on."""

import pytest
import torch
from torch import nn

from gradflow_export import Exporter, MemoryWriter


def records(rate, every):
    """Train 400 steps with the rate of each step."""
    torch.manual_seed(0)
    model, written = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), MemoryWriter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Exporter(model, backends=[written], verbose=0, synchronous=True, every=every) as exporter:
        exporter.watch()
        for step in range(1, 401):
            optimizer.param_groups[0]["lr"] = rate(step)
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    return list(written.records), exporter.issues


@pytest.mark.parametrize("every", [1, 7])
def test_a_rate_below_zero_is_recorded_as_it_is(every):
    """Schedules that run past their end go there, and steps then go uphill."""
    found, _ = records(lambda step: 0.01 - 0.0001 * step, every)
    read = {record.step: rate for record in found if (rate := record.value("learning_rate")) is not None}
    assert read[max(read)] == pytest.approx(0.01 - 0.0001 * max(read))
    assert min(read.values()) < 0


@pytest.mark.parametrize(("every", "from_step"), [(1, 251), (1, 233), (13, 260), (40, 251)])
def test_weights_rest_from_the_first_reading_that_knows_of_it(every, from_step):
    """A reading before which no checksum was taken is the first of a rest, whatever lies between it and the one before."""
    found, issues = records(lambda step: 0.01 if step < from_step else 0.0, every)
    resting = [issue for issue in issues if str(issue.issue_type) == "STAGNATION"]
    assert all(issue.step >= from_step for issue in resting)
    assert resting or every == 40
    for record in found:
        changed = record.get("parameter.changed")
        moved = changed is not None and changed.values[changed.present].any()
        assert not moved or record.step < from_step + 2 * every
