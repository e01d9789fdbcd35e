"""TensorBoard with this plugin on somebody else's log."""

import json
import time
import urllib.request

from playwright.sync_api import expect
from torch.utils.tensorboard import SummaryWriter


def enabled(address):
    """Return by tab whether TensorBoard has found data of it so far."""
    with urllib.request.urlopen(f"{address}/data/plugins_listing") as answer:
        return {name: tab["enabled"] for name, tab in json.load(answer).items()}


def test_a_log_without_our_data_leaves_the_tab_inactive_with_five_lines_to_copy(tmp_path, tensorboard, open_panel):
    """Their scalars are there, our tab is not among the active ones, and who opens it reads how to begin."""
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(5):
            writer.add_scalar("theirs", step, step)
    with tensorboard(f"--logdir={tmp_path}") as address:
        page, frame = open_panel(address)
        while not enabled(address)["scalars"]:
            time.sleep(0.05)
        assert not enabled(address)["gradflow"]
        expect(page.get_by_role("tab", name="GradFlow")).to_have_count(0)
        snippet = frame.locator("[data-part=empty] pre").inner_text().splitlines()
        assert len(snippet) == 5
        assert snippet[0] == "from gradflow_export import Exporter"
