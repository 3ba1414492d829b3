"""Depthwise convolutions of tokens on their grid, for one to three axes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["depthwise"]

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def depthwise(
    maps: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    identity: bool = False,
    padding: str = "zeros",
    stride: int = 1,
) -> Tensor:
    """One filter per channel, same size (or ``ceil(n / stride)``), optionally plus the input.

    The input is added by raising the centre of the kernel by 1, not by another pass. ``maps`` should be the
    transposed view of a token sequence, which is already in the memory format that convolutions like.

    Args:
        maps: one map per channel.
        weight: filters of odd size.
        bias: one per channel.
        identity: whether to add the input; only with stride 1.
        padding: ``zeros``, which lets the border leak absolute position, or ``circular``, which is equivariant to
            circular shifts.
        stride: step of the output grid.

    Shape:
        maps ``(B, C, *sizes)``, weight ``(C, 1, k, ..)``; returns ``(B, C, *sizes')``.
    """
    axes = weight.dim() - 2
    kernel = weight.shape[2:]
    if maps.dim() != axes + 2 or axes not in _CONV or any(size % 2 == 0 for size in kernel):
        raise ValueError(
            f"weight: expected (C, 1, k, ..) with odd k and one k per axis of maps {tuple(maps.shape)}, got "
            f"{tuple(weight.shape)}"
        )
    if identity and stride != 1:
        raise ValueError(f"identity: the input can only be added with stride 1, got stride {stride}")
    weight = weight.to(maps.dtype)
    if identity:
        centre = torch.zeros(kernel, dtype=weight.dtype, device=weight.device)
        centre[tuple(size // 2 for size in kernel)] = 1.0
        weight = weight + centre
    pad: int | tuple[int, ...] = tuple(size // 2 for size in kernel)
    if padding == "circular":
        maps = F.pad(maps, [size // 2 for size in reversed(kernel) for _ in (0, 1)], mode="circular")
        pad = 0
    elif padding != "zeros":
        raise ValueError(f"padding: expected 'zeros' or 'circular', got {padding!r}")
    bias = None if bias is None else bias.to(maps.dtype)
    return _CONV[axes](maps, weight, bias, stride=stride, padding=pad, groups=maps.shape[1])
