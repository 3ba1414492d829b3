"""Large images as tiles and a thumbnail, as LLaVA-NeXT and InternVL (arXiv 2404.16821) cut them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.multimodal import Image, Tiles

__all__ = ["tile_image"]


def tile_image(image: Tensor, side: int, *, max_tiles: int = 12, cell: int = 8) -> tuple[Tensor, Tiles | Image]:
    """Cut a large image into square tiles of one size and put a thumbnail behind them, as LLaVA-NeXT and InternVL do.

    The grid is the one of at most ``max_tiles`` tiles whose form is nearest to that of the image, of those the one
    with the area nearest to it.

    Args:
        image: the image.
        side: pixels of a tile.
        max_tiles: most tiles.
        cell: pixels of a visual token.

    Shape:
        image ``(C, H, W)``; returns ``(tiles + 1, C, side, side)`` and the segment, or the one tile that is the whole
        image.

    Example:
        >>> tiles, segment = tile_image(torch.zeros(1, 32, 64), 32)
        >>> tiles.shape, segment
        (torch.Size([3, 1, 32, 32]), Tiles(tile_rows=1, tile_cols=2, side=4, thumbnail=True, step=None))
    """
    if image.dim() != 3 or side % cell or side < cell or max_tiles < 1:
        raise ValueError(
            f"image, side: expected (C, H, W), a multiple of {cell} pixels and at least one tile, got "
            f"{tuple(image.shape)}, {side} and max_tiles {max_tiles}"
        )
    height, width = image.shape[-2:]
    grids = [(r, c) for r in range(1, max_tiles + 1) for c in range(1, max_tiles + 1) if r * c <= max_tiles]
    form = lambda grid: abs(math.log(grid[0] * width / (grid[1] * height)))  # noqa: E731
    area = lambda grid: abs(math.log(grid[0] * grid[1] * side**2 / (height * width)))  # noqa: E731
    rows, cols = min(grids, key=lambda grid: (round(form(grid), 6), area(grid)))
    whole = _fit(image, side, side)
    if rows * cols == 1:
        return whole[None], Image(side // cell, side // cell)
    large = _fit(image, rows * side, cols * side)
    tiles = large.unflatten(1, (rows, side)).unflatten(3, (cols, side)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    return torch.cat([tiles, whole[None]]), Tiles(rows, cols, side // cell)


def _fit(image: Tensor, height: int, width: int) -> Tensor:
    if image.shape[-2:] == (height, width):
        return image
    return F.interpolate(image[None], (height, width), mode="bilinear", antialias=True, align_corners=False)[0]
