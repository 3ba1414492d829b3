"""Log-spaced continuous position bias of SwinV2: a small network from log offsets to one number per head.

Liu, Hu, Lin, Yao, Xie, Wei, Ning, Cao, Zhang, Dong, Wei, Guo, *Swin Transformer V2*, CVPR 2022, arXiv 2111.09883.
References: microsoft/Swin-Transformer (MIT), timm ``RelPosMlp`` (Apache-2.0). The paper writes ``sign(x) log(1 +
|x|)``; the code, which we follow, first scales offsets so that the edge of the reference window is 8 and divides by
``log2(8)``. A reference window of 1 divides by zero there and is left unscaled here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.encodings._bias import table_index
from mmpos.encodings.base import Facts, PositionEncoding, ScoreMod
from mmpos.encodings.registry import register
from mmpos.encodings.swin_rpb import OffsetIndex, score_of_table
from mmpos.functional.bias import log_coordinates, offset_grid, pad_prefix, pair_offsets, raw_log_coordinates
from mmpos.functional.buckets import gather_static
from mmpos.positions import Positions


@register("swin_cpb")
class SwinCpb(PositionEncoding):
    """Bias computed from the offset by a two-layer network, re-evaluated at any grid.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        mode: ``swin``, scaled log2 offsets and ``16 sigmoid``; ``cr``, raw log offsets and the plain output (timm).
        hidden: width of the network.
        dropout: on the hidden layer, in training (timm uses 0.125).
        cosine: also use the scaled cosine attention of SwinV2, with a learned scale for each head, at most 100.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`. With ``resolution="re-evaluated"``
            offsets are measured in the training window (``train_grid``, the "pretrained window"); with
            ``"normalised"`` in the current window.

    Shape:
        ``fc1`` maps ``A`` coordinates (row before column) to ``hidden``, ``fc2`` to ``heads``; ``logit_scale (heads,
        1, 1)``.

    Example:
        >>> from mmpos import Positions, create_encoding
        >>> stack = create_encoding("swin_cpb", 32, 2, train_grid=(3, 4))
        >>> stack.prepare(Positions.grid(6, 8))[0].prepared[0][1].shape
        torch.Size([2, 165])
    """

    facts = Facts(
        title="SwinV2 CPB",
        source="Liu et al. 2022, arXiv 2111.09883",
        plugs_into=("bias",),
        axes=(1, 3),
        scope="layer",
        resolution_rules=("re-evaluated", "normalised"),
        relative=True,
        learned=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mode: str = "swin",
        hidden: int = 512,
        dropout: float = 0.0,
        cosine: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if mode not in ("swin", "cr"):
            raise ValueError(f"mode: expected 'swin' or 'cr', got {mode!r}")
        self.mode = mode
        self.dropout = dropout
        self.fc1 = nn.Linear(self.axes, hidden)
        self.fc2 = nn.Linear(hidden, num_heads, bias=mode == "cr")
        self.logit_scale = nn.Parameter(torch.empty(num_heads, 1, 1)) if cosine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Default initialisation of the network; cosine scale 10."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()
        if self.logit_scale is not None:
            nn.init.constant_(self.logit_scale, math.log(10.0))

    def coordinates(self, offsets: Tensor, positions: Positions) -> Tensor:
        """What the network reads for offsets ``(.., A)``."""
        if self.mode == "cr":
            return raw_log_coordinates(offsets)
        if self.resolution == "re-evaluated":
            return log_coordinates(offsets, self.training_grid(positions))
        sizes = positions.sizes(f"resolution='normalised' of {self.name}")
        if positions.grid_size is not None:
            return log_coordinates(
                offsets, positions.extent[0] if positions.extent is not None else positions.grid_size
            )
        return log_coordinates(offsets, sizes[:, None, None])

    def network(self, coords: Tensor) -> Tensor:
        """Values for coordinates. Shape: ``(.., A)`` -> ``(.., heads)``."""
        with torch.autocast(coords.device.type, enabled=False):
            coords = coords.to(self.fc1.weight.dtype)
            out = self.fc2(F.dropout(F.relu(self.fc1(coords)), self.dropout, self.training))
        return 16 * torch.sigmoid(out) if self.mode == "swin" else out

    def _values_of_pairs(self, coords: Tensor) -> Tensor:
        """Values of free points; what occurs several times along each axis is computed once."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or coords.requires_grad:
            return self.network(coords)
        ticks, places = zip(*(c.unique(return_inverse=True) for c in coords.unbind(-1)), strict=True)
        if math.prod(len(tick) for tick in ticks) >= coords[..., 0].numel():
            return self.network(coords)
        values = self.network(torch.stack(torch.meshgrid(*ticks, indexing="ij"), -1))
        return values[places]

    def prepare_shared(self, positions: Positions) -> OffsetIndex | None:
        """Which offset of the raster serves each pair, the same for every layer.

        ``None`` for points without a raster.
        """
        self.check_axes(positions)
        if positions.grid_size is None or positions.moved:
            return None
        prefix = positions.num_prefix
        return OffsetIndex(table_index(positions.coords, positions.grid_size, prefix), positions.grid_size, prefix)

    def prepare(self, positions: Positions, shared: OffsetIndex | None = None) -> tuple[OffsetIndex | None, Tensor]:
        """Index and value per offset ``(heads, rows)`` on a raster, else the whole bias ``(B or 1, heads, L, L)``."""
        shared = self.prepare_shared(positions) if shared is None else shared
        if shared is None:
            coords = self.coordinates(pair_offsets(positions.coords), positions)
            return None, pad_prefix(self._values_of_pairs(coords).movedim(-1, 1), positions.num_prefix)
        grid = offset_grid(shared.sizes, device=positions.coords.device, dtype=positions.coords.dtype)
        # the sigmoid comes before the gather: an offset serves many pairs
        values = self.network(self.coordinates(grid, positions)).flatten(0, -2).T
        return shared, F.pad(values, (3, 0)) if positions.num_prefix else values

    def transform_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, x: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cosine attention: unit queries and keys, and the learned scale in place of the ``d ** -0.5`` that follows."""
        if self.logit_scale is None:
            return q, k, v
        scale = self.logit_scale.clamp(max=math.log(100.0)).exp() * q.shape[-1] ** 0.5
        return F.normalize(q, dim=-1) * scale.to(q.dtype), F.normalize(k, dim=-1), v

    def logit_bias(self, q: Tensor, k: Tensor, prepared: tuple[OffsetIndex | None, Tensor]) -> Tensor:
        """The bias, ``(B or 1, heads, L, L)``; zero for prefix tokens."""
        index, values = prepared
        return values if index is None else gather_static(values, index.index)

    def score_mod(self, q: Tensor, k: Tensor, prepared: tuple[OffsetIndex | None, Tensor]) -> ScoreMod | None:
        """On a raster reads the values by the index that all heads share."""
        index, values = prepared
        if index is None:
            return super().score_mod(q, k, prepared)
        return score_of_table(values.to(q.dtype), index.index)
