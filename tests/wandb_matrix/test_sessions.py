"""However a session of W&B begins, logs and ends: the rows are the user's, with the newest values of ours in them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(3600)  # the first test plays the sessions of all

HERE = Path(__file__).parent
STEPS = 20
AXES = {"Lightning": "trainer/global_step", "HF": "train/global_step"}
ONCE = ("plain", "step", "seldom", "pieces", "defined", "shared", "shared step", *AXES, "sweep")
TWICE = ("allow", "must", "auto", "preempted", "reopened", "rewind", "fork")
ENDS = ("finish", "close", "none", "exception", "kill")
"""``run.finish`` before ``exporter.close``, after it, neither of them, an exception, ``kill -9``."""
# Where the first session was killed the second finds what the server had by then, which is another thing each time; an
# agent that is killed has no second trial.
CASES = [(mode, end) for mode in (*ONCE, *TWICE) for end in ENDS if end != "kill" or mode in ONCE[:-1]]
OURS = ("gradflow", "_timestamp", "_runtime", "_client_id")
TIMED = ("runtime", "per_second")
"""Ends of keys that differ from run to run."""


def expected(mode, end, again):
    """Return the rows of each run: the step of W&B, and what the user logged."""

    def rows(first, last):
        return [{"_step": step, "mine": step} for step in range(first, last)]

    logged = {
        "seldom": [rows(0, STEPS)[::5]],
        "pieces": [[{**row, "more": row["mine"]} for row in rows(0, STEPS)]],
        "defined": [[{**row, "epoch": row["mine"] // 5} for row in rows(0, STEPS)]],
        "sweep": [rows(0, STEPS)] * 2,
        "reopened": [[*rows(0, STEPS), {"_step": STEPS, "test": 0.5}]],
        "rewind": [rows(0, STEPS + STEPS // 2)],
        "fork": [rows(0, STEPS), rows(STEPS // 2, STEPS + STEPS // 2)],
        "Lightning": [[{"_step": row, "trainer/global_step": step} for row, step in enumerate((4, 9, 14, 19))]],
        "HF": [[{"_step": row, "train/global_step": step} for row, step in enumerate((5, 10, 15, 20, 20))]],
    }
    if mode in AXES and end in {"exception", "kill"}:  # in the midst of training
        return [logged[mode][0][:3]]
    return logged.get(mode, [rows(0, 2 * STEPS if again else STEPS)])


def is_second(mode, end):
    """Whether a second session takes the run up; after a clean end there is nothing for ``resume="auto"`` to do so."""
    return mode in TWICE and (mode != "auto" or end == "exception")


@pytest.fixture(scope="module")
def played(request, tmp_path_factory):
    """Play what was asked for, with an exporter and, to compare, without; return the server and the folder."""
    spec = importlib.util.spec_from_file_location("gradflow_server", HERE.parent / "wandb_core" / "server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("sessions")
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    own |= {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("DATA", "CACHE", "CONFIG")}
    own |= {"WANDB_ERROR_REPORTING": "false", "NO_PROXY": "127.0.0.1", "WANDB_X_SERVICE_WAIT": "120"}
    own["GRADFLOW_VERBOSE"] = "0"  # warnings are shown all the same
    wanted = [item.callspec.params for item in request.session.items if item.function is test_the_rows_are_the_users]
    cases = [(case["mode"], case["end"], True) for case in wanted]
    cases += dict.fromkeys(alone(mode, end) for mode, end, _ in cases)
    with module.LoopbackServer() as server:
        # wandb 0.28 asks the server in the environment for some things, whatever the run's settings.
        own |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.settings()["api_key"]}
        for second in (False, True):
            lines = [
                json.dumps({
                    "url": server.url, "folder": str(folder / name(*case)), "run": name(*case), "mode": case[0],
                    "end": "close" if second else case[1], "ours": case[2], "second": second,
                })
                for case in cases
                if not second or is_second(case[0], case[1])
            ]  # fmt: skip
            command = [sys.executable, str(HERE / "sessions.py")]
            done = subprocess.run(command, input="\n".join(lines), text=True, env=own, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
        yield server, folder


def name(mode, end, ours):
    """Return what a run is called."""
    return f"{mode}-{end}-{'ours' if ours else 'alone'}".replace(" ", "_")


def alone(mode, end):
    """Return the case without an exporter to compare with: without one there is no difference between the other ends."""
    return mode, "exception" if end == "exception" else "close", False


def users(history):
    """Return the user's part of the rows; of what differs from run to run only that it is there."""
    return [
        {key: None if key.endswith(TIMED) else row[key] for key in row if not key.startswith(OURS)} for row in history
    ]


def known_of(mode, rows):
    """Return what of the user's rows is known without a run: all, of a framework's the steps, in shared mode no step."""
    if mode in AXES:
        return [{key: row[key] for key in ("_step", AXES[mode]) if key in row} for row in rows]
    # wandb 0.28 leaves out W&B's step there, with us and without.
    return [{key: row[key] for key in row if key != "_step" or not mode.startswith("shared")} for row in rows]


def found(server, folder, case):
    """Return the runs of a case, and what wandb and we warned of on the terminal."""
    runs = sorted(run for run in server.runs if run == name(*case) or run.startswith(f"{name(*case)}-"))
    said = (folder / name(*case) / "err").read_text().replace(name(*case), "the run").splitlines()
    return runs, [line for line in said if "WARN" in line or "ERROR" in line or "gradflow:" in line]


@pytest.mark.parametrize(("mode", "end"), CASES, ids=[f"{mode}-{end}" for mode, end in CASES])
def test_the_rows_are_the_users(played, mode, end):
    """Rows, steps, keys and warnings are those without an exporter; ours are in them, and the newest in the summary."""
    server, folder = played
    (runs, said), (runs_alone, said_alone) = (
        found(server, folder, case) for case in ((mode, end, True), alone(mode, end))
    )
    histories = [server.history(run) for run in runs]
    rows, rows_alone = ([users(server.history(run)) for run in names] for names in (runs, runs_alone))
    wanted, known = expected(mode, end, is_second(mode, end)), [known_of(mode, each) for each in rows]
    wanted = [known_of(mode, each) for each in wanted]
    if end == "kill":
        assert known[0] == wanted[0][: len(known[0])]
        return
    assert (rows, known) == (rows_alone, wanted)
    assert said == said_alone
    newest = [max((row.get("gradflow/step", 0) for row in history), default=0) for history in histories]
    last = [server.summary(run)["gradflow/last_step"] for run in runs]
    assert not [key for history in histories for row in history for key in row if key.startswith("gradflow_2")]
    ends = {"rewind": [30], "fork": [20, 30], "sweep": [20, 20]}
    if mode in AXES and end == "exception":
        ends[mode] = [15]
    assert last == ends.get(mode, [2 * STEPS if is_second(mode, end) and mode != "reopened" else STEPS])
    lag = 7 if mode in {"seldom", *AXES} else 2  # these log every five steps
    assert all(end - lag <= shown <= end for shown, end in zip(newest, last, strict=True)), (newest, last)
