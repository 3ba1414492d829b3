"""Frequency allocation: which rotary pair, or which head, reads which axis of a position id.

Pair ``i`` has frequency ``base ** -exponent[i]`` and turns with the id of axis ``axis[i]``; -1 is not rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Allocation",
    "by_head",
    "chunked",
    "cyclic",
    "diagonal_last",
    "interleaved",
    "lumos",
    "separate",
    "single",
]


@dataclass(frozen=True, eq=False)
class Allocation:
    """Axis and ladder exponent of every rotary pair.

    Shape:
        axis ``(pairs,)`` or ``(kv heads, pairs)``, exponent ``(pairs,)``.
    """

    axis: Tensor
    exponent: Tensor

    @property
    def pairs(self) -> int:
        """Number of rotary pairs."""
        return self.axis.shape[-1]

    def inverse_frequencies(self, base: float, device: torch.device | None = None) -> Tensor:
        """``base ** -exponent``, float32. Shape: ``(pairs,)``."""
        return 1.0 / torch.pow(torch.tensor(base, dtype=torch.float32, device=device), self.exponent.to(device))


def _ladder(pairs: int) -> Tensor:
    return torch.arange(pairs, dtype=torch.float32) / pairs


def _sections(sections: Sequence[int], pairs: int, *, exact: bool) -> tuple[int, ...]:
    sections = tuple(int(size) for size in sections)
    total = sum(sections)
    if any(size < 0 for size in sections) or (exact and total != pairs) or total > pairs:
        wanted = f"exactly {pairs}" if exact else f"at most {pairs}"
        raise ValueError(
            f"sections: expected non-negative sizes that sum to {wanted} rotary pairs (half the rotated width), got "
            f"{sections} = {total}"
        )
    return sections


def single(pairs: int) -> Allocation:
    """1-D RoPE: every pair reads axis 0."""
    return Allocation(torch.zeros(pairs, dtype=torch.long), _ladder(pairs))


def chunked(pairs: int, sections: Sequence[int]) -> Allocation:
    """M-RoPE (Qwen2-VL, arXiv 2409.12191): consecutive chunks of pairs per axis, the first on the fastest pairs."""
    sections = _sections(sections, pairs, exact=True)
    axis = torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))
    return Allocation(axis, _ladder(pairs))


def interleaved(pairs: int, sections: Sequence[int]) -> Allocation:
    """MRoPE-I (Qwen3-VL; arXiv 2510.23095): axes h and w take every third pair while their section lasts, axis t the
    rest.
    """
    sections = _sections(sections, pairs, exact=False)
    if len(sections) != 3:
        raise ValueError(f"sections: interleaved allocation has three axes (t, h, w), got {sections}")
    i = torch.arange(pairs)
    axis = torch.zeros(pairs, dtype=torch.long)
    for which in (1, 2):
        axis[(i % 3 == which) & (i < 3 * sections[which])] = which
    return Allocation(axis, _ladder(pairs))


def cyclic(pairs: int, axes: int = 3) -> Allocation:
    """Pair ``i`` reads axis ``i mod axes`` over the whole ladder (I-MRoPE, arXiv 2510.03230; IL-RoPE, arXiv 2505.05472;
    VRoPE with its four coordinates).
    """
    return Allocation(torch.arange(pairs) % axes, _ladder(pairs))


def diagonal_last(pairs: int, sections: Sequence[int], *, rotate_time: bool = True) -> Allocation:
    """VideoRoPE (arXiv 2502.05173): h and w alternate on the fast pairs, t owns the slowest ``sections[0]`` pairs.

    HoPE (arXiv 2505.20444) leaves the time pairs unrotated (``rotate_time=False``). ERNIE-4.5-VL has the same order.
    h and w have equal sections.
    """
    time, rows, cols = _sections(sections, pairs, exact=True)
    if rows != cols:
        raise ValueError(f"sections: h and w alternate and need equal sections, got {tuple(sections)}")
    axis = torch.full((pairs,), 0 if rotate_time else -1)
    axis[: 2 * rows] = 1 + torch.arange(2 * rows) % 2
    return Allocation(axis, _ladder(pairs))


def lumos(pairs: int, *, layout: str = "pairs") -> Allocation:
    """MM-RoPE (Lumos-1, arXiv 2507.08801): two t, three h and three w pairs in turn.

    ``pairs`` repeats t t h w h w h w; ``channels`` is what the 16-channel groups of the Lumos-1 code amount to on
    half-split heads, t t t t h h w w h h w w h h w w.
    """
    if layout == "pairs":
        pattern = [0, 0, 1, 2, 1, 2, 1, 2]
    elif layout == "channels":
        pattern = [0] * 4 + [1, 1, 2, 2] * 3
    else:
        raise ValueError(f"layout: expected 'pairs' or 'channels', got {layout!r}")
    return Allocation(torch.tensor(pattern)[torch.arange(pairs) % len(pattern)], _ladder(pairs))


def separate(axes_dim: Sequence[int]) -> Allocation:
    """Each axis owns a slice of ``axes_dim`` channels with a full ladder of its own (OmniGen2, Flux)."""
    if any(dim % 2 or dim < 0 for dim in axes_dim):
        raise ValueError(f"axes_dim: expected even numbers of channels per axis, got {tuple(axes_dim)}")
    axis = torch.repeat_interleave(torch.arange(len(axes_dim)), torch.tensor([dim // 2 for dim in axes_dim]))
    return Allocation(axis, torch.cat([_ladder(dim // 2) for dim in axes_dim]))


def by_head(pairs: int, kv_heads: int, head_sections: Sequence[int]) -> Allocation:
    """MHRoPE (arXiv 2510.23095): key/value heads go to t, h and w in order, each with the whole ladder; left-over heads
    are not rotated.

    Only a ``(kv heads, pairs)`` index is stored; query head ``j`` follows key/value head ``j // (heads / kv_heads)``.
    """
    if sum(head_sections) > kv_heads:
        raise ValueError(
            f"head_sections: {tuple(head_sections)} asks for {sum(head_sections)} of {kv_heads} key/value heads"
        )
    axis = torch.full((kv_heads,), -1)
    start = 0
    for which, count in enumerate(head_sections):
        axis[start : start + count] = which
        start += count
    return Allocation(axis[:, None].expand(kv_heads, pairs), _ladder(pairs))
