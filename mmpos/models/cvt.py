"""Convolutional projection of CvT: queries, keys and values are convolved on the grid before their linear maps.

Wu, Xiao, Codella, Liu, Dai, Yuan, Zhang, *CvT: Introducing Convolutions to Vision Transformers*, ICCV 2021, arXiv
2103.15808. Reference: microsoft/CvT (MIT). It changes what the linear maps read, and with a stride the number of
keys, so it is an attention layer and not a hook. The reference scales logits by the root of the full width, not of a
head; that is the default here because checkpoints need it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.attention import fused_attention
from mmpos.encodings._raster import Raster
from mmpos.functional.grid_conv import depthwise
from mmpos.positions import Positions

__all__ = ["ConvProjection", "CvtAttention", "MeanProjection"]

METHODS = ("dw_bn", "avg")


class ConvProjection(nn.Module):
    """Depthwise convolution without bias, then batch normalisation; one convolution in evaluation.

    Args:
        dim: channels.
        kernel: odd size.
        stride: step of the output grid.
    """

    def __init__(self, dim: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(dim, dim, kernel, stride, kernel // 2, groups=dim, bias=False)
        self.bn = nn.BatchNorm2d(dim)

    def forward(self, maps: Tensor) -> Tensor:
        """Shape: ``(B, C, H, W)`` -> ``(B, C, ceil(H / s), ceil(W / s))``."""
        if self.training:
            return self.bn(depthwise(maps, self.conv.weight, stride=self.stride))
        assert self.bn.running_var is not None
        assert self.bn.running_mean is not None
        factor = self.bn.weight * torch.rsqrt(self.bn.running_var + self.bn.eps)
        bias = self.bn.bias - self.bn.running_mean * factor
        return depthwise(maps, self.conv.weight * factor[:, None, None, None], bias, stride=self.stride)

    def present(self, cells: Tensor) -> Tensor:
        """Which filters have a token at their centre. Shape: ``(B, H, W)`` -> ``(B, ceil(H / s), ceil(W / s))``."""
        return cells[:, :: self.stride, :: self.stride]


class MeanProjection(nn.Module):
    """The mean of a window around every step-th token, without parameters.

    As in the reference, zeros beyond the border count, and a last window that begins inside the border is kept: an even
    side gives one window more than a convolution does when the step is 2.

    Args:
        kernel: odd size of the window.
        stride: step of the output grid.
    """

    def __init__(self, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.window = (kernel, stride, kernel // 2)

    def forward(self, maps: Tensor) -> Tensor:
        """Shape: ``(B, C, H, W)`` -> ``(B, C, H', W')``."""
        return F.avg_pool2d(maps, *self.window, ceil_mode=True)

    def present(self, cells: Tensor) -> Tensor:
        """Which windows hold a token at all. Shape: ``(B, H, W)`` -> ``(B, H', W')`` bool."""
        return F.max_pool2d(cells[:, None].float(), *self.window, ceil_mode=True)[:, 0] > 0


class CvtAttention(nn.Module):
    """Attention with convolutional projection; prefix tokens are not convolved.

    Args:
        dim: width ``D``.
        num_heads: heads ``h``.
        kernel: odd size of the filters.
        stride_q: step of the queries.
        stride_kv: step of keys and values.
        qkv_bias: whether the linear maps have a bias.
        scale: ``dim`` divides logits by the root of the full width (reference), ``head_dim`` by that of a head.
        method: ``dw_bn`` convolves; ``avg`` averages windows for keys and values and leaves queries as they are.

    Example:
        >>> layer = CvtAttention(8, 2, stride_kv=2).eval()
        >>> layer(torch.randn(1, 13, 8), Positions.grid(3, 4, num_prefix=1)).shape
        torch.Size([1, 13, 8])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        kernel: int = 3,
        stride_q: int = 1,
        stride_kv: int = 2,
        qkv_bias: bool = True,
        scale: str = "dim",
        method: str = "dw_bn",
    ) -> None:
        super().__init__()
        if method not in METHODS:
            raise ValueError(f"method: expected one of {METHODS}, got {method!r}")
        if method == "avg" and stride_q != 1:
            raise ValueError(f"stride_q: method='avg' leaves queries where they are, got {stride_q}; set 1")
        if dim % num_heads:
            raise ValueError(f"dim: expected a multiple of num_heads {num_heads}, got {dim}")
        if scale not in ("dim", "head_dim"):
            raise ValueError(f"scale: expected 'dim' or 'head_dim', got {scale!r}")
        self.num_heads = num_heads
        self.scale = (dim if scale == "dim" else dim // num_heads) ** -0.5
        self.stride_q = stride_q
        mean = method == "avg"
        self.conv_q = nn.Identity() if mean else ConvProjection(dim, kernel, stride_q)
        self.conv_k, self.conv_v = (
            MeanProjection(kernel, stride_kv) if mean else ConvProjection(dim, kernel, stride_kv) for _ in range(2)
        )
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=qkv_bias) for _ in range(3))
        self.proj = nn.Linear(dim, dim)

    def projections(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What the linear maps of q, k and v read, and which keys exist ``(B or 1, Lk)`` (``None``: all).

        A key exists when the token at the centre of its filter does, a mean when its window holds a token. Shape: q
        ``(B, P + N', D)``, k and v ``(B, P + N'', D)``.
        """
        positions.check_tokens(x)
        raster = Raster.of(positions, "cvt_projection")
        prefix, maps = x[:, : raster.num_prefix], raster.maps(x)
        q = self.conv_q(maps)
        placed = raster.tokens(q) if self.stride_q == 1 else q.flatten(2).transpose(1, 2)
        k, v = (conv(maps).flatten(2).transpose(1, 2) for conv in (self.conv_k, self.conv_v))
        present = raster.present()
        if present is not None:
            present = F.pad(self.conv_k.present(present).flatten(1), (raster.num_prefix, 0), value=True)
        joined = [torch.cat([prefix, t], 1) if raster.num_prefix else t for t in (placed, k, v)]
        return joined[0], joined[1], joined[2], present

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        """Shape: x ``(B, P + N, D)``; returns ``(B, P + N', D)``, ``N' = N`` when queries have no stride."""
        *read, present = self.projections(x, positions)
        q, k, v = (
            linear(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear, t in zip((self.q, self.k, self.v), read, strict=True)
        )
        mask = None if present is None else present[:, None, None]
        out = fused_attention(q, k, v, bias=mask, scale=self.scale)
        return self.proj(out.transpose(1, 2).flatten(2))
