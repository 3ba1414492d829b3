"""Cursor rules: the id the next text token gets after an image or video, as an advance over the cursor before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mmpos.multimodal.blocks import Cells

__all__ = ["CURSOR_RULES"]


def after_max(cells: Cells, offsets: Tensor) -> Tensor:
    """One more than the largest id of the block on any axis (Qwen2-VL, Circle-RoPE)."""
    return _largest(offsets.amax(0), cells) + 1


def after_spatial(cells: Cells, offsets: Tensor) -> Tensor:
    """``max(H, W)``: time is ignored, so text may start inside a long video (transformers 5)."""
    return cells.sizes[:, 1:].amax(1)


def after_extent(cells: Cells, offsets: Tensor) -> Tensor:
    """``max(frames, H, W)`` with the time extent as laid out (OmniRoPE, arXiv 2506.18871; spatial reset, arXiv
    2510.23095; Mogao, arXiv 2505.05472).
    """
    return after_max(cells, offsets)


def after_time(cells: Cells, offsets: Tensor) -> Tensor:
    """One more than the last time id (VideoRoPE, HoPE)."""
    return _largest(offsets[0], cells) + 1


def after_count(cells: Cells, offsets: Tensor) -> Tensor:
    """As many ids as tokens (raster order)."""
    return cells.sizes.prod(1)


def after_corner_sums(cells: Cells, offsets: Tensor) -> Tensor:
    """``T (H + W - 1)`` (VRoPE)."""
    return cells.sizes[:, 0] * (cells.sizes[:, 1] + cells.sizes[:, 2] - 1)


def after_ceil(cells: Cells, offsets: Tensor) -> Tensor:
    """The next integer after the last fractional id (V2PE)."""
    return _largest(offsets[0], cells).ceil() + 1


CURSOR_RULES: Mapping[str, Callable[[Cells, Tensor], Tensor]] = {
    "max": after_max,
    "spatial": after_spatial,
    "extent": after_extent,
    "time": after_time,
    "count": after_count,
    "corner_sums": after_corner_sums,
    "ceil": after_ceil,
}


def _largest(values: Tensor, cells: Cells) -> Tensor:
    out = torch.zeros(cells.num_blocks, dtype=values.dtype, device=values.device)
    return out.scatter_reduce_(0, cells.block, values, "amax", include_self=False)
