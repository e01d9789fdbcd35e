"""What an exporter is in a notebook: the panel in a cell, and metrics as data frames."""

from __future__ import annotations

import contextlib
import importlib
import queue
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gradflow_export.errors import ArgumentError, MissingPackageError, StorageError, nearest
from gradflow_export.records.step_record import RUN_SITE, StepRecord

START_SECONDS = 60.0
"""How long the panel's server may take to start."""


class Panel:
    """The panel over a folder, served from a process of its own on this machine's loopback address.

    It ends with this process, whatever ends that, or when the object is gone. A notebook shows it as a frame.

    Args:
        logdir: A folder of runs, or a run's folder.
        height: Of the frame, in pixels.

    Raises:
        StorageError: The server does not start.
    """

    def __init__(self, logdir: Path, height: int) -> None:
        self.height = height
        command = [sys.executable, "-m", "gradflow_export", "view", str(logdir), "--port", "0", "--until-eof"]
        self._process = subprocess.Popen(  # noqa: S603 - our own command line
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        # Closing its input ends it: that happens too when this process is killed.
        self.close = weakref.finalize(self, _end, self._process)
        said: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_pass_on, args=(self._process, said), daemon=True).start()
        with contextlib.suppress(queue.Empty):
            line = said.get(timeout=START_SECONDS)
            found = re.search(r"http://\S+", line)
            if found:
                self.address = found[0]
                return
            self.close()
            raise StorageError(f"show expects a folder that the panel can be served from, got: {line.strip()}")
        self.close()
        raise StorageError(f"the panel did not start within {START_SECONDS:.0f} s; run: gradflow view {logdir}")

    @property
    def alive(self) -> bool:
        """Whether it is still served."""
        return self._process.poll() is None

    def __repr__(self) -> str:
        """Return where it is."""
        return f"GradFlow panel at {self.address}"

    def _repr_html_(self) -> str:
        return (
            f'<iframe src="{self.address}" width="100%" height="{self.height}" style="border:1px solid #8884"></iframe>'
        )


def _pass_on(process: subprocess.Popen[str], said: queue.Queue[str]) -> None:
    assert process.stdout is not None
    said.put(process.stdout.readline())
    for _ in process.stdout:  # a full pipe would stop the server
        pass


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(Exception):
        assert process.stdin is not None
        process.stdin.close()
        process.wait(5)
    if process.poll() is None:
        process.kill()


def to_frame(records: Iterable[StepRecord], metric: str) -> Any:
    """Return one metric as a pandas DataFrame: a row for each step that has it, a column for each site.

    Args:
        records: In step order.
        metric: A name of the catalogue.

    Raises:
        ArgumentError: No record has it; the message names the nearest that was recorded.
        MissingPackageError: pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise MissingPackageError(
            "to_pandas expects pandas, which is not installed; run: pip install pandas"
        ) from error
    known: set[str] = set()
    rows: dict[int, dict[str, float]] = {}
    for record in records:
        known.update(record.metrics)
        reading = record.get(metric)
        if reading is not None:
            values = np.where(reading.present, reading.values, np.nan).tolist()
            rows[record.step] = {site or metric: value for site, value in zip(reading.sites, values, strict=True)}
    if not rows:
        raise ArgumentError(f"no record has the metric {metric!r}{nearest(metric, known)}")
    columns = list(dict.fromkeys(site for row in rows.values() for site in row))
    assert RUN_SITE not in columns
    frame = pandas.DataFrame.from_dict(rows, orient="index", columns=columns)
    return frame.rename_axis("step")
