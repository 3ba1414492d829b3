"""Location encoders: the SIREN of MarcCoru/locationencoder and the random features of VicenteVivan/geo-clip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["geoclip_frequencies", "siren_layers"]


def siren_layers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our :class:`~mmpos.encodings.spherical.Siren` from ``layers.<i>.*`` and ``last_layer.*``."""
    out = {}
    for key, value in weights.items():
        if not key.startswith(("layers.", "last_layer.")):
            raise ValueError(
                f"weights: expected layers.<i>.weight, layers.<i>.bias, last_layer.weight and .bias, got {key!r}"
            )
        out[key.replace("last_layer.", "last.")] = value
    return out


def geoclip_frequencies(weights: Mapping[str, Tensor], sigmas: Sequence[float]) -> Tensor:
    """Our ``frequencies`` from one matrix ``b_sigma<sigma>`` of each scale. Shape: ``(sigmas, features, 2)``."""
    names = [f"b_sigma{sigma:g}" for sigma in sigmas]
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(f"weights: expected {names}, {missing} missing")
    return torch.stack([weights[name] for name in names])
