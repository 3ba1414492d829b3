"""Attention logits slice by slice of batch and heads, so that what belongs to one slice stays in the cache of a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["SLICE_ELEMENTS", "slices_of", "works_in_one_piece"]

#: elements of attention logits that are worked on at a time on a CPU, per thread: they should stay in the
#: second-level cache
SLICE_ELEMENTS = 2**18


def works_in_one_piece(*tensors: Tensor | None) -> bool:
    """Whether attention is better computed whole: slices pay only in eager mode on a CPU and without gradients."""
    given = [t for t in tensors if t is not None]
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or given[0].device.type != "cpu":
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in given)


def slices_of(q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and heads whose logits stay in the cache. Shape: q ``(B, heads, L, d)``."""
    batch, heads, length, _ = q.shape
    fit = max(1, SLICE_ELEMENTS * torch.get_num_threads() // (length * length))
    step_heads = heads if fit >= heads else fit
    step_batch = max(1, fit // heads)
    for b in range(0, batch, step_batch):
        for h in range(0, heads, step_heads):
            yield slice(b, b + step_batch), slice(h, h + step_heads)
