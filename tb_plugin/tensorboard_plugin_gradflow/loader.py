"""What TensorBoard imports first: an exception here would stop all of TensorBoard, so almost nothing is imported."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from tensorboard.plugins import base_plugin

_ALL_RECORDS = 0


class GradflowLoader(base_plugin.TBLoader):  # type: ignore[misc]
    """Loads the plugin, or leaves TensorBoard alone with one line in its log."""

    def fix_flags(self, flags: argparse.Namespace) -> None:
        """Ask TensorBoard to keep every record of this plugin unless the user said otherwise.

        Args:
            flags: TensorBoard's parsed flags; ``samples_per_plugin`` is changed in place.
        """
        samples = getattr(flags, "samples_per_plugin", None)
        if isinstance(samples, dict):
            samples.setdefault("gradflow", _ALL_RECORDS)

    def load(self, context: base_plugin.TBContext) -> Any:
        """Return the plugin, or ``None`` when anything it needs cannot be imported.

        Args:
            context: What TensorBoard gives to every plugin.
        """
        try:
            from tensorboard_plugin_gradflow.plugin import GradflowPlugin  # noqa: PLC0415

            return GradflowPlugin(context)
        except Exception as error:
            logging.getLogger("tensorboard").warning(
                "The GradFlow tab is not available (%s: %s); the rest of TensorBoard is not affected. "
                "Reinstall gradflow-export to repair it.",
                type(error).__name__,
                error,
            )
            return None
