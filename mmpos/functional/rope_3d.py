"""Three axes on one head: which rotary pair reads which axis, the frames of OctGPT, and the unequal pairs of
V-JEPA2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["SHARED_SPLITS", "octgpt_frames", "pair_axes", "tiled_blocks"]

SHARED_SPLITS = ("chunked", "interleaved", "videorope")


def pair_axes(split: str, sections: Sequence[int], pairs: int) -> list[int]:
    """Axis that drives each frequency of one ladder shared by all axes, highest frequency first.

    Args:
        split: ``chunked`` gives each axis a run of frequencies (Qwen2-VL); ``interleaved`` deals them out in turn,
            an axis that has had its section leaves the rest to the first axis (Qwen3-VL); ``videorope`` alternates
            the axes after the first over the high frequencies and leaves the lowest to the first axis, time.
        sections: frequencies per axis.
        pairs: length of the ladder.

    Example:
        >>> [pair_axes(split, (2, 1, 1), 4) for split in ("chunked", "videorope", "interleaved")]
        [[0, 0, 1, 2], [1, 2, 0, 0], [0, 1, 2, 0]]
    """
    if split not in SHARED_SPLITS:
        raise ValueError(f"split: expected one of {SHARED_SPLITS}, got {split!r}")
    axes = len(sections)
    if any(count < 0 for count in sections) or (split != "interleaved" and sum(sections) != pairs):
        raise ValueError(
            f"sections: expected {axes} counts of 0 or more that add up to {pairs} frequencies, got {list(sections)}"
        )
    if split == "chunked":
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    if split == "interleaved":
        return [j % axes if j < axes * sections[j % axes] else 0 for j in range(pairs)]
    if axes < 2:
        raise ValueError(f"sections: videorope needs a time axis and at least one other, got {list(sections)}")
    return [1 + j % (axes - 1) if j < pairs - sections[0] else 0 for j in range(pairs)]


def octgpt_frames(azimuth: Tensor, polar: Tensor) -> Tensor:
    """The three directions OctGPT starts from. The first two are not orthogonal; at angle zero the second axis gets
    nothing.

    Shape:
        azimuth and polar ``(heads,)`` radians; returns ``(heads, 3 directions, 3 axes)``.
    """
    first = torch.stack([polar.sin() * azimuth.cos(), polar.sin() * azimuth.sin(), polar.cos()], dim=-1)
    turned = azimuth + math.pi / 2
    second = torch.stack([polar.sin() * turned.cos(), polar.sin() * turned.sin(), polar.cos()], dim=-1)
    third = torch.stack([polar.cos() * azimuth.cos(), polar.cos() * azimuth.sin(), -polar.sin()], dim=-1)
    return torch.stack([first, second, third], dim=1)


def tiled_blocks(angles: Tensor, sections: Sequence[int]) -> Tensor:
    """The 2 x 2 matrices of V-JEPA2: interleaved pairs whose two channels turn by different angles. Not orthogonal.

    Within the slice of an axis the angles are tiled (``f_0 .. f_m-1`` twice) though the channels are paired (2j, 2j+1).

    Args:
        angles: one angle per frequency, the axes one after the other.
        sections: channels of each axis.

    Shape:
        angles ``(B or 1, 1, N, sum(sections) / 2)``; returns ``(B or 1, 1, N, sum(sections) / 2, 2, 2)``.
    """
    slices = angles.split([channels // 2 for channels in sections], dim=-1)
    per_channel = torch.cat([part.repeat(1, 1, 1, 2) for part in slices], dim=-1).unflatten(-1, (-1, 2))
    cos, sin = per_channel.cos(), per_channel.sin()
    first = torch.stack([cos[..., 0], -sin[..., 0]], dim=-1)
    second = torch.stack([sin[..., 1], cos[..., 1]], dim=-1)
    return torch.stack([first, second], dim=-2)
