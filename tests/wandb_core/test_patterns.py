"""However the user logs: each row of theirs that wandb keeps without us, and each of ours, is there, at its step."""

import threading

import pytest
import wandb

N = 40


class User:
    """Logs rows that can be counted, each under the step it was given."""

    def __init__(self, run, tick):
        self.run, self.tick, self.rows, self.steps, self.runs = run, tick, [], {}, [run]

    def log(self, step=None, key="u", via=None, **how):
        """Log one number that was never logged before."""
        row = key, len(self.rows)
        self.rows.append(row)
        if step is not None:
            self.steps[row] = how["step"] = step
        (via or self.run.log)({key: row[1]}, **how)

    def start(self, **how):
        """Begin a run, as a user would."""
        self.run = wandb.init(project="test", settings=wandb.Settings(x_disable_stats=True, console="off"), **how)
        if self.run not in self.runs:
            self.runs.append(self.run)


def both(ours, theirs):
    """Run two things at the same time."""
    threads = [threading.Thread(target=ours), threading.Thread(target=theirs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def repeat(what, times=N):
    """Return a function that does something again and again, with the number of the time where it takes one."""
    return lambda: [what(number) for number in range(times)]


def plain_before(user):
    for _ in range(N):
        user.tick()
        user.log()


def plain_after(user):
    for _ in range(N):
        user.log()
        user.tick()


def step_before(user):
    for i in range(N):
        user.tick()
        user.log(i)


def step_after(user):
    for i in range(N):
        user.log(i)
        user.tick()


def step_from_one(user):
    for i in range(1, N + 1):
        user.tick()
        user.log(i)


def step_in_pieces(user):
    for i in range(N):
        user.log(i)
        user.tick()
        user.log(i, key="v")


def step_with_gaps(user):
    for i in range(0, N * 10, 10):
        user.tick()
        user.log(i)


def step_of_epochs(user):
    for epoch in range(4):
        for _ in range(10):
            user.tick()
        user.log(epoch)


def rare_plain(user):
    for i in range(N):
        user.tick()
        if i % 5 == 4:
            user.log()


def rare_steps(user):
    for i in range(N):
        user.tick()
        if i % 5 == 0:
            user.log(i)


def pieces_without_step(user):
    for _ in range(N):
        user.log(commit=False)
        user.tick()
        user.log(key="v", commit=False)
        user.log(key="w")


def pieces_with_step(user):
    for i in range(N):
        user.log(i, commit=False)
        user.tick()
        user.log(i, key="v", commit=True)


def left_uncommitted(user):
    for i in range(N):
        user.log(i, commit=False)
        user.tick()


def never(user):
    for _ in range(N):
        user.tick()


def late_with_steps(user):
    for _ in range(N // 2):
        user.tick()
    step_after(user)


def stops_early(user):
    for i in range(N):
        user.tick()
        if i < 5:
            user.log(i)


def plain_then_steps(user):
    user.log()
    step_from_one(user)


def steps_then_plain(user):
    step_after(user)
    user.log(N, commit=True)
    plain_after(user)


def module_function(user):
    for _ in range(N):
        user.tick()
        user.log(via=wandb.log)


def ours_ten_times_as_often(user):
    for i in range(N // 4):
        for _ in range(10):
            user.tick()
        user.log(i)


def theirs_ten_times_as_often(user):
    for i in range(N):
        if i % 10 == 0:
            user.tick()
        user.log()


def threads_plain(user):
    both(repeat(lambda _: user.tick(), 300), repeat(lambda _: user.log(), 300))


def threads_steps(user):
    both(repeat(lambda _: user.tick(), 300), repeat(user.log, 300))


def threads_pieces(user):
    def pieces(i):
        user.log(i)
        user.log(i, key="v")

    both(repeat(lambda _: user.tick(), 300), repeat(pieces, 300))


def user_globs(user):
    user.run.define_metric("epoch")
    user.run.define_metric("*", step_metric="epoch")
    step_after(user)


def user_exact_definitions(user):
    user.run.define_metric("epoch")
    user.run.define_metric("u", step_metric="epoch", summary="max")
    user.run.define_metric("gradflow/loss", summary="min")
    step_before(user)


def step_backwards(user):
    for i in range(N):
        user.tick()
        user.log(i - 7 if i % 5 == 4 else i)


def step_restarts(user):
    for _ in range(2):
        for i in range(N // 2):
            user.log(i)
            user.tick()


def plain_then_behind(user):
    plain_before(user)
    for i in range(N // 2):
        user.tick()
        user.log(i)


def step_far_ahead(user):
    for i in range(10):
        user.tick()
        user.log(i * 10**9)
        user.log(i)


def far_ahead_then_plain(user):
    user.tick()
    user.log(10**12)
    plain_before(user)


def new_run_midway(user):
    plain_before(user)
    user.run.finish()
    user.tick()
    user.start()
    step_after(user)


def reinit_finishes_previous(user):
    step_after(user)
    user.start(reinit="finish_previous")
    step_before(user)


def reinit_returns_previous(user):
    plain_before(user)
    user.start(reinit="return_previous")
    plain_before(user)


def reinit_creates_new(user):
    plain_before(user)
    first = user.run
    user.start(reinit="create_new")
    for _ in range(N):
        user.tick()
        user.log()
        user.log(via=first.log)


def log_after_finish(user):
    plain_before(user)
    user.run.finish()
    user.tick()
    with pytest.raises(wandb.Error):
        wandb.log({"u": -1})
    with pytest.raises(wandb.Error):
        user.run.log({"u": -1})


PATTERNS = (
    plain_before, plain_after, step_before, step_after, step_from_one, step_in_pieces, step_with_gaps, step_of_epochs,
    rare_plain, rare_steps, pieces_without_step, pieces_with_step, left_uncommitted, never, late_with_steps,
    stops_early, plain_then_steps, steps_then_plain, module_function, ours_ten_times_as_often,
    theirs_ten_times_as_often, threads_plain, threads_steps, threads_pieces, user_globs,
    user_exact_definitions, step_far_ahead, far_ahead_then_plain, step_backwards, step_restarts, plain_then_behind,
    new_run_midway, reinit_finishes_previous, reinit_returns_previous, reinit_creates_new, log_after_finish,
)  # fmt: skip

DROPPED = {step_far_ahead, far_ahead_then_plain, step_backwards, step_restarts, plain_then_behind}
"""Patterns of whose rows wandb itself drops or overwrites some: the same ones without us."""


def theirs(logs):
    """Return the user's rows of some runs: key, value and step."""
    rows = (row for log in logs for row in log.history)
    return [(key, row[key], row["_step"]) for row in rows for key in ("u", "v", "w") if key in row]


def play(pattern, begin, make, number):
    """Log as a user does, beside a writer where one can be made; returns the user and the steps that were recorded."""
    run, writer, ticks = begin(), make.writer() if make else None, []

    def tick():
        if writer:
            # What comes while no run is there belongs to none.
            if wandb.run is not None:
                ticks.append(len(ticks) + 1)
            writer.write(make.record(ticks[-1]))

    user = User(run, tick)
    pattern(user)
    if writer and number % 2:
        writer.close()
    for begun in reversed(user.runs):
        begun.finish()
    if writer:
        writer.close()
    return user, ticks


@pytest.fixture(scope="module")
def played(begin, make, read):
    """Play every pattern with the writer closed before and after the run, and those with losses without; read all."""
    out = {pattern: play(pattern, begin, make, number) for number, pattern in enumerate(PATTERNS)}
    alone = {pattern: play(pattern, begin, None, 0)[0] for pattern in DROPPED}
    logs = {user: [read(run) for run in user.runs] for user in (*alone.values(), *(user for user, _ in out.values()))}
    return {
        pattern.__name__: (logs[user], user, ticks, theirs(logs[alone[pattern]]) if pattern in alone else None)
        for pattern, (user, ticks) in out.items()
    }


@pytest.mark.parametrize("name", [pattern.__name__ for pattern in PATTERNS])
def test_every_row_is_there(name, played, ours, record_property):
    """All rows that wandb keeps without us are there at their steps, and all of ours in order on our own axis."""
    logs, user, ticks, alone = played[name]
    got = theirs(logs)
    kept = len(user.rows) if alone is None else len(alone)
    rows = [row for log in logs for row in ours(log) if "loss" in row]
    steps = [row["step"] for row in rows]
    sent = f"{len(user.rows):>6}{kept:>6}{len(got):>6}{len(ticks):>8}{len(steps):>6}"
    record_property("pattern", f"{name:<28}{sent}")
    if alone is None:
        assert sorted((value, key) for key, value, _ in got) == [(value, key) for key, value in user.rows]
        assert {(key, value): step for key, value, step in got if (key, value) in user.steps} == user.steps
    else:
        assert got == alone
        assert 0 < len(alone) < len(user.rows)
    assert steps == ticks
    assert [row["loss"] for row in rows] == pytest.approx([1 / step for step in ticks])
    assert logs[0].metrics["gradflow/loss"].step_metric == "gradflow/step"
    assert not [key for key in logs[0].metrics if key.startswith("glob gradflow")]


def test_the_users_own_definitions_stay(played):
    """An axis and a summary that the user chose for a key of theirs are not touched."""
    logs, *_ = played["user_exact_definitions"]
    assert logs[0].metrics["u"].step_metric == "epoch"
    assert logs[0].metrics["u"].summary.max


def test_each_run_of_several_has_its_own_rows(played, ours):
    """Rows go to the run that is active; one that only the user holds gets none of ours."""
    counts = {
        name: [len([row for row in ours(log) if "loss" in row]) for log in played[name][0]]
        for name in ("new_run_midway", "reinit_finishes_previous", "reinit_returns_previous", "reinit_creates_new")
    }
    assert counts == {
        "new_run_midway": [N, N],
        "reinit_finishes_previous": [N, N],
        "reinit_returns_previous": [2 * N],
        "reinit_creates_new": [2 * N, 0],
    }
