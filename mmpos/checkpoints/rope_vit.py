"""RoPE-Mixed frequencies of rope-vit and timm.

Three shapes are in use for the same numbers: ``(2, depth, heads * d/2)`` (rope-vit models), ``(2, depth, heads, d/2)`` (timm) and
``(2, heads * d/2)`` or ``(2, heads, d/2)`` (one layer). Row 0 is x (column), row 1 is y (row).
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["rope_mixed_freqs"]


def rope_mixed_freqs(freqs: Tensor, *, depth: int, num_heads: int) -> list[Tensor]:
    """Split a reference parameter into one ``freqs`` per layer in our axis order (row, col).

    Shape:
        Any of the shapes above; returns ``depth`` tensors ``(2, heads, d/2)``.
    """
    if freqs.shape[0] != 2 or freqs.numel() % (2 * depth * num_heads):
        raise ValueError(
            f"freqs: expected (2, depth {depth}, heads {num_heads}, d/2) or a flattened form of it, got {tuple(freqs.shape)}; "
            "check depth and num_heads"
        )
    return [layer.flip(0) for layer in freqs.reshape(2, depth, num_heads, -1).unbind(1)]
