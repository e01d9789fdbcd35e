"""Programs drawn from a grammar, and mistakes made in them by operators: the detector's estimate on unseen code."""
