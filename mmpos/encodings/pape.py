"""PaPE: every query weighs relative position by its own downward parabolas along learned axes.

*Parabolic Position Encoding*, arXiv 2602.01418. Reference: DTU-PAS/parabolic-position-encoding, which states no
licence: nothing of it is here, only the formulas. The reference appends ``3 M + 2`` columns to queries and keys (152
for 50 parabolas) and needs raw coordinates; here the parabolas of a query are summed to one quadratic form first, so
that 5 columns remain on an image and 9 in a video, and coordinates are taken about their mean, which changes nothing
and keeps half precision finite and accurate. The slopes are folded through the axes in every ``prepare``, never cached:
the reference caches them in ``eval()`` and goes stale when weights are loaded later.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.encodings._parabolic import ParabolicEncoding, Places
from mmpos.encodings.base import Facts, wide_dtype
from mmpos.encodings.registry import register
from mmpos.functional.parabolic import key_columns, quadratic_forms, query_columns, query_constant
from mmpos.positions import Positions


@register("pape")
class PaPE(ParabolicEncoding):
    """Parabolic position encoding, a content-dependent bias inside the scaled logits.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        parabolas: learned axes ``M`` of each head.
        parabolic: arguments of :class:`~mmpos.encodings._parabolic.ParabolicEncoding`.

    Shape:
        ``axes_map`` is ``(h, M, A)``, ``curvature.weight`` and ``slope.weight`` are ``(h M, D)``, head-major.

    Example:
        >>> from mmpos import Positions, attend, create_encoding
        >>> stack = create_encoding("pape", dim=16, num_heads=2)
        >>> state = stack.prepare(Positions.grid(2, 3))[0]
        >>> attend(*torch.randn(3, 1, 2, 6, 8), state, x=torch.randn(1, 6, 16)).shape
        torch.Size([1, 2, 6, 8])
    """

    facts = Facts(
        title="PaPE",
        source="arXiv 2602.01418",
        plugs_into=("qk",),
        scope="layer",
        resolution_rules=("index", "rescaled", "normalised"),
        relative=True,
        learned=True,
    )
    fp32_parameters = ("axes_map",)

    def __init__(self, dim: int, num_heads: int, *, parabolas: int = 50, **parabolic: Any) -> None:
        super().__init__(dim, num_heads, **parabolic)
        if parabolas < 1:
            raise ValueError(f"parabolas: expected at least 1, got {parabolas}")
        self.parabolas = parabolas
        self.axes_map = nn.Parameter(torch.empty(num_heads, parabolas, self.axes, dtype=wide_dtype()))
        self.curvature = nn.Linear(dim, num_heads * parabolas, bias=False)
        self.slope = nn.Linear(dim, num_heads * parabolas, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.uniform_(self.axes_map, -1 / math.sqrt(self.axes), 1 / math.sqrt(self.axes))
        self.curvature.reset_parameters()
        self.slope.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """The axes are positions; curvature and slope are maps of the features and decay as in the paper."""
        return {"axes_map"}

    def prepare(self, positions: Positions) -> tuple[Places, Tensor]:
        """Places of all tokens, and the map from features to ``beta``, ``(h A, D)``."""
        dtype = self.compute_dtype(positions.coords, self.axes_map)
        with torch.autocast(self.axes_map.device.type, enabled=False):
            weight = self.slope.weight.to(dtype).unflatten(0, (self.num_heads, self.parabolas))
            folded = torch.matmul(self.axes_map.to(dtype).mT, weight).flatten(0, 1)
        return self.places(positions, dtype), folded

    def coefficients(self, x: Tensor, folded: Tensor) -> tuple[Tensor, Tensor]:
        """Packed quadratic forms and slopes of every query.

        Shape:
            ``(B, h, P + N, A (A + 1) / 2)`` and ``(B, h, P + N, A)``.
        """
        dtype = self.compute_dtype(x, folded)
        curvature = F.softplus(self.curvature(x).to(dtype))
        slope = F.linear(x, folded.to(x.dtype)).to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            curvature = curvature.unflatten(-1, (self.num_heads, self.parabolas)).transpose(-3, -2)
            forms = quadratic_forms(curvature, self.axes_map.to(dtype))
        return forms, slope.unflatten(-1, (self.num_heads, self.axes)).transpose(-3, -2)

    def transform_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: tuple[Places, Tensor], x: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append the columns whose product is the bias; values pass."""
        places, folded = prepared
        forms, slope = self.coefficients(self.check_input(x, q, places), folded)
        queries = query_columns(forms, slope, places.coords, places.balance)
        keys = key_columns(places.coords, places.balance)
        constant = None if places.prefix is None else query_constant(forms, slope, places.coords)
        return *self.append(q, k, queries, keys, constant, places), v
