"""Block layouts: ids inside an image or video, as offsets from the cursor. Pure functions of raster indices.

A layout returns offsets ``(axes, n)`` for ``n`` visual tokens; the id is ``cursor + offset`` on the axes that carry
the cursor and the bare offset on the others. Every function sees the tokens of all blocks of a batch at once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmpos.multimodal.segments import VIDEO, Tokens

__all__ = ["BLOCK_LAYOUTS", "Cells", "cells_of", "rings"]

#: ids by which a time may lie below a whole one and still be it
_HAIR = 1e-4


@dataclass(frozen=True, eq=False)
class Cells:
    """Raster places of visual tokens, with the sizes of their blocks; what a layout does not ask for is not computed.

    Args:
        tokens: the flat batch.
        places: slot of each visual token in the flattened batch.
        block: block it belongs to.
        index: raster index inside the block.

    Shape:
        places, block, index and all per-token properties ``(n,)``; ``sizes`` ``(blocks, 3)``, ``step`` ``(blocks,)``.
    """

    tokens: Tokens
    places: Tensor
    block: Tensor
    index: Tensor

    @property
    def num_blocks(self) -> int:
        """Images and videos in the batch."""
        return self.tokens.sizes.shape[0]

    @property
    def sizes(self) -> Tensor:
        """(frames, rows, cols) of each block."""
        return self.tokens.sizes

    @property
    def step(self) -> Tensor:
        """Own step of each block, NaN where the scheme decides."""
        return self.tokens.step

    def of_block(self, values: Tensor) -> Tensor:
        """A value of each block, for each token."""
        return values.contiguous().index_select(0, self.block)

    @cached_property
    def frames(self) -> Tensor:
        """Frames of the block."""
        return self.of_block(self.sizes[:, 0])

    @cached_property
    def rows(self) -> Tensor:
        """Rows of the block."""
        return self.of_block(self.sizes[:, 1])

    @cached_property
    def cols(self) -> Tensor:
        """Columns of the block."""
        return self.of_block(self.sizes[:, 2])

    @cached_property
    def _line(self) -> Tensor:
        """Row over all frames of the block. Quotients of floats: integer division takes ten times as long, and with
        both numbers below 2 ** 26 the rounded quotient never reaches the next integer.
        """
        return (self.index.double() / self.of_block(self.sizes[:, 2].double())).long()

    @cached_property
    def t(self) -> Tensor:
        """Frame."""
        if bool((self.sizes[:, 0] == 1).all()):
            return torch.zeros_like(self.index)
        return (self._line.double() / self.of_block(self.sizes[:, 1].double())).long()

    @cached_property
    def h(self) -> Tensor:
        """Row in the frame."""
        return torch.addcmul(self._line, self.t, self.rows, value=-1)

    @cached_property
    def w(self) -> Tensor:
        """Column in the frame."""
        return torch.addcmul(self.index, self._line, self.cols, value=-1)

    @cached_property
    def is_video(self) -> Tensor:
        """Whether the block is a video."""
        return self.tokens.kind.flatten()[self.places] == VIDEO

    @cached_property
    def clock(self) -> Tensor:
        """Time of the frame in seconds, as it was given."""
        return self.tokens.times[self.of_block(self.tokens.time_start) + self.t]

    @cached_property
    def time(self) -> Tensor:
        """Seconds since the first frame of the block."""
        return self.clock - self.tokens.times[self.of_block(self.tokens.time_start)]

    @cached_property
    def tile_rows(self) -> Tensor:
        """Rows of tiles of the block."""
        return self.of_block(self.tokens.tiles[:, 0])

    @cached_property
    def tile_cols(self) -> Tensor:
        """Columns of tiles of the block."""
        return self.of_block(self.tokens.tiles[:, 1])

    @property
    def count(self) -> Tensor:
        """Tokens of the block each token belongs to."""
        return self.of_block(self.sizes.prod(1))

    @cached_property
    def ends(self) -> Tensor:
        """Which of the tokens is the last of its block, for each block in the order of slots."""
        starts = (self.index == 0).nonzero()[:, 0]
        return torch.cat([starts[1:], starts.new_full((min(len(starts), 1),), len(self.index))]) - 1

    def steps(self, default: Tensor | float) -> Tensor:
        """Step of each token's block, or the default where the block has none of its own."""
        own = self.of_block(self.step)
        return torch.where(own.isnan(), torch.as_tensor(default, dtype=torch.float64, device=own.device), own)


def cells_of(tokens: Tokens) -> tuple[Tensor, Cells]:
    """Flat places of all visual tokens in the batch, and their cells."""
    block = tokens.block.flatten()
    places = (block >= 0).nonzero()[:, 0]
    cells = Cells(
        tokens=tokens,
        places=places,
        block=block.index_select(0, places),
        index=tokens.local.flatten().index_select(0, places),
    )
    return places, cells


def raster(cells: Cells) -> Tensor:
    """One axis, raster order: every visual token advances by one, like text (LLaVA, arXiv 2304.08485)."""
    return cells.index[None]


def grid(cells: Cells, time_stride: float = 1.0, scale: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Tensor:
    """(t, h, w) indices, the time index times ``time_stride`` and every axis times ``scale`` (M-RoPE, arXiv 2409.12191;
    MM-RoPE, arXiv 2507.08801).
    """
    factors = (time_stride * scale[0], scale[1], scale[2])
    parts = [
        part if factor == 1 else _scaled(part, factor)
        for part, factor in zip((cells.t, cells.h, cells.w), factors, strict=True)
    ]
    return (
        torch.stack(torch.broadcast_tensors(*parts))
        if len({p.dtype for p in parts}) == 1
        else torch.stack([p.double() for p in parts])
    )


def absolute_time(
    cells: Cells, tokens_per_second: float = 2.0, truncate_seconds: bool = False, origin: str = "video"
) -> Tensor:
    """(t, h, w) with ``t = floor(seconds * tokens_per_second)`` for videos (Qwen2.5-VL, arXiv 2502.13923);
    images keep their index.

    The floor comes last: only the product is cut, and never the start of the block. Frames at one distance stand at
    ``floor(frame * (tokens_per_second * distance))``, in this order and in float32, as in transformers. Where frames
    of a video fall on one id, a warning says so.

    Args:
        cells: visual tokens.
        tokens_per_second: ids of a second.
        truncate_seconds: the fault of older releases, which cut the seconds between frames to an integer first, so that
            everything above two frames a second collapses.
        origin: ``video`` counts from the first frame of each video, ``clock`` takes the times of frames as they are.
    """
    if origin not in ("video", "clock"):
        raise ValueError(f"origin: expected 'video' or 'clock', got {origin!r}")
    interval = cells.of_block(cells.tokens.interval)
    if truncate_seconds:
        first = (cells.t == 1).double()
        found = torch.zeros(cells.num_blocks, dtype=torch.float64, device=first.device)
        found.scatter_reduce_(0, cells.block, torch.nan_to_num(cells.time) * first, "amax")
        interval = found.trunc()[cells.block]
    time = cells.clock if origin == "clock" else cells.time
    # times are read from containers and round like 6.9999999 / 25: a hair below a whole id is that id
    irregular = (time * tokens_per_second + _HAIR).floor()
    regular = (cells.t.float() * (interval * tokens_per_second).float()).floor()
    scaled = torch.where(interval.isnan(), irregular, regular.double())
    known = cells.is_video & ~time.isnan()
    t = torch.where(known, torch.nan_to_num(scaled).long(), cells.t)
    if not truncate_seconds:
        _warn_of_collapse(cells, t)
    return torch.stack([t, cells.h, cells.w])


def _warn_of_collapse(cells: Cells, t: Tensor) -> None:
    """Say when a frame of a video has the id of the frame before it: the model cannot tell their order."""
    if len(t) < 2:
        return
    next_frame = (cells.block[1:] == cells.block[:-1]) & (cells.t[1:] == cells.t[:-1] + 1)
    same = next_frame & (t[1:] <= t[:-1])
    if bool(same.any()):
        block = int(cells.block[1:][same][0])
        videos = int((cells.block[1:][same].unique()).numel())
        warnings.warn(
            f"tokens_per_second: frames of {videos} video{'s' * (videos > 1)} (the first is block {block}) fall on one "
            "id, so their order is lost; use more ids a second or fewer frames",
            stacklevel=2,
        )


def diagonal(cells: Cells, scale: float = 2.0) -> Tensor:
    """VideoRoPE (arXiv 2502.05173) and HoPE (arXiv 2505.20444): time ``scale * t``; rows and columns centred on it, so
    a frame lies across the diagonal.
    """
    time = cells.t * cells.steps(scale)
    rows = time + cells.h - (cells.rows - 1).div(2, rounding_mode="floor")
    cols = time + cells.w - (cells.cols - 1).div(2, rounding_mode="floor")
    return torch.stack([time, rows, cols])


def mirrored(cells: Cells, order: str = "code") -> Tensor:
    """VRoPE (arXiv 2502.11664): four corner sums, so that no corner of a frame is nearer to the text than another.

    ``code`` is [h+w, h+w', h'+w, h'+w'] with ``h' = H-1-h``; ``paper`` deals the same four to the pairs as [w+h,
    w+h', w'+h', w'+h].
    """
    h, w = cells.h, cells.w
    h2, w2 = cells.rows - 1 - h, cells.cols - 1 - w
    if order == "code":
        corners = [h + w, h + w2, h2 + w, h2 + w2]
    elif order == "paper":
        corners = [w + h, w + h2, w2 + h2, w2 + h]
    else:
        raise ValueError(f"order: expected 'code' or 'paper', got {order!r}")
    return torch.stack(corners) + cells.t * (cells.rows + cells.cols - 1)


def circle(
    cells: Cells,
    radius: float | str = 10.0,
    alpha: float = 0.5,
    centred: bool = True,
    frame_stride: float = 1.0,
    projected: float = 0.0,
    auto_norm: str = "largest",
) -> Tensor:
    """Circle-RoPE (arXiv 2505.16416): a ring in the plane through the cursor at right angles to (1, 1, 1), so all
    tokens are equally far from any text.

    Args:
        cells: places.
        radius: radius of the ring, or ``"auto"`` / ``"auto-k"`` for ``k`` times the extent of the grid.
        alpha: 1 takes the angle of the cell, 0 spreads the raster order evenly; below 1 no two cells coincide.
        centred: measure cell angles about the middle of the grid.
        frame_stride: distance between the rings of consecutive frames along (1, 1, 1).
        projected: mix this share of the projected grid itself into the ring.
        auto_norm: extent for automatic radii: ``largest`` centred coordinate (code) or largest ``l2`` norm (paper).
    """
    # float64: in float32 the last bit of an angle depends on which other images are in the batch
    y = cells.h - (cells.rows.double() - 1) / 2 if centred else cells.h.double()
    x = cells.w - (cells.cols.double() - 1) / 2 if centred else cells.w.double()
    angle = torch.atan2(y, x)
    low = _per_block(angle, cells, "amin")
    span = _per_block(angle, cells, "amax") - low
    normalised = torch.where(span > 0, (angle - low) / torch.where(span > 0, span, 1.0) * (2 * math.pi), angle)
    cell = cells.h * cells.cols + cells.w
    even = cell.double() * (2 * math.pi) / (cells.rows * cells.cols)
    angle = alpha * normalised + (1 - alpha) * even
    if isinstance(radius, str):
        if not radius.startswith("auto"):
            raise ValueError(f"radius: expected a number, 'auto' or 'auto-k', got {radius!r}")
        factor = float(radius.split("-", 1)[1]) if "-" in radius else 1.0
        if auto_norm == "largest":
            extent = torch.maximum(_per_block(y, cells, "amax"), _per_block(x, cells, "amax"))
        elif auto_norm == "l2":
            extent = _per_block((x * x + y * y).sqrt(), cells, "amax")
        else:
            raise ValueError(f"auto_norm: expected 'largest' or 'l2', got {auto_norm!r}")
        size: Tensor | float = factor * extent
    else:
        size = float(radius)
    across, up = size * angle.cos(), size * angle.sin()
    if projected:
        across, up = (1 - projected) * across + projected * x, (1 - projected) * up + projected * y
    # plane basis u = (-1, 1, 0)/sqrt 2 and v = (-1, -1, 2)/sqrt 6 in the order (w, h, t)
    col = -across / math.sqrt(2) - up / math.sqrt(6)
    row = across / math.sqrt(2) - up / math.sqrt(6)
    time = 2 * up / math.sqrt(6)
    return torch.stack([time, row, col]) + cells.t * frame_stride


def fractional(cells: Cells, step: float = 0.25, span: float | None = None) -> Tensor:
    """V2PE (arXiv 2412.09616): visual tokens advance by a fraction of a text token, ``-1 + k step`` for k = 1, 2, ...

    Args:
        cells: places.
        step: id step between visual tokens (stride / tokens per tile), unless the segment brings its own.
        span: when given, a whole block spans this many ids and the step is ``span / tokens``.
    """
    each = cells.steps(step) if span is None else float(span) / cells.count.double()
    return ((cells.index + 1) * each - 1)[None]


def concentric(cells: Cells, levels: int | None = None, drop: int = 0, clip: bool = True) -> Tensor:
    """CCA (arXiv 2410.15926) and PyPE (arXiv 2501.10967): one id per ring, counted from the border inwards.

    Args:
        cells: places.
        levels: most levels; default all ``min(H, W) // 2``.
        drop: levels taken away from the inside (PyPE: layer // jump), never below one level.
        clip: an odd grid's centre joins the last ring, as in the reference; otherwise it is a ring of its own.
    """
    return rings(cells, levels, drop, clip)[None]


def rings(cells: Cells, levels: int | None = None, drop: int = 0, clip: bool = True) -> Tensor:
    """Ring of every cell, ``min(h, w, H-1-h, W-1-w)``, limited to the levels. Shape: ``(n,)``."""
    ring = torch.minimum(
        torch.minimum(cells.h, cells.w), torch.minimum(cells.rows - 1 - cells.h, cells.cols - 1 - cells.w)
    )
    short = torch.minimum(cells.rows, cells.cols)
    most = (short if clip else short + 1).div(2, rounding_mode="floor").clamp_min(1)
    if levels is not None:
        most = most.clamp_max(levels)
    return torch.minimum(ring, (most - drop).clamp_min(1) - 1)


def thumbnail(cells: Cells, order: str = "row", rounding: str = "floor") -> Tensor:
    """RoPE-DHR (CoMemo, arXiv 2506.06279): every tile token takes the id of the thumbnail cell it covers; a plain image
    is its own thumbnail.

    Args:
        cells: places; blocks come from :class:`~mmpos.multimodal.segments.Tiles`.
        order: ``row`` as tiles are cut; ``column`` repeats the released code, which walks the tiles in the other order.
        rounding: ``floor`` (paper), or ``linspace`` as the released code computes it.
    """
    if order not in ("row", "column") or rounding not in ("floor", "linspace"):
        raise ValueError(
            f"order, rounding: expected 'row' or 'column' and 'floor' or 'linspace', got {order!r}, {rounding!r}"
        )
    tiled = cells.tile_rows > 0
    down, across = cells.tile_rows.clamp_min(1), cells.tile_cols.clamp_min(1)
    if order == "row":
        tile_row, tile_col = cells.t.div(across, rounding_mode="floor"), cells.t % across
    else:
        tile_row, tile_col = cells.t % down, cells.t.div(down, rounding_mode="floor")
    side = cells.cols
    is_thumbnail = cells.t >= down * across
    if rounding == "floor":
        row = (tile_row * side + cells.h).div(down, rounding_mode="floor")
        col = (tile_col * side + cells.w).div(across, rounding_mode="floor")
    else:
        row = _linspace_cell(tile_row, cells.h, side, down)
        col = _linspace_cell(tile_col, cells.w, side, across)
    single = (down * across == 1) | is_thumbnail | ~tiled
    ids = torch.where(single, cells.h * side + cells.w, row * side + col)
    plain = ~tiled
    return torch.where(plain, cells.index, ids)[None]


def _linspace_cell(tile: Tensor, index: Tensor, side: Tensor, count: Tensor) -> Tensor:
    width = side.double() / count - 1e-6
    return (tile * width + index * (width / (side - 1).clamp_min(1))).long()


def shared(cells: Cells) -> Tensor:
    """One id for all tokens of a block (MouSi share-all, arXiv 2401.17221)."""
    return torch.zeros_like(cells.h)[None]


def by_row(cells: Cells) -> Tensor:
    """One id per row of a block (MouSi share-by-row, arXiv 2401.17221)."""
    return (cells.t * cells.rows + cells.h)[None]


def by_column(cells: Cells) -> Tensor:
    """One id per column of a block, the counterpart of MouSi's rows (arXiv 2401.17221)."""
    return (cells.t * cells.cols + cells.w)[None]


def _scaled(part: Tensor, factor: float) -> Tensor:
    return part * int(factor) if float(factor).is_integer() else part * float(factor)


def _per_block(values: Tensor, cells: Cells, reduce: str) -> Tensor:
    fill = float("inf") if reduce == "amin" else float("-inf")
    out = torch.full((cells.num_blocks,), fill, dtype=values.dtype, device=values.device)
    return out.scatter_reduce_(0, cells.block, values, reduce)[cells.block]


BLOCK_LAYOUTS: Mapping[str, Callable[..., Tensor]] = {
    "raster": raster,
    "grid": grid,
    "absolute_time": absolute_time,
    "diagonal": diagonal,
    "mirrored": mirrored,
    "circle": circle,
    "fractional": fractional,
    "concentric": concentric,
    "thumbnail": thumbnail,
    "shared": shared,
    "by_row": by_row,
    "by_column": by_column,
}

Options = Mapping[str, Any]
