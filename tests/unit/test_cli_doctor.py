"""``gradflow doctor``: a sound installation passes, and each fault is named with its way out."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

import gradflow_export
from gradflow_export import native
from gradflow_export.cli import doctor, main

SOUND = doctor.Finding("x", "ok", "fine")


def test_this_installation_has_what_it_needs(capsys, tmp_path):
    """Where the tests run, nothing would fail, and every check says what it saw."""
    assert main(["doctor", "--logdir", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert "Nothing would fail." in out
    for name in ("python", "torch", "tensorboard", "wandb", "protobuf", "checksums", "panel", "logdir"):
        assert f" {name} " in out
    assert "tensorboard_plugin_gradflow.loader:GradflowLoader" in out
    assert not (tmp_path / "runs").exists()


def test_a_missing_c_library_is_noted_with_what_it_costs(monkeypatch):
    """It is found where the tests run; without it nothing fails, and the note says why it is not used."""
    assert doctor.check_library() == doctor.Finding("C library", "ok", "loaded")
    monkeypatch.setattr(native, "_library", lambda: None)
    assert doctor.check_library().verdict == "note"
    assert "C compiler" in doctor.check_library().way_out
    monkeypatch.setenv("GRADFLOW_NATIVE", "0")
    assert doctor.check_library().way_out == "unset GRADFLOW_NATIVE"


@pytest.mark.parametrize("words", [("-m", "gradflow_export"), ("-m", "gradflow_export.cli")])
def test_the_version_is_that_of_the_installed_package(words):
    """The command, the package and its metadata agree, and asking for it needs no torch."""
    done = subprocess.run([sys.executable, *words, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["gradflow", gradflow_export.__version__]
    assert gradflow_export.__version__ == metadata.version("gradflow-export")


def test_the_help_of_a_command_says_what_the_command_is_for(capsys):
    """In the words of the list of all commands."""
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "\n\nPrint a report of the runs in a folder.\n\n" in capsys.readouterr().out


def test_a_failed_check_is_the_exit_code(monkeypatch, capsys):
    """One failure makes the command end with 1 and print the way out."""
    failed = doctor.Finding("torch", "fail", "not installed", "pip install torch")
    monkeypatch.setattr(doctor, "examine", lambda logdir: [SOUND, failed])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "-> pip install torch" in out
    assert "1 of 2 checks failed" in out


@pytest.mark.parametrize(
    ("installed", "required", "verdict"),
    [
        ("2.13", True, "ok"),
        ("2.13.0+cpu", True, "ok"),
        ("2.12.1", True, "fail"),
        (None, True, "fail"),
        (None, False, "note"),
    ],
)
def test_packages_are_compared_with_what_is_needed(monkeypatch, installed, required, verdict):
    """Versions are compared as numbers; a missing optional package is only noted."""

    def version(name):
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    finding = doctor.check_package(doctor.Need("torch", (2, 13), required, "watching a model", "'torch>=2.13'"))
    assert finding.verdict == verdict
    assert finding.way_out.startswith("pip install") == (verdict != "ok")


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 9), "fail"), ((3, 10), "ok"), ((3, 13), "ok"), ((3, 14), "note")]
)
def test_python_versions(version, verdict):
    """Too old fails, untested is noted."""
    assert doctor.check_python(version).verdict == verdict


def test_a_missing_entry_point_is_named(monkeypatch):
    """Without the entry point TensorBoard shows no tab; doctor says so."""
    monkeypatch.setattr(metadata, "entry_points", lambda group: ())
    finding = doctor.check_plugin()
    assert (finding.verdict, "pip install" in finding.way_out) == ("fail", True)


def test_a_plugin_that_does_not_load_is_a_finding_not_a_crash(monkeypatch):
    """An entry point that raises is reported with its reason."""

    def load():
        raise ImportError("no such module")

    monkeypatch.setattr(metadata, "entry_points", lambda group: (SimpleNamespace(name="gradflow", load=load),))
    finding = next(f for f in doctor.examine(doctor.Path("runs")) if f.name == "plugin")
    assert finding.verdict == "fail"
    assert "no such module" in finding.detail


def test_a_logdir_that_is_a_file_or_full_or_closed_is_named(monkeypatch, tmp_path):
    """Every reason not to be able to write is told apart."""
    (tmp_path / "file").write_text("text")
    assert "is not a folder" in doctor.check_logdir(tmp_path / "file" / "runs").detail
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=2**20))
    assert "only 1 MB free" in doctor.check_logdir(tmp_path / "runs").detail
    monkeypatch.setattr(doctor.os, "access", lambda place, mode: False)
    assert "is not writable" in doctor.check_logdir(tmp_path / "runs").detail
