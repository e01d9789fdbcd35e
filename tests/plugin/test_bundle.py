"""The committed bundle and schema are those of the sources, so that an install needs no Node."""

import gzip
import hashlib
import importlib.util
import re
from pathlib import Path

import pytest

from gradflow_export.records.catalog import CATALOG

ROOT = Path(__file__).parents[2]
FRONTEND = ROOT / "tb_plugin" / "frontend"
BUNDLE = ROOT / "tb_plugin" / "tensorboard_plugin_gradflow" / "static" / "index.js"


def sources():
    """Return the files whose hash the bundle carries, as build.mjs chooses them."""
    found = [path for path in (FRONTEND / "src").rglob("*") if path.is_file()]
    return sorted([path.relative_to(FRONTEND).as_posix() for path in found] + ["build.mjs", "package-lock.json"])


def test_the_bundle_was_built_from_these_sources():
    """Its first line holds their hash."""
    digest = hashlib.sha256()
    for name in sources():
        digest.update(name.encode() + b"\0" + (FRONTEND / name).read_bytes() + b"\0")
    first = BUNDLE.read_text(encoding="utf-8").splitlines()[0]
    assert first == f"// sources sha256:{digest.hexdigest()}", "static/index.js is stale: npm ci && npm run build"


def test_the_schema_was_generated_from_this_catalogue():
    """A metric added in Python reaches the panel's types."""
    spec = importlib.util.spec_from_file_location("generate_schema", FRONTEND / "generate_schema.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stale = "src/schema.ts is stale: python tb_plugin/frontend/generate_schema.py"
    assert module.TARGET.read_text(encoding="utf-8") == module.render(), stale


def test_metrics_that_the_panel_knows_by_name_exist():
    """The few names written in the panel are those of the catalogue."""
    families = "|".join({name.partition(".")[0] for name in CATALOG if "." in name})
    text = "".join(path.read_text(encoding="utf-8") for path in (FRONTEND / "src").rglob("*.ts"))
    named = set(re.findall(rf'"((?:{families})\.\w+)"', text))
    assert len(named) > 8
    # One is computed by the plugin from others, and no catalogue of what is stored has it.
    assert named <= {*CATALOG, "block.gain_from_loss"}


def test_the_sources_of_the_panel_stay_small():
    """No module and no style sheet is longer than 400 lines."""
    lines = {
        path.relative_to(FRONTEND).as_posix(): path.read_text(encoding="utf-8").count("\n")
        for folder in ("src", "test")
        for path in (FRONTEND / folder).rglob("*.*")
    }
    assert {name: count for name, count in lines.items() if count > 400} == {}


def test_the_bundle_keeps_to_its_budget():
    """90 kB gzip at most."""
    assert len(gzip.compress(BUNDLE.read_bytes())) <= 90_000


@pytest.mark.parametrize(
    "word",
    [
        r"\beval\(",
        r"new Function",
        r"innerHTML\s*=",
        r"insertAdjacentHTML",
        r"new Worker",
        r"https?://(?!www\.w3\.org)",
    ],
)
def test_the_bundle_holds_nothing_that_runs_text_or_loads_from_elsewhere(word):
    """No markup from strings, no code from strings, no other server."""
    assert not re.search(word, BUNDLE.read_text(encoding="utf-8"))


def test_the_lock_file_names_no_registry():
    """Every registry may serve the packages; their hashes are pinned."""
    text = (FRONTEND / "package-lock.json").read_text(encoding="utf-8")
    assert '"resolved"' not in text
    assert text.count('"integrity"') > 3
