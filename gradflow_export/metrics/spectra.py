"""Spectral radius and norm of a square matrix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradflow_export.metrics.arrays.algebra import eigenvalues

Floats = npt.NDArray[np.float64]

DENSE = 128
"""Widest matrix whose eigenvalues are all taken."""
KRYLOV = 20
"""Directions of one Arnoldi factorisation."""
RESTARTS = 30


def spectral_radius(matrix: Floats, dense: int = DENSE, tolerance: float = 1e-4) -> float:
    """Return the greatest ``|eigenvalue|``.

    Power iteration with a Rayleigh quotient would give the real part of a complex pair; this takes all eigenvalues of a
    small matrix, and restarted Arnoldi, whose Ritz values may be complex, of a wide one.

    Args:
        matrix: Finite. Shape: ``[n, n]``.
        dense: Widest matrix whose eigenvalues are all taken.
        tolerance: Relative residual at which Arnoldi stops; after ``RESTARTS`` the best estimate is returned.

    Source: Saad 2011, Numerical Methods for Large Eigenvalue Problems, section 6.4.
    """
    size = len(matrix)
    if size <= max(dense, KRYLOV + 2):
        return float(np.abs(eigenvalues(matrix)).max()) if size else 0.0
    start = np.random.default_rng(0).standard_normal(size)
    best = 0.0
    for _ in range(RESTARTS):
        basis, projected, rest = _arnoldi(matrix, start)
        values, vectors = np.linalg.eig(projected)
        first = int(np.abs(values).argmax())
        best = float(np.abs(values[first]))
        if best == 0.0 or rest * abs(vectors[-1, first]) <= tolerance * best:
            break
        # Several leading Ritz vectors: the real and imaginary parts of a complex pair both stay in the space.
        leading = np.argsort(-np.abs(values))[: KRYLOV // 4]
        ritz = basis @ vectors[:, leading]
        start = (ritz.real + ritz.imag).sum(axis=1)
    return best


def _arnoldi(matrix: Floats, start: Floats) -> tuple[Floats, Floats, float]:
    """Return an orthonormal basis, the matrix projected on it, and the norm of what leaves it."""
    basis = np.zeros((len(matrix), KRYLOV))
    projected = np.zeros((KRYLOV, KRYLOV))
    basis[:, 0] = start / np.linalg.norm(start)
    rest = 0.0
    for k in range(KRYLOV):
        image = matrix @ basis[:, k]
        for _ in range(2):  # orthogonalised twice: once loses digits
            overlap = basis[:, : k + 1].T @ image
            projected[: k + 1, k] += overlap
            image = image - basis[:, : k + 1] @ overlap
        rest = float(np.linalg.norm(image))
        if rest <= 1e-14 * float(np.abs(projected).max(initial=0.0)):
            return basis[:, : k + 1], projected[: k + 1, : k + 1], 0.0
        if k + 1 < KRYLOV:
            projected[k + 1, k] = rest
            basis[:, k + 1] = image / rest
    return basis, projected, rest


def spectral_norm(matrix: Floats, rounds: int = 30) -> float:
    """Return the greatest singular value, from below, by power iteration on ``A^T A`` (symmetric, hence safe).

    Args:
        matrix: Finite. Shape: ``[m, n]``.
        rounds: Iterations; the relative error falls with the square of the gap at each.
    """
    direction = np.random.default_rng(0).standard_normal(matrix.shape[1])
    size = 0.0
    for _ in range(rounds):
        image = matrix @ (direction / np.linalg.norm(direction))
        size = float(np.linalg.norm(image))
        if size == 0.0:
            return 0.0
        direction = matrix.T @ image
    return size
