"""RayRoPE: a patch is a segment on its viewing rays, seen from the camera of each query, and rotates q, k, v by it.

Wu, Jeon, Chang, Tuzel, Tulsiani, *RayRoPE: Projective Ray Positional Encoding for Multi-view Attention*, arXiv
2601.15275. Reference: Lucas-707/RayRoPE (no licence; no code taken).

A segment starts at the camera's centre and ends at a depth that a linear layer predicts as an interval (log of the
depth and half its width). Rotations are means over the interval, so that what is uncertain is damped.

Different from the reference: the mean of cosine and sine over an interval is exact everywhere, where the reference
switches to one end below 0.01 rad (``shortcut=0.01`` does the same); queries and keys may differ in number of views;
nothing is kept on the module; known depths are sampled inside a pixel, not on its border, unless ``corner_depths`` asks
for the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.functional.rotary import Rotation
from mmpos.multiview.cameras import Cameras
from mmpos.multiview.parts import Rotations

__all__ = ["RayGeometry", "RayRope"]

#: where in a patch its rays start, as parts of the patch along x and y
RAYS = {1: ((0.5, 0.5),), 2: ((0.0, 0.0), (1.0, 1.0)), 3: ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))}
NEAR, FAR, LARGEST_LOG = 0.01, 100.0, 3.0
DEPTH_CODES = ("d", "inv_d", "asinh_d")
_EPS = 1e-6
#: turns per unit: periods of points and centres, of directions, and of each depth code with the range it is clamped to
_PERIODS = {"point": 4.0, "direction": 8.0, "d": 80.0, "inv_d": 80.0, "asinh_d": 8 * math.asinh(10.0)}
_RANGES = {"d": (-10.0, 10.0), "inv_d": (0.0, 20.0), "asinh_d": (-math.asinh(10.0), math.asinh(10.0))}


@dataclass(frozen=True, eq=False)
class RayGeometry:
    """Cosines and sines of the tokens.

    Shape:
        query ``(B, Tq, d / 2)`` in each token's own camera, key ``(B, Vq, Tk, d / 2)`` in the camera of each query
        view.
    """

    query_cos: Tensor
    query_sin: Tensor
    key_cos: Tensor
    key_sin: Tensor


class RayRope(nn.Module):
    """Projective ray positions for attention between views, with the layer that predicts depths.

    Args:
        head_dim: channels of a head, a multiple of twice the number of coordinates (24 by default).
        embed_dim: width of the layer's input, from which depths are predicted; ``None`` where they are given.
        rays: rays of a patch, 1 to 3.
        kind: what is encoded, ``<0|d|inf>_<pj|3d>`` joined by ``+``: the centre, the point at the depth, or infinity,
            as projected or as points of the query's camera.
        depth_code: number a projected depth becomes: ``d``, ``inv_d``, ``asinh_d``.
        base: base of the frequencies.
        values: also rotate values, and the output back.
        shortcut: below this difference of angles one end stands for the mean, as in the reference (0.01); 0 is exact.

    Shape:
        ``depth.weight`` ``(2, embed_dim)``, ``depth.bias`` ``(2,)``.

    Example:
        >>> K = torch.tensor([[30.0, 0, 16], [0, 30, 8], [0, 0, 1]])
        >>> views = Cameras(torch.eye(4).expand(1, 2, 4, 4), K.expand(1, 2, 3, 3), (16, 32))
        >>> rope, x = RayRope(24, embed_dim=48), torch.randn(1, 16, 48)
        >>> geometry = rope.prepare(views, (2, 4), rope.predict(x))
        >>> rope.attend(*torch.randn(3, 1, 2, 16, 24), geometry).shape
        torch.Size([1, 2, 16, 24])
    """

    def __init__(
        self,
        head_dim: int,
        embed_dim: int | None = None,
        *,
        rays: int = 3,
        kind: str = "d_pj+0_3d",
        depth_code: str = "d",
        base: float = 3.0,
        values: bool = True,
        shortcut: float = 0.0,
    ) -> None:
        super().__init__()
        if rays not in RAYS:
            raise ValueError(f"rays: expected 1, 2 or 3 rays of a patch, got {rays}")
        if depth_code not in DEPTH_CODES:
            raise ValueError(f"depth_code: expected one of {', '.join(DEPTH_CODES)}, got {depth_code!r}")
        parts = [entry.split("_") for entry in kind.split("+")]
        known = {(point, form) for point in ("0", "d", "inf") for form in ("pj", "3d")}
        points = [entry[0] for entry in parts]
        if any(tuple(entry) not in known for entry in parts) or len(set(points)) < len(points):
            raise ValueError(
                f"kind: expected different points 0, d, inf, each as <point>_pj or <point>_3d, joined by +, got "
                f"{kind!r}"
            )
        self.forms = {entry[0]: entry[1] for entry in parts}
        self.coordinates = 3 * ("0" in self.forms) + 3 * rays * (("d" in self.forms) + ("inf" in self.forms))
        if head_dim < 1 or head_dim % (2 * self.coordinates):
            raise ValueError(
                f"head_dim: {kind} with {rays} rays has {self.coordinates} coordinates and needs a multiple of "
                f"{2 * self.coordinates} channels, got {head_dim}"
            )
        self.head_dim = head_dim
        self.rays = rays
        self.depth_code = depth_code
        self.base = float(base)
        self.values = values
        self.shortcut = float(shortcut)
        self.depth = None if embed_dim is None else nn.Linear(embed_dim, 2)
        if self.depth is not None:
            nn.init.zeros_(self.depth.weight)
            with torch.no_grad():  # every token starts between 0.05 and 20 units away
                self.depth.bias.copy_(torch.tensor([0.0, LARGEST_LOG]))

    # -- depths -------------------------------------------------------------------------------------------------------

    def predict(self, x: Tensor) -> Tensor:
        """Log-depth and half the width of its interval. Shape: ``(B, T, D)`` to ``(B, T, 2)``."""
        if self.depth is None:
            raise ValueError("embed_dim: this encoding has no depth layer; build RayRope(head_dim, embed_dim=...)")
        return self.depth(x)

    def interval(self, predicted: Tensor) -> tuple[Tensor, Tensor]:
        """Nearest and furthest depth of each ray. Shape: ``(B, T, 2)`` to ``(B, T, rays)`` twice."""
        log, half = predicted.float().unbind(-1) if predicted.dtype != torch.float64 else predicted.unbind(-1)
        ends = [(log + sign * half).clamp_max(LARGEST_LOG).exp() for sign in (-1, 1)]
        near, far = (end[..., None].expand(*end.shape, self.rays) for end in ends)
        return near, far

    def known_depths(self, depths: Tensor, grid: Sequence[int], *, corner_depths: bool = False) -> Tensor:
        """Depths of the rays of each patch from depth maps, nearest pixel.

        Args:
            depths: maps, z-depth; fill unknown pixels first.
            grid: rows and columns of patches.
            corner_depths: read on the border between pixels as the reference does, where rounding decides which of two
                pixels it is; otherwise half a pixel further inside.

        Shape:
            depths ``(B, V, H, W)``; returns ``(B, V * patches, rays)``.
        """
        height, width = depths.shape[-2:]
        rows, cols = (int(size) for size in grid)
        if rows < 1 or cols < 1 or height < rows or width < cols:
            raise ValueError(f"grid: expected at most {height} x {width} patches, got {tuple(grid)}")
        offsets = depths.new_tensor(RAYS[self.rays])
        x = (torch.arange(cols, device=depths.device)[None, :, None] + offsets[:, 0]) * (width // cols)
        y = (torch.arange(rows, device=depths.device)[:, None, None] + offsets[:, 1]) * (height // rows)
        x, y = (t.expand(rows, cols, self.rays) for t in (x, y))
        if corner_depths:
            at = torch.stack([x / width * 2 - 1, y / height * 2 - 1], -1).flatten(0, 1).to(depths.dtype)
            maps = depths.clamp(1e-4, FAR).flatten(0, 1)[:, None]
            found = F.grid_sample(
                maps, at[None].expand(len(maps), -1, -1, -1), "nearest", padding_mode="border", align_corners=False
            )[:, 0]
            return found.unflatten(0, depths.shape[:2]).flatten(1, 2)
        index = y.long().clamp_max(height - 1) * width + x.long().clamp_max(width - 1)
        found = depths.clamp(1e-4, FAR).flatten(-2)[..., index.flatten(0, 1)]
        return found.flatten(1, 2)

    # -- geometry -----------------------------------------------------------------------------------------------------

    def prepare(
        self,
        cameras: Cameras,
        grid: Sequence[int],
        predicted: Tensor | None = None,
        key_cameras: Cameras | None = None,
        key_grid: Sequence[int] | None = None,
        key_predicted: Tensor | None = None,
        *,
        depths: Tensor | None = None,
        key_depths: Tensor | None = None,
    ) -> RayGeometry:
        """Cosines and sines of all tokens for every query view.

        Args:
            cameras: of the queries, with intrinsics.
            grid: rows and columns of patches of a view.
            predicted: what :meth:`predict` gave for the query tokens.
            key_cameras: of the keys, default those of the queries, with their predictions and depths.
            key_grid: default ``grid``.
            key_predicted: for the key tokens.
            depths: known depths of the rays of the first views, see :meth:`known_depths`; the others are predicted.
            key_depths: likewise for keys.

        Shape:
            predicted ``(B, V * patches, 2)``, depths ``(B, known views * patches, rays)``.
        """
        ends = self._ends(cameras, grid, predicted, depths, "predicted")
        segments = self._segments(cameras, grid, ends)
        if key_cameras is None:
            keys = segments
        else:
            key_grid = grid if key_grid is None else key_grid
            keys = self._segments(
                key_cameras, key_grid, self._ends(key_cameras, key_grid, key_predicted, key_depths, "key_predicted")
            )
        views = cameras.num_views
        # each query token in its own camera: views by their own projection
        own = [part.unflatten(1, (views, -1)) for part in segments]
        projection, pose = cameras.projection[:, :, None], cameras.w2c[:, :, None]
        query_cos, query_sin = self._coefficients(projection, pose, *(part[:, :, None] for part in own))
        key_cos, key_sin = self._coefficients(projection, pose, *(part[:, None, None] for part in keys))
        return RayGeometry(
            query_cos[:, :, 0].flatten(1, 2), query_sin[:, :, 0].flatten(1, 2), key_cos[:, :, 0], key_sin[:, :, 0]
        )

    def _ends(
        self, cameras: Cameras, grid: Sequence[int], predicted: Tensor | None, depths: Tensor | None, name: str
    ) -> tuple[Tensor, Tensor]:
        count = cameras.num_views * int(grid[0]) * int(grid[1])
        given = 0 if depths is None else depths.shape[1]
        if predicted is None and given < count:
            raise ValueError(
                f"{name}: {count - given} of {count} tokens have no known depth; give predictions for them"
            )
        if predicted is not None and predicted.shape[1:] != (count, 2):
            raise ValueError(f"{name}: expected (B, {count}, 2), got {tuple(predicted.shape)}")
        if depths is None:
            assert predicted is not None
            return self.interval(predicted)
        if predicted is None or given == count:
            return depths, depths
        rest = self.interval(predicted[:, given:])
        near, far = (torch.cat([depths.to(part.dtype), part], 1) for part in rest)
        return near, far

    def _segments(
        self, cameras: Cameras, grid: Sequence[int], ends: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Centre, infinity, near and far point of each ray, homogeneous in the world. Shape: ``(B, T, rays, 4)``."""
        rows, cols = (int(size) for size in grid)
        dtype, device = cameras.w2c.dtype, cameras.w2c.device
        offsets = torch.tensor(RAYS[self.rays], dtype=dtype, device=device)
        u = (torch.arange(cols, dtype=dtype, device=device)[None, :, None] + offsets[:, 0]) / cols - 0.5
        v = (torch.arange(rows, dtype=dtype, device=device)[:, None, None] + offsets[:, 1]) / rows - 0.5
        u, v = (t.expand(rows, cols, self.rays).flatten(0, 1) for t in (u, v))
        image = torch.stack([u, v, torch.ones_like(u), torch.zeros_like(u)], -1)  # (patches, rays, 4)
        infinity = torch.einsum("bvij,prj->bvpri", cameras.unprojection, image)
        homogeneous = cameras.unprojection[..., 3].unflatten(1, (-1, 1, 1))  # what 1 / depth adds: the centre
        found = []
        for end in ends:
            inverse = 1 / end.to(dtype).clamp(NEAR, FAR)
            inverse = inverse.unflatten(1, (cameras.num_views, -1))[..., None]
            found.append((infinity + inverse * homogeneous).flatten(1, 2))
        centre = cameras.c2w[..., 3].unflatten(1, (-1, 1, 1)).expand_as(infinity).flatten(1, 2)
        return centre, infinity.flatten(1, 2), found[0], found[1]

    def _coefficients(
        self, projection: Tensor, pose: Tensor, centre: Tensor, infinity: Tensor, near: Tensor, far: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean cosine and sine of points seen by cameras.

        Shape:
            projection, pose ``(B, V, 1, 4, 4)``, points ``(B, V or 1, 1, t, rays, 4)``; returns ``(B, V, 1, t, d / 2)``
            twice.
        """
        ends = []
        for point in (near, far):
            seen = self._seen(projection, pose, centre, infinity, point)
            ends.append(self._angles(*seen))
        cos, sin = mean_rotation(*ends, shortcut=self.shortcut)
        return cos, sin

    def _seen(
        self, projection: Tensor, pose: Tensor, centre: Tensor, infinity: Tensor, point: Tensor
    ) -> tuple[Tensor, list[str]]:
        """Coordinates of a token in a camera and what kind each is. Shape: ``(B, V, 1, t, C)``."""
        values: list[Tensor] = []
        kinds: list[str] = []

        def look(matrix: Tensor, x: Tensor) -> Tensor:
            return torch.einsum("bvoij,bvotrj->bvotri", matrix, x.expand(-1, matrix.shape[1], -1, -1, -1, -1))

        def add(x: Tensor, *kind: str) -> None:
            values.append(x.flatten(-2) if x.dim() == 6 else x)
            kinds.extend(kind)

        for name, x, count in (("0", centre[..., :1, :], 1), ("inf", infinity, self.rays), ("d", point, self.rays)):
            if name not in self.forms:
                continue
            if self.forms[name] == "3d":
                y = look(pose, x)
                length = y[..., :3].norm(dim=-1, keepdim=True) + _EPS if name == "inf" else y[..., 3:].clamp_min(1e-4)
                add(y[..., :3] / length, *["direction" if name == "inf" else "point"] * 3 * count)
                continue
            y = look(projection, x)
            direction = y[..., :3] / (y[..., :3].norm(dim=-1, keepdim=True) + _EPS)
            if name == "inf":
                add(direction, *["direction"] * 3 * count)
                continue
            z, w = (y[..., 2].square() + 1e-9).sqrt().clamp_min(1e-4), y[..., 3].clamp_min(1e-4)
            depth = {"d": z / w, "inv_d": w / z, "asinh_d": torch.asinh(z / w)}[self.depth_code]
            add(direction[..., :2], *["direction"] * 2 * count)
            add(depth.clamp(*_RANGES[self.depth_code]), *[self.depth_code] * count)
        return torch.cat(values, -1), kinds

    def _angles(self, coordinates: Tensor, kinds: Sequence[str]) -> Tensor:
        """Frequency-major angles. Shape: ``(..., C)`` to ``(..., d / 2)``."""
        turns = [2 * math.pi / _PERIODS[kind] for kind in kinds]
        scale = torch.tensor(turns, dtype=coordinates.dtype, device=coordinates.device)
        count = self.head_dim // (2 * self.coordinates)
        steps = torch.arange(count, dtype=coordinates.dtype, device=coordinates.device)
        return ((self.base**steps)[:, None] * (coordinates * scale)[..., None, :]).flatten(-2)

    # -- attention ----------------------------------------------------------------------------------------------------

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, geometry: RayGeometry, *, mask: Tensor | None = None, chunk: int = 0
    ) -> Tensor:
        """Attention where keys and values are seen from the view of each query.

        Query views are folded into the batch, so that one call serves them all.

        Args:
            q: queries, view by view.
            k: keys.
            v: values.
            geometry: what :meth:`prepare` gave.
            mask: boolean (``True`` = may attend) or float, broadcastable to ``(B, heads, Tq, Tk)``.
            chunk: query views at a time, to bound memory; 0 takes all.

        Shape:
            q ``(B, heads, Tq, d)``, k and v ``(B, heads, Tk, d)``; returns ``(B, heads, Tq, d)``.
        """
        views = geometry.key_cos.shape[1]
        if (
            q.shape[-1] != self.head_dim
            or q.shape[2] != geometry.query_cos.shape[1]
            or k.shape[2] != geometry.key_cos.shape[2]
        ):
            raise ValueError(
                f"q, k: expected {geometry.query_cos.shape[1]} queries and {geometry.key_cos.shape[2]} keys of "
                f"{self.head_dim} channels, got {tuple(q.shape)} and {tuple(k.shape)}"
            )
        own = Rotations(Rotation("half", geometry.query_cos[:, None], -geometry.query_sin[:, None]))
        turned = own.apply(q)
        full = None if mask is None else mask.expand(*q.shape[:3], k.shape[2]).unflatten(2, (views, -1))
        out = []
        step = chunk or views
        for first in range(0, views, step):
            part = slice(first, first + step)
            count = len(range(views)[part])
            cos, sin = (t[:, part].flatten(0, 1)[:, None] for t in (geometry.key_cos, geometry.key_sin))
            seen = Rotations(Rotation("half", cos, -sin))
            keys = seen.apply(k.repeat_interleave(count, 0))
            values = v.repeat_interleave(count, 0)
            queries = turned.unflatten(2, (views, -1))[:, :, part].transpose(1, 2).flatten(0, 1)
            bias = None if full is None else full[:, :, part].transpose(1, 2).flatten(0, 1)
            found = F.scaled_dot_product_attention(
                queries, keys, seen.apply(values) if self.values else values, attn_mask=bias, scale=self.head_dim**-0.5
            )
            out.append(found.unflatten(0, (len(q), count)).transpose(1, 2).flatten(2, 3))
        joined = torch.cat(out, 2)
        return own.backward().apply(joined) if self.values else joined


def mean_rotation(low: Tensor, high: Tensor, *, shortcut: float = 0.0) -> tuple[Tensor, Tensor]:
    """Means of cosine and sine over angles uniform between two: ``cos(middle) sinc``, ``sin(middle) sinc``.

    Args:
        low: one end.
        high: the other, in any order.
        shortcut: where the ends are closer than this, the first one stands for the mean.

    Shape:
        Any, in and out.
    """
    middle, half = (low + high) / 2, (high - low) / 2
    damped = torch.sinc(half / math.pi)
    cos, sin = middle.cos() * damped, middle.sin() * damped
    if shortcut > 0:
        close = (high - low).abs() < shortcut
        cos, sin = torch.where(close, low.cos(), cos), torch.where(close, low.sin(), sin)
    return cos, sin
