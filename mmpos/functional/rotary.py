"""Rotations of queries and keys: tables from angles, and the two application kernels of the package.

A rotary method is three separate things: *coordinates* (``mmpos.coordinates``), *angles* (the method), and
*application* (here). The application is one of two kernels: :func:`rotate` for angles, optionally in a constant basis,
and :func:`transform_blocks` for small orthogonal blocks.

Angles are float32 or float64 whatever the dtype of the tokens, and only the rotated result is cast. In eager mode the
rotation of interleaved pairs is one complex multiplication, a single pass over the tensor; half precision is widened
for it. Under compilation, tracing and export it is the equal real form (no complex number reaches Inductor or ONNX).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "LAYOUTS",
    "Rotation",
    "axial_angles",
    "axial_frames",
    "directed_frequencies",
    "inverse_frequencies",
    "mixed_angles",
    "pixel_frequencies",
    "random_frames",
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
    """Language ladder ``base ** (-j / count)``, ``j = 0 .. count - 1``; the usual ``base ** (-2j/d)`` with
    ``count = d/2``.

    Shape:
        Returns ``(count,)``, radians per patch.

    Example:
        >>> inverse_frequencies(2, 100.0).tolist()
        [1.0, 0.10000000149011612]
    """
    if not base > 0:
        raise ValueError(f"base: expected a positive number, got {base}")
    exponents = torch.arange(count, device=device, dtype=dtype) / -count
    return torch.pow(torch.full((), base, device=device, dtype=dtype), exponents)


def pixel_frequencies(
    count: int,
    max_resolution: float = 224.0,
    *,
    linear: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Pixel ladder for coordinates on [-1, 1]: ``pi 2**linspace(0, log2(r) - 1)``, or ``pi linspace(1, r/2)`` when
    linear.

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
        allocation: ``blocked`` puts the pairs of an axis side by side (the released code); ``alternating`` deals them
            out in turn (the formula of the paper).

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
        coords ``(B or 1, N, A)``, freqs ``(A, heads, m)`` or ``(B or 1, A, heads, m)``; returns
        ``(B or 1, heads, N, m)``.
    """
    if freqs.dim() == 3:
        freqs = freqs[None]
    if not torch.jit.is_tracing() and freqs.shape[-3] != coords.shape[-1]:
        raise ValueError(
            f"freqs: expected one row for each of the {coords.shape[-1]} coordinate axes, got {tuple(freqs.shape)}"
        )
    # summed axis by axis with elementwise products: exact under autocast, and no (B, N, A, heads, m) intermediate
    terms = [
        place[:, None, :, None] * freq[:, :, None]
        for place, freq in zip(coords.unbind(-1), freqs.unbind(-3), strict=True)
    ]
    angles = terms[0]
    for term in terms[1:]:
        angles = angles + term
    return angles


def random_frames(heads: int, axes: int, *, device: torch.device | None = None) -> Tensor:
    """A random orthonormal frame of directions per head, as vectors over the coordinate axes.

    With two axes it is the draw of RoPE-Mixed, one angle ``a`` per head in (x, y) and the direction at right angles to
    it.

    Shape:
        Returns ``(heads, A directions, A)``, axis order (row, col).
    """
    if axes == 2:
        turn = torch.rand(heads, device=device) * 2 * math.pi
        direction = torch.stack([turn, turn + math.pi / 2], dim=1)  # (heads, directions)
        return torch.stack([direction.sin(), direction.cos()], dim=-1)
    # last axis first, as in the axial frame
    return torch.linalg.qr(torch.randn(heads, axes, axes, device=device))[0].flip(-2)


def axial_frames(heads: int, axes: int, *, device: torch.device | None = None) -> Tensor:
    """The frame whose directions are the axes, last axis first: the start that equals RoPE-Axial.

    Shape: ``(heads, A, A)``.
    """
    return torch.eye(axes, device=device).flip(-2).expand(heads, -1, -1)


def directed_frequencies(frame: Tensor, pairs: int, theta: float) -> Tensor:
    """A ladder of magnitudes along each direction of a frame; the last directions get less when ``pairs`` does not
    divide.

    Shape:
        frame ``(heads, directions, A)``; returns ``(A, heads, pairs)``.
    """
    each = -(-pairs // frame.shape[1])
    ladder = inverse_frequencies(each, theta, device=frame.device, dtype=frame.dtype)
    return (frame[..., None] * ladder).movedim(2, 0).flatten(-2)[..., :pairs]


# -- the shared currency ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rotation:
    """A finished rotary table over all ``P + N`` tokens; prefix tokens have angle zero.

    Args:
        layout: which channels form a pair, ``interleaved`` (2j, 2j+1) or ``half`` (j, j + d/2).
        cos: ``amplitude * cos(angle)``.
        sin: ``amplitude * sin(angle)``.
        pairs: the same numbers side by side in memory, which eager mode reads as complex numbers; ``None`` when they
            are not needed. Nothing complex is stored, so a table made in eager mode may enter a compiled block.
        basis: orthogonal matrix applied to every token, prefix included, before the rotation; queries and keys share
            it.

    Shape:
        cos, sin ``(B or 1, heads or 1, P + N, m)`` with ``2 m`` rotated channels, pairs the same with a last dimension
        2, basis ``(heads or 1, d, d)``.
    """

    layout: str
    cos: Tensor
    sin: Tensor
    pairs: Tensor | None = None
    basis: Tensor | None = None

    def real(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables."""
        return self.cos, self.sin


def _real_form_wanted() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # either is true during any ONNX export


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
    cos, sin = angles.cos(), angles.sin()
    if amplitude is not None:
        cos, sin = cos * amplitude, sin * amplitude
    if layout == "half" or _real_form_wanted():
        return Rotation(layout, cos, sin, basis=basis)
    # cosine and sine are vectorised, torch.polar is not: a third of the time for the same numbers
    pairs = torch.stack([cos, sin], dim=-1)
    return Rotation(layout, pairs[..., 0], pairs[..., 1], pairs=pairs, basis=basis)


# -- application ------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys. The result has the dtype of ``x``; channels beyond the table are passed on unchanged.

    Shape:
        ``(B, heads, P + N, d)`` in and out.
    """
    _check(x, rotation)
    dtype = x.dtype
    if rotation.basis is not None:
        # autocast would run the product in half precision even for float32 queries (those behind a q/k norm are)
        with _no_autocast(x):
            x = torch.matmul(x, rotation.basis.to(dtype).mT)
    if _real_form_wanted() or (rotation.layout == "interleaved" and rotation.pairs is None):
        return rotate_plain(x, rotation)
    channels = 2 * rotation.cos.shape[-1]
    placed = x if channels == x.shape[-1] else x[..., :channels]
    if rotation.pairs is None:
        out = _multiply_halves(placed, rotation.cos, rotation.sin).to(dtype)
    else:
        wide = placed.float() if dtype in (torch.float16, torch.bfloat16) else placed
        out = _multiply(wide, torch.view_as_complex(rotation.pairs)).to(dtype)
    return out if channels == x.shape[-1] else torch.cat([out, x[..., channels:]], dim=-1)


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _multiply(x: Tensor, cis: Tensor) -> Tensor:
    if not _complex_viewable(x):
        x = x.contiguous()
    shape = x.shape
    if x.dim() == 4 and shape[1] > 1 and x.stride(1) == shape[3] != x.stride(2):
        # views of a fused qkv: the heads of a token lie side by side, so one long row per token, not many short ones
        batch, heads, tokens, width = shape
        row = heads * width // 2
        pairs = torch.view_as_complex(x.transpose(1, 2).reshape(batch, tokens, row, 2))
        table = cis.transpose(1, 2).expand(-1, -1, heads, -1).reshape(-1, tokens, row)
        return torch.view_as_real(pairs * table).view(batch, tokens, heads, width).transpose(1, 2)
    pairs = torch.view_as_complex(x.view(*shape[:-1], shape[-1] // 2, 2))
    # the two parts lie side by side, so the last two dimensions can always be viewed as one
    return torch.view_as_real(pairs * cis).view(shape)


def _multiply_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    u, v = x.chunk(2, dim=-1)
    # fused multiply-adds: two passes over each half instead of three
    return torch.cat([torch.addcmul(u * cos, v, sin, value=-1), torch.addcmul(v * cos, u, sin)], dim=-1)


def _complex_viewable(x: Tensor) -> bool:
    """Whether the memory of ``x`` can be read as complex numbers without a copy."""
    return bool(x.stride(-1) == 1 and x.storage_offset() % 2 == 0 and all(step % 2 == 0 for step in x.stride()[:-1]))


def rotate_plain(x: Tensor, rotation: Rotation) -> Tensor:
    """The real form of :func:`rotate` without the basis: the definition, and the path for compilers."""
    cos, sin = rotation.cos, rotation.sin
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
    # sizes are tensors while tracing: no decision may hang on them, and an empty rest does no harm
    return torch.cat([out, rest], dim=-1) if torch.jit.is_tracing() or rest.shape[-1] else out


def rotate_(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate in place, the cheapest form, for inference: full interleaved table, no basis, float32 or float64."""
    _check(x, rotation)
    if rotation.pairs is None or rotation.basis is not None or 2 * rotation.cos.shape[-1] != x.shape[-1]:
        raise ValueError("rotation: rotate_ needs an eager, full-width interleaved table without a basis; use rotate()")
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x: rotate_ needs float32 or float64, got {x.dtype}; use rotate()")
    if not _complex_viewable(x):
        raise ValueError(
            f"x: rotate_ needs pairs that lie next to each other in memory, got strides {x.stride()} at offset "
            f"{x.storage_offset()}; "
            "call x.contiguous() first or use rotate()"
        )
    torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2)).mul_(torch.view_as_complex(rotation.pairs))
    return x


def transform_blocks(x: Tensor, blocks: Tensor, num_prefix: int = 0) -> Tensor:
    """Multiply groups of ``b`` channels of each placed token by its own ``b x b`` matrix; the rest is passed on
    unchanged.

    Shape:
        x ``(B, heads, P + N, d)``, blocks ``(B or 1, heads or 1, N, m, b, b)`` with ``m b <= d``.
    """
    count, size = blocks.shape[-3], blocks.shape[-1]
    channels = count * size
    if not torch.jit.is_tracing():
        fits = blocks.shape[0] in (1, x.shape[0]) and blocks.shape[1] in (1, x.shape[1])
        if not fits or channels > x.shape[-1] or x.shape[-2] != num_prefix + blocks.shape[-4]:
            raise ValueError(
                f"blocks: {tuple(blocks.shape)} with num_prefix {num_prefix} does not fit x of shape {tuple(x.shape)}; "
                "expected "
                "(B or 1, heads or 1, tokens - num_prefix, m, b, b) with m b <= channels"
            )
    dtype = x.dtype
    blocks = blocks.to(torch.promote_types(dtype, torch.float32))
    placed = x[..., num_prefix:, :channels].unflatten(-1, (count, size)).to(blocks.dtype)
    if size <= 3:
        out = (blocks * placed[..., None, :]).sum(-1)
    else:
        # samples and heads that share a matrix are the rows of one product with it
        placed = placed.permute(1, 2, 3, 0, 4)  # (heads, N, m, B, b)
        with _no_autocast(x):
            if blocks.shape[0] != 1:
                out = torch.matmul(blocks, placed.permute(3, 0, 1, 2, 4)[..., None])[..., 0]
            elif blocks.shape[1] != 1 or x.shape[1] == 1:
                out = torch.matmul(placed, blocks[0].mT).permute(3, 0, 1, 2, 4)
            else:
                rows = placed.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (N, m, heads B, b)
                out = torch.matmul(rows, blocks[0, 0].mT).unflatten(2, (x.shape[1], x.shape[0])).permute(3, 2, 0, 1, 4)
    out = out.flatten(-2).to(dtype)
    if channels < x.shape[-1]:
        out = torch.cat([out, x[..., num_prefix:, channels:]], dim=-1)
    return out if num_prefix == 0 else torch.cat([x[..., :num_prefix, :], out], dim=-2)


def _check(x: Tensor, rotation: Rotation) -> None:
    if torch.jit.is_tracing():
        return
    table = rotation.cos
    if x.dim() != 4 or x.shape[-2] != table.shape[-2] or 2 * table.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"x: expected (B, heads, tokens {table.shape[-2]}, at least {2 * table.shape[-1]} channels), got "
            f"{tuple(x.shape)}; the table is {tuple(table.shape)}. Split the heads first and pass the positions of "
            "these tokens"
        )
    if table.shape[1] not in (1, x.shape[1]):
        raise ValueError(f"x: expected {table.shape[1]} heads, got {x.shape[1]} in {tuple(x.shape)}")
    if table.shape[0] not in (1, x.shape[0]):
        raise ValueError(
            f"x: expected batch {table.shape[0]} as in the positions, got {x.shape[0]} in {tuple(x.shape)}"
        )


# -- layouts ----------------------------------------------------------------------------------------------------------


def to_half_layout(x: Tensor, dim: int = -1) -> Tensor:
    """Permute channels from interleaved to half pairs: rows of ``W_q`` and ``W_k`` of one head, their biases, q/k norm
    weights.

    Example:
        >>> to_half_layout(torch.arange(6)).tolist()
        [0, 2, 4, 1, 3, 5]
    """
    return (
        x.unflatten(dim, (-1, 2))
        .transpose(dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1)
        .flatten(dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1)
    )


def to_interleaved_layout(x: Tensor, dim: int = -1) -> Tensor:
    """Permute channels from half to interleaved pairs, the inverse of :func:`to_half_layout`."""
    return (
        x.unflatten(dim, (2, -1))
        .transpose(dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1)
        .flatten(dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1)
    )
