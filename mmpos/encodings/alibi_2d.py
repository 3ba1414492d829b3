"""ALiBi in two and more dimensions: a penalty that grows with distance, with a fixed slope for each head.

Fuller, Millard, Green, *CROMA*, NeurIPS 2023, arXiv 2311.00566 (antofuller/CROMA, MIT) on images; the form for any
coordinates is that of DTU-PAS/parabolic-position-encoding (no licence file; nothing of it is here). CROMA has no
prefix tokens; the other places CLS at the corner before the first patch, so that it prefers the top left. Both are
options, and the default is no penalty for prefix tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpos.encodings._bias import BY_OFFSET, offset_coordinates
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.bias import alibi_slopes, distances, pad_prefix
from mmpos.positions import Positions


@register("alibi_2d")
class Alibi2d(PositionEncoding):
    """``bias = -slope * euclidean distance`` in patches.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        prefix: ``zero``, no penalty from and to prefix tokens, or ``corner``, which places them at index -1 along
            every axis.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`; ``resolution="rescaled"`` measures
            distances in patches of the training grid.

    Example:
        >>> from mmpos import Positions, create_encoding
        >>> state = create_encoding("alibi_2d", 64, 4, num_prefix=1).prepare(Positions.grid(2, 3, num_prefix=1))[0]
        >>> state.prepared[0].shape, state.prepared[0][0, 0, 1].tolist()[:3]
        (torch.Size([1, 4, 7, 7]), [0.0, -0.0, -0.25])
    """

    facts = Facts(
        title="ALiBi-2D",
        source="Fuller et al. 2023, arXiv 2311.00566",
        plugs_into=("bias",),
        resolution_rules=BY_OFFSET,
        relative=True,
    )

    def __init__(self, dim: int, num_heads: int, *, prefix: str = "zero", **common: Any) -> None:
        super().__init__(dim, num_heads, **common)
        if prefix not in ("zero", "corner"):
            raise ValueError(f"prefix: expected 'zero' or 'corner', got {prefix!r}")
        self.prefix = prefix

    def prepare(self, positions: Positions) -> Tensor:
        """The bias, ``(B or 1, heads, L, L)``, shared by all layers."""
        coords = offset_coordinates(self, positions)
        count = positions.num_prefix
        if count and self.prefix == "corner":
            corner = coords.new_full((coords.shape[0], count, self.axes), -1.0)
            coords, count = torch.cat([corner, coords], 1), 0
        slopes = alibi_slopes(self.num_heads, dtype=coords.dtype, device=coords.device)
        return pad_prefix(-slopes[:, None, None] * distances(coords)[:, None], count)

    def logit_bias(self, q: Tensor, k: Tensor, prepared: Tensor) -> Tensor:
        """The bias."""
        return prepared
