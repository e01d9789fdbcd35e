"""Several processes make one record, that of the whole model on all batches, and none waits for another."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from gradflow_export.engine.assemble import histogram_of
from gradflow_export.records.lost import DISABLED
from gradflow_export.records.step_record import IssueType

TOLERANCE = 1e-5
"""Relative; training is in float64, records are float32, and gloo adds in another order than one process does."""

SHARDED = ("fsdp", "fsdp clipped", "tensor parallel", "two-dimensional", "mixed")
OWN_BATCH = {"block.effective_rank", "block.rank_rows", "block.stable_rank", "block.output_spread", "logits.std"}
"""Taken within the batch of a rank: they need all rows at once."""

WANTED = {
    "loss", "gradient.total_norm", "gradient.max_norm", "gradient.nonfinite", "gradient.with_grad", "block.gradient_norm",
    "block.gain", "gain.depth", "block.output_rms", "block.output_max", "parameter.gradient_norm",
    "parameter.gradient_l1", "parameter.gradient_linf", "parameter.gradient_mean", "parameter.zero_share",
    "parameter.nonfinite", "parameter.weight_norm", "parameter.update_norm", "parameter.update_ratio", "update.ratio",
    "parameter.momentum_norm", "parameter.adam_rms", "parameter.numel", "upstream.norm", "alignment.accuracy",
    "activation.dead_share", "activation.zero_share", "gradient.norm_before_clip", "gradient.clip_scale",
}  # fmt: skip


@pytest.fixture(scope="module")
def job():
    """The program that the processes run, here as a module."""
    path = Path(__file__).with_name("job.py")
    spec = importlib.util.spec_from_file_location("gradflow_distributed_job", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def alone(job):
    """Return a function that trains in this process on all batches."""
    known = {}

    def records(**how):
        key = tuple(how)
        if key not in known:
            known[key] = job.train(job.plain, **how)["records"]
        return known[key]

    return records


def differences(one, other, but):
    """Return the metrics, sites and values that two records do not share."""
    found = []
    for metric in sorted({r.metric for r in one.readings} | {r.metric for r in other.readings}):
        if metric.startswith(("runtime.", "overhead")) or metric in but:
            continue
        a, b = one.get(metric), other.get(metric)
        if a is None or b is None or a.sites != b.sites:
            found.append((one.step, metric, a and a.sites, b and b.sites))
            continue
        for site, x in a.as_dict().items():
            y = b.as_dict()[site]
            same = x == y or (x is not None and y is not None and math.isclose(x, y, rel_tol=TOLERANCE, abs_tol=1e-30))
            if not same and not (x is not None and y is not None and math.isnan(x) and math.isnan(y)):
                found.append((one.step, metric, site, x, y))
    return found


@pytest.mark.parametrize("name", ["ddp", "ddp clipped", *SHARDED])
def test_record_is_that_of_one_process_on_all_batches(name, together, alone):
    """Norms, gains, updates, weights, counts, loss and predictions agree with the unsharded model on the whole batch."""
    but = {"parameter.replica_gap"} | (set() if name == "tensor parallel" else OWN_BATCH)
    if name in SHARDED:
        but |= {"gradient.cosine"}  # of rank 0's shards
    if name == "two-dimensional":
        but |= {"activation.dead_share"}  # a mean over ranks, because two share a batch and have units of their own
    if name == "mixed":  # the loop averages by hand after backward, which is no clipping, and looks like it
        but |= {"gradient.norm_before_clip", "gradient.first_norm", "gradient.clip_scale", "gradient.clipped_share"}
    whole = alone(clip=True) if "clipped" in name else alone()
    joined = together[name][0]["records"]
    assert [r.step for r in joined] == [r.step for r in whole] == list(range(1, 7))
    assert {r.metric for record in joined for r in record.readings} >= WANTED
    assert [d for one, other in zip(whole, joined, strict=True) for d in differences(one, other, but)] == []


ENDS = {
    "every": ({"every": 4}, [1, 4, 6]),
    "players": ({"players": 2}, [1, 2, 3, 4, 5, 6]),
    "one step": ({"steps": 1}, [1]),
}
"""Settings of a run, and the steps that have a record."""


@pytest.mark.parametrize("name", ["ddp every", "fsdp every", "ddp players", "fsdp players", "ddp one step"])
def test_the_last_record_is_whole_and_there_once(name, together, alone):
    """Of a step that was passed by, or that is open until the end because another optimizer might step: as of one process."""
    wrap, end = name.split(" ", 1)
    settings, steps = ENDS[end]
    whole, joined = alone(**settings), together[name][0]["records"]
    assert [r.step for r in joined] == [r.step for r in whole] == steps
    but = {"parameter.replica_gap"} | OWN_BATCH | ({"gradient.cosine"} if wrap == "fsdp" else set())
    last, known = joined[-1], whole[-1]
    assert len(last.get("parameter.weight_norm").sites) == len(known.get("parameter.weight_norm").sites)
    assert last.get("parameter.weight_norm").present.all()
    assert (last.value("loss") is None) is (end == "every")
    assert differences(known, last, but) == []
    assert together[name][1]["records"] == []
    assert together[name][0]["lines"] == []
    assert together[name][0]["aside"] == together[name][1]["aside"] == []


def test_what_an_error_ends_on_another_rank_stands_in_the_verdict(together):
    """Rank 0 notes it once, at its step, with the rank; its own parts go on."""
    out = together["ddp failing"]
    notes = [(note.text, record.step) for record in out[0]["records"] for note in record.notes if note.kind == DISABLED]
    assert notes == [("attention on rank 1", 3)]
    assert "disabled after an error: attention on rank 1 (step 3)" in out[0]["report"]
    assert (out[0]["aside"], out[1]["aside"]) == ([], ["attention"])


def same_histograms(one, other):
    """Assert that two lists of histograms tell of the same tensors and agree, in ends and in every bin."""
    assert [(h.metric, h.site) for h in one] == [(h.metric, h.site) for h in other]
    assert {"parameter.gradient", "parameter.weight"} <= {h.metric for h in one}
    for a, b in zip(one, other, strict=True):
        assert a.edges == pytest.approx(b.edges, rel=TOLERANCE, abs=TOLERANCE * abs(b.edges).max()), a.site
        assert a.counts.tolist() == b.counts.tolist(), a.site


def test_histograms_are_those_of_one_process_on_all_batches(together, alone):
    """Under DistributedDataParallel each bin holds as many entries of gradients and weights as without it."""
    for record, whole in zip(together["ddp"][0]["records"], alone(), strict=True):
        same_histograms(record.histograms, whole.histograms)


def test_histograms_of_shards_are_those_of_the_first_rows(together, job):
    """Under fully_shard they hold what lies on rank 0: the first half of the rows of the unsharded tensors."""
    halves = []

    def keep(step, model, _inputs, _optimizer):
        for name, p in model.named_parameters() if step else ():  # gradients are those of the step before
            halves[-1][f"parameter.gradient {name}"] = p.grad.chunk(2)[0].reshape(-1).numpy().copy()
        weights = {
            f"parameter.weight {n}": p.detach().chunk(2)[0].reshape(-1).numpy().copy()
            for n, p in model.named_parameters()
        }
        halves.append(weights)

    job.train(job.plain, each=keep)
    for record, parts in list(zip(together["fsdp"][0]["records"], halves, strict=True))[:-1]:
        same_histograms(
            record.histograms,
            [histogram_of(h.metric, h.site, parts[f"{h.metric} {h.site}"]) for h in record.histograms],
        )


@pytest.mark.parametrize("name", ["ddp", *SHARDED])
def test_only_rank_0_writes_and_nothing_is_wrong(name, together):
    """Rank 1 has no records and no issues and says who writes; nothing was set aside, and no issue is found."""
    first, second = together[name][0], together[name][1]
    assert second["records"] == []
    assert second["issues"] == first["issues"] == ()
    assert first["aside"] == second["aside"] == []
    assert first["lines"] == []
    assert len(second["lines"]) == 1
    assert f"rank 1 of {4 if name == 'two-dimensional' else 2}" in second["lines"][0]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tensor parallel"])
@pytest.mark.parametrize("rank", [0, 1])
def test_watching_changes_no_bit_on_any_rank(name, rank, together):
    """Losses and weights are the same on each rank, watched or not."""
    watched, plain = together[name][rank]["bits"], together[f"{name} unwatched"][rank]["bits"]
    assert len(plain) > 100
    assert watched == plain


@pytest.mark.parametrize("name", ["ddp nan", "gathering nan", "fsdp nan"])
def test_nan_of_rank_1_is_named(name, together, job):
    """A NaN in rank 1's input is found there, although the gradients of both ranks are NaN, and no rank hangs over it."""

    def poison(step, _model, inputs, _optimizer):
        if step == 3:
            inputs[job.BATCH // 2 + 2, 1] = float("nan")

    issues = [issue for issue in together[name][0]["issues"] if issue.issue_type is IssueType.NUMERICAL]
    assert [issue.step for issue in issues] == [4]
    assert "rank 1" in issues[0].cause
    assert "input of the model" in issues[0].cause
    record = together[name][0]["records"][3]
    whole = job.train(job.plain, each=poison)["records"][3]
    assert record.value("origin.rank") == 1
    assert record.value("gradient.nonfinite") == whole.value("gradient.nonfinite") > 0
    assert record.get("parameter.nonfinite").as_dict() == whole.get("parameter.nonfinite").as_dict()


def test_replicas_that_drift_apart_are_told(together):
    """Another learning rate on rank 1 from step 4 on makes one DESYNC issue; equal replicas have no distance at all."""
    found = [issue for issue in together["drift"][0]["issues"] if issue.issue_type is IssueType.DESYNC]
    assert [issue.step for issue in found] == [5]
    assert len(found[0].layers) == 20
    gaps = [record.get("parameter.replica_gap").values.max() for record in together["drift"][0]["records"]]
    assert max(gaps[:4]) == 0.0
    assert min(gaps[4:]) > 0.0
    assert all(r.get("parameter.replica_gap").values.max() == 0.0 for r in together["ddp"][0]["records"])


def test_rank_1_that_dies_holds_nobody_up(leaving):
    """Rank 0 trains on, says once that rank 1 is silent, and has every record when it closes, within its ten seconds."""
    out = leaving("rank 1 stops")[0]
    assert [record.step for record in out["records"]] == list(range(1, 21))
    assert all(record.value("gradient.total_norm") > 0 for record in out["records"])
    assert [line for line in out["lines"] if "rank 1" in line and "step 5" in line] == out["lines"]
    assert out["aside"] == []


def test_rank_0_that_dies_holds_nobody_up(leaving):
    """Rank 1 trains on and closes although the job's store died with rank 0; it says so once."""
    out = leaving("rank 0 stops")[1]
    assert out["records"] == []
    assert len([line for line in out["lines"] if "store" in line]) == 1
    assert out["aside"] == []


def test_without_a_process_group_nothing_is_joined(alone):
    """One process alone has no distance between replicas, and no rank of origin."""
    metrics = {reading.metric for record in alone() for reading in record.readings}
    assert not metrics & {"parameter.replica_gap", "origin.rank"}
    assert not torch.distributed.is_initialized()
