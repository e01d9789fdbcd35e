"""Products with the Jacobian of a map, and what its eigenvalues and singular values tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradflow_export.autograd_graph.nodes import Op, kind_of, walk
from gradflow_export.errors import MissingPackageError
from gradflow_export.metrics.outputs import rank_of_spectrum

Floats = npt.NDArray[np.float64]
Complexes = npt.NDArray[np.complex128]

DENSE = 256
"""Dimension up to which a Jacobian is written out, so that its spectrum is exact."""

TOP = 6
POWERS = 20
PROBES = 16


class Linearized:
    """The Jacobian J of ``outputs`` by ``inputs``, through a graph that was recorded once.

    Going over one recorded pass again, instead of calling the map under ``torch.func.jvp`` for each product, keeps the
    masks of dropout and the batch statistics fixed, and counts a running mean once. ``J v`` is the derivative of
    ``J^T w`` by ``w``, so everything that can be differentiated twice in reverse mode is supported.

    Args:
        inputs: Tensors that the outputs depend on.
        outputs: Tensors, recorded with a graph.
    """

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._inputs = list(inputs)
        self._outputs = [out for out in outputs if out.requires_grad]
        self._slots = [out.requires_grad for out in outputs]
        self._sizes = [out.numel() for out in outputs]
        self._tangent: tuple[list[Tensor], list[Tensor]] | None = None
        self.rows, self.columns = sum(self._sizes), sum(i.numel() for i in self._inputs)

    def transposed(self, u: Tensor) -> Tensor:
        """Return ``J^T u``. Shape of ``u``: ``[rows]``; of the result: ``[columns]``."""
        return _flat(self._back(self._parts(u), create_graph=False), self._inputs)

    def apply(self, v: Tensor) -> Tensor:
        """Return ``J v``. Shape of ``v``: ``[columns]``; of the result: ``[rows]``."""
        if self._tangent is None:
            dummies = [torch.zeros_like(out, requires_grad=True) for out in self._outputs]
            self._tangent = dummies, self._back(dummies, create_graph=True)
            check_twice(self._tangent[1])
        dummies, pulled = self._tangent
        pieces = torch.split(v, [i.numel() for i in self._inputs])
        wanted = [(g, p.reshape(g.shape).to(g)) for g, p in zip(pulled, pieces, strict=True) if g.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(dummies)
        if wanted:
            found = torch.autograd.grad(
                [g for g, _ in wanted], dummies, [p for _, p in wanted], retain_graph=True, allow_unused=True
            )
        products = iter(found)
        rows = [next(products) if here else None for here in self._slots]
        return torch.cat(
            [v.new_zeros(size) if r is None else r.reshape(-1).to(v) for r, size in zip(rows, self._sizes, strict=True)]
        )

    def dense(self) -> Floats:
        """Return J itself, by one product for each row or column. Shape: ``[rows, columns]``."""
        like = self._inputs[0]
        if self.rows <= self.columns:
            unit = torch.eye(self.rows, dtype=like.dtype, device=like.device)
            return np.stack([_numpy(self.transposed(row)) for row in unit])
        unit = torch.eye(self.columns, dtype=like.dtype, device=like.device)
        return np.stack([_numpy(self.apply(column)) for column in unit], axis=1)

    def like(self, vector: npt.ArrayLike) -> Tensor:
        """Return a vector in the precision and on the device of the inputs."""
        return torch.as_tensor(np.asarray(vector)).to(self._inputs[0])

    def _parts(self, u: Tensor) -> list[Tensor]:
        pieces = torch.split(u, self._sizes)
        kept = [piece for piece, here in zip(pieces, self._slots, strict=True) if here]
        return [piece.reshape(out.shape).to(out) for piece, out in zip(kept, self._outputs, strict=True)]

    def _back(self, cotangents: list[Tensor], *, create_graph: bool) -> list[Tensor]:
        if not self._outputs:
            return [torch.zeros_like(i) for i in self._inputs]
        found = torch.autograd.grad(
            self._outputs, self._inputs, cotangents, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        return [torch.zeros_like(i) if g is None else g for g, i in zip(found, self._inputs, strict=True)]


def check_twice(gradients: Sequence[Tensor]) -> None:
    """Raise unless gradients may be differentiated again.

    PyTorch marks what may not be with a node of its own, beside the way to the parameters: asked for gradients that may
    be unused, it would pass by unnoticed and give zeros.

    Raises:
        RuntimeError: An operation has no second derivative.
    """
    if any(kind_of(node) == Op.ONCE for node in walk(g.grad_fn for g in gradients)):
        raise RuntimeError("an operation of the model is differentiable only once")


def _flat(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1).to(like[0]) for t in tensors])


def _numpy(tensor: Tensor) -> Floats:
    return np.asarray(tensor.detach().cpu().double().numpy(), dtype=np.float64)


@dataclass(frozen=True)
class Spectrum:
    """What a Jacobian does to what goes through it.

    Attributes:
        rows: Dimension of the output.
        columns: Dimension of the input.
        eigenvalues: By falling magnitude: all up to ``DENSE`` dimensions, else the ``TOP`` largest; empty unless the
            map is square. Shape: ``[k]``.
        spectral_radius: Largest magnitude of an eigenvalue; NaN unless the map is square.
        greatest: Largest singular value.
        condition: ``sigma_max / sigma_min``; with ``bounded``, a lower bound of it.
        bounded: Whether ``condition`` is ``sigma_max sqrt(d) / ||J||_F`` only.
        effective_rank: ``exp(H(sigma / sum sigma))``; NaN when the singular values are not known.
        stable_rank: ``||J||_F^2 / sigma_max^2``.
        gain: ``||J||_F / sqrt(columns)``: the root mean square singular value, for unit input.
        transient: ``max_k sigma_max(J^k) / rho^k`` over ``POWERS`` powers: how much a non-normal map amplifies before
            its eigenvalues take over; NaN unless square and written out.

    Source: Roy and Vetterli 2007, EUSIPCO; Pennington et al. 2017, arXiv:1711.04735; Trefethen and Embree 2005.
    """

    rows: int
    columns: int
    eigenvalues: Complexes
    spectral_radius: float
    greatest: float
    condition: float
    bounded: bool
    effective_rank: float
    stable_rank: float
    gain: float
    transient: float

    @property
    def outside(self) -> float:
        """Share of the known eigenvalues outside the unit circle, NaN without any."""
        return float(np.mean(np.abs(self.eigenvalues) > 1.0)) if self.eigenvalues.size else math.nan

    @property
    def greatest_angle(self) -> float:
        """Largest angle of a known eigenvalue with the real axis, in radians; NaN without any."""
        return float(np.max(np.abs(np.angle(self.eigenvalues)))) if self.eigenvalues.size else math.nan


def spectrum(jacobian: Linearized, dense: int = DENSE) -> Spectrum:
    """Return what the eigenvalues and singular values of a Jacobian tell.

    Up to ``dense`` dimensions the matrix is written out. Beyond, restarted Arnoldi (ARPACK through SciPy) works on
    products alone: power iteration with a Rayleigh quotient finds no complex pair.

    Raises:
        MissingPackageError: The map is larger and SciPy is not installed.

    Source: Lehoucq, Sorensen and Yang 1998, ARPACK Users' Guide.
    """
    if min(jacobian.rows, jacobian.columns) <= dense:
        return spectrum_of(jacobian.dense())
    return _matrix_free(jacobian)


def spectrum_of(matrix: Floats) -> Spectrum:
    """Return the spectrum of a matrix. Shape: ``[rows, columns]``; entries must be finite."""
    rows, columns = matrix.shape
    sigma: Floats = np.asarray(np.linalg.svd(matrix, compute_uv=False), dtype=np.float64)
    greatest, least = float(sigma[0]), float(sigma[-1])
    total = float(np.square(sigma).sum())
    values: Complexes = np.zeros(0, dtype=np.complex128)
    radius, transient = math.nan, math.nan
    if rows == columns:
        values = np.asarray(np.linalg.eigvals(matrix), dtype=np.complex128)
        values = values[np.argsort(-np.abs(values), kind="stable")]
        radius = float(np.abs(values[0]))
        transient = transient_growth(matrix, radius)
    return Spectrum(
        rows,
        columns,
        values,
        radius,
        greatest,
        greatest / least if least > 0 else math.inf,
        bounded=False,
        effective_rank=rank_of_spectrum(sigma),
        stable_rank=total / greatest**2 if greatest > 0 else 0.0,
        gain=math.sqrt(total / columns),
        transient=transient,
    )


def transient_growth(matrix: Floats, radius: float, powers: int = POWERS) -> float:
    """Return ``max_k sigma_max(J^k) / rho^k`` for ``k = 1 ... powers``; inf for a nilpotent matrix that is not 0.

    Args:
        matrix: Shape: ``[n, n]``.
        radius: Its spectral radius rho.
        powers: How many powers are looked at.
    """
    if radius <= 0.0:
        return math.inf if matrix.any() else 1.0
    scaled = matrix / radius
    power, most = np.eye(len(matrix)), 1.0
    for _ in range(powers):
        power = power @ scaled
        if not np.isfinite(power).all():
            return math.inf
        most = max(most, float(np.linalg.norm(power, 2)))
    return most


def _matrix_free(jacobian: Linearized) -> Spectrum:
    try:
        from scipy.sparse import linalg  # noqa: PLC0415 - an extra, wanted for large maps alone
    except ImportError as error:
        raise MissingPackageError(
            f"the Jacobian of a map with more than {DENSE} dimensions needs SciPy, which is not installed: "
            "pip install 'gradflow-export[analysis]'."
        ) from error
    rows, columns = jacobian.rows, jacobian.columns
    operator = linalg.LinearOperator(
        (rows, columns),
        matvec=lambda v: _numpy(jacobian.apply(jacobian.like(np.ravel(v)))),
        rmatvec=lambda u: _numpy(jacobian.transposed(jacobian.like(np.ravel(u)))),
        dtype=np.float64,
    )
    rng = np.random.default_rng(0)
    start = rng.standard_normal(min(rows, columns))
    greatest = float(linalg.svds(operator, k=1, v0=start, return_singular_vectors=False, tol=1e-4)[0])
    probes = rng.choice((-1.0, 1.0), size=(PROBES, rows))
    total = float(np.mean([np.square(operator.rmatvec(u)).sum() for u in probes]))
    values: Complexes = np.zeros(0, dtype=np.complex128)
    if rows == columns:
        found = linalg.eigs(operator, k=TOP, ncv=max(20, 4 * TOP), v0=start, return_eigenvectors=False, tol=1e-6)
        values = np.asarray(found[np.argsort(-np.abs(found), kind="stable")], dtype=np.complex128)
    return Spectrum(
        rows,
        columns,
        values,
        float(np.abs(values[0])) if values.size else math.nan,
        greatest,
        greatest * math.sqrt(min(rows, columns) / total) if total > 0 else math.inf,
        bounded=True,
        effective_rank=math.nan,
        stable_rank=total / greatest**2 if greatest > 0 else 0.0,
        gain=math.sqrt(total / columns),
        transient=math.nan,
    )
