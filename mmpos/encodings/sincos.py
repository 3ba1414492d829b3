"""Fixed sine and cosine encoding, added to the tokens, for any number of axes.

Vaswani et al., *Attention Is All You Need*, arXiv 1706.03762; two axes as in MAE, arXiv 2111.06377 (reference code
CC-BY-NC, nothing of it is here). The default puts the row first, ``preset="mae"`` the column first. Values are computed
from coordinates, so fractional places and token subsets need no table; MAE checkpoints that were fine-tuned with a
resized table use ``resolution="interpolated"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmpos.coordinates import index, rescaled
from mmpos.encodings._table import add_to_placed, table_at
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.resample import MODES
from mmpos.functional.sincos import SINCOS_PRESETS, axis_widths, sincos
from mmpos.positions import Positions


@register("sincos")
class SinCos(PositionEncoding):
    """Adds sine and cosine of the coordinates to every placed token; prefix tokens get zero.

    Args:
        dim: model width ``D``; a multiple of twice the axes unless ``widths`` says otherwise.
        num_heads: attention heads ``h``.
        base: base of the ladder of frequencies.
        preset: ``default`` (row first), ``mae`` (column first), ``timm``, ``pypi`` or ``pape``; sets the next three.
        layout: ``block``, ``interleaved`` or ``grouped``, see :func:`mmpos.functional.sincos.sincos`; default that of
            the preset.
        axis_order: ``ij`` row first or ``xy`` column first; default that of the preset.
        widths: channels of each axis, a rule or numbers; default that of the preset.
        offset: added to the patch index, in patches.
        align: how ``resolution="rescaled"`` stretches, ``corner`` or ``centre``.
        mode: how ``resolution="interpolated"`` resizes the table of the training grid.
        antialias: whether it widens the kernel on coarser grids.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.

    Example:
        >>> import torch
        >>> from mmpos import create_encoding
        >>> stack = create_encoding("sincos", dim=8, num_heads=2)
        >>> stack.add_to_tokens(torch.zeros(1, 6, 8), Positions.grid(2, 3))[0, 0].tolist()
        [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    """

    facts = Facts(
        title="sin-cos",
        source="Vaswani et al. 2017, arXiv 1706.03762",
        plugs_into=("tokens",),
        resolution_rules=("index", "rescaled", "interpolated"),
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        base: float = 10000.0,
        preset: str = "default",
        layout: str | None = None,
        axis_order: str | None = None,
        widths: str | Sequence[int] | None = None,
        offset: float = 0.0,
        align: str = "corner",
        mode: str = "bicubic",
        antialias: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if preset not in SINCOS_PRESETS:
            raise ValueError(f"preset: expected one of {sorted(SINCOS_PRESETS)}, got {preset!r}")
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
        given = {"layout": layout, "axis_order": axis_order, "widths": widths}
        self.switches = SINCOS_PRESETS[preset] | {key: value for key, value in given.items() if value is not None}
        axis_widths(dim, self.axes, self.switches["widths"])  # raises now rather than in the first forward pass
        self.base = base
        self.offset = offset
        self.align = align
        self.mode = mode
        self.antialias = antialias

    def features(self, coords: Tensor) -> Tensor:
        """Values at coordinates. Shape: ``(..., A)`` to ``(..., D)``."""
        return sincos(coords, self.dim, self.base, **self.switches)

    def add_to_tokens(self, x: Tensor, positions: Positions) -> Tensor:
        """Add the values of the resolution rule."""
        self.check_axes(positions)
        if self.resolution == "index":
            values = self.features(index(positions, self.offset))
        elif self.resolution == "rescaled":
            values = self.features(rescaled(positions, self.offset, self.training_grid(positions), self.align))
        else:
            train = self.training_grid(positions)
            raster = Positions.grid(*train, device=positions.coords.device, dtype=positions.coords.dtype)
            table = self.features(index(raster, self.offset))[0].unflatten(0, train)
            values = table_at(table, train, positions, self.mode, self.antialias, self.name)
        return add_to_placed(x, values, positions)

    def extra_repr(self) -> str:
        """Shown in ``print(model)``."""
        switches = ", ".join(f"{key}={value!r}" for key, value in self.switches.items())
        return f"{super().extra_repr()}, base={self.base}, {switches}"
