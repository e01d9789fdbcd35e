"""One program of a corpus as a script: ``python doctor_case.py SET NAME FORM``, for ``benchmarks/doctor.py``.

SET is a part of ``benchmarks/silent`` (dev, heldout, second, third), a half of the generator (development, unseen), or
the path of a module with ``CASES``, each with ``build()`` that returns a program of ``steps`` calls of
``step(number)``. A generated program is named by its number, with a mistake by ``number:mistake``.
"""

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

GENERATED = ("development", "unseen")
"""Halves of the generator."""
SEED = 0
"""Of a generated program."""


def loaded(path):
    """Return the module in a file."""
    spec = importlib.util.spec_from_file_location("programs_of_others", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main():
    part, name, form = sys.argv[1:4]
    warnings.simplefilter("ignore")
    if part.endswith(".py"):
        program = next(case for case in loaded(part).CASES if case.name == name).build()
        for step in range(max(program.steps, 80)):
            program.step(step)
        return
    if part in GENERATED:
        mutation = importlib.import_module("mutation")
        number, _, mistake = name.partition(":")
        program, _ = mutation.made(part, int(number), mistake, SEED)
        mutation.half(part).programs.train(program)
        return
    half = importlib.import_module(f"silent.{part}")
    if form == "healthy":
        program = next(case for case in half.HEALTHY if case.name == name).build(0)
    else:
        program = next(case for case in half.BUGS if case.name == name).build(form == "mended", 0)
    program.train()


if __name__ == "__main__":
    main()
