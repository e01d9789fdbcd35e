"""See whether a PyTorch model is learning, and if not, which layer, since when, and what to do."""
