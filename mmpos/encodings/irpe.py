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
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.buckets import (
    axis_codes,
    bucket_index,
    check_method,
    compact,
    gather_key_side,
    gather_query_side,
    gather_static,
    num_buckets,
    reverse_index,
    row_mass,
)
from mmpos.functional.cross_bias import cross_key_side, cross_mass, cross_query_side, cross_static
from mmpos.positions import Positions

#: elements of attention logits that are worked on at a time on a CPU, per thread: they should stay in the
#: second-level cache
SLICE_ELEMENTS = 2**18


@dataclass(frozen=True, eq=False)
class Buckets:
    """Which table row serves a pair of tokens: dense, or for ``cross`` on a raster one small table for each axis.

    Shape:
        index one per table, ``(B or 1, L, L)`` in the smallest integer type; codes one per axis ``(n, n)`` int64.
    """

    index: tuple[Tensor, ...]
    codes: tuple[Tensor, ...]
    num_prefix: int

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in (*self.index, *self.codes))


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
        self.method = method
        self.mode = mode
        self.on = on
        self.ratio = float(ratio)
        self.buckets = num_buckets(method, ratio, self.axes)
        self.rows = self.buckets + (self.num_prefix > 0)
        lead = (self.axes if method == "cross" else 1, 1 if shared_heads else num_heads)
        side = (self.rows,) if mode == "bias" else (self.head_dim, self.rows)
        self.table_q = nn.Parameter(torch.empty(*lead, *side)) if "q" in on else None
        self.table_k = nn.Parameter(torch.empty(*lead, *side)) if "k" in on else None
        self.table_v = nn.Parameter(torch.empty(*lead, self.rows, self.head_dim)) if "v" in on else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros: the first step is plain attention."""
        for parameter in self.parameters():
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
        if positions.is_raster and not positions.moved:
            assert positions.grid_size is not None
            grid = positions.grid_size
            ticks = []
            for axis, size in enumerate(grid):  # coordinates along one edge of the raster
                edge = coords[0].unflatten(0, grid).select(-1, axis).movedim(axis, 0)
                ticks.append(edge.flatten(1)[:, 0] if len(grid) > 1 else edge.reshape(size))
            if self.method == "cross":
                return Buckets((), tuple(axis_codes(tick, self.ratio) for tick in ticks), positions.num_prefix)
            offsets = []
            for axis, tick in enumerate(ticks):
                shape = [1] * (2 * len(grid))
                shape[axis] = shape[len(grid) + axis] = grid[axis]
                offsets.append((tick[:, None] - tick[None, :]).reshape(shape))
            count = positions.num_placed
            index = tuple(i.reshape(1, count, count) for i in bucket_index(offsets, self.method, self.ratio))
        else:
            offsets = [(c[..., :, None] - c[..., None, :]) for c in coords.unbind(-1)]
            index = bucket_index(offsets, self.method, self.ratio)
        return Buckets(tuple(compact(i, self.buckets, positions.num_prefix) for i in index), (), positions.num_prefix)

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
        scale = self.head_dim**-0.5
        key_side = None if self.table_k is None else [torch.matmul(q * scale, t.to(q.dtype)) for t in self.table_k]
        query_side = None if self.table_q is None else [_scores_of_keys(t, k * scale) for t in self.table_q]
        return self._combine(key_side, query_side, prepared, self._indices(prepared))

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
        """Attention whose weights also read ``table_v``; on a CPU without gradients in slices that stay in the
        cache.
        """
        assert self.table_v is not None
        tables = (self.table_q, self.table_k, self.table_v)
        cast = [None if t is None else t.to(q.dtype) for t in tables]
        indices = self._indices(prepared)
        if plain or _whole(q, k, v, *cast):
            return self._attend(q, k, v, cast, prepared, indices, bias, scale, dropout_p)
        out = torch.empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1], dtype=q.dtype).transpose(1, 2)
        full = None if bias is None else bias.expand(q.shape[0], q.shape[1], -1, -1)
        for b, h in _slices(q):
            part = [None if t is None else t if t.shape[1] == 1 else t[:, h] for t in cast]
            index = tuple(
                (i if i.shape[0] == 1 else i[b], None if r is None or r.shape[0] == 1 else r[b]) for i, r in indices
            )
            index = tuple((i, r if given is None else given) for (i, given), (_, r) in zip(index, indices, strict=True))
            mask = None if full is None else full[b, h]
            out[b, h] = self._attend(q[b, h], k[b, h], v[b, h], part, prepared, index, mask, scale, dropout_p)
        return out

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: list[Tensor | None],
        prepared: Buckets,
        indices: tuple[tuple[Tensor, Tensor | None], ...],
        bias: Tensor | None,
        scale: float,
        dropout_p: float,
    ) -> Tensor:
        table_q, table_k, table_v = tables
        assert table_v is not None
        factor = self.head_dim**-0.5
        scaled = q * factor
        key_side = None if table_k is None else [torch.matmul(scaled, t) for t in table_k]
        query_side = None if table_q is None else [_scores_of_keys(t, k * factor) for t in table_q]
        term = self._combine(key_side, query_side, prepared, indices)
        product = scaled if scale == factor else q * scale
        if term is None:
            logits = torch.matmul(product, k.transpose(-2, -1))
        else:
            logits = torch.baddbmm(term.flatten(0, 1), product.flatten(0, 1), k.flatten(0, 1).mT).view(term.shape)
        if bias is not None:
            logits = logits.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else logits + bias
        weights = logits.softmax(-1)
        if bias is not None:  # a query that may attend to nothing gives zero
            weights = weights.masked_fill((logits == float("-inf")).all(-1, keepdim=True), 0.0)
        weights = F.dropout(weights, dropout_p)
        out = torch.matmul(weights, v)
        if prepared.codes:
            return out + cross_mass(weights, table_v, prepared.codes, prepared.num_prefix)
        for table, (index, _) in zip(table_v, indices, strict=True):
            out = out + torch.matmul(row_mass(weights, index, self.rows), table)
        return out

    # -- tables ---------------------------------------------------------------------------------------------------

    def _indices(self, prepared: Buckets) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """The index and, where needed, that of the opposite pair, as int64."""
        pairs = []
        for index in prepared.index:
            index = index.long()
            pairs.append((index, reverse_index(index, self.method, self.buckets) if "q" in self.on else None))
        return tuple(pairs)

    def _combine(
        self,
        key_side: list[Tensor] | None,
        query_side: list[Tensor] | None,
        prepared: Buckets,
        indices: tuple[tuple[Tensor, Tensor | None], ...],
    ) -> Tensor | None:
        total: Tensor | None = None
        if prepared.codes:
            if key_side is not None:
                total = cross_key_side(key_side, prepared.codes, prepared.num_prefix)
            if query_side is not None:
                total = cross_query_side(query_side, prepared.codes, prepared.num_prefix, add_to=total)
            return total
        for table, (index, opposite) in enumerate(indices):
            if key_side is not None:
                term = gather_key_side(key_side[table], index)
                total = term if total is None else total + term
            if query_side is not None:
                assert opposite is not None
                term = gather_query_side(query_side[table], opposite)
                total = term if total is None else total.add_(term) if not total.requires_grad else total + term
        return total

    def _static(self, prepared: Buckets) -> Tensor:
        table: Tensor | None = self.table_k
        if self.table_q is not None:  # a bias on queries is one on keys with the rows of the opposite pairs
            placed, prefix = self.table_q[..., : self.buckets], self.table_q[..., self.buckets :]
            mirrored = placed if self.method in ("euclidean", "quantization") else placed.flip(-1)
            mirrored = torch.cat([mirrored, prefix], -1) if prefix.shape[-1] else mirrored
            table = mirrored if table is None else table + mirrored
        assert table is not None
        if prepared.codes:
            return cross_static(table, prepared.codes, prepared.num_prefix)
        total: Tensor | None = None
        for rows, index in zip(table, prepared.index, strict=True):
            term = gather_static(rows, index)
            total = term if total is None else total + term
        assert total is not None
        return total

    def extra_repr(self) -> str:
        """Shown in ``print(model)``."""
        return f"{super().extra_repr()}, method={self.method!r}, mode={self.mode!r}, on={self.on!r}, ratio={self.ratio}"


def _scores_of_keys(table: Tensor, k: Tensor) -> Tensor:
    """What each row of a table ``(heads or 1, d, rows)`` says about each key: ``(B, heads, rows, L)``."""
    return torch.matmul(table.to(k.dtype).mT, k.mT)


def _whole(*tensors: Tensor | None) -> bool:
    """Whether the attention is computed in one piece: slices pay only in eager mode on a CPU and without gradients."""
    given = [t for t in tensors if t is not None]
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or given[0].device.type != "cpu":
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in given)


def _slices(q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and heads whose logits stay in the cache."""
    batch, heads, length, _ = q.shape
    fit = max(1, SLICE_ELEMENTS * torch.get_num_threads() // (length * length))
    step_heads = heads if fit >= heads else fit
    step_batch = max(1, fit // heads)
    for b in range(0, batch, step_batch):
        for h in range(0, heads, step_heads):
            yield slice(b, b + step_batch), slice(h, h + step_heads)
