"""A loss comes from ``backward()`` to an issue along the files that docs/architecture.md names, and no other."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from gradflow_export import Exporter, MemoryWriter
from gradflow_export.profiles import profile

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
HANDED_ON = (
    ("instruments.loss", "_pass_begins", "hooks.backward_listener"),
    ("checks.batch_evidence", "see", "instruments.loss"),
    ("autograd_graph.loss_graph", "terms_of", "checks.batch_evidence"),
    ("checks.batch_evidence", "drain", "engine.training_loop"),
    ("engine.worker", "put", "engine.training_loop"),
    ("rules.judge", "check", "engine.worker"),
    ("checks.wrong_loss", "check", "rules.judge"),
)
"""A function of each file, and the file that calls it; what guards calls is passed over."""
GUARDS = {"engine.isolation", "engine.instruments", "engine.external_issues", "engine.held_records"}


def caller(frame):
    """Return the file of ours that called this one, without guards."""
    here, frame = frame.f_globals["__name__"], frame.f_back
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("gradflow_export.") and name != here and name.partition(".")[2] not in GUARDS:
            return name.partition(".")[2]
        frame = frame.f_back
    return None


def test_a_loss_comes_to_a_verdict_in_eight_stops():
    """Each stop is called by the one before it; the page lists them in this order."""
    stops = re.findall(r"^\| \d \| `(\S+)\.py`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(stops) == 8
    wanted = {(name, function) for name, function, _ in HANDED_ON}
    found = set()

    def follow(frame, event, _argument):
        name = frame.f_globals.get("__name__", "").partition(".")[2]
        if event == "call" and (name, frame.f_code.co_name) in wanted:
            found.add((name, frame.f_code.co_name, caller(frame)))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = sys.getprofile()
    threading.setprofile(follow)  # the worker's thread too, which begins with watch()
    try:
        with Exporter(model, backends=[MemoryWriter()], synchronous=True).watch() as exporter:
            sys.setprofile(follow)
            for _ in range(4):
                optimizer.zero_grad()
                x = torch.randn(32, 6)
                functional.cross_entropy(model(x).softmax(1), x[:, :3].argmax(1)).backward()
                optimizer.step()
            sys.setprofile(before)
            assert "WRONG_LOSS" in {str(issue.issue_type) for issue in exporter.issues}
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    assert set(HANDED_ON) <= found
    assert {stop.replace("/", ".") for stop in stops} == {
        file for name, _, other in HANDED_ON for file in (name, other)
    }


def test_the_page_says_where_things_are():
    """What is named there is defined there: rules by their types, what reads a metric, what calls wandb."""
    page = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (?:where|which|what) ([^|]+) \| `(\S+)` \|", page, re.MULTILINE))
    package = PAGE.parents[1] / "gradflow_export"
    assert all((package / path).exists() for path in rows.values())
    homes = {
        type(rule).__name__: type(rule).__module__.partition(".")[2].replace(".", "/") + ".py" for rule in profile()
    }
    flows = {home for name, home in homes.items() if name.startswith(("Vanishing", "Exploding"))}
    assert flows == {rows["VANISHING and EXPLODING are judged"]}
    assert homes["WrongLoss"] == rows["a silent mistake such as WRONG_LOSS is found"]
    assert 'Pending("parameter.gradient_norm"' in (package / rows["gradient norms are read"]).read_text(
        encoding="utf-8"
    )
    assert "_module.alert" in (package / rows["a W&B alert is sent"]).read_text(encoding="utf-8")
