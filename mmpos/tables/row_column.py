"""Rows and columns of tables as learned embeddings: TAPAS and the header trees of TUTA.

TAPAS: Herzig et al., ACL 2020, arXiv 2004.02349; reference transformers 5.24 ``models/tapas`` (Apache-2.0).
TUTA: Wang et al., KDD 2021, arXiv 2010.12537; reference microsoft/TUTA_table_understanding at ab2be31 (MIT).
Both have a fixed number of rows and columns; :mod:`mmpos.tables.table_axes` has no limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "TapasEmbedding",
    "TutaPositions",
    "masked_tree_distance",
    "position_in_cell",
    "tree_distance",
    "tree_index",
    "visible_in_tree",
]


# -- TAPAS ------------------------------------------------------------------------------------------------------------


def position_in_cell(row: Tensor, column: Tensor, max_positions: int | None = None) -> Tensor:
    """Position that starts again in each cell: slots since the first token with the same row and column.

    Args:
        row: row ids, 0 or more; in TAPAS 0 for text, padding and the header.
        column: column ids, 0 or more; 0 outside tables, so text and padding together are one more cell and a padded
            tail goes on counting from the start of the question.
        max_positions: size of the position table; later positions take its last entry.

    Shape:
        row, column ``(B, N)`` integers; returns ``(B, N)`` int64.

    Source: arXiv 2004.02349; ``reset_position_index_per_cell`` of transformers.

    Example:
        >>> position_in_cell(torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[0, 0, 1, 1, 2]])).tolist()
        [[0, 1, 0, 1, 0]]
    """
    if row.dim() != 2 or row.shape != column.shape:
        raise ValueError(
            f"row, column: expected two equal (B, N), got {tuple(row.shape)} and "
            f"{tuple(column.shape)}; batch them alike"
        )
    if row.numel() == 0:
        return row.long()
    if int(torch.minimum(row, column).min()) < 0:
        raise ValueError("row, column: expected ids of 0 or more, got a negative one; add 1 so that 0 means outside")
    cell = row.long() * (int(column.max()) + 1) + column.long()
    slots = torch.arange(row.shape[1], device=row.device).expand(row.shape)
    first = slots.new_full((row.shape[0], int(cell.max()) + 1), row.shape[1])
    index = slots - first.scatter_reduce(1, cell, slots, "amin").gather(1, cell)
    return index if max_positions is None else index.clamp_max(max_positions - 1)


class TapasEmbedding(nn.Module):
    """Token features plus position and several typed embeddings, then layer norm.

    Args:
        dim: width ``D``.
        type_sizes: rows of each type table; TAPAS has segment, column, row, previous label, rank, inverse rank and
            numeric relation. Ids beyond a table take its last row, where the reference crashes.
        max_positions: rows of the position table.
        restart: whether positions start again in each cell.
        eps: of the layer norm.

    Shape:
        x ``(B, N, D)``, types ``(B, N, len(type_sizes))``; returns ``(B, N, D)``.

    Source: arXiv 2004.02349
    """

    def __init__(
        self,
        dim: int,
        type_sizes: Sequence[int] = (3, 256, 256, 2, 256, 256, 10),
        *,
        max_positions: int = 1024,
        restart: bool = True,
        eps: float = 1e-12,
    ) -> None:
        super().__init__()
        if len(type_sizes) < 3:
            raise ValueError(f"type_sizes: expected segment, column, row and more, got {tuple(type_sizes)}")
        self.max_positions, self.restart = max_positions, restart
        self.position = nn.Embedding(max_positions, dim)
        self.types = nn.ModuleList([nn.Embedding(size, dim) for size in type_sizes])
        self.norm = nn.LayerNorm(dim, eps=eps)
        for table in (self.position, *self.types):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor, types: Tensor) -> Tensor:
        """Normed sum."""
        if types.shape != (*x.shape[:2], len(self.types)):
            raise ValueError(
                f"types: expected (B, N, {len(self.types)}) for x {tuple(x.shape)}, got "
                f"{tuple(types.shape)}; change type_sizes or the ids"
            )
        if self.restart:
            index = position_in_cell(types[..., 2], types[..., 1], self.max_positions)
        else:
            index = torch.arange(x.shape[1], device=x.device).clamp_max(self.max_positions - 1)
        x = x + self.position(index)
        for table, ids in zip(self.types, types.unbind(-1), strict=True):
            assert isinstance(table, nn.Embedding)
            x = x + _clamped(table, ids)
        return self.norm(x)


# -- TUTA -------------------------------------------------------------------------------------------------------------


def tree_index(path: Tensor, degrees: Sequence[int]) -> Tensor:
    """Node of each level of a path in a header tree; levels below the node get the number of all nodes.

    Nodes are numbered by level and child number only, so cousins with the same child number share an index.

    Shape:
        path ``(.., depth)``, child numbers and -1 below the node; returns the same.

    Raises:
        ValueError: if a path has other levels than ``degrees`` or a child number is too large.

    Source: arXiv 2010.12537

    Example:
        >>> tree_index(torch.tensor([2, 0, -1]), (4, 4, 6)).tolist()
        [2, 4, 14]
    """
    sizes = torch.tensor(list(degrees), device=path.device)
    if path.shape[-1] != len(degrees):
        raise ValueError(f"path: expected {len(degrees)} levels as in degrees, got {tuple(path.shape)}; pad with -1")
    if bool((path >= sizes).any()):
        raise ValueError(
            f"path: expected child numbers below {tuple(degrees)}, got {path.amax().item()}; raise degrees"
        )
    return torch.where(path < 0, sizes.sum(), path + sizes.cumsum(0) - sizes)


def tree_distance(left: Tensor, top: Tensor, total: int, combine: str = "add") -> Tensor:
    """Steps between tokens in the left and in the top header tree.

    The L1 distance of multi-hot ancestor vectors is ``|a| + |b| - 2 a . b``: one product of ``N x total`` matrices,
    exact, where the reference makes an ``N x N x total`` tensor of integers.

    Args:
        left: node indices from :func:`tree_index`.
        top: the same for the top header.
        total: number of nodes of a tree, also the index of absent levels.
        combine: ``add`` or ``max`` of the two distances.

    Shape:
        left, top ``(B, N, depth)``; returns ``(B, N, N)`` int64.

    Source: arXiv 2010.12537
    """
    if combine not in ("add", "max"):
        raise ValueError(f"combine: expected 'add' or 'max', got {combine!r}")
    if bool((torch.stack([left.amax(), top.amax()]) > total).any()):
        raise ValueError(f"total: expected at least every index, got {total}; it is the sum of degrees")
    distances = []
    for index in (left, top):
        hot = torch.zeros(*index.shape[:-1], total + 1, device=index.device).scatter_(-1, index, 1.0)[..., :total]
        count = hot.sum(-1)
        distances.append(count[..., :, None] + count[..., None, :] - 2 * hot @ hot.mT)
    joined = distances[0] + distances[1] if combine == "add" else torch.maximum(*distances)
    return joined.round().long()


def masked_tree_distance(distance: Tensor, kind: Tensor) -> Tensor:
    """Distances as the attention of TUTA reads them: CLS is near to all, padding is far, and only tokens that stand
    for whole cells see other cells.

    Args:
        distance: from :func:`tree_distance`.
        kind: -1 CLS, 0 padding, odd a token that stands for its cell, even content.

    Shape:
        distance ``(B, N, N)``, kind ``(B, N)``; returns ``(B, N, N)``.

    Source: arXiv 2010.12537
    """
    either = (kind == -1)[..., :, None] | (kind == -1)[..., None, :]
    padding = (kind == 0)[..., :, None] | (kind == 0)[..., None, :]
    leader = (kind > 0) & (kind % 2 == 1)
    far = distance.masked_fill(either, 0) + 100 * padding
    return torch.where(leader[..., :, None] & leader[..., None, :], far, 101 * far)


def visible_in_tree(masked: Tensor, layer: int = 0, *, reach: int = 8, step: int = 0, limit: int = 11) -> Tensor:
    """Which pairs a layer attends to, ``masked <= min(limit, reach + layer * step)``.

    The reference adds -10000 to other logits, so that rows of padding see all padding; here they see nothing.
    """
    return masked <= min(limit, reach + layer * step)


class TutaPositions(nn.Module):
    """Order in the cell plus the concatenation of row, left path, column and top path.

    Args:
        dim: width ``D``, a multiple of ``8 depth``.
        degrees: children at each level of a header tree.
        rows: largest row id; larger ones take the last entry, where the reference crashes.
        columns: largest column id.
        orders: size of the table of places in a cell.

    Shape:
        order, row, column ``(B, N)``, left, top ``(B, N, depth)`` from :func:`tree_index`; returns ``(B, N, D)``.

    Source: arXiv 2010.12537
    """

    def __init__(
        self,
        dim: int,
        degrees: Sequence[int] = (32, 32, 64, 256),
        *,
        rows: int = 256,
        columns: int = 256,
        orders: int = 64,
    ) -> None:
        super().__init__()
        if dim % (8 * len(degrees)):
            raise ValueError(f"dim: expected a multiple of 8 * depth = {8 * len(degrees)}, got {dim}; change dim")
        nodes, width = sum(degrees) + 1, 3 * dim // (8 * len(degrees))
        self.order = nn.Embedding(orders, dim)
        self.row, self.column = nn.Embedding(rows + 1, dim // 8), nn.Embedding(columns + 1, dim // 8)
        self.left, self.top = nn.Embedding(nodes, width), nn.Embedding(nodes, width)
        for table in (self.order, self.row, self.column, self.left, self.top):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, order: Tensor, row: Tensor, column: Tensor, left: Tensor, top: Tensor) -> Tensor:
        """The position part of the token features."""
        tables = (self.row, self.left, self.column, self.top)
        parts = [_clamped(table, ids) for table, ids in zip(tables, (row, left, column, top), strict=True)]
        place = torch.cat([part.flatten(2) for part in parts], -1)
        return _clamped(self.order, order) + place


def _clamped(table: nn.Embedding, ids: Tensor) -> Tensor:
    return F.embedding(ids.clamp_max(table.weight.shape[0] - 1), table.weight)
