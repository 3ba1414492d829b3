"""LePE: locally enhanced position encoding, a depthwise convolution of the values added to the attention output.

Dong, Bao, Chen, Zhang, Yu, Yuan, Chen, Guo, *CSWin Transformer*, CVPR 2022, arXiv 2107.00652. Reference:
microsoft/CSWin-Transformer (MIT), where it acts inside cross-shaped windows (see :mod:`mmpos.models.cswin`). In a
plain ViT the window is the whole grid; prefix tokens get no term.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.encodings._raster import Raster
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.grid_conv import depthwise
from mmpos.positions import Positions


@register("lepe")
class Lepe(PositionEncoding):
    """``attention(q, k, v) + conv(v)``, one filter per channel, shared by nothing.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        kernel: odd size of the filters.
        init: ``default``, that of a convolution layer (CSWin), or ``zero``, for a model that is already trained.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.

    Shape:
        ``weight (h d, 1, k, ..)``, ``bias (h d,)``.

    Example:
        >>> from mmpos import Positions, attend, create_encoding
        >>> state = create_encoding("lepe", 8, 2).prepare(Positions.grid(2, 3))[0]
        >>> attend(*torch.randn(3, 1, 2, 6, 4), state).shape
        torch.Size([1, 2, 6, 4])
    """

    facts = Facts(
        title="LePE",
        source="Dong et al. 2022, arXiv 2107.00652",
        plugs_into=("conv",),
        axes=(1, 3),
        scope="layer",
        needs_grid=True,
        fractional=False,
        learned=True,
    )

    def __init__(self, dim: int, num_heads: int, *, kernel: int = 3, init: str = "default", **common: Any) -> None:
        super().__init__(dim, num_heads, **common)
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel: expected an odd size, got {kernel}")
        if init not in ("default", "zero"):
            raise ValueError(f"init: expected 'default' or 'zero', got {init!r}")
        self.init = init
        channels = num_heads * self.head_dim
        self.weight = nn.Parameter(torch.empty(channels, 1, *[kernel] * self.axes))
        self.bias = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform as in a convolution layer of torch, or zero."""
        if self.init == "zero":
            nn.init.zeros_(self.weight)
            nn.init.zeros_(self.bias)
            return
        bound = 1 / math.sqrt(math.prod(self.weight.shape[2:]))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def prepare_shared(self, positions: Positions) -> Raster:
        """The raster, the same for every layer."""
        self.check_axes(positions)
        return Raster.of(positions, self.name)

    def prepare(self, positions: Positions, shared: Raster | None = None) -> Raster:
        """The raster of the tokens."""
        return self.prepare_shared(positions) if shared is None else shared

    def transform_output(self, out: Tensor, v: Tensor, prepared: Raster) -> Tensor:
        """Add the convolved values."""
        maps = prepared.maps(v.transpose(1, 2).flatten(2))
        term = prepared.tokens(depthwise(maps, self.weight, self.bias))
        term = term.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return out + (F.pad(term, (0, 0, prepared.num_prefix, 0)) if prepared.num_prefix else term)
