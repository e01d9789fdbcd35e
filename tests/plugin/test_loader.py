"""The loader: whatever is broken on our side, TensorBoard starts."""

import argparse
import logging
import subprocess
import sys
from importlib.metadata import entry_points

from tensorboard.plugins import base_plugin

from tensorboard_plugin_gradflow.loader import GradflowLoader


def test_tensorboard_finds_the_loader():
    """The entry point of the distribution names it."""
    found = [point.load() for point in entry_points(group="tensorboard_plugins") if point.name == "gradflow"]
    assert found == [GradflowLoader]


def test_a_broken_import_costs_only_the_tab(monkeypatch, caplog):
    """The loader returns nothing and says one line."""
    monkeypatch.setitem(sys.modules, "tensorboard_plugin_gradflow.plugin", None)
    with caplog.at_level(logging.WARNING):
        assert GradflowLoader().load(base_plugin.TBContext()) is None
    assert len(caplog.records) == 1
    assert "the rest of TensorBoard is not affected" in caplog.text


def test_all_records_are_kept_unless_the_user_said_otherwise():
    """The user's own number wins, and flags of another shape are left alone."""
    flags = argparse.Namespace(samples_per_plugin={})
    GradflowLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"gradflow": 0}
    theirs = argparse.Namespace(samples_per_plugin={"gradflow": 7})
    GradflowLoader().fix_flags(theirs)
    assert theirs.samples_per_plugin == {"gradflow": 7}
    GradflowLoader().fix_flags(argparse.Namespace())


def test_the_plugin_never_waits_and_names_its_tab():
    """TensorBoard asks this in its main loop."""
    plugin = GradflowLoader().load(base_plugin.TBContext())
    assert plugin.is_active() is False
    metadata = plugin.frontend_metadata()
    assert (metadata.tab_name, metadata.es_module_path) == ("GradFlow", "/static/index.js")


def test_neither_the_loader_nor_the_plugin_imports_torch():
    """A viewer needs no PyTorch, and the loader alone needs not even numpy of ours."""
    script = (
        "import sys, tensorboard_plugin_gradflow.loader as loader\n"
        "ours = [n for n in sys.modules if n.startswith('gradflow_export')]\n"
        "assert not ours, ours\n"
        "from tensorboard.plugins import base_plugin\n"
        "assert loader.GradflowLoader().load(base_plugin.TBContext()) is not None\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
