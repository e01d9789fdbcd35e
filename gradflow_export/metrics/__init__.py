"""Pure functions from tensors to tensors: one idea per file, no hooks, no state, no names (floor 1, torch)."""
