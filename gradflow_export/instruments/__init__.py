"""Instruments: one file each; each owns its own hook handles (floor 3, torch)."""
