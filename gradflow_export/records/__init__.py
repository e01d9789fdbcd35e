"""Frozen data: step records, issues, the catalogue of metrics (floor 0: numpy only)."""
