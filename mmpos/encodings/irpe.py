"""iRPE: image-relative position encoding with piecewise buckets, as a bias or in context, on queries, keys and values.

Wu, Peng, Chen, Fu, Chao, *Rethinking and Improving Relative Position Encoding for Vision Transformer*, ICCV 2021,
arXiv 2107.14222. Reference: microsoft/Cream, iRPE (Apache-2.0). "On keys" means that the *query* reads the table, as
the reference names it. Where paper and reference disagree we follow the reference, whose checkpoints exist:
distances are rounded before bucketing, ``quantization`` buckets the squared distance, and a bias is not divided by
the root of the head width.

Different from the reference: the grid is always explicit; one index serves all layers, in one byte per pair; terms
on queries, keys and values are gathered and summed up instead of expanding tables to ``L x L x d``; tokens may be
any subset of a grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.coordinates import rescaled
from mmpos.encodings._slices import Slices, join_slices, slices_of
from mmpos.encodings.base import BiasSlice, Facts, PositionEncoding, ScoreMod
from mmpos.encodings.registry import register
from mmpos.functional.buckets import (
    axis_codes,
    bucket_index,
    check_method,
    compact,
    gather_key_side,
    gather_query_side,
    gather_static,
    mirror_rows,
    num_buckets,
    row_mass,
)
from mmpos.functional.cross_bias import (
    cross_key_side,
    cross_mass,
    cross_query_side,
    cross_static,
    per_coordinate,
    per_token,
)
from mmpos.positions import Positions

#: for each table the index, that from which the opposite pair is read, and how many rows it is to be mirrored in
Pairs = list[tuple[Tensor, Tensor, int | None]]


@dataclass(frozen=True, eq=False)
class Buckets:
    """Which table row serves a pair of tokens: dense, or for ``cross`` on a raster one small table for each axis.

    Rows count from the first one in ``used``, per table the range ``[low, high)`` that the grid can reach; ``high -
    low`` is the row of prefix tokens.

    Shape:
        index one per table, ``(B or 1, L, L)`` in the smallest integer type; codes one per axis ``(n, n)`` int64,
        rows the same for each token ``(N, n)``.
    """

    index: tuple[Tensor, ...]
    codes: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    used: tuple[tuple[int, int], ...]
    num_prefix: int

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in (*self.index, *self.codes, *self.rows))


@register("irpe")
class Irpe(PositionEncoding):
    """Image-relative position encoding.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        method: ``product`` (default), ``cross``, ``euclidean`` or ``quantization``.
        mode: ``contextual`` (tables meet queries, keys and attention weights) or ``bias`` (a number for each row).
        on: where it acts, any of the letters ``q``, ``k``, ``v``; ``v`` needs the contextual mode.
        shared_heads: whether all heads read one table.
        ratio: how far offsets stay distinct; 1.9 for product, about 20 for cross and euclidean, 33 for quantization.
        init_std: standard deviation of the initial values (truncated normal); 0 starts from plain attention, as the
            reference does for classification, while its detector starts from other values than 0. Short trainings
            need a start: a table moves by the learning rate in a step, and terms below 1 hardly steer attention.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`; ``num_prefix > 0`` adds the row of
            prefix tokens.

    Shape:
        ``table_q``, ``table_k``: ``(tables, heads or 1, d, rows)`` in context, ``(tables, heads or 1, rows)`` as
        bias; ``table_v``: ``(tables, heads or 1, rows, d)``; ``tables`` is the number of axes for cross and 1
        otherwise.

    Example:
        >>> from mmpos import create_encoding
        >>> create_encoding("irpe", 64, 4, num_prefix=1).layers[0]["irpe"].table_k.shape
        torch.Size([1, 1, 16, 50])
    """

    facts = Facts(
        title="iRPE",
        source="Wu et al. 2021, arXiv 2107.14222",
        plugs_into=("bias", "qkvo"),
        axes=(1, 3),
        scope="layer",
        resolution_rules=("index", "rescaled"),
        relative=True,
        learned=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        method: str = "product",
        mode: str = "contextual",
        on: str = "k",
        shared_heads: bool = True,
        ratio: float = 1.9,
        init_std: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        check_method(method)
        if mode not in ("contextual", "bias"):
            raise ValueError(f"mode: expected 'contextual' or 'bias', got {mode!r}")
        if not on or set(on) - set("qkv") or len(set(on)) != len(on):
            raise ValueError(f"on: expected some of the letters q, k, v, for example 'qkv', got {on!r}")
        if mode == "bias" and "v" in on:
            raise ValueError(
                f"on: a bias is added to logits and has no meaning on v, got {on!r}; use mode='contextual' or on='qk'"
            )
        if not ratio > 0:
            raise ValueError(f"ratio: expected a positive number, got {ratio}")
        if not init_std >= 0:
            raise ValueError(f"init_std: expected 0 or more, got {init_std}")
        self.method = method
        self.mode = mode
        self.on = on
        self.ratio = float(ratio)
        self.init_std = float(init_std)
        self.buckets = num_buckets(method, ratio, self.axes)
        self.rows = self.buckets + (self.num_prefix > 0)
        lead = (self.axes if method == "cross" else 1, 1 if shared_heads else num_heads)
        side = (self.rows,) if mode == "bias" else (self.head_dim, self.rows)
        self.table_q = nn.Parameter(torch.empty(*lead, *side)) if "q" in on else None
        self.table_k = nn.Parameter(torch.empty(*lead, *side)) if "k" in on else None
        self.table_v = nn.Parameter(torch.empty(*lead, self.rows, self.head_dim)) if "v" in on else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros, with which the first step is plain attention, or truncated normal."""
        for parameter in self.parameters():
            if self.init_std:
                bound = max(2.0, 2 * self.init_std)
                nn.init.trunc_normal_(parameter, std=self.init_std, a=-bound, b=bound)
            else:
                nn.init.zeros_(parameter)

    @property
    def owns_attention(self) -> bool:
        """Only tables on values need the attention weights."""
        return "v" in self.on

    # -- positions ------------------------------------------------------------------------------------------------

    def prepare_shared(self, positions: Positions) -> Buckets:
        """The index, the same for every layer."""
        self.check_axes(positions)
        if positions.num_prefix and not self.num_prefix:
            raise ValueError(
                f"num_prefix: the tables have no row for prefix tokens but positions have {positions.num_prefix}; "
                "build with create_encoding(..., num_prefix=...)"
            )
        coords = (
            rescaled(positions, train_grid=self.training_grid(positions))
            if self.resolution == "rescaled"
            else positions.coords
        )
        used = self.used_rows(positions)
        raster = positions.grid_size if positions.is_raster and not positions.moved else None
        if raster is None:
            index = bucket_index(
                [c[..., :, None] - c[..., None, :] for c in coords.unbind(-1)], self.method, self.ratio
            )
        else:
            ticks = []
            for axis in range(self.axes):  # coordinates along one edge of the raster
                edge = coords[0].unflatten(0, raster).select(-1, axis).movedim(axis, 0)
                ticks.append(edge.reshape(raster[axis], -1)[:, 0])
            if self.method == "cross":
                pairs = zip(ticks, used, strict=True)
                codes = tuple(axis_codes(tick, self.ratio) - low for tick, (low, _) in pairs)
                rows = tuple(per_token(code, axis, raster) for axis, code in enumerate(codes))
                return Buckets((), codes, rows, used, positions.num_prefix)
            offsets = []
            for axis, tick in enumerate(ticks):
                shape = [1] * (2 * self.axes)
                shape[axis] = shape[self.axes + axis] = raster[axis]
                offsets.append((tick[:, None] - tick[None, :]).reshape(shape))
            count = positions.num_placed
            index = tuple(i.reshape(1, count, count) for i in bucket_index(offsets, self.method, self.ratio))
        compacted = (
            compact(i - low if low else i, high - low, positions.num_prefix)
            for i, (low, high) in zip(index, used, strict=True)
        )
        return Buckets(tuple(compacted), (), (), used, positions.num_prefix)

    def used_rows(self, positions: Positions) -> tuple[tuple[int, int], ...]:
        """Range of rows that pairs of a grid of known size can have, one per table.

        Products are short and kept whole.
        """
        grid = positions.grid_size
        count = self.axes if self.method == "cross" else 1
        known = grid is not None and not positions.moved and self.resolution == "index"
        if self.method == "product" or not known or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return ((0, self.buckets),) * count
        assert grid is not None
        corner = [torch.tensor(float(size - 1)) for size in grid]
        furthest = [int(row) for row in bucket_index(corner, self.method, self.ratio)]
        if self.method == "cross":
            return tuple((self.buckets - 1 - row, row + 1) for row in furthest)
        return ((self.buckets // 2, furthest[0] + 1),)

    def prepare(self, positions: Positions, shared: Buckets | None = None) -> Buckets:
        """The index; tables are read where they act, so that a deep model never holds all its biases at once."""
        return self.prepare_shared(positions) if shared is None else shared

    # -- attention ------------------------------------------------------------------------------------------------

    def logit_bias(self, q: Tensor, k: Tensor, prepared: Buckets) -> Tensor | None:
        """Terms on keys and queries; when values have a table too, :meth:`attend` adds all of them."""
        return None if self.owns_attention else self.terms(q, k, prepared)

    def terms(self, q: Tensor, k: Tensor, prepared: Buckets) -> Tensor | None:
        """What is added to the logits, ``(B or 1, heads or 1, L, L)``; ``None`` when only values have a table."""
        if self.mode == "bias":
            return self._static(prepared)
        key_side, query_side = (
            self._scaled(self.table_k, prepared, q.dtype),
            self._scaled(self.table_q, prepared, q.dtype),
        )
        return self._combine(q, k, key_side, query_side, prepared, self._pairs(prepared))

    def logit_bias_slices(self, q: Tensor, k: Tensor, prepared: Buckets) -> Iterator[BiasSlice] | None:
        """The terms of queries and keys a few heads at a time: all of them at once do not fit into a cache."""
        chosen = None if self.owns_attention or self.mode == "bias" else slices_of(q, k, self.table_k, self.table_q)
        if chosen is None:
            return None
        tables = [self._scaled(self.table_k, prepared, q.dtype), self._scaled(self.table_q, prepared, q.dtype)]

        def slices() -> Iterator[BiasSlice]:
            for b, h, (key_side, query_side), pairs in _parts(chosen, tables, self._pairs(prepared)):
                term = self._combine(q[b, h], k[b, h], key_side, query_side, prepared, pairs)
                assert term is not None
                yield b, h, term

        return slices()

    def score_mod(self, q: Tensor, k: Tensor, prepared: Buckets) -> ScoreMod:
        """The terms as a ``score_mod`` for ``flex_attention``, which never holds an ``L x L`` bias of each head.

        Exact for tables on queries and keys; tables on values need the attention weights and cannot be expressed.
        """
        if self.owns_attention:
            raise ValueError(
                f"on: flex_attention has no place for tables on values, got on={self.on!r}; use mmpos.attend"
            )
        if prepared.codes:  # as pairs of tokens, because a score is changed pair by pair
            sizes = [code.shape[0] for code in prepared.codes]
            index = [
                compact(
                    rows.index_select(1, per_coordinate(axis, sizes, rows.device))[None],
                    high - low,
                    prepared.num_prefix,
                )
                for axis, (rows, (low, high)) in enumerate(zip(prepared.rows, prepared.used, strict=True))
            ]
        else:
            index = list(prepared.index)
        rows = [i.long() for i in index]
        if self.mode == "bias":
            bias = self._static(prepared)
            return lambda score, b, h, i, j: score + bias[b % bias.shape[0], h % bias.shape[1], i, j]
        key_side = [_product(q, t) for t in self._scaled(self.table_k, prepared, q.dtype)]
        query_side = [_product(k, t) for t in self._scaled(self.table_q, prepared, q.dtype)]

        def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            for table, row in enumerate(rows):
                sample = b % row.shape[0]
                if key_side:
                    score = score + key_side[table][b, h, i, row[sample, i, j]]
                if query_side:
                    score = score + query_side[table][b, h, j, row[sample, j, i]]
            return score

        return change

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prepared: Buckets,
        *,
        bias: Tensor | None,
        scale: float,
        dropout_p: float,
        plain: bool,
    ) -> Tensor:
        """Attention whose weights also read ``table_v``, on a CPU without gradients slice by slice in the cache."""
        assert self.table_v is not None
        tables = [
            self._scaled(self.table_q, prepared, q.dtype),
            self._scaled(self.table_k, prepared, q.dtype),
            self._used(self.table_v, prepared, q.dtype, dim=-2),
        ]
        chosen = None if plain else slices_of(q, k, v, self.table_v, self.table_k, self.table_q, bias)
        if chosen is None:
            return self._attend(q, k, v, tables, prepared, self._pairs(prepared), bias, scale, dropout_p)
        full = None if bias is None else bias.expand(q.shape[0], q.shape[1], -1, -1)

        def found() -> Iterator[tuple[slice, slice, Tensor]]:
            for b, h, part, pairs in _parts(chosen, tables, self._pairs(prepared)):
                mask = None if full is None else full[b, h]
                yield b, h, self._attend(q[b, h], k[b, h], v[b, h], part, prepared, pairs, mask, scale, dropout_p)

        return join_slices(found(), q)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: list[list[Tensor]],
        prepared: Buckets,
        pairs: Pairs,
        bias: Tensor | None,
        scale: float,
        dropout_p: float,
    ) -> Tensor:
        query_side, key_side, value_side = tables
        term = self._combine(q, k, key_side, query_side, prepared, pairs)
        if term is None:
            logits = torch.matmul(q * scale, k.mT)
        else:
            product = torch.baddbmm(term.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
            logits = product.view(term.shape)
        if bias is not None:
            logits = logits.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else logits + bias
        if bias is None:
            weights = logits.softmax(-1)
        else:  # a query that may attend to nothing gives zero, and no gradient
            empty = (logits == float("-inf")).all(-1, keepdim=True)
            weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        weights = F.dropout(weights, dropout_p)
        out = torch.matmul(weights, v)
        if prepared.codes:
            return out + cross_mass(weights, value_side, prepared.rows, prepared.num_prefix)
        for table, (index, _, _) in zip(value_side, pairs, strict=True):
            out = out + _product(row_mass(weights, index, table.shape[-2]), table)
        return out

    # -- tables ---------------------------------------------------------------------------------------------------

    def _used(self, tables: Tensor | None, prepared: Buckets, dtype: torch.dtype, dim: int = -1) -> list[Tensor]:
        """The rows that the grid can reach, then that of prefix tokens; nothing when there is no table."""
        out = []
        for table, (low, high) in zip([] if tables is None else tables.to(dtype), prepared.used, strict=False):
            if (low, high) != (0, self.buckets):
                end = self.rows - self.buckets
                table = torch.cat([table.narrow(dim, low, high - low), table.narrow(dim, self.buckets, end)], dim)
            out.append(table)
        return out

    def _scaled(self, tables: Tensor | None, prepared: Buckets, dtype: torch.dtype) -> list[Tensor]:
        """Tables that meet queries or keys; the scale of the head goes into the table, which is smaller."""
        return [table * self.head_dim**-0.5 for table in self._used(tables, prepared, dtype)]

    def _pairs(self, prepared: Buckets) -> Pairs:
        """The index, and what leads to that of the opposite pair: signed buckets are mirrored, distances are not."""
        signed = self.table_q is not None and self.method not in ("euclidean", "quantization")
        rows = [high - low if signed else None for low, high in prepared.used]
        return [(index, index, mirrored) for index, mirrored in zip(prepared.index, rows, strict=False)]

    def _combine(
        self,
        q: Tensor,
        k: Tensor,
        key_tables: list[Tensor],
        query_tables: list[Tensor],
        prepared: Buckets,
        pairs: Pairs,
    ) -> Tensor | None:
        key_side = [_product(q, table) for table in key_tables]
        query_side = [torch.matmul(table.mT, k.mT) for table in query_tables]  # (B, heads, rows, L)
        total: Tensor | None = None
        if prepared.codes:
            if key_side:
                total = cross_key_side(key_side, prepared.rows, prepared.num_prefix)
            if query_side:
                total = cross_query_side(query_side, prepared.rows, prepared.num_prefix, add_to=total)
            return total
        for table, (index, opposite, mirrored) in enumerate(pairs):
            terms = [gather_key_side(key_side[table], index)] if key_side else []
            if query_side:
                terms.append(gather_query_side(query_side[table], opposite, mirrored))
            for term in terms:
                total = term if total is None else total + term if total.requires_grad else total.add_(term)
        return total

    def _static(self, prepared: Buckets) -> Tensor:
        table: Tensor | None = self.table_k
        if self.table_q is not None:  # a bias on queries is one on keys with the rows of the opposite pairs
            placed, prefix = self.table_q[..., : self.buckets], self.table_q[..., self.buckets :]
            mirrored = placed if self.method in ("euclidean", "quantization") else placed.flip(-1)
            mirrored = torch.cat([mirrored, prefix], -1) if prefix.shape[-1] else mirrored
            table = mirrored if table is None else table + mirrored
        assert table is not None
        used = self._used(table, prepared, table.dtype)
        if prepared.codes:
            return cross_static(used, prepared.codes, prepared.num_prefix)
        total: Tensor | None = None
        for rows, index in zip(used, prepared.index, strict=True):
            term = gather_static(rows, index)
            total = term if total is None else total + term
        assert total is not None
        return total

    def extra_repr(self) -> str:
        """Shown in ``print(model)``."""
        return f"{super().extra_repr()}, method={self.method!r}, mode={self.mode!r}, on={self.on!r}, ratio={self.ratio}"


def _product(x: Tensor, table: Tensor) -> Tensor:
    """``x @ table``; a table that all heads share makes one matrix product of all tokens."""
    return torch.matmul(x, table[0] if table.shape[0] == 1 else table)


def _parts(
    chosen: Slices, tables: list[list[Tensor]], pairs: Pairs
) -> Iterator[tuple[slice, slice, list[list[Tensor]], Pairs]]:
    """Slices of batch and heads, with what each needs of the tables and of the index.

    Without gradients the index is widened once for all slices; with them it stays small until the backward pass.
    """
    wide = pairs
    if not torch.is_grad_enabled():
        wide = [(index.long(), mirror_rows(index.long(), mirrored), None) for index, _, mirrored in pairs]
    for b, h in chosen:
        part = [[t if t.shape[0] == 1 else t[h] for t in group] for group in tables]
        yield b, h, part, [(i if len(i) == 1 else i[b], o if len(o) == 1 else o[b], m) for i, o, m in wide]
