"""Rays of pixels as maps that are added to tokens: raymaps, Plücker coordinates, pose-free camera rays.

As in the code of PRoPE (arXiv 2507.10496) and SPAD (arXiv 2402.05235); the distance between rays as an attention bias
is that of GBT (Venkat et al. 2023), octaves of a ray those of SRT (arXiv 2111.13152). Only camera rays are free of the
frame of the world.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmpos.multiview.cameras import Cameras

__all__ = [
    "camera_rays",
    "patchify",
    "plucker_map",
    "ray_distance",
    "ray_fourier",
    "ray_octaves",
    "raymap",
    "to_plucker",
]

_PARALLEL = 1e-6


def raymap(cameras: Cameras, downscale: int = 1, *, up: bool = False) -> Tensor:
    """Origin and unit direction of the ray through the middle of each pixel, in the world.

    Args:
        cameras: with intrinsics.
        downscale: factor by which the map is smaller than the image.
        up: also the second axis of the camera in the world (which points down in OpenCV's convention).

    Shape:
        Returns ``(B, V, H / downscale, W / downscale, 6 or 9)``.
    """
    if cameras.K is None or cameras.size is None:
        raise ValueError("cameras: rays need intrinsics; give Cameras(w2c, K, size)")
    height, width = cameras.size
    if downscale < 1 or height % downscale or width % downscale:
        raise ValueError(f"downscale: expected a divisor of {height} and {width} pixels, got {downscale}")
    small = cameras.resized(height // downscale, width // downscale)
    assert small.K is not None
    pose, k = cameras.c2w, small.K.to(cameras.w2c.dtype)
    x = torch.arange(width // downscale, dtype=pose.dtype, device=pose.device) + 0.5
    y = torch.arange(height // downscale, dtype=pose.dtype, device=pose.device) + 0.5
    shape = (*pose.shape[:2], len(y), len(x))
    across = (x - k[..., 0, 2, None]) / k[..., 0, 0, None]  # (B, V, W)
    down = (y - k[..., 1, 2, None]) / k[..., 1, 1, None]
    local = torch.stack(
        [
            across[:, :, None].expand(shape),
            down[..., None].expand(shape),
            torch.ones(shape, dtype=pose.dtype, device=pose.device),
        ],
        -1,
    )
    direction = torch.einsum("bvij,bvhwj->bvhwi", pose[..., :3, :3], local)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    parts = [pose[..., None, None, :3, 3].expand_as(direction), direction]
    if up:
        parts.append(pose[..., None, None, :3, 1].expand_as(direction))
    return torch.cat(parts, -1)


def to_plucker(rays: Tensor) -> Tensor:
    """Unit direction and moment ``o x d`` of rays given as origin and direction. Shape: ``(..., 6)`` in and out."""
    origin, direction = rays[..., :3], rays[..., 3:6]
    direction = direction / direction.norm(dim=-1, keepdim=True)
    return torch.cat([direction, torch.linalg.cross(origin, direction)], -1)


def plucker_map(cameras: Cameras, downscale: int = 1) -> Tensor:
    """Unit direction and moment of each pixel's ray: where the origin lies on the ray does not matter.

    Shape:
        Returns ``(B, V, H / downscale, W / downscale, 6)``.
    """
    return to_plucker(raymap(cameras, downscale))


def camera_rays(cameras: Cameras, downscale: int = 1) -> Tensor:
    """Plücker coordinates in the frame of each camera: the moments are 0, only intrinsics are seen.

    Shape:
        Returns ``(B, V, H / downscale, W / downscale, 6)``.
    """
    here = torch.eye(4, dtype=cameras.w2c.dtype, device=cameras.w2c.device).expand_as(cameras.w2c)
    return plucker_map(Cameras(here, cameras.K, cameras.size), downscale)


def patchify(maps: Tensor, patch: int) -> Tensor:
    """Pixels of each patch in one vector, row by row, channels fastest.

    Shape:
        maps ``(..., H, W, C)``; returns ``(..., H W / patch², patch² C)``.
    """
    height, width = maps.shape[-3:-1]
    if patch < 1 or height % patch or width % patch:
        raise ValueError(f"patch: expected a divisor of {height} and {width} pixels, got {patch}")
    cut = maps.unflatten(-3, (-1, patch)).unflatten(-2, (-1, patch)).transpose(-4, -3)
    return cut.flatten(-3).flatten(-3, -2)


def ray_distance(first: Tensor, second: Tensor) -> Tensor:
    """Distance between each ray of one set and each of another; free of the frame of the world.

    GBT adds ``-gamma² distance`` to the attention logits, ``gamma`` learned and 1 at the start.

    Args:
        first: direction and moment, see :func:`to_plucker`.
        second: likewise.

    Shape:
        ``(..., Q, 6)`` and ``(..., P, 6)``; returns ``(..., Q, P)``.
    """
    d1, m1 = first[..., :, None, :3], first[..., :, None, 3:]
    d2, m2 = second[..., None, :, :3], second[..., None, :, 3:]
    d1, d2 = torch.broadcast_tensors(d1, d2)
    across = torch.linalg.cross(d1, d2).norm(dim=-1)
    skew = ((d1 * m2).sum(-1) + (d2 * m1).sum(-1)).abs() / (across + _PARALLEL)
    parallel = torch.linalg.cross(d1, (m1 - m2).expand_as(d1)).norm(dim=-1) / (d1.square().sum(-1) + _PARALLEL)
    return torch.where(across <= _PARALLEL, parallel, skew)


def ray_fourier(rays: Tensor, count: int = 15, start: int = -6) -> Tensor:
    """Sines, then cosines, of ``2^j pi`` times each number of a ray, all numbers of one frequency side by side.

    Shape:
        rays ``(..., C)``; returns ``(..., 2 count C)``.
    """
    turns = _octaves(rays, count, start).transpose(-1, -2).flatten(-2)
    return torch.cat([turns.sin(), turns.cos()], -1)


def ray_octaves(
    rays: Tensor, origin_octaves: int = 15, origin_start: int = 0, direction_octaves: int = 15, direction_start: int = 0
) -> Tensor:
    """SRT's features of origin and direction: for each of both all sines, then all cosines, octaves fastest.

    Shape:
        rays ``(..., 6)``; returns ``(..., 6 (origin_octaves + direction_octaves))``.
    """
    out = []
    for part, count, start in (
        (rays[..., :3], origin_octaves, origin_start),
        (rays[..., 3:], direction_octaves, direction_start),
    ):
        turns = _octaves(part, count, start).flatten(-2)
        out += [turns.sin(), turns.cos()]
    return torch.cat(out, -1)


def _octaves(x: Tensor, count: int, start: int) -> Tensor:
    """``2^j pi x``. Shape: ``(..., C)`` to ``(..., C, count)``."""
    if count < 1:
        raise ValueError(f"count: expected one frequency or more, got {count}")
    steps = torch.arange(start, start + count, dtype=x.dtype, device=x.device)
    return x[..., None] * (math.pi * 2.0**steps)
