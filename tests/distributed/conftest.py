"""Processes that train together over gloo; what each of them saw."""

import os
import pickle
import socket
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "job.py"
TOGETHER = (
    "ddp", "ddp clipped", "fsdp", "fsdp clipped", "tensor parallel", "mixed", "ddp unwatched", "fsdp unwatched",
    "tensor parallel unwatched", "ddp nan", "gathering nan", "fsdp nan", "drift", "ddp every", "fsdp every",
    "ddp players", "fsdp players", "ddp one step", "ddp failing",
)  # fmt: skip


def start(programs, folder, names, count=2):
    """Run scenarios in some processes; return what each pickled, by scenario and rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRADFLOW_VERBOSE": "0"}
    # Nobody else gets a port that is bound, and the store, which reuses addresses, may listen there meanwhile.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        store = f"127.0.0.1:{held.getsockname()[1]}"
        done = programs.start(JOB.read_text(encoding="utf-8"), count, store, folder, *names, env=environment)
        assert done.wait() == 0, done.err
    return {
        name: {
            rank: pickle.loads(path.read_bytes()) for rank in range(2) if (path := saved(folder, name, rank)).exists()
        }
        for name in names
    }


def saved(folder, name, rank):
    return folder / f"{name}.{rank}.pickle"


@pytest.fixture(scope="session")
def together(programs, tmp_path_factory):
    """Return what the ranks saw in every scenario in which all stay; of four, the first two."""
    two = start(programs, tmp_path_factory.mktemp("two"), TOGETHER)
    return two | start(programs, tmp_path_factory.mktemp("four"), ["two-dimensional"], count=4)


@pytest.fixture
def leaving(programs, tmp_path):
    """Return a function that runs one scenario in which a rank leaves."""
    return lambda name: start(programs, tmp_path, [name])[name]
