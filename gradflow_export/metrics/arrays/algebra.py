"""Linear algebra for the worker thread, beside a training thread that keeps every core busy."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.hooks import torch_private

Floats = npt.NDArray[np.float64]


def use_one_thread() -> None:
    """Have torch use no thread but the calling one, in what this thread calls from now on.

    Helpers of a second team find no core while training has them all: those who wait for them, and spin meanwhile, took
    a hundred times as long for the spectra of small matrices, and training with them. Other threads keep their number.
    """
    torch.get_num_threads()  # has the count of this thread set up, which would undo ours later
    try:
        library = ctypes.CDLL(torch_private.library())  # finds what it is linked with, wherever that lies
    except (OSError, AttributeError):  # torch is no library of its own here; what follows is a matter of cost alone
        return
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        if hasattr(library, name):  # builds with another pool have neither
            getattr(library, name)(ctypes.c_int(1))


def singular_values(matrix: npt.NDArray[np.floating]) -> Floats:
    """Return the singular values, greatest first.

    NumPy's own go by a pool of threads that cannot be kept away from one thread's calls; torch's can. The same
    holds for what else is here.

    Args:
        matrix: Finite. Shape: ``[m, n]``.

    Returns:
        Shape: ``[min(m, n)]``. Unit: that of the entries.

    Source: Golub and Van Loan 2013, Matrix Computations, section 8.6.
    """
    return np.asarray(torch.linalg.svdvals(_tensor(matrix)).numpy(), dtype=np.float64)


def eigenvalues(matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.complex128]:
    """Return the eigenvalues, in no order.

    Args:
        matrix: Finite. Shape: ``[n, n]``.

    Returns:
        Shape: ``[n]``. Unit: that of the entries.

    Source: Golub and Van Loan 2013, Matrix Computations, section 7.5.
    """
    return np.asarray(torch.linalg.eigvals(_tensor(matrix)).numpy(), dtype=np.complex128)


def eigenvectors(matrix: Floats) -> tuple[Floats, Floats]:
    """Return the eigenvalues of a symmetric matrix, least first, and its orthonormal eigenvectors.

    Args:
        matrix: Symmetric and finite. Shape: ``[n, n]``.

    Returns:
        Values and vectors, one in each column. Shape: ``[n]`` and ``[n, n]``. Unit of the values: that of the entries.

    Source: Golub and Van Loan 2013, Matrix Computations, section 8.3.
    """
    values, vectors = torch.linalg.eigh(_tensor(matrix))
    return np.asarray(values.numpy(), dtype=np.float64), np.asarray(vectors.numpy(), dtype=np.float64)


def product(a: Floats, b: Floats) -> Floats:
    """Return ``a @ b``.

    Args:
        a: Shape: ``[m, n]``.
        b: Shape: ``[n, k]`` or ``[n]``.

    Returns:
        Shape: ``[m, k]`` or ``[m]``.
    """
    # Into memory of NumPy's: torch asks for aligned blocks, which the C library (before glibc 2.38) does not use again
    # once something small lies between them, so that the memory of the process grew with every product.
    out = np.empty((*a.shape[:1], *b.shape[1:]))
    torch.matmul(_tensor(a), _tensor(b), out=torch.from_numpy(out))
    return out


def inverse(matrix: Floats) -> Floats:
    """Return the inverse of a symmetric matrix that is positive definite.

    Args:
        matrix: Finite. Shape: ``[n, n]``.

    Returns:
        Shape: ``[n, n]``.

    Source: Golub and Van Loan 2013, Matrix Computations, section 4.2.
    """
    return np.asarray(torch.cholesky_inverse(torch.linalg.cholesky(_tensor(matrix))).numpy(), dtype=np.float64)


def least_squares(a: Floats, b: Floats) -> Floats:
    """Return the ``x`` of least norm that minimises ``||a x - b||``.

    Args:
        a: Shape: ``[m, n]``.
        b: Shape: ``[m, k]``.

    Returns:
        Shape: ``[n, k]``.

    Source: Golub and Van Loan 2013, Matrix Computations, section 5.5.
    """
    found = torch.linalg.lstsq(_tensor(a), _tensor(b), driver="gelsd")
    return np.asarray(found.solution.numpy(), dtype=np.float64)


def _tensor(array: npt.NDArray[np.floating]) -> Tensor:
    # torch takes no array that is read backwards, and warns of one that may not be written to, also where nobody does.
    plain = array.flags.writeable and min(array.strides) >= 0
    return torch.from_numpy(array if plain else array.copy())
