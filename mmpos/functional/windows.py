"""Windows of a grid: cutting, joining, and the mask of shifted windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["fit_window", "join_windows", "shift_mask", "split_windows"]


def split_windows(x: Tensor, window: Sequence[int]) -> Tensor:
    """Non-overlapping windows, row-major within each image.

    Shape:
        x ``(B, H, W, C)``; returns ``(B windows, n_row n_column, C)``.
    """
    batch, height, width, channels = x.shape
    rows, columns = window
    if height % rows or width % columns:
        raise ValueError(
            f"window: a grid of {height} x {width} is not a multiple of windows of {rows} x {columns}; pad the grid or "
            "choose another window"
        )
    x = x.view(batch, height // rows, rows, width // columns, columns, channels)
    return x.transpose(2, 3).reshape(-1, rows * columns, channels)


def join_windows(windows: Tensor, window: Sequence[int], grid: Sequence[int]) -> Tensor:
    """Inverse of :func:`split_windows`. Shape: ``(B windows, n_row n_column, C)`` -> ``(B, H, W, C)``."""
    rows, columns = window
    height, width = grid
    x = windows.view(-1, height // rows, width // columns, rows, columns, windows.shape[-1])
    return x.transpose(2, 3).reshape(-1, height, width, windows.shape[-1])


def fit_window(
    grid: Sequence[int], window: Sequence[int], shift: Sequence[int], rule: str = "together"
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Window and shift for a grid that may be smaller than the window.

    Args:
        grid: height and width in tokens.
        window: requested window.
        shift: requested shift.
        rule: ``together``: as soon as the shorter side is not larger than the window, both sides use the shorter side
            and nothing shifts (Swin); ``per_axis``: each axis decides for itself (timm).

    Example:
        >>> fit_window((3, 8), (4, 4), (2, 2)), fit_window((3, 8), (4, 4), (2, 2), "per_axis")
        (((3, 3), (0, 0)), ((3, 4), (0, 2)))
    """
    if rule == "together":
        shorter = min(grid)
        if shorter <= max(window):
            return (shorter, shorter), (0, 0)
        return tuple(window), tuple(shift)
    if rule != "per_axis":
        raise ValueError(f"rule: expected 'together' or 'per_axis', got {rule!r}")
    fits = [size <= limit for size, limit in zip(grid, window, strict=True)]
    return (
        tuple(size if fit else limit for size, limit, fit in zip(grid, window, fits, strict=True)),
        tuple(0 if fit else step for step, fit in zip(shift, fits, strict=True)),
    )


def shift_mask(
    grid: Sequence[int],
    window: Sequence[int],
    shift: Sequence[int],
    *,
    value: float = -100.0,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Added to logits inside windows of a shifted grid: ``value`` for pairs that are not neighbours in the image.

    Shape:
        Returns ``(windows, n, n)``.
    """
    regions = []
    for size, length, step in zip(grid, window, shift, strict=True):
        place = torch.arange(size, device=device)
        region = (place >= size - length).long() + (place >= size - step).long() if step else torch.zeros_like(place)
        regions.append(region)
    label = (regions[0][:, None] * 3 + regions[1][None, :])[None, :, :, None]
    inside = split_windows(label, window)[..., 0]
    apart = inside[:, None, :] != inside[:, :, None]
    return torch.zeros(apart.shape, device=device, dtype=dtype).masked_fill(apart, value)
