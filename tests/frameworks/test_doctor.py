"""``gradflow doctor`` on the minimal script of each framework: silent where it is sound, and names its mistake."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import scripts

from gradflow_export.cli import main


def examined(name, folder, monkeypatch, capsys, *words):
    """Return the exit status and the report."""
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(scripts.written(name), encoding="utf-8")
    code = main(["doctor", "train.py", "--try", "--format", "json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("framework", scripts.SCRIPTS)
def test_a_sound_script_of_any_framework_gets_no_prescription(framework, tmp_path, monkeypatch, capsys):
    """No finding above LOW, and no cure; the experiments were done, and nothing stood in their way."""
    code, told = examined(framework, tmp_path, monkeypatch, capsys)
    (experiment,) = told["experiments"]
    assert (experiment["refused"], experiment["complaint"], told["notes"]) == (None, None, [])
    assert experiment["cures"] == []
    assert [each for each in told["findings"] if each["severity"] not in {"INFO", "LOW"}] == []
    assert code == 0


@pytest.mark.parametrize("framework", scripts.SCRIPTS)
def test_the_mistake_in_a_script_of_any_framework_is_named(framework, tmp_path, monkeypatch, capsys):
    """The worst finding is of the type of the mistake."""
    code, told = examined(framework, tmp_path, monkeypatch, capsys, "sick")
    assert told["findings"][0]["issue_type"] == str(scripts.SCRIPTS[framework][1])
    assert told["findings"][0]["severity"] in {"HIGH", "CRITICAL"}
    assert code == 1
