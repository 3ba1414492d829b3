"""Learned absolute tables of timm, Hugging Face, DINOv2, MAE, NaFlex and SigLIP 2.

The codes store the same numbers as ``(1, P + H W, D)``, ``(P + H W, D)``, ``(1, H, W, D)`` or ``(H, W, D)``, row-major
and with rows of prefix tokens first. Flat tables do not say what their grid was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmpos.functional.resample import check_table

__all__ = ["axis_tables", "learned_table"]


def learned_table(table: Tensor, grid: Sequence[int] | None = None, num_prefix: int = 0) -> dict[str, Tensor]:
    """A reference table as the state of the ``learned`` encoding, which resizes it to its own grid when it is loaded.

    Args:
        table: a flat table, or one that is shaped as its grid.
        grid: sizes of the grid of a flat table, height before width. ``None`` says that the reference code holds square
            tables only (timm without ``old_size``, Hugging Face ViT, MAE); rows that make no square raise.
        num_prefix: rows of prefix tokens in front of a flat table.

    Example:
        >>> {key: tuple(value.shape) for key, value in learned_table(torch.zeros(1, 7, 4), (2, 3), 1).items()}
        {'table': (7, 4), 'table_grid': (2,)}
    """
    flat = table.dim() == 2 or (table.dim() == 3 and table.shape[0] == 1)
    if not flat:
        shaped = table[0] if table.dim() == 4 and table.shape[0] == 1 else table
        if shaped.dim() < 3 or num_prefix or (grid is not None and tuple(grid) != tuple(shaped.shape[:-1])):
            raise ValueError(
                f"table: expected (1, rows, D), (rows, D) or a table shaped as its grid without prefix rows, got "
                f"{tuple(table.shape)} with grid {None if grid is None else tuple(grid)} and num_prefix {num_prefix}"
            )
        grid = tuple(shaped.shape[:-1])
        rows = shaped.flatten(0, -2)
    else:
        rows = table.reshape(table.shape[-2:])
        if grid is None:
            side = math.isqrt(max(rows.shape[0] - num_prefix, 0))
            if side == 0 or side * side != rows.shape[0] - num_prefix:
                raise ValueError(
                    f"grid: {rows.shape[0]} rows with {num_prefix} prefix rows are no square table; give "
                    "grid=(height, width) and the right num_prefix"
                )
            grid = (side, side)
        check_table(rows, grid, num_prefix)
    return {"table": rows, "table_grid": torch.tensor([int(size) for size in grid])}


def axis_tables(*tables: Tensor) -> list[Tensor]:
    """Factorised tables ``(1, n, D)`` or ``(n, D)``, one per axis, row first, for ``add_axis_tables``."""
    return [table.reshape(table.shape[-2:]) for table in tables]
