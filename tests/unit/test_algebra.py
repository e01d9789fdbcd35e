"""Linear algebra beside a training thread."""

import ast
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import gradflow_export
from gradflow_export.metrics.arrays.algebra import (
    eigenvalues,
    eigenvectors,
    least_squares,
    product,
    singular_values,
    use_one_thread,
)


@pytest.fixture
def two_threads():
    """Two threads for torch, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def counts_in_a_thread(*calls):
    """Return how many threads torch uses in a new thread after each of the calls, and then here."""
    seen = []

    def run():
        for call in calls:
            call()
            seen.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return [*seen, torch.get_num_threads()]


def test_one_thread_is_enough_for_the_thread_that_says_so(two_threads):
    """The thread that asks computes alone from then on, whatever it computes first; the others keep their number."""
    alone = 1 if torch.backends.openmp.is_available() else 2
    work = torch.ones(500, 500).exp
    assert counts_in_a_thread(use_one_thread, work) == [alone, alone, 2]
    assert counts_in_a_thread(work, use_one_thread) == [2, alone, 2]
    assert counts_in_a_thread(work) == [2, 2]


def test_singular_values_are_those_of_numpy(two_threads):
    """Wide, tall, thin and rank-deficient matrices: the same values in the same order."""
    generator = np.random.default_rng(0)
    for m, n in ((5, 3), (3, 5), (40, 40), (1, 4), (300, 64)):
        matrix = generator.normal(size=(m, n)) * np.logspace(0, -6, n)
        matrix[:, -1] = matrix[:, 0]
        expected = np.linalg.svd(matrix, compute_uv=False)
        assert singular_values(matrix) == pytest.approx(expected, rel=1e-9, abs=1e-14 * expected[0])
    assert singular_values(np.zeros((0, 3))).shape == (0,)


def test_products_eigenvalues_and_least_squares_are_those_of_numpy(two_threads):
    """Also of transposed and reversed arrays, vectors, arrays that may not be written to, and systems without full rank."""
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(30, 8)), generator.normal(size=(30, 3))
    a[:, -1] = a[:, 0]
    a.setflags(write=False)
    assert product(a.T, b) == pytest.approx(a.T @ b, rel=1e-12)
    assert product(b[::-1].T, a[::-1]) == pytest.approx(b.T @ a, rel=1e-9)
    assert product(b.T, a[:, 0]) == pytest.approx(b.T @ a[:, 0], rel=1e-12)
    assert least_squares(a, b) == pytest.approx(np.linalg.lstsq(a, b, rcond=None)[0], rel=1e-9)
    square = generator.normal(size=(20, 20))
    assert np.sort_complex(eigenvalues(square)) == pytest.approx(np.sort_complex(np.linalg.eigvals(square)), rel=1e-9)


def test_eigenvectors_are_orthonormal_and_make_the_matrix_again(two_threads):
    """Of every size and rank: least value first, as NumPy has them."""
    generator = np.random.default_rng(0)
    for size, rank in ((1, 1), (5, 5), (64, 63), (64, 3)):
        rows = generator.normal(size=(size, rank))
        matrix = rows @ rows.T
        values, vectors = eigenvectors(matrix)
        assert values == pytest.approx(np.linalg.eigvalsh(matrix), rel=1e-9, abs=1e-12 * values[-1])
        assert vectors.T @ vectors == pytest.approx(np.eye(size), abs=1e-12)
        assert (vectors * values) @ vectors.T == pytest.approx(matrix, rel=1e-9, abs=1e-12 * values[-1])


DEAR = {"eig", "eigh", "eigvals", "eigvalsh", "inv", "lstsq", "pinv", "qr", "solve", "svd", "svdvals"}
OWN_PASSES = {"jacobian.py", "spectra.py"}
"""Of analyses that a user calls for, and of recurrent layers."""


def test_what_is_read_at_every_step_decomposes_no_matrix_by_numpy():
    """NumPy's threads would fight with those of training for the cores: forty milliseconds for half a one."""
    home = Path(gradflow_export.__file__).parent
    files = [path for folder in ("metrics", "engine", "instruments") for path in (home / folder).rglob("*.py")]
    assert len(files) > 50
    for path in files:
        found = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "np.linalg"
        }
        assert path.name in OWN_PASSES or found.isdisjoint(DEAR), path


def test_the_memory_of_products_is_used_again():
    """Matrices that come and go between small things that stay do not make the process grow: before, by 1 MB each."""
    x, kept, sizes = np.random.default_rng(0).standard_normal((256, 8)), [], []

    def work():
        for _ in range(60):
            once = product(x, x.T)
            twice = product(once, once)
            kept.extend([np.empty(100), *(torch.zeros(64) for _ in range(20))])
            del once
            kept.append(np.empty(500))
            del twice
            sizes.append(psutil.Process().memory_info().rss / 2**20)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(kept) == 60 * 22
    assert sizes[-1] - sizes[5] < 16
