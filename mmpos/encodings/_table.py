"""What additive encodings share: reading a table at positions, and adding values to the placed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.functional.resample import read_table, resample_grid
from mmpos.positions import Positions

__all__ = ["add_to_placed", "table_at"]


def table_at(
    values: Tensor, grid: Sequence[int], positions: Positions, mode: str, antialias: bool, needed_by: str
) -> Tensor:
    """Values of a table at positions: the whole table resized for a raster, single places for everything else.

    Shape:
        values ``(*grid, D)``; returns ``(B or 1, N, D)``.
    """
    if positions.grid_size is not None and not positions.moved:
        rows = resample_grid(values, positions.grid_size, mode, antialias, grid=grid).flatten(0, -2)
        return rows[None] if positions.kept is None else rows[positions.kept]
    return read_table(values, positions.coords, positions.sizes(needed_by), mode, antialias, grid=grid)


def add_to_placed(x: Tensor, values: Tensor, positions: Positions, prefix: Tensor | None = None) -> Tensor:
    """Add values to the placed tokens, and rows of their own, if any, to the prefix tokens.

    Shape:
        x ``(B, P + N, D)``, values ``(B or 1, N, D)``, prefix ``(P, D)``; returns the shape and dtype of x.
    """
    positions.check_tokens(x)
    if prefix is None:
        values = F.pad(values, (0, 0, positions.num_prefix, 0))
    else:
        values = torch.cat([prefix.expand(values.shape[0], -1, -1), values], dim=1)
    return x + values.to(x.dtype)
