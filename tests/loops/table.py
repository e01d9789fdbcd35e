"""The table of docs/loops.md: which readings are right in which training loop. ``python tests/loops/table.py`` writes it.

Each cell is a tolerance, relative to the plain eager loop with the same batches, or the reason why nothing is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "loops.md"
BEGIN, END = "<!-- begin: table -->", "<!-- end: table -->"

FAMILIES = {
    "gradients": "parameter.gradient_norm",
    "updates": "parameter.update_norm",
    "block gains": "block.gain",
    "activations": "activation.dead_share",
    "loss": "loss",
    "moments": "parameter.momentum_norm",
    "non-finite": "gradient.nonfinite",
    "histograms": "parameter.gradient",
}
"""One metric that stands for each family; histograms are compared bin by bin."""

EXACT, ROUNDED, REDUCED = 2e-6, 2e-4, 2e-1
"""Tolerances: the same arithmetic; sums in another order, magnified by Adam; bfloat16."""


@dataclass(frozen=True)
class Loop:
    """One row.

    Attributes:
        name: The row's head.
        how: One sentence for the reader.
        tolerance: Of every cell that is not named otherwise.
        missing: Reason by family where nothing is read.
        other: Tolerance by family where it is another one.
        steps: Steps that are compared.
        first: The first of them; the ones before hold less.
        instead: Metric by family where another one is compared.
    """

    name: str
    how: str
    tolerance: float = EXACT
    missing: tuple[tuple[str, str], ...] = ()
    other: tuple[tuple[str, float], ...] = ()
    steps: int = 6
    first: int = 1
    instead: tuple[tuple[str, str], ...] = ()

    def metric(self, family: str) -> str:
        """Return the metric that is compared."""
        return dict(self.instead).get(family, FAMILIES[family])

    def cell(self, family: str) -> float | str:
        """Return the tolerance, or the reason why there is nothing."""
        return dict(self.missing).get(family, dict(self.other).get(family, self.tolerance))


LOOPS = (
    Loop("gradients zeroed in place", "`zero_grad(set_to_none=False)`"),
    Loop("accumulation", "three micro-batches per step, each loss divided by three", ROUNDED),
    Loop("two optimizers", "each owns half of the parameters; they step one after the other"),
    Loop(
        "optimizer between two backward passes",
        "the head's optimizer steps before the backward pass reaches the blocks",
    ),
    Loop("optimizer in backward", "one optimizer per parameter, which steps in `register_post_accumulate_grad_hook`"),
    Loop("closure", "`optimizer.step(closure)`"),
    Loop(
        "LBFGS",
        "`torch.optim.LBFGS`, one evaluation; its first step is along the gradient",
        ROUNDED,
        missing=(("moments", "LBFGS keeps a history of gradients instead of moments"),),
        steps=1,
    ),
    Loop("clipped by norm", "`clip_grad_norm_`; the norm before clipping and the scale are compared too"),
    Loop("clipped by value", "`clip_grad_value_`"),
    Loop("GradScaler", "`torch.amp.GradScaler`, default optimizer, one step skipped", ROUNDED),
    Loop("GradScaler, fused", "`torch.amp.GradScaler`, `fused=True`, one step skipped and counted", ROUNDED),
    Loop(
        "bfloat16 autocast",
        "`torch.autocast`; for histograms, the limits and the number of entries are compared",
        REDUCED,
        steps=2,
    ),
    Loop("checkpointing", "`checkpoint(..., use_reentrant=False)` around each block"),
    Loop("checkpointing, reentrant", "`checkpoint(..., use_reentrant=True)` around each block"),
    Loop(
        "unfreezing",
        "the first blocks are frozen for two steps, then added to the optimizer; compared from then on",
        first=3,
    ),
    Loop("parameters replaced", "the head is replaced after two steps, and its parameters are added to the optimizer"),
    Loop("EMA and SWA", "two `torch.optim.swa_utils.AveragedModel`, updated after each step"),
    Loop("compiled", "`torch.compile(model, fullgraph=True)`, then watched", ROUNDED),
    Loop("compiled, checkpointing", "the same around checkpointed blocks", ROUNDED),
    Loop(
        "watched, then compiled",
        "`torch.compile(model)` after `watch()`: compared from the third step on; for activations, whose window begins "
        "there, `activation.zero_share` is compared",
        ROUNDED,
        first=3,
        instead=(("activations", "activation.zero_share"),),
    ),
)

_OF_RANK_0 = (
    (
        "histograms",
        "only for rank 0: the first half of the rows of each unsharded gradient and weight, compared bin by bin",
    ),
)

SPREAD = (
    Loop("DistributedDataParallel", "two processes, half a batch each", 1e-5),
    Loop("fully_shard", "FSDP2, two processes, half a batch and half of each parameter each", 1e-5, _OF_RANK_0),
)
"""Compared with one process on whole batches by ``tests/distributed``."""


def markdown() -> str:
    """Return the table."""
    families = list(FAMILIES)
    lines = ["| loop | " + " | ".join(families) + " |", "|---|" + "---|" * len(families)]
    reasons: list[str] = []
    for loop in (*LOOPS, *SPREAD):
        cells = []
        for family in families:
            cell = loop.cell(family)
            if isinstance(cell, str):
                if cell not in reasons:
                    reasons.append(cell)
                cells.append(f"- ({reasons.index(cell) + 1})")
            else:
                cells.append(f"{cell:.0e}".replace("e-0", "e-"))
        lines.append(f"| {loop.name} | " + " | ".join(cells) + " |")
    lines += ["", *(f"({number}) {reason}." for number, reason in enumerate(reasons, start=1)), ""]
    lines += ["| loop | what it is |", "|---|---|", *(f"| {loop.name} | {loop.how} |" for loop in (*LOOPS, *SPREAD))]
    return "\n".join(lines)


def document(text: str) -> str:
    """Return the document with the table put in anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
