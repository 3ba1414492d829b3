"""CaPE: camera poses on the attention features of EscherNet, in six and in four degrees of freedom.

Kong et al., *EscherNet: A Generative Model for Scalable View Synthesis*, CVPR 2024, arXiv 2402.03908. Reference:
kxhit/EscherNet (non-commercial licence; no code taken). Queries and keys only, so the output is free of the frame of
the world but knows nothing of poses. All patches of a view share its pose.

The relative matrix goes from the query's to the key's camera and acts transposed: another form than that of PRoPE and
GTA. In four degrees the features of all heads are cut into four blocks, one for each number of the pose, before heads
are split.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmpos.multiview.cameras import Cameras
from mmpos.multiview.parts import Geometry, Matrices, Rotations

__all__ = ["Cape4", "Cape6", "look_at_pose"]

RADII = (1.5, 2.2)


class Cape6:
    """Poses as 4 x 4 matrices on consecutive 4-vectors of channels.

    Args:
        head_dim: channels of a head, a multiple of 4.
    """

    def __init__(self, head_dim: int) -> None:
        if head_dim % 4 or head_dim < 4:
            raise ValueError(f"head_dim: expected a multiple of 4, got {head_dim}")
        self.head_dim = head_dim

    def prepare(self, cameras: Cameras, key_cameras: Cameras | None = None) -> Geometry:
        """The transforms of queries and keys; views have equally many tokens each."""
        keys = cameras if key_cameras is None else key_cameras
        # as columns: the query's f inv(P)^T is inv(P) f, the key's f P is P^T f
        return Geometry((Matrices(self.head_dim, cameras.c2w),), (Matrices(self.head_dim, keys.w2c.mT),))


class Cape4:
    """Poses of cameras that look at one object: polar angle, azimuth, radius code, and an unused zero.

    Args:
        head_dim: channels of a head.
        num_heads: heads; ``num_heads * head_dim`` has to be a multiple of 8.
    """

    def __init__(self, head_dim: int, num_heads: int) -> None:
        if head_dim % 2 or head_dim * num_heads % 8:
            raise ValueError(
                f"head_dim, num_heads: expected pairs of channels and a width that is a multiple of 8, got {head_dim} "
                f"x {num_heads}"
            )
        self.head_dim = head_dim
        self.num_heads = num_heads

    def prepare(
        self, pose: Tensor, tokens: int, key_pose: Tensor | None = None, key_tokens: int | None = None
    ) -> Geometry:
        """The transforms of queries and keys.

        Args:
            pose: of each query view, see :func:`look_at_pose`.
            tokens: of a view.
            key_pose: of each key view, default those of the queries.
            key_tokens: of a key view, default ``tokens``.

        Shape:
            pose ``(B, V, 4)``.
        """
        query = self._rotations(pose, tokens)
        if key_pose is None and key_tokens is None:
            return Geometry((query,), (query,))
        keys = self._rotations(pose if key_pose is None else key_pose, tokens if key_tokens is None else key_tokens)
        return Geometry((query,), (keys,))

    def _rotations(self, pose: Tensor, tokens: int) -> Rotations:
        if pose.dim() != 3 or pose.shape[-1] != 4:
            raise ValueError(f"pose: expected (B, V, 4) of angles, got {tuple(pose.shape)}")
        pairs = self.num_heads * self.head_dim // 2
        turns = pose.repeat_interleave(pairs // 4, -1).unflatten(-1, (self.num_heads, -1))  # (B, V, heads, d / 2)
        turns = turns.repeat_interleave(tokens, 1).transpose(1, 2)
        return Rotations.of(turns)


def look_at_pose(cameras: Cameras, radii: tuple[float, float] = RADII) -> Tensor:
    """Polar angle from +z, azimuth, and radius code of camera centres about the origin.

    The radius is clipped to ``radii`` and its logarithm spread over [0, pi].

    Shape:
        Returns ``(B, V, 4)``.
    """
    low, high = radii
    if not 0 < low < high:
        raise ValueError(f"radii: expected 0 < smallest < largest, got {radii}")
    x, y, z = (cameras.centres + 0.0).unbind(-1)  # no minus zeros, which would turn the azimuth at the pole
    radius = cameras.centres.norm(dim=-1)
    polar = torch.atan2(torch.hypot(x, y), z)
    code = math.pi * (radius.clamp(low, high).log() - math.log(low)) / (math.log(high) - math.log(low))
    return torch.stack([polar, torch.atan2(y, x), code, torch.zeros_like(code)], -1)
