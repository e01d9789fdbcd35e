"""The ``gradflow`` command (floor 4): train a demo, report on a run or show it, check an installation, list metrics."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

from gradflow_export.cli.dashboard import add_parser as add_dashboard
from gradflow_export.cli.demo import add_parser as add_demo
from gradflow_export.cli.doctor import add_parser as add_doctor
from gradflow_export.cli.export import add_parser as add_export
from gradflow_export.cli.replay import add_parser as add_replay
from gradflow_export.cli.report import add_parser as add_report
from gradflow_export.cli.rule import add_parser as add_rule
from gradflow_export.cli.schema import add_parser as add_schema
from gradflow_export.cli.view import add_parser as add_view
from gradflow_export.errors import GradflowError

STOPPED = 128
"""What is added to the number of the signal that ended it, as shells do: 130 after Ctrl-C."""


def command() -> NoReturn:
    """Be the ``gradflow`` command: end this process with the status of :func:`main`."""
    _write_anything()
    code = main()
    if code > STOPPED:
        # Python takes every module apart before it ends, which with torch takes seconds where the machine is busy.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    try:
        sys.stdout.flush()
    except OSError:
        _write_nothing()
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one ``gradflow`` command.

    Args:
        argv: The words after ``gradflow``; those of this process when ``None``.

    Returns:
        0 when it worked, 1 when it found a fault, 2 when it was called wrongly or could not read or write, 130 when it
        was interrupted.
    """
    args = make_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except GradflowError as error:
        sys.stderr.write(f"gradflow: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("gradflow: stopped\n")
        return STOPPED + signal.SIGINT
    except BrokenPipeError:
        # The reader of a pipe went away (`gradflow report runs | head`); what is left in the buffer has no reader.
        _write_nothing()
        return 0
    except OSError as error:
        sys.stderr.write(f"gradflow: {error}\n")
        return 2
    return code


def _write_anything() -> None:
    """Have names be written that the terminal's encoding lacks, and to nowhere what a closed output would be given."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _write_nothing() -> None:
    """Lose what is left in the buffer, which Python would try to write once more at its end."""
    with contextlib.suppress(OSError):  # a stream without a number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]  # noqa: SLF001 - the way argparse has
    """Commands whose own ``--help`` says what the list of all says of them."""

    def add_parser(self, name: str, **given: Any) -> argparse.ArgumentParser:
        """Return the parser of one command."""
        line = given["help"]
        made: argparse.ArgumentParser = super().add_parser(
            name, **{"description": f"{line[0].upper()}{line[1:]}."} | given
        )
        return made


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the ``gradflow`` command, with all of its commands."""
    parser = argparse.ArgumentParser(
        prog="gradflow", description="Monitor training health of PyTorch models: which layer does not learn, and why."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('gradflow-export')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", action=_Commands)
    for add_parser in (
        add_demo,
        add_report,
        add_doctor,
        add_replay,
        add_export,
        add_dashboard,
        add_schema,
        add_rule,
        add_view,
    ):
        add_parser(commands)
    return parser
