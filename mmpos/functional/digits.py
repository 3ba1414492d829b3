"""Coordinates as decimal digits, as SeqPE reads them (arXiv 2506.13277)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["digit_count", "from_digits", "to_digits"]


def digit_count(max_index: int) -> int:
    """Digits of the largest index when there are ``max_index`` of them: 2 for 100 positions."""
    if max_index < 1:
        raise ValueError(f"max_index: expected at least 1 position, got {max_index}")
    return len(str(max_index - 1))


def to_digits(coords: Tensor, digits: int) -> tuple[Tensor, Tensor]:
    """Digits of every axis, most significant first, padded with zeros on the left, one axis after the other.

    Args:
        coords: whole numbers, at least 0 and below ``10 ** digits``; larger ones lose their leading digits.
        digits: digits ``K`` of each axis.

    Shape:
        coords ``(..., A)``; returns digits ``(..., A * K)`` int64 and ``True`` where a digit is written, not padding.

    Example:
        >>> to_digits(torch.tensor([[7, 120]]), 3)[0].tolist()
        [[0, 0, 7, 1, 2, 0]]
    """
    whole = coords.long()
    powers = torch.tensor([10**k for k in reversed(range(digits))], device=coords.device)
    quotient = torch.div(whole[..., None], powers, rounding_mode="floor")
    written = (quotient > 0) | (powers == 1)  # the last digit of 0 is written
    return (quotient % 10).flatten(-2), written.flatten(-2)


def from_digits(digits: Tensor, axes: int) -> Tensor:
    """Coordinates of digits, the inverse of :func:`to_digits`. Shape: ``(..., A * K)`` to ``(..., A)``."""
    per_axis = digits.unflatten(-1, (axes, -1))
    powers = torch.tensor([10**k for k in reversed(range(per_axis.shape[-1]))], device=digits.device)
    return (per_axis * powers).sum(-1)
