"""Views that split dimensions and join neighbours move none, whatever the sizes; those that swap uneven ones do."""

import itertools
import math
import random

from gradflow_export.checks.layers.reordered import cut

SIZES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)


def viewed(draw):
    """Return the shapes before and after a dimension is split and a part of it joined to what stands beside it."""
    before = [draw.choice(SIZES) for _ in range(draw.randint(2, 4))]
    place = draw.randrange(1, len(before))
    size = before[place]
    part = draw.choice([d for d in range(1, size + 1) if size % d == 0])
    left, right, split = before[:place], before[place + 1 :], [part, size // part]
    ways = [
        [*left, *split, *right],
        [*left[:-1], left[-1] * part, size // part, *right],
        [math.prod(left) * part, size // part, *right],
    ]
    if right:
        ways.append([*left, part, size // part * right[0], *right[1:]])
    return tuple(before), tuple(draw.choice(ways))


def test_a_plain_split_and_join_cuts_nothing():
    draw = random.Random(0)
    assert not [shapes for shapes in (viewed(draw) for _ in range(5_000)) if cut(*shapes)]


def test_a_swap_of_sizes_of_which_none_divides_the_other_cuts():
    """Samples first, or not at all."""
    for a, b in itertools.permutations(SIZES, 2):
        if a % b and b % a:
            assert cut((32, a, b), (32, b, a)) > 0 < cut((a, b), (b, a))
