"""Buckets of image-relative positions (iRPE): from offsets to rows of a table, and reading tables by bucket.

``i`` is the query, ``j`` the key, an offset is query minus key. ``g`` maps an offset to a signed bucket: exact near
the query, logarithmic further out, constant beyond. A *row* is the bucket counted from the lowest one; one more row
after the last serves every pair with a prefix token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    "num_buckets",
    "piecewise_index",
    "reverse_index",
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


def reverse_index(index: Tensor, method: str, rows: int) -> Tensor:
    """Rows of the opposite pair without transposing: distances are symmetric, signed buckets are mirrored."""
    if method in ("euclidean", "quantization"):
        return index
    return torch.where(index == rows, index, rows - 1 - index)


def gather_key_side(scores: Tensor, index: Tensor) -> Tensor:
    """``out[i, j] = scores[i, index[i, j]]``, scores ``(B, heads, Lq, rows)``, index ``(B or 1, Lq, Lk)`` int64."""
    batch, heads = scores.shape[:2]
    return scores.gather(-1, index[:, None].expand(batch, heads, -1, -1))


def gather_query_side(scores: Tensor, index: Tensor) -> Tensor:
    """``out[i, j] = scores[index[i, j], j]``, scores ``(B, heads, rows, Lk)``, index ``(B or 1, Lq, Lk)`` int64."""
    batch, heads = scores.shape[:2]
    return scores.gather(-2, index[:, None].expand(batch, heads, -1, -1))


def gather_static(table: Tensor, index: Tensor) -> Tensor:
    """``out[i, j] = table[index[i, j]]``, heads first, which is three times as fast as heads last.

    Shape:
        table ``(heads or 1, rows)``, index ``(B or 1, Lq, Lk)`` of any integer type; returns ``(B or 1, heads, Lq,
        Lk)``.
    """
    batch, queries, keys = index.shape
    flat = index.to(torch.int32).flatten()
    return table.index_select(1, flat).view(-1, batch, queries, keys).transpose(0, 1)


def row_mass(weights: Tensor, index: Tensor, rows: int) -> Tensor:
    """Attention mass of each row: ``out[i, r] = sum of weights[i, j] over index[i, j] = r``.

    Shape:
        weights ``(B, heads, Lq, Lk)``, index ``(B or 1, Lq, Lk)`` int64; returns ``(B, heads, Lq, rows)``.
    """
    batch, heads, queries, _ = weights.shape
    mass = weights.new_zeros(batch, heads, queries, rows)
    return mass.scatter_add(-1, index[:, None].expand(batch, heads, -1, -1), weights)
