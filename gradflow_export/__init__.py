"""See whether a PyTorch model is learning, and if not, which layer, since when, and what to do.

Names that need torch are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradflow_export.analyzers.flow import GradientFlowAnalyzer
    from gradflow_export.analyzers.policy import RLPolicyAnalyzer
    from gradflow_export.analyzers.recurrent import RecurrentAnalyzer
    from gradflow_export.analyzers.transformer import TransformerAnalyzer
    from gradflow_export.debugging import (
        AsyncTrainingLogger,
        DebugLevel,
        DiffusionModelDebugger,
        GradientClippingConfig,
        NaNHandlingConfig,
        NoiseSchedule,
        NumericalAnomalyError,
        NumericalStabilityManager,
        PyTorchDebugger,
        PyTorchDebuggingConfig,
        PyTorchDebuggingManager,
        TensorInfo,
        TrainingDebugger,
        TrainingPhase,
        anomaly_mode,
        check_gradients,
        create_training_wrapper,
        debug_context,
        plot_debug_session,
    )
    from gradflow_export.diagnostics import (
        BackwardPassDiagnostics,
        DiscreteUpdateAnalyzer,
        TrainContext,
        create_modular_train_context,
    )
    from gradflow_export.engine.live_card import LiveCard
    from gradflow_export.errors import (
        ArgumentError,
        ArgumentTypeError,
        GradflowError,
        MissingPackageError,
        StorageError,
    )
    from gradflow_export.exporter import Exporter
    from gradflow_export.monitor import GradientGainMonitor
    from gradflow_export.records.catalog import CATALOG, MetricSpec
    from gradflow_export.records.step_record import (
        Histogram,
        Issue,
        IssueType,
        Reading,
        RunInfo,
        Severity,
        StepRecord,
    )
    from gradflow_export.records.step_record import Severity as IssueSeverity
    from gradflow_export.storage.reader import find_runs, read_run
    from gradflow_export.writers import (
        ConsoleWriter,
        JsonlWriter,
        MemoryWriter,
        TensorBoardWriter,
        WandbWriter,
        Writer,
    )
    from gradflow_export.writers import WandbWriter as WandbSink

    __version__: str

__all__ = [
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

_HOMES = (
    ("analyzers.flow", ("GradientFlowAnalyzer",)),
    ("analyzers.policy", ("RLPolicyAnalyzer",)),
    ("analyzers.recurrent", ("RecurrentAnalyzer",)),
    ("analyzers.transformer", ("TransformerAnalyzer",)),
    ("records.catalog", ("CATALOG", "MetricSpec")),
    (
        "debugging",
        (
            "AsyncTrainingLogger",
            "DebugLevel",
            "DiffusionModelDebugger",
            "GradientClippingConfig",
            "NaNHandlingConfig",
            "NoiseSchedule",
            "NumericalAnomalyError",
            "NumericalStabilityManager",
            "PyTorchDebugger",
            "PyTorchDebuggingConfig",
            "PyTorchDebuggingManager",
            "TensorInfo",
            "TrainingDebugger",
            "TrainingPhase",
            "anomaly_mode",
            "check_gradients",
            "create_training_wrapper",
            "debug_context",
            "plot_debug_session",
        ),
    ),
    (
        "diagnostics",
        ("BackwardPassDiagnostics", "DiscreteUpdateAnalyzer", "TrainContext", "create_modular_train_context"),
    ),
    ("errors", ("ArgumentError", "ArgumentTypeError", "GradflowError", "MissingPackageError", "StorageError")),
    ("engine.live_card", ("LiveCard",)),
    ("exporter", ("Exporter",)),
    ("monitor", ("GradientGainMonitor",)),
    ("records.step_record", ("Histogram", "Issue", "IssueType", "Reading", "RunInfo", "Severity", "StepRecord")),
    ("storage.reader", ("find_runs", "read_run")),
    ("writers", ("ConsoleWriter", "JsonlWriter", "MemoryWriter", "TensorBoardWriter", "WandbWriter", "Writer")),
)


def __getattr__(name: str) -> Any:
    """Load the module that a public name stands in."""
    if name == "__version__":
        return importlib.metadata.version("gradflow-export")
    wanted = {"IssueSeverity": "Severity", "WandbSink": "WandbWriter"}.get(name, name)
    for home, names in _HOMES:
        if wanted in names:
            return getattr(importlib.import_module(f"gradflow_export.{home}"), wanted)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
