"""What can only be checked where there is a GPU: `python benchmarks/cuda_checks.py`; ends with 0 when all of it holds.

1. The kernel of native/triton_statistics.py gives the rows that torch gives in float64, for all four types, odd sizes,
   unaligned views, NaN and Inf; and the exporter's statistics are the same with and without it.
2. Nothing that the exporter does waits for the device: 120 steps, everything read at every step, run while
   ``torch.cuda.set_sync_debug_mode("error")`` turns each wait on the training thread into an error.
3. Watching changes no bit of the weights.

Then it prints what statistics of 400 gradients cost with and without the kernel, on the host and on the device.
No test of the suite needs a GPU: the suite runs the same kernel in triton's interpreter and compiles it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from gradflow_export import Exporter
from gradflow_export.metrics.arrays.entries import entry_statistics
from gradflow_export.metrics.arrays.one_launch import device_statistics
from gradflow_export.schedule import INTERVALS

Watch = Callable[[nn.Module, nn.Module], contextlib.AbstractContextManager[object]]
STEPS = 120
SIZES = (0, 1, 3, 1023, 1024, 1025, 16_383, 16_384, 16_385, 100_003)


def some_tensors() -> list[Tensor]:
    """Return entries of all types and awkward sizes, some with NaN and Inf, some that start anywhere."""
    out = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for size in SIZES:
            whole = torch.randn(size + 3, device="cuda", dtype=torch.float64).to(dtype)
            whole[::7] = 0.0
            out += [whole[:size], whole[3:]]
    out.append(torch.randn(8, 3, 5, 5, device="cuda").to(memory_format=torch.channels_last))
    out.append(torch.randn(30, 40, device="cuda").t())
    sick = torch.randn(3, 2000, device="cuda")
    sick[0, 5], sick[1, 7], sick[2, 9] = math.nan, math.inf, -math.inf
    return [*out, *sick]


def reference(tensor: Tensor) -> Tensor:
    """Return the kernel's rows of one tensor by separate operations in float64."""
    wide = tensor.double().flatten()
    known = wide[~wide.isnan()]
    most, least = (
        (known.amax(), known.amin()) if known.numel() else (wide.new_tensor(-math.inf), wide.new_tensor(math.inf))
    )
    counts = (wide == 0).sum(), (~wide.isfinite()).sum(), wide.new_tensor(wide.numel())
    return torch.stack([wide.square().sum().sqrt(), wide.abs().sum(), most, least, *(c.double() for c in counts)])


@contextlib.contextmanager
def without_kernel() -> Iterator[None]:
    """Take the slower way."""
    os.environ["GRADFLOW_TRITON"] = "0"
    yield
    del os.environ["GRADFLOW_TRITON"]


def kernel_is_right() -> bool:
    """Compare the kernel with torch."""
    tensors = some_tensors()
    found = device_statistics(tensors)
    if found is None:
        print("the kernel was not taken: is triton installed? The log says why it does not run.")
        return False
    expected = torch.stack([reference(tensor) for tensor in tensors], dim=1)
    same = torch.allclose(found, expected, rtol=1e-9, atol=0.0, equal_nan=True)
    finite = [tensor for tensor in tensors if bool(tensor.isfinite().all())]
    ours = entry_statistics(finite)
    with without_kernel():
        torchs = entry_statistics(finite)
    return same and all(torch.allclose(a.double(), b.double(), rtol=1e-5) for a, b in zip(ours, torchs, strict=True))


def train(watched: Watch, mode: str) -> list[Tensor]:
    """Take some steps and return the weights."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(first, nn.Linear(8 * 36, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(16, 3, 8, 8, device="cuda"), torch.randint(0, 4, (16,), device="cuda")
    with watched(model, criterion):
        torch.cuda.set_sync_debug_mode(mode)
        for _ in range(STEPS):
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    return [p.detach().cpu() for p in model.parameters()]


@contextlib.contextmanager
def watching(model: nn.Module, criterion: nn.Module) -> Iterator[None]:
    """Watch with everything read at every step."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Exporter(model, logdir=folder, intervals=dict.fromkeys(INTERVALS, 1)).watch(criterion),
    ):
        yield


class Heard(logging.Handler):
    """Keeps what the exporter complains about: an error in a hook is logged, and its part is set aside."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def nothing_waits() -> bool:
    """Train while waiting for the device is an error."""
    heard = Heard()
    logging.getLogger("gradflow_export").addHandler(heard)
    train(watching, "error")
    logging.getLogger("gradflow_export").removeHandler(heard)
    for line in heard.lines:
        print(line)
    return not any("synchroniz" in line or "set aside" in line for line in heard.lines)


def no_bit_changes() -> bool:
    """Compare weights after the same training with and without an exporter."""
    torch.use_deterministic_algorithms(mode=True)
    plain, watched = train(lambda *_: contextlib.nullcontext(), "default"), train(watching, "default")
    torch.use_deterministic_algorithms(mode=False)
    return all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def cost(gradients: list[Tensor], rounds: int = 20) -> tuple[float, float]:
    """Return milliseconds of the host and of the device for one reading."""
    entry_statistics(gradients)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began = time.thread_time()
    begin.record()
    for _ in range(rounds):
        entry_statistics(gradients)
    end.record()
    host = (time.thread_time() - began) * 1e3
    torch.cuda.synchronize()
    return host / rounds, begin.elapsed_time(end) / rounds


def main() -> int:
    """Check, print, and return 0 when all of it holds."""
    if not torch.cuda.is_available():
        print("expected a CUDA device, found none: nothing was checked; run this on a machine with a GPU.")
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    held = True
    for check in (kernel_is_right, nothing_waits, no_bit_changes):
        passed = check()
        held = held and passed
        print(f"{check.__name__}: {'holds' if passed else 'DOES NOT HOLD'}")
    for dtype in (torch.float32, torch.bfloat16):
        for entries in (4096, 65_536):
            gradients = [torch.randn(entries, device="cuda").to(dtype) for _ in range(400)]
            with_kernel = cost(gradients)
            with without_kernel():
                plain = cost(gradients, rounds=3)
            print(
                f"400 x {entries} {dtype}: host {with_kernel[0]:.2f} ms, device {with_kernel[1]:.2f} ms; "
                f"without the kernel {plain[0]:.2f} and {plain[1]:.2f} ms"
            )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
