"""Rows of several sites, the tree that they are folded by, what is summed up from the loss, and the steps around one."""

import json
import math
import random

import numpy as np
import pytest

from gradflow_export.records.step_record import Reading, StepRecord
from gradflow_export.storage.event_chunks import MISSING_BITS
from tensorboard_plugin_gradflow.derived import gain_from_loss
from tensorboard_plugin_gradflow.rows import Rows
from tensorboard_plugin_gradflow.tree import nodes_of


@pytest.mark.parametrize("sites", [10, 333, 10_000])
def test_one_deviating_reading_is_seen_in_its_row_at_every_zoom(tmp_path, logs, open_client, decode, sites):
    """However many sites are joined and wherever the window begins, the row of the site has its value."""
    draw = random.Random(sites)
    names = tuple(f"layers.{number}" for number in range(sites))
    at, step = draw.randrange(sites), 3
    values = np.ones((5, sites), np.float32)
    values[step - 1, at] = 8.0
    logs.write_run(
        tmp_path / "a",
        [StepRecord(n, logs.EPOCH + n, (Reading.of("block.gain", names, row),)) for n, row in enumerate(values, 1)],
    )
    client = open_client(tmp_path)
    for _ in range(8):
        start, end = sorted((draw.randrange(at + 1), draw.randrange(at + 1, sites + 1)))
        rows, columns = draw.randrange(1, 700), draw.randrange(1, 6)
        found = decode_rows(client, decode, f"&rows={rows}&from={start}&until={end}&columns={columns}")
        assert len(found.rows) <= rows
        assert found.rows[0][0] == start
        assert sum(count for _, count in found.rows) == end - start
        assert found.most_sites == max(count for _, count in found.rows)
        loud = np.argwhere(found.values["extreme"] == 8.0)
        assert len(loud) == 1
        first, count = found.rows[loud[0][0]]
        assert first <= at < first + count
        assert found.first[loud[0][1]] <= step <= found.last[loud[0][1]]


def decode_rows(client, decode, more):
    """Return a series of rows, whose blocks have one line for each row."""
    body = client.get(f"/series?run=a&metric=block.gain{more}").data
    length = int.from_bytes(body[4:8], "little")
    # The decoder of the tests takes a row for a site.
    header = json.loads(body[8 : 8 + length])
    names = [str(row) for row in range(len(header["rows"]))]
    changed = json.dumps({**header, "sites": names}).encode()
    changed += b" " * (-len(changed) % 8)
    found = decode(b"GFS1" + len(changed).to_bytes(4, "little") + changed + body[8 + length :])
    found.rows, found.most_sites, found.names = header["rows"], header["most_sites"], header["sites"]
    return found


def test_rows_are_reduced_as_columns_are(tmp_path, logs, open_client, decode):
    """Against a slow twin: NaN wins, missing does not count, the mean is that of all readings."""
    states = [1.0, -3.0, 2.0, None, None, math.inf, 0.5, math.nan]
    names = tuple(f"s{number}" for number in range(len(states)))
    record = StepRecord(1, logs.EPOCH, (Reading.of("parameter.mean", names, states),))
    logs.write_run(tmp_path / "a", [record])
    client = open_client(tmp_path)
    body = client.get("/series?run=a&metric=parameter.mean&cuts=0,3,5,7&reduce=extreme,min,max,mean").data
    length = int.from_bytes(body[4:8], "little")
    cells = np.frombuffer(body, "<f4", offset=8 + length + 4 * 8).reshape(4, 4)
    assert cells[:, 0].tolist() == [-3.0, -3.0, 2.0, 0.0]
    assert set(cells.view(np.uint32)[:, 1].tolist()) == {MISSING_BITS}
    assert cells[:, 2].tolist() == [math.inf, 0.5, math.inf, math.inf]
    assert np.isnan(cells[:, 3]).all()


def test_rows_that_are_even_hold_a_power_of_two():
    """A map that becomes a little taller does not shift its rows."""
    for sites in (1, 7, 64, 1000, 9999):
        for number in (1, 3, 100, 4096):
            edges = Rows(number).edges(sites)
            assert len(edges) - 1 <= number
            assert edges[0] == 0
            assert edges[-1] == sites
            wide = set(np.diff(edges)[:-1].tolist())
            assert len(wide) <= 1
            assert all(width & (width - 1) == 0 for width in wide)


def test_the_gain_from_the_loss_is_the_sum_down_to_a_block():
    """In nats; where the chain is cut it begins anew, and what did not arrive stays missing."""
    gains = np.array([[0.5, -1.0, 0.0, 2.0, -3.0]], np.float32)
    gains.view(np.uint32)[0, 2] = MISSING_BITS
    found = gain_from_loss(gains)
    assert found[0, [0, 1, 3, 4]].tolist() == [-0.5, -1.0, -1.0, -3.0]
    assert found.view(np.uint32)[0, 2] == MISSING_BITS


def test_the_gain_from_the_loss_is_a_metric_like_any_other(tmp_path, logs, open_client, decode):
    """The list of metrics, series, moments and the tree know it, and it is stored nowhere."""
    sites = ("h.0", "h.1", "h.2")
    records = logs.plain_records(range(1, 9), sites=sites, metric="block.log_gain", value=lambda step, site: site - 1.0)
    logs.write_run(tmp_path / "a", records)
    client = open_client(tmp_path)
    held = {item["name"]: item for item in client.get("/meta?run=a").json["metrics"]}
    assert held["block.gain_from_loss"]["unit"] == "nats"
    assert held["block.gain_from_loss"]["sites"] == 3
    found = decode(client.get("/series?run=a&metric=block.gain_from_loss").data)
    assert found.values["extreme"][:, 0].tolist() == [0.0, 1.0, 1.0]
    moment = client.get("/moment?run=a&metric=block.gain_from_loss").json["metrics"]["block.gain_from_loss"]
    assert moment["values"] == [0.0, 1.0, 1.0]
    assert client.get("/tree?run=a&metric=block.gain_from_loss").json["sites"] == 3


def test_the_tree_folds_sites_by_the_parts_of_their_names():
    """A block and its number are one part; prefixes that lead on alone are joined; children lie in their parent."""
    sites = ["embed.weight", *(f"net.h.{n}.{p}" for n in (0, 1) for p in ("attn.q", "attn.k", "mlp.w")), "head.bias"]
    nodes = nodes_of(sites)
    shown = [(node.level, node.label, node.first, node.count) for node in nodes]
    assert shown == [
        (0, "embed.weight", 0, 1),
        (0, "net", 1, 6),
        (1, "h.0", 1, 3),
        (2, "attn", 1, 2),
        (3, "q", 1, 1),
        (3, "k", 2, 1),
        (2, "mlp.w", 3, 1),
        (1, "h.1", 4, 3),
        (2, "attn", 4, 2),
        (3, "q", 4, 1),
        (3, "k", 5, 1),
        (2, "mlp.w", 6, 1),
        (0, "head.bias", 7, 1),
    ]
    for node in nodes:
        assert all(site.startswith(node.name) for site in sites[node.first : node.first + node.count])
        if node.parent is not None:
            above = nodes[node.parent]
            assert above.first <= node.first
            assert node.first + node.count <= above.first + above.count


@pytest.mark.parametrize("seed", range(6))
def test_every_site_is_a_leaf_of_the_tree_once(seed):
    """Whatever names there are, alike, one within the other or empty parts."""
    draw = random.Random(seed)
    sites = [".".join(draw.choice(("a", "b", "0", "1", "")) for _ in range(draw.randrange(1, 5))) for _ in range(60)]
    nodes = nodes_of(sites)
    parents = {node.parent for node in nodes}
    leaves = [node for number, node in enumerate(nodes) if number not in parents]
    assert sorted(place for leaf in leaves for place in range(leaf.first, leaf.first + leaf.count)) == list(range(60))


def test_the_steps_around_an_issue_come_one_by_one(tmp_path, logs, open_client, decode):
    """Readings are counted, not steps; the sites where the issue began are named."""
    records = logs.plain_records(range(5, 1000, 5), sites=("a.w", "b.w"))
    found = logs.issue(layer="a", step=500)
    records[99] = StepRecord(500, logs.EPOCH + 500, records[99].readings, issues=(found,))
    logs.write_run(tmp_path / "a", records)
    client = open_client(tmp_path)
    around = decode(client.get("/around?run=a&metric=block.gain&step=500").data)
    assert around.first == list(range(400, 605, 5))
    assert around.most == 1
    assert (around.at, around.origin) == (20, ["a.w"])
    between = decode(client.get("/around?run=a&metric=block.gain&step=502&count=2").data)
    assert between.first == [495, 500, 505, 510]
    assert between.at is None
    ends = decode(client.get("/around?run=a&metric=block.gain&step=5&count=3").data)
    assert ends.first == [5, 10, 15, 20]
    for bad in ("", "&step=x", "&step=3&count=0", "&step=3&count=1000"):
        assert client.get(f"/around?run=a&metric=block.gain{bad}").status_code == 400


def test_a_gradient_of_exactly_zero_is_told_as_nothing(tmp_path, logs, open_client, decode):
    """Its logarithm was taken of 1e-30: neither series nor moment show such a number, nor a sum with it."""
    logs.write_run(
        tmp_path / "a",
        [
            StepRecord(step, logs.EPOCH + step, (Reading.of("block.log_gain", ("a", "b", "c"), [0.0, -64.7, -0.5]),))
            for step in (1, 2)
        ],
    )
    client = open_client(tmp_path)
    moment = client.get("/moment?run=a&metric=block.log_gain&metric=block.gain_from_loss").json["metrics"]
    assert moment["block.log_gain"]["values"] == [0.0, None, -0.5]
    assert moment["block.gain_from_loss"]["values"] == [0.0, None, -0.5]
    for metric in ("block.log_gain", "block.gain_from_loss"):
        values = decode(client.get(f"/series?run=a&metric={metric}").data).values["extreme"]
        assert (values[:, 0].view(np.uint32) == MISSING_BITS).tolist() == [False, True, False]
