"""GeoCLIP's location encoder: random Fourier features of a map projection at several scales, each with its own MLP.

Vivanco Cepeda, Nayak, Shah, *GeoCLIP*, arXiv 2309.16020. Reference: VicenteVivan/geo-clip (MIT). The order of the
arguments is latitude first, the other way round than in :mod:`mmpos.encodings.spherical`, and the map has a seam at
+-180 degrees. The reference rounds sqrt(3) to float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.encodings._table import add_to_placed
from mmpos.encodings.base import Facts, PositionEncoding, wide_dtype
from mmpos.encodings.registry import register
from mmpos.functional.fourier import fourier_features
from mmpos.functional.geographic import equal_earth
from mmpos.positions import Positions


@register("geoclip")
class GeoClip(PositionEncoding):
    """Adds the sum of MLPs over random Fourier features of (latitude, longitude).

    Coordinates are degrees, latitude first: ``Positions.points(latlon)``.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        sigmas: standard deviations of the fixed random frequencies, one MLP each.
        features: frequencies of each; twice as many features.
        hidden: width of the MLPs.
        layers: their hidden layers.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.

    Shape:
        ``frequencies`` is ``(sigmas, features, 2)``, saved with the weights and not trained.
    """

    facts = Facts(
        title="random Fourier features (GeoCLIP)",
        source="Vivanco Cepeda et al. 2023, arXiv 2309.16020",
        plugs_into=("tokens",),
        axes=(2, 2),
        learned=True,
    )
    fp32_parameters = ("frequencies",)
    frequencies: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        sigmas: Sequence[float] = (1.0, 16.0, 256.0),
        features: int = 256,
        hidden: int = 1024,
        layers: int = 3,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if not sigmas or min(sigmas) <= 0:
            raise ValueError(f"sigmas: expected positive numbers, got {tuple(sigmas)}")
        if features < 1 or layers < 1:
            raise ValueError(f"features, layers: expected at least 1, got {features} and {layers}")
        self.sigmas = tuple(float(s) for s in sigmas)
        self.register_buffer("frequencies", torch.empty(len(self.sigmas), features, 2, dtype=wide_dtype()))
        widths = [2 * features, *[hidden] * layers, dim]
        self.capsules = nn.ModuleList(
            nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True)) for _ in self.sigmas
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for row, sigma in zip(self.frequencies, self.sigmas, strict=True):
            row.normal_(std=sigma)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Biases."""
        return {name for name, parameter in self.named_parameters() if parameter.dim() < 2}

    def fourier(self, latlon: Tensor) -> Tensor:
        """``[cos 2 pi B v, sin 2 pi B v]`` for each sigma. Shape: ``(..., 2)`` to ``(sigmas, ..., 2 features)``."""
        place = equal_earth(latlon)
        return torch.stack(
            [fourier_features(place, 2 * math.pi * b.to(place.dtype), normalise=False) for b in self.frequencies]
        )

    def encode(self, latlon: Tensor) -> Tensor:
        """Vectors of places in degrees. Shape: ``(..., 2)`` to ``(..., D)``."""
        with torch.autocast(latlon.device.type, enabled=False):
            total: Tensor | None = None
            for x, capsule in zip(self.fourier(latlon), self.capsules, strict=True):
                layers: Any = capsule
                x = x.to(layers[0].weight.dtype)
                for layer in layers[:-1]:
                    x = F.relu(layer(x))
                x = layers[-1](x)
                total = x if total is None else total + x
        assert total is not None
        return total

    def add_to_tokens(self, x: Tensor, positions: Positions) -> Tensor:
        """Add the vectors of the places; prefix tokens get nothing."""
        self.check_axes(positions)
        coords = positions.coords
        if positions.mask is not None:
            coords = torch.where(positions.mask[..., None], coords, 0.0)
        return add_to_placed(x, self.encode(coords), positions)
