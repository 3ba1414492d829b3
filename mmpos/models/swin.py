"""Blocks of Swin and SwinV2: attention in shifted windows with a position encoding per window.

Liu et al., arXiv 2103.14030 and 2111.09883; reference microsoft/Swin-Transformer (MIT). The window is the grid of the
encoding, so any bias of this package may take the place of the original one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.attention import attend
from mmpos.encodings.registry import EncodingStack, create_encoding
from mmpos.functional.windows import fit_window, join_windows, shift_mask, split_windows
from mmpos.positions import Positions

__all__ = ["Mlp", "SwinBlock", "WindowAttention"]


class Mlp(nn.Module):
    """Two linear maps with GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class WindowAttention(nn.Module):
    """Attention inside windows.

    Args:
        dim: width ``D``.
        num_heads: heads ``h``.
        encoding: stack of depth 1 whose grid is the window.
        qkv_bias: ``all``, ``qv`` (SwinV2: a bias on keys would change cosine attention), or ``none``.
    """

    def __init__(self, dim: int, num_heads: int, encoding: EncodingStack, *, qkv_bias: str = "all") -> None:
        super().__init__()
        if qkv_bias not in ("all", "qv", "none"):
            raise ValueError(f"qkv_bias: expected 'all', 'qv' or 'none', got {qkv_bias!r}")
        self.num_heads = num_heads
        self.encoding = encoding
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias == "all")
        self.q_bias = nn.Parameter(torch.zeros(dim)) if qkv_bias == "qv" else None
        self.v_bias = nn.Parameter(torch.zeros(dim)) if qkv_bias == "qv" else None
        self.proj = nn.Linear(dim, dim)

    def forward(self, windows: Tensor, window: Sequence[int], mask: Tensor | None) -> Tensor:
        """Shape: windows ``(B windows, n, D)``, mask ``(windows, n, n)`` added to logits.

        Returns the shape of windows.
        """
        bias: Tensor | None = self.qkv.bias
        if self.q_bias is not None and self.v_bias is not None:
            bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(windows, self.qkv.weight, bias).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        state = self.encoding.prepare(Positions.grid(*window, device=windows.device))[0]
        if mask is not None:
            mask = mask.repeat(windows.shape[0] // mask.shape[0], 1, 1)[:, None]
        out = attend(q, k, v, state, x=windows, mask=mask)
        return self.proj(out.transpose(1, 2).flatten(2))


class SwinBlock(nn.Module):
    """One block of Swin (``version=1``, norm first) or SwinV2 (``version=2``, norm after, cosine attention).

    Args:
        dim: width ``D``.
        num_heads: heads ``h``.
        window: side lengths of a window.
        shift: cyclic shift of the windows, 0 for none.
        version: 1 or 2.
        mlp_ratio: hidden width over ``D``.
        encoding: stack of depth 1 with the window as training grid; default ``swin_rpb``, or ``swin_cpb`` with cosine
            attention.
        window_rule: what happens when the grid is smaller than the window, see
            :func:`~mmpos.functional.windows.fit_window`.

    Example:
        >>> SwinBlock(8, 2, (2, 4), (1, 2))(torch.randn(1, 6 * 8, 8), (6, 8)).shape
        torch.Size([1, 48, 8])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: Sequence[int],
        shift: Sequence[int] = (0, 0),
        *,
        version: int = 1,
        mlp_ratio: float = 4.0,
        encoding: EncodingStack | None = None,
        window_rule: str = "together",
    ) -> None:
        super().__init__()
        if version not in (1, 2):
            raise ValueError(f"version: expected 1 or 2, got {version}")
        if any(not 0 <= step < size for step, size in zip(shift, window, strict=True)):
            raise ValueError(f"shift: expected at least 0 and less than the window {tuple(window)}, got {tuple(shift)}")
        if encoding is None:
            name, options = ("swin_rpb", {}) if version == 1 else ("swin_cpb", {"cosine": True})
            encoding = create_encoding(name, dim, num_heads, train_grid=tuple(window), **options)
        self.window = tuple(window)
        self.shift = tuple(shift)
        self.version = version
        self.window_rule = window_rule
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, num_heads, encoding, qkv_bias="all" if version == 1 else "qv")
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def attention(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """Shift, cut, attend, join, shift back. Shape: ``(B, N, D)`` in and out."""
        window, shift = fit_window(grid, self.window, self.shift, self.window_rule)
        maps = x.unflatten(1, tuple(grid))
        mask = None
        if any(shift):
            maps = maps.roll([-step for step in shift], (1, 2))
            mask = shift_mask(grid, window, shift, device=x.device, dtype=x.dtype)
        out = join_windows(self.attn(split_windows(maps, window), window, mask), window, grid)
        if any(shift):
            out = out.roll(shift, (1, 2))
        return out.flatten(1, 2)

    def forward(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """Shape: x ``(B, N, D)`` of a grid (height, width); returns the same."""
        if x.shape[1] != grid[0] * grid[1]:
            raise ValueError(f"x: expected {grid[0] * grid[1]} tokens for the grid {tuple(grid)}, got {tuple(x.shape)}")
        if self.version == 1:
            x = x + self.attention(self.norm1(x), grid)
            return x + self.mlp(self.norm2(x))
        x = x + self.norm1(self.attention(x, grid))
        return x + self.norm2(self.mlp(x))
