"""Fourier features of mixed axes: learned frequency vectors (arXiv 2106.02795) or random ones (arXiv 2006.10739)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fourier_features"]


def fourier_features(x: Tensor, frequencies: Tensor, *, normalise: bool = True) -> Tensor:
    """``[cos, sin]`` of the projections of coordinates on frequency vectors.

    Args:
        x: coordinates.
        frequencies: angular frequency vectors, radians per unit of ``x``.
        normalise: divide by ``sqrt(2 m)``, which gives every feature vector the squared norm 1/2.

    Shape:
        x ``(..., A)``, frequencies ``(m, A)``; returns ``(..., 2 m)``, cosines first.

    Example:
        >>> fourier_features(torch.zeros(1, 2), torch.ones(2, 2)).tolist()
        [[0.5, 0.5, 0.0, 0.0]]
    """
    if x.shape[-1] != frequencies.shape[-1]:
        raise ValueError(
            f"x: expected {frequencies.shape[-1]} coordinates for frequencies {tuple(frequencies.shape)}, got "
            f"{tuple(x.shape)}"
        )
    with torch.autocast(x.device.type, enabled=False):  # half precision would lose the phase
        angles = torch.matmul(x, frequencies.to(x.dtype).mT)
    out = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return out / out.shape[-1] ** 0.5 if normalise else out
