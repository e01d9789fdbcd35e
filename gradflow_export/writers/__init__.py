"""Places that records go to; they know records only (floor 1)."""
