"""A second held-out set, written later by somebody who had read no rule; it is in neither half of the draw."""

from silent.second import healthy_loops, healthy_models, learning, losses, modes, starts, targets

BUGS = learning.BUGS + losses.BUGS + targets.BUGS + starts.BUGS + modes.BUGS
HEALTHY = healthy_models.HEALTHY + healthy_loops.HEALTHY
