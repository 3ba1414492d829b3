"""Polyphase anchoring: shift an image so that cutting it into patches does not depend on where it started."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["polyphase_anchor", "polyphase_index"]


def polyphase_index(x: Tensor, stride: int, p: float = 2.0) -> Tensor:
    """Offset ``(i, j)`` of the component ``x[:, i::s, j::s]`` with the largest p-norm.

    Norms are taken in float64, and components within rounding of the largest count as equal, so that rounding does not
    decide. Between equal ones, as mirrored images have them, "the first" would change with a shift; therefore their
    neighbours to the right and below decide, which are told apart from those to the left and above. Components that
    agree in this too are as a rule repetitions of one pattern; the first of them is taken.

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
    pixels = x.detach().double()
    parts = _components(pixels, stride)
    # the root does not change which is largest
    energy = parts.abs().pow(p).sum((1, 2, 4)) if p != float("inf") else parts.abs().amax((1, 2, 4))
    best = _largest(energy.flatten(1), torch.ones_like(energy.flatten(1), dtype=torch.bool))
    for axis in (-1, -2):
        beside = _components(pixels.square() * pixels.roll(-1, axis), stride).sum((1, 2, 4))
        best = _largest(beside.flatten(1), best)
    first = best.to(torch.uint8).argmax(1)
    return torch.stack([first // stride, first % stride], 1)


def _components(x: Tensor, stride: int) -> Tensor:
    """Shape: ``(B, C, H, W)`` -> ``(B, C, H / s, s, W / s, s)``."""
    return x.unflatten(-1, (-1, stride)).unflatten(-3, (-1, stride))


def _largest(values: Tensor, among: Tensor) -> Tensor:
    """Which of the marked values equal the largest of them up to rounding. Shape: ``(B, K)`` each."""
    slack = 1e-12 * values.abs().amax(1, keepdim=True)
    highest = values.masked_fill(~among, float("-inf")).amax(1, keepdim=True)
    return among & (values >= highest - slack)


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
