"""Rotations of queries and keys: tables from angles, and the two application kernels of the package.

A rotary method is three separate things: *coordinates* (``mmpos.coordinates``), *angles* (the method), and *application* (here). The
application is one of two kernels: :func:`rotate` for angles, optionally in a constant basis, and :func:`transform_blocks` for small
orthogonal blocks.

Angles are float32 or float64 whatever the dtype of the tokens, and only the rotated result is cast. In eager float32 and float64 the
rotation is one complex multiplication, a single pass over the tensor; under compilation, tracing and export, and for half precision,
it is the equal real form (no complex number reaches Inductor or ONNX).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "LAYOUTS",
    "Rotation",
    "axial_angles",
    "inverse_frequencies",
    "mixed_angles",
    "pixel_frequencies",
    "rotate",
    "rotate_",
    "rotate_plain",
    "rotation_from_angles",
    "to_half_layout",
    "to_interleaved_layout",
    "transform_blocks",
]

LAYOUTS = ("interleaved", "half")


# -- ladders and angles -----------------------------------------------------------------------------------------------


def inverse_frequencies(
    count: int, base: float, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Language ladder ``base ** (-j / count)``, ``j = 0 .. count - 1``; the usual ``base ** (-2j/d)`` with ``count = d/2``.

    Shape:
        Returns ``(count,)``, radians per patch.

    Example:
        >>> inverse_frequencies(2, 100.0).tolist()
        [1.0, 0.10000000149011612]
    """
    if base <= 0:
        raise ValueError(f"base: expected a positive number, got {base}")
    exponents = torch.arange(count, device=device, dtype=dtype) / -count
    return torch.pow(torch.tensor(base, device=device, dtype=dtype), exponents)


def pixel_frequencies(
    count: int,
    max_resolution: float = 224.0,
    *,
    linear: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Pixel ladder for coordinates on [-1, 1]: ``pi 2**linspace(0, log2(r) - 1)``, or ``pi linspace(1, r/2)`` when linear.

    Shape:
        Returns ``(count,)``, radians per unit.
    """
    if linear:
        return torch.linspace(1.0, max_resolution / 2, count, device=device, dtype=dtype) * math.pi
    exponents = torch.linspace(0.0, math.log2(max_resolution) - 1, count, device=device, dtype=dtype)
    return torch.exp2(exponents) * math.pi


def axial_angles(coords: Tensor, freqs: Tensor, axis_order: str = "xy", allocation: str = "blocked") -> Tensor:
    """Angles when each pair of channels belongs to one axis.

    Args:
        coords: coordinates, axis order (row, col) or (time, row, col).
        freqs: angular frequencies of each axis, in the order of ``coords``.
        axis_order: which axis owns the first pairs: ``xy`` the last coordinate axis (column), ``ij`` the first (row).
        allocation: ``blocked`` puts the pairs of an axis side by side (the released code); ``alternating`` deals them out in turn
            (the formula of the paper).

    Shape:
        coords ``(B or 1, N, A)``, freqs ``(A, m)`` or ``(B or 1, A, m)``; returns ``(B or 1, 1, N, A m)``.
    """
    if axis_order not in ("xy", "ij"):
        raise ValueError(f"axis_order: expected 'xy' (column first) or 'ij' (row first), got {axis_order!r}")
    if allocation not in ("blocked", "alternating"):
        raise ValueError(f"allocation: expected 'blocked' or 'alternating', got {allocation!r}")
    if freqs.dim() == 2:
        freqs = freqs[None]
    # an elementwise product: autocast would run a matmul or an einsum in half precision
    angles = coords[..., None] * freqs[:, None]  # (B, N, A, m)
    if axis_order == "xy":
        angles = angles.flip(-2)
    if allocation == "alternating":
        angles = angles.transpose(-1, -2)
    return angles.flatten(-2)[:, None]


def mixed_angles(coords: Tensor, freqs: Tensor) -> Tensor:
    """Angles when each pair of channels has a frequency vector: ``angle = sum_axis coords_axis freqs_axis``.

    Shape:
        coords ``(B or 1, N, A)``, freqs ``(A, heads, m)`` or ``(B or 1, A, heads, m)``; returns ``(B or 1, heads, N, m)``.
    """
    if freqs.dim() == 3:
        freqs = freqs[None]
    if freqs.shape[-3] != coords.shape[-1]:
        raise ValueError(
            f"freqs: expected one row for each of the {coords.shape[-1]} coordinate axes, got {tuple(freqs.shape)}"
        )
    # summed axis by axis with elementwise products: exact under autocast, and no (B, N, A, heads, m) intermediate
    angles = coords[:, None, :, :1] * freqs[:, 0, :, None]
    for axis in range(1, coords.shape[-1]):
        angles = angles + coords[:, None, :, axis : axis + 1] * freqs[:, axis, :, None]
    return angles


# -- the shared currency ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rotation:
    """A finished rotary table over all ``P + N`` tokens; prefix tokens have angle zero.

    Exactly one of ``cis`` (complex) and the pair ``cos, sin`` is stored, decided when the table is made.

    Args:
        layout: which channels form a pair, ``interleaved`` (2j, 2j+1) or ``half`` (j, j + d/2).
        cis: ``amplitude * exp(i angle)``.
        cos: ``amplitude * cos(angle)``.
        sin: ``amplitude * sin(angle)``.
        basis: orthogonal matrix applied to every token, prefix included, before the rotation; queries and keys share it.

    Shape:
        tables ``(B or 1, heads or 1, P + N, m)`` with ``2 m`` rotated channels, basis ``(heads or 1, d, d)``.
    """

    layout: str
    cis: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    basis: Tensor | None = None

    def real(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables."""
        if self.cis is not None:
            return self.cis.real, self.cis.imag
        assert self.cos is not None and self.sin is not None
        return self.cos, self.sin


def _real_form_wanted() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


def rotation_from_angles(
    angles: Tensor,
    *,
    num_prefix: int = 0,
    layout: str = "interleaved",
    amplitude: Tensor | None = None,
    basis: Tensor | None = None,
) -> Rotation:
    """Finish a table: add the unrotated prefix rows and take cosine and sine once.

    Args:
        angles: radians, float32 or float64.
        num_prefix: tokens in front that are neither rotated nor scaled.
        layout: ``interleaved`` or ``half``.
        amplitude: factor on cosine and sine (YaRN), broadcastable to ``angles``.
        basis: constant orthogonal basis, see :class:`Rotation`.

    Shape:
        angles ``(B or 1, heads or 1, N, m)``.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    if angles.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"angles: expected float32 or float64, got {angles.dtype}; half precision loses the position")
    if amplitude is not None:
        amplitude = F.pad(amplitude.to(angles.dtype).expand_as(angles), (0, 0, num_prefix, 0), value=1.0)
    angles = F.pad(angles, (0, 0, num_prefix, 0))
    if _real_form_wanted():
        cos, sin = angles.cos(), angles.sin()
        if amplitude is not None:
            cos, sin = cos * amplitude, sin * amplitude
        return Rotation(layout, cos=cos, sin=sin, basis=basis)
    cis = torch.polar(torch.ones_like(angles) if amplitude is None else amplitude, angles)
    return Rotation(layout, cis=cis, basis=basis)


# -- application ------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys. The result has the dtype of ``x``; channels beyond the table are passed on unchanged.

    Shape:
        ``(B, heads, P + N, d)`` in and out.
    """
    _check(x, rotation)
    if rotation.basis is not None:
        x = torch.matmul(x, rotation.basis.to(x.dtype).mT)
    if rotation.cis is not None and rotation.layout == "interleaved" and x.dtype in (torch.float32, torch.float64):
        channels = 2 * rotation.cis.shape[-1]
        if channels == x.shape[-1]:
            return _multiply(x, rotation.cis)
        return torch.cat([_multiply(x[..., :channels], rotation.cis), x[..., channels:]], dim=-1)
    return rotate_plain(x, rotation)


def _multiply(x: Tensor, cis: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * cis).flatten(-2)


def rotate_plain(x: Tensor, rotation: Rotation) -> Tensor:
    """The real form of :func:`rotate` (without the basis): the definition, and the path for half precision and compilers."""
    cos, sin = rotation.real()
    channels = 2 * cos.shape[-1]
    rest = x[..., channels:]
    pairs = x[..., :channels]
    if rotation.layout == "interleaved":
        u, v = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        u, v = pairs.chunk(2, dim=-1)
    u, v = u * cos - v * sin, u * sin + v * cos
    out = torch.stack([u, v], dim=-1).flatten(-2) if rotation.layout == "interleaved" else torch.cat([u, v], dim=-1)
    out = out.to(x.dtype)
    return out if rest.shape[-1] == 0 else torch.cat([out, rest], dim=-1)


def rotate_(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate in place, for inference: the cheapest form. Needs a full interleaved table, no basis, float32 or float64."""
    _check(x, rotation)
    cis = rotation.cis
    if cis is None or rotation.layout != "interleaved" or rotation.basis is not None or 2 * cis.shape[-1] != x.shape[-1]:
        raise ValueError("rotation: rotate_ needs an eager, full-width interleaved table without a basis; use rotate()")
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x: rotate_ needs float32 or float64, got {x.dtype}; use rotate()")
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(cis)
    return x


def transform_blocks(x: Tensor, blocks: Tensor, num_prefix: int = 0) -> Tensor:
    """Multiply groups of ``b`` channels of each placed token by its own ``b x b`` matrix; the rest is passed on unchanged.

    Shape:
        x ``(B, heads, P + N, d)``, blocks ``(B or 1, heads or 1, N, m, b, b)`` with ``m b <= d``.
    """
    count, size = blocks.shape[-3], blocks.shape[-1]
    channels = count * size
    if channels > x.shape[-1] or x.shape[-2] != num_prefix + blocks.shape[-4]:
        raise ValueError(
            f"blocks: {tuple(blocks.shape)} with num_prefix {num_prefix} does not fit x of shape {tuple(x.shape)}"
        )
    placed = x[..., num_prefix:, :channels].unflatten(-1, (count, size))
    if size <= 4 or x.dtype not in (torch.float32, torch.float64):
        out = (blocks.to(torch.promote_types(x.dtype, torch.float32)) * placed[..., None, :]).sum(-1)
    else:
        out = torch.matmul(blocks.to(x.dtype), placed[..., None])[..., 0]
    out = out.flatten(-2).to(x.dtype)
    if channels < x.shape[-1]:
        out = torch.cat([out, x[..., num_prefix:, channels:]], dim=-1)
    return out if num_prefix == 0 else torch.cat([x[..., :num_prefix, :], out], dim=-2)


def _check(x: Tensor, rotation: Rotation) -> None:
    if torch.jit.is_tracing():
        return
    table = rotation.cis if rotation.cis is not None else rotation.cos
    assert table is not None
    if x.dim() != 4 or x.shape[-2] != table.shape[-2] or 2 * table.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"x: expected (B, heads, tokens {table.shape[-2]}, at least {2 * table.shape[-1]} channels), got "
            f"{tuple(x.shape)}; the table is {tuple(table.shape)}. Split the heads first and pass the positions of these tokens"
        )
    if table.shape[1] not in (1, x.shape[1]):
        raise ValueError(f"x: expected {table.shape[1]} heads, got {x.shape[1]} in {tuple(x.shape)}")


# -- layouts ----------------------------------------------------------------------------------------------------------


def to_half_layout(x: Tensor, dim: int = -1) -> Tensor:
    """Permute channels from interleaved to half pairs: rows of ``W_q`` and ``W_k`` of one head, their biases, q/k norm weights.

    Example:
        >>> to_half_layout(torch.arange(6)).tolist()
        [0, 2, 4, 1, 3, 5]
    """
    return x.unflatten(dim, (-1, 2)).transpose(dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1).flatten(
        dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1
    )


def to_interleaved_layout(x: Tensor, dim: int = -1) -> Tensor:
    """Permute channels from half to interleaved pairs, the inverse of :func:`to_half_layout`."""
    return x.unflatten(dim, (2, -1)).transpose(dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1).flatten(
        dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1
    )
