"""Polyphase anchoring: shift an image so that cutting it into patches does not depend on where it started."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["polyphase_anchor", "polyphase_index"]


def polyphase_index(x: Tensor, stride: int, p: float = 2.0) -> Tensor:
    """Offset ``(i, j)`` of the component ``x[:, i::s, j::s]`` with the largest p-norm, the first one on ties.

    Norms are taken in float64 so that rounding does not decide between components.

    Shape:
        x ``(B, C, H, W)`` with ``H`` and ``W`` multiples of the stride; returns ``(B, 2)`` int64.
    """
    if x.dim() != 4 or x.shape[-2] % stride or x.shape[-1] % stride:
        raise ValueError(
            f"x: expected (B, C, H, W) with H and W multiples of the stride {stride}, got {tuple(x.shape)}; pad "
            "or resize it"
        )
    if not p > 0:
        raise ValueError(f"p: expected a positive number, got {p}")
    parts = x.detach().double().unflatten(-1, (-1, stride)).unflatten(-3, (-1, stride))  # (B, C, H/s, s, W/s, s)
    # the root does not change which is largest
    energy = parts.abs().pow(p).sum((1, 2, 4)) if p != float("inf") else parts.abs().amax((1, 2, 4))
    best = energy.flatten(1).argmax(1)
    return torch.stack([best // stride, best % stride], 1)


def polyphase_anchor(x: Tensor, stride: int, p: float = 2.0) -> tuple[Tensor, Tensor]:
    """Shift each image circularly so that its strongest polyphase component starts at the origin.

    ``anchor(shift(x))`` equals ``anchor(x)`` up to a circular shift by multiples of the stride. Exact for circular
    shifts; a crop changes what is at the border.

    Shape:
        x ``(B, C, H, W)``; returns the shifted x and the offsets ``(B, 2)``.

    Example:
        >>> x = torch.zeros(1, 1, 4, 6)
        >>> x[0, 0, 1, 3] = 1.0
        >>> polyphase_anchor(x, 2)[1].tolist()
        [[1, 1]]
    """
    index = polyphase_index(x, stride, p)
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device) + index[:, :1]) % height
    columns = (torch.arange(width, device=x.device) + index[:, 1:]) % width
    batch = torch.arange(len(x), device=x.device)[:, None, None]
    shifted = x.movedim(1, -1)[batch, rows[:, :, None], columns[:, None, :]]
    return shifted.movedim(-1, 1), index
