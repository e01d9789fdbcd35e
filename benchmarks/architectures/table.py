"""Whether the blocks of 30 architectures are found: a table and, of each, the tree; written into docs/blocks.md.

Needs timm, transformers, diffusers, segmentation-models-pytorch, torchvision and ultralytics; nothing is downloaded::

    python benchmarks/architectures/table.py                # writes the table and the trees
    python benchmarks/architectures/table.py resnet18 t5    # prints these
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from truth import TRUTHS, Truth
from zoo import build

from gradflow_export.hooks.block_tree import BlockTree
from gradflow_export.hooks.discover import find_blocks

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "blocks.md"
BEGIN, END = "<!-- begin: architectures -->", "<!-- end: architectures -->"


class Row(NamedTuple):
    """One architecture: blocks that are right, how many of them were found, names of what is wrong, the tree."""

    right: int
    found: int
    missing: list[str]
    wrong: list[str]
    tree: BlockTree

    @property
    def good(self) -> bool:
        """Whether every block was found and nothing else."""
        return not self.missing and not self.wrong


def _made(name: str, package: str) -> nn.Module:
    try:
        with torch.device("meta"):  # no memory
            return build(name, package)
    except RuntimeError:  # a constructor that computes
        return build(name, package)


def look(name: str, truth: Truth) -> Row:
    """Compare what is found with what is right."""
    model = _made(name, truth.package)
    known = {key: part for key, part in model.named_modules() if any(True for _ in part.parameters())}
    right = [key for key in known if _matches(key, truth.blocks)]
    found = find_blocks(model)
    names = tuple(key for key, _ in found.blocks)
    tree = BlockTree(type(model).__name__, names, found.choices)
    wrong = [key for key in names if key not in right and not _matches(key, truth.also)]
    return Row(len(right), len(set(right) & set(names)), [key for key in right if key not in names], wrong, tree)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(p.replace(".", r"\.").replace("*", r"[^.]*"), name) for p in patterns)


def markdown(rows: dict[str, Row]) -> str:
    """Return the table and the trees."""
    good = sum(row.good for row in rows.values())
    lines = [f"**{good} of {len(rows)}** are found as they were written down.", ""]
    lines += ["| architecture | from | right | found | else | verdict |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        wrong = "right" if row.good else "**wrong**"
        cells = (name, TRUTHS[name].package, row.right, row.found, len(row.wrong), wrong)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "## The trees", ""]
    for name, row in rows.items():
        lines += [f"{name}", "", "```", str(row.tree), "```", ""]
    return "\n".join(lines)


def main() -> None:
    """Write the table, or print the architectures that are named."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    named = sys.argv[1:] or list(TRUTHS)
    rows = {}
    for name in named:
        rows[name] = row = look(name, TRUTHS[name])
        more = f" missing {row.missing[:5]} wrong {row.wrong[:5]}" if not row.good else ""
        print(f"{name:<32}{row.found:>3} of {row.right:<3}{'right' if row.good else 'WRONG'}{more}", flush=True)
        if sys.argv[1:]:
            print(row.tree)
    print(f"{sum(row.good for row in rows.values())} of {len(rows)}")
    if not sys.argv[1:]:
        text = DOCUMENT.read_text()
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        DOCUMENT.write_text(f"{before}\n{markdown(rows)}{after}")


if __name__ == "__main__":
    main()
