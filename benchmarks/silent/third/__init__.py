"""A third set, written later still by people who had read no rule; it is in neither half of the draw."""

from silent.third import healthy_a, healthy_b, layers, losses, modes, numbers, passes, rates, wiring

BUGS = wiring.BUGS + passes.BUGS + losses.BUGS + layers.BUGS + numbers.BUGS + rates.BUGS + modes.BUGS
HEALTHY = healthy_a.HEALTHY + healthy_b.HEALTHY
