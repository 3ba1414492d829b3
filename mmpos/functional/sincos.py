"""Fixed sine and cosine features of coordinates, one implementation for any number of axes.

The published variants are one function with four switches: how channels are divided among axes, whether sine and cosine
    stand in
blocks or alternate, which axis comes first, and whether blocks are ordered by axis or by function. On square grids a
wrong axis order looks like a transposed image and goes unnoticed; every preset is therefore defined, and tested, on
rectangles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["SINCOS_PRESETS", "axis_widths", "fourier_bands", "sincos"]

#: switches of :func:`sincos` that give the tables of reference codes
SINCOS_PRESETS: dict[str, dict[str, Any]] = {
    # [sin row, cos row, sin column, cos column]
    "default": {"layout": "block", "axis_order": "ij", "widths": "equal"},
    # MAE, MoCo v3, DropPos, SatMAE: the first half encodes the column, whatever the names there suggest
    "mae": {"layout": "block", "axis_order": "xy", "widths": "equal"},
    # timm build_sincos2d_pos_embed: [sin row, sin column, cos row, cos column]
    "timm": {"layout": "grouped", "axis_order": "ij", "widths": "equal"},
    # positional-encodings of PyPI: sine and cosine alternate; axes are as wide as the first, then cut to dim
    "pypi": {"layout": "interleaved", "axis_order": "ij", "widths": "cut"},
    # PaPE: the last axis takes the channels that are left over
    "pape": {"layout": "block", "axis_order": "ij", "widths": "remainder"},
}


def axis_widths(dim: int, axes: int, rule: str | Sequence[int] = "equal") -> tuple[int, ...]:
    """Channels of each axis, in the order in which axes are laid out.

    Args:
        dim: channels in all.
        axes: number of axes.
        rule: ``equal``; ``remainder`` (the last axis takes what is left); ``cut`` (equal even widths of at least
            ``dim`` in sum, the surplus is cut from the end); or the widths themselves.

    Example:
        >>> axis_widths(18, 4, "remainder"), axis_widths(14, 3, "cut")
        ((4, 4, 4, 6), (6, 6, 6))
    """
    if rule == "equal":
        if dim % (2 * axes):
            raise ValueError(
                f"dim: sine and cosine of {axes} axes need a multiple of {2 * axes} channels, got {dim}; change dim, "
                "or give widths='remainder'"
            )
        return (dim // axes,) * axes
    if rule == "remainder":
        if dim < 2 * axes:
            raise ValueError(f"dim: expected at least {2 * axes} channels for {axes} axes, got {dim}")
        return (*(dim // axes,) * (axes - 1), dim - dim // axes * (axes - 1))
    if rule == "cut":
        return (2 * -(-dim // (2 * axes)),) * axes
    if isinstance(rule, str):
        raise ValueError(f"widths: expected 'equal', 'remainder', 'cut' or one number per axis, got {rule!r}")
    widths = tuple(int(width) for width in rule)
    if len(widths) != axes or min(widths) < 0 or sum(widths) != dim:
        raise ValueError(f"widths: expected {axes} numbers with sum {dim}, got {widths}")
    return widths


def sincos(
    coords: Tensor,
    dim: int,
    base: float = 10000.0,
    *,
    layout: str = "block",
    axis_order: str = "ij",
    widths: str | Sequence[int] = "equal",
    first: str = "sin",
) -> Tensor:
    """Sine and cosine of every coordinate at the frequencies ``base ** (-2k / width)`` of its axis.

    Args:
        coords: real coordinates in patch units; integer tensors are taken as float32.
        dim: channels ``D``.
        base: base of the ladder.
        layout: ``block`` = [sin, cos] blocks of an axis, axis after axis; ``interleaved`` = sin, cos, sin, cos within
            an axis; ``grouped`` = the sines of all axes, then the cosines of all axes.
        axis_order: ``ij`` the axes as given (row first), ``xy`` the last axis first (column first).
        widths: channels of each axis in the order of layout, see :func:`axis_widths`. An odd width has one more sine
            than cosines.
        first: ``sin`` or ``cos``.

    Shape:
        coords ``(..., A)``; returns ``(..., D)`` in float32, or float64 when the coordinates are.

    Example:
        >>> sincos(torch.tensor([[0.0, 0.0], [2.0, 1.0]]), 8).shape
        torch.Size([2, 8])
    """
    if layout not in ("block", "interleaved", "grouped"):
        raise ValueError(f"layout: expected 'block', 'interleaved' or 'grouped', got {layout!r}")
    if axis_order not in ("ij", "xy"):
        raise ValueError(f"axis_order: expected 'ij' (row first) or 'xy' (column first), got {axis_order!r}")
    if first not in ("sin", "cos"):
        raise ValueError(f"first: expected 'sin' or 'cos', got {first!r}")
    if base <= 0:
        raise ValueError(f"base: expected a positive number, got {base}")
    if coords.dtype != torch.float64:
        coords = coords.float()
    order = list(coords.unbind(-1))
    if axis_order == "xy":
        order.reverse()
    pairs = [
        _axis(values, width, base, first)
        for values, width in zip(order, axis_widths(dim, len(order), widths), strict=True)
    ]
    if layout == "grouped":
        parts = [one for one, _ in pairs] + [other for _, other in pairs]
    elif layout == "block":
        parts = [part for pair in pairs for part in pair]
    else:
        parts = [_interleave(*pair) for pair in pairs]
    return torch.cat(parts, dim=-1)[..., :dim]


def _axis(values: Tensor, width: int, base: float, first: str) -> tuple[Tensor, Tensor]:
    half = (width + 1) // 2
    # an odd width keeps its own exponents -2k/width, so the ladder is not that of half = ceil(width / 2) steps
    exponents = torch.arange(half, device=values.device, dtype=values.dtype) * (-2.0 / max(width, 1))
    angles = values[..., None] * torch.pow(torch.full((), base, device=values.device, dtype=values.dtype), exponents)
    one, other = (angles.sin(), angles.cos()) if first == "sin" else (angles.cos(), angles.sin())
    return one, other[..., : width // 2]


def _interleave(one: Tensor, other: Tensor) -> Tensor:
    if one.shape[-1] == other.shape[-1]:
        return torch.stack([one, other], dim=-1).flatten(-2)
    # odd width: the last channel has no partner
    return torch.cat([torch.stack([one[..., :-1], other], dim=-1).flatten(-2), one[..., -1:]], dim=-1)


def fourier_bands(coords: Tensor, bands: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine of each coordinate at each band, unmixed (Perceiver, timm ``build_fourier_pos_embed``).

    Args:
        coords: coordinates on [-1, 1] for pixel bands (:func:`~mmpos.functional.rotary.pixel_frequencies`), patch
            indices for a language ladder (:func:`~mmpos.functional.rotary.inverse_frequencies`).
        bands: angular frequencies.

    Shape:
        coords ``(..., A)``, bands ``(m,)``; returns sine and cosine, each ``(..., A, m)``.
    """
    angles = coords[..., None] * bands
    return angles.sin(), angles.cos()
