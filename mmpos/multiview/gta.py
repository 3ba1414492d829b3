"""GTA: geometric transform attention, one group representation for each part of a head.

Miyato, Jaeger, Welling, Geiger, *GTA: A Geometry-Aware Attention Mechanism for Multi-View Transformers*, ICLR 2024,
arXiv 2310.10375. Reference: autonomousvision/gta (MIT), main branch for views and branch DiT for images.

Keys and values are carried into the frame of each query: ``rho_i^-1 rho_j`` with camera-to-world representations.
Different from the reference: matrices come in closed form for degrees 1 and 2 instead of from a 36 MB table; nothing is
kept on the module between calls; parts may be used without each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.functional.rotary import inverse_frequencies
from mmpos.multiview.cameras import Cameras
from mmpos.multiview.parts import Geometry, Matrices, Part, Rotations, Untouched, patch_coordinates

__all__ = ["Gta", "gta_image", "spherical_matrices"]

#: parts of a head in the order they take, and the channels each comes in multiples of
MULTIPLES = {"triv": 1, "se3": 4, "so3": 8, "so2": 4, "t2": 3}


class Gta(nn.Module):
    """Attention between views through the relative pose and the relative place in the image.

    Args:
        parts: channels of a head for each representation, in the order they take: ``triv`` (untouched), ``se3``
            (camera poses on 4-vectors), ``so3`` (camera rotations on 3 + 5 spherical components), ``so2`` (rotations by
            row and column), ``t2`` (row and column as a translation of 3-vectors).
        max_freq: turns per image of the highest frequency of ``so2``.
        shared_freqs: all frequencies of ``so2`` are the highest one.
        values: also carry values into the frame of the query and back.
        trans_coeff: initial factor on translations, learned: the frame of the world does not matter for any value.

    Shape:
        ``trans_coeff`` ``(1,)``.

    Example:
        >>> from mmpos.multiview import attend_views
        >>> gta = Gta({"se3": 8, "so2": 8})
        >>> geometry = gta.prepare(Cameras(torch.eye(4).expand(1, 2, 4, 4)), grid=(2, 3))
        >>> attend_views(*torch.randn(3, 1, 2, 12, 16), geometry).shape
        torch.Size([1, 2, 12, 16])
    """

    def __init__(
        self,
        parts: Mapping[str, int],
        *,
        max_freq: float = 1.0,
        shared_freqs: bool = False,
        values: bool = True,
        trans_coeff: float = 0.01,
    ) -> None:
        super().__init__()
        unknown = sorted(set(parts) - set(MULTIPLES))
        if unknown:
            raise ValueError(f"parts: expected {', '.join(MULTIPLES)}, got {', '.join(unknown)}")
        for name, width in parts.items():
            if width < 0 or width % MULTIPLES[name]:
                raise ValueError(f"parts: {name} needs a multiple of {MULTIPLES[name]} channels, got {width}")
        self.parts = {name: int(parts.get(name, 0)) for name in MULTIPLES}
        self.head_dim = sum(self.parts.values())
        if not self.head_dim:
            raise ValueError(f"parts: expected some channels, got {dict(parts)}")
        self.max_freq = float(max_freq)
        self.shared_freqs = shared_freqs
        self.values = values
        self.trans_coeff = nn.Parameter(torch.tensor([float(trans_coeff)]))

    def prepare(
        self,
        cameras: Cameras,
        grid: Sequence[int] | None = None,
        key_cameras: Cameras | None = None,
        key_grid: Sequence[int] | None = None,
        *,
        coords: Tensor | None = None,
        key_coords: Tensor | None = None,
    ) -> Geometry:
        """The transforms of all tokens.

        Args:
            cameras: of the queries.
            grid: rows and columns of patches of a view; or give ``coords``.
            key_cameras: of the keys, default those of the queries.
            key_grid: default ``grid``.
            coords: row and column of each query token on [0, 1), for tokens that are no patches.
            key_coords: of each key token, default ``coords`` where the keys are those of the queries.

        Shape:
            coords ``(B or 1, views * tokens, 2)``.
        """
        same = key_cameras is None
        keys = cameras if key_cameras is None else key_cameras
        places = self._places(cameras, grid, coords, "coords")
        if same and key_grid is None and key_coords is None:
            key_places = places
        else:
            key_places = self._places(keys, grid if key_grid is None else key_grid, key_coords, "key_coords")
        query, output = self._sides(cameras, places, "query"), self._sides(cameras, places, "output")
        key = self._sides(keys, key_places, "key")
        return Geometry(query, key, key if self.values else None, output if self.values else None)

    # -- representations ----------------------------------------------------------------------------------------------

    def _places(self, cameras: Cameras, grid: Sequence[int] | None, coords: Tensor | None, name: str) -> Tensor | None:
        if coords is not None:
            if coords.dim() != 3 or coords.shape[-1] != 2 or coords.shape[1] % cameras.num_views:
                raise ValueError(
                    f"{name}: expected (B or 1, views * tokens, 2) for {cameras.num_views} views, got "
                    f"{tuple(coords.shape)}"
                )
            return coords
        if not self.parts["so2"] and not self.parts["t2"]:
            return None
        if grid is None:
            raise ValueError(f"grid, {name}: so2 and t2 need the places of tokens in their images; give one of the two")
        places = patch_coordinates(grid, cameras.num_views, cameras.w2c)
        sizes = places.new_tensor([float(size) for size in grid])
        return ((places + 0.5) / sizes)[None]

    def _sides(self, cameras: Cameras, places: Tensor | None, side: str) -> tuple[Part, ...]:
        made: list[Part] = []
        width = self.parts
        if width["triv"]:
            made.append(Untouched(width["triv"]))
        if width["se3"]:
            pose = cameras.c2w if side == "key" else cameras.w2c
            moved = torch.cat([pose[..., :3, 3:] * self.trans_coeff.to(pose.dtype), pose[..., 3:, 3:]], -2)
            pose = torch.cat([pose[..., :3], moved], -1)
            made.append(Matrices(width["se3"], pose.mT if side == "query" else pose))
        if width["so3"]:
            turn = cameras.c2w[..., :3, :3]
            first, second = spherical_matrices(turn)  # one 8 x 8 matrix for a vector of each degree
            matrix = torch.cat([F.pad(first, (0, 5)), F.pad(second, (3, 0))], -2)
            made.append(Matrices(width["so3"], matrix.mT if side == "output" else matrix))
        if width["so2"]:
            assert places is not None
            steps = torch.arange(1 - width["so2"] // 4, 1, dtype=places.dtype, device=places.device)
            steps = torch.zeros_like(steps) if self.shared_freqs else steps
            turns = 2 * math.pi * self.max_freq * (2.0**steps)[:, None] * places[:, :, None]  # (B, T, freq, axis)
            rotation = Rotations.of(turns.flatten(-2)[:, None])
            made.append(rotation.backward() if side == "output" else rotation)
        if width["t2"]:
            assert places is not None
            matrix = torch.eye(3, dtype=places.dtype, device=places.device).repeat(*places.shape[:2], 1, 1)
            matrix[..., 2, :2] = -places if side != "key" else places
            made.append(Matrices(width["t2"], matrix.mT if side == "query" else matrix))
        return tuple(made)


def spherical_matrices(turn: Tensor) -> tuple[Tensor, Tensor]:
    """Rotations of real spherical harmonics of degree 1 (order y, z, x) and degree 2 (order m = -2..2).

    Degree 2 is the action on traceless symmetric matrices ``a a^T``, in the orthonormal basis xy, yz, 2zz - xx - yy,
    xz, xx - yy.

    Shape:
        turn ``(..., 3, 3)``; returns ``(..., 3, 3)`` and ``(..., 5, 5)``.
    """
    order = [1, 2, 0]
    first = turn[..., order, :][..., :, order]
    a, b = 1 / math.sqrt(2), 1 / math.sqrt(6)
    basis = turn.new_zeros(5, 3, 3)
    basis[0, 0, 1] = basis[0, 1, 0] = a
    basis[1, 1, 2] = basis[1, 2, 1] = a
    basis[2] = torch.diag(turn.new_tensor([-b, -b, 2 * b]))
    basis[3, 0, 2] = basis[3, 2, 0] = a
    basis[4] = torch.diag(turn.new_tensor([a, -a, 0.0]))
    moved = torch.einsum("...ij,mjk,...lk->...mil", turn, basis, turn)  # what becomes of each basis element
    return first, torch.einsum("nil,...mil->...nm", basis, moved)


def gta_image(grid: Sequence[int], head_dim: int, *, base: float = 10_000.0, values: bool = True) -> Geometry:
    """GTA of a single image: rotary positions on queries, keys and values, and back on the output.

    Args:
        grid: rows and columns of patches.
        head_dim: channels of a head, a multiple of 4.
        base: base of the frequencies.
        values: ``False`` is plain 2-D rotary attention.
    """
    if head_dim % 4 or head_dim < 4:
        raise ValueError(f"head_dim: expected a multiple of 4 (pairs for rows and columns), got {head_dim}")
    frequencies = inverse_frequencies(head_dim // 4, base, dtype=torch.float64)
    places = patch_coordinates(grid, 1, frequencies)
    rotation = Rotations.of((frequencies[:, None] * places[:, None]).flatten(-2)[None, None])
    parts: tuple[Part, ...] = (rotation,)
    return Geometry(parts, parts, parts if values else None, (rotation.backward(),) if values else None)
