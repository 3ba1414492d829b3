"""Coordinate rules: from places in patch units to the numbers an encoding reads.

A rule is a statement about resolution. *index* keeps the spacing of patches and lets a larger image run beyond the
trained range (extrapolation); *rescaled* keeps the extent and makes the spacing finer (interpolation); *normalised*
rules fix the extent to an interval. They look alike at the training size and differ by tens of accuracy points at twice
that size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmpos.positions import Positions

__all__ = ["COORDINATE_RULES", "apply_rule", "centred", "endpoints", "index", "normalised", "rescaled", "unit"]


def index(positions: Positions, offset: float = 0.0) -> Tensor:
    """Patch indices, optionally shifted: ``i + offset``. Shape: ``(B or 1, N, A)``."""
    return positions.coords + offset if offset else positions.coords


def centred(positions: Positions, offset: float = 0.0) -> Tensor:
    """Patch units about the middle of the field: ``i + offset - (n - 1) / 2``; free points: about their mean."""
    if positions.extent is not None:
        return positions.coords + offset - (positions.extent[:, None] - 1) / 2
    if positions.mask is None:
        return positions.coords + offset - positions.coords.mean(1, keepdim=True)
    weight = positions.mask[..., None].to(positions.coords.dtype)
    mean = (positions.coords * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)
    return positions.coords + offset - mean


def normalised(positions: Positions, offset: float = 0.0, denominator: str = "separate") -> Tensor:
    """Patch centres on [-1, 1]: ``2 (i + 0.5 + offset) / n - 1`` (DINOv3).

    Args:
        positions: where the tokens are.
        offset: added to the index, in patches.
        denominator: ``separate`` divides each axis by its own size; ``max`` and ``min`` divide all axes by the largest
            or smallest size, which keeps the aspect ratio.
    """
    return 2 * (positions.coords + offset + 0.5) / _denominator(positions, denominator) - 1


def unit(positions: Positions, offset: float = 0.0) -> Tensor:
    """Patch centres on [0, 1]: ``(i + 0.5 + offset) / n`` (ComRoPE)."""
    return (positions.coords + offset + 0.5) / _denominator(positions, "separate")


def endpoints(positions: Positions, offset: float = 0.0) -> Tensor:
    """First and last patch at -1 and 1: ``2 (i + offset) / (n - 1) - 1`` (timm pixel bands); one patch sits at -1."""
    last = (_denominator(positions, "separate") - 1).clamp_min(1)
    step = 2 / last
    i = positions.coords + offset
    # counted from the nearer end, as torch.linspace does: symmetric, and bands of hundreds of radians see every
    # rounding
    return torch.where(i < (last + 1) / 2, -1 + step * i, 1 - step * (last - i))


def rescaled(
    positions: Positions,
    offset: float = 0.0,
    train_grid: tuple[int, ...] | None = None,
    align: str = "corner",
) -> Tensor:
    """Indices stretched onto the training grid: ``(i + offset) n_train / n``.

    Args:
        positions: where the tokens are.
        offset: added to the index before scaling, in patches.
        train_grid: training sizes; default ``positions.train_grid``.
        align: ``corner`` maps index 0 to 0 (EVA, timm); ``centre`` maps patch centres, ``(i + 0.5) n_train / n - 0.5``.
            The two differ by a constant per axis, which rotary scores do not see and absolute encodings do.
    """
    train_grid = positions.train_grid if train_grid is None else train_grid
    if train_grid is None:
        raise ValueError(
            "train_grid: the rescaled rule compares the grid with the training grid, which is not known; give "
            "train_grid= to the encoding or to Positions"
        )
    if align not in ("corner", "centre"):
        raise ValueError(f"align: expected 'corner' or 'centre', got {align!r}")
    ratio = scale_to_train(positions, train_grid)[:, None]
    if align == "corner":
        return (positions.coords + offset) / ratio
    return (positions.coords + offset + 0.5) / ratio - 0.5


def scale_to_train(positions: Positions, train_grid: tuple[int, ...]) -> Tensor:
    """Field size over training size, ``n / n_train``. Shape: ``(B or 1, A)``."""
    sizes = positions.sizes("comparing with the training grid")
    if not torch.jit.is_tracing() and len(train_grid) != positions.axes:
        raise ValueError(f"train_grid: expected {positions.axes} sizes, got {tuple(train_grid)}")
    return torch.stack([size / trained for size, trained in zip(sizes.unbind(-1), train_grid, strict=True)], dim=-1)


def _denominator(positions: Positions, denominator: str) -> Tensor:
    sizes = positions.sizes("a normalised coordinate rule")[:, None]
    if denominator == "separate":
        return sizes
    if denominator == "max":
        return sizes.amax(-1, keepdim=True)
    if denominator == "min":
        return sizes.amin(-1, keepdim=True)
    raise ValueError(f"denominator: expected 'separate', 'max' or 'min', got {denominator!r}")


COORDINATE_RULES: dict[str, Callable[..., Tensor]] = {
    "index": index,
    "centred": centred,
    "normalised": normalised,
    "unit": unit,
    "endpoints": endpoints,
}


def apply_rule(name: str, positions: Positions, offset: float = 0.0) -> Tensor:
    """Coordinates under a named rule; an unknown name lists the rules."""
    if name not in COORDINATE_RULES:
        raise ValueError(f"coordinates: expected one of {sorted(COORDINATE_RULES)}, got {name!r}")
    return COORDINATE_RULES[name](positions, offset=offset)
