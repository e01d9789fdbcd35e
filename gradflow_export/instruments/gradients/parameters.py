"""Gradients exactly as the optimizer will use them: norms every step, entry statistics and samples now and then."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradflow_export.hooks.optimizer_steps import OptimizerStep, Owned, only_reads
from gradflow_export.hooks.readings import Drained, Pending, Sample, Unread, join_scalars
from gradflow_export.instruments.gradients.reader import Floats, GradientReader, Sketch
from gradflow_export.instruments.path import PathInstrument
from gradflow_export.metrics.arrays.entries import ENTRY_STATISTICS, entry_statistics
from gradflow_export.metrics.arrays.local import local
from gradflow_export.metrics.arrays.norms import l2_norms
from gradflow_export.metrics.arrays.samples import even_sample
from gradflow_export.metrics.direction import Products, cosine_of, gradient_pieces, products
from gradflow_export.records.catalog import MetricSpec, spec
from gradflow_export.records.step_record import RUN_SITE

HISTOGRAMS = 16
"""Parameters whose histograms are taken, evenly from first to last."""
FLAGGED = 8
"""Parameters of layers that have an issue, of which histograms are taken besides."""
_GOLDEN = 0.6180339887498949
HISTOGRAM_ENTRIES = 4096


def by_depth(places: Sequence[int], most: int) -> list[int]:
    """Choose some of a row, evenly from first to last: of as many equal parts of it one each.

    Where in its part one lies changes from part to part, by squares times the golden ratio: equal distances would hit
    the same member of every block of a model whose blocks are as long as they.

    Args:
        places: In depth order.
        most: How many at most.
    """
    if len(places) <= most:
        return list(places)
    edges = [part * len(places) // most for part in range(most + 1)] if most > 0 else [0]
    parts = enumerate(itertools.pairwise(edges))
    return [places[begin + int((part * part * _GOLDEN) % 1.0 * (end - begin))] for part, (begin, end) in parts]


class GradientInstrument:
    """Reads ``.grad`` of the parameters an optimizer owns, once per optimizer step."""

    def __init__(self) -> None:
        self._previous: weakref.WeakKeyDictionary[object, tuple[Tensor, bytes]]
        self._previous = weakref.WeakKeyDictionary()
        self._products: weakref.WeakKeyDictionary[object, tuple[Products, frozenset[int]]]
        self._products = weakref.WeakKeyDictionary()
        self._readers: weakref.WeakKeyDictionary[object, GradientReader] = weakref.WeakKeyDictionary()
        self._first: weakref.ref[object] | None = None
        self._several = False
        self._path = PathInstrument()
        self._out: Drained = []
        self._norms: Tensor | Floats | None = None
        self._later: GradientReader | None = None
        self._changed: weakref.WeakSet[object] = weakref.WeakSet()
        self.flagged: dict[str, None] = {}
        """Layers that have an issue, the newest last."""
        self.total: float | None = None
        """Their sum, where it is known without a look at the device."""
        self.arrived = 0
        """How many gradients the optimizer had that was read last."""

    @property
    def specs(self) -> tuple[MetricSpec, ...]:
        """The metrics this instrument can give out."""
        names = ("gradient_norm", "gradient_l1", "gradient_linf", "gradient_mean", "zero_share", "nonfinite")
        whole = (spec(f"gradient.{name}") for name in ("cosine", "cosine_error", "loss_scale"))
        return (*(spec(f"parameter.{name}") for name in names), *whole, *self._path.specs)

    @property
    def waits(self) -> bool:
        """Whether norms are still being read, and :meth:`end` must be called when the optimizer has stepped."""
        return self._later is not None

    def read(self, step: OptimizerStep, *, statistics: bool, histograms: bool, later: bool = False) -> None:
        """Take the gradients of one optimizer.

        Args:
            step: The optimizer, its parameters and the scale its gradients still carry.
            statistics: Whether to take L1, Linf, mean, zero share and non-finite counts too.
            histograms: Whether to take samples for histograms of gradients and weights.
            later: Whether all may be read while the optimizer steps, if that is known to only read gradients.
        """
        self._norms = self.total = self._later = None
        self.arrived = 0
        if step.loss_scale is not None:  # a copy: the scaler changes it in place
            self._out.append(Pending("gradient.loss_scale", (RUN_SITE,), step.loss_scale.detach().reshape(1).clone()))
        sketch = self._sketch(step, everything=statistics, later=later)
        if sketch is None:
            self._read_by_torch(step, statistics=statistics)
        elif self._later is None and len(sketch.rows) == 1 and not self._several:
            self._take_whole(step, sketch)
        else:
            self._take_samples(step, sketch)
            if self._later is None:
                self._take_rows(step, sketch)
        if histograms:
            with torch.no_grad():
                self._take_histograms(step)

    def take_norms(self) -> Tensor | None:
        """Give out the norms of the gradients read last, in the order of the parameters that have one, once."""
        norms, self._norms = self._norms, None
        return torch.from_numpy(norms) if isinstance(norms, np.ndarray) else norms

    def end(self, step: OptimizerStep) -> None:
        """Take what was left for after the optimizer's step; nothing where somebody has changed the gradients."""
        reader, self._later = self._later, None
        sketch = reader.end() if reader is not None else None
        if sketch is not None:
            self._take_rows(step, sketch)
        else:
            self._changed.add(step.optimizer)

    def _sketch(self, step: OptimizerStep, *, everything: bool, later: bool) -> Sketch | None:
        """Read all by one call; ``None`` where torch must do it."""
        if step.scale is not None or not isinstance(step.optimizer, Optimizer):
            return None
        reader = self._readers.get(step.optimizer)
        if reader is None or reader.owned is not step.owned:
            reader = self._readers[step.optimizer] = GradientReader(step.owned, self._path.followed(step))
        later = later and reader.long and step.optimizer not in self._changed and only_reads(step.optimizer)
        sketch = reader.read(everything=everything, later=later)
        if sketch is not None:
            self.arrived, self._later = len(sketch.where), reader if sketch.total is None else None
        return sketch

    def _take_whole(self, step: OptimizerStep, sketch: Sketch) -> None:
        """Take what nearly every step reads: norms, products and path of the only optimizer there has been."""
        self._first = self._first or weakref.ref(step.optimizer)
        if self._first() is not step.optimizer:
            self._several = True
            self._take_samples(step, sketch)
            self._take_rows(step, sketch)
            return
        path = None if step.closure else sketch.path
        items = partial(_items, step.owned, sketch, self._path, path)
        self._norms, self.total = sketch.rows[0], sketch.total
        self._out.append(Unread("parameter.gradient_norm", RUN_SITE, self._norms, items=items))

    def _take_samples(self, step: OptimizerStep, sketch: Sketch) -> None:
        if sketch.path is not None and not step.closure:
            self._out.append(self._path.sample(step.owned, sketch.path))

    def _take_rows(self, step: OptimizerStep, sketch: Sketch) -> None:
        self._take_products(step, sketch.products)
        norms, sites, where = sketch.rows[0], step.owned.sites, sketch.where
        self._out.append(Pending("parameter.gradient_norm", sites, norms, where))
        if len(sketch.rows) > 1:
            self._give_statistics(step, sketch.rows[1:], where)
        self._norms, self.total = norms, sketch.total

    def _read_by_torch(self, step: OptimizerStep, *, statistics: bool) -> None:
        owned = step.owned
        gradients = [p.grad for p in owned.parameters]
        arrived = [g for g in gradients if g is not None]
        if set(map(type, arrived)) != {Tensor}:
            arrived = [local(g) for g in arrived]
        self.arrived = len(arrived)
        if not arrived:
            return
        where = owned.where
        if len(arrived) < len(gradients):
            where = where[[g is not None for g in gradients]]
        with torch.no_grad():
            rows = None
            if statistics:
                norms, rows = entry_statistics(arrived)
            else:
                norms = l2_norms(arrived)
            if step.scale is not None:
                norms = norms / step.scale.to(norms)
            self._out.append(Pending("parameter.gradient_norm", owned.sites, norms, where))
            self._take_direction(step, arrived, where.tobytes())
            self._out.extend(self._path.read(step))
            if rows is not None:
                if step.scale is not None:
                    rows[:3] /= step.scale.to(rows)
                self._give_statistics(step, rows, where)
        self._norms = norms

    def drain(self) -> Drained:
        """Give out what was read since the last call, some of it for the worker to take apart."""
        out, self._out = self._out, []
        return out

    def forget(self, optimizer: object) -> None:
        """Forget what was read for a step that was skipped."""
        self._out, self._later = [], None
        if self._first is not None and self._first() is optimizer:
            self._first = None
        self._previous.pop(optimizer, None)
        self._products.pop(optimizer, None)
        if optimizer in self._readers:
            self._readers[optimizer].forget()

    def _take_direction(self, step: OptimizerStep, gradients: list[Tensor], where: bytes) -> None:
        if any(g.layout is not torch.strided or g.device != gradients[0].device for g in gradients):
            return
        now, weights = gradient_pieces(gradients)
        before, earlier = self._previous.get(step.optimizer, (None, b""))
        # Of one gradient alone it may be a view of what the next step writes to.
        self._previous[step.optimizer] = now.clone() if len(gradients) == 1 else now, where
        if before is not None and earlier == where and before.shape == now.shape and before.device == now.device:
            self._take_products(step, Products(products(before, now.to(before.dtype), weights)))
        else:
            self._take_products(step, None)

    def _take_products(self, step: OptimizerStep, own: Products | None) -> None:
        # The optimizers of one record make one gradient; each one's cosine replaces that of those before it. Those that
        # share parameters take turns, and make a record each.
        optimizer = step.optimizer
        self._first = self._first or weakref.ref(optimizer)
        self._several = self._several or self._first() is not optimizer
        if self._several and any(not step.owned.places.isdisjoint(places) for _, places in self._products.values()):
            self._products.clear()
        if own is None:
            return
        whole = [own]
        if self._several:
            self._products[optimizer] = own, step.owned.places
            whole = [products for products, _ in self._products.values()]
        self._out.extend(_cosine(whole))

    def _give_statistics(self, step: OptimizerStep, rows: Tensor | Floats, where: npt.NDArray[np.int64]) -> None:
        names = {"l1": "gradient_l1", "linf": "gradient_linf", "mean": "gradient_mean"}
        for row, name in zip(rows, ENTRY_STATISTICS, strict=True):
            self._out.append(Pending(f"parameter.{names.get(name, name)}", step.owned.sites, row, where))

    def _shown(self, owned: Owned) -> list[int]:
        """Return the parameters whose histograms are taken: some of every depth, and those of layers with an issue."""
        sites = [owned.sites[where] for where in owned.where]
        matrices = [place for place, parameter in enumerate(owned.parameters) if parameter.dim() > 1]
        rest = [place for place, parameter in enumerate(owned.parameters) if parameter.dim() <= 1]
        chosen = by_depth(matrices, HISTOGRAMS)
        chosen += by_depth(rest, HISTOGRAMS - len(chosen))
        inside = (
            place
            for layer in reversed(self.flagged)
            for place, site in enumerate(sites)
            if (site == layer or site.startswith(f"{layer}.")) and place not in chosen
        )
        return sorted({*chosen, *itertools.islice(dict.fromkeys(inside), FLAGGED)})

    def _take_histograms(self, step: OptimizerStep) -> None:
        owned = step.owned
        for index in self._shown(owned):
            parameter, site = owned.parameters[index], owned.sites[owned.where[index]]
            gradient = parameter.grad
            for metric, tensor in (("parameter.gradient", gradient), ("parameter.weight", parameter)):
                if tensor is not None and tensor.layout is torch.strided and not tensor.is_complex():
                    # A copy, of float64 too: the optimizer is about to change what lies there.
                    sample = even_sample(tensor, HISTOGRAM_ENTRIES).to(torch.float64, copy=True)
                    if tensor is gradient and step.scale is not None:
                        sample /= step.scale.to(sample)
                    self._out.append(Sample(metric, site, sample))


def _cosine(products_of: Sequence[Products]) -> Drained:
    """Return the cosine of the gradients of some optimizers together, and its error where it has one."""
    value, error = cosine_of(products_of)
    out: Drained = [Pending("gradient.cosine", (RUN_SITE,), join_scalars([value]))]
    if not all(part.exact for part in products_of):
        out.append(Pending("gradient.cosine_error", (RUN_SITE,), join_scalars([error])))
    return out


def _items(owned: Owned, sketch: Sketch, paths: PathInstrument, path: Floats | None) -> Drained:
    out: Drained = [] if path is None else [paths.sample(owned, path)]
    if sketch.products is not None:
        out.extend(_cosine([sketch.products]))
    out.append(Pending("parameter.gradient_norm", owned.sites, sketch.rows[0], sketch.where))
    return out
