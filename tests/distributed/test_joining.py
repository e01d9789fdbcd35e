"""How parts become a whole, in one process: words, missing shards, replicas that never were equal, messages."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from gradflow_export.distributed import rank_transport as exchange
from gradflow_export.distributed.rank_reduce import Joiner
from gradflow_export.distributed.rank_shares import Field, Merger, Schemas, Share, decode, encode
from gradflow_export.distributed.rank_transport import KEPT, Exchange, children_of, height_of
from gradflow_export.hooks.shard_layout import Layout
from gradflow_export.records.catalog import CATALOG
from gradflow_export.records.catalog.metric import ACROSS
from gradflow_export.records.column import Column

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


def told(columns, rank=1, *, ranks=2, layouts=()):
    """Return what a rank reports, as it comes out of the message that it sends."""
    share = Joiner(rank, ranks).share(columns, layouts)
    return decode(encode(share, schema=True), None)


def joined(own, others, *, ranks=2, layouts=(), joiner=None):
    """Join rank 0's columns with what other ranks report; return its columns and what only several ranks can tell."""
    joiner = joiner or Joiner(0, ranks)
    whole = Merger().merge([joiner.share(own, layouts), *others])
    return own, joiner.finish(own, layouts, whole)


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
    other = told({metric: column(theirs, 9.0)}, layouts=[layout(rank=1, size=3)])
    own, _ = joined({metric: column(mine, 1.0)}, [other], layouts=[layout(rank=0)])
    assert own[metric].values == pytest.approx([whole, 1.0])


def test_nan_of_a_shard_is_nan_of_the_whole():
    """NaN in one shard makes the norm of the parameter NaN and the other parameters not."""
    metric = "parameter.gradient_norm"
    other = told({metric: column(np.nan, 1.0)}, layouts=[layout(rank=1)])
    own, _ = joined({metric: column(2.0, 1.0)}, [other], layouts=[layout(rank=0)])
    assert np.isnan(own[metric].values[0])
    assert own[metric].values[1] == 1.0


def test_a_missing_shard_leaves_the_metric_out():
    """A norm over a part of the shards is no norm: without the other rank it is missing, and means are over the rest."""
    metrics = {"parameter.gradient_norm": column(2.0, 1.0), "gradient.first_norm": run(2.0), "loss": run(0.5)}
    own, _ = joined(metrics, [], layouts=[layout(rank=0)])
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
    lies = [replace(layout(rank=0), batches=batches)]
    others = [told({metric: run(value)}, rank, ranks=3, layouts=lies) for rank, value in enumerate(values[1:], start=1)]
    own, _ = joined({metric: run(values[0])}, others, ranks=3, layouts=lies)
    assert own[metric].values == pytest.approx([whole])


def test_sites_are_matched_by_name():
    """Blocks that another rank saw in another order, or not at all, are joined where they are the same."""
    own = {"block.output_rms": column(3.0, 3.0, sites=("x", "y"))}
    joined(own, [told({"block.output_rms": column(5.0, 4.0, sites=("z", "x"))})])
    assert own["block.output_rms"].values == pytest.approx([np.sqrt(12.5), 3.0])


def test_replicas_that_never_were_equal_are_no_replicas():
    """A distance is told only of parameters that were once the same everywhere; what differs from the start is another model."""
    joiner = Joiner(0, 2)
    seen = []
    for mine, theirs in (((1.0, 1.0), (1.0, 2.0)), ((1.0, 1.0), (1.5, 2.0)), ((np.nan, 1.0), (np.nan, 1.0))):
        own = {GAP: column(*mine)}
        joined(own, [told({GAP: column(*theirs)})], joiner=joiner)
        seen.append(own[GAP].as_list())
    assert seen == [[0.0, None], [pytest.approx(1 / 3), None], [0.0, 0.0]]


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_replica_that_alone_is_nan_is_infinitely_far(broken):
    """Whichever rank it is, of replicas that were equal before."""
    joiner = Joiner(0, 3)
    for values in ([1.0, 1.0, 1.0], [np.nan if rank == broken else 1.0 for rank in range(3)]):
        own = {GAP: column(values[0], 2.0)}
        joined(own, [told({GAP: column(values[r], 2.0)}, r, ranks=3) for r in (1, 2)], ranks=3, joiner=joiner)
    assert own[GAP].as_list() == [np.inf, 0.0]


def test_the_forward_pass_outweighs_what_follows_from_it():
    """The rank that saw NaN in its input is named, and its place taken, though others see NaN in the loss and gradients."""
    own = {"loss": run(np.nan), "origin.loss": run(1.0)}
    others = [told({"loss": run(1.0)}, 1, ranks=3), told({"origin.input": run(1.0)}, 2, ranks=3)]
    own, extra = joined(own, others, ranks=3)
    assert "origin.loss" not in own
    assert own["origin.input"].values == [1.0]
    assert [(r.metric, r.values.tolist()) for r in extra] == [("origin.rank", [2.0])]


@pytest.mark.parametrize("weight", [1.0, 2.0**40])
def test_messages_come_back_bit_for_bit(weight):
    """Values, NaN, what is missing, names, weights of any size and the ranks survive the way through the store."""
    fields = [Field(0, "loss", ("",)), Field(1, "block.gain", ("a", "ß", ""))]
    values, weights = np.array([np.nan, 1e-300, 0.0, np.inf]), np.array([1.0, weight, 0.0, 3.0])
    place = {"origin.loss": (("",), [1.0], [True])}
    sent = Share(Schemas().of(fields), values, weights, 1 << 4000 | 1, {"evidence": (4000, place)})
    back = decode(encode(sent, schema=True), None)
    assert back.schema.digest == sent.schema.digest
    assert back.schema.fields == tuple(fields)
    assert (back.values.tobytes(), back.weights.tobytes()) == (values.tobytes(), weights.tobytes())
    assert (back.ranks, back.first) == (sent.ranks, sent.first)


@pytest.mark.parametrize("ranks", [1, 2, 7, 8, 9, 64, 136, 137, 1024, 4096])
def test_every_rank_reports_to_one_other(ranks):
    """From rank 0 every rank is reached once, by at most four steps, and no rank has more than 23 below it."""
    levels, reached = [[0]], [0]
    while levels[-1]:
        levels.append([child for rank in levels[-1] for child in children_of(rank, ranks)])
        reached += levels[-1]
    assert sorted(reached) == list(range(ranks))
    assert height_of(0, ranks) == len(levels) - 2
    assert max(len(children_of(rank, ranks)) for rank in range(ranks)) <= 23


METRICS = (
    "loss",
    "parameter.gradient_norm",
    "parameter.gradient_mean",
    "parameter.adam_rms",
    GAP,
    "logits.max",
    "upstream.mean_norm",
)


@pytest.mark.parametrize("ranks", [2, 9, 40])
@pytest.mark.parametrize("alike", [True, False])
def test_in_which_order_shares_are_merged_makes_no_difference(ranks, alike):
    """All at once, one after the other or by a tree: the columns of the job are the same to the last few bits.

    Also where ranks see blocks in another order and not all of them.
    """
    draw = np.random.default_rng(ranks)

    def columns(rank):
        own = {metric: column(*draw.normal(size=2)) for metric in METRICS}
        sites = ("x", "y", "z") if alike or rank % 2 == 0 else ("z", "w", "x")
        own["block.output_rms"] = column(*draw.random(3), sites=sites)
        if not alike and rank % 3 == 1:
            del own["loss"]
        return own

    def lies(rank):
        return [layout(rank=rank, parts=ranks, size=rank + 1)]

    mine = columns(0)
    others = [told(columns(rank), rank, ranks=ranks, layouts=lies(rank)) for rank in range(1, ranks)]
    copies = [[replace(o, values=o.values.copy(), weights=o.weights.copy()) for o in others] for _ in range(3)]
    merger = Merger()
    pairs = [merger.merge(copies[2][at : at + 4]) for at in range(0, ranks - 1, 4)]
    found = []
    for shares in (copies[0], copies[1][::-1], pairs):
        own = {metric: column(*each.values, sites=each.sites) for metric, each in mine.items()}
        joined(own, shares, ranks=ranks, layouts=lies(0))
        found.append(own)
    for other in found[1:]:
        assert list(other) == list(found[0])
        for metric, each in other.items():
            assert each.present.tolist() == found[0][metric].present.tolist()
            assert each.values == pytest.approx(found[0][metric].values, rel=1e-12)


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
    names = 1
    assert len(store) == KEPT + empty + names
    own = {"loss": run(3.0)}
    reader.join(KEPT, own, [])
    assert own["loss"].values == [2.0]
    assert len(store) == KEPT + empty + names - 1


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


def test_a_rank_that_ended_before_it_was_read_is_heard():
    """A run of a few steps is over on one rank before the worker of another has looked at the first of them."""
    store = Shelf()
    sender, reader = (Exchange(store, rank, 2) for rank in (1, 0))
    sender.open()
    reader.open()
    for step in (1, 2):
        sender.join(step, {"loss": run(1.0)}, [])
    sender.close()
    for step in (1, 2):
        own = {"loss": run(3.0)}
        reader.join(step, own, [])
        assert own["loss"].values == [2.0]


def test_a_rank_that_begins_anew_while_it_is_waited_for_is_heard():
    """What was left of an exporter that nobody read leads a later one to the present one, once that is open."""
    store = Shelf()
    early = Exchange(store, 1, 2)
    early.open()
    early.join(7, {"loss": run(9.0)}, [])
    early.close()
    reader, sender = Exchange(store, 0, 2), Exchange(store, 1, 2)
    reader.open()
    own = {"loss": run(3.0)}
    timer = threading.Timer(0.2, lambda: (sender.open(), sender.join(1, {"loss": run(1.0)}, [])))
    timer.start()
    reader.join(1, own, [])
    timer.join()
    assert own["loss"].values == [2.0]


@pytest.fixture
def ends(monkeypatch):
    """Ends of 40 ranks over one store, whose workers wait for nobody for long."""
    monkeypatch.setattr(exchange, "PATIENCE_SECONDS", 0.01)
    store = Shelf()
    made = {rank: Exchange(store, rank, 40) for rank in range(40)}
    for end in made.values():
        end.open()
    return made


def heard(ends, step, *, dead=()):
    """Let every rank that lives report; return how many rank 0 heard of, itself among them."""
    own = {}
    for rank in sorted(ends, key=lambda rank: height_of(rank, 40)):
        if rank not in dead:
            own = {"gradient.with_grad": run(1.0), "loss": run(float(rank))}
            ends[rank].join(step, own, [])
    return own["loss"].values[0]


@pytest.mark.parametrize("dead", [(5,), (8,), (8, 9, 10, 11, 12, 13, 14, 15), (8, 16), (39,), (32, 1)])
def test_ranks_that_die_are_missed_and_those_behind_them_for_one_step_only(ends, dead, caplog):
    """Whoever reported to one that died is read by the next rank above; one that comes back counts again."""

    def mean(ranks):
        ranks = list(ranks)
        return pytest.approx(sum(ranks) / len(ranks))

    living = [rank for rank in range(40) if rank not in dead]
    assert heard(ends, 1) == mean(range(40))
    heard(ends, 2, dead=dead)
    assert heard(ends, 3, dead=dead) == mean(living)
    assert heard(ends, 4, dead=dead) == mean(living)
    assert {r.args[0] for r in caplog.records} == set(dead)
    for step in (5, 6):
        back = heard(ends, step)
    assert back == mean(range(40))


def test_names_travel_once(ends):
    """Of a thousand layers the second message of a rank holds numbers alone: at most 16 bytes for each value."""
    sites = tuple(f"a.layer.with.a.rather.long.name.{place}" for place in range(1000))
    for step in (1, 2):
        ends[39].join(step, {"block.output_rms": column(*np.ones(1000), sites=sites)}, [])
    store = ends[39]._store
    sizes = [len(value) for key, value in store.items() if key.startswith("39/")]
    assert max(sizes) < 16 * 1000


def test_a_broken_store_is_told_once_and_recording_goes_on(caplog):
    """Any error of the store sets the exchange aside with one warning; rank 0 keeps its own values."""
    reader = Exchange(object(), 0, 2)
    for step in (1, 2):
        own = {"loss": run(3.0)}
        reader.join(step, own, [])
        assert own["loss"].values == [3.0]
    assert len([r for r in caplog.records if "store" in r.getMessage()]) == 1
