"""Tables written out as token sequences: which cell every token belongs to, and the orders they can be read in.

The layout is that of 2D-TPE (Li et al., arXiv 2409.19700; JinaLeejnl/2D-TPE, no licence file, nothing of it is here):
text, then a table row by row, then text. Sizes come in as token counts of cells, never as token ids: the reference
looks for marker tokens, and a marker that is missing, or stands in the table too, gives a wrong region without a word.
Several tables may stand in one sequence here; the reference has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CELL", "PADDING", "SEPARATOR", "TEXT", "Table", "TableTokens", "table_tokens"]

#: kinds of token
PADDING, TEXT, CELL, SEPARATOR = -1, 0, 1, 2


@dataclass(frozen=True)
class Table:
    """Token counts of the cells of one table, row by row.

    Args:
        counts: tokens of each cell, at least 1; an empty cell needs a filler token.
        separators: what stands between the cells. ``False``: nothing. ``True``: the published layout, where a token
            follows each cell, a token ends each row, and a row of one-token fillers follows each row, so that ``R x C``
            cells become ``2R x (2C + 1)``.

    Example:
        >>> Table([[1, 2], [3, 1]], separators=True).grid()
        [[1, 1, 2, 1, 1], [1, 1, 1, 1, 1], [3, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    """

    counts: Sequence[Sequence[int]]
    separators: bool = False

    def __post_init__(self) -> None:
        widths = [len(row) for row in self.counts]
        if not widths or min(widths) < 1 or len(set(widths)) != 1:
            raise ValueError(
                f"counts: expected rows of one length with at least one cell, got lengths {widths}; fill short rows up"
            )
        smallest = min(min(row) for row in self.counts)
        if smallest < 1:
            raise ValueError(f"counts: expected at least 1 token in a cell, got {smallest}; give empty cells a filler")

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns, without separators."""
        return len(self.counts), len(self.counts[0])

    def grid(self) -> list[list[int]]:
        """Token counts with the separators as cells of their own."""
        if not self.separators:
            return [[int(count) for count in row] for row in self.counts]
        filler = [1] * (2 * self.size[1] + 1)
        rows = []
        for row in self.counts:
            rows += [[part for count in row for part in (int(count), 1)] + [1], list(filler)]
        return rows


@dataclass(frozen=True, eq=False)
class TableTokens:
    """One entry per slot of a batch that is padded on the right.

    Args:
        kind: -1 padding, 0 text, 1 content of a cell, 2 separator.
        table: number of the table in its sequence, -1 outside.
        row: row in the grid with separators, -1 outside.
        column: column in that grid, -1 outside.
        index: number of the token inside its cell, 0 outside.
        anchor: slot where the table of a token begins; outside, the own slot.
        gap: id of the anchor less its slot when each table takes ``(W + 1)(H + 1) - 1`` ids, see
            :meth:`grid_positions`.
        size: rows and columns of the grid of its table, 0 outside.
        stride: grid rows and grid columns for each row and column of the table: 2 with separators, else 1.

    Shape:
        kind, table, row, column, index, anchor, gap ``(B, N)``; size, stride ``(B, N, 2)``; all int64.
    """

    kind: Tensor
    table: Tensor
    row: Tensor
    column: Tensor
    index: Tensor
    anchor: Tensor
    gap: Tensor
    size: Tensor
    stride: Tensor

    @property
    def mask(self) -> Tensor:
        """Real tokens, ``(B, N)``."""
        return self.kind != PADDING

    @property
    def in_table(self) -> Tensor:
        """Tokens of tables, separators included, ``(B, N)``."""
        return self.table >= 0

    @property
    def data_row(self) -> Tensor:
        """Row of the table without separators, ``(B, N)``, -1 outside; a filler row counts with the row above it."""
        return self.row.div(self.stride[..., 0], rounding_mode="floor")

    @property
    def data_column(self) -> Tensor:
        """Column of the table without separators, ``(B, N)``, -1 outside; the token that ends a row has column C."""
        return self.column.div(self.stride[..., 1], rounding_mode="floor")

    def row_order(self) -> Tensor:
        """Rank of each token when tables are read row by row, ``(B, N)``: the slot."""
        return torch.arange(self.kind.shape[1], device=self.kind.device).expand(self.kind.shape)

    def column_order(self) -> Tensor:
        """Rank of each token when tables are read column by column, tokens of a cell from left to right.

        A permutation of ``0 .. N - 1`` that moves nothing outside a table and mixes no two tables. Padding keeps its
        slots, so that it stays last under any sort.

        Shape:
            Returns ``(B, N)``, int64.

        Source: arXiv 2409.19700; the reference needs numpy before 1.24 for it and otherwise drops samples.
        """
        columns = int(self.column.max()) + 2 if self.column.numel() else 2
        # slots of a cell, and cells of a column, are in sequence already: a stable sort keeps that
        visited = (self.anchor * columns + self.column + 1).argsort(dim=1, stable=True)
        return visited.argsort(dim=1)

    def orders(self) -> Tensor:
        """Row order and column order, ``(2, B, N)``."""
        return torch.stack([self.row_order(), self.column_order()])

    def grid_positions(self) -> Tensor:
        """Two-axis ids of whole cells, with equal room on both axes.

        A table of ``H x W`` grid cells after ``n`` ids has ``n - 1 + (W + 1)(row + 1)`` and
        ``n - 1 + (H + 1)(column + 1)``; text goes on at ``n - 1 + (W + 1)(H + 1)`` on both axes, so the gaps before and
        after a table are the same in both. The reference builds these ids but uses only their maximum; as ids for
        two-axis rotary tables they are of use.

        Shape:
            Returns ``(2, B, N)``, int64.
        """
        start = self.anchor + self.gap
        height, width = self.size.unbind(-1)
        axes = [start - 1 + (width + 1) * (self.row + 1), start - 1 + (height + 1) * (self.column + 1)]
        return torch.stack([torch.where(self.in_table, axis, start) for axis in axes])

    def next_ids(self, count: int = 1) -> Tensor:
        """Rank of the next ``count`` tokens in every order, ``(B, count)``: they follow the last real token."""
        return self.mask.sum(1, keepdim=True) + torch.arange(count, device=self.kind.device)


def table_tokens(
    rows: Sequence[Sequence[int | Table]],
    *,
    length: int | None = None,
    device: torch.device | str | None = None,
) -> TableTokens:
    """Lay out text and tables of each sample, padded on the right to the longest (or to ``length``).

    Args:
        rows: for each sample, numbers of text tokens and tables in reading order.
        length: slots of a row.
        device: where the result lives.

    Raises:
        ValueError: if an entry is neither a count nor a :class:`Table`, or ``length`` is too small.

    Example:
        >>> tokens = table_tokens([[2, Table([[1, 2], [1, 1], [1, 1]]), 1]])
        >>> tokens.column_order().tolist()
        [[0, 1, 2, 5, 6, 3, 7, 4, 8, 9]]
    """
    samples = [_sample(number, row) for number, row in enumerate(rows)]
    longest = max((sample.shape[0] for sample in samples), default=0)
    if length is not None and length < longest:
        raise ValueError(
            f"length: expected at least {longest}, the longest row, got {length}; raise it or cut the text"
        )
    longest = longest if length is None else length
    out = torch.zeros(len(samples), longest, 11, dtype=torch.long)
    for number, sample in enumerate(samples):
        count = sample.shape[0]
        out[number, :count] = sample
        tail = out[number, count:]
        tail[:] = torch.tensor([PADDING, -1, -1, -1, 0, 0, 0, 0, 0, 1, 1])
        tail[:, 5] = torch.arange(count, longest)
        tail[:, 6] = _gap_after(row=rows[number])
    fields = out.to(device).unbind(-1)
    kind, table, row, column, index, anchor, gap, height, width, down, across = fields
    size, stride = torch.stack([height, width], -1), torch.stack([down, across], -1)
    return TableTokens(kind, table, row, column, index, anchor, gap, size, stride)


def _gap_after(row: Sequence[int | Table]) -> int:
    """Ids less tokens, over the tables of a row."""
    grids = [entry.grid() for entry in row if isinstance(entry, Table)]
    return sum((len(grid[0]) + 1) * (len(grid) + 1) - 1 - sum(map(sum, grid)) for grid in grids)


def _sample(number: int, row: Sequence[int | Table]) -> Tensor:
    """The fields of one sample, ``(N, 11)``."""
    parts = [torch.zeros(0, 11, dtype=torch.long)]
    start = gap = tables = 0
    for entry in row:
        if isinstance(entry, Table):
            grid = entry.grid()
            height, width = len(grid), len(grid[0])
            counts = torch.tensor(grid).flatten()
            total = int(counts.sum())
            cell = torch.repeat_interleave(torch.arange(len(counts)), counts)
            index = torch.arange(total) - (counts.cumsum(0) - counts)[cell]
            line, column = cell // width, cell % width
            stride = 2 if entry.separators else 1
            between = (line % stride + column % stride > 0) | (column == width - 1) & entry.separators
            part = torch.stack(
                [torch.where(between, SEPARATOR, CELL), torch.full_like(cell, tables), line, column, index], 1
            )
            rest = torch.tensor([start, gap, height, width, stride, stride]).expand(total, 6)
            parts.append(torch.cat([part, rest], 1))
            gap += (width + 1) * (height + 1) - 1 - total
            tables += 1
        elif isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0:
            total = entry
            text = torch.tensor([TEXT, -1, -1, -1, 0, 0, gap, 0, 0, 1, 1]).repeat(total, 1)
            text[:, 5] = start + torch.arange(total)
            parts.append(text)
        else:
            raise ValueError(f"rows[{number}]: expected numbers of text tokens (0 or more) and Table, got {entry!r}")
        start += total
    return torch.cat(parts)
