"""Learnable Fourier features of willGuimont/learnable_fourier_positional_encoding: ``Wr``, ``mlp.0``, ``mlp.2``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["fourier_layers"]

_NAMES = {
    "Wr.weight": "frequencies",
    "mlp.0.weight": "hidden.weight",
    "mlp.0.bias": "hidden.bias",
    "mlp.2.weight": "out.weight",
    "mlp.2.bias": "out.bias",
}


def fourier_layers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our ``fourier``; the columns of the frequencies keep the axis order the port was trained with."""
    unknown = sorted(set(weights) - set(_NAMES))
    if unknown:
        raise ValueError(f"weights: expected {sorted(_NAMES)}, got also {unknown}")
    return {_NAMES[key]: value for key, value in weights.items()}
