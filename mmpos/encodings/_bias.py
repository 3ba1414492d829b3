"""What the static biases share.

Coordinates under the two rules by offset, and an index from pairs to a table of offsets.
"""

from __future__ import annotations

from torch import Tensor

from mmpos.coordinates import rescaled
from mmpos.encodings.base import PositionEncoding
from mmpos.functional.bias import offset_index, pair_offsets
from mmpos.functional.buckets import compact
from mmpos.positions import Positions

__all__ = ["BY_OFFSET", "offset_coordinates", "raster_coordinates", "table_index"]

#: keep the spacing of patches, or stretch coordinates onto the training grid
BY_OFFSET = ("index", "rescaled")


def offset_coordinates(encoding: PositionEncoding, positions: Positions) -> Tensor:
    """Coordinates of which only differences count. Shape: ``(B or 1, N, A)``."""
    encoding.check_axes(positions)
    if encoding.resolution == "rescaled":
        return rescaled(positions, train_grid=encoding.training_grid(positions))
    return positions.coords


def raster_coordinates(positions: Positions, needed_by: str, remedy: str) -> Tensor:
    """Whole-number coordinates of tokens that belong to a raster; raises for free or moved points."""
    if positions.grid_size is None or positions.moved:
        what = "free points" if positions.grid_size is None else "coordinates that left the raster"
        raise ValueError(f"positions: {needed_by} needs the grid the tokens belong to, got {what}; {remedy}")
    return positions.coords


def table_index(coords: Tensor, sizes: tuple[int, ...], num_prefix: int, *, clamp: bool = False) -> Tensor:
    """Row of a flat table over offsets for every pair of tokens; rows after the last are those of prefix tokens.

    With ``R`` rows of offsets, row ``R`` serves prefix -> placed, ``R + 1`` placed -> prefix, ``R + 2`` prefix ->
    prefix.

    Shape:
        coords ``(B or 1, N, A)``; returns ``(B or 1, P + N, P + N)`` in a small integer type.
    """
    rows = 1
    for size in sizes:
        rows = rows * (2 * size - 1)
    index = compact(offset_index(pair_offsets(coords), sizes, clamp=clamp), rows + 2, num_prefix)
    if num_prefix:
        index[:, :num_prefix, num_prefix:] = rows
        index[:, num_prefix:, :num_prefix] = rows + 1
    return index
