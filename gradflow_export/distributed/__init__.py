"""Readings of several ranks: what each holds, how they travel to rank 0, how they become one (floor 2)."""
