"""``gradflow view`` and ``gradflow snapshot``: the panel without TensorBoard, served or as one file; no torch."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gradflow_export.cli.folders import check_folder, no_run

PORT = 6008


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to the parser."""
    view = commands.add_parser("view", help="show runs in a browser on this machine, without TensorBoard")
    view.add_argument("logdir", type=Path, help="a run's folder, or a folder of runs")
    view.add_argument(
        "--port", type=_port, default=PORT, help="port to listen on; 0 for a free port (default: %(default)s)"
    )
    # For a notebook, whose end closes the pipe.
    view.add_argument("--until-eof", action="store_true", help=argparse.SUPPRESS)
    view.set_defaults(run=run_view)
    snapshot = commands.add_parser("snapshot", help="write runs and the panel into one HTML file")
    snapshot.add_argument("logdir", type=Path, help="a run's folder, or a folder of runs")
    snapshot.add_argument("out", type=Path, help="the HTML file to write")
    snapshot.set_defaults(run=run_snapshot)


def run_view(args: argparse.Namespace) -> int:
    """Serve until interrupted; 2 when the port cannot be used."""
    from tensorboard_plugin_gradflow.standalone import make_server

    check_folder(args.logdir)
    try:
        with _bar(args.logdir) as show:
            server = make_server(args.logdir, args.port, show)
    except OSError as error:
        sys.stderr.write(f"gradflow: port {args.port} cannot be used ({error}); choose another one, or --port 0\n")
        return 2
    print(f"GradFlow shows {args.logdir} at http://localhost:{server.port}/ (Ctrl+C stops it)", flush=True)
    if args.until_eof:
        threading.Thread(target=_stop_at_eof, args=(server,), daemon=True).start()
    try:
        server.serve_forever()
    finally:
        server.server_close()
    return 0


def _stop_at_eof(server: Any) -> None:
    """Stop serving when the process that started this one has closed its end of the pipe, or is no more."""
    while sys.stdin.read(4096):
        pass
    server.shutdown()


def run_snapshot(args: argparse.Namespace) -> int:
    """Write the file; 2 when it cannot be written."""
    from tensorboard_plugin_gradflow.snapshot import render_snapshot
    from tensorboard_plugin_gradflow.standalone import open_source

    check_folder(args.logdir)
    with _bar(args.logdir) as show:
        source = open_source(args.logdir, show)
    if not source.indexes():
        raise no_run(args.logdir)
    try:
        args.out.write_text(
            render_snapshot(source, f"GradFlow: {args.logdir.name}", logdir=args.logdir), encoding="utf-8"
        )
    except OSError as error:
        sys.stderr.write(
            f"gradflow: snapshot expects a file to write to, got {str(args.out)!r}: {error.strerror}; choose another\n"
        )
        return 2
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")
    return 0


@contextlib.contextmanager
def _bar(logdir: Path) -> Iterator[Callable[[int, int], None]]:
    """Show how much of a log is read: not for what takes no time, nor where standard error is no terminal."""
    name = f"reading {logdir.name or logdir}"
    with tqdm(desc=name, unit="B", unit_scale=True, delay=0.3, leave=False, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _port(text: str) -> int:
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return number
