"""What camera encodings do to the channels of a head: matrices for groups of channels, rotations for pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.functional.rotary import Rotation, rotate, rotation_from_angles
from mmpos.positions import Positions

__all__ = ["Geometry", "Matrices", "Part", "Rotations", "Untouched", "attend_views", "encode", "patch_coordinates"]


@dataclass(frozen=True, eq=False)
class Matrices:
    """Consecutive vectors of ``m`` channels, each multiplied by the matrix of its token.

    Shape:
        matrix ``(B or 1, groups, m, m)``; tokens are dealt out to the groups (views, or single tokens) in order.
    """

    width: int
    matrix: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Shape: ``(B, heads, T, width)`` in and out."""
        size, groups = self.matrix.shape[-1], self.matrix.shape[1]
        vectors = x.unflatten(2, (groups, -1)).unflatten(-1, (-1, size))  # (B, heads, groups, t, n, m)
        out = torch.einsum("bgij,bhgtnj->bhgtni", self.matrix.to(x.dtype).expand(len(x), -1, -1, -1), vectors)
        return out.flatten(-2).flatten(2, 3)


@dataclass(frozen=True, eq=False)
class Rotations:
    """Pairs of channels turned by the angles of their token, with the kernels of :mod:`mmpos.functional.rotary`."""

    rotation: Rotation

    @classmethod
    def of(cls, angles: Tensor, *, num_prefix: int = 0, halves: bool = False) -> Rotations:
        """From angles ``(B or 1, heads or 1, T, width / 2)``; prefix tokens are not turned."""
        layout = "half" if halves else "interleaved"
        return cls(rotation_from_angles(angles, num_prefix=num_prefix, layout=layout))

    @property
    def width(self) -> int:
        """Channels, twice the number of pairs."""
        return 2 * self.rotation.cos.shape[-1]

    def apply(self, x: Tensor) -> Tensor:
        """Shape: ``(B, heads, T, width)`` in and out."""
        return rotate(x, self.rotation)

    def backward(self) -> Rotations:
        """The opposite rotations."""
        cos, sin = self.rotation.cos, -self.rotation.sin
        pairs = None if self.rotation.pairs is None else torch.stack([cos, sin], -1)
        return Rotations(replace(self.rotation, sin=sin, pairs=pairs))


@dataclass(frozen=True)
class Untouched:
    """Channels that stay as they are."""

    width: int

    def apply(self, x: Tensor) -> Tensor:
        """Shape: ``(B, heads, T, width)`` in and out."""
        return x


Part = Matrices | Rotations | Untouched


@dataclass(frozen=True, eq=False)
class Geometry:
    """What an encoding does with queries, keys, values and outputs; made once for all layers and heads.

    ``None`` leaves a tensor as it is.
    """

    query: tuple[Part, ...]
    key: tuple[Part, ...]
    value: tuple[Part, ...] | None = None
    output: tuple[Part, ...] | None = None


def encode(x: Tensor, parts: Sequence[Part] | None) -> Tensor:
    """Channels of a head changed part by part. Shape: ``(B, heads, T, d)`` in and out."""
    if parts is None:
        return x
    width = sum(part.width for part in parts)
    if x.shape[-1] != width:
        raise ValueError(f"q, k, v: the encoding was made for heads of {width} channels, got {x.shape[-1]}")
    pieces = x.split([part.width for part in parts], -1)
    return torch.cat([part.apply(piece) for part, piece in zip(parts, pieces, strict=True)], -1)


def attend_views(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    geometry: Geometry,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention between tokens of several views; each token is changed once, so any fused kernel serves.

    Args:
        q: queries, tokens by views, in each row by row.
        k: keys.
        v: values.
        geometry: what :meth:`prepare` of an encoding gave.
        mask: boolean (``True`` = may attend) or float (added).
        scale: factor on the logits, default ``d ** -0.5``.
        dropout_p: attention dropout.

    Shape:
        q ``(B, heads, Tq, d)``, k and v ``(B, heads, Tk, d)``; returns ``(B, heads, Tq, d)``.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected (B, heads, T, d), got {tuple(x.shape)}; split the heads first")
    out = F.scaled_dot_product_attention(
        encode(q, geometry.query),
        encode(k, geometry.key),
        encode(v, geometry.value),
        attn_mask=mask,
        dropout_p=dropout_p,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )
    return encode(out, geometry.output)


def patch_coordinates(grid: Sequence[int], views: int, like: Tensor) -> Tensor:
    """Row and column of each patch, the same in each view. Shape: ``(views * rows * cols, 2)``."""
    rows, cols = (int(size) for size in grid)
    return Positions.grid(rows, cols, dtype=like.dtype, device=like.device).coords[0].repeat(views, 1)
