"""Runs a program without harm to what the user has: what it writes lands in a layer that is thrown away.

On Linux a process gets its own view of files (an overlay in a user and a mount namespace) and no network. Where the
system forbids that, the folder is copied if it is small.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

if sys.platform == "linux":
    import fcntl

OVERLAY, COPY, NONE = "overlay", "copy", "none"
COPIED = 200 * 2**20
"""Bytes up to which a folder is copied where it cannot be overlaid."""
SCRATCH = "2g"
"""What a program may write at most."""

_NEWNS, _NEWUSER, _NEWNET = 0x00020000, 0x10000000, 0x40000000
_PRIVATE, _RECURSIVE, _BIND, _REMOUNT, _READ_ONLY = 0x40000, 0x4000, 0x1000, 0x20, 0x1
_DEATH_SIGNAL, _SUBREAPER = 1, 36
_SET_FLAGS, _UP = 0x8914, 0x1
_ROUNDS = 20
"""How often it is looked for processes that were started while others were ended."""

SETTINGS = (
    ("WANDB_MODE", "disabled"),
    ("WANDB_SILENT", "true"),
    ("MPLBACKEND", "Agg"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("OMP_NUM_THREADS", "1"),
    ("MKL_NUM_THREADS", "1"),
)
OFFLINE = (("HF_HUB_OFFLINE", "1"), ("HF_DATASETS_OFFLINE", "1"))


@dataclass(frozen=True)
class Sandbox:
    """How programs are run.

    Attributes:
        kind: ``"overlay"``, ``"copy"``, or ``"none"``: in the user's own folder, because they asked for it.
        folders: What is protected: the current folder, the program's, and the home folder.
        scratch: A folder of this process for what is thrown away.
        network: Whether the network can be reached.
    """

    kind: str
    folders: tuple[Path, ...]
    scratch: Path
    network: bool = False

    def enter(self) -> Callable[[], None]:
        """Begin, in a process of one thread; what is returned makes a layer of its own in a forked child of it."""
        for name, value in (*SETTINGS, *(() if self.network else OFFLINE)):
            os.environ[name] = value
        if self.kind == OVERLAY:
            layers = _Layers(self.folders, self.scratch, network=self.network)
            layers.enter()
            return layers.again
        if self.kind == COPY:
            self._copy()
        return lambda: None

    def _copy(self) -> None:
        home = Path(tempfile.mkdtemp(dir=self.scratch))
        here = Path.cwd()
        for folder in self.folders:
            place = home / "files" / folder.relative_to(folder.anchor)
            if here.is_relative_to(folder) and not place.exists():
                shutil.copytree(folder, place, symlinks=True, ignore_dangling_symlinks=True)
                os.chdir(place / here.relative_to(folder))
        os.environ["HOME"] = str(home)


def choose(
    folders: Sequence[Path],
    scratch: Path,
    *,
    network: bool = False,
    allowed: Callable[[Sandbox], bool],
) -> Sandbox | None:
    """Return the best sandbox that this system allows; ``None`` where only the user can decide.

    Args:
        folders: What is protected, the current folder first.
        scratch: A folder for what is thrown away.
        network: Whether programs may reach the network.
        allowed: Tries whether an overlay can be entered, by a process of its own.
    """
    overlaid = Sandbox(OVERLAY, outermost(folders), scratch, network)
    if sys.platform == "linux" and allowed(overlaid):
        return overlaid
    if size(folders[0], COPIED) <= COPIED:
        return Sandbox(COPY, (folders[0].resolve(),), scratch, network)
    return None


def outermost(folders: Sequence[Path]) -> tuple[Path, ...]:
    """Return the folders without those that lie in others on the same file system, outer ones first."""
    found: list[Path] = []
    for folder in sorted({folder.resolve() for folder in folders if folder.is_dir()}):
        inside = any(folder.is_relative_to(each) and folder.stat().st_dev == each.stat().st_dev for each in found)
        if not inside and folder != Path(folder.anchor):
            found.append(folder)
    return tuple(found)


def size(folder: Path, limit: int) -> int:
    """Return how many bytes a folder has, counted until they are more than the limit."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(place) / name).lstat().st_size
        if total > limit:
            break
    return total


def entered(sandbox: Sandbox) -> bool:
    """Enter it and make a layer in it; what fails raises."""
    sandbox.enter()()
    return True


class _Layers:
    """Overlays over folders, in namespaces of the process that enters."""

    def __init__(self, folders: Sequence[Path], scratch: Path, *, network: bool) -> None:
        self._network, self._scratch = network, scratch
        self._folders = folders
        below = [Path(place) for place in _mounts() if any(_below(place, folder) for folder in folders)]
        self._places = [place for place in (*folders, *sorted(below)) if place.is_dir()]
        self._lower: dict[Path, str] = {}
        self._count = 0

    def enter(self) -> None:
        user, group = os.getuid(), os.getgid()
        _check(_libc().unshare(_NEWUSER | _NEWNS), "unshare")
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
        _mount("none", Path("/"), "", _PRIVATE | _RECURSIVE)
        _mount("tmpfs", self._scratch, "tmpfs", 0, f"size={SCRATCH}")
        room = os.open(self._scratch, os.O_PATH)
        for number, place in enumerate(self._places):
            base = self._scratch / f"base-{number}"
            base.mkdir()
            _mount(str(place), base, "", _BIND | _RECURSIVE)
            self._lower[place] = str(base)
        self._cover()
        if not (self._scratch / "base-0").exists():
            # An overlay has covered the path.
            _mount(f"/proc/self/fd/{room}", self._scratch, "", _BIND | _RECURSIVE)

    def again(self) -> None:
        """Lay a new layer over what this process has written until now."""
        _check(_libc().unshare(_NEWNS), "unshare")
        self._cover()

    def _cover(self) -> None:
        here = Path.cwd()
        if not self._network:
            _check(_libc().unshare(_NEWNET), "unshare")
            _loopback()
        layers = []
        for place in self._places:
            self._count += 1
            upper, work = (self._scratch / f"{os.getpid()}-{self._count}-{name}" for name in ("upper", "work"))
            upper.mkdir()
            work.mkdir()
            layers.append((place, upper, work, os.open(self._lower[place].split(":")[-1], os.O_PATH)))
        room = Path(f"/proc/self/fd/{os.open(self._scratch, os.O_PATH)}")
        for place, upper, work, base in layers:
            names = self._lower[place].split(":")
            lower = ":".join([*(str(room / Path(name).name) for name in names[:-1]), f"/proc/self/fd/{base}"])
            try:
                options = f"lowerdir={lower},upperdir={room / upper.name},workdir={room / work.name},userxattr"
                _mount("overlay", place, "overlay", 0, options)
                self._lower[place] = f"{upper}:{self._lower[place]}"
            except OSError:
                if place in self._folders:
                    raise
                _mount(f"/proc/self/fd/{base}", place, "", _BIND | _RECURSIVE)
                _mount("none", place, "", _BIND | _REMOUNT | _READ_ONLY)
        os.chdir(here)


def _mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return [line.split(" ")[4].replace("\\040", " ") for line in lines]


def _below(place: str, folder: Path) -> bool:
    return Path(place) != folder and Path(place).is_relative_to(folder)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(code: int, what: str) -> None:
    if code != 0:
        number = ctypes.get_errno() or errno.EPERM
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, place: Path, kind: str, flags: int, options: str = "") -> None:
    words = [each.encode() if each else None for each in (source, str(place), kind)]
    code = _libc().mount(*words, ctypes.c_ulong(flags), options.encode() if options else None)
    _check(code, f"mount {place}")


def _loopback() -> None:
    """Switch on the network of this machine with itself, in a namespace that has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, _SET_FLAGS, struct.pack("16sh", b"lo", _UP) + bytes(22))


def lead_tree() -> None:
    """Make this process the one that its whole tree ends with: a session of its own, and no orphans leave it."""
    with contextlib.suppress(OSError, AttributeError):
        os.setsid()
    if sys.platform == "linux":
        _libc().prctl(_SUBREAPER, 1, 0, 0, 0)
        _libc().prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def die_with_parent() -> None:
    """Let the system end this process when the one that started it ends."""
    if sys.platform == "linux":
        _libc().prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def end_tree(process: int, *, itself: bool = True) -> None:
    """End a process and everything that it has started, also what is started meanwhile; waits for none of it."""
    with contextlib.suppress(psutil.Error):
        lead = psutil.Process(process)
        if itself:
            # It starts nothing more, and as long as it is there what it started is found below it.
            lead.suspend()
        for _ in range(_ROUNDS):
            below = [each for each in lead.children(recursive=True) if _alive(each)]
            for each in below:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            if not below:
                break
        if itself:
            lead.kill()


def _alive(process: psutil.Process) -> bool:
    """Return whether a process runs: one that has ended is there until its parent asks for it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def tree_use(process: int) -> tuple[int, int]:
    """Return the bytes of memory that a process and all below it hold alone, and how many they are."""
    total = count = 0
    with contextlib.suppress(psutil.Error):
        lead = psutil.Process(process)
        for each in [lead, *lead.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                held = each.memory_info()
                total, count = total + held.rss - getattr(held, "shared", 0), count + 1
    return total, count


def silence(handle: int) -> None:
    """Send what is printed elsewhere, and let nothing be typed."""
    speak(handle, handle)


def speak(out: int, err: int) -> None:
    """Send what is printed to these handles, and let nothing be typed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    for number, handle in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(handle, number)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)  # noqa: SIM115
