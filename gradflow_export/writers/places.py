"""Directories and files that writers write to: probed when constructed, whole after a failure."""

from __future__ import annotations

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
        StorageError: The file cannot be opened, or exists though it must not.
    """

    def __init__(self, path: Path, *, fresh: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_EXCL if fresh else 0) | getattr(os, "O_BINARY", 0)
        self.path = path
        try:
            self._descriptor: int | None = os.open(path, flags, 0o644)
        except OSError as error:
            raise StorageError(
                f"expected to {'create' if fresh else 'append to'} {str(path)!r}, got: {error.strerror or error}; "
                "give each session and each writer a file of its own in a directory that can be written to."
            ) from error
        self._size = os.fstat(self._descriptor).st_size
        if self._size and self._last_byte() != b"\n":
            self.append(b"\n")  # a line that a kill cut short must not swallow the next one

    def _last_byte(self) -> bytes:
        assert self._descriptor is not None
        os.lseek(self._descriptor, -1, os.SEEK_END)
        return os.read(self._descriptor, 1)

    def append(self, data: bytes) -> None:
        """Write all of ``data``, or nothing.

        Raises:
            OSError: The disk is full or gone. The file is cut back to what it was and closed for good.
        """
        if self._descriptor is None:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self._cut_back()
            raise
        self._size += len(data)

    def _cut_back(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        assert descriptor is not None
        # The first error is the one to report; a partial tail is skipped by every reader anyway.
        try:
            os.ftruncate(descriptor, self._size)
        except OSError:
            pass
        finally:
            os.close(descriptor)

    @property
    def closed(self) -> bool:
        """Whether nothing will be written any more."""
        return self._descriptor is None

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
