"""Decomposed relative positions of MViTv2, ViTDet and SAM: the query meets one table per axis.

Li, Wu, Fan, Mangalam, Xiong, Malik, Feichtenhofer, *MViTv2*, CVPR 2022, arXiv 2112.01526; Li, Mao, Girshick, He,
*ViTDet*, ECCV 2022, arXiv 2203.16527. Reference: Hugging Face ``vitdet`` (Apache-2.0). The query is not scaled. The
sum over axes has rank ``h + w`` and is added by broadcasting; prefix tokens, which the references do not have, get no
term.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.encodings._bias import raster_coordinates, whole_coordinates
from mmpos.encodings._slices import slices_of
from mmpos.encodings.base import BiasSlice, Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.buckets import compact, gather_key_side
from mmpos.functional.cross_bias import cross_key_side, per_token
from mmpos.functional.resample import resample_grid
from mmpos.positions import Positions


@dataclass(frozen=True, eq=False)
class AxisIndex:
    """Table row of each pair along each axis.

    For all coordinates of a raster, ``(n, n)``, or for tokens, ``(B or 1, L, L)``.
    """

    rows: tuple[Tensor, ...]
    index: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    num_prefix: int


@register("decomposed_rpe")
class DecomposedRpe(PositionEncoding):
    """``q . R_row[dy] + q . R_column[dx]``, tables shared by the heads.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        init_std: standard deviation of the initial values; 0 starts as plain attention (ViTDet fine-tunes from 0,
            Hugging Face draws 0.02).
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`. ``train_grid`` is the grid or window of
            the tables and required. ``resolution``: ``linear`` resizes each table to the grid, ``offset`` keeps it
            and clamps offsets beyond.

    Shape:
        ``tables[a] (2 n_a - 1, d)``, offset query minus key, most negative first.

    Example:
        >>> from mmpos import create_encoding
        >>> stack = create_encoding("decomposed_rpe", 64, 4, train_grid=(3, 5))
        >>> [table.shape[0] for table in stack.layers[0]["decomposed_rpe"].tables]
        [5, 9]
    """

    facts = Facts(
        title="decomposed RPE",
        source="Li et al. 2022, arXiv 2112.01526",
        plugs_into=("bias",),
        axes=(1, 3),
        scope="layer",
        needs_grid=True,
        fractional=False,
        resolution_rules=("linear", "offset"),
        relative=True,
        learned=True,
    )

    def __init__(self, dim: int, num_heads: int, *, init_std: float = 0.0, **common: Any) -> None:
        super().__init__(dim, num_heads, **common)
        if self.train_grid is None:
            raise ValueError(
                "train_grid: decomposed_rpe has one vector per offset and needs the grid it covers, for example "
                "(14, 14)"
            )
        self.init_std = init_std
        self.tables = nn.ParameterList(torch.empty(2 * size - 1, self.head_dim) for size in self.train_grid)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros or truncated normal."""
        for table in self.tables:
            if self.init_std:
                nn.init.trunc_normal_(table, std=self.init_std)
            else:
                nn.init.zeros_(table)

    def prepare_shared(self, positions: Positions) -> AxisIndex:
        """Rows of all pairs, the same for every layer."""
        self.check_axes(positions)
        assert self.train_grid is not None
        keep = self.resolution == "offset"
        if keep:
            sizes, coords = self.train_grid, whole_coordinates(positions, self.name)
        else:
            coords = raster_coordinates(positions, f"resolution='linear' of {self.name}", "use resolution='offset'")
            assert positions.grid_size is not None
            sizes = positions.grid_size
        if positions.is_raster and not positions.moved:
            assert positions.grid_size is not None
            codes = []
            for current, size in zip(positions.grid_size, sizes, strict=True):
                tick = torch.arange(current, device=coords.device)
                row = tick[:, None] - tick[None, :] + (size - 1)
                codes.append(row.clamp(0, 2 * size - 2) if keep else row)
            rows = tuple(per_token(code, axis, positions.grid_size) for axis, code in enumerate(codes))
            return AxisIndex(rows, (), sizes, positions.num_prefix)
        index = []
        for axis, size in enumerate(sizes):
            c = coords[..., axis]
            row = (c[:, :, None] - c[:, None, :]).round().long() + (size - 1)
            index.append(compact(row.clamp(0, 2 * size - 2), 2 * size - 1, positions.num_prefix))
        return AxisIndex((), tuple(index), sizes, positions.num_prefix)

    def prepare(self, positions: Positions, shared: AxisIndex | None = None) -> tuple[AxisIndex, tuple[Tensor, ...]]:
        """Rows, and the tables of this layer for the grid."""
        shared = self.prepare_shared(positions) if shared is None else shared
        wanted = [2 * size - 1 for size in shared.sizes]
        tables = [resample_grid(t, [n], "linear", False) for t, n in zip(self.tables, wanted, strict=True)]
        return shared, tuple(tables)

    def logit_bias(self, q: Tensor, k: Tensor, prepared: tuple[AxisIndex, tuple[Tensor, ...]]) -> Tensor:
        """The term of the query, ``(B, heads, L, L)``; zero from and to prefix tokens."""
        axes, tables = prepared
        scores = [torch.matmul(q, table.to(q.dtype).T) for table in tables]
        if axes.num_prefix:  # one more row, for pairs with a prefix token
            scores = [F.pad(score, (0, 1)) for score in scores]
        if axes.rows:
            return cross_key_side(scores, axes.rows, axes.num_prefix)
        terms = [gather_key_side(score, index) for score, index in zip(scores, axes.index, strict=True)]
        return torch.stack(terms).sum(0) if len(terms) > 2 else sum(terms[1:], terms[0])

    def logit_bias_slices(
        self, q: Tensor, k: Tensor, prepared: tuple[AxisIndex, tuple[Tensor, ...]]
    ) -> Iterator[BiasSlice] | None:
        """The same a few heads at a time: all of them at once do not fit into a cache."""
        axes, tables = prepared
        chosen = slices_of(q, k, *tables)
        if chosen is None:
            return None

        def slices() -> Iterator[BiasSlice]:
            for b, h in chosen:
                index = tuple(i if i.shape[0] == 1 else i[b] for i in axes.index)
                yield b, h, self.logit_bias(q[b, h], k[b, h], (replace(axes, index=index), tables))

        return slices()


def decomposed_bias(q: Tensor, tables: Sequence[Tensor], q_grid: Sequence[int], k_grid: Sequence[int]) -> Tensor:
    """The same term between two grids, as in attention with pooled keys.

    Coordinates of the coarser grid are stretched and the difference is truncated; a table of another length is resized.

    Shape:
        q ``(B, heads, Lq, d)`` unscaled, tables one ``(n, d)`` per axis; returns ``(B, heads, Lq, Lk)``.
    """
    scores: list[Tensor] = []
    rows: list[Tensor] = []
    for table, queries, keys in zip(tables, q_grid, k_grid, strict=True):
        table = resample_grid(table, [2 * max(queries, keys) - 1], "linear", False)
        up, down = max(keys / queries, 1.0), max(queries / keys, 1.0)
        tick_q = torch.arange(queries, device=q.device)[:, None] * up
        tick_k = torch.arange(keys, device=q.device)[None, :] * down
        code = (tick_q - tick_k + (keys - 1) * down).long()
        rows.append(per_token(code, len(rows), q_grid))
        scores.append(torch.matmul(q, table.to(q.dtype).T))
    return cross_key_side(scores, rows, 0)
