"""Sessions that begin where another ended: in a forked child, or from a checkpoint."""
