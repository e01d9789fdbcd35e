"""Tries in a copy of a run what mends an issue, on batches that the run has seen."""
