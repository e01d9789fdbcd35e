"""Gradients as they arrive, before they are clipped, and as the optimizer uses them."""
