"""Relative position bias of Swin: a learned number for each offset and head, over a window or the whole grid.

Liu, Lin, Cao, Hu, Wei, Zhang, Lin, Guo, *Swin Transformer*, ICCV 2021, arXiv 2103.14030. References:
microsoft/Swin-Transformer (MIT), timm ``RelPosBias`` (Apache-2.0), which adds three rows for a prefix token as BEiT
does; several prefix tokens share them here. The references resize tables of square windows only; every rule here
works on any grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.encodings._bias import raster_coordinates, table_index, whole_coordinates
from mmpos.encodings.base import Facts, PositionEncoding, ScoreMod
from mmpos.encodings.registry import register
from mmpos.functional.bias import geometric_matrix
from mmpos.functional.buckets import gather_static
from mmpos.functional.resample import resample_grid, same_sizes
from mmpos.positions import Positions

RULES = ("bicubic", "bicubic_antialias", "geometric", "offset")


@dataclass(frozen=True, eq=False)
class OffsetIndex:
    """Row of each pair of tokens ``(B or 1, L, L)``, the raster that the rows cover, the number of prefix tokens."""

    index: Tensor
    sizes: tuple[int, ...]
    num_prefix: int


@register("swin_rpb")
class SwinRpb(PositionEncoding):
    """Learned bias for each offset and head.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        init_std: standard deviation of the initial values (truncated normal).
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`. ``train_grid`` is the window or grid the
            table covers and is required; ``num_prefix > 0`` adds ``prefix_table``. ``resolution`` is the rule for
            another grid: ``bicubic`` (Swin), ``bicubic_antialias`` (LeViT, TinyViT), ``geometric`` (BEiT, timm), or
            ``offset``, which keeps the table and clamps offsets beyond it and is the only rule for points without a
            common grid.

    Shape:
        ``table (heads, 2 n_1 - 1, .., 2 n_A - 1)``, offset query minus key, most negative first; ``prefix_table
        (heads, 3)``: prefix to placed, placed to prefix, prefix to prefix.

    Example:
        >>> from mmpos import create_encoding
        >>> create_encoding("swin_rpb", 64, 4, train_grid=(3, 5)).layers[0]["swin_rpb"].table.shape
        torch.Size([4, 5, 9])
    """

    facts = Facts(
        title="Swin RPB",
        source="Liu et al. 2021, arXiv 2103.14030",
        plugs_into=("bias",),
        axes=(1, 3),
        scope="layer",
        needs_grid=True,
        fractional=False,
        resolution_rules=RULES,
        relative=True,
        learned=True,
    )

    def __init__(self, dim: int, num_heads: int, *, init_std: float = 0.02, **common: Any) -> None:
        super().__init__(dim, num_heads, **common)
        if self.train_grid is None:
            raise ValueError(
                "train_grid: swin_rpb has one value per offset and needs the grid or window it covers, for "
                "example (14, 14)"
            )
        self.init_std = init_std
        self.table = nn.Parameter(torch.empty(num_heads, *(2 * size - 1 for size in self.train_grid)))
        self.prefix_table = nn.Parameter(torch.empty(num_heads, 3)) if self.num_prefix else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal."""
        for parameter in self.parameters():
            bound = max(2.0, 2 * self.init_std)  # 2 is the bound of the reference
            nn.init.trunc_normal_(parameter, std=self.init_std, a=-bound, b=bound)

    def prepare_shared(self, positions: Positions) -> OffsetIndex:
        """The index, the same for every layer."""
        self.check_axes(positions)
        if positions.num_prefix and self.prefix_table is None:
            raise ValueError(
                "num_prefix: the table has no values for prefix tokens but positions have "
                f"{positions.num_prefix}; build with "
                "create_encoding(..., num_prefix=...)"
            )
        assert self.train_grid is not None
        keep = self.resolution == "offset"
        if keep:
            coords, sizes = whole_coordinates(positions, self.name), self.train_grid
        else:
            coords = raster_coordinates(
                positions, f"resolution={self.resolution!r} of {self.name}", "use resolution='offset'"
            )
            assert positions.grid_size is not None
            sizes = positions.grid_size
        prefix = positions.num_prefix
        return OffsetIndex(table_index(coords, sizes, prefix, clamp=keep or positions.moved), sizes, prefix)

    def prepare(self, positions: Positions, shared: OffsetIndex | None = None) -> tuple[OffsetIndex, Tensor]:
        """The index and the table of this layer for the grid, flat: ``(heads, rows)``."""
        shared = self.prepare_shared(positions) if shared is None else shared
        assert self.train_grid is not None
        table: Tensor = self.table
        if not same_sizes(shared.sizes, self.train_grid):
            table = resize_offset_table(table, shared.sizes, self.resolution)
        table = table.flatten(1)
        if self.prefix_table is not None and shared.num_prefix:
            table = torch.cat([self.prefix_table, table], 1)
        return shared, table

    def logit_bias(self, q: Tensor, k: Tensor, prepared: tuple[OffsetIndex, Tensor]) -> Tensor:
        """The bias, ``(B or 1, heads, L, L)``."""
        return gather_static(prepared[1], prepared[0].index)

    def score_mod(self, q: Tensor, k: Tensor, prepared: tuple[OffsetIndex, Tensor]) -> ScoreMod:
        """Reads the table by the index that all heads share."""
        return score_of_table(prepared[1].to(q.dtype), prepared[0].index)


def score_of_table(table: Tensor, index: Tensor) -> ScoreMod:
    """A ``score_mod`` from a flat table. Shape: table ``(heads, rows)``, index ``(B or 1, L, L)``."""
    samples = index.shape[0]
    return lambda score, b, h, i, j: score + table[h, index[b % samples, i, j].long()]


def resize_offset_table(table: Tensor, sizes: tuple[int, ...], rule: str) -> Tensor:
    """A table over the offsets of one raster, for another raster.

    Args:
        table: values, offset ``-(n - 1)`` first along each axis.
        sizes: the new raster.
        rule: ``bicubic``, ``bicubic_antialias`` or ``geometric`` (read linearly, as in timm).

    Shape:
        table ``(heads, 2 n_1 - 1, ..)``; returns ``(heads, 2 sizes_1 - 1, ..)`` in the dtype of the table.
    """
    wanted = [2 * size - 1 for size in sizes]
    values = table.movedim(0, -1)
    if rule in ("bicubic", "bicubic_antialias"):
        return resample_grid(values, wanted, "bicubic", rule == "bicubic_antialias").movedim(-1, 0)
    if rule != "geometric":
        raise ValueError(f"rule: expected one of {RULES[:3]}, got {rule!r}")
    if list(values.shape[:-1]) == wanted:  # places of offsets are stretched only where the window changes
        return table
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    for axis, target in enumerate(wanted):
        matrix = geometric_matrix(values.shape[axis], target).to(wide)
        wide = torch.tensordot(matrix, wide, dims=([1], [axis])).movedim(0, axis)
    return wide.to(table.dtype).movedim(-1, 0)
