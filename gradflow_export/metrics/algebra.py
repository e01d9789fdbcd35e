"""Linear algebra for the worker thread, beside a training thread that keeps every core busy."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]


def use_one_thread() -> None:
    """Have torch use no thread but the calling one, in what this thread calls from now on.

    Helpers of a second team find no core while training has them all: those who wait for them, and spin meanwhile, took
    a hundred times as long for the spectra of small matrices, and training with them. Other threads keep their number.
    """
    torch.get_num_threads()  # has the count of this thread set up, which would undo ours later
    try:
        library = ctypes.CDLL(torch._C.__file__)  # noqa: SLF001 - finds what it is linked with, wherever that lies
    except (OSError, AttributeError):  # torch is no library of its own here; what follows is a matter of cost alone
        return
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        if hasattr(library, name):  # builds with another pool have neither
            getattr(library, name)(ctypes.c_int(1))


def singular_values(matrix: Floats) -> Floats:
    """Return the singular values, greatest first.

    NumPy's own go by a pool of threads that cannot be told to stay away from one thread's calls; torch's can.

    Args:
        matrix: Finite. Shape: ``[m, n]``.

    Returns:
        Shape: ``[min(m, n)]``. Unit: that of the entries.

    Source: Golub and Van Loan 2013, Matrix Computations, section 8.6.
    """
    return np.asarray(torch.linalg.svdvals(torch.from_numpy(matrix)).numpy(), dtype=np.float64)
