"""Spherical harmonics and a SIREN: the place on the globe of an image or a token.

Russwurm et al., *Geographic Location Encoding with Spherical Harmonics and Sinusoidal Representation Networks*, arXiv
2310.06743. Reference: MarcCoru/locationencoder, which carries no licence: nothing of it is here, only the formulas.
Unlike grids of angles it has no seam at +-180 degrees and no distortion at the poles. The reference uses generated
closed forms up to degree 50; here one recursion in float64 serves all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.encodings._table import add_to_placed
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.geographic import spherical_harmonics
from mmpos.positions import Positions

__all__ = ["Siren", "SphericalHarmonics"]


class Siren(nn.Module):
    """Sine network: ``sin(w0 (x W^T + b))`` layers and a linear output.

    Args:
        inputs: input width.
        hidden: width of the hidden layers.
        layers: hidden layers.
        outputs: output width.
        w0_first: factor inside the first sine.
        w0: factor inside the others.
    """

    def __init__(
        self, inputs: int, hidden: int, layers: int, outputs: int, *, w0_first: float = 30.0, w0: float = 1.0
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers: expected at least 1 hidden layer, got {layers}")
        self.w0_first = w0_first
        self.w0 = w0
        self.layers = nn.ModuleList(nn.Linear(inputs if i == 0 else hidden, hidden) for i in range(layers))
        self.last = nn.Linear(hidden, outputs)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform on +-1/n in the first layer, on +-sqrt(6/n)/w0 in the others."""
        for i, layer in enumerate([*self.layers, self.last]):
            assert isinstance(layer, nn.Linear)
            count = layer.in_features
            bound = 1 / count if i == 0 else math.sqrt(6 / count) / self.w0
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.uniform_(layer.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.sin((self.w0_first if i == 0 else self.w0) * layer(x))
        return self.last(x)


@register("spherical")
class SphericalHarmonics(PositionEncoding):
    """Adds a SIREN of spherical harmonics of (longitude, latitude).

    Coordinates are degrees, longitude first: ``Positions.points(lonlat)``.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        degree: orders ``L`` of harmonics; ``L ** 2`` features. The paper uses 10 to 30.
        hidden: width of the SIREN.
        layers: its hidden layers.
        w0_first: factor inside its first sine.
        w0: factor inside the others.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.
    """

    facts = Facts(
        title="spherical harmonics + SIREN",
        source="Russwurm et al. 2023, arXiv 2310.06743",
        plugs_into=("tokens",),
        axes=(2, 2),
        learned=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        degree: int = 10,
        hidden: int = 64,
        layers: int = 2,
        w0_first: float = 30.0,
        w0: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if degree < 1:
            raise ValueError(f"degree: expected at least 1, got {degree}")
        self.degree = degree
        self.siren = Siren(degree**2, hidden, layers, dim, w0_first=w0_first, w0=w0)

    def reset_parameters(self) -> None:
        self.siren.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Biases."""
        return {name for name, parameter in self.named_parameters() if parameter.dim() < 2}

    def encode(self, lonlat: Tensor) -> Tensor:
        """Vectors of places in degrees. Shape: ``(..., 2)`` to ``(..., D)``."""
        with torch.autocast(lonlat.device.type, enabled=False):
            return self.siren(spherical_harmonics(lonlat, self.degree).to(self.siren.last.weight.dtype))

    def add_to_tokens(self, x: Tensor, positions: Positions) -> Tensor:
        """Add the vectors of the places; prefix tokens get nothing."""
        self.check_axes(positions)
        coords = positions.coords
        if positions.mask is not None:
            coords = torch.where(positions.mask[..., None], coords, 0.0)
        return add_to_placed(x, self.encode(coords), positions)
