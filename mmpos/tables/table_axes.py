"""Rotary ids of row, column and place in the cell: one attention for tables, without orders or limits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmpos.functional.rotary import Rotation, inverse_frequencies, rotation_from_angles
from mmpos.tables.cells import TableTokens

__all__ = ["table_axes", "table_rotary"]


def table_axes(tokens: TableTokens) -> Tensor:
    """Ids of three rotary axes: row, column and place in the cell, each counted from where the table starts.

    Text has one id on all axes; after a table it goes on one above the largest id, as in M-RoPE. Not published: a
    baseline with one attention and no router, that also works without a causal order.

    Shape:
        Returns ``(3, B, N)`` int64.
    """
    inside = torch.stack([tokens.row, tokens.column, tokens.index])
    # a table of n tokens takes as many ids as its longest axis
    longest = torch.where(tokens.in_table, inside.amax(0), -1)
    entry = tokens.in_table & (tokens.anchor == tokens.row_order())
    slots, starts = tokens.row_order(), tokens.anchor.clamp_max(tokens.kind.shape[1] - 1)
    extent = torch.zeros_like(slots).scatter_reduce(1, starts, longest + 1, "amax")
    count = torch.zeros_like(slots).scatter_add(1, starts, tokens.in_table.long())
    saved = torch.where(entry, extent - count, 0).cumsum(1)  # ids less tokens of all tables up to here
    before = saved - torch.where(tokens.in_table, (extent - count).gather(1, starts), 0)
    start = tokens.anchor + before
    return torch.where(tokens.in_table, start + inside, start)


def table_rotary(ids: Tensor, head_dim: int, sections: Sequence[int] | None = None, base: float = 10000.0) -> Rotation:
    """A rotary table whose pairs are dealt to the axes in blocks of one ladder, as in M-RoPE.

    Args:
        ids: ids of the axes.
        head_dim: channels of a head.
        sections: pairs of each axis, sum ``d / 2``; default equal parts, the first axes taking what is left.
        base: base of the ladder.

    Shape:
        ids ``(A, B, N)``; returns a table in the half layout.
    """
    axes, pairs = ids.shape[0], head_dim // 2
    given = [pairs // axes + (axis < pairs % axes) for axis in range(axes)] if sections is None else list(sections)
    if head_dim % 2 or len(given) != axes or sum(given) != pairs or min(given) < 0:
        raise ValueError(f"sections: expected {axes} numbers with sum head_dim / 2 = {head_dim / 2}, got {given}")
    axis = torch.repeat_interleave(torch.tensor(given, device=ids.device))
    angles = ids[axis].movedim(0, -1)[:, None].float() * inverse_frequencies(pairs, base, device=ids.device)
    return rotation_from_angles(angles, layout="half")
