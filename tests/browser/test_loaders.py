"""What TensorBoard's own pages show of a log of ours, by either of its loaders."""

import json
import urllib.request

import pytest


@pytest.fixture(params=["true", "false"])
def ask(request, tmp_path, logs, versions_in, tensorboard):
    """Return a function from an address of a TensorBoard over one small run to its answer."""
    logs.write_run(tmp_path / "a", logs.plain_records(range(1, 21)))
    with tensorboard(f"--logdir={tmp_path}", f"--load_fast={request.param}", holds=versions_in(tmp_path)) as address:

        def ask(route):
            with urllib.request.urlopen(f"{address}/data/plugin/{route}") as response:
                return json.load(response)

        yield ask


def test_each_headline_is_one_chart_in_its_group(ask):
    """Scalars are listed once, on the Scalars and on the Time Series page, with every value."""
    tag = "gradflow_loss/loss"
    assert list(ask("scalars/tags")["a"]) == [tag]
    assert ask("timeseries/tags")["scalars"]["runTagInfo"] == {"a": [tag]}
    points = ask(f"scalars/scalars?run=a&tag={tag}")
    assert [step for _, step, _ in points] == list(range(1, 21))
    assert points[0][2] == 0.5
    assert [run["run"] for run in ask("gradflow/overview")["runs"]] == ["a"]
