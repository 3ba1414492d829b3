"""Re-indexing: put a local grid or a stretch of time into a target box or interval, and spell coordinates with extra
tokens.

RegionalRoPE (DreamingComics, arXiv 2512.01686) and ReRoPE (MinT, arXiv 2412.05263) are one affine map each; neither
has public code, the formulas follow the papers' descriptions. Ids are fractional.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmpos.multimodal.layout import PositionLayout

__all__ = ["event_positions", "insert_markers", "regional_positions"]


def regional_positions(
    grids: Sequence[tuple[int, int]], boxes: Tensor, align: Tensor | float = 0.5, time: float = 0.0
) -> Tensor:
    """Ids of reference images that are to appear inside boxes of the target.

    Each grid is scaled by ``s = min(box width / w, box height / h)``, centred across, and placed down the box by
    ``align``.

    Args:
        grids: (rows, cols) of each reference.
        boxes: (col start, row start, col end, row end) of each box, in tokens of the target.
        align: 0 puts a reference at the top of its box, 0.5 in the middle, 1 at the bottom.
        time: id on the time axis.

    Shape:
        boxes ``(n, 4)``; returns ``(3, tokens)`` in the order (t, h, w), references one after the other, float64.
    """
    if boxes.shape != (len(grids), 4):
        raise ValueError(f"boxes: expected ({len(grids)}, 4), one box per grid, got {tuple(boxes.shape)}")
    boxes = boxes.double()
    aligns = torch.as_tensor(align, dtype=torch.float64).expand(len(grids))
    parts = []
    for (rows, cols), (left, top, right, bottom), where in zip(grids, boxes, aligns, strict=True):
        width, height = right - left, bottom - top
        if not (width > 0 and height > 0):
            raise ValueError(
                f"boxes: expected right > left and bottom > top, got {[float(v) for v in (left, top, right, bottom)]}"
            )
        scale = torch.minimum(width / cols, height / rows)
        row = top + where * (height - scale * rows) + scale * torch.arange(rows, dtype=torch.float64)
        col = left + (width - scale * cols) / 2 + scale * torch.arange(cols, dtype=torch.float64)
        h, w = torch.meshgrid(row, col, indexing="ij")
        parts.append(torch.stack([torch.full_like(h, time), h, w]).flatten(1))
    return torch.cat(parts, dim=1) if parts else torch.zeros(3, 0, dtype=torch.float64)


def event_positions(times: Tensor, spans: Tensor, length: float) -> tuple[Tensor, Tensor, Tensor]:
    """Every event of a video gets the same stretch of ids, whatever its duration.

    A frame at time ``t`` of event ``n`` goes to ``(t - start) / (end - start) * length + n * length``, all text of
    event ``n`` to its middle ``(n + 0.5) * length``.

    Args:
        times: frame times.
        spans: (start, end) of the events, contiguous and in order.
        length: ids per event.

    Shape:
        times ``(F,)``, spans ``(E, 2)``; returns frame ids ``(F,)``, text ids ``(E,)`` and the event of each frame
        ``(F,)``.
    """
    if spans.dim() != 2 or spans.shape[1] != 2 or bool((spans[:, 1] <= spans[:, 0]).any()):
        raise ValueError(
            f"spans: expected (events, 2) with end > start, got {tuple(spans.shape)}: {spans.tolist()[:4]}"
        )
    if bool((spans[1:, 0] != spans[:-1, 1]).any()):
        raise ValueError("spans: expected contiguous events, each starting where the one before ends")
    event = torch.searchsorted(
        spans[1:, 0].contiguous(), times.contiguous(), right=True
    )  # a boundary frame opens the later event
    start, end = spans[event].unbind(-1)
    frames = (times - start) / (end - start) * length + event * length
    text = (torch.arange(len(spans), dtype=spans.dtype, device=spans.device) + 0.5) * length
    return frames, text, event


def insert_markers(layout: PositionLayout, after: Sequence[int], patches: Tensor) -> PositionLayout:
    """Insert tokens that carry the id of given visual tokens (RULER coordinates, arXiv 2510.03230).

    The model can then copy the marker nearest to a place and add a small offset. Markers count as text in the
    attention pattern and do not advance the cursor.

    Args:
        layout: layout of one batch.
        after: for each marker, the slot it is inserted behind, ascending.
        patches: for each marker, the slot whose id it takes.

    Shape:
        patches ``(markers,)`` or ``(B, markers)``.
    """
    length = layout.kind.shape[1]
    places = torch.as_tensor(after, device=layout.kind.device)
    patches = patches.expand(layout.kind.shape[0], -1)
    if places.shape[0] != patches.shape[1] or bool((places[1:] < places[:-1]).any()):
        raise ValueError(f"after: expected {patches.shape[1]} ascending slots, got {list(after)}")
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < length:
        raise ValueError(f"after: expected slots in 0..{length - 1}, got {list(after)}")
    # stable sort of [slots, markers] by where they stand gives the new order in one gather
    key = torch.cat([torch.arange(length, device=places.device).double(), places.double() + 0.5])
    order = key.argsort(stable=True)
    source = torch.cat([torch.arange(length, device=places.device).expand(patches.shape[0], -1), patches], dim=1)[
        :, order
    ]
    marker = (order >= length).expand_as(source)
    taken = layout.take(source)
    from dataclasses import replace

    return replace(taken, kind=taken.kind.masked_fill(marker, 0), block=taken.block.masked_fill(marker, -1))
