"""The public names: pinned, importable, documented, and free of torch until one is used that needs it."""

import importlib
import subprocess
import sys

import pytest

import gradflow_export

PUBLIC = [
    "CATALOG",
    "ArgumentError",
    "ArgumentTypeError",
    "AsyncTrainingLogger",
    "BackwardPassDiagnostics",
    "ConsoleWriter",
    "DebugLevel",
    "DiffusionModelDebugger",
    "DiscreteUpdateAnalyzer",
    "Exporter",
    "GradflowError",
    "GradientClippingConfig",
    "GradientFlowAnalyzer",
    "GradientGainMonitor",
    "Histogram",
    "Issue",
    "IssueSeverity",
    "IssueType",
    "JsonlWriter",
    "LiveCard",
    "MemoryWriter",
    "MetricSpec",
    "MissingPackageError",
    "NaNHandlingConfig",
    "NoiseSchedule",
    "NumericalAnomalyError",
    "NumericalStabilityManager",
    "PyTorchDebugger",
    "PyTorchDebuggingConfig",
    "PyTorchDebuggingManager",
    "RLPolicyAnalyzer",
    "Reading",
    "RecurrentAnalyzer",
    "RunInfo",
    "Severity",
    "StepRecord",
    "StorageError",
    "TensorBoardWriter",
    "TensorInfo",
    "TrainContext",
    "TrainingDebugger",
    "TrainingPhase",
    "TransformerAnalyzer",
    "WandbSink",
    "WandbWriter",
    "Writer",
    "anomaly_mode",
    "check_gradients",
    "create_modular_train_context",
    "create_training_wrapper",
    "debug_context",
    "find_runs",
    "plot_debug_session",
    "read_run",
]


def test_the_public_names_are_pinned():
    """Adding or removing a name is a decision, made here too."""
    assert gradflow_export.__all__ == PUBLIC
    assert dir(gradflow_export) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported(name):
    """What is listed is there, and says what it is."""
    value = getattr(importlib.import_module("gradflow_export"), name)
    assert value is not None
    assert value.__doc__ or name == "CATALOG"


def test_both_names_of_the_severity_are_one_class():
    """The documents call it IssueSeverity."""
    assert gradflow_export.IssueSeverity is gradflow_export.Severity


def test_both_names_of_the_wandb_writer_are_one_class():
    """A sink is named for what it is over: wandb, or another module."""
    assert gradflow_export.WandbSink is gradflow_export.WandbWriter


def test_an_unknown_name_is_an_attribute_error():
    """Spelling errors fail as they do in any module."""
    with pytest.raises(AttributeError, match="has no attribute 'Exprter'"):
        gradflow_export.Exprter  # noqa: B018


@pytest.mark.parametrize("statement", ["import gradflow_export", "from gradflow_export import read_run, JsonlWriter"])
def test_importing_what_needs_no_torch_imports_none(statement):
    """A fresh process that only reads records never loads torch."""
    code = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
