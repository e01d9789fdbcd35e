"""CUDA devices: waiting for them, their memory, their share."""

from __future__ import annotations

import logging

import torch

from gradflow_export.instruments.runtime import MEGABYTE

_log = logging.getLogger("gradflow_export")


class CudaDevices:
    """What is done with CUDA devices during a session; on a machine without one it says so once and does nothing.

    Args:
        synchronize: Whether :meth:`synchronize` waits.
        memory_fraction: Share of each device's memory that this process may allocate; 1.0 sets no limit.
    """

    def __init__(self, *, synchronize: bool = False, memory_fraction: float = 1.0) -> None:
        self._synchronize = synchronize
        self.available = torch.cuda.is_available()
        if not self.available:
            _log.warning(
                "gradflow: CUDA debugging was asked for and PyTorch %s sees no CUDA device: nothing is synchronised, "
                "limited or monitored. Install a CUDA build of PyTorch, or set enable_cuda_debugging=False.",
                torch.__version__,
            )
        elif memory_fraction < 1:
            for index in range(torch.cuda.device_count()):
                torch.cuda.set_per_process_memory_fraction(memory_fraction, index)

    def synchronize(self) -> None:
        """Wait for the current device, so that what is timed next does not pay for what came before."""
        if self.available and self._synchronize:
            torch.cuda.synchronize()

    def read(self) -> dict[str, dict[str, float]]:
        """Return the memory of each device in MB, by name; empty without one."""
        if not self.available:
            return {}
        out = {}
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            out[f"cuda:{index}"] = {
                "allocated": torch.cuda.memory_allocated(index) / MEGABYTE,
                "cached": torch.cuda.memory_reserved(index) / MEGABYTE,
                "max_allocated": torch.cuda.max_memory_allocated(index) / MEGABYTE,
                "free": free / MEGABYTE,
                "total": total / MEGABYTE,
            }
        return out
