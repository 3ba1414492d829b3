"""Fuzzy encoding (ViTAR): a learned table that training reads a little beside each cell, so that it learns to be read
in between.

Fan et al., *ViTAR: Vision Transformer with Any Resolution*, arXiv 2403.18361. No official code. Each token of the
``h x w`` grid reads the table at ``((i + 0.5 + s) H / h - 0.5, ...)`` with ``s`` uniform on (-0.5, 0.5) in training and
zero otherwise. The paper does not say how corners are aligned, what happens beyond the border, nor whether samples
share the noise; the defaults here are half-pixel centres, the border value, and noise of its own for each sample. A
community port samples around the centre of the table for every token, because it never adds the grid: that reading is
not offered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.encodings._table import add_to_placed
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.resample import read_table
from mmpos.positions import Positions


@register("fuzzy")
class Fuzzy(PositionEncoding):
    """Learned table read at jittered places in training.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        std: standard deviation of the normal initialisation.
        jitter: half-width of the noise, in cells of the image at hand.
        per_sample: whether each sample has noise of its own; ``False`` draws once for the batch.
        align_corners: map the first and last cell centres onto each other instead of the outer edges of the fields.
        padding: what lies beyond the border, ``border`` (its value) or ``zeros``.
        embed_prefix: whether prefix tokens have vectors of their own; they are never jittered.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`; ``train_grid`` is required.

    The noise comes from ``generator`` when that attribute is set to a ``torch.Generator``, else from the global state.

    Shape:
        ``table`` is ``(*train_grid, D)``.

    Example:
        >>> from mmpos import create_encoding
        >>> fuzzy = create_encoding("fuzzy", dim=4, num_heads=1, train_grid=(2, 3)).eval().shared["fuzzy"]
        >>> bool((fuzzy.embed(Positions.grid(2, 3))[0] == fuzzy.table.flatten(0, 1)).all())
        True
    """

    facts = Facts(
        title="fuzzy table (ViTAR)",
        source="Fan et al. 2024, arXiv 2403.18361",
        plugs_into=("tokens",),
        resolution_rules=("interpolated",),
        learned=True,
    )
    generator: torch.Generator | None = None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        std: float = 0.02,
        jitter: float = 0.5,
        per_sample: bool = True,
        align_corners: bool = False,
        padding: str = "border",
        embed_prefix: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if self.train_grid is None:
            raise ValueError(
                "train_grid: fuzzy has one vector for each cell of the training grid; give train_grid=(height, width)"
            )
        if padding not in ("border", "zeros"):
            raise ValueError(f"padding: expected 'border' or 'zeros', got {padding!r}")
        if jitter < 0:
            raise ValueError(f"jitter: expected 0 or more cells, got {jitter}")
        self.std = std
        self.jitter = jitter
        self.per_sample = per_sample
        self.align_corners = align_corners
        self.padding = padding
        self.table = nn.Parameter(torch.empty(*self.train_grid, dim))
        self.prefix = nn.Parameter(torch.empty(self.num_prefix, dim)) if embed_prefix and self.num_prefix else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.std)
        if self.prefix is not None:
            nn.init.normal_(self.prefix, std=self.std)

    def offsets(self, positions: Positions, batch: int) -> Tensor:
        """New noise in cells. Shape: ``(batch or 1, N, A)``."""
        rows = batch if self.per_sample else 1
        coords = positions.coords
        size = (rows, coords.shape[1], coords.shape[2])
        noise = torch.rand(size, generator=self.generator, device=coords.device, dtype=coords.dtype)
        return (2 * noise - 1) * self.jitter

    def places(self, positions: Positions, offsets: Tensor | None = None) -> Tensor:
        """Where the tokens read, in cells of the table. Shape: ``(B or 1, N, A)``."""
        self.check_axes(positions)
        coords = positions.coords if offsets is None else positions.coords + offsets.to(positions.coords.dtype)
        size = positions.sizes(self.name)[:, None]
        table = torch.tensor(self.train_grid, device=coords.device, dtype=coords.dtype)
        if self.align_corners:
            return coords * (table - 1) / (size - 1).clamp_min(1)
        return (coords + 0.5) * table / size - 0.5

    def embed(self, positions: Positions, offsets: Tensor | None = None) -> Tensor:
        """The table at the places of the tokens. Shape: ``(B or 1, N, D)``."""
        places = self.places(positions, offsets)
        table: Tensor = self.table
        if self.padding == "zeros":
            table = F.pad(table, (0, 0, *(1, 1) * self.axes))
            places = places + 1
        # places are cells of the table already: its own sizes as the field change nothing
        size = torch.tensor([table.shape[:-1]], device=places.device, dtype=places.dtype)
        return read_table(table, places, size, "bilinear", antialias=False)

    def add_to_tokens(self, x: Tensor, positions: Positions, offsets: Tensor | None = None) -> Tensor:
        """Add the vectors: at ``offsets`` when given, at random ones in training, at the cells themselves otherwise.

        Shape:
            x ``(B, P + N, D)`` in and out, offsets ``(B or 1, N, A)`` in cells of the image.
        """
        if offsets is None and self.training and self.jitter:
            offsets = self.offsets(positions, x.shape[0])
        return add_to_placed(x, self.embed(positions, offsets), positions, self.prefix)
