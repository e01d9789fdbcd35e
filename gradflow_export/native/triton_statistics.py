"""The statistics of the C library for tensors on a GPU: every tensor in one launch, then one launch that adds up.

Importing this needs triton; only ``metrics/arrays/one_launch.py`` does, and only where there is a CUDA device.
Sums are kept in float64, so that no square of a float32 leaves the range; zeros and non-finite entries are counted on
the bits. Tensors are cut into pieces of fixed size whose sums are joined in order: the result is the same each time.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = ("norm", "magnitudes", "max", "min", "zeros", "nonfinite", "entries")
"""What the rows of the result hold: those of the C library, and the number of entries."""

PIECE = 16_384
"""Greatest number of entries that one program of the first launch reads."""

BLOCK = 1_024
JOINED = 128


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _count(value: tl.tensor, valid: tl.tensor, sums: tl.tensor) -> tuple[tl.tensor, ...]:
    """Add a block of entries to what its lanes have seen so far."""
    squares, magnitudes, most, least, zeros, nonfinite = sums
    if value.dtype == tl.float64:
        wide = value
        bits = value.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        special = bits >= 0x7FF0000000000000
    else:
        if value.dtype == tl.bfloat16:  # by its bits: triton's interpreter loses the smallest in conversion
            single = (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            single = value.to(tl.float32)
        wide = single.to(tl.float64)
        bits = single.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        special = bits >= 0x7F800000
    squares += wide * wide
    magnitudes += tl.where(wide < 0, -wide, wide)
    # A NaN compares false and leaves them alone.
    most = tl.where(valid & (wide > most), wide, most)
    least = tl.where(valid & (wide < least), wide, least)
    zeros += (valid & (bits == 0)).to(tl.int32)
    nonfinite += (valid & special).to(tl.int32)
    return squares, magnitudes, most, least, zeros, nonfinite


@triton.jit(do_not_specialize=("first", "pieces"))  # type: ignore[untyped-decorator]  # triton has no types
def read_pieces(
    pointers: tl.tensor,
    plan: tl.tensor,
    partials: tl.tensor,
    first: tl.tensor,
    pieces: tl.tensor,
    ENTRY: tl.constexpr,  # noqa: N803 - constants are written so in kernels
    ALIGNED: tl.constexpr,  # noqa: N803 - as above
    BLOCK: tl.constexpr,  # noqa: N803 - as above
) -> None:
    """Sum up one piece of one tensor.

    Args:
        pointers: Addresses of the tensors.
        plan: Tensor, first entry and number of entries of each piece. Shape: ``[3, pieces]``.
        partials: Filled with squares, magnitudes, max, min, zeros, non-finite. Shape: ``[6, pieces]``.
        first: Piece of the first program.
        pieces: Number of pieces of the plan.
        ENTRY: Type of entries.
        ALIGNED: Whether every address is a multiple of 16.
        BLOCK: Entries read at once.
    """
    piece = first + tl.program_id(0).to(tl.int64)
    owner, start, count = tl.load(plan + piece), tl.load(plan + pieces + piece), tl.load(plan + 2 * pieces + piece)
    data = tl.load(pointers + owner).to(tl.pointer_type(ENTRY)) + start
    lanes = tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], dtype=tl.float64)
    none = tl.zeros([BLOCK], dtype=tl.int32)
    sums = (nothing, nothing, nothing - float("inf"), nothing + float("inf"), none, none)
    whole = count // BLOCK * BLOCK
    for at in range(0, whole, BLOCK):
        places = data + at + lanes
        if ALIGNED:  # lets four or eight entries be loaded at once
            places = tl.max_contiguous(tl.multiple_of(places, 16), BLOCK)
        sums = _count(tl.load(places), lanes >= 0, sums)
    rest = lanes < count - whole
    sums = _count(tl.load(data + whole + lanes, mask=rest, other=0.0), rest, sums)
    squares, magnitudes, most, least, zeros, nonfinite = sums
    tl.store(partials + piece, tl.sum(squares, axis=0))
    tl.store(partials + pieces + piece, tl.sum(magnitudes, axis=0))
    tl.store(partials + 2 * pieces + piece, tl.max(most, axis=0))
    tl.store(partials + 3 * pieces + piece, tl.min(least, axis=0))
    tl.store(partials + 4 * pieces + piece, tl.sum(zeros, axis=0).to(tl.float64))
    tl.store(partials + 5 * pieces + piece, tl.sum(nonfinite, axis=0).to(tl.float64))


@triton.jit(do_not_specialize=("pieces", "tensors"))  # type: ignore[untyped-decorator]  # triton has no types
def join_pieces(
    partials: tl.tensor,
    bounds: tl.tensor,
    out: tl.tensor,
    pieces: tl.tensor,
    tensors: tl.tensor,
    JOINED: tl.constexpr,  # noqa: N803 - constants are written so in kernels
) -> None:
    """Join the pieces of one tensor.

    Args:
        partials: What :func:`read_pieces` filled. Shape: ``[6, pieces]``.
        bounds: First piece, piece after the last, and number of entries of each tensor. Shape: ``[3, tensors]``.
        out: Filled with the rows named in ``ROWS``. Shape: ``[7, tensors]``.
        pieces: Number of pieces of the plan.
        tensors: Number of tensors.
        JOINED: Pieces read at once.
    """
    tensor = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(bounds + tensor), tl.load(bounds + tensors + tensor)
    lanes = tl.arange(0, JOINED)
    nothing = tl.zeros([JOINED], dtype=tl.float64)
    squares, magnitudes, zeros, nonfinite = nothing, nothing, nothing, nothing
    most, least = nothing - float("inf"), nothing + float("inf")
    for at in range(begin, end, JOINED):
        place = partials + at + lanes
        mine = at + lanes < end
        squares += tl.load(place, mask=mine, other=0.0)
        magnitudes += tl.load(place + pieces, mask=mine, other=0.0)
        most = tl.maximum(most, tl.load(place + 2 * pieces, mask=mine, other=float("-inf")))
        least = tl.minimum(least, tl.load(place + 3 * pieces, mask=mine, other=float("inf")))
        zeros += tl.load(place + 4 * pieces, mask=mine, other=0.0)
        nonfinite += tl.load(place + 5 * pieces, mask=mine, other=0.0)
    place = out + tensor
    tl.store(place, tl.sqrt(tl.sum(squares, axis=0)))
    tl.store(place + tensors, tl.sum(magnitudes, axis=0))
    tl.store(place + 2 * tensors, tl.max(most, axis=0))
    tl.store(place + 3 * tensors, tl.min(least, axis=0))
    tl.store(place + 4 * tensors, tl.sum(zeros, axis=0))
    tl.store(place + 5 * tensors, tl.sum(nonfinite, axis=0))
    tl.store(place + 6 * tensors, tl.load(bounds + 2 * tensors + tensor).to(tl.float64))
