"""What watching costs where steps are short: microseconds a step and ratios, beside a bare twin in the same run.

    python benchmarks/small_steps.py              # the table
    python benchmarks/small_steps.py --steps 20000
    python benchmarks/small_steps.py --only PPO --only DQN      # these rows need stable-baselines3
    python benchmarks/small_steps.py --dense      # the first 100 steps of the three workloads

Two equal programs take turns, so that both see the same machine; each row is measured in a process of its own.
``thread`` is the CPU time of the training thread with and without, after the dense start (the first 100 steps) and more
in which the budget settles; ``process`` adds the worker thread. ``skipped step`` is what a step costs that is only
counted: the difference of the medians. ``PPO`` and ``DQN`` train on CartPole with the settings that stable-baselines3
comes with; steps are those of the optimizer, and the rollouts belong to the time. With ``--dense`` the ratio is that of
the CPU time of steps 1 to 100, of which every one is recorded by a fixed plan.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from workloads import workloads

from gradflow_export import Exporter

CHUNK = 250
SETTLE = 2_000
DENSE = 100
SIZES = {"0.15 ms": (32, 32), "1 ms": (640, 32), "5 ms": (512, 256), "10 ms": (512, 600), "20 ms": (512, 1200)}
"""Width of the model and size of the batch of rows that are named after about how long a step takes."""
LONGER = 5
"""A row of longer steps is measured over so many times fewer of them."""
SETTINGS = {"nothing": None, "default": {}, "budget=0.01": {"budget": 0.01}, "no budget": {"budget": None}}


def program(width, batch):
    """Return a model of five layers and what makes a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(batch, 64), torch.randint(10, (batch,))

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return model, step


def measure(workload, setting, steps):
    """Time one setting of short steps in this process."""
    few = 1 if workload in {"0.15 ms", "1 ms"} else LONGER
    steps, chunk, settle = steps // few, CHUNK // few, SETTLE // few
    (_, bare), (model, watched) = program(*SIZES[workload]), program(*SIZES[workload])
    chosen = SETTINGS[setting]
    exporter = None if chosen is None else Exporter(model, backends=["memory"], **chosen).watch()
    began = time.thread_time()
    for _ in range(DENSE):
        watched()
    dense = time.thread_time() - began
    for _ in range(settle):
        watched()
    before = recorded(exporter)
    times = {bare: [], watched: []}
    began = time.process_time()
    for _ in range(steps // chunk):
        turn = time.perf_counter()
        for step in (bare, watched):
            if step is watched:
                leave_out(exporter, time.perf_counter() - turn)
            for _ in range(chunk):
                then = time.thread_time()
                step()
                times[step].append(time.thread_time() - then)
    spent = time.process_time() - began
    alone, with_ours = sum(times[bare]), sum(times[watched])
    skipped = left_out(exporter, before, len(times[watched]))
    if exporter is not None:
        exporter.close()
    return {
        "workload": workload,
        "setting": setting,
        "bare_us": 1e6 * alone / len(times[bare]),
        "thread": with_ours / alone,
        "process": (spent - alone) / alone,
        "added_us": 1e6 * (with_ours - alone) / len(times[bare]),
        "skipped_step_us": 1e6 * (statistics.median(times[watched]) - statistics.median(times[bare])),
        "dense_us": 1e6 * dense / DENSE,
        "left_out": skipped,
    }


def leave_out(exporter, seconds):
    """Have the budget not count time in which the twin trained: it would be twice what a loop of its own allows."""
    if exporter is not None:
        exporter._loop.clock.last += seconds  # noqa: SLF001 - for a twin alone


def left_out(exporter, before, steps):
    """Return the share of so many steps of which there is no record."""
    if exporter is None:
        return None
    return f"{1 - (exporter.summary()['steps']['count'] - before) / steps:.1%}"


def recorded(exporter):
    """Return the number of records."""
    return 0 if exporter is None else exporter.summary()["steps"]["count"]


def players(kind):
    """Return an agent's policy, what trains it on for a while, and how many steps its optimizer has made."""
    import stable_baselines3

    agent = getattr(stable_baselines3, kind)("MlpPolicy", "CartPole-v1", seed=0, device="cpu")
    chunk = agent.n_steps if kind == "PPO" else 2_000
    batches = chunk // agent.batch_size if kind == "PPO" else 1  # of one PPO epoch, which is what it counts

    def learn():
        agent.learn(chunk, reset_num_timesteps=False)

    return agent.policy, learn, lambda: agent._n_updates * batches  # noqa: SLF001 - told nowhere else


def measure_agent(kind, setting, steps):
    """Time one setting of an agent in this process."""
    (_, bare, _), (policy, watched, made) = players(kind), players(kind)
    chosen = SETTINGS[setting]
    exporter = None if chosen is None else Exporter(policy, backends=["memory"], **chosen).watch()
    bare()
    while made() < SETTLE:
        watched()
    first, before = made(), recorded(exporter)
    times, began = {bare: 0.0, watched: 0.0}, time.process_time()
    while made() - first < steps:
        for learn in (bare, watched):
            then = time.thread_time()
            turn = time.perf_counter()
            learn()
            times[learn] += time.thread_time() - then
            if learn is bare:
                leave_out(exporter, time.perf_counter() - turn)
    spent, count = time.process_time() - began, made() - first
    skipped = left_out(exporter, before, count)
    if exporter is not None:
        exporter.close()
    return {
        "workload": kind,
        "setting": setting,
        "bare_us": 1e6 * times[bare] / count,
        "thread": times[watched] / times[bare],
        "process": (spent - times[bare]) / times[bare],
        "added_us": 1e6 * (times[watched] - times[bare]) / count,
        "left_out": skipped,
    }


def measure_dense(workload, pairs=3):
    """Compare the first 100 steps of watched models with those of bare ones, in turns."""
    times = {True: 0.0, False: 0.0}
    program = next(w for w in workloads() if w.name == workload)
    process = {True: 0.0, False: 0.0}
    for turn, watch in enumerate((False, *(True, False) * pairs)):  # the first warms up
        torch.manual_seed(0)
        model = program.model()
        optimizer, (x, y) = program.optimizer(model.parameters()), program.batch(program.size)
        exporter = Exporter(model, backends=["memory"]).watch() if watch else None
        began, all_began = time.thread_time(), time.process_time()
        for _ in range(DENSE):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        spent = time.thread_time() - began
        if exporter is not None:
            exporter.close()  # the worker's time for these steps is theirs
        if turn:
            times[watch] += spent
            process[watch] += time.process_time() - all_began
    return {
        "workload": f"{workload}, steps 1 to {DENSE}",
        "setting": "default",
        "bare_us": 1e6 * times[False] / pairs / DENSE,
        "thread": times[True] / times[False],
        "process": process[True] / process[False],
        "added_us": 1e6 * (times[True] - times[False]) / pairs / DENSE,
        "left_out": "0.0%",
    }


def one(workload, setting, steps):
    """Measure one row in this process."""
    torch.set_num_threads(1)
    if setting == "dense":
        return measure_dense(workload)
    return (measure if workload in SIZES else measure_agent)(workload, setting, steps)


def dense_rows():
    """Yield workload and setting of the rows of the first 100 steps."""
    yield from ((w.name, "dense") for w in workloads())


def rows(only=()):
    """Yield workload and setting of each row that is wanted and can be measured."""
    for workload in (*SIZES, "PPO", "DQN"):
        if only and workload not in only:
            continue
        if workload not in SIZES and importlib.util.find_spec("stable_baselines3") is None:
            print(f"{workload} is left out: pip install stable-baselines3", file=sys.stderr)
            continue
        every = SETTINGS if workload in {"0.15 ms", "1 ms"} else ("default",)
        yield from ((workload, setting) for setting in every)


def apart(workload, setting, steps):
    """Measure one row in a process of its own."""
    command = [sys.executable, __file__, "--one", workload, setting, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def heading():
    """Return the head of the Markdown table."""
    titles = ("step", "setting", "bare us", "thread", "process", "added us", "skipped step us", "dense step us")
    return "| " + " | ".join(titles) + " | steps left out |\n" + "|---" * (len(titles) + 1) + "|"


def line(row):
    """Return one row of the Markdown table."""
    skipped, dense = (f"{row[key]:.1f}" if key in row else "" for key in ("skipped_step_us", "dense_us"))
    cells = (
        row["workload"], row["setting"], f"{row['bare_us']:.0f}", f"{row['thread']:.3f}", f"{row['process']:.3f}",
        f"{row['added_us']:.1f}", skipped, dense, row["left_out"],
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--only", action="append", choices=(*SIZES, "PPO", "DQN"), help="measure these rows alone")
    parser.add_argument("--dense", action="store_true", help="measure the first 100 steps of the three workloads")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one, options.steps)))
        return
    print(heading())
    for workload, setting in dense_rows() if options.dense else rows(options.only):
        print(line(apart(workload, setting, options.steps)), flush=True)


if __name__ == "__main__":
    main()
