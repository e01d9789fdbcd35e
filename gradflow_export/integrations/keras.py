"""Keras 3 on its torch backend."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, final

from torch import nn

from gradflow_export.errors import ArgumentError
from gradflow_export.integrations.base import Session, needed

with needed("keras"):
    import keras


class _Layers(nn.Module):
    """Holds the layers of a Keras model, which torch does not find there: Keras keeps them in lists of its own.

    Layers have their names in Keras; those of a model within the model stand below its name.

    Args:
        model: A built model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        for layer in model.layers:
            if not layer.weights:  # of a layer of dropout the state of its random numbers is a variable
                continue
            nested = isinstance(layer, keras.Model) and layer.layers
            name = layer.name
            while name in self._modules:
                name += "_"
            # Not by add_module(), which takes no layer that has the name of a method.
            self._modules[name] = _Layers(layer) if nested else layer
        known = {id(parameter) for parameter in self.parameters()}
        loose = {variable.path: variable.value for variable in model.weights if id(variable.value) not in known}
        if loose:
            self._modules["variables"] = nn.ParameterDict(loose)


@final
class GradFlowCallback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]  # keras is untyped
    """Watches a model while it is fitted: ``model.fit(..., callbacks=[GradFlowCallback()])``.

    Steps are ``optimizer.iterations``, which go on over several calls of ``fit`` and after loading. Gradients are those
    of the batch, before Keras averages or clips them. Blocks are layers, by their names in Keras. ``gradflow/health``
    is in the history of each epoch.

    Args:
        logdir: Directory for files; by default that of :class:`~gradflow_export.Exporter`.
        stop_on: Types of issues at which fitting stops, such as ``("NUMERICAL", "EXPLODING")``.
        **options: Arguments of :class:`~gradflow_export.Exporter` and of its ``watch``.

    Raises:
        ArgumentError: ``stop_on`` names an unknown type, or Keras runs on another backend than torch.
    """

    def __init__(
        self, logdir: str | os.PathLike[str] | None = None, *, stop_on: Sequence[str] = (), **options: Any
    ) -> None:
        super().__init__()
        if keras.config.backend() != "torch":
            raise ArgumentError(
                f"this callback expects Keras on torch, got {keras.config.backend()}; set KERAS_BACKEND=torch before "
                "keras is imported."
            )
        self.session = Session(stop_on, options)
        self._logdir = logdir
        self._layers: nn.Module | None = None  # nobody else holds what is watched

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin."""
        run = getattr(sys.modules.get("wandb"), "run", None)
        self._layers = type(type(self.model).__name__, (_Layers,), {})(self.model)  # the report names the user's class
        self.session.start(self._layers, logdir=self._logdir, step=int(self.model.optimizer.iterations), run=run)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End a step: the optimizer is none of torch."""
        if self.session.exporter is not None:
            self.session.exporter.step()
        if self.session.wants_stop():
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the health to the row of the epoch."""
        if logs is not None:
            logs.update(self.session.logs())

    def on_train_end(self, logs: Any = None) -> None:
        """Close."""
        self.session.close()
