"""The half on which rules may be developed."""

from silent.dev import healthy_loops, healthy_models, loops, losses, not_training, scales

BUGS = not_training.BUGS + losses.BUGS + scales.BUGS + loops.BUGS
HEALTHY = healthy_models.HEALTHY + healthy_loops.HEALTHY
