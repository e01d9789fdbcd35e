"""Analyzers: drive a model for a few passes, judge it as an exporter would, and leave it as it was."""
