"""Tensors that wait to be read together, so that one call of the C library serves many."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gradflow_export.metrics.local import PLAIN

BYTES = 2**19
"""Greatest size of all that waits: it is read while it is still in the processor's own cache, and holds no memory."""


class Waiting:
    """Holds tensors for a moment and has them read some at a time.

    What is changed in place meanwhile must not be read: the version that each tensor counts tells. So the first tensor
    of each site is read at once and looked at again later; only a site whose tensor then was as before may wait. One
    that changes later all the same is left out once, and never waits again.

    Args:
        read: Reads tensors of these sites.
    """

    def __init__(self, read: Callable[[Sequence[int], Sequence[Tensor]], None]) -> None:
        self._read = read
        self._held: list[tuple[int, Tensor, int, bool]] = []
        self._bytes = 0
        self._quiet: set[int] = set()
        self._changed: set[int] = set()

    def offer(self, site: int, tensor: Tensor) -> bool:
        """Take a tensor, to be read now or before long.

        Returns:
            False where it is not a plain tensor on the CPU, so that it must be read in another way.
        """
        if type(tensor) not in PLAIN or not tensor.is_cpu:
            return False
        quiet = site in self._quiet
        if not quiet:
            self._read([site], [tensor])
            if site in self._changed:
                return True
        self._held.append((site, tensor, tensor._version, quiet))  # noqa: SLF001 - no public form
        self._bytes += tensor.nbytes
        if self._bytes > BYTES:
            self.flush()
        return True

    def flush(self) -> None:
        """Read all that waits."""
        held, self._held, self._bytes = self._held, [], 0
        sites, tensors = [], []
        for site, tensor, version, waits in held:
            if tensor._version != version:  # noqa: SLF001 - no public form
                self._quiet.discard(site)
                self._changed.add(site)
            elif waits:
                sites.append(site)
                tensors.append(tensor)
            elif site not in self._changed:
                self._quiet.add(site)
        if sites:
            self._read(sites, tensors)

    def clear(self) -> None:
        """Forget all that waits."""
        self._held, self._bytes = [], 0
