"""Exporters in a real kernel: what a cell shows, what a second run of the cell leaves, and the panel in a frame."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

from gradflow_export.cli import main

SETUP = """
import torch
from torch import nn
from gradflow_export import Exporter

def train(steps=40, **given):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(12)], nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    exporter = Exporter(model, logdir="runs/cell", **given).watch()
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(32, 16)
        nn.functional.binary_cross_entropy_with_logits(model(x), (x[:, :1] > 0).float()).backward()
        optimizer.step()
    return model, exporter
"""
CELLS = [
    SETUP,
    "model, exporter = train()\nexporter",
    "exporter.to_pandas('parameter.gradient_norm')",
    "panel = exporter.show(height=500)\npanel",
    "import urllib.request\nprint(urllib.request.urlopen(panel.address).status, panel.address)",
    "model, exporter = train(30)\nexporter.close()",
    "from gradflow_export import LiveCard\nmodel, exporter = train(60, backends=LiveCard(1e-6))\nexporter.close()",
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The cells' outputs, and the folder that they ran in."""
    folder = tmp_path_factory.mktemp("notebook")
    write_kernel_spec(str(folder / "kernels" / "here"))
    specs = KernelSpecManager(kernel_dirs=[str(folder / "kernels")], ensure_native_kernel=False)
    manager = KernelManager(kernel_name="here", kernel_spec_manager=specs)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    environment = {key: value for key, value in os.environ.items() if key != "GRADFLOW_VERBOSE"}
    client = NotebookClient(book, km=manager, timeout=800, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment | {"OMP_NUM_THREADS": "1"})
    manager.shutdown_kernel(now=True)
    return [cell.outputs for cell in book.cells], folder


def ends(address):
    """Whether nobody serves there any more, a moment from now."""
    for _ in range(1000):
        try:
            urllib.request.urlopen(address, timeout=5)
        except OSError:
            return True
        time.sleep(0.1)
    return False


def html(outputs):
    return "".join(out["data"].get("text/html", "") for out in outputs if out["output_type"] == "execute_result")


def printed(outputs, name):
    return "".join(out["text"] for out in outputs if out["output_type"] == "stream" and out["name"] == name)


def test_a_cell_that_trains_shows_what_was_said(ran):
    """The lines that the worker prints appear below the cell that trains."""
    said = printed(ran[0][1], "stderr")
    assert "gradflow: watching Sequential" in said
    assert "[CRITICAL] VANISHING in 0.0" in said


def test_an_exporter_is_shown_as_a_card(ran):
    """The last line of a cell gives verdict, issue, fix and the loss as a picture; nothing is fetched."""
    card = html(ran[0][1])
    assert "1 problem: VANISHING in 0.0" in card
    assert "add a skip connection" in card
    assert "<svg" in card
    assert not re.search(r"(src|href)=|<script", card)


def test_a_metric_is_a_data_frame(ran):
    """Steps are rows, layers are columns."""
    table = html(ran[0][2])
    assert "12.weight" in table
    assert "<th>40</th>" in table


def test_a_live_card_is_drawn_while_the_cell_trains(ran):
    """One output below the cell, drawn anew in place: at the end it shows all steps, the loss and the verdict."""
    cards = [out for out in ran[0][6] if "text/html" in out.get("data", {})]
    assert len(cards) == 1
    assert cards[0]["output_type"] == "display_data"
    card = cards[0]["data"]["text/html"]
    assert "step 60" in card
    assert "<svg" in card
    assert "VANISHING" in card


def test_the_panel_is_a_frame_on_loopback_that_ends_with_the_kernel(ran):
    """It is served while the kernel lives, and by nobody afterwards."""
    frame = html(ran[0][3])
    address = re.search(r'<iframe src="(http://localhost:\d+/)".*height="500"', frame)[1]
    assert printed(ran[0][4], "stdout").strip() == f"200 {address}"
    assert ends(address)


def test_a_cell_that_is_run_again_hides_nothing(ran, capsys):
    """Both sessions of the folder are reported: the first with 40 steps, the second with 30."""
    assert main(["report", str(ran[1] / "runs"), "--details"]) == 0
    out = capsys.readouterr().out
    assert [int(last) for last in re.findall(r"steps 1 to (\d+),", out)] == [40, 30]


def test_the_panel_ends_when_its_process_is_killed(tmp_path):
    """A kernel that is killed leaves no server behind."""
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom gradflow_export.engine.notebook import Panel\n"
        "print(Panel(Path(sys.argv[1]), 100).address, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False, timeout=800
    )
    address = done.stdout.strip()
    assert address.startswith("http://localhost:"), done.stderr
    assert ends(address)


def test_the_files_stand_where_the_notebook_is(ran):
    """The log directory is relative to the kernel's folder."""
    assert Path(ran[1], "runs", "cell").is_dir()
