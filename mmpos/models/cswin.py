"""CSWin: attention in cross-shaped windows with LePE.

Dong, Bao, Chen, Zhang, Yu, Yuan, Chen, Guo, *CSWin Transformer*, CVPR 2022, arXiv 2107.00652; reference
microsoft/CSWin-Transformer (MIT). Half of the heads attend in vertical stripes and half in horizontal ones. The
reference for classification needs a square grid that the stripes divide; its dense-prediction variant pads and lets
the padding take part in the softmax. Here any grid works, and padding is masked unless ``padded_keys="attend"`` asks
for the behaviour of the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.attention import attend
from mmpos.encodings.registry import create_encoding
from mmpos.functional.windows import join_windows, split_windows
from mmpos.models.swin import Mlp
from mmpos.positions import Positions

__all__ = ["CSWin", "CSWinBlock", "CrossShapedAttention", "StripeAttention"]

PADDED_KEYS = ("mask", "attend")
ENCODINGS = ("lepe", "none")


class StripeAttention(nn.Module):
    """Attention with LePE inside stripes of one direction, without its projections.

    Args:
        dim: channels of this branch.
        num_heads: heads of this branch.
        stripe: ``(None, w)``: full height and ``w`` columns; ``(h, None)``: ``h`` rows and full width; ``(None,
            None)``: everything.
        padded_keys: whether cells added to fill the last stripe are masked or ``attend`` with logit 0 and value 0.
        encoding: ``lepe``, or ``none`` to see what it brings; or a pair of the name and its options.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        stripe: tuple[int | None, int | None],
        *,
        padded_keys: str = "mask",
        encoding: str | tuple[str, Mapping[str, Any]] = "lepe",
    ) -> None:
        super().__init__()
        name, options = (encoding, {}) if isinstance(encoding, str) else encoding
        if name not in ENCODINGS:
            raise ValueError(f"encoding: the stripes of CSWin take one of {', '.join(ENCODINGS)}, got {name!r}")
        if padded_keys not in PADDED_KEYS:
            raise ValueError(f"padded_keys: expected one of {PADDED_KEYS}, got {padded_keys!r}")
        self.num_heads = num_heads
        self.stripe = stripe
        self.padded_keys = padded_keys
        self.encoding = create_encoding(name, dim, num_heads, **options)

    def forward(self, qkv: Tensor, grid: Sequence[int]) -> Tensor:
        """Shape: qkv ``(3, B, N, C)``; returns ``(B, N, C)``."""
        height, width = grid
        window = (self.stripe[0] or height, self.stripe[1] or width)
        extra = (-height % window[0], -width % window[1])
        maps = qkv.flatten(0, 1).unflatten(1, (height, width))
        top, left = extra[0] // 2, extra[1] // 2
        mask = None
        if any(extra):
            edges = (left, extra[1] - left, top, extra[0] - top)
            maps = F.pad(maps, (0, 0, *edges))
            if self.padded_keys == "mask":
                real = F.pad(torch.ones(1, height, width, 1, dtype=torch.bool, device=qkv.device), (0, 0, *edges))
                mask = split_windows(real, window)[:, None, None, :, 0]
        full = (height + extra[0], width + extra[1])
        q, k, v = (split_windows(t, window) for t in maps.unflatten(0, (3, -1)))
        if mask is not None:
            mask = mask.repeat(q.shape[0] // mask.shape[0], 1, 1, 1)
        state = self.encoding.prepare(Positions.grid(*window, device=qkv.device))[0]
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        out = attend(q, k, v, state, mask=mask).transpose(1, 2).flatten(2)
        out = join_windows(out, window, full)
        return out[:, top : top + height, left : left + width].flatten(1, 2)


class CrossShapedAttention(nn.Module):
    """The stripes of both directions side by side, or one global branch.

    Args:
        dim: width ``D``.
        num_heads: heads, even unless global.
        split: stripe width; ``None`` for global attention (last stage).
        stripes: ``padded_keys`` and ``encoding``, see :class:`StripeAttention`.
    """

    def __init__(self, dim: int, num_heads: int, split: int | None, **stripes: Any) -> None:
        super().__init__()
        if split is not None and num_heads % 2:
            raise ValueError(f"num_heads: vertical and horizontal stripes need half of the heads each, got {num_heads}")
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        shapes: list[tuple[int | None, int | None]] = (
            [(None, None)] if split is None else [(None, split), (split, None)]
        )
        count = len(shapes)
        self.branches = nn.ModuleList(
            StripeAttention(dim // count, num_heads // count, shape, **stripes) for shape in shapes
        )

    def forward(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """Shape: ``(B, N, D)`` in and out."""
        parts = self.qkv(x).unflatten(-1, (3, -1)).movedim(2, 0).chunk(len(self.branches), -1)
        return self.proj(torch.cat([branch(part, grid) for branch, part in zip(self.branches, parts, strict=True)], -1))


class CSWinBlock(nn.Module):
    """Pre-norm block of CSWin.

    Args:
        dim: width ``D``.
        num_heads: heads ``h``.
        split: stripe width, ``None`` for global attention.
        mlp_ratio: hidden width over ``D``.
        stripes: ``padded_keys`` and ``encoding``, see :class:`StripeAttention`.
    """

    def __init__(self, dim: int, num_heads: int, split: int | None, *, mlp_ratio: float = 4.0, **stripes: Any) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = CrossShapedAttention(dim, num_heads, split, **stripes)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """Shape: ``(B, N, D)`` in and out."""
        x = x + self.attn(self.norm1(x), grid)
        return x + self.mlp(self.norm2(x))


class CSWin(nn.Module):
    """Classifier with four stages; each halves the grid and doubles the width.

    The defaults are a model that trains on small images in minutes. The paper's Tiny is ``dim=64, depths=(1, 2, 21, 1),
    heads=(2, 4, 8, 16), splits=(1, 2, 7, None), patch=4``.

    Args:
        num_classes: outputs.
        in_chans: channels of the images.
        dim: width of the first stage.
        depths: blocks per stage.
        heads: heads per stage.
        splits: stripe width per stage, ``None`` for global attention.
        patch: step of the first convolution; its size is ``2 patch - 1``.
        mlp_ratio: hidden width over width.
        stripes: ``padded_keys`` and ``encoding``, see :class:`StripeAttention`.

    Example:
        >>> CSWin(10, in_chans=1)(torch.randn(2, 1, 28, 36)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        in_chans: int = 3,
        dim: int = 48,
        depths: Sequence[int] = (1, 2, 2),
        heads: Sequence[int] = (2, 4, 8),
        splits: Sequence[int | None] = (1, 2, None),
        patch: int = 2,
        mlp_ratio: float = 4.0,
        **stripes: Any,
    ) -> None:
        super().__init__()
        if not len(depths) == len(heads) == len(splits):
            raise ValueError(
                f"depths, heads, splits: expected equally many stages, got {tuple(depths)}, {tuple(heads)}, "
                f"{tuple(splits)}"
            )
        self.patch_size = (patch, patch)  # images of any size are read; evaluations ask for it
        self.stem = nn.Conv2d(in_chans, dim, 2 * patch - 1, patch, patch - 1)
        self.stem_norm = nn.LayerNorm(dim)
        self.depths = tuple(depths)
        self.blocks = nn.ModuleList(
            CSWinBlock(dim * 2**stage, heads[stage], splits[stage], mlp_ratio=mlp_ratio, **stripes)
            for stage, depth in enumerate(depths)
            for _ in range(depth)
        )
        widths = [dim * 2**stage for stage in range(len(depths))]
        self.merges = nn.ModuleList(nn.Conv2d(width, 2 * width, 3, 2, 1) for width in widths[:-1])
        self.merge_norms = nn.ModuleList(nn.LayerNorm(2 * width) for width in widths[:-1])
        self.norm = nn.LayerNorm(dim * 2 ** (len(depths) - 1))
        self.head = nn.Linear(dim * 2 ** (len(depths) - 1), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Shape: ``(B, channels, height, width)`` -> ``(B, num_classes)``."""
        maps = self.stem(images)
        grid = tuple(maps.shape[-2:])
        x = self.stem_norm(maps.flatten(2).transpose(1, 2))
        blocks = iter(self.blocks)
        for stage, depth in enumerate(self.depths):
            for _ in range(depth):
                x = next(blocks)(x, grid)
            if stage < len(self.merges):
                maps = self.merges[stage](x.transpose(1, 2).unflatten(-1, grid))
                grid = tuple(maps.shape[-2:])
                x = self.merge_norms[stage](maps.flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))
