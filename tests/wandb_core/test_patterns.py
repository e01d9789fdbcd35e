"""However the user logs: the rows are those that wandb keeps without us, with the newest values of ours in them."""

import threading

import pytest
import wandb

N = 40


class User:
    """Logs rows that can be counted, each under the step it was given."""

    def __init__(self, run, tick):
        self.run, self.tick, self.rows, self.steps, self.runs, self.newest = run, tick, [], {}, [run], []
        self.ticks = []

    def log(self, step=None, key="u", via=None, **how):
        """Log one number that was never logged before."""
        row = key, len(self.rows)
        self.rows.append(row)
        self.newest.append(self.ticks[-1] if self.ticks else 0)
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


def through_an_earlier_reference(user):
    log = user.run.log
    for i in range(N):
        user.tick()
        user.log(i, via=log)


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
    through_an_earlier_reference,
    rare_plain, rare_steps, pieces_without_step, pieces_with_step, left_uncommitted, never, late_with_steps,
    stops_early, plain_then_steps, steps_then_plain, module_function, ours_ten_times_as_often,
    theirs_ten_times_as_often, threads_plain, threads_steps, threads_pieces, user_globs,
    user_exact_definitions, step_far_ahead, far_ahead_then_plain, step_backwards, step_restarts, plain_then_behind,
    new_run_midway, reinit_finishes_previous, reinit_returns_previous, reinit_creates_new, log_after_finish,
)  # fmt: skip

THREADS = {threads_plain, threads_steps, threads_pieces}
"""Patterns in which the order of the calls differs from run to run."""


def play(pattern, begin, make, number):
    """Log as a user does, beside a writer where one can be made; returns the user."""
    run, writer = begin(), make.writer() if make else None

    def tick():
        if writer:
            # What comes while no run is there belongs to none.
            if wandb.run is not None:
                user.ticks.append(len(user.ticks) + 1)
            writer.write(make.record(user.ticks[-1]))

    user = User(run, tick)
    pattern(user)
    if writer and number % 2:
        writer.close()
    for begun in reversed(user.runs):
        begun.finish()
    if writer:
        writer.close()
    return user


@pytest.fixture(scope="module")
def played(begin, make, read):
    """Play every pattern with the writer closed before and after the run, and without; read all."""
    out = {pattern: play(pattern, begin, make, number) for number, pattern in enumerate(PATTERNS)}
    alone = {pattern: play(pattern, begin, None, 0) for pattern in PATTERNS}
    logs = {user: [read(run) for run in user.runs] for user in (*alone.values(), *out.values())}
    return {
        pattern.__name__: (logs[user], user, logs[alone[pattern]], pattern in THREADS) for pattern, user in out.items()
    }


def rows_of(logs):
    """Return the rows of some runs without our keys and the clock."""
    ours = ("gradflow/", "_timestamp", "_runtime")
    return [[{key: row[key] for key in row if not key.startswith(ours)} for row in log.history] for log in logs]


@pytest.mark.parametrize("name", [pattern.__name__ for pattern in PATTERNS])
def test_rows_are_those_without_us(name, played, record_property):
    """Rows, their steps and their keys are those of a run without us, and each has the newest values, once."""
    logs, user, alone, threads = played[name]
    got, wanted = rows_of(logs), rows_of(alone)
    if threads:
        assert [[row["_step"] for row in rows] for rows in got] == [[row["_step"] for row in rows] for rows in wanted]
        assert sorted(value for rows in got for row in rows for key, value in row.items() if key != "_step") == list(
            range(len(user.rows))
        )
    else:
        assert got == wanted
    shown = []
    for log in logs:
        for row in log.history:
            # A row that is still open when the run ends gets the newest values.
            last = (N, user.ticks[-1]) if row is log.history[-1] and user.ticks else ()
            logged = [row[key] for key in ("u", "v", "w") if key in row]
            newest = max(user.newest[number] for number in logged)
            if not threads and newest > max(shown, default=0) and newest:
                assert row["gradflow/step"] in (newest, *last)
            if "gradflow/step" in row:
                shown.append(row["gradflow/step"])
    assert shown == sorted(set(shown))
    summary = logs[0].summary
    assert summary["gradflow/step"] == summary["gradflow/last_step"]
    assert logs[0].metrics["gradflow/loss"].step_metric == "gradflow/step"
    assert not [key for key in logs[0].metrics if key.startswith("glob gradflow")]
    kept = sum(map(len, got))
    sent = f"{len(user.rows):>6}{sum(map(len, wanted)):>6}{kept:>6}{len(user.ticks):>8}{len(shown):>6}"
    record_property("pattern", f"{name:<28}{sent}")


def test_the_users_own_definitions_stay(played):
    """An axis and a summary that the user chose for a key of theirs are not touched."""
    logs, *_ = played["user_exact_definitions"]
    assert logs[0].metrics["u"].step_metric == "epoch"
    assert logs[0].metrics["u"].summary.max


def test_each_run_of_several_has_its_own_values(played):
    """Values go to the run that is active; one that only the user holds gets none of ours."""
    last = {
        name: [log.summary.get("gradflow/last_step") for log in played[name][0]]
        for name in ("new_run_midway", "reinit_finishes_previous", "reinit_returns_previous", "reinit_creates_new")
    }
    assert last == {
        "new_run_midway": [N, 2 * N],
        "reinit_finishes_previous": [N, 2 * N],
        "reinit_returns_previous": [2 * N],
        "reinit_creates_new": [2 * N, None],
    }
