"""Detectors over records: one file per family of pathology; pure, no torch, no clock (floor 1)."""
