"""Random changes of coordinates during training. Every function takes its draws, so that a run can be repeated
exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CoordinateDraws", "augment_coordinates", "draw_augmentation", "perturb_patches"]


@dataclass(frozen=True, eq=False)
class CoordinateDraws:
    """One draw of the DINOv3 coordinate augmentation, shared by all tokens of a forward pass; ``None`` leaves a part
    out.

    Args:
        shift: added to each axis.
        jitter: factor on each axis.
        rescale: factor on all axes.

    Shape:
        shift and jitter ``(A,)``, rescale ``(1,)``.
    """

    shift: Tensor | None = None
    jitter: Tensor | None = None
    rescale: Tensor | None = None


def draw_augmentation(
    axes: int,
    *,
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> CoordinateDraws:
    """Draw shift from ``U(-shift, shift)``, jitter and rescale log-uniformly from ``[1/x, x]``, in this order."""

    def uniform(count: int, limit: float) -> Tensor:
        return torch.empty(count, device=device, dtype=dtype).uniform_(-limit, limit, generator=generator)

    return CoordinateDraws(
        None if shift is None else uniform(axes, shift),
        None if jitter is None else uniform(axes, math.log(jitter)).exp(),
        None if rescale is None else uniform(1, math.log(rescale)).exp(),
    )


def augment_coordinates(coords: Tensor, draws: CoordinateDraws, centre: Tensor | float = 0.0) -> Tensor:
    """Shift, then jitter, then rescale, both factors about ``centre``.

    Shape:
        coords ``(..., A)``, centre broadcastable to it; returns the shape of ``coords``.
    """
    out = coords - centre
    if draws.shift is not None:
        out = out + draws.shift.to(coords)
    if draws.jitter is not None:
        out = out * draws.jitter.to(coords)
    if draws.rescale is not None:
        out = out * draws.rescale.to(coords)
    return out + centre


def perturb_patches(coords: Tensor, noise: Tensor, intensity: float, axes: int = 2) -> Tensor:
    """Move each token inside its patch (ComRoPE): ``clamp(noise intensity / 2, -1/2, 1/2)`` on the last ``axes`` axes.

    Args:
        coords: coordinates in patch units.
        noise: standard normal draws.
        intensity: strength; 0 leaves the coordinates alone.
        axes: number of trailing axes that move; 2 leaves the time axis of a video alone.

    Shape:
        coords ``(..., N, A)``, noise broadcastable to it.
    """
    moved = (noise.to(coords) * (intensity * 0.5)).clamp(-0.5, 0.5)
    still = coords.shape[-1] - axes
    if still > 0:
        moved = torch.cat([torch.zeros_like(moved[..., :still]), moved[..., still:]], dim=-1)
    return coords + moved
