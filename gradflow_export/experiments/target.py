"""What is examined: a script, a module or a notebook, with its arguments; and how it is run as ``__main__``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import random
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from gradflow_export.errors import ArgumentError

leave = os._exit
"""Ends this process at once, also where the program's own ``os._exit`` only ends the program."""
NOTEBOOK = ".ipynb"
CELL = "#cell"
"""What stands between the file of a notebook and the number of a cell in the name of its code."""
AROUND = frozenset({"time", "timeit", "capture", "prun"})
"""Commands of IPython around Python code, which runs without them as well."""
SEEDS = 1_000_003
"""What the seeds of a script are moved by, for each further seed of ours."""


@dataclass(frozen=True)
class Target:
    """A program and its arguments.

    Attributes:
        path: File of a script or notebook.
        module: Name after ``-m``, empty for a file.
        words: Its arguments.
    """

    path: Path
    module: str = ""
    words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How it is called in a report."""
        return f"-m {self.module}" if self.module else str(self.path)

    @property
    def folder(self) -> Path:
        """The folder that Python puts in front of the search path."""
        return Path.cwd() if self.module else self.path.resolve().parent


def module_target(name: str, words: tuple[str, ...]) -> Target:
    """Return the target for ``python -m name``.

    Args:
        name: The module or package, found from the current folder on.
        words: Its arguments.

    Raises:
        ArgumentError: There is no such module.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = _find(name)
        if found is not None and found.submodule_search_locations is not None:
            found = _find(f"{name}.__main__")
    finally:
        sys.path.pop(0)
    if found is None or not found.origin:
        raise ArgumentError(
            f"-m expects a module that can be imported from {Path.cwd()}, got {name!r}; run gradflow doctor in the "
            f"folder where `python -m {name}` works."
        )
    return Target(Path(found.origin), name, words)


def _find(name: str) -> ModuleSpec | None:
    """Return where a module lies; nothing is imported, for the code of the packages around it may write files."""
    found: ModuleSpec | None = None
    path: Sequence[str] | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        if count > 1 and path is None:
            return None
        whole = ".".join(parts[:count])
        found = next((spec for each in sys.meta_path if (spec := each.find_spec(whole, path)) is not None), None)
        if found is None:
            return None
        path = found.submodule_search_locations
    return found


def run_target(target: Target) -> None:
    """Run it in this process as its own program; what it raises, this raises.

    Where it ends its process at once, it ends as by ``sys.exit``: what was seen of it is still to be reported.
    """
    sys.argv = [str(target.path), *target.words]
    sys.path.insert(0, str(target.folder))
    belongs()
    try:
        _run(target)
    finally:
        os._exit = leave


def belongs() -> None:
    """Take this process, which may be forked while the program runs, for the one that the program runs in."""
    os._exit = functools.partial(_exits, os.getpid())


def _exits(program: int, status: int) -> NoReturn:
    # What the program forks, and what watches it from another thread, ends as it wants.
    if program != os.getpid() or threading.current_thread() is not threading.main_thread():
        leave(status)
    raise SystemExit(status)


def _run(target: Target) -> None:
    if target.module:
        runpy.run_module(target.module, run_name="__main__", alter_sys=True)
    elif target.path.suffix == NOTEBOOK:
        _run_notebook(target.path)
    else:
        runpy.run_path(str(target.path.resolve()), run_name="__main__")


def _run_notebook(path: Path) -> None:
    """Run the code cells of a notebook, one after the other, without lines for the shell or for IPython."""
    main = ModuleType("__main__")
    names = {"display": _ignored, "get_ipython": lambda: None}
    main.__dict__.update(names, __file__=str(path.resolve()), __builtins__=__builtins__)
    sys.modules["__main__"] = main
    for number, source in enumerate(cells(path), start=1):
        exec(compile(source, f"{path.resolve()}{CELL}{number}", "exec"), main.__dict__)  # noqa: S102 - it is asked for


def cells(path: Path) -> list[str]:
    """Return the code of a notebook's cells.

    Raises:
        ArgumentError: The file is no notebook.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"doctor expects a notebook of Jupyter's format 4, got {str(path)!r}, which holds none ({error!r}); "
            "open it in Jupyter and save it anew."
        ) from error
    return ["\n".join(map(_plain, source.split("\n"))) if _is_python(source) else "" for source in sources]


def _is_python(source: str) -> bool:
    """Return whether a cell is Python; one that is for another interpreter says so in its first line."""
    first = source.lstrip().partition("\n")[0].rstrip()
    return not first.startswith("%%") or first[2:].partition(" ")[0] in AROUND


def _plain(line: str) -> str:
    """Return a line of a cell, ``pass`` where it is for the shell or for IPython."""
    words = line.lstrip()
    if words[:1] not in {"%", "!"}:
        return line
    name, _, code = words.lstrip("%").partition(" ")
    rest = code if name in AROUND and not words.startswith("%%") and not code.startswith("-") else ""
    return line[: len(line) - len(words)] + (rest or "pass")


def told(raised: BaseException, target: Target) -> str:
    """Return what Python prints of an error, from the first line of the program on."""
    own = str(target.path.resolve())
    left: TracebackType | None = raised.__traceback__
    while left is not None and left.tb_frame.f_code.co_filename.partition(CELL)[0] != own:
        left = left.tb_next
    return "".join(traceback.format_exception(type(raised), raised, left))


def seed(number: int) -> None:
    """Seed every generator, and move each seed that the program sets by the number.

    Args:
        number: 0 leaves the program's own seeds as they are.
    """
    # A report of what was interrupted while torch was imported must not import it.
    torch: Any = importlib.import_module("torch")
    # Forked from a process with a pool of threads, more than one would wait for the others for ever.
    torch.set_num_threads(1)
    torch.set_num_threads = _ignored
    random.seed(number)
    torch.manual_seed(number)
    random.seed = _moved(random.seed, number)
    torch.manual_seed = _moved(torch.manual_seed, number)
    torch.random.manual_seed = torch.manual_seed
    numpy = sys.modules.get("numpy")
    with contextlib.suppress(AttributeError):
        if numpy is not None:
            numpy.random.seed(number)
            numpy.random.seed = _moved(numpy.random.seed, number)
            numpy.random.default_rng = _moved(numpy.random.default_rng, number)


def _ignored(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing."""


def _moved(plain: Callable[..., Any], number: int) -> Callable[..., Any]:
    def seeded(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        chosen = seed + number * SEEDS if isinstance(seed, int) else seed
        return plain(number if chosen is None else chosen, *args, **kwargs)

    return seeded
