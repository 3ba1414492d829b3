"""PRoPE: projective transforms between cameras on half of each head, 2-D rotary positions on the other half.

Li, Yi, Liu, Gao, Ma, Kanazawa, *Cameras as Relative Positional Encoding*, NeurIPS 2025, arXiv 2507.10496. Reference:
the copy of liruilong940607/prope (MIT) in Lucas-707/RayRoPE.

Different from the reference: nothing is stored on the module, so batches may interleave; queries and keys may have
other cameras and grids; prefix tokens stand in the frame of the first view, where the reference has none (an identity
there would make attention depend on the world frame).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmpos.functional.rotary import inverse_frequencies
from mmpos.multiview.cameras import Cameras
from mmpos.multiview.parts import Geometry, Matrices, Part, Rotations, patch_coordinates

__all__ = ["Prope"]


class Prope:
    """Projective relative encoding of several views.

    Args:
        head_dim: channels of a head, a multiple of 8.
        base: base of the rotary frequencies of patch columns and rows.
        scale: factor on patch columns and rows.
        values: also carry values into the frame of the query and back; without it only logits know the cameras.

    Example:
        >>> from mmpos.multiview import Cameras, attend_views
        >>> geometry = Prope(16).prepare(Cameras(torch.eye(4).expand(1, 2, 4, 4)), (2, 3))
        >>> attend_views(*torch.randn(3, 1, 2, 12, 16), geometry).shape
        torch.Size([1, 2, 12, 16])
    """

    def __init__(self, head_dim: int, *, base: float = 100.0, scale: float = 1.0, values: bool = True) -> None:
        if head_dim % 8 or head_dim < 8:
            raise ValueError(
                f"head_dim: expected a multiple of 8 (4 for the matrices, 2 for each axis of patches), got {head_dim}"
            )
        if not base > 1:
            raise ValueError(f"base: expected a base above 1, got {base}")
        self.head_dim = head_dim
        self.base = float(base)
        self.scale = float(scale)
        self.values = values

    def prepare(
        self,
        cameras: Cameras,
        grid: Sequence[int],
        key_cameras: Cameras | None = None,
        key_grid: Sequence[int] | None = None,
        *,
        num_prefix: int = 0,
    ) -> Geometry:
        """The transforms of all tokens.

        Args:
            cameras: of the queries.
            grid: rows and columns of patches of a view.
            key_cameras: of the keys, default those of the queries.
            key_grid: default ``grid``.
            num_prefix: tokens before those of the first view, on both sides; they stand in its frame at patch (0, 0).
        """
        keys = cameras if key_cameras is None else key_cameras
        if (keys.K is None) != (cameras.K is None):
            raise ValueError("key_cameras: expected intrinsics on both sides or on none")
        query_angles = self._angles(cameras, grid, num_prefix)
        key_angles = self._angles(keys, grid if key_grid is None else key_grid, num_prefix)
        forward = _per_token(cameras.projection, grid, num_prefix)
        inverse = _per_token(keys.unprojection, grid if key_grid is None else key_grid, num_prefix)
        query = (self._projective(forward.mT), *query_angles)
        key = (self._projective(inverse), *key_angles)
        if not self.values:
            return Geometry(query, key)
        output = (self._projective(forward), *(angles.backward() for angles in query_angles))
        return Geometry(query, key, key, output)

    def _projective(self, matrix: Tensor) -> Part:
        return Matrices(self.head_dim // 2, matrix)

    def _angles(self, cameras: Cameras, grid: Sequence[int], num_prefix: int) -> tuple[Rotations, Rotations]:
        """Rotations by column and by row, the second half of a quarter paired with the first."""
        frequencies = inverse_frequencies(
            self.head_dim // 8, self.base, device=cameras.w2c.device, dtype=cameras.w2c.dtype
        )
        places = patch_coordinates(grid, cameras.num_views, cameras.w2c)
        turns = [-self.scale * places[None, None, :, axis, None] * frequencies for axis in (1, 0)]
        columns, rows = (Rotations.of(turn, num_prefix=num_prefix, halves=True) for turn in turns)
        return columns, rows


def _per_token(matrix: Tensor, grid: Sequence[int], num_prefix: int) -> Tensor:
    """Matrices of views, or of tokens where prefix tokens stand before those of the first view."""
    if not num_prefix:
        return matrix
    tokens = matrix.repeat_interleave(int(grid[0]) * int(grid[1]), 1)
    return torch.cat([matrix[:, :1].expand(-1, num_prefix, -1, -1), tokens], 1)
