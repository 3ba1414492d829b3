"""Learned absolute encoding: one vector for each cell of the training grid, resized for any other grid.

Dosovitskiy et al., *An Image is Worth 16x16 Words*, arXiv 2010.11929. Compared with timm and Hugging Face transformers
(both Apache-2.0), which resize with and without antialiasing and so differ even when enlarging, by up to 0.2 for a
table of unit variance: ``antialias`` says which, and the default is timm's. The source grid is stored with the weights,
so a rectangular table stays one.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.encodings._table import add_to_placed, table_at
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.resample import MODES, fit_table
from mmpos.positions import Positions

_log = logging.getLogger(__name__)


@register("learned")
class Learned(PositionEncoding):
    """Adds a learned vector to every token.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        std: standard deviation of the normal initialisation. 0.02 is usual and far too small for narrow models that
            train for minutes; the recipes use 0.5.
        mode: ``bicubic`` or ``bilinear`` resizing.
        antialias: widen the kernel when the grid is smaller than that of training (timm); ``False`` as in Hugging Face.
        embed_prefix: whether the prefix tokens have rows of their own, in front of the table.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`; ``train_grid`` is required.

    Shape:
        ``table`` is ``(P + prod(train_grid), D)``, or without the ``P`` rows.

    Example:
        >>> from mmpos import create_encoding
        >>> stack = create_encoding("learned", dim=8, num_heads=2, train_grid=(2, 3), num_prefix=1)
        >>> stack.add_to_tokens(torch.zeros(1, 21, 8), Positions.grid(4, 5, num_prefix=1)).shape
        torch.Size([1, 21, 8])
    """

    facts = Facts(
        title="learned APE",
        source="Dosovitskiy et al. 2020, arXiv 2010.11929",
        plugs_into=("tokens",),
        resolution_rules=("interpolated",),
        learned=True,
    )

    table_grid: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        std: float = 0.02,
        mode: str = "bicubic",
        antialias: bool = True,
        embed_prefix: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if self.train_grid is None:
            raise ValueError(
                f"train_grid: {self.name} has one vector for each cell of the training grid and needs its sizes; give "
                "train_grid=(height, width) in patches"
            )
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
        self.std = std
        self.mode = mode
        self.antialias = antialias
        self.prefix_rows = self.num_prefix if embed_prefix else 0
        self.table = nn.Parameter(torch.empty(self.prefix_rows + math.prod(self.train_grid), dim))
        # saved with the table: the number of rows alone does not tell 2 x 8 from 4 x 4
        self.register_buffer("table_grid", torch.empty(self.axes, dtype=torch.int64))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal initialisation."""
        nn.init.normal_(self.table, std=self.std)
        self.table_grid.copy_(torch.tensor(self.train_grid))

    def values(self) -> Tensor:
        """The table without prefix rows. Shape: ``(*train_grid, D)``."""
        assert self.train_grid is not None
        return self.table[self.prefix_rows :].unflatten(0, self.train_grid)

    def add_to_tokens(self, x: Tensor, positions: Positions) -> Tensor:
        """Add the table, resized when the grid is not that of training."""
        self.check_axes(positions)
        if self.prefix_rows and positions.num_prefix != self.prefix_rows:
            raise ValueError(
                f"positions.num_prefix: the table of {self.name} has rows for {self.prefix_rows} prefix tokens, got "
                f"{positions.num_prefix}; create it with num_prefix={positions.num_prefix} or embed_prefix=False"
            )
        assert self.train_grid is not None
        values = table_at(self.values(), self.train_grid, positions, self.mode, self.antialias, self.name)
        return add_to_placed(x, values, positions, self.table[: self.prefix_rows] if self.prefix_rows else None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take tables of other grids: every way of loading weights comes through here."""
        error_msgs = args[-1]
        table, grid = state_dict.get(f"{prefix}table"), state_dict.get(f"{prefix}table_grid")
        assert self.train_grid is not None
        if table is not None and grid is None and table.shape == self.table.shape:
            # weights of other code: equally many rows are taken as the same grid
            state_dict[f"{prefix}table_grid"] = self.table_grid
        elif table is not None and grid is None:
            error_msgs.append(
                f"{prefix}table: got {tuple(table.shape)}, expected {tuple(self.table.shape)}, and "
                f"{prefix}table_grid, the grid it was saved at, is missing; use "
                "mmpos.checkpoints.learned_table(table, grid=(height, width))"
            )
            return
        elif table is not None and grid is not None:
            try:
                fitted, line = fit_table(
                    table, grid.tolist(), self.train_grid, self.mode, self.antialias, num_prefix=self.prefix_rows
                )
            except ValueError as error:
                error_msgs.append(f"{prefix}{error}")
                return
            if line:
                _log.info("%s%s", f"{prefix.rstrip('.')}: " if prefix else "", line)
            state_dict[f"{prefix}table"] = fitted
            state_dict[f"{prefix}table_grid"] = torch.tensor(self.train_grid, device=grid.device)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Shown in ``print(model)``."""
        return f"{super().extra_repr()}, prefix_rows={self.prefix_rows}, mode={self.mode!r}, antialias={self.antialias}"
