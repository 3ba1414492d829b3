"""Point clouds: centres, neighbours, what a group of points looks like from inside, and rotations.

Nothing here depends on where a cloud is or how it is turned, except where it says so: centres start at the point
farthest from the mean and go on by distance (as in PointNet++, arXiv 1706.02413, which starts anywhere), so a moved
cloud has the same centres up to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "LOCAL_WIDTHS",
    "farthest_points",
    "gather_points",
    "local_geometry",
    "nearest_points",
    "random_rotations",
    "rotations_about_z",
]

#: numbers that describe a neighbour, by kind of local geometry
LOCAL_WIDTHS = {"distances": 6, "relative": 3}


def gather_points(values: Tensor, index: Tensor) -> Tensor:
    """Rows of every cloud. Shape: values ``(B, N, C)``, index ``(B, ...)``; returns ``(B, ..., C)``."""
    flat = index.flatten(1)
    rows = values.gather(1, flat[..., None].expand(-1, -1, values.shape[-1]))
    return rows.unflatten(1, index.shape[1:])


def farthest_points(points: Tensor, count: int, mask: Tensor | None = None) -> Tensor:
    """Indices of ``count`` centres, each as far as possible from those before it; the first is farthest from the mean.

    A cloud of fewer real points repeats some of them at the end.

    Shape:
        points ``(B, N, A)``, mask ``(B, N)`` with ``True`` for real points; returns ``(B, count)``.

    Example:
        >>> farthest_points(torch.tensor([[[0.0], [1.0], [2.0], [9.0]]]), 3).tolist()
        [[3, 0, 2]]
    """
    weight = torch.ones_like(points[..., 0]) if mask is None else mask.to(points.dtype)
    mean = (points * weight[..., None]).sum(1, keepdim=True) / weight.sum(1).clamp_min(1)[:, None, None]
    away = (points - mean).square().sum(-1)
    nearest = torch.full_like(away, math.inf)
    if mask is not None:  # padding is never the farthest
        away, nearest = away.masked_fill(~mask, -1.0), nearest.masked_fill(~mask, -1.0)
    chosen = away.argmax(1)
    out = [chosen]
    for _ in range(count - 1):
        centre = points.gather(1, chosen[:, None, None].expand(-1, 1, points.shape[-1]))
        nearest = torch.minimum(nearest, (points - centre).square().sum(-1))
        chosen = nearest.argmax(1)
        out.append(chosen)
    return torch.stack(out, dim=1)


def nearest_points(points: Tensor, centres: Tensor, count: int, mask: Tensor | None = None) -> Tensor:
    """The ``count`` nearest points of every centre, itself among them, the nearest first; padding comes last.

    Shape:
        points ``(B, N, A)`` with ``N >= count``, centres ``(B, G, A)``, mask ``(B, N)``; returns ``(B, G, count)``.
    """
    # differences, not torch.cdist: its products lose digits, and neighbours would change when a cloud moves
    away = torch.zeros(*centres.shape[:2], points.shape[1], dtype=points.dtype, device=points.device)
    for axis in range(points.shape[-1]):
        away = away + (centres[:, :, None, axis] - points[:, None, :, axis]).square()
    if mask is not None:
        away = away.masked_fill(~mask[:, None], math.inf)
    return away.topk(count, dim=-1, largest=False).indices


def local_geometry(groups: Tensor, centres: Tensor, real: Tensor | None, kind: str) -> Tensor:
    """What the neighbours of a centre look like from it.

    ``relative`` is the offset from the centre, the same wherever the cloud is. ``distances`` are those to four places
    that turn with the group: the centre, the mean, the neighbour farthest from the centre and the one farthest from
    that; with two distances between these places. They are the same however the cloud is turned or mirrored, too.

    Shape:
        groups ``(B, G, k, A)``, centres ``(B, G, A)``, real ``(B, G, k)``; returns ``(B, G, k, C)`` with ``C`` of
        :data:`LOCAL_WIDTHS` (``A`` for ``relative``).
    """
    if kind not in LOCAL_WIDTHS:
        raise ValueError(f"local: expected one of {sorted(LOCAL_WIDTHS)}, got {kind!r}")
    offsets = groups - centres[:, :, None]
    if real is not None:
        offsets = offsets * real[..., None]  # padding sits on the centre, which adds nothing to sums
    if kind == "relative":
        return offsets
    weight = torch.ones_like(offsets[..., 0]) if real is None else real.to(offsets.dtype)
    mean = (offsets.sum(-2) / weight.sum(-1).clamp_min(1)[..., None])[:, :, None]
    to_centre = _length(offsets)
    tip = _row(offsets, (to_centre.detach() * weight).argmax(-1))
    to_tip = _length(offsets - tip)
    end = _row(offsets, (to_tip.detach() * weight).argmax(-1))
    columns = [
        to_centre,
        _length(offsets - mean),
        to_tip,
        _length(offsets - end),
        _length(mean).expand_as(to_centre),
        _length(tip - end).expand_as(to_centre),
    ]
    return torch.stack(columns, dim=-1)


def _row(offsets: Tensor, index: Tensor) -> Tensor:
    """One neighbour of every group. Shape: ``(B, G, k, A)`` and ``(B, G)`` to ``(B, G, 1, A)``."""
    return offsets.gather(2, index[..., None, None].expand(-1, -1, 1, offsets.shape[-1]))


def _length(offsets: Tensor) -> Tensor:
    return torch.linalg.vector_norm(offsets, dim=-1)  # its gradient at zero is zero, that of a root is not


def rotations_about_z(uniforms: Tensor) -> Tensor:
    """Rotations about the third axis by a part of a full turn. Shape: ``(B,)`` on [0, 1) to ``(B, 3, 3)``."""
    angle = 2 * math.pi * uniforms
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    rows = [cos, -sin, zero, sin, cos, zero, zero, zero, zero + 1]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))


def random_rotations(uniforms: Tensor) -> Tensor:
    """Rotations that are uniform over all of them when the three numbers are uniform on [0, 1).

    Shoemake's quaternions (Graphics Gems III, 1992).

    Shape:
        ``(B, 3)`` to ``(B, 3, 3)``.

    Example:
        >>> turn = random_rotations(torch.rand(5, 3))
        >>> bool(torch.allclose(turn @ turn.mT, torch.eye(3), atol=1e-5))
        True
    """
    share, first, second = uniforms[:, 0], 2 * math.pi * uniforms[:, 1], 2 * math.pi * uniforms[:, 2]
    low, high = (1 - share).sqrt(), share.sqrt()
    x, y, z, w = low * first.sin(), low * first.cos(), high * second.sin(), high * second.cos()
    rows = [
        1 - 2 * (y * y + z * z),
        2 * (x * y - z * w),
        2 * (x * z + y * w),
        2 * (x * y + z * w),
        1 - 2 * (x * x + z * z),
        2 * (y * z - x * w),
        2 * (x * z - y * w),
        2 * (y * z + x * w),
        1 - 2 * (x * x + y * y),
    ]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))
