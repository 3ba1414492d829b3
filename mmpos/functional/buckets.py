"""Buckets of image-relative positions (iRPE): from offsets to rows of a table, and reading tables by bucket.

``i`` is the query, ``j`` the key, an offset is query minus key. ``g`` maps an offset to a signed bucket: exact near
the query, logarithmic further out, constant beyond. A *row* is the bucket counted from the lowest one; one more row
after the last serves every pair with a prefix token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "BUCKET_METHODS",
    "axis_codes",
    "bucket_index",
    "compact",
    "gather_key_side",
    "gather_query_side",
    "gather_static",
    "largest_bucket",
    "mirror_rows",
    "num_buckets",
    "piecewise_index",
    "row_mass",
    "smallest_integer",
]

BUCKET_METHODS = ("euclidean", "quantization", "cross", "product")


def piecewise_index(offset: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    """The signed bucket ``g(x)``: ``[x]`` up to ``alpha``, then logarithmic, at most ``floor(beta)``.

    Rounding comes first, then the clip to the real ``beta``, then truncation: the order decides the last bucket.

    Shape:
        Any; returns int64 of the same shape.

    Example:
        >>> piecewise_index(torch.tensor([-5.0, -1.0, 0.0, 2.0, 9.0]), 1.9, 3.8, 15.2).tolist()
        [-3, -1, 0, 2, 3]
    """
    if not 0 < alpha < gamma or not alpha <= beta:
        raise ValueError(
            f"alpha, beta, gamma: expected 0 < alpha <= beta and alpha < gamma, got {alpha}, {beta}, {gamma}"
        )
    if not offset.is_floating_point():
        offset = offset.float()
    size = offset.abs()
    steepness = (beta - alpha) / math.log(gamma / alpha)
    far = (alpha + steepness * (size.clamp_min(alpha) / alpha).log()).round().clamp_max(beta).trunc()
    return torch.where(size <= alpha, offset.round(), offset.sign() * far).long()


def largest_bucket(ratio: float) -> int:
    """Largest bucket of one axis, ``floor(beta)`` with ``beta = 2 ratio``."""
    return math.floor(2 * ratio)


def num_buckets(method: str, ratio: float, axes: int = 2) -> int:
    """Rows of one table without the prefix row.

    Example:
        >>> [num_buckets(method, 1.9) for method in ("product", "cross", "euclidean")]
        [49, 7, 7]
    """
    check_method(method)
    span = 2 * largest_bucket(ratio) + 1
    return span**axes if method == "product" else span


def check_method(method: str) -> None:
    """Raise for an unknown way of forming buckets."""
    if method not in BUCKET_METHODS:
        raise ValueError(f"method: expected one of {BUCKET_METHODS}, got {method!r}")


def _signed(offset: Tensor, ratio: float) -> Tensor:
    return piecewise_index(offset, ratio, 2 * ratio, 8 * ratio)


def axis_codes(ticks: Tensor, ratio: float) -> Tensor:
    """Rows of all pairs of ticks of one axis. Shape: ticks ``(n,)``; returns ``(n, n)``, query before key."""
    return _signed(ticks[:, None] - ticks[None, :], ratio) + largest_bucket(ratio)


def bucket_index(offsets: Sequence[Tensor], method: str, ratio: float) -> tuple[Tensor, ...]:
    """Table rows for offsets given per axis, one index for each table: one per axis for ``cross``, else a single one.

    Args:
        offsets: query minus key along each axis, broadcastable against each other.
        method: ``euclidean`` distance (rounded before ``g``), ``quantization`` of the squared distance, ``cross``
            with a table for each axis, ``product`` with a row for each combination.
        ratio: ``alpha``; ``beta = 2 ratio`` and ``gamma = 8 ratio``.
    """
    check_method(method)
    largest = largest_bucket(ratio)
    if method in ("euclidean", "quantization"):
        square = sum_of([offset * offset for offset in offsets])
        return (_signed(square.sqrt().round() if method == "euclidean" else square, ratio) + largest,)
    codes = [_signed(offset, ratio) + largest for offset in offsets]
    if method == "cross":
        return tuple(codes)
    index = codes[0]
    for code in codes[1:]:
        index = index * (2 * largest + 1) + code
    return (index,)


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Broadcasting sum of at least one tensor."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def smallest_integer(count: int) -> torch.dtype:
    """The smallest integer type that holds ``0 .. count - 1``."""
    return torch.uint8 if count <= 2**8 else torch.int16 if count <= 2**15 else torch.int32


def compact(index: Tensor, rows: int, num_prefix: int) -> Tensor:
    """An index in the smallest integer type, with row ``rows`` for every pair that involves a prefix token.

    Shape:
        index ``(B or 1, N, N)``; returns ``(B or 1, P + N, P + N)``.
    """
    return F.pad(index.to(smallest_integer(rows + 1)), (num_prefix, 0, num_prefix, 0), value=rows)


def mirror_rows(index: Tensor, rows: int | None) -> Tensor:
    """Rows of the opposite pairs without transposing; ``rows=None`` for distances, which are symmetric.

    The row of prefix tokens, which is ``rows`` itself, stays. Shape: any, in and out.
    """
    return index if rows is None else torch.where(index == rows, index, rows - 1 - index)


def gather_key_side(scores: Tensor, index: Tensor) -> Tensor:
    """``out[i, j] = scores[i, index[i, j]]``.

    Shape:
        scores ``(B, heads, Lq, rows)``, index ``(B or 1, Lq, Lk)`` of any integer type; returns ``(B, heads, Lq, Lk)``.
    """
    if _small_index_pays(scores, index):
        return _Gather.apply(scores, index, -1, None)  # type: ignore[no-any-return]
    return _gather(scores, index, -1)


def gather_query_side(scores: Tensor, index: Tensor, mirrored: int | None = None) -> Tensor:
    """``out[i, j] = scores[index[i, j], j]``, or at the opposite pair's row of ``mirrored`` rows.

    Shape:
        scores ``(B, heads, rows, Lk)``, index ``(B or 1, Lq, Lk)`` of any integer type; returns ``(B, heads, Lq, Lk)``.
    """
    if _small_index_pays(scores, index):
        return _Gather.apply(scores, index, -2, mirrored)  # type: ignore[no-any-return]
    return _gather(scores, mirror_rows(index, mirrored), -2)


def gather_static(table: Tensor, index: Tensor) -> Tensor:
    """``out[i, j] = table[index[i, j]]``, heads first, which is three times as fast as heads last.

    Shape:
        table ``(heads or 1, rows)``, index ``(B or 1, Lq, Lk)`` of any integer type; returns ``(B or 1, heads, Lq,
        Lk)``.
    """
    if _small_index_pays(table, index):
        return _Static.apply(table, index)  # type: ignore[no-any-return]
    return _static(table, index)


def row_mass(weights: Tensor, index: Tensor, rows: int) -> Tensor:
    """Attention mass of each row: ``out[i, r] = sum of weights[i, j] over index[i, j] = r``.

    Shape:
        weights ``(B, heads, Lq, Lk)``, index ``(B or 1, Lq, Lk)`` of any integer type; returns ``(B, heads, Lq,
        rows)``.
    """
    if _small_index_pays(weights, index):
        return _Mass.apply(weights, index, rows)  # type: ignore[no-any-return]
    return _scatter(weights, index, -1, rows)


# -- the same with gradients: backward passes keep the index in its own small type, shared by all layers ---------------


def _small_index_pays(scores: Tensor, index: Tensor) -> bool:
    """Whether a gradient is asked for while the index is smaller than the int64 one that autograd would keep."""
    if index.dtype == torch.int64 or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return torch.is_grad_enabled() and scores.requires_grad


def _each_head(index: Tensor, like: Tensor) -> Tensor:
    return index.long()[:, None].expand(*like.shape[:2], -1, -1)


def _gather(scores: Tensor, index: Tensor, dim: int) -> Tensor:
    return scores.gather(dim, _each_head(index, scores))


def _scatter(values: Tensor, index: Tensor, dim: int, rows: int) -> Tensor:
    shape = list(values.shape)
    shape[dim] = rows
    return values.new_zeros(shape).scatter_add(dim, _each_head(index, values), values)


def _static(table: Tensor, index: Tensor) -> Tensor:
    batch, queries, keys = index.shape
    flat = index.to(torch.int32).flatten()
    return table.index_select(1, flat).view(-1, batch, queries, keys).transpose(0, 1)


class _Gather(torch.autograd.Function):
    """:func:`_gather` of an index, or of its mirror image."""

    @staticmethod
    def forward(scores: Tensor, index: Tensor, dim: int, mirrored: int | None) -> Tensor:
        return _gather(scores, mirror_rows(index, mirrored), dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        scores, index, ctx.dim, ctx.mirrored = inputs
        ctx.rows = scores.shape[ctx.dim]
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return _scatter(gradient, mirror_rows(index, ctx.mirrored), ctx.dim, ctx.rows), None, None, None


class _Mass(torch.autograd.Function):
    """:func:`row_mass`, whose gradient is a gather."""

    @staticmethod
    def forward(weights: Tensor, index: Tensor, rows: int) -> Tensor:
        return _scatter(weights, index, -1, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        return _gather(gradient, index, -1), None, None


class _Static(torch.autograd.Function):
    """:func:`gather_static`."""

    @staticmethod
    def forward(table: Tensor, index: Tensor) -> Tensor:
        return _static(table, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        table, index = inputs
        ctx.shape = table.shape
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        flat = gradient.transpose(0, 1).reshape(ctx.shape[0], -1)
        return flat.new_zeros(ctx.shape).index_add(1, index.to(torch.int32).flatten(), flat), None
