"""Functions of torch whose arguments an intervention may change, and doors that it may hold open for gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributions
from torch.nn import functional
from torch.utils import checkpoint

from gradflow_export.experiments.interventions import Intervention
from gradflow_export.experiments.mending.batches import BLANKED, INDEX, PICKED, REORDERED
from gradflow_export.experiments.mending.labels import CASTS, MARGINS, PRODUCTS
from gradflow_export.experiments.mending.losses import ACTIVATIONS, LOSSES, RATES
from gradflow_export.experiments.mending.passages import ARRAYS, FLAT, NORMS, SUMS, OpenPassages
from gradflow_export.experiments.mending.samples import REDUCED
from gradflow_export.experiments.mending.scores import CLAMPS, FLATTENED
from gradflow_export.experiments.mending.sequences import ATTENTION

OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Folders whose code keeps its ``no_grad`` and ``detach``: torch's and ours."""
_DECORATED = "_contextlib.py"


class ReplacedFunctions:
    """Stands before some functions of torch.

    Args:
        active: Returns the interventions that are active.
        inside: Whether a model is being called with gradients.
    """

    def __init__(self, active: Callable[[], Sequence[Intervention]], inside: Callable[[], bool]) -> None:
        self._active, self._inside = active, inside

    def attach(self) -> None:
        """Begin; there is no end, but that of the process."""
        for owner, names in (
            (functional, (*LOSSES, RATES, *MARGINS, *ATTENTION, *NORMS, *ACTIVATIONS)),
            (torch, ("softmax", "log_softmax", "sub", "mul", "add", PICKED, *ACTIVATIONS, *CLAMPS, *FLAT)),
            (Tensor, ("softmax", "log_softmax", "sub", "__sub__", "__rsub__", *PRODUCTS, *CASTS, *SUMS, *ACTIVATIONS)),
            (Tensor, ("backward", PICKED, *CLAMPS, *FLATTENED, *FLAT)),
            (Tensor, (REORDERED | BLANKED) - PRODUCTS - {INDEX}),
            (torch, ARRAYS | (REORDERED | BLANKED) - PRODUCTS),
            (checkpoint, ("checkpoint",)),
        ):
            for name in set(names).intersection(dir(owner)):
                setattr(owner, name, self._before(name, getattr(owner, name)))
        # TorchScript knows torch.mean and torch.sum by what they are.
        for name in (INDEX, *REDUCED):
            setattr(Tensor, name, self._of_scripts(name, getattr(Tensor, name)))
        Tensor.numpy = self._numbered(Tensor.numpy, Tensor.detach)  # type: ignore[method-assign]
        # What a layer does to the numbers of its own weights has no gradient on purpose.
        numbers: Any = Tensor.data
        Tensor.data = property(self._detached(numbers.__get__, leaves=False), numbers.__set__)  # type: ignore[assignment]
        Tensor.detach = self._detached(Tensor.detach)
        torch.no_grad.__enter__ = self._entered(torch.no_grad.__enter__)  # type: ignore[method-assign]
        torch.set_grad_enabled.__init__ = self._switched(torch.set_grad_enabled.__init__)  # type: ignore[method-assign]
        for kind in vars(distributions).values():
            if isinstance(kind, type) and issubclass(kind, distributions.Distribution) and "sample" in vars(kind):
                kind.sample = self._sampled(kind.sample)  # type: ignore[method-assign]

    def _before(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def function(*args: Any, **kwargs: Any) -> Any:
            for each in self._active():
                args, kwargs = each.function(name, args, kwargs)
            given = plain(*args, **kwargs)
            for each in self._active():
                given = each.result(name, args, kwargs, given)
            return given

        return function

    def _of_scripts(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Torch, and what watches, index and reduce tensors of their own."""
        changed = self._before(name, plain)

        @functools.wraps(plain)
        def function(*args: Any, **kwargs: Any) -> Any:
            own = sys._getframe(1).f_code.co_filename.startswith(OWN)  # noqa: SLF001 - no public form
            return plain(*args, **kwargs) if own else changed(*args, **kwargs)

        return function

    def _open(self) -> bool:
        """Return whether the code that calls holds gradients back within a model, and shall not."""
        opening = [each for each in self._active() if each.opens]
        if not opening or not self._inside():
            return False
        frame: Any = sys._getframe(2)  # noqa: SLF001 - no public form
        if frame.f_code.co_filename.endswith(_DECORATED):
            frame = frame.f_back
            frame = frame.f_back if frame is not None and frame.f_code.co_filename.endswith(_DECORATED) else frame
        if frame is None or frame.f_code.co_filename.startswith(OWN):
            return False
        for each in opening:
            each.acted = True
        return True

    def _detached(self, plain: Callable[..., Tensor], *, leaves: bool = True) -> Callable[..., Tensor]:
        def detach(tensor: Tensor) -> Tensor:
            held = tensor.requires_grad and (leaves or not tensor.is_leaf)
            return tensor if held and (self._open() or self._handed(tensor)) else plain(tensor)

        return detach

    def _numbered(self, plain: Callable[..., Any], detached: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        def numpy(tensor: Tensor, **options: Any) -> Any:
            opened = tensor.requires_grad and self._open()
            for each in self._active() if opened else ():
                if isinstance(each, OpenPassages):
                    each.remember(tensor)
            return plain(detached(tensor) if opened else tensor, **options)

        return numpy

    def _handed(self, tensor: Tensor) -> bool:
        """Return whether the script holds back what a model of which nothing is trained has given."""
        own = sys._getframe(2).f_code.co_filename.startswith(OWN)  # noqa: SLF001 - no public form
        return not own and any(isinstance(each, OpenPassages) and each.handed(tensor) for each in self._active())

    def _entered(self, plain: Callable[..., None]) -> Callable[..., None]:
        # TorchScript compiles no_grad() by this name and source.
        @functools.wraps(plain)
        def enter(context: Any) -> None:
            opened = self._open()
            plain(context)
            if opened:
                torch.set_grad_enabled(context.prev)

        return enter

    def _switched(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def switch(context: Any, mode: bool) -> None:
            plain(context, mode or (torch.is_grad_enabled() and self._open()))

        return switch

    def _sampled(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def sample(given: Any, *args: Any, **kwargs: Any) -> Tensor:
            opening = [each for each in self._active() if each.opens]
            if not opening or not torch.is_grad_enabled() or not given.has_rsample:
                return plain(given, *args, **kwargs)
            for each in opening:
                each.acted = True
            drawn: Tensor = given.rsample(*args, **kwargs)
            return drawn

        return sample
