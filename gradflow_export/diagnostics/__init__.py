"""Diagnosis of backward passes and discrete updates, from an exporter's records."""

from gradflow_export.diagnostics.backward import BackwardPassDiagnostics
from gradflow_export.diagnostics.context import TrainContext, create_modular_train_context
from gradflow_export.diagnostics.discrete import DiscreteUpdateAnalyzer

__all__ = ["BackwardPassDiagnostics", "DiscreteUpdateAnalyzer", "TrainContext", "create_modular_train_context"]
