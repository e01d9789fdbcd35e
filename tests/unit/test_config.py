"""Settings from keywords, dictionaries, YAML and TOML; unknown names are answered with the nearest."""

import inspect
import json

import pytest
from torch import nn

from gradflow_export import ArgumentError, ArgumentTypeError, Exporter, GradflowError, StorageError
from gradflow_export.config import _OF_WATCH, Settings, make_settings
from gradflow_export.errors import nearest
from gradflow_export.profiles import THRESHOLDS

YAML = """
diagnostics:
  profile: seed
  every: 10
  enabled: true
  alerts_enabled: false
  intervals:
    blocks: 7
  gradient_explosion_threshold: 10.0
  gradient_vanishing_threshold: 1e-6   # YAML 1.1 reads this as text
  memory_usage_threshold: 2000
"""

TOML = """
every = 10
[diagnostics]
profile = "seed"
enabled = true
alerts_enabled = false
gradient_explosion_threshold = 10.0
gradient_vanishing_threshold = 1e-6
memory_usage_threshold = 2000
[diagnostics.intervals]
blocks = 7
"""

DICTIONARY = {
    "profile": "seed",
    "every": 10,
    "alerts_enabled": False,
    "intervals": {"blocks": 7},
    "gradient_explosion_threshold": 10.0,
    "gradient_vanishing_threshold": 1e-6,
    "memory_usage_threshold": 2000,
}


def write(folder, name, text):
    """Write a file and return its path."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def check(settings):
    """Assert that settings are those written above."""
    assert settings.schedule.every == 10
    assert settings.schedule.intervals["blocks"] == 7
    assert settings.profile == "seed"
    assert settings.enabled is True
    assert settings.alerts_enabled is False
    assert settings.thresholds == {
        "gradient_explosion_threshold": 10.0,
        "gradient_vanishing_threshold": 1e-6,
        "memory_usage_threshold": 2000,
    }


@pytest.mark.parametrize("as_text", [False, True])
def test_yaml_toml_and_dictionaries_say_the_same(tmp_path, as_text):
    """All three forms give the same settings, as a path or as text naming one, in a section or at the top."""
    for path in (
        write(tmp_path, "a.yaml", YAML),
        write(tmp_path, "a.yml", YAML),
        write(tmp_path, "a.toml", TOML),
    ):
        check(make_settings(str(path) if as_text else path, {}))
    check(make_settings(DICTIONARY, {}))
    check(make_settings({"diagnostics": DICTIONARY}, {}))


def test_without_a_configuration_the_defaults_stand():
    """Nothing given is every step, the robust profile and no fixed threshold."""
    assert make_settings(None, {}) == Settings()
    assert make_settings({}, {"every": None, "profile": None}) == Settings()
    assert Settings().schedule.every == 1
    assert Settings().profile == "robust"


@pytest.mark.parametrize("text", ["", "diagnostics:\n", "# nothing\n", "diagnostics: {}\n"])
def test_an_empty_file_or_section_is_no_configuration(tmp_path, text):
    """A file whose settings are all commented out is no error."""
    assert make_settings(write(tmp_path, "a.yaml", text), {}) == Settings()


def test_keyword_arguments_win():
    """What the caller says in code beats the file."""
    settings = make_settings(DICTIONARY, {"every": 3, "dead_threshold": 0.5, "profile": None})
    assert settings.schedule.every == 3
    assert settings.profile == "seed"
    assert settings.thresholds["dead_threshold"] == 0.5


def test_a_section_wins_over_the_top():
    """The package's own section is the more particular one."""
    assert make_settings({"every": 2, "diagnostics": {"every": 5}}, {}).schedule.every == 5


@pytest.mark.parametrize("name", sorted(THRESHOLDS))
def test_every_threshold_may_be_set(name):
    """Each documented threshold is a setting, and a number written as text in YAML is a number."""
    assert make_settings({name: 0.25}, {}).thresholds == {name: 0.25}


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("evry", "unknown setting 'evry'; did you mean 'every'"),
        ("explosion_threshold", "did you mean 'exploding_threshold'"),
        ("alert_enabled", "did you mean 'alerts_enabled'"),
        ("zzz", "unknown setting 'zzz'; known are: alerts_enabled, budget, compiled, dead_threshold"),
        (5, "unknown setting 5; known are"),
        ("diagnostic", "did you mean 'diagnostics'"),
        ("logdir", "'logdir' is no setting but an argument of its own; pass it to Exporter: Exporter.model, logdir="),
    ],
)
def test_an_unknown_setting_is_answered_with_the_nearest(key, text):
    """A typing error never passes in silence."""
    with pytest.raises(ArgumentError, match=text):
        make_settings({key: 1}, {})


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        (5, ArgumentTypeError, "dictionary or the path of a .yaml or .toml file, got int"),
        ([], ArgumentTypeError, "got list"),
        ({"enabled": "yes"}, ArgumentTypeError, "enabled must be true or false, got 'yes'"),
        ({"alerts_enabled": 1}, ArgumentTypeError, "alerts_enabled must be true or false, got 1"),
        ({"intervals": 5}, ArgumentTypeError, "intervals must map instruments to steps, got 5"),
        ({"intervals": {"gains": 5}}, ArgumentError, "no instrument"),
        ({"compiled": "fast"}, ArgumentError, "one of 'exact', 'always', 'never', got 'fast'; leave it out"),
        ({"every": "x"}, ArgumentTypeError, "every must be a whole number"),
        ({"diagnostics": 3}, ArgumentTypeError, "section 'diagnostics' must hold keys and values, got 3"),
    ],
)
def test_wrong_types_are_named(config, kind, text):
    """The message says what was expected and what came."""
    with pytest.raises(kind, match=text):
        make_settings(config, {})


@pytest.mark.parametrize(
    ("name", "text", "kind", "message"),
    [
        ("a.ini", "every = 1", ArgumentError, "must end in .yaml, .yml or .toml, got 'a.ini'"),
        ("a.yaml", "a: [1", ArgumentError, "is no valid YAML"),
        ("a.toml", "a = = 1", ArgumentError, "is no valid TOML"),
        ("a.yaml", "- 1\n- 2\n", ArgumentError, "must hold keys and values, got list"),
        ("a.yaml", "just text", ArgumentError, "must hold keys and values, got str"),
        ("a.yaml", b"every: \xff\xfe", ArgumentError, "is no UTF-8 text"),
        ("a.yaml", "gradient_explosion_treshold: 5", ArgumentError, "did you mean 'gradient_explosion_threshold'"),
    ],
)
def test_files_that_cannot_be_understood_are_named(tmp_path, name, text, kind, message):
    """Every way a file can be wrong gives one of our errors, with the reason."""
    with pytest.raises(kind, match=message):
        make_settings(write(tmp_path, name, text), {})


def test_files_that_cannot_be_read_are_named(tmp_path):
    """A missing file and a folder raise StorageError with the path."""
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(StorageError, match="cannot be read"):
            make_settings(path, {})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"profile": "seeds"}, "unknown profile 'seeds'; did you mean 'seed'"),
        ({"profile": 3}, "unknown profile 3"),
        ({"dead_threshold": "many"}, "'dead_threshold' must be a number of at least 0; got 'many'"),
        ({"dead_threshold": -1.0}, "got -1.0"),
        ({"config": {"dead_threshold": float("nan")}}, "got nan"),
        ({"treshold": 1.0}, "unknown setting 'treshold'"),
    ],
)
def test_the_exporter_refuses_settings_that_cannot_be_used(arguments, text):
    """What the settings leave to the rules is checked when the exporter is constructed."""
    with pytest.raises(GradflowError, match=text):
        Exporter(nn.Linear(2, 2), backends="memory", **arguments)


def test_settings_describe_themselves_as_json():
    """The run's description holds every setting in plain values."""
    description = make_settings(DICTIONARY, {}).as_json()
    assert json.loads(json.dumps(description)) == description
    assert set(description) == {
        "profile", "every", "intervals", "thresholds", "alerts_enabled", "budget", "synchronous", "compiled",
            "ignore",
    }  # fmt: skip


def test_the_nearest_name_is_found_or_all_are_listed():
    """A close word is suggested, otherwise every known one in order."""
    assert nearest("los", ("loss", "logits")) == "; did you mean 'loss'?"
    assert nearest("qqq", ("loss", "logits")) == "; known are: logits, loss"


def test_every_misspelt_argument_is_answered_with_the_right_one():
    """Each argument and each setting of an exporter, with a letter left out; in ``config`` as well where it may stand."""
    model = nn.Linear(2, 2)
    named = [name for name, one in inspect.signature(Exporter).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name in {*named, *THRESHOLDS}:
        wrong = name[:2] + name[3:]
        with pytest.raises(ArgumentError, match=f"unknown setting '{wrong}'; did you mean '{name}'"):
            Exporter(model, **{wrong: 1})
    for name in {*named, *THRESHOLDS}:
        wrong = name[:2] + name[3:]
        with pytest.raises(ArgumentError, match=f"unknown setting '{wrong}'"):
            Exporter(model, config={wrong: 1})


def test_what_watch_takes_is_known_where_the_exporter_is_made():
    """All of it but what both take, so that the message can say where it belongs."""
    assert set(inspect.signature(Exporter.watch).parameters) - {"self", "ignore", "unknown"} == _OF_WATCH
