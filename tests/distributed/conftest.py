"""Processes that train together over gloo; what each of them saw."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "job.py"
TOGETHER = (
    "ddp", "ddp clipped", "fsdp", "fsdp clipped", "tensor parallel", "mixed", "ddp unwatched", "fsdp unwatched",
    "tensor parallel unwatched", "ddp nan", "gathering nan", "fsdp nan", "drift", "ddp every", "fsdp every",
    "ddp players", "fsdp players", "ddp one step",
)  # fmt: skip


def start(folder, names, count=2):
    """Run scenarios in some processes; return what each pickled, by scenario and rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRADFLOW_VERBOSE": "0"}
    # Nobody else gets a port that is bound, and the store, which reuses addresses, may listen there meanwhile.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        store = f"127.0.0.1:{held.getsockname()[1]}"
        words = [sys.executable, str(JOB), str(count), store, str(folder), *names]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    return {
        name: {
            rank: pickle.loads(path.read_bytes()) for rank in range(2) if (path := saved(folder, name, rank)).exists()
        }
        for name in names
    }


def saved(folder, name, rank):
    return folder / f"{name}.{rank}.pickle"


@pytest.fixture(scope="session")
def together(tmp_path_factory):
    """Return what the ranks saw in every scenario in which all stay; of four, the first two."""
    two = start(tmp_path_factory.mktemp("two"), TOGETHER)
    return two | start(tmp_path_factory.mktemp("four"), ["two-dimensional"], count=4)


@pytest.fixture
def leaving(tmp_path):
    """Return a function that runs one scenario in which a rank leaves."""
    return lambda name: start(tmp_path, [name])[name]
