"""Absolute win: a global table that is resized to the grid plus a window table that is tiled over it.

Bolya, Ryali, Hoffman, Feichtenhofer, *Window Attention is Bugged: How not to Interpolate Position Embeddings*, ICLR
2024, arXiv 2311.05613. References: timm ``hiera`` and Hugging Face ``sam2`` (Apache-2.0). They need a grid that is a
multiple of the window; here the overhang is cropped. Hiera widens the kernel when the grid is smaller than the table,
SAM2 does not (``antialias=False``). ``resolution="tile"`` is the rule for ViTDet: the pretrained table itself is
repeated, because windows of its size saw nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.encodings._bias import whole_coordinates
from mmpos.encodings._table import add_to_placed, table_at
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.positions import Positions


@register("abs_win")
class AbsWin(PositionEncoding):
    """Added to the tokens once, before the first block; prefix tokens get nothing.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        window: size of the window table, one number or one per axis; ``None`` for none.
        antialias: whether the global table is low-passed when the grid is smaller.
        init_std: standard deviation of the initial values; 0 for zeros.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`; ``train_grid`` is the size of the global
            table and required. ``resolution``: ``bicubic`` resizes the global table, ``tile`` repeats it.

    Shape:
        ``table (*train_grid, D)``, ``window (*window, D)``.

    Example:
        >>> from mmpos import Positions, create_encoding
        >>> stack = create_encoding("abs_win", 6, 2, train_grid=(2, 3), window=(2, 2))
        >>> stack.add_to_tokens(torch.zeros(1, 20, 6), Positions.grid(4, 5)).shape
        torch.Size([1, 20, 6])
    """

    facts = Facts(
        title="absolute win",
        source="Bolya et al. 2024, arXiv 2311.05613",
        plugs_into=("tokens",),
        axes=(1, 3),
        fractional=False,
        resolution_rules=("bicubic", "tile"),
        learned=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window: int | Sequence[int] | None = 8,
        antialias: bool = True,
        init_std: float = 0.02,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if self.train_grid is None:
            raise ValueError("train_grid: abs_win has a table on a grid and needs its size, for example (14, 14)")
        window = [window] * self.axes if isinstance(window, int) else window
        if window is not None and (len(window) != self.axes or min(window) < 1):
            raise ValueError(f"window: expected {self.axes} positive sizes, got {tuple(window)}")
        self.antialias = antialias
        self.init_std = init_std
        self.table = nn.Parameter(torch.empty(*self.train_grid, dim))
        self.window = None if window is None else nn.Parameter(torch.empty(*window, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal or zeros."""
        for parameter in self.parameters():
            if self.init_std:
                nn.init.trunc_normal_(parameter, std=self.init_std)
            else:
                nn.init.zeros_(parameter)

    def values(self, positions: Positions) -> Tensor:
        """What is added to the placed tokens, ``(B or 1, N, D)``."""
        self.check_axes(positions)
        whole_coordinates(positions, self.name)
        assert self.train_grid is not None
        if self.resolution == "tile":
            out = _tiled(self.table, positions)
        else:
            out = table_at(self.table, self.train_grid, positions, "bicubic", self.antialias, self.name)
        return out if self.window is None else out + _tiled(self.window, positions)

    def add_to_tokens(self, x: Tensor, positions: Positions) -> Tensor:
        return add_to_placed(x, self.values(positions), positions)


def _tiled(table: Tensor, positions: Positions) -> Tensor:
    """A table repeated over the plane, read at the cells of the tokens."""
    cell: Tensor | None = None
    for axis, size in enumerate(table.shape[:-1]):
        along = positions.coords[..., axis].round().long() % size
        cell = along if cell is None else cell * size + along
    assert cell is not None
    return table.flatten(0, -2)[cell]
