"""``python -m gradflow_export.cli`` is the same as ``gradflow``."""

from gradflow_export.cli import command

command()
