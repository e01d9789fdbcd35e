"""Weights & Biases: rows, alerts, tables and files of a run."""

from gradflow_export.writers.wandb.writer import WandbWriter

__all__ = ["WandbWriter"]
