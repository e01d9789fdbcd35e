"""The sdist: all that a build needs, and metadata that an index can show."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def loaded(name, path):
    """A module that is a file of the checkout."""
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


distribution = loaded("distribution", "benchmarks/distribution.py")
wheels = loaded("wheels_build", "benchmarks/wheels/build.py")
setup = loaded("gradflow_setup", "setup.py")
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Built from what git knows, in a copy, as a build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("sdist")
    distribution.copy_checkout(ROOT, folder / "tree")
    return distribution.build_sdist(folder / "tree", folder / "dist")


@pytest.fixture(scope="module")
def plain(sdist, tmp_path_factory):
    """The wheel for any platform, without the library."""
    return wheels.build_plain(sdist, tmp_path_factory.mktemp("plain"))


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


def metadata(sdist):
    """What an index is told of a release."""
    with tarfile.open(sdist) as archive:
        member = next(
            member
            for member in archive.getmembers()
            if member.name.count("/") == 1 and member.name.endswith("/PKG-INFO")
        )
        return message_from_string(archive.extractfile(member).read().decode())


def targets(markdown):
    """Where the links and pictures of a text lead."""
    return re.findall(r"\]\(([^)#]+)", markdown)


def test_an_index_can_show_the_readme(sdist):
    """It is Markdown, and none of its links or pictures is relative: an index has no such files."""
    about = metadata(sdist)
    shown = about.get_payload()
    assert about["Description-Content-Type"] == "text/markdown"
    assert shown.lstrip().startswith("# gradflow-export")
    assert [target for target in targets(shown) if not target.startswith("https://")] == []
    assert "\npip install gradflow-export\n" in shown
    assert "install -e" not in shown
    assert "Learn the basics in five minutes | tutorial (`docs/tutorial.md`)" in shown


def test_an_address_is_said_only_where_there_is_one(sdist):
    """Every address of the metadata is in ``[project.urls]``; links of the README need the repository's."""
    urls = metadata(sdist).get_all("Project-URL") or []
    assert bool(urls) == (setup.repository() is not None)


def test_links_of_the_readme_are_absolute_where_the_project_has_an_address():
    """A picture is the file itself, a link the page that shows it, and each file exists; other text stays as it is."""
    shown = setup.description(README, "https://git.example/one/two")
    pictures = [target for target in targets(shown) if "/raw/main/" in target]
    assert len(pictures) == len(re.findall(r"!\[", README))
    paths = [re.sub(r"^https://git.example/one/two/(raw|blob)/main/", "", target) for target in targets(shown)]
    assert paths == targets(README)
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    plain = re.sub(r"https://git.example/one/two/(raw|blob)/main/", "", shown)
    assert [line for line in plain.split("\n") if line not in README.split("\n")] == ["pip install gradflow-export"]


def test_the_sdist_is_the_whole_checkout(sdist):
    """What the README says of pages, `make demo` and `make test` is true in it too."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    known = {name for name in listed if name and (ROOT / name).is_file()}
    assert sorted(name for name in known - names if not name.startswith(".github")) == []


def library_of(target):
    """Bytes that begin as a library of a platform does."""
    data = bytearray(512)
    data[60:64] = (128).to_bytes(4, "little") if target.magic == b"MZ" else bytes(4)
    data[: len(target.magic)] = target.magic
    at, machine = target.machine
    at += 128 if target.magic == b"MZ" else 0
    data[at : at + len(machine)] = machine
    return bytes(data)


@pytest.mark.parametrize("name", sorted(wheels.TARGETS))
def test_a_wheel_of_a_platform_is_the_plain_one_and_its_library(name, plain, tmp_path):
    """Its tags are those of its name, its hashes are right; the library of another platform is refused."""
    here = Path(shutil.copy(plain, tmp_path))
    for other, target in wheels.TARGETS.items():
        library = tmp_path / f"_statistics{target.suffix}"
        library.write_bytes(library_of(target))
        wheel = wheels.add_library(here, wheels.TARGETS[name]._replace(suffix=target.suffix), library)
        if other == name:
            wheels.check(wheel, wheels.TARGETS[name], plain)
            assert set(wheels.names(wheel)) - set(wheels.names(plain)) == {
                f"gradflow_export/native/_statistics{target.suffix}"
            }
        else:
            with pytest.raises(SystemExit, match="expected"):
                wheels.check(wheel, wheels.TARGETS[name], plain)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gradflow_export/py.typed", None),
        ("licenses/LICENSE", None),
        ("gradflow_export/__init__.py", b"# another"),
        (".dist-info/WHEEL", b"Tag: cp311-cp311-linux_x86_64\n"),
    ],
)
def test_a_wheel_that_lacks_something_is_refused(name, change, plain, tmp_path):
    """A file that is missing, one that is not what RECORD says, and tags that are not those of the name."""
    broken = tmp_path / plain.name
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(broken, "w") as new:
        for info in old.infolist():
            if not info.filename.endswith(name):
                new.writestr(info, old.read(info))
            elif change is not None:
                new.writestr(info, change)
    wheels.check(plain, None, plain)
    with pytest.raises(SystemExit, match="expected"):
        wheels.check(broken, None, broken)


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
