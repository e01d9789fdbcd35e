"""However the user logs, every row of theirs and every row of ours is there, each in its order and at its step."""

import threading

import pytest
import wandb

N = 40


class User:
    """Logs rows that can be counted, each under the step it was given."""

    def __init__(self, run, tick):
        self.run, self.tick, self.rows, self.steps = run, tick, [], {}

    def log(self, step=None, key="u", via=None, **how):
        """Log one number that was never logged before."""
        self.rows.append((key, len(self.rows)))
        if step is not None:
            self.steps[self.rows[-1]] = step
            how["step"] = step
        (via or self.run.log)({key: self.rows[-1][1]}, **how)


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


PATTERNS = (
    plain_before, plain_after, step_before, step_after, step_from_one, step_in_pieces, step_with_gaps, step_of_epochs,
    rare_plain, rare_steps, pieces_without_step, pieces_with_step, left_uncommitted, never, late_with_steps,
    stops_early, plain_then_steps, steps_then_plain, module_function, ours_ten_times_as_often,
    theirs_ten_times_as_often, threads_plain, threads_steps, threads_pieces, user_globs,
)  # fmt: skip


@pytest.fixture(scope="module")
def played(begin, make, read):
    """Play every pattern with the writer closed before, after and instead of the run; read all logs at the end."""
    out = {}
    for number, pattern in enumerate(PATTERNS):
        run, writer, ticks = begin(), make.writer(), []

        def tick(writer=writer, ticks=ticks):
            ticks.append(len(ticks) + 1)
            writer.write(make.record(len(ticks)))

        user = User(run, tick)
        pattern(user)
        if number % 2:
            writer.close()
        run.finish()
        writer.close()
        out[pattern.__name__] = run, user, ticks
    return {name: (read(run), user, ticks) for name, (run, user, ticks) in out.items()}


@pytest.mark.parametrize("name", [pattern.__name__ for pattern in PATTERNS])
def test_every_row_is_there(name, played, ours):
    """All rows of both arrive in order, the user's at the steps they were given, and ours on our own axis."""
    log, user, ticks = played[name]
    theirs = [(key, row[key], row["_step"]) for row in log.history for key in ("u", "v", "w") if key in row]
    steps = [row["step"] for row in ours(log) if "loss" in row]
    print(f"{name:<28} theirs {len(theirs):>4} of {len(user.rows):<4} ours {len(steps):>4} of {len(ticks)}")
    assert sorted((value, key) for key, value, _ in theirs) == [(value, key) for key, value in user.rows]
    assert {(key, value): step for key, value, step in theirs if (key, value) in user.steps} == user.steps
    assert steps == ticks
    assert [row["loss"] for row in ours(log) if "loss" in row] == pytest.approx([1 / step for step in ticks])
    assert log.metrics["gradflow/loss"].step_metric == "gradflow/step"
    assert not [key for key in log.metrics if key.startswith("glob gradflow")]
