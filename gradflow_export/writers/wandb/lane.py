"""A lane of its own for what may wait for the network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final


@final
class Lane:
    """Does one thing at a time on a thread of its own; what comes meanwhile takes the place of what waits.

    W&B makes an artifact of each table and asks the server about its type while ``run.log`` waits: 20 s and more when
    the server is in trouble. Rows of numbers, the user's thread and the end of a run must not wait for that.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: Callable[[], object] | None = None
        self._busy = False

    def put(self, call: Callable[[], object]) -> None:
        """Have something done, soon; it must not raise."""
        with self._changed:
            self._next = call
            if self._busy:
                return
            self._busy = True
        try:
            threading.Thread(target=self._run, name="gradflow-wandb-tables", daemon=True).start()
        except RuntimeError:  # the interpreter ends and starts no threads any more
            self._run()

    def wait(self, seconds: float) -> bool:
        """Wait until nothing is being done; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                call, self._next = self._next, None
                if call is None:
                    self._busy = False
                    self._changed.notify_all()
                    return
            call()
