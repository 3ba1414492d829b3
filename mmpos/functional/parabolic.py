"""Parabolic attention biases as a few extra columns of queries and keys.

Source: PaPE, arXiv 2602.01418. Along learned axes ``p = W x`` a query adds
``-sum_m a_m (p_m(i) - p_m(j))^2 + sum_m b_m (p_m(i) - p_m(j))`` to its logits. Because ``p`` is linear in ``x`` this is
one quadratic form per query,

    s_ij = -(x_i - x_j)^T Q_i (x_i - x_j) + beta_i . (x_i - x_j),    Q_i = W^T diag(a_i) W,    beta_i = W^T b_i,

and what does not depend on the key cancels in the softmax. ``A (A + 3) / 2`` columns remain (5 for an image), however
many axes ``M`` there are. A form is stored packed: the coefficient of ``x_u x_v`` for every ``u <= v``, in the order of
:func:`monomials`.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "centre_coordinates",
    "key_columns",
    "monomials",
    "parabola_bias",
    "power_of_two_near",
    "quadratic_forms",
    "query_columns",
    "query_constant",
    "reference_columns",
    "reference_columns_invariant",
    "split_columns",
    "widen",
]


def monomials(x: Tensor) -> Tensor:
    """Products ``x_u x_v`` of coordinates for every ``u <= v``. Shape: ``(..., A) -> (..., A (A + 1) / 2)``.

    Example:
        >>> monomials(torch.tensor([2.0, 3.0])).tolist()
        [4.0, 6.0, 9.0]
    """
    axes = x.shape[-1]
    return torch.cat([x[..., u : u + 1] * x[..., u:] for u in range(axes)], dim=-1)


def quadratic_forms(curvature: Tensor, axes_map: Tensor) -> Tensor:
    """Packed ``W^T diag(a) W``: the coefficient of each monomial, off-diagonal terms already doubled.

    Shape:
        curvature ``(B, heads, N, M)``, axes_map ``(heads, M, A)``; returns ``(B, heads, N, A (A + 1) / 2)``.
    """
    axes = axes_map.shape[-1]
    doubled = [1.0 if u == v else 2.0 for u in range(axes) for v in range(u, axes)]
    weights = monomials(axes_map) * torch.tensor(doubled, device=axes_map.device, dtype=axes_map.dtype)
    return torch.matmul(curvature, weights)


def query_columns(forms: Tensor, slope: Tensor | None, x: Tensor, balance: Tensor | float = 1.0) -> Tensor:
    """Columns of the queries: ``-Q`` packed, times ``balance``, and ``2 Q x - beta``.

    Shape:
        ``(..., A (A + 3) / 2)``.
    """
    linear = _gradient(forms, x)
    return torch.cat([-forms * balance, linear if slope is None else linear - slope], dim=-1)


def key_columns(x: Tensor, balance: Tensor | float = 1.0) -> Tensor:
    """Columns of the keys: the monomials of ``x`` over ``balance``, and ``x``.

    Shape:
        ``(..., A) -> (..., A (A + 3) / 2)``.
    """
    return torch.cat([monomials(x) / balance, x], dim=-1)


def _gradient(forms: Tensor, x: Tensor) -> Tensor:
    """``2 Q x`` from packed forms. Shape: ``(..., T)``, ``(..., A)`` -> ``(..., A)``."""
    axes = x.shape[-1]
    place = {pair: i for i, pair in enumerate((u, v) for u in range(axes) for v in range(u, axes))}
    rows = []
    for u in range(axes):
        row = 2 * forms[..., place[u, u]] * x[..., u]
        for v in range(axes):
            if v != u:
                row = row + forms[..., place[min(u, v), max(u, v)]] * x[..., v]
        rows.append(row)
    return torch.stack(rows, dim=-1)


def query_constant(forms: Tensor, slope: Tensor | None, x: Tensor) -> Tensor:
    """What the columns leave out because it cancels in the softmax: ``-x^T Q x + beta . x``. Shape: ``(..., N)``."""
    constant = -(forms * monomials(x)).sum(-1)
    return constant if slope is None else constant + (slope * x).sum(-1)


def parabola_bias(x: Tensor, curvature: Tensor, slope: Tensor | None, axes_map: Tensor) -> Tensor:
    """The definition, as a dense bias; the oracle of the column forms.

    Args:
        x: coordinates.
        curvature: positive ``a``, one per axis ``m``.
        slope: ``b``, one per axis ``m``; ``None`` for none.
        axes_map: ``W``.

    Shape:
        x ``(B or 1, N, A)``, curvature and slope ``(B, heads, N, M)``, axes_map ``(heads, M, A)``; returns
        ``(B, heads, N, N)``.
    """
    p = torch.einsum("hma,bna->bhnm", axes_map, x)
    difference = p[:, :, :, None] - p[:, :, None]  # (B or 1, heads, query, key, M)
    bias = -(curvature[:, :, :, None] * difference**2).sum(-1)
    return bias if slope is None else bias + (slope[:, :, :, None] * difference).sum(-1)


def reference_columns(x: Tensor, curvature: Tensor, slope: Tensor, axes_map: Tensor) -> tuple[Tensor, Tensor]:
    """The ``3 M + 2`` columns of the released code, constants included: queries and keys.

    Shape:
        As :func:`parabola_bias`; returns ``(B, heads, N, 3 M + 2)`` and ``(B or 1, heads, N, 3 M + 2)``.
    """
    p = torch.einsum("hma,bna->bhnm", axes_map, x)
    constant, offset = -(curvature * p**2).sum(-1, keepdim=True), (slope * p).sum(-1, keepdim=True)
    one = torch.ones_like(p[..., :1])
    queries = torch.cat([constant, curvature, 2 * curvature * p, offset, slope], dim=-1)
    return queries, torch.cat([one, -(p**2), p, one, -p], dim=-1)


def reference_columns_invariant(x: Tensor, curvature: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The ``2 A + 1`` columns of the released rotation-invariant code: queries and keys.

    Shape:
        x ``(B or 1, N, A)``, curvature ``(B, heads, N)``, scales ``(heads,)``; returns ``(.., heads, N, 2 A + 1)``
        twice.
    """
    p = x[:, None] * scales[:, None, None]
    a = curvature[..., None].expand(*curvature.shape, x.shape[-1])
    queries = torch.cat([-(a * p**2).sum(-1, keepdim=True), a, 2 * a * p], dim=-1)
    return queries, torch.cat([torch.ones_like(p[..., :1]), -(p**2), p], dim=-1)


def centre_coordinates(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Coordinates minus the mean of the real tokens of each sample, and that mean.

    Exact for translation-invariant biases, and needed in half precision: the columns are squares of these numbers.
    Padding counts neither in the mean nor in the range; it is held within four times the range of the real tokens, so
    that it can neither overflow nor be NaN.

    Shape:
        x ``(B or 1, N, A)``, mask ``(B, N)``; returns ``(B or 1, N, A)`` and ``(B or 1, 1, A)``.
    """
    if mask is None:
        mean = x.mean(1, keepdim=True)
        return x - mean, mean
    real = mask[..., None]
    mean = torch.where(real, x, 0.0).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp_min(1)
    centred = x - mean
    limit = 4 * torch.where(real, centred, 0.0).abs().amax((1, 2), keepdim=True)
    return torch.where(real, centred, centred.nan_to_num().clamp(-limit, limit)), mean


def power_of_two_near(x: Tensor) -> Tensor:
    """Power of two near the largest coordinate of a sample, at least 1: moving it between query and key columns is
    exact.

    Shape:
        x ``(B or 1, N, A)``; returns ``(B or 1, 1, 1)``.
    """
    return torch.exp2(x.abs().amax((1, 2), keepdim=True).clamp_min(1.0).log2().round())


def split_columns(queries: Tensor, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Columns for a narrow ``dtype``, three for one: high and low parts of both sides, without the product of the two
    low parts.

    Shape:
        ``(..., C)`` and ``(..., C)`` -> ``(..., 3 C)`` twice, in ``dtype``.
    """
    high_q, high_k = queries.to(dtype), keys.to(dtype)
    low_q = (queries - high_q.to(queries.dtype)).to(dtype)
    low_k = (keys - high_k.to(keys.dtype)).to(dtype)
    return torch.cat([high_q, low_q, high_q], dim=-1), torch.cat([high_k, high_k, low_k], dim=-1)


def widen(q: Tensor, columns: Tensor, multiple: int = 8) -> Tensor:
    """Append columns to queries or keys and fill with zeros up to a multiple that kernels like.

    Shape:
        q ``(B, heads, N, d)``, columns ``(B or 1, heads or 1, N, C)``; returns ``(B, heads, N, d')`` with
        ``d' >= d + C``.
    """
    rest = -(q.shape[-1] + columns.shape[-1]) % multiple
    parts = [q, columns.to(q.dtype).expand(*q.shape[:-1], -1)]
    if rest:
        parts.append(q.new_zeros(()).expand(*q.shape[:-1], rest))
    return torch.cat(parts, dim=-1)
