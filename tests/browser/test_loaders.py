"""What TensorBoard's own pages show of a log of ours, by either of its loaders."""

import json
import urllib.request

import pytest
from tensorboard.compat.proto import event_pb2

from gradflow_export.storage.event_codec import FrameReader, frame


def declare_large(path):
    """Have the gains of a run declared as a square of 40 000, of which one number is there."""
    with path.open("rb") as stream:
        events = [event_pb2.Event.FromString(payload) for _, payload in FrameReader(stream)]
    for value in (value for event in events for value in event.summary.value if "/block.gain/" in value.tag):
        value.tensor.ClearField("tensor_content")
        value.tensor.float_val.append(1.0)
        for dim in value.tensor.tensor_shape.dim:
            dim.size = 40_000
    path.write_bytes(b"".join(frame(event.SerializeToString()) for event in events))


@pytest.fixture(scope="module", params=["true", "false"])
def ask(request, tmp_path_factory, logs, versions_in, tensorboard):
    """Return a function from an address of a TensorBoard over two small runs to its answer."""
    tmp_path = tmp_path_factory.mktemp("loaders")
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 21)))
    logs.write_run(tmp_path / "bomb", logs.plain_records(range(1, 21)))
    declare_large(*(tmp_path / "bomb").iterdir())
    with tensorboard(f"--logdir={tmp_path}", f"--load_fast={request.param}", holds=versions_in(tmp_path)) as address:

        def ask(route):
            with urllib.request.urlopen(f"{address}/data/plugin/{route}") as response:
                return json.load(response)

        yield ask


def test_each_headline_is_one_chart_in_its_group(ask):
    """Scalars are listed once, on the Scalars and on the Time Series page, with every value."""
    tag = "gradflow_loss/loss"
    assert list(ask("scalars/tags")["a"]) == [tag]
    assert ask("timeseries/tags")["scalars"]["runTagInfo"]["a"] == [tag]
    points = ask(f"scalars/scalars?run=a&tag={tag}")
    assert [step for _, step, _ in points] == list(range(1, 21))
    assert points[0][2] == 0.5


def test_a_tensor_that_says_it_is_large_is_not_opened(ask):
    """One number that is declared as 40 000 x 40 000 is counted as damaged; the rest of its run and others are shown."""
    assert ask("gradflow/moment?run=bomb&metric=block.gain")["metrics"]["block.gain"]["values"] == []
    found = {run["run"]: (run["damaged"], run["trend"][-1][0]) for run in ask("gradflow/overview")["runs"]}
    assert found == {"a": (0, 20), "bomb": (1, 20)}
