"""The sdist: all that a build needs, and metadata that an index can show."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("distribution", ROOT / "benchmarks" / "distribution.py")
distribution = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(distribution)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Built from what git knows, in a copy, as a build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("sdist")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if name.startswith(("gradflow_export/", "tb_plugin/tensorboard", "LICENSE", "README", "pyproject", "setup.py")):
            target = folder / "tree" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
    return distribution.build_sdist(folder / "tree", folder / "dist")


def test_the_sdist_holds_every_module_and_source(sdist):
    """What a wheel is made of is there: all modules, the C sources with their header, the panel's code."""
    assert distribution.check_sdist(sdist)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    modules = [*(ROOT / "gradflow_export").rglob("*.py"), *(ROOT / "gradflow_export").rglob("*.[ch]")]
    plugin = (ROOT / "tb_plugin" / "tensorboard_plugin_gradflow").rglob("*.py")
    assert [str(path) for path in [*modules, *plugin] if path.relative_to(ROOT).as_posix() not in names] == []


def test_an_sdist_that_lacks_a_source_is_refused(sdist, tmp_path):
    """The check names what is missing."""
    broken = tmp_path / sdist.name
    with tarfile.open(sdist) as old, tarfile.open(broken, "w:gz") as new:
        for member in old.getmembers():
            if not member.name.endswith("py.typed"):
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with pytest.raises(SystemExit, match=r"lacks gradflow_export/py\.typed"):
        distribution.check_sdist(broken)


def test_the_metadata_leads_to_the_project(sdist):
    """An index shows the README as Markdown, and links to repository, documentation, changes and issues."""
    with tarfile.open(sdist) as archive:
        member = next(
            member
            for member in archive.getmembers()
            if member.name.count("/") == 1 and member.name.endswith("/PKG-INFO")
        )
        about = message_from_string(archive.extractfile(member).read().decode())
    urls = dict(value.split(", ", 1) for value in about.get_all("Project-URL"))
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= set(urls)
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload().lstrip().startswith("# gradflow-export")


@pytest.mark.parametrize("compiler", [None, "false"])
def test_a_wheel_is_tagged_by_what_is_in_it(compiler, sdist, tmp_path):
    """With the C library it is for any Python on this platform; without, where no compiler works, for any platform."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    script = f"import setuptools.build_meta as b; b.build_wheel({str(tmp_path)!r})"
    environ = os.environ if compiler is None else os.environ | {"CC": compiler}
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True, env=environ)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        library = [name for name in archive.namelist() if name.startswith("gradflow_export/native/_statistics.")]
    python, interface, platform = wheel.stem.split("-")[2:]
    assert (python, interface, platform == "any") == ("py3", "none", not library)
    if compiler:
        assert not library
