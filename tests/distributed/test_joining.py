"""How parts become a whole, in one process: words, missing shards, replicas that never were equal, messages."""

from dataclasses import replace

import numpy as np
import pytest

from gradflow_export.across import Joiner, Part, part_of
from gradflow_export.assemble import Column
from gradflow_export.catalog import CATALOG
from gradflow_export.catalog.metric import ACROSS
from gradflow_export.exchange import KEPT, Exchange, decode, encode
from gradflow_export.taps.shards import Layout

SITES = ("a", "b")
GAP = "parameter.replica_gap"


def column(*values, sites=SITES):
    made = Column(sites)
    made.values = np.array([0.0 if v is None else v for v in values], dtype=np.float64)
    made.present = np.array([v is not None for v in values])
    return made


def run(value):
    return column(value, sites=("",))


def layout(*, rank, parts=2, size=1):
    """Parameter ``a`` is split, ``b`` is a replica that rank 0 speaks for."""
    return Layout(
        SITES, np.arange(2), np.array([True, rank == 0]), np.array([parts, 1], dtype=np.int64), np.array([size, 4])
    )


def joined(own, others, *, ranks=2, layouts=(), sizes=None):
    joiner = Joiner(ranks)
    extra = joiner.join(Part(own, sizes or {}), layouts, dict(enumerate(others, start=1)))
    return own, extra


def test_every_metric_says_how_it_aggregates():
    """Each word is one of the list, and the lists of words and of metrics use each other up."""
    assert {spec.across for spec in CATALOG.values()} == ACROSS


@pytest.mark.parametrize(
    ("metric", "mine", "theirs", "whole"),
    [
        ("parameter.gradient_norm", 3.0, 4.0, 5.0),
        ("parameter.gradient_norm", 3e200, 4e200, 5e200),
        ("parameter.gradient_norm", 3.0, np.inf, np.inf),
        ("parameter.gradient_l1", 3.0, 4.0, 7.0),
        ("parameter.gradient_linf", 3.0, 4.0, 4.0),
        ("parameter.gradient_mean", 3.0, 7.0, 6.0),
        ("parameter.adam_rms", 1.0, 3.0, np.sqrt((1 + 3 * 9) / 4)),
        ("parameter.nonfinite", 0.0, 2.0, 2.0),
    ],
)
def test_shards_are_joined_and_replicas_left(metric, mine, theirs, whole):
    """Of two shards with one and three entries comes the value of the whole parameter; a replica stays as it is."""
    told = part_of({metric: column(theirs, 9.0)}, [layout(rank=1, size=3)])
    assert told.sizes == {"a": 3}
    own, _ = joined({metric: column(mine, 1.0)}, [told], layouts=[layout(rank=0)], sizes={"a": 1, "b": 4})
    assert own[metric].values == pytest.approx([whole, 1.0])


def test_nan_of_a_shard_is_nan_of_the_whole():
    """NaN in one shard makes the norm of the parameter NaN and the other parameters not."""
    metric = "parameter.gradient_norm"
    told = part_of({metric: column(np.nan, 1.0)}, [layout(rank=1)])
    own, _ = joined({metric: column(2.0, 1.0)}, [told], layouts=[layout(rank=0)], sizes={"a": 1, "b": 4})
    assert np.isnan(own[metric].values[0])
    assert own[metric].values[1] == 1.0


def test_a_missing_shard_leaves_the_metric_out():
    """A norm over a part of the shards is no norm: without the other rank it is missing, and means are over the rest."""
    metrics = {"parameter.gradient_norm": column(2.0, 1.0), "gradient.first_norm": run(2.0), "loss": run(0.5)}
    own, _ = joined(metrics, [], layouts=[layout(rank=0)], sizes={"a": 1, "b": 4})
    assert list(own) == ["loss"]
    assert own["loss"].values == [0.5]


@pytest.mark.parametrize(
    ("metric", "values", "batches", "whole"),
    [
        ("loss", (1.0, 2.0, 6.0), 3, 3.0),
        ("block.output_rms", (1.0, 5.0, 7.0), 3, 5.0),
        ("block.gradient_norm", (1.0, 5.0, 7.0), 3, 5.0 / np.sqrt(3)),
        ("block.gradient_norm", (5.0, 5.0, 5.0), 1, 5.0),
        ("upstream.mean_norm", (1.0, 2.0, 6.0), 3, 1.0),
        ("logits.max", (1.0, -2.0, 6.0), 3, 6.0),
        ("logits.min", (1.0, -2.0, 6.0), 3, -2.0),
        ("activation.dead_share", (0.5, 0.25, 0.0), 3, 0.0),
        ("activation.dead_share", (0.5, 0.25, 0.0), 1, 0.25),
        ("learning_rate", (0.1, 0.2, 0.3), 3, 0.1),
    ],
)
def test_batches_are_joined(metric, values, batches, whole):
    """Each word does what docs/when-it-fires.md says, for ranks with batches of their own and for ranks that share one."""
    parts = [Part({metric: run(value)}) for value in values[1:]]
    own, _ = joined({metric: run(values[0])}, parts, ranks=3, layouts=[replace(layout(rank=0), batches=batches)])
    assert own[metric].values == pytest.approx([whole])


def test_sites_are_matched_by_name():
    """Blocks that another rank saw in another order, or not at all, are joined where they are the same."""
    own = {"block.output_rms": column(3.0, 3.0, sites=("x", "y"))}
    joined(own, [Part({"block.output_rms": column(5.0, 4.0, sites=("z", "x"))})])
    assert own["block.output_rms"].values == pytest.approx([np.sqrt(12.5), 3.0])


def test_replicas_that_never_were_equal_are_no_replicas():
    """A distance is told only of parameters that were once the same everywhere; what differs from the start is another model."""
    joiner = Joiner(2)
    told = []
    for mine, theirs in (((1.0, 1.0), (1.0, 2.0)), ((1.0, 1.0), (1.5, 2.0)), ((np.nan, 1.0), (np.nan, 1.0))):
        own = {GAP: column(*mine)}
        joiner.join(Part(own), [], {1: Part({GAP: column(*theirs)})})
        told.append(own[GAP].as_list())
    assert told == [[0.0, None], [pytest.approx(1 / 3), None], [0.0, 0.0]]


def test_the_forward_pass_outweighs_what_follows_from_it():
    """The rank that saw NaN in its input is named, and its place taken, though others see NaN in the loss and gradients."""
    own = {"loss": run(np.nan), "origin.loss": run(1.0)}
    own, extra = joined(own, [Part({"loss": run(1.0)}), Part({"origin.input": run(1.0)})], ranks=3)
    assert "origin.loss" not in own
    assert own["origin.input"].values == [1.0]
    assert [(r.metric, r.values.tolist()) for r in extra] == [("origin.rank", [2.0])]


def test_messages_come_back_bit_for_bit():
    """Values, NaN, what is missing, names and sizes survive the way through the store."""
    columns = {"loss": run(np.nan), "block.gain": column(1e-300, None, np.inf, sites=("a", "ß", ""))}
    back = decode(encode(Part(columns, {"a": 3})))
    assert back.sizes == {"a": 3}
    for metric, sent in columns.items():
        assert back.columns[metric].sites == sent.sites
        assert back.columns[metric].values.tobytes() == sent.values.tobytes()
        assert back.columns[metric].present.tobytes() == sent.present.tobytes()


class Shelf(dict):
    """A key-value store of one process, with the methods of torch's."""

    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)

    def add(self, key, amount):
        self[key] = self.get(key, 0) + amount
        return self[key]

    def delete_key(self, key):
        self.pop(key, None)


def test_the_store_is_kept_small():
    """A rank whose messages nobody reads leaves a bounded number of them, and what is read is deleted."""
    store = Shelf()
    sender, reader = (Exchange(store, rank, 2) for rank in (1, 0))
    sender.open()
    reader.open()
    empty = len(store)
    for step in range(1, KEPT + 20):
        sender.join(step, {"loss": run(1.0)}, [])
    assert len(store) == KEPT + empty
    own = {"loss": run(3.0)}
    reader.join(KEPT, own, [])
    assert own["loss"].values == [2.0]
    assert len(store) == KEPT + empty - 1


def test_ranks_pair_the_exporters_that_are_open():
    """An exporter that only rank 0 had before, and one whose messages nobody read, do not mix with the present ones."""
    store = Shelf()
    solo = Exchange(store, 0, 2)
    solo.open()
    solo.close()
    for value in (1.0, 5.0):
        sender = Exchange(store, 1, 2)
        sender.open()
        sender.join(1, {"loss": run(value)}, [])
        if value == 1.0:
            sender.close()
    pair = [Exchange(store, rank, 2) for rank in (0, 0, 1)]
    for end in pair:
        end.open()
    pair[2].join(1, {"loss": run(7.0)}, [])
    first, second = {"loss": run(3.0)}, {"loss": run(3.0)}
    pair[0].join(1, first, [])
    pair[1].join(1, second, [])
    assert (first["loss"].values, second["loss"].values) == ([4.0], [5.0])


def test_a_broken_store_is_told_once_and_recording_goes_on(caplog):
    """Any error of the store sets the exchange aside with one warning; rank 0 keeps its own values."""
    reader = Exchange(object(), 0, 2)
    for step in (1, 2):
        own = {"loss": run(3.0)}
        reader.join(step, own, [])
        assert own["loss"].values == [3.0]
    assert len([r for r in caplog.records if "store" in r.getMessage()]) == 1
