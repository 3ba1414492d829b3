"""The short way to (t, h, w) ids from token types: by lines of a grid, not by tokens.

Ids are straight along a line of tokens: along text every axis counts up, along a row of an image only the last does. So
lines are laid out first (some thousand numbers) and spread over the tokens by one gather an axis. Same results as the
general way, which stays the reference and takes everything this one does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multimodal.segments import IMAGE, PAD, TEXT, VIDEO

__all__ = ["grid_ids"]


def grid_ids(
    kind: Tensor, sizes: dict[int, Tensor], advance: dict[int, Tensor], start: Tensor | None, reset: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Ids, blocks and cursors of a batch, or ``None`` when it is not made of whole blocks in one piece.

    Args:
        kind: -1 padding, 0 text, 1 image, 2 video.
        sizes: (frames, rows, cols) of the images and of the videos in reading order.
        advance: how far each of them moves the cursor.
        start: cursor before the batch.
        reset: rows and columns do not carry the cursor.

    Shape:
        kind ``(B, L)``, sizes ``(blocks, 3)``, start ``(B,)``; returns ``(3, B, L)``, ``(B, L)`` and ``(B,)``.
    """
    batch, length = kind.shape
    if not kind.numel():
        return None
    device, flat = kind.device, kind.view(-1)
    change = flat[1:] != flat[:-1]
    change[length - 1 :: length] = True  # rows
    heads = torch.cat([flat.new_zeros(1), change.nonzero()[:, 0] + 1])
    kinds = flat[heads]
    if bool((kinds > VIDEO).any()):
        return None
    ends = torch.cat([heads[1:], heads.new_tensor([flat.numel()])])
    images, videos = (_visual(code, heads, ends, kinds, sizes[code]) for code in (IMAGE, VIDEO))
    if images is None or videos is None:
        return None
    plain = kinds <= TEXT
    heads, lengths, kinds = heads[plain], (ends - heads)[plain], kinds[plain]
    one = torch.ones_like(heads)
    # columns: slot, kind, block, rows, cols, lines, advance
    parts = [torch.stack([heads, kinds, one * -1, one, lengths, one, lengths * (kinds == TEXT)])]
    base = 0
    for code, found in ((IMAGE, images), (VIDEO, videos)):
        frames, rows, cols = sizes[code].unbind(1)
        block = torch.arange(len(found), device=device) + base
        table = torch.stack([found, torch.full_like(found, code), block, rows, cols, frames * rows, advance[code]])
        parts.append(table[:, sizes[code].prod(1) > 0])
        base += len(found)
    table = torch.cat(parts, dim=1)
    table = table[:, table[0].argsort()]
    slot, kinds, block, rows, cols, lines, step = table.unbind(0)
    before = step.cumsum(0) - step
    row = slot // length
    first = torch.searchsorted(slot, torch.arange(batch, device=device) * length)
    before = before - before[first][row]
    cursor = torch.zeros(batch, dtype=torch.long, device=device) if start is None else start
    before = before + cursor[row]
    total = cursor.index_add(0, row, step)
    # lines
    owner = torch.repeat_interleave(lines)
    inside = torch.arange(len(owner), device=device) - (lines.cumsum(0) - lines)[owner]
    rows, width, at = rows[owner], cols[owner], before[owner]
    time = inside // rows
    space = at * (kinds[owner] <= TEXT) if reset else at
    columns = space - (slot[owner] + inside * width)
    # tokens; in place, because fresh memory costs more than the arithmetic
    line = torch.repeat_interleave(width.int(), output_size=flat.numel())
    ids = torch.empty(3, flat.numel(), dtype=torch.long, device=device)
    block_of = torch.index_select(block[owner], 0, line)
    for axis, starts in enumerate((at + time, space + inside - time * rows, columns)):
        torch.index_select(starts, 0, line, out=ids[axis])
    ids[2] += torch.arange(flat.numel(), device=device, dtype=torch.int32)
    text = flat == TEXT
    for axis in (0, 1):
        torch.where(text, ids[2], ids[axis], out=ids[axis])
    for at_slot, size in _paddings(slot, kinds, cols):
        ids[:, at_slot : at_slot + size] = 0
    return ids.view(3, batch, length), block_of.view(batch, length), total


def _visual(code: int, heads: Tensor, ends: Tensor, kinds: Tensor, sizes: Tensor) -> Tensor | None:
    """First slot of every block of a kind; ``None`` when some block is not in one piece."""
    ours = kinds == code
    counts = sizes.prod(1)
    stops = counts.cumsum(0)
    lengths = (ends - heads)[ours]
    reached = lengths.cumsum(0)
    expected = int(stops[-1]) if len(stops) else 0
    if (int(reached[-1]) if len(reached) else 0) != expected:
        return None
    if not expected:
        return torch.zeros_like(stops)
    starts = stops - counts
    run = torch.searchsorted(reached, starts, right=True).clamp_max(len(reached) - 1)
    if bool((stops > reached[run]).any()):
        return None
    return heads[ours][run] + starts - (reached - lengths)[run]


def _paddings(slot: Tensor, kinds: Tensor, cols: Tensor) -> list[tuple[int, int]]:
    padding = kinds == PAD
    return list(zip(slot[padding].tolist(), cols[padding].tolist(), strict=True))
