"""The treatments of what is drawn for a batch: which samples, in which order, and their targets."""

from __future__ import annotations

from functools import partial

from gradflow_export.experiments.mending import batches, labels
from gradflow_export.experiments.mending.treatment import EXACT, MENDING, Treatment
from gradflow_export.records.issues import IssueType

_T = IssueType

DRAWN: tuple[Treatment, ...] = (
    Treatment(
        "whole numbers that keep their differences",
        MENDING,
        labels.KeptDifferences,
        "targets that all become the same integer when they are converted",
        "# convert class indices to integers before any division: mask.long(), not (mask / 255).long()",
        (_T.BAD_TARGETS,),
        mistake=True,
        of_loop=True,
    ),
    Treatment(
        "other rows in each batch",
        MENDING,
        partial(batches.OtherRows, mixed=False),
        "batches that always hold the same samples",
        "# for x, y in loader, instead of next(iter(loader)) in each step; new indices for each batch",
        (_T.BAD_TARGETS,),
        causes=frozenset({"same batch"}),
        evident=lambda facts: facts.get("same", 0) >= batches.ALIKE,
        mistake=True,
        of_loop=True,
    ),
    Treatment(
        "shuffled rows",
        MENDING,
        partial(batches.OtherRows, mixed=True),
        "samples that are sorted by their targets",
        "loader = DataLoader(dataset, batch_size=32, shuffle=True)",
        (_T.BAD_TARGETS,),
        causes=frozenset({"sorted"}),
        mistake=True,
        of_loop=True,
    ),
    Treatment(
        "samples as they are drawn",
        EXACT,
        batches.AsDrawn,
        "samples that are put in another order, or made alike, after they are drawn",
        "# index inputs and targets with one permutation, and multiply neither by zeros",
        (_T.BAD_TARGETS, _T.NOT_LEARNING),
        lambda facts: facts.get("lost", 0) > 0,
        choice=True,
        chosen=lambda facts: facts.get("lost", 0) > 0,
        of_loop=True,
    ),
    Treatment(
        "the inputs of the batch before",
        EXACT,
        batches.EarlierInputs,
        "targets that come one batch late",
        "# take inputs and targets from the same item of one loader: for x, y in loader",
        (_T.BAD_TARGETS,),
        causes=frozenset({"unrelated"}),
        of_loop=True,
    ),
    Treatment(
        "targets computed from the inputs",
        MENDING,
        batches.ComputedTargets,
        "targets that do not belong to the inputs; model, loss and optimizer can learn",
        "# restore the targets where they are read or reordered: shuffle inputs and targets with one permutation",
        (_T.BAD_TARGETS,),
        of_loop=True,
        stands_in=True,
        causes=frozenset({"unrelated", "constant", "empty"}),
    ),
)
"""In the order in which they are tried."""
