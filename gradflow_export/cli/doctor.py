"""``gradflow doctor``: checks the installation and prints a fix for each problem; with a script, checks that."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gradflow_export.cli.checkup import add_options, examine_script, own_words, refuse_without_script
from gradflow_export.extensions import Extension, active

PLUGIN_GROUP, PLUGIN_NAME = "tensorboard_plugins", "gradflow"
LEAST_FREE_MB = 100


@dataclass(frozen=True)
class Finding:
    """What one check saw.

    Attributes:
        name: What was looked at.
        verdict: ``"ok"``, ``"note"`` (works, but less well or not everything) or ``"fail"``.
        detail: What was seen.
        way_out: What to do about it; empty when all is well.
    """

    name: str
    verdict: str
    detail: str
    way_out: str = ""


@dataclass(frozen=True)
class Need:
    """A package that something of ours needs.

    Attributes:
        package: Its name on the package index.
        least: The least version, as numbers.
        required: Whether installing gradflow-export brings it.
        gives: What it is needed for.
        install: What to write after ``pip install``.
    """

    package: str
    least: tuple[int, ...]
    required: bool
    gives: str
    install: str


NEEDS = (
    Need("torch", (2, 13), True, "watching a model", "'torch>=2.13'"),
    Need("tensorboard", (2, 21), True, "the tensorboard backend and the panel", "'tensorboard>=2.21'"),
    Need("wandb", (0, 28), True, "the wandb backend", "'wandb>=0.28'"),
    Need("numpy", (1, 26), True, "reading and writing anything", "'numpy>=1.26'"),
    Need("protobuf", (4, 25), True, "reading and writing event files", "'protobuf>=4.25'"),
    Need("psutil", (5, 9), True, "memory metrics", "'psutil>=5.9'"),
    Need("google-crc32c", (1, 5), True, "fast checksums", "'google-crc32c>=1.5'"),
    Need("PyYAML", (6, 0), True, "configuration from YAML files", "'PyYAML>=6.0'"),
    Need("tqdm", (4, 66), True, "progress bars", "'tqdm>=4.66'"),
    Need("scikit-learn", (1, 3), False, "the digits of `gradflow demo`", "'gradflow-export[demo]'"),
    Need("wandb-workspaces", (0, 4), False, "`gradflow dashboard`", "'gradflow-export[dashboard]'"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation and print a fix for each problem; or check a training script",
        description="Without a script: check this installation. With one: run it for a few optimizer steps, report "
        "silent mistakes, and run it again with one change at a time to find the change that makes it "
        "learn; exit status 1 for a HIGH or CRITICAL finding or a confirmed cure, 2 when the script "
        "fails or trains nothing. What the script writes is thrown away.",
    )
    plain = parser.parse_known_args

    def parse(args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        return plain(own_words(sys.argv[1:] if args is None else args), namespace)

    parser.parse_known_args = parse  # type: ignore[method-assign, assignment]
    parser.add_argument("script", type=Path, nargs="?", help="a training script or notebook to examine")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module, as python -m runs it")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    add_options(parser)
    parser.add_argument("--logdir", type=Path, default=Path("runs"), help="folder for runs (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print every finding; 1 when something would fail, or when a script has a critical one."""
    if args.module:
        return examine_script(None, args.module, args)
    if args.script is not None:
        return examine_script(args.script, args.words, args)
    refuse_without_script(args)
    findings = examine(args.logdir)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.verdict:<5} {finding.name:<{width}}  {finding.detail}")
        if finding.way_out:
            print(f"{'':<5} {'':<{width}}  -> {finding.way_out}")
    failed = sum(finding.verdict == "fail" for finding in findings)
    print(f"\n{f'{failed} of {len(findings)} checks failed' if failed else 'Nothing would fail.'}")
    return 1 if failed else 0


def examine(logdir: Path) -> list[Finding]:
    """Look at everything.

    Args:
        logdir: Where runs would go; it need not exist.
    """
    checks: Sequence[Callable[[], Finding]] = (
        check_devices,
        check_library,
        check_checksums,
        check_plugin,
        check_panel,
        check_reader,
        check_wandb,
    )
    return [
        check_python(sys.version_info[:2]),
        *(check_package(need) for need in NEEDS),
        *(_guarded(check) for check in checks),
        *(check_extension(extension) for extension in active()),
        check_logdir(logdir),
    ]


def check_python(version: tuple[int, int]) -> Finding:
    """Check the interpreter."""
    text = f"{version[0]}.{version[1]} ({sys.executable})"
    if version < (3, 10):
        return Finding("python", "fail", text, "install Python 3.10 or newer")
    if version > (3, 13):
        return Finding("python", "note", text, "tested with 3.10 to 3.13; please report problems")
    return Finding("python", "ok", text)


def check_package(need: Need) -> Finding:
    """Check that a package is installed and new enough; reads its metadata, does not import it."""
    bad = "fail" if need.required else "note"
    try:
        found = metadata.version(need.package)
    except metadata.PackageNotFoundError:
        return Finding(
            need.package, bad, f"not installed; it is needed for {need.gives}", f"pip install {need.install}"
        )
    if _numbers(found) < need.least:
        least = ".".join(map(str, need.least))
        return Finding(need.package, bad, f"{found}, but {least} is needed", f"pip install --upgrade {need.install}")
    return Finding(need.package, "ok", found)


def check_devices() -> Finding:
    """Import torch, and say what it computes on."""
    import torch

    if torch.cuda.is_available():
        return Finding("devices", "ok", f"CPU and {torch.cuda.get_device_name()}")
    return Finding("devices", "ok", "CPU; no CUDA device, so no CUDA memory metrics")


def check_library() -> Finding:
    """Say whether the C library was built, without which tensors are read by torch."""
    from gradflow_export import native

    if native.available():
        return Finding("C library", "ok", "loaded")
    if os.environ.get("GRADFLOW_NATIVE") == "0":
        return Finding("C library", "note", "off: GRADFLOW_NATIVE is 0", "unset GRADFLOW_NATIVE")
    return Finding(
        "C library",
        "note",
        "missing: everything works, but reading gradients and updates on the CPU takes longer",
        "install a C compiler, then pip install --force-reinstall --no-deps gradflow-export",
    )


def check_checksums() -> Finding:
    """Say which checksum code google-crc32c uses; event files need one checksum per record."""
    import google_crc32c

    kind = google_crc32c.implementation
    if kind == "c":
        return Finding("checksums", "ok", "compiled")
    return Finding("checksums", "note", f"{kind}: slow", "pip install --force-reinstall google-crc32c")


def check_plugin() -> Finding:
    """Check that TensorBoard will see the panel: its entry point is there, once, and loads."""
    points = [point for point in metadata.entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN_NAME]
    if not points:
        return Finding(
            "tensorboard plugin",
            "fail",
            "TensorBoard does not find it: the entry point is missing",
            "pip install --force-reinstall --no-deps gradflow-export, or `pip install -e .` in a checkout",
        )
    loader = points[0].load()
    return Finding("tensorboard plugin", "ok", f"{loader.__module__}:{loader.__qualname__}")


def check_panel() -> Finding:
    """Check that the panel's script is part of the installation."""
    import tensorboard_plugin_gradflow

    script = Path(next(iter(tensorboard_plugin_gradflow.__path__))) / "static" / "index.js"
    if not script.is_file():
        return Finding(
            "panel",
            "fail",
            "its script static/index.js is missing",
            "run `npm ci && npm run build` in tb_plugin/frontend, or install a released package",
        )
    return Finding("panel", "ok", f"{len(script.read_bytes()) / 1024:.0f} kB of script")


def check_reader() -> Finding:
    """Say whether TensorBoard has its fast reader."""
    import tensorboard_data_server

    if tensorboard_data_server.server_binary():
        return Finding("tensorboard reader", "ok", "fast (data server)")
    return Finding(
        "tensorboard reader", "note", "slow (Python): this platform has no data server; long runs load slowly"
    )


def check_wandb() -> Finding:
    """Look for the names of wandb that are not public and make the wandb backend better."""
    import wandb

    from gradflow_export.writers.wandb import private as wandb_private

    missing = wandb_private.missing(wandb)
    if not missing:
        return Finding("wandb hooks", "ok", f"all found in {wandb.__version__}")
    return Finding(
        "wandb hooks", "note", "; ".join(missing), f"{wandb.__version__} is not tested: pip install 'wandb<0.32'"
    )


def check_extension(extension: Extension) -> Finding:
    """Say whether what another package adds can be loaded."""
    name = f"extension {extension.name}"
    if extension.error:
        package = extension.package.rpartition(" ")[0]
        return Finding(name, "note", f"{extension} is left out: {extension.error}", f"pip install --upgrade {package}")
    return Finding(name, "ok", f"{extension}, {extension.value}")


def check_logdir(logdir: Path) -> Finding:
    """Check that runs can be written, without leaving anything behind."""
    name, place = "logdir", logdir.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        what = "is not writable" if place.is_dir() else "is not a folder"
        return Finding(name, "fail", f"{logdir}: {place} {what}", "pass another logdir to Exporter")
    free = shutil.disk_usage(place).free / 2**20
    if free < LEAST_FREE_MB:
        return Finding(name, "fail", f"{logdir}: only {free:.0f} MB free", "free disk space, or pass another logdir")
    return Finding(name, "ok", f"{logdir} is writable, {free / 1024:.1f} GB free")


def _guarded(check: Callable[[], Finding]) -> Finding:
    name = check.__name__.removeprefix("check_")
    try:
        return check()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(name, "fail", reason, "fix the import above; `pip check` lists incompatible packages")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``"2.13.0+cpu"`` gives ``(2, 13, 0)``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()
