"""Options of ``rope_dinov3`` from the periods a DINOv3 checkpoint stores (``rope_embed.periods``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["dinov3_options"]


def dinov3_options(weights: Tensor | Mapping[str, Tensor]) -> dict[str, Any]:
    """Options with which ``rope_dinov3`` has exactly these periods; released weights differ in base and in rounding.

    Args:
        weights: the periods of one axis, or a state dict with one key that ends in ``periods``.

    Shape:
        periods ``(d / 4,)``.

    Example:
        >>> dinov3_options(100.0 ** (torch.arange(4) / 4))
        {'base': 100.0}
    """
    if not isinstance(weights, Tensor):
        keys = [key for key in weights if key.split(".")[-1] == "periods"]
        if len(keys) != 1:
            raise ValueError(f"weights: expected one key that ends in 'periods', found {keys}")
        weights = weights[keys[0]]
    if weights.dim() != 1 or len(weights) < 2:
        raise ValueError(f"periods: expected (d / 4,) with at least 2 entries, got {tuple(weights.shape)}")
    periods = weights.double()
    count = len(periods)
    steps = torch.arange(count, dtype=torch.float64, device=periods.device)
    first, last = float(periods[0]), float(periods[-1])
    rounded = weights.dtype == torch.bfloat16 or bool((periods == periods.bfloat16().double()).all())
    tolerance = 8e-3 if rounded else 1e-5
    base = last ** (count / (count - 1))
    candidates = (
        ({"base": _tidy(base)}, _tidy(base) ** (steps / count)),
        ({"min_period": first, "max_period": last}, first * (last / first) ** (steps / (count - 1))),
    )
    for options, expected in candidates:
        if bool(((periods / expected - 1).abs() <= tolerance).all()):
            if not rounded or bool((expected.float() == periods.float()).all()):
                return dict(options)
            return {**options, "period_dtype": "bfloat16"}
    raise ValueError("periods: expected a geometric ladder from 1 by a base, or between two periods; these are neither")


def _tidy(base: float) -> float:
    """The round number a stored base came from: a bfloat16 ladder knows it to two digits or three only."""
    near = float(f"{base:.2g}")
    return near if abs(base / near - 1) < 8e-3 else base
