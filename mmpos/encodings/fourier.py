"""Learnable Fourier features: a small MLP over sines and cosines of learned projections of the coordinates.

Li, Si, Li, Hsieh, Bengio, *Learnable Fourier Features for Multi-Dimensional Spatial Positional Encoding*, NeurIPS 2021,
arXiv 2106.02795. No official code. Compared with the port willGuimont/learnable_fourier_positional_encoding (MIT),
which draws the frequencies with standard deviation ``gamma ** -2`` where the paper has the variance ``gamma ** -2``;
here it is ``1 / gamma``, and ``init_std`` overrides it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.coordinates import unit
from mmpos.encodings._table import add_to_placed
from mmpos.encodings.base import Facts, PositionEncoding, wide_dtype
from mmpos.encodings.registry import register
from mmpos.functional.fourier import fourier_features
from mmpos.positions import Positions


@register("fourier")
class LearnableFourier(PositionEncoding):
    """Adds learned Fourier features of the coordinates to the placed tokens.

    Args:
        dim: model width ``D``, a multiple of ``groups``.
        num_heads: attention heads ``h``.
        features: Fourier features ``F``, even.
        hidden: width of the MLP.
        gamma: width of the kernel at the start, in units of the coordinates: the similarity of two places falls as
            ``exp(-distance^2 / (2 gamma^2))``. The paper tunes it per task; 0.1 is about one and a half patches of 14.
        init_std: standard deviation of the frequencies; default ``1 / gamma``.
        coordinates: ``unit`` reads patch centres on [0, 1] (on another grid the same field at other places); ``raw``
            reads coordinates as they are, for points in units of their own, under either resolution rule.
        groups: independent groups of coordinates with shared weights, such as the corners of a box; divides ``axes``
            and ``dim``.
        embed_prefix: whether prefix tokens get vectors of their own instead of nothing.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.

    Shape:
        ``frequencies`` is ``(F / 2, A / groups)``.

    Example:
        >>> from mmpos import create_encoding
        >>> fourier = create_encoding("fourier", dim=8, num_heads=2).shared["fourier"]
        >>> fourier.embed(Positions.grid(2, 3)).shape
        torch.Size([1, 6, 8])
    """

    facts = Facts(
        title="learnable Fourier features",
        source="Li et al. 2021, arXiv 2106.02795",
        plugs_into=("tokens",),
        resolution_rules=("rescaled", "index"),
        learned=True,
    )
    fp32_parameters = ("frequencies",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        features: int = 384,
        hidden: int = 32,
        gamma: float = 0.1,
        init_std: float | None = None,
        coordinates: str = "unit",
        groups: int = 1,
        embed_prefix: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if features < 2 or features % 2:
            raise ValueError(f"features: expected an even number (a cosine and a sine each), got {features}")
        if groups < 1 or self.axes % groups or dim % groups:
            raise ValueError(f"groups: expected a divisor of axes {self.axes} and of dim {dim}, got {groups}")
        if coordinates not in ("unit", "raw"):
            raise ValueError(f"coordinates: expected 'unit' or 'raw', got {coordinates!r}")
        if gamma <= 0:
            raise ValueError(f"gamma: expected a positive width, got {gamma}")
        self.groups = groups
        self.coordinates = coordinates
        self.init_std = 1 / gamma if init_std is None else init_std
        self.frequencies = nn.Parameter(torch.empty(features // 2, self.axes // groups, dtype=wide_dtype()))
        self.hidden = nn.Linear(features, hidden)
        self.out = nn.Linear(hidden, dim // groups)
        self.prefix = nn.Parameter(torch.empty(self.num_prefix, dim)) if embed_prefix else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.frequencies, std=self.init_std)
        self.hidden.reset_parameters()
        self.out.reset_parameters()
        if self.prefix is not None:
            nn.init.normal_(self.prefix, std=0.02)

    def fourier(self, coords: Tensor) -> Tensor:
        """Features before the MLP. Shape: ``(..., A)`` to ``(..., groups, F)``."""
        return fourier_features(coords.unflatten(-1, (self.groups, -1)), self.frequencies)

    def encode(self, coords: Tensor) -> Tensor:
        """Vectors at coordinates, groups one after the other. Shape: ``(..., A)`` to ``(..., D)``."""
        with torch.autocast(coords.device.type, enabled=False):
            features = self.fourier(coords).to(self.hidden.weight.dtype)
            return self.out(F.gelu(self.hidden(features))).flatten(-2)

    def coordinate_values(self, positions: Positions) -> Tensor:
        """Coordinates under the resolution rule. Shape: ``(B or 1, N, A)``."""
        self.check_axes(positions)
        if self.coordinates == "raw":
            return positions.coords
        if self.resolution == "rescaled":
            return unit(positions)
        train = torch.tensor(
            self.training_grid(positions), device=positions.coords.device, dtype=positions.coords.dtype
        )
        return (positions.coords + 0.5) / train

    def embed(self, positions: Positions) -> Tensor:
        """The vectors of the placed tokens. Shape: ``(B or 1, N, D)``."""
        return self.encode(self.coordinate_values(positions))

    def add_to_tokens(self, x: Tensor, positions: Positions) -> Tensor:
        """Add the vectors; prefix tokens get their own or nothing."""
        return add_to_placed(x, self.embed(positions), positions, self.prefix)
