"""What the objectives share: the encoder they expect, random subsets, a small decoder."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.encodings.registry import EncodingStack
from mmpos.positions import Positions

__all__ = ["PlainDecoder", "Trunk", "gather_tokens", "random_subset"]


class Trunk(Protocol):
    """An encoder as the objectives use it: the attention blocks around a stack, without its token hook.

    ``__call__`` takes tokens ``(B, P + N, D)``, their positions and a mask of keys ``(B, 1, 1, P + N)`` (``True`` may
    be attended) or ``None``, and returns ``(B, P + N, D)`` after the final norm.
    """

    stack: EncodingStack

    def __call__(self, tokens: Tensor, positions: Positions, mask: Tensor | None = None) -> Tensor: ...


def random_subset(
    batch: int,
    count: int,
    size: int,
    *,
    mask: Tensor | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``size`` different indices below ``count`` for each sample, in random order; of real tokens only when a mask says
    which are.

    Shape:
        mask ``(batch, count)``; returns ``(batch, size)`` int64.
    """
    if not 0 <= size <= count:
        raise ValueError(f"size: expected 0 to {count}, got {size}")
    noise = torch.rand(batch, count, device=device, generator=generator)
    if mask is not None:
        fewest = int(mask.sum(1).min())
        if fewest < size:
            raise ValueError(
                f"mask: expected at least {size} real tokens in every sample, got {fewest}; keep fewer tokens"
            )
        noise = noise.masked_fill(~mask, 2.0)
    return noise.argsort(1)[:, :size]


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Tokens at indices. Shape: ``(B, N, D)``, ``(B, K)`` -> ``(B, K, D)``."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


class PlainDecoder(nn.Module):
    """A few pre-norm blocks without any position, between two dense layers.

    Args:
        dim: width of the input.
        width: width inside.
        outputs: width of the output.
        depth: blocks.
        heads: attention heads.
        embed: whether the first dense layer is there; without it the input is ``width`` wide.
    """

    def __init__(
        self, dim: int, width: int, outputs: int, *, depth: int = 2, heads: int = 16, embed: bool = True
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width: expected a multiple of heads {heads}, got {width}")
        self.embed: nn.Module = nn.Linear(dim, width) if embed else nn.Identity()
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Shape: ``(B, L, dim)`` to ``(B, L, outputs)``; mask ``(B, L)`` of real tokens."""
        x = self.embed(x)
        keys = None if mask is None else mask[:, None, None]
        for block in self.blocks:
            x = block(x, keys)
        return self.head(self.norm(x))


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keys).transpose(1, 2).flatten(2)
        x = x + self.proj(out)
        return x + self.down(F.gelu(self.up(self.norm2(x))))
