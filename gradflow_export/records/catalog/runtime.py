"""Memory, time and the exporter's own cost."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("runtime.rss", "resident memory", "MB", "run", "resident set size / 2^20", "psutil", "c", low=0.0,
          headline=True),
        s("runtime.vms", "virtual memory", "MB", "run", "virtual size / 2^20", "psutil", "c", low=0.0),
        s("runtime.memory_limit", "memory of this machine or container", "MB", "run", "total memory / 2^20", "psutil",
          "c", low=0.0),
        s("runtime.kept", "memory of kept records", "MB", "run",
          "about what writers such as MemoryWriter keep of the run, and the most that steps took while they waited to "
          "be recorded / 2^20", "definition", "c", low=0.0),
        s("runtime.cuda_allocated", "CUDA memory, allocated", "MB", "run", "torch.cuda.memory_allocated / 2^20",
          "PyTorch", "c", low=0.0, headline=True),
        s("runtime.cuda_reserved", "CUDA memory, reserved", "MB", "run", "torch.cuda.memory_reserved / 2^20", "PyTorch",
          "c", low=0.0),
        s("runtime.cuda_peak", "CUDA memory, peak", "MB", "run", "torch.cuda.max_memory_allocated / 2^20", "PyTorch",
          "c", low=0.0),
        s("runtime.cuda_limit", "CUDA memory of the device", "MB", "run", "total memory of the current device / 2^20",
          "PyTorch", "c", low=0.0),
        s("runtime.step_time", "step time", "s", "run", "time between the ends of two optimizer steps", "definition",
          "c", low=0.0, scale="log", headline=True),
        s("runtime.backward_time", "backward time", "s", "run",
          "sum over the step's calls of torch.autograd.backward, from entering to returning (host clock); missing for "
          "torch.autograd.grad", "definition", "c", low=0.0, scale="log"),
        s("runtime.loss_time", "loss time", "s", "run", "inside calls of the criterion (host clock)", "definition", "c",
          low=0.0, scale="log"),
        s("runtime.optimizer_time", "optimizer time", "s", "run",
          "inside optimizer.step (host clock); missing where a closure runs backward inside it", "definition", "c",
          low=0.0, scale="log"),
        s("runtime.backward_passes", "backward passes per step", "count", "run",
          "backward passes of the loss between two optimizer steps", "definition", "c", low=0.0),
        s("runtime.accumulated_share", "backward passes that add to gradients", "share", "run",
          "passes that found a .grad to add to / passes of the step; 1 when zero_grad is never called, 0 of "
          "torch.autograd.grad, which adds to none", "definition", "c", low=0.0, high=1.0),
        s("runtime.throughput", "steps per second", "steps/s", "run", "1 / median step time of the last 32 steps",
          "definition", "c", low=0.0, headline=True),
        s("runtime.skipped", "optimizer steps skipped by the gradient scaler", "count", "run",
          "running total; of fused optimizers, since of others' nothing is heard", "torch.amp.GradScaler", "c",
          low=0.0),
        s("runtime.dropped", "steps without a record", "count", "run",
          "running total of steps that were to be recorded and were not: the writers too slow, or a reading unusable",
          "definition", "c", low=0.0),
        s("runtime.waited", "time that training waited for the worker", "s", "run", "running total (host clock)",
          "definition", "c", low=0.0),
        s("schedule.asked", "step read densely because rules asked", "1", "run",
          "1 where an issue that opened 32 steps before or earlier, or that a rule could not yet be sure of, had "
          "everything read", "definition", "c", low=0.0, high=1.0),
        s("schedule.suspected", "step read closely", "1", "run",
          "1 where connections and updates were read because one of the 16 recorded steps before was unlike all before "
          "it: another number of gradients, another rate, gradients that jump", "definition", "c", low=0.0, high=1.0),
        s("schedule.late_requests", "requests of rules that came too late", "count", "run",
          "running total of requests that were known only after the step at which they were to act", "definition", "c",
          low=0.0),
        s("schedule.stretch", "factor on the intervals", "1", "run",
          "power of two by which the intervals of instruments are longer than set, to stay within the budget",
          "definition", "c", low=1.0, scale="log"),
        s("schedule.spacing", "steps per record", "count", "run",
          "power of two of how many steps one is recorded, to stay within the budget", "definition", "c", low=1.0,
          scale="log"),
        s("overhead", "share of the time used by the exporter", "share", "run",
          "time inside our hooks / time, both of all steps since the record before (host clock)", "definition", "c",
          low=0.0, high=1.0, headline=True),
    )
    # fmt: on
