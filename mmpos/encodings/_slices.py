"""Attention logits slice by slice of batch and heads, so that what belongs to one slice stays in the cache of a CPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["SLICE_ELEMENTS", "TRAINING_ELEMENTS", "Slices", "join_slices", "slices_of"]

#: elements of attention logits that are worked on at a time on a CPU, per thread: they should stay in the
#: second-level cache
SLICE_ELEMENTS = 2**18
#: the same where gradients are asked for: several tensors of this size live until the backward pass, which reads them
#: again slice by slice, from the last-level cache at best
TRAINING_ELEMENTS = 2**20

Slices = list[tuple[slice, slice]]


def slices_of(q: Tensor, *others: Tensor | None) -> Slices | None:
    """Slices of batch and heads to work on one after the other, or ``None`` where attention is better computed whole.

    Slices pay in eager mode on a CPU. Where any of the tensors learns they hold all heads, and can be joined along the
    batch.

    Shape: q ``(B, heads, L, d)``.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or q.device.type != "cpu":
        return None
    batch, heads, length, _ = q.shape
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, *others))
    elements = TRAINING_ELEMENTS if learns else SLICE_ELEMENTS
    fit = max(1, elements * torch.get_num_threads() // (length * length))
    step_heads = heads if learns or fit >= heads else fit
    step_batch = max(1, fit // heads)
    if learns and step_batch >= batch:
        return None
    return [
        (slice(b, b + step_batch), slice(h, h + step_heads))
        for b in range(0, batch, step_batch)
        for h in range(0, heads, step_heads)
    ]


def join_slices(found: Iterable[tuple[slice, slice, Tensor]], q: Tensor) -> Tensor:
    """Samples, heads and output of each slice as one tensor, which SDPA lays out with heads behind tokens.

    Shape: q ``(B, heads, L, d)``; returns ``(B, heads, L, d of the outputs)``.
    """
    batch, heads, length, _ = q.shape
    parts = iter(found)
    b, h, first = next(parts)
    if first.requires_grad and h.stop >= heads:
        return torch.cat([first, *(part for _, _, part in parts)])
    out = torch.empty(batch, length, heads, first.shape[-1], dtype=first.dtype, device=q.device).transpose(1, 2)
    out[b, h] = first
    for b, h, part in parts:
        out[b, h] = part
    return out
