"""Whether verdicts depend on what things are called: programs run as they are, and with random names.

Every class and attribute of a program's modules gets a random name: what torch itself names (``weight`` of a linear
layer, places in lists) stays. Issues must be the same, names translated back::

    python benchmarks/renamed.py                 # one program in 14, spread over all corpora
    python benchmarks/renamed.py --every 1       # all of them
    python benchmarks/renamed.py --only experts

A line per program whose issues differ, and 1 at the end where there is one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import string
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import unchanged
from torch import nn
from tqdm import tqdm

EVERY = 14
"""One of so many programs runs by default."""

Said = dict[str, Any]


class Renaming:
    """Gives classes and attributes of modules random names; programs still reach attributes by their own.

    Args:
        seed: Decides the names.

    Attributes:
        back: What each random name stands for.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.back: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._classes: dict[type, type] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Rename everything in a model, in place."""
        for module in list(model.modules()):
            own = not type(module).__module__.startswith("torch.")
            if own or isinstance(module, (nn.ModuleDict, nn.Sequential, nn.ParameterDict)):
                self._rename(module)
        return model

    def named(self, block: Any) -> Any:
        """Return the new name of what has a name."""
        if not isinstance(block, str):
            return block
        return ".".join(self._names.get(part, part) for part in block.split("."))

    def translate(self, text: str) -> str:
        """Return a text with the names that it had before."""
        return re.sub(r"\bq[a-z]{11}\b", lambda found: self.back.get(found[0], found[0]), text)

    def _rename(self, module: nn.Module) -> None:
        for held in (module._modules, module._parameters, module._buffers):  # noqa: SLF001 - there is no other way
            items = list(held.items())
            held.clear()
            for key, value in items:
                held[key if key.isdigit() else self._name(key)] = value
        module.__class__ = self._class(type(module))

    def _name(self, old: str) -> str:
        if old not in self._names:
            new = "q" + "".join(self._random.choices(string.ascii_lowercase, k=11))
            self._names[old], self.back[new] = new, old
        return self._names[old]

    def _class(self, kind: type) -> type:
        if kind not in self._classes:
            names = self._names

            def find(self: Any, name: str) -> Any:
                return kind.__getattr__(self, names.get(name, name))  # type: ignore[attr-defined]

            def put(self: Any, name: str, value: Any) -> None:
                kind.__setattr__(self, names[name] if name in names and name not in vars(self) else name, value)

            def item(self: Any, key: Any) -> Any:
                return kind.__getitem__(self, names.get(key, key) if isinstance(key, str) else key)  # type: ignore[attr-defined]

            def give(self: Any, *args: Any, **kwargs: Any) -> Any:
                state = kind.state_dict(self, *args, **kwargs)  # type: ignore[attr-defined]
                inner = args or kwargs.get("destination") is not None  # what holds this one translates
                return state if inner else {self._plainly(key): value for key, value in state.items()}

            def load(self: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
                state = {self._named(key): value for key, value in state.items()}
                return kind.load_state_dict(self, state, *args, **kwargs)  # type: ignore[attr-defined]

            body: dict[str, Any] = {"__getattr__": find, "__setattr__": put, "__module__": kind.__module__}
            body |= {"state_dict": give, "load_state_dict": load}
            body |= {"_plainly": staticmethod(self.translate), "_named": staticmethod(self.named)}
            if hasattr(kind, "__getitem__"):
                body["__getitem__"] = item
            self._classes[kind] = type(self._name(kind.__name__), (kind,), body)
        return self._classes[kind]


def issues(run: Callable[[], Said], seed: int | None) -> list[str]:
    """Run a program of :mod:`unchanged`; return its issues, with the names that it has in its source.

    Args:
        run: Runs it.
        seed: Of the random names; ``None`` keeps those that it has.
    """
    renaming, watched = Renaming(seed or 0), unchanged.watched

    def renamed(model: Any, *args: Any, **watch: Any) -> Said:
        if seed is not None:
            renaming.apply(model)
            if watch.get("blocks"):
                watch["blocks"] = [renaming.named(block) for block in watch["blocks"]]
        return watched(model, *args, **watch)

    unchanged.watched = renamed
    try:
        return sorted(renaming.translate(line) for line in run()["issues"])
    except Exception as error:  # a program that cannot run by other names is a difference, and the others are to run
        return [f"{type(error).__name__}: {error}"]
    finally:
        unchanged.watched = watched


def differences(task: unchanged.Task, seed: int = 1) -> tuple[str, list[str]]:
    """Return the name of a program, and what is said of it by one name only."""
    unchanged.quietly()
    name, run = task.args
    plain, other = issues(run, None), issues(run, seed)
    lost = [f"lost {line}" for line in plain if line not in other]
    return name, lost + [f"gained {line}" for line in other if line not in plain]


def programs(corpora: Sequence[Path], only: str, every: int) -> list[unchanged.Task]:
    """Return one of so many programs of :func:`unchanged.tasks`, without the tests."""
    found = [task for task in unchanged.tasks(corpora, only) if task.func is unchanged.one]
    return found[::every]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--corpus", type=Path, nargs="*", default=[], help="further corpora: Python files with CASES")
    parser.add_argument("--only", default="", help="only programs whose name contains this")
    parser.add_argument("--every", type=int, default=EVERY, help="one of so many programs")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    todo = programs(arguments.corpus, arguments.only, 1 if arguments.only else arguments.every)
    wrong = 0
    with multiprocessing.get_context("fork").Pool(arguments.processes, maxtasksperchild=1) as pool:
        for name, lines in tqdm(pool.imap_unordered(differences, todo), total=len(todo), disable=None):
            wrong += bool(lines)
            for line in lines:
                print(f"{name}: {line}", flush=True)
    print(f"{len(todo)} programs, {wrong} of which have other issues by other names")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
