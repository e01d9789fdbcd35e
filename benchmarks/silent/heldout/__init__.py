"""The held-out half, which nobody who writes rules reads before its first contact with them."""

from silent.heldout import healthy_loops, healthy_models, loops, losses, not_training, scales

BUGS = not_training.BUGS + losses.BUGS + scales.BUGS + loops.BUGS
HEALTHY = healthy_models.HEALTHY + healthy_loops.HEALTHY
