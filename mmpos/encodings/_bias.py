"""What the static biases share.

Coordinates under the two rules by offset, and an index from pairs to a table of offsets.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.coordinates import rescaled
from mmpos.encodings.base import PositionEncoding
from mmpos.functional.bias import offset_index, pair_offsets
from mmpos.functional.buckets import smallest_integer
from mmpos.positions import Positions

__all__ = ["BY_OFFSET", "offset_coordinates", "raster_coordinates", "table_index", "whole_coordinates"]

#: keep the spacing of patches, or stretch coordinates onto the training grid
BY_OFFSET = ("index", "rescaled")


def offset_coordinates(encoding: PositionEncoding, positions: Positions) -> Tensor:
    """Coordinates of which only differences count. Shape: ``(B or 1, N, A)``."""
    encoding.check_axes(positions)
    if encoding.resolution == "rescaled":
        return rescaled(positions, train_grid=encoding.training_grid(positions))
    return positions.coords


def whole_coordinates(positions: Positions, needed_by: str) -> Tensor:
    """Coordinates that count cells; raises for places between cells instead of rounding them.

    Coordinates of a raster that were never moved are whole by construction and not looked at.
    """
    coords = positions.coords
    known = positions.grid_size is not None and not positions.moved
    if known or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return coords
    if not bool((coords == coords.round()).all()):
        raise ValueError(
            f"positions: {needed_by} looks places up in a table and takes whole coordinates only, got fractions; "
            "use an encoding "
            "with facts.fractional"
        )
    return coords


def raster_coordinates(positions: Positions, needed_by: str, remedy: str) -> Tensor:
    """Whole coordinates of tokens that belong to a raster of known size; raises for free points."""
    if positions.grid_size is None:
        raise ValueError(f"positions: {needed_by} needs the grid the tokens belong to, got free points; {remedy}")
    return whole_coordinates(positions, needed_by)


def table_index(coords: Tensor, sizes: tuple[int, ...], num_prefix: int, *, clamp: bool = False) -> Tensor:
    """Row of a flat table for every pair of tokens: three rows of prefix tokens, if there are any, then offsets.

    Row 0 serves prefix -> placed, 1 placed -> prefix, 2 prefix -> prefix, offsets follow from row 3.

    Shape:
        coords ``(B or 1, N, A)``; returns ``(B or 1, P + N, P + N)`` in a small integer type.
    """
    index = offset_index(pair_offsets(coords), sizes, clamp=clamp)
    if num_prefix:
        index = F.pad(index + 3, (num_prefix, 0, num_prefix, 0), value=2)
        index[:, :num_prefix, num_prefix:] = 0
        index[:, num_prefix:, :num_prefix] = 1
    if torch.compiler.is_compiling():
        return index  # the number of rows may be symbolic
    return index.to(smallest_integer(3 + math.prod(2 * size - 1 for size in sizes)))
