"""The two losses of SeqPE, and where to take their coordinates: order by distance, and the same geometry everywhere.

Li et al., arXiv 2506.13277. Reference: ghrua/seqpe (MIT). Facts of the reference that are kept: the divergence is
divided by the number of all similarities, so its weight shrinks with the number of cells; the window of close
candidates is not centred on the pivot. Not kept: grids are cut by the number of rows only (wrong when not square), and
flags such as the logit scale that its command line ignores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.functional.digits import digit_count, from_digits, to_digits

__all__ = [
    "contrastive_candidates",
    "contrastive_loss",
    "edit_digits",
    "nearest_candidate",
    "random_shift",
    "transfer_loss",
]


def contrastive_loss(
    pivot: Tensor,
    candidates: Tensor,
    labels: Tensor,
    *,
    num_heads: int | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of the dot products of a pivot with its candidates; the nearest candidate is the label.

    Args:
        pivot: vectors of the pivots.
        candidates: vectors of the candidates.
        labels: index of the nearest candidate, see :func:`nearest_candidate`.
        num_heads: compare each head's part of the vectors on its own.
        logit_scale: factor on the dot products.
        label_smoothing: share of the label given to all candidates.

    Shape:
        pivot ``(B, D)``, candidates ``(B, n, D)``, labels ``(B,)``; returns a scalar.
    """
    logits = torch.matmul(_heads(candidates, num_heads), _heads(pivot[:, None], num_heads).mT)[..., 0]
    labels = labels[:, None].expand(logits.shape[:2]).flatten()
    return F.cross_entropy(logits.flatten(0, 1) * logit_scale, labels, label_smoothing=label_smoothing)


def transfer_loss(
    in_range: Tensor,
    shifted: Tensor,
    *,
    num_heads: int | None = None,
    beta: float = 1.0,
    metric: str = "kl_div",
    logit_scale: float = 1.0,
    reduction: str = "mean",
) -> Tensor:
    """How far the similarities among shifted cells are from those among the same cells in the training range.

    Args:
        in_range: vectors of the cells where training put them; the teacher.
        shifted: vectors of the same cells after a common shift.
        num_heads: compare each head's part of the vectors on its own.
        beta: weight of the student's part; ``1 - beta`` goes to the same loss with the roles exchanged. At 1 the
            teacher gets no gradient.
        metric: ``kl_div``, both directions, or ``mse`` of the log probabilities.
        logit_scale: factor on the similarities.
        reduction: ``mean`` over all similarities (the reference) or ``batchmean`` over rows, which does not shrink with
            the number of cells.

    Shape:
        both ``(B, n, D)``; returns a scalar.
    """
    if metric not in ("kl_div", "mse"):
        raise ValueError(f"metric: expected 'kl_div' or 'mse', got {metric!r}")
    if reduction not in ("mean", "batchmean"):
        raise ValueError(f"reduction: expected 'mean' or 'batchmean', got {reduction!r}")
    teacher, student = (_log_similarity(vectors, num_heads, logit_scale) for vectors in (in_range, shifted))

    def distance(student: Tensor, teacher: Tensor) -> Tensor:
        # KL(t || s) + KL(s || t), term by term
        weight = student - teacher if metric == "mse" else student.exp() - teacher.exp()
        each = weight * (student - teacher)
        return each.mean() if reduction == "mean" else each.sum(-1).mean()

    loss = beta * distance(student, teacher.detach())
    return loss if beta >= 1 else loss + (1 - beta) * distance(student.detach(), teacher)


def _log_similarity(vectors: Tensor, num_heads: int | None, logit_scale: float) -> Tensor:
    parts = _heads(vectors, num_heads)
    return F.log_softmax(torch.matmul(parts, parts.mT) * logit_scale, dim=-1)


def _heads(vectors: Tensor, num_heads: int | None) -> Tensor:
    """``(B, n, D)`` to ``(B, heads, n, D / heads)``."""
    heads = 1 if num_heads is None else num_heads
    if vectors.shape[-1] % heads:
        raise ValueError(f"num_heads: expected a divisor of the width {vectors.shape[-1]}, got {heads}")
    return vectors.unflatten(-1, (heads, -1)).transpose(1, 2)


# -- coordinates ------------------------------------------------------------------------------------------------------


def nearest_candidate(pivot: Tensor, candidates: Tensor) -> Tensor:
    """Index of the candidate with the smallest squared distance, the first of equals.

    Shape:
        ``(B, A)``, ``(B, n, A)`` -> ``(B,)``.
    """
    return ((candidates - pivot[:, None]) ** 2).sum(-1).argmin(-1)


def contrastive_candidates(
    pivot: Tensor,
    count: int,
    max_index: int,
    *,
    shares: tuple[float, float, float] = (0.5, 0.3, 0.2),
    hard: float = 0.2,
    window: int = 14,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Candidates for each pivot: uniform, uniform with edited digits of the pivot among them, or from a small random
    window.

    The kind is drawn for each pivot. The pivot itself is never a candidate; repetitions among candidates are possible.

    Args:
        pivot: whole coordinates.
        count: candidates ``n`` of each pivot.
        max_index: coordinates are below this number on each axis.
        shares: probabilities of the three kinds.
        hard: share of candidates made by editing digits, in the second kind.
        window: side of the window of the third kind, placed anywhere in range.
        generator: source of randomness.

    Shape:
        pivot ``(B, A)``; returns ``(B, n, A)``.
    """
    if abs(sum(shares) - 1) > 1e-6 or min(shares) < 0:
        raise ValueError(f"shares: expected three probabilities with sum 1, got {shares}")
    if max_index < 2:
        raise ValueError(f"max_index: expected at least 2 positions on an axis, got {max_index}")
    device, (batch, axes) = pivot.device, pivot.shape

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=device)

    uniform = draw(max_index, batch, count, axes)
    kind = torch.rand(batch, generator=generator, device=device)
    window = min(window, max_index)
    corner = draw(max_index - window + 1, batch, 1, axes)
    near = corner + draw(window, batch, count, axes)
    edited = edit_digits(pivot[:, None].expand(-1, count, -1), max_index, generator=generator)
    is_hard = torch.arange(count, device=device) < int(count * hard)
    mixed = torch.where(is_hard[None, :, None], edited, uniform)
    first, second = (kind < shares[0])[:, None, None], (kind < shares[0] + shares[1])[:, None, None]
    out = torch.where(first, uniform, torch.where(second, mixed, near))
    # a candidate on the pivot moves one step, inward at the border
    same = (out == pivot[:, None]).all(-1)
    axis = draw(axes, batch, count)
    step = torch.where(out >= max_index - 1, -1, 1) * F.one_hot(axis, axes)
    return torch.where(same[..., None], out + step, out)


def edit_digits(coords: Tensor, max_index: int, *, generator: torch.Generator | None = None) -> Tensor:
    """One to three random edits of the written digits: insert, delete, exchange two, or replace one. Results out of
    range are reduced.

    Shape:
        coords ``(..., A)`` whole; returns the same.
    """
    axes, places = coords.shape[-1], digit_count(max_index)
    digits, _ = to_digits(coords, places)
    flat = digits.reshape(-1, axes, places)
    count, device = flat.shape[0], coords.device
    rows, steps = torch.arange(count, device=device), torch.arange(places, device=device)

    def draw(high: int) -> Tensor:
        return torch.randint(high, (count,), generator=generator, device=device)

    rounds = draw(3) + 1
    for edit in range(3):
        axis, kind, here, there, digit = draw(axes), draw(4), draw(places), draw(places), draw(10)
        old = flat[rows, axis]
        left, right = old.roll(-1, -1), old.roll(1, -1)
        at, before = steps == here[:, None], steps < here[:, None]
        # insert: what stands before the place moves left and the leading digit falls out; delete: it moves right
        inserted = torch.where(before, left, torch.where(at, digit[:, None], old))
        deleted = torch.where(steps == 0, 0, torch.where(before | at, right, old))
        swapped = torch.where(
            at, old[rows, there][:, None], torch.where(steps == there[:, None], old[rows, here][:, None], old)
        )
        replaced = torch.where(at, digit[:, None], old)
        new = torch.stack([inserted, deleted, swapped, replaced])[kind, rows]
        active = (edit < rounds)[:, None]
        flat = flat.index_put((rows, axis), torch.where(active, new, old))
    return from_digits(flat.flatten(1), axes).reshape(coords.shape) % max_index


def random_shift(grid: Sequence[int], max_index: int, *, generator: torch.Generator | None = None) -> Tensor:
    """A whole shift of the grid that keeps all its cells below ``max_index``. Shape: ``(A,)``."""
    room = [max_index - size for size in grid]
    if min(room) < 0:
        raise ValueError(f"max_index: expected at least the largest side of the grid {tuple(grid)}, got {max_index}")
    return torch.stack([torch.randint(r + 1, (), generator=generator) for r in room])
