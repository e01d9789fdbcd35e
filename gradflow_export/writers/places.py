"""Directories and files that writers write to: probed when constructed, whole after a failure."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from gradflow_export.errors import StorageError


def prepare_directory(path: str | os.PathLike[str], who: str) -> Path:
    """Create a directory and prove that a file can be written in it.

    Args:
        path: The directory; parents are created.
        who: Name of the writer, for the message.

    Returns:
        The directory.

    Raises:
        StorageError: It is no local path, cannot be created, or cannot be written to.
    """
    text = os.fspath(path)
    if "://" in text:
        raise StorageError(
            f"{who} expects a local directory, got the address {text!r}; write to a local directory and copy it, "
            "or mount the remote one."
        )
    directory = Path(text)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise StorageError(
            f"{who} expects a directory it can write to, got {text!r}: {error.strerror or error}; "
            "pass another logdir, or free space and check permissions there."
        ) from error
    return directory


class AppendFile:
    """One open file that is appended to, and that a failed write leaves as it was before.

    Args:
        path: The file; created when it does not exist.
        fresh: Whether it must not exist yet.

    Raises:
        OSError: The file cannot be opened, or exists though it must not.
    """

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        self._descriptor: int | None = self._opened(path, os.O_CREAT | (os.O_EXCL if fresh else 0))
        found = os.fstat(self._descriptor)
        self._identity = found.st_dev, found.st_ino
        self._end = found.st_size
        try:
            self._mend()
        except OSError:
            self.close()
            raise

    @staticmethod
    def _opened(path: Path, flags: int) -> int:
        return os.open(path, os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0) | flags, 0o644)

    def _mend(self) -> None:
        """End a line that a kill or a full disk cut short, which must not swallow the next one."""
        if self._descriptor is not None and self._end:
            os.lseek(self._descriptor, self._end - 1, os.SEEK_SET)
            if os.read(self._descriptor, 1) != b"\n":
                self.append(b"\n")

    @property
    def gone(self) -> bool:
        """Whether the file was removed, or cut by somebody else; one that was moved is still there."""
        if self._descriptor is None:
            return False
        found = os.fstat(self._descriptor)
        return found.st_nlink == 0 or found.st_size < self._end

    def append(self, data: bytes) -> None:
        """Write all of ``data``, or nothing.

        Raises:
            OSError: The disk is full or gone. The file is cut back to what it was, unless others append to it too.
        """
        if self._descriptor is None:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self._cut_back(len(data) - len(rest))
            raise
        self._end = os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def _cut_back(self, written: int) -> None:
        assert self._descriptor is not None
        with contextlib.suppress(OSError):  # the first error is the one to report
            end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            if written and os.fstat(self._descriptor).st_size == end:
                os.ftruncate(self._descriptor, end - written)

    def reopened(self, *, exclusive: bool) -> AppendFile:
        """Return the file that stands at the path now, ready to go on where this one ended.

        Args:
            exclusive: Whether nobody else appends to it, so that what stands behind that is cut off.

        Raises:
            FileNotFoundError: There is none, or another one.
            OSError: It cannot be opened or cut.
        """
        again = object.__new__(AppendFile)
        again.path, again._identity, again._end = self.path, self._identity, self._end
        again._descriptor = descriptor = self._opened(self.path, 0)
        try:
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) != self._identity or found.st_size < self._end:
                raise FileNotFoundError(f"{self.path} is another file by now")
            if exclusive:
                os.ftruncate(descriptor, self._end)
            else:
                again._end = found.st_size
                again._mend()
        except OSError:
            again.close()
            raise
        return again

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):  # a disk that fails now has failed before
                os.close(descriptor)


class DraftFile:
    """A file of what waits for another one, in case the process ends before; a disk that fails costs only that.

    Args:
        path: The file; created by the first draft, removed by :meth:`close`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._empty = True

    @property
    def path(self) -> Path | None:
        """The file, ``None`` while it holds nothing."""
        return None if self._empty else self._path

    def add(self, data: bytes) -> None:
        """Append a draft."""
        try:
            if self._descriptor is not None and not os.fstat(self._descriptor).st_nlink:
                self._shut()
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | getattr(os, "O_BINARY", 0)
                self._descriptor = os.open(self._path, flags, 0o644)
            self._empty = False
            os.write(self._descriptor, data)
        except OSError:
            self._shut()

    def clear(self) -> None:
        """Forget the drafts: what they hold stands in the other file."""
        if self._descriptor is not None and not self._empty:
            try:
                os.ftruncate(self._descriptor, 0)
                self._empty = True
            except OSError:
                self._shut()

    def close(self) -> None:
        """Remove the file."""
        self._shut()
        if not self._empty or self._path.exists():
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _shut(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
