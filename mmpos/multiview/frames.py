"""The self-test of camera encodings: does the frame of the world matter?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmpos.functional.points import random_rotations
from mmpos.multiview.cameras import Cameras

__all__ = ["frame_change_error", "random_rigid"]


def random_rigid(
    count: int, *, distance: float = 1.0, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rotations, uniform over all of them, with Gaussian translations. Shape: ``(count, 1, 4, 4)``."""
    turns = random_rotations(torch.rand(count, 3, generator=generator, dtype=torch.float64))
    out = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1, 1)
    out[:, 0, :3, :3] = turns
    out[:, 0, :3, 3] = distance * torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return out.to(dtype)


def frame_change_error(
    function: Callable[[Cameras], Tensor], cameras: Cameras, *, seed: int = 0, distance: float = 1.0
) -> float:
    """Largest change of a function's result when the world is turned and moved.

    Args:
        function: cameras to anything, such as the attention of one layer.
        cameras: where to test.
        seed: of the change.
        distance: how far the world is moved.
    """
    generator = torch.Generator().manual_seed(seed)
    change = random_rigid(len(cameras.w2c), distance=distance, generator=generator, dtype=cameras.w2c.dtype)
    with torch.no_grad():
        here = function(cameras)
        there = function(cameras.moved(change.to(cameras.w2c.device)))
    return float((here - there).abs().max())
