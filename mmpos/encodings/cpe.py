"""CPE / PEG: a depthwise convolution of the tokens between blocks, which sees the border and so knows where it is.

Chu, Tian, Zhang, Wang, Shen, *Conditional Positional Encodings for Vision Transformers*, ICLR 2023, arXiv 2102.10882.
Reference: Meituan-AutoML/Twins ``PosCNN`` (Apache-2.0), which places one after the first block of each stage. Here
the places are an option, prefix tokens pass, and kept tokens are put back on their grid before they are convolved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.encodings._raster import Raster
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.grid_conv import depthwise
from mmpos.positions import Positions


@register("cpe")
class Cpe(PositionEncoding):
    """``x + conv(x)`` on the grid, after chosen blocks.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        placement: blocks after which a convolution of its own acts; -1 is before the first block. The paper finds
            (0,) best of the single places and several early ones slightly better.
        kernel: odd size of the filters.
        padding: ``zeros`` or ``circular`` (equivariant to circular shifts).
        init: ``normal`` (Twins), or ``zero``, the identity, for a model that is already trained.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.

    Shape:
        ``weights[i] (D, 1, k, ..)`` and ``biases[i] (D,)`` for the i-th placement.

    Example:
        >>> from mmpos import Positions, create_encoding
        >>> stack = create_encoding("cpe", 8, 2, depth=3, placement=(0, 1))
        >>> stack.mix_tokens(1, torch.randn(2, 7, 8), Positions.grid(2, 3, num_prefix=1)).shape
        torch.Size([2, 7, 8])
    """

    facts = Facts(
        title="CPE / PEG",
        source="Chu et al. 2023, arXiv 2102.10882",
        plugs_into=("conv", "tokens"),
        axes=(1, 3),
        needs_grid=True,
        fractional=False,
        learned=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        placement: Sequence[int] = (0,),
        kernel: int = 3,
        padding: str = "zeros",
        init: str = "normal",
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        self.placement = tuple(int(place) for place in placement)
        if not self.placement or min(self.placement) < -1 or len(set(self.placement)) != len(self.placement):
            raise ValueError(
                f"placement: expected different block indices from -1, for example (0,), got {tuple(placement)}"
            )
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel: expected an odd size, got {kernel}")
        if padding not in ("zeros", "circular"):
            raise ValueError(f"padding: expected 'zeros' or 'circular', got {padding!r}")
        if init not in ("normal", "zero"):
            raise ValueError(f"init: expected 'normal' or 'zero', got {init!r}")
        self.padding = padding
        self.init = init
        shape = (dim, 1, *[kernel] * self.axes)
        self.weights = nn.ParameterList(torch.empty(shape) for _ in self.placement)
        self.biases = nn.ParameterList(torch.empty(dim) for _ in self.placement)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with variance ``2 / k ** axes``, or zero; biases zero."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            if self.init == "zero":
                nn.init.zeros_(weight)
            else:
                nn.init.normal_(weight, std=math.sqrt(2.0 / math.prod(weight.shape[2:])))
            nn.init.zeros_(bias)

    @property
    def circular(self) -> bool:
        """With circular padding there is no border."""
        return self.padding == "circular"

    def check_depth(self, depth: int) -> None:
        if max(self.placement) >= depth:
            raise ValueError(
                f"placement: a model of {depth} layers has no block {max(self.placement)}, got {self.placement}"
            )

    def add_to_tokens(self, x: Tensor, positions: Positions) -> Tensor:
        return self.mix_tokens(x, positions, -1)

    def mix_tokens(self, x: Tensor, positions: Positions, layer: int) -> Tensor:
        if layer not in self.placement:
            return x
        self.check_axes(positions)
        place = self.placement.index(layer)
        raster = Raster.of(positions, self.name)
        if self.circular and positions.grid_size is None:
            raise ValueError(
                "positions: padding='circular' wraps around the border of one grid, and these are images of different "
                "sizes; use padding='zeros' or batches of one size"
            )
        return peg(x, self.weights[place], self.biases[place], raster, padding=self.padding)


def peg(
    x: Tensor, weight: Tensor, bias: Tensor | None, raster: Raster, *, padding: str = "zeros", stride: int = 1
) -> Tensor:
    """Placed tokens plus their convolution; with a stride the convolution alone, on a grid of ``ceil(n / stride)``.

    Shape:
        x ``(B, P + N, D)``, weight ``(D, 1, k, ..)``; returns the same, or ``(B, P + N', D)`` with a stride.
    """
    maps = depthwise(raster.maps(x), weight, bias, identity=stride == 1, padding=padding, stride=stride)
    placed = raster.tokens(maps) if stride == 1 else maps.flatten(2).transpose(1, 2)
    if raster.mask is not None and stride == 1:  # padding keeps what it held
        placed = torch.where(raster.mask[..., None], placed, x[:, raster.num_prefix :])
    return torch.cat([x[:, : raster.num_prefix], placed], 1) if raster.num_prefix else placed
