"""Biases that are a sum over axes, ``A_i[row of j] + B_i[column of j]``: rank ``h + w`` instead of ``h w``.

Nothing of size ``L x L`` is gathered: for each token and each coordinate along an axis (``rows``, see
:func:`per_token`) a table is read, and the results are added along the axes of the raster by broadcasting. The last
row of a table serves pairs with a prefix token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "axis_sum",
    "cross_key_side",
    "cross_mass",
    "cross_query_side",
    "cross_static",
    "per_coordinate",
    "per_token",
]


def per_token(codes: Tensor, axis: int, sizes: Sequence[int]) -> Tensor:
    """Rows of a code table for every token of a raster. Shape: codes ``(n, n')``; returns ``(prod(sizes), n')``."""
    return codes.index_select(0, per_coordinate(axis, sizes, codes.device))


def per_coordinate(axis: int, sizes: Sequence[int], device: torch.device) -> Tensor:
    """Coordinate of every token of a raster along an axis. Shape: ``(prod(sizes),)`` int64."""
    # expanded rather than divided: ONNX has no remainder by a size that is not known yet
    return _spread(torch.arange(sizes[axis], device=device), 0, axis, len(sizes)).expand(*sizes).flatten()


def _spread(x: Tensor, dim: int, axis: int, axes: int) -> Tensor:
    """Put a dimension in the place of its axis among ``axes`` dimensions, with ones for the others."""
    for other in range(axes):
        if other != axis:
            x = x.unsqueeze(dim if other < axis else dim + other)
    return x


def axis_sum(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sum of one term per axis, each along its own axis: ``(..., n_1)``, ``(..., n_2)`` -> ``(..., n_1, n_2)``."""
    shaped = []
    for axis, part in enumerate(parts):
        shaped.append(_spread(part, part.dim() - 1, axis, len(parts)))
    if len(shaped) == 1:
        return shaped[0] if out is None else out.copy_(shaped[0])
    total = torch.add(shaped[0], shaped[1]) if out is None else torch.add(shaped[0], shaped[1], out=out)
    for part in shaped[2:]:
        total = total.add_(part) if out is not None else total + part
    return total


def cross_key_side(scores: Sequence[Tensor], rows: Sequence[Tensor], num_prefix: int) -> Tensor:
    """``out[i, j] = sum over axes of scores_a[i, row_a(i, j)]``.

    Shape:
        scores one per axis ``(B, heads, P + N, rows)``; returns ``(B, heads, P + N, P + N)``.
    """
    sizes = [index.shape[-1] for index in rows]
    batch, heads, length, _ = scores[0].shape
    parts = []
    for score, index in zip(scores, rows, strict=True):
        parts.append(score[:, :, num_prefix:].gather(-1, index.expand(batch, heads, -1, -1)))
    if not num_prefix:
        return axis_sum(parts).flatten(-len(sizes))
    prefix = torch.stack([score[..., -1:] for score in scores]).sum(0)  # (B, heads, L, 1)
    if torch.is_grad_enabled() and prefix.requires_grad or torch.compiler.is_compiling():
        grid = axis_sum(parts).flatten(-len(sizes))
        placed = torch.cat([prefix[:, :, num_prefix:].expand(-1, -1, -1, num_prefix), grid], -1)
        return torch.cat([prefix[:, :, :num_prefix].expand(-1, -1, -1, length), placed], -2)
    out = scores[0].new_empty(batch, heads, length, length)
    axis_sum(parts, out=out[:, :, num_prefix:, num_prefix:].unflatten(-1, sizes))
    out[:, :, :num_prefix] = prefix[:, :, :num_prefix]
    out[:, :, num_prefix:, :num_prefix] = prefix[:, :, num_prefix:]
    return out


def cross_query_side(
    scores: Sequence[Tensor], rows: Sequence[Tensor], num_prefix: int, add_to: Tensor | None = None
) -> Tensor:
    """``out[i, j] = sum over axes of scores_a[row_a(j, i), j]``, added to ``add_to`` when given.

    ``add_to`` may be overwritten.

    Shape:
        scores one per axis ``(B, heads, rows, P + N)``; returns ``(B, heads, P + N, P + N)``.
    """
    sizes = [index.shape[-1] for index in rows]
    batch, heads, _, length = scores[0].shape
    prefix = torch.stack([score[..., -1:, :] for score in scores]).sum(0)  # (B, heads, 1, L)
    shaped = []
    for axis, (score, index) in enumerate(zip(scores, rows, strict=True)):
        index = F.pad(index.mT, (num_prefix, 0), value=score.shape[-2] - 1)  # prefix keys read the last row
        part = score.gather(-2, index.expand(batch, heads, -1, -1))
        shaped.append(_spread(part, 2, axis, len(sizes)))
    if add_to is not None and not (torch.is_grad_enabled() and (add_to.requires_grad or prefix.requires_grad)):
        grid = add_to[:, :, num_prefix:].unflatten(-2, sizes)
        for part in shaped:
            grid.add_(part)
        if num_prefix:
            add_to[:, :, :num_prefix] += prefix
        return add_to
    total = shaped[0]
    for part in shaped[1:]:
        total = total + part
    total = total.expand(batch, heads, *sizes, length).flatten(2, -2)
    if num_prefix:
        total = torch.cat([prefix.expand(-1, -1, num_prefix, -1), total], -2)
    return total if add_to is None else add_to + total


def cross_static(table: Sequence[Tensor], codes: Sequence[Tensor], num_prefix: int) -> Tensor:
    """Bias of tables that hold one number per row.

    Shape:
        table one per axis ``(heads or 1, rows)``; returns ``(1, heads or 1, P + N, P + N)``.
    """
    sizes = [code.shape[0] for code in codes]
    total: Tensor | None = None
    for axis, (rows, code) in enumerate(zip(table, codes, strict=True)):
        term = _spread(_spread(rows[:, code], 2, axis, len(sizes)), 1, axis, len(sizes))
        total = term if total is None else total + term
    assert total is not None
    total = total.expand(-1, *sizes, *sizes).flatten(1, len(sizes)).flatten(2)
    if num_prefix:
        count = total.shape[-1]
        prefix = torch.stack([rows[:, -1] for rows in table]).sum(0)[:, None, None]
        total = torch.cat([prefix.expand(-1, count, num_prefix), total], -1)
        total = torch.cat([prefix.expand(-1, num_prefix, num_prefix + count), total], -2)
    return total[None]


def cross_mass(weights: Tensor, table: Sequence[Tensor], rows: Sequence[Tensor], num_prefix: int) -> Tensor:
    """``out[i] = sum over j and axes of weights[i, j] table_a[row_a(i, j)]``.

    Shape:
        weights ``(B, heads, P + N, P + N)``, table one per axis ``(heads or 1, rows, d)``; returns ``(B, heads, P +
        N, d)``.
    """
    sizes = [index.shape[-1] for index in rows]
    batch, heads, length, _ = weights.shape
    grid = weights[:, :, num_prefix:, num_prefix:].unflatten(-1, sizes)
    total: Tensor | None = None
    for axis, (vectors, index) in enumerate(zip(table, rows, strict=True)):
        others = [3 + other for other in range(len(sizes)) if other != axis]
        marginal = grid.sum(others) if others else grid  # (B, heads, N, n)
        mass = weights.new_zeros(batch, heads, length - num_prefix, vectors.shape[-2])
        mass = mass.scatter_add(-1, index.expand(batch, heads, -1, -1), marginal)
        term = torch.matmul(mass, vectors[0] if vectors.shape[0] == 1 else vectors)
        total = term if total is None else total + term
    assert total is not None
    if not num_prefix:
        return total
    last = torch.stack([vectors[:, -1] for vectors in table]).sum(0)[:, None]  # (heads or 1, 1, d)
    total = total + weights[:, :, num_prefix:, :num_prefix].sum(-1, keepdim=True) * last
    return torch.cat([weights[:, :, :num_prefix].sum(-1, keepdim=True) * last, total], -2)
