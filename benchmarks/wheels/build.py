"""Build and check the sdist and every wheel of a release, in a copy of the checkout: ``make wheels``.

    python benchmarks/wheels/build.py [--out dist] [--only windows ...]

The wheel for any platform is built from the sdist, without a compiler. Every other wheel is that one and the C library
of its platform: gcc's for Linux on x86-64, where it holds code for three generations of processors, zig's for the rest.
Each is checked: tags, files, hashes, licence, the kind of its library, the oldest glibc that suffices, and metadata
that an index can show. A library is opened and called where this machine can: itself, or by qemu-aarch64 or wine.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLACE = "gradflow_export/native/_statistics"
_spec = importlib.util.spec_from_file_location("distribution", ROOT / "benchmarks" / "distribution.py")
assert _spec is not None
assert _spec.loader is not None
distribution = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(distribution)


class Target(NamedTuple):
    """A platform: tags of its wheel, its compiler, and how its libraries are known and run."""

    tags: str
    compiler: tuple[str, ...]
    suffix: str
    magic: bytes
    """First bytes of the library."""
    machine: tuple[int, bytes]
    """Where the library says for which processor it is, and what. For Windows: behind the address at byte 60."""
    runner: tuple[str, ...] | None
    """What runs a program of the platform here; None where nothing does."""


ZIG = (sys.executable, "-m", "ziglang", "cc")
TARGETS = {
    "linux-x86_64": Target(
        "manylinux2014_x86_64.manylinux_2_17_x86_64", ("gcc", "-include", str(HERE / "old_glibc.h")), ".so",
        b"\x7fELF\x02\x01", (18, b"\x3e\x00"), (),
    ),
    "linux-aarch64": Target(
        "manylinux2014_aarch64.manylinux_2_17_aarch64", (*ZIG, "-target", "aarch64-linux-gnu.2.17"), ".so",
        b"\x7fELF\x02\x01", (18, b"\xb7\x00"), ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"),
    ),
    "windows": Target(
        "win_amd64", (*ZIG, "-target", "x86_64-windows-gnu"), ".pyd", b"MZ", (4, b"\x64\x86"), ("wine",),
    ),
    "macos": Target(
        "macosx_11_0_arm64", (*ZIG, "-target", "aarch64-macos.11.0"), ".so",
        b"\xcf\xfa\xed\xfe", (4, b"\x0c\x00\x00\x01"), None,
    ),
}  # fmt: skip


def main() -> int:
    """Build, check and print a line for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where all go (default: dist)")
    parser.add_argument("--only", choices=TARGETS, nargs="+", default=list(TARGETS), help="build these platforms")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        distribution.copy_checkout(ROOT, folder / "tree")
        sdist = distribution.build_sdist(folder / "tree", folder / "dist")
        print(f"{sdist.name}: {distribution.check_sdist(sdist)} files")
        plain = build_plain(sdist, folder)
        check(plain, None, plain)
        print(f"{plain.name}: {len(names(plain))} files, no library")
        for name in args.only:
            target = TARGETS[name]
            library = folder / name / f"{PLACE.rpartition('/')[2]}{target.suffix}"
            compile_library(target, folder / "tree", library)
            wheel = add_library(plain, target, library)
            check(wheel, target, plain)
            print(f"{wheel.name}: {glibc(wheel)}{run(target, library, folder / 'tree')}")
        files = [sdist, *plain.parent.glob("*.whl")]
        subprocess.run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files], check=True)
        args.out.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copyfile(path, args.out / path.name)
    return 0


def build_plain(sdist: Path, folder: Path) -> Path:
    """Return the wheel for any platform, built from an sdist as where no compiler works."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    script = f"import setuptools.build_meta as b; print(b.build_wheel({str(sdist.parent)!r}))"
    environ = os.environ | {"CC": shutil.which("false") or "false"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=source, check=True, stdout=subprocess.PIPE, text=True, env=environ
    )
    return sdist.parent / done.stdout.split()[-1]


def extension(tree: Path) -> dict[str, list[str]]:
    """Return what ``pyproject.toml`` says of the library: its sources and flags."""
    settings = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    (module,) = settings["tool"]["setuptools"]["ext-modules"]
    assert module["name"] == PLACE.replace("/", "."), module["name"]
    return dict(module)


def compile_library(target: Target, tree: Path, library: Path) -> None:
    """Compile the library for a platform, with the flags that an installation from source uses."""
    about = extension(tree)
    library.parent.mkdir(parents=True, exist_ok=True)
    command = [*target.compiler, *about["extra-compile-args"], "-fPIC", "-shared", "-s", *about["sources"]]
    subprocess.run([*command, "-o", library, *about["extra-link-args"]], cwd=tree, check=True)


def add_library(plain: Path, target: Target, library: Path) -> Path:
    """Return a wheel that is the plain one, the library, and the tags of its platform."""
    wheel = plain.with_name(plain.name.replace("-any.whl", f"-{target.tags}.whl"))
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        files = {info: old.read(info) for info in old.infolist()}
        like = next(info for info in files if info.filename == "gradflow_export/native/__init__.py")
        added = zipfile.ZipInfo(f"{PLACE}{target.suffix}", like.date_time)
        added.external_attr, added.compress_type = 0o100755 << 16, zipfile.ZIP_DEFLATED
        files[added] = library.read_bytes()
        for info, data in files.items():
            if info.filename.endswith(".dist-info/WHEEL"):
                tags = "".join(f"Tag: py3-none-{tag}\n" for tag in target.tags.split("."))
                files[info] = data.replace(b"Tag: py3-none-any\n", tags.encode()).replace(
                    b"Root-Is-Purelib: true", b"Root-Is-Purelib: false"
                )
        record = next(info for info in files if info.filename.endswith(".dist-info/RECORD"))
        lines = [(info.filename, _digest(data), len(data)) for info, data in files.items() if info is not record]
        files[record] = "".join(f"{name},{digest},{size}\n" for name, digest, size in lines).encode()
        files[record] += f"{record.filename},,\n".encode()
        for info, data in files.items():
            new.writestr(info, data)
    return wheel


def names(wheel: Path) -> list[str]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def check(wheel: Path, target: Target | None, plain: Path) -> None:
    """Raise SystemExit where a wheel is not what its name says.

    Args:
        wheel: What is checked.
        target: The platform it is for; None for any.
        plain: The wheel for any platform, whose files every other one has.
    """
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (about,) = (name for name in files if name.endswith(".dist-info/WHEEL"))
    told = re.findall(r"^Tag: (.*)$", files[about].decode(), re.MULTILINE)
    wanted = [f"py3-none-{tag}" for tag in wheel.stem.split("-")[4].split(".")]
    _require(told == wanted, wheel, f"tags {wanted}, found {told}")
    libraries = [name for name in files if name.startswith(f"{PLACE}.")]
    _require(
        libraries == ([f"{PLACE}{target.suffix}"] if target else []), wheel, f"its library alone, found {libraries}"
    )
    _require(sorted({*files} - {*libraries}) == names(plain), wheel, "the files of the wheel for any platform")
    folder = about.rpartition("/")[0]
    for name in ("gradflow_export/py.typed", "tensorboard_plugin_gradflow/py.typed", f"{folder}/licenses/LICENSE"):
        _require(name in files, wheel, name)
    rows = {row[0]: row[1:] for row in csv.reader(files[f"{folder}/RECORD"].decode().splitlines())}
    wrong = [name for name in files if name != f"{folder}/RECORD" and rows.get(name, [""])[0] != _digest(files[name])]
    _require(not wrong and rows.keys() == files.keys(), wheel, f"hashes of all files in RECORD, wrong: {wrong}")
    if target:
        data = files[libraries[0]]
        start = int.from_bytes(data[60:64], "little") if target.magic == b"MZ" else 0
        at, machine = target.machine
        _require(data.startswith(target.magic), wheel, "a library of this kind of system")
        _require(data[start + at : start + at + len(machine)] == machine, wheel, "a library for this processor")


def glibc(wheel: Path) -> str:
    """Return what auditwheel says of a wheel for Linux; raise SystemExit where a tag promises more."""
    if "linux" not in wheel.name:
        return ""
    command = [sys.executable, "-m", "auditwheel", "show", wheel]
    said = " ".join(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    found = re.search(r'is consistent with the following platform tag: "manylinux_2_(\d+)_', said)
    _require(found is not None and int(found[1]) <= 17, wheel, f"glibc 2.17 to suffice; auditwheel: {said}")  # type: ignore[index]
    return f"glibc 2.{found[1]} suffices; "  # type: ignore[index]


def run(target: Target, library: Path, tree: Path) -> str:
    """Open a library and call it where this machine can; return what became of it."""
    if target.runner is None:
        return "its library was not opened: nothing here runs programs of this platform"
    own = target.runner == () and sysconfig.get_platform() != "linux-x86_64"
    if own or (target.runner and shutil.which(target.runner[0]) is None):
        return f"its library was not opened: {' '.join(target.runner) or 'Linux on x86-64'} is missing"
    sources = [(tree / path).read_text(encoding="utf-8") for path in extension(tree)["sources"]]
    functions = [name for text in sources for name in re.findall(r"^PUBLIC [^(]*?(\w+)\(", text, re.MULTILINE)]
    program = library.with_name("loads.exe")
    dynamic = () if target.suffix == ".pyd" else ("-ldl",)
    subprocess.run([*target.compiler, HERE / "loads.c", "-o", program, *dynamic], check=True)
    done = subprocess.run(
        [*target.runner, program, library, *functions], capture_output=True, text=True, timeout=300, check=False
    )
    entries = [(37 * i % 101 - 50) / 8 for i in range(1_000_000)]
    wanted = [
        math.sqrt(math.fsum(x * x for x in entries)), math.fsum(map(abs, entries)), max(entries), min(entries),
        entries.count(0.0), 0.0,
    ]  # fmt: skip
    found = [float(word) for word in done.stdout.split()]
    equal = len(found) == len(wanted) and all(
        math.isclose(one, other, rel_tol=1e-6) for one, other in zip(found, wanted, strict=True)
    )
    if done.returncode or not equal:
        raise SystemExit(f"{library}: expected {wanted}, found {found}, status {done.returncode}: {done.stderr[-500:]}")
    return f"its library opens, has {len(functions)} functions and computes what it should"


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _require(holds: bool, wheel: Path, what: str) -> None:
    if not holds:
        raise SystemExit(f"{wheel.name}: expected {what}.")


if __name__ == "__main__":
    sys.exit(main())
