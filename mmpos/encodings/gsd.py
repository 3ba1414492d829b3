"""Sine and cosine of ground distance (Scale-MAE), of spectral groups and of time stamps (SatMAE).

Reed et al., *Scale-MAE*, arXiv 2212.14532 (bair-climate-initiative/scale-mae, CC-BY-NC 4.0); Cong et al., *SatMAE*,
arXiv 2207.08051 (sustainlab-group/SatMAE, CC-BY-NC 4.0); nothing of either is here. Scale-MAE multiplies patch indices
by the ground sample distance of each image; SatMAE joins the vector of the place with that of a spectral group, or of
year, month and hour, channel by channel instead of adding them. Both references know square images only, and SatMAE
exactly three frames. Months are not cyclic: December is far from January.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmpos.encodings._table import add_to_placed
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.sincos import SINCOS_PRESETS, sincos
from mmpos.positions import Positions

__all__ = ["GroundDistance", "resized_gsd", "timestamp_positions"]


@register("gsd")
class GroundDistance(PositionEncoding):
    """Adds ``[sin-cos of column and row times ground distance | sin-cos of every further coordinate]``.

    The last two axes are (row, col); further axes come before them and own the last channels, in their order. With
    ``axes=3`` the first axis is a spectral group (SatMAE: ``extra_dims=(256,)``); with ``axes=5`` there are year, month
    and hour, see :func:`timestamp_positions` (SatMAE: ``extra_dims=(128, 128, 128)``).

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        base: base of the ladder of frequencies.
        reference: ground sample distance that leaves indices as they are, in the unit of ``gsd``.
        extra_dims: channels of each further axis, even; one number for each axis beyond two.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.

    Example:
        >>> from mmpos import create_encoding
        >>> gsd = create_encoding("gsd", dim=8, num_heads=2).shared["gsd"]
        >>> gsd.embed(Positions.grid(2, 3), gsd=torch.tensor([0.5, 2.0])).shape
        torch.Size([2, 6, 8])
    """

    facts = Facts(
        title="ground distance (Scale-MAE, SatMAE)",
        source="Reed et al. 2022, arXiv 2212.14532",
        plugs_into=("tokens",),
        axes=(2, 5),
        resolution_rules=("index", "rescaled"),
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        base: float = 10000.0,
        reference: float = 1.0,
        extra_dims: Sequence[int] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if extra_dims is None:  # SatMAE gives a quarter (spectral) or three eighths (temporal) to what is not the place
            share = dim // (8 if self.axes > 3 else 4) // 2 * 2
            extra_dims = (share,) * (self.axes - 2)
            extra_dims = tuple(d + (dim - sum(extra_dims)) % 4 * (i == 0) for i, d in enumerate(extra_dims))
        self.extra_dims = tuple(int(d) for d in extra_dims)
        if len(self.extra_dims) != self.axes - 2:
            raise ValueError(
                f"extra_dims: expected {self.axes - 2} numbers for axes={self.axes}, got {self.extra_dims}"
            )
        self.place_dim = dim - sum(self.extra_dims)
        if any(d < 2 or d % 2 for d in self.extra_dims) or self.place_dim < 4 or self.place_dim % 4:
            raise ValueError(
                f"extra_dims: expected even numbers that leave a multiple of 4 of dim {dim} for row and column, got "
                f"{self.extra_dims}"
            )
        if reference <= 0:
            raise ValueError(f"reference: expected a positive distance, got {reference}")
        self.base = base
        self.reference = reference

    def embed(self, positions: Positions, gsd: Tensor | float | None = None) -> Tensor:
        """The vectors of the placed tokens.

        Args:
            positions: places; the last two axes are (row, col).
            gsd: ground sample distance of each image, in metres per pixel or any unit of ``reference``; default
                ``reference``. Of a resized image see :func:`resized_gsd`.

        Shape:
            gsd ``(B,)`` or a number; returns ``(B or 1, N, D)`` in float32 (or float64).
        """
        self.check_axes(positions)
        place = positions.coords[..., -2:]
        if self.resolution == "rescaled":
            train = torch.tensor(self.training_grid(positions)[-2:], device=place.device, dtype=place.dtype)
            place = place * (train / positions.sizes("resolution='rescaled'")[..., -2:])[:, None]
        if gsd is not None:
            ratio = torch.as_tensor(gsd, device=place.device, dtype=place.dtype) / self.reference
            if ratio.dim() > 1:
                raise ValueError(f"gsd: expected one number per image (B,), got {tuple(ratio.shape)}")
            place = place * ratio.reshape(-1, 1, 1)
        parts = [sincos(place, self.place_dim, self.base, **SINCOS_PRESETS["mae"])]
        for axis, width in enumerate(self.extra_dims):
            part = sincos(positions.coords[..., axis : axis + 1], width, self.base)
            parts.append(part.expand(*parts[0].shape[:-1], -1))
        return torch.cat(parts, dim=-1)

    def add_to_tokens(self, x: Tensor, positions: Positions, gsd: Tensor | float | None = None) -> Tensor:
        """Add the vectors; prefix tokens get nothing.

        Through a stack, which passes no ``gsd``, scale the places instead:
        ``positions.with_coords(positions.coords * gsd[:, None, None])``.
        """
        return add_to_placed(x, self.embed(positions, gsd), positions)


def resized_gsd(gsd: Tensor | float, source_size: int, new_size: int) -> Tensor | float:
    """Ground sample distance after an image of ``source_size`` pixels was resized to ``new_size`` along the same axis.

    Example:
        >>> resized_gsd(0.5, source_size=448, new_size=224)
        1.0
    """
    if source_size < 1 or new_size < 1:
        raise ValueError(f"source_size, new_size: expected positive sizes, got {source_size} and {new_size}")
    return gsd * (source_size / new_size)


def timestamp_positions(timestamps: Tensor, height: int, width: int, *, num_prefix: int = 0) -> Positions:
    """Places of all patches of all frames, with the year, month and hour of the frame: axes (year, month, hour, row,
    col).

    Args:
        timestamps: numbers of each frame; SatMAE counts years from 2002, months and hours from 0.
        height: rows of patches in a frame.
        width: columns of patches in a frame.
        num_prefix: tokens in front without a place.

    Shape:
        timestamps ``(B or 1, T, 3)``; the positions have ``T * height * width`` tokens, frame after frame.
    """
    if timestamps.dim() != 3 or timestamps.shape[-1] != 3:
        raise ValueError(f"timestamps: expected (B, frames, 3) = (year, month, hour), got {tuple(timestamps.shape)}")
    stamps = timestamps if timestamps.dtype == torch.float64 else timestamps.float()
    raster = Positions.grid(height, width, device=stamps.device, dtype=stamps.dtype).coords
    batch, frames = stamps.shape[:2]
    count = height * width
    stamps = stamps[:, :, None].expand(-1, -1, count, -1)
    coords = torch.cat([stamps, raster[:, None].expand(batch, frames, -1, -1)], dim=-1).flatten(1, 2)
    # the extent of time is not known and not needed: only rows and columns are ever rescaled
    extent = torch.tensor([[1, 1, 1, height, width]], device=stamps.device, dtype=stamps.dtype)
    return Positions.points(coords, num_prefix=num_prefix, extent=extent)
