"""Runs programs as ``python -c`` does, each in a fork of one process that has imported torch and nothing of ours.

Most of what a short program costs is the import of torch, and of its compiler, which the first optimizer imports. A
program ends as any other: with what is called at exit, its traceback and its exit status.
"""

import gc
import importlib
import json
import os
import random
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Program:
    """A program that was started; what it writes goes to files."""

    pid: int
    folder: Path
    programs: "Programs" = field(repr=False)

    def wait(self):
        """Return the exit status, negative for a signal, once the program has ended."""
        return self.programs.ask({"wait": self.pid})

    @property
    def out(self):
        """What it wrote to standard output so far."""
        return self._written("1")

    @property
    def err(self):
        """What it wrote to standard error so far."""
        return self._written("2")

    def _written(self, name):
        """Return what a file of the program holds; nothing where the program has not begun yet."""
        file = self.folder / name
        return file.read_text(encoding="utf-8") if file.exists() else ""


class Programs:
    """Starts programs, out of a process that is started with the first of them."""

    def __init__(self, make_folder):
        self._make_folder, self._server = make_folder, None

    def start(self, code, *words, cwd=None, env=None):
        """Start a program with its arguments, in a folder and an environment."""
        if self._server is None:
            pipe = subprocess.PIPE
            self._server = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True)
        folder = self._make_folder()
        job = {
            "code": code, "words": [str(word) for word in words], "folder": str(folder), "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
        }  # fmt: skip
        return Program(self.ask(job), folder, self)

    def ask(self, job):
        """Hand a line over; return the answer."""
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self):
        """End the process; programs that nobody waited for go on."""
        if self._server is not None:
            with self._server:
                self._server.stdin.close()


def serve():
    """Answer until the input ends; return None then, and in each fork the job that it has to do."""
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        if "wait" in job:
            answer = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
        elif (answer := os.fork()) == 0:
            return job
        print(answer, flush=True)
    return None


def become(job):
    """Make this process that of a program: its streams, environment, folder, arguments and random numbers."""
    for descriptor, name in enumerate(("/dev/null", f"{job['folder']}/1", f"{job['folder']}/2")):
        opened = os.open(name, (os.O_WRONLY if descriptor else os.O_RDONLY) | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.argv[:] = ["-c", *job["words"]]
    random.seed()
    importlib.import_module("numpy").random.seed()
    sys.modules["__main__"] = types.ModuleType("__main__")


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()  # what all programs share is looked through, and copied for that, by none
    task = serve()
    if task is not None:
        become(task)
        exec(compile(task["code"], "<string>", "exec"), vars(sys.modules["__main__"]))
