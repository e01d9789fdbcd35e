"""Checks of parameters: which get no update and why, and what they were before the first step."""
