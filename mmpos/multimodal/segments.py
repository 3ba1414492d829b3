"""What a multimodal sequence is made of, and the flat form all position ids are computed from.

The input of every scheme is either segments (:class:`Text`, :class:`Image`, :class:`Video`, :class:`Tiles`) or token
types with grids and a mask. Token ids, start and end tokens, and embeddings are never looked at: that is where
published builders go wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Image", "Segment", "Text", "Tiles", "Tokens", "Video", "tokens_from_segments", "tokens_from_types"]

#: kinds of token
PAD, TEXT, IMAGE, VIDEO, SHARED_TEXT = -1, 0, 1, 2, 3


@dataclass(frozen=True)
class Text:
    """``length`` text tokens.

    ``shared`` text does not advance the counter, so that several suffixes may start at one place.
    """

    length: int
    shared: bool = False


@dataclass(frozen=True)
class Image:
    """``rows x cols`` visual tokens in raster order, sizes as the decoder sees them (after any merge)."""

    rows: int
    cols: int
    step: float | None = None
    """Own id step of this image, for schemes with fractional steps (V2PE draws one per image in training)."""


@dataclass(frozen=True)
class Video:
    """``frames x rows x cols`` visual tokens, time slowest. ``times`` are the frame times in seconds, if known; only
    what passed since the first one counts (schemes with absolute time have ``origin="clock"`` for the rest).
    """

    frames: int
    rows: int
    cols: int
    times: Sequence[float] | None = None
    step: float | None = None
    """Own time scale of this video (HoPE draws one per video in training) or own id step."""


@dataclass(frozen=True)
class Tiles:
    """A high-resolution image cut into ``tile_rows x tile_cols`` tiles of ``side x side`` tokens, row by row, then a
    thumbnail.

    One tile alone is the whole image and has no thumbnail.
    """

    tile_rows: int
    tile_cols: int
    side: int
    thumbnail: bool = True
    step: float | None = None
    """Own id step of this image, one for all its tiles."""


Segment = Text | Image | Video | Tiles


@dataclass(frozen=True, eq=False)
class Tokens:
    """The flat form: one entry per slot of a padded batch, and one row per visual block of the whole batch.

    Shape:
        kind, block, local ``(B, L)``: kind of token, index of its block (-1 for text and padding), raster index
        inside the block (or inside shared text); sizes ``(blocks, 3)`` as (frames, rows, cols); tiles ``(blocks, 2)``
        tile rows and columns, 0 when not tiled; times ``(sum of frames,)`` with ``time_start (blocks,)``, seconds, and
        interval ``(blocks,)`` where frames are equally far apart, else NaN, all float64; step ``(blocks,)``, NaN where
        the scheme decides.
    """

    kind: Tensor
    block: Tensor
    local: Tensor
    sizes: Tensor
    tiles: Tensor
    time_start: Tensor
    times: Tensor
    interval: Tensor
    step: Tensor

    @property
    def mask(self) -> Tensor:
        """Real tokens, ``(B, L)``."""
        return self.kind != PAD


def tokens_from_segments(
    rows: Sequence[Sequence[Segment]],
    *,
    padding_side: str = "right",
    length: int | None = None,
    device: torch.device | str | None = None,
) -> Tokens:
    """Lay out one list of segments per sample, padded on either side to the longest (or to ``length``).

    Example:
        >>> tokens = tokens_from_segments([[Text(2), Image(2, 3)], [Text(1)]])
        >>> tokens.kind[1].tolist()
        [0, -1, -1, -1, -1, -1, -1, -1]
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side: expected 'left' or 'right', got {padding_side!r}")
    kinds, blocks, locals_ = [], [], []
    sizes: list[tuple[int, int, int]] = []
    tiles: list[tuple[int, int]] = []
    times: list[float] = []
    time_start: list[int] = []
    steps: list[float] = []
    for number, row in enumerate(rows):
        kind_parts, block_parts, local_parts = [], [], []
        for segment in row:
            if isinstance(segment, Text):
                _check_sizes(number, segment, segment.length, minimum=0)
                count, index = segment.length, -1
                kind = SHARED_TEXT if segment.shared else TEXT
            else:
                kind = VIDEO if isinstance(segment, Video) else IMAGE
                index = len(sizes)
                if isinstance(segment, Image):
                    size, tile = (1, segment.rows, segment.cols), (0, 0)
                elif isinstance(segment, Video):
                    size, tile = (segment.frames, segment.rows, segment.cols), (0, 0)
                elif isinstance(segment, Tiles):
                    extra = 1 if segment.thumbnail and segment.tile_rows * segment.tile_cols > 1 else 0
                    size = (segment.tile_rows * segment.tile_cols + extra, segment.side, segment.side)
                    tile = (segment.tile_rows, segment.tile_cols)
                else:
                    raise ValueError(f"rows[{number}]: expected Text, Image, Video or Tiles, got {segment!r}")
                _check_sizes(number, segment, *size)
                count = size[0] * size[1] * size[2]
                sizes.append(size)
                tiles.append(tile)
                time_start.append(len(times))
                steps.append(float("nan") if segment.step is None else float(segment.step))
                given = getattr(segment, "times", None)
                if given is not None and len(given) != size[0]:
                    raise ValueError(f"rows[{number}]: {segment!r} has {size[0]} frames but {len(given)} times")
                times.extend(float(t) for t in (given if given is not None else [float("nan")] * size[0]))
            kind_parts.append(torch.full((count,), kind))
            block_parts.append(torch.full((count,), index))
            local_parts.append(torch.arange(count))
        empty = torch.zeros(0, dtype=torch.long)
        kinds.append(torch.cat(kind_parts) if kind_parts else empty)
        blocks.append(torch.cat(block_parts) if block_parts else empty)
        locals_.append(torch.cat(local_parts) if local_parts else empty)
    longest = max((len(kind) for kind in kinds), default=0)
    if length is not None and length < longest:
        raise ValueError(f"length: expected at least {longest}, the longest row, got {length}")
    longest = longest if length is None else length

    def pad(parts: list[Tensor], value: int) -> Tensor:
        out = torch.full((len(parts), longest), value)
        for number, part in enumerate(parts):
            if len(part):
                out[number, slice(longest - len(part), None) if padding_side == "left" else slice(0, len(part))] = part
        return out.to(device) if device is not None else out

    return Tokens(
        kind=pad(kinds, PAD),
        block=pad(blocks, -1),
        local=pad(locals_, 0),
        sizes=torch.tensor(sizes, device=device, dtype=torch.long).reshape(-1, 3),
        tiles=torch.tensor(tiles, device=device, dtype=torch.long).reshape(-1, 2),
        time_start=torch.tensor(time_start, device=device, dtype=torch.long),
        times=torch.tensor(times, device=device, dtype=torch.float64),
        interval=torch.full((len(sizes),), float("nan"), device=device, dtype=torch.float64),
        step=torch.tensor(steps, device=device, dtype=torch.float64),
    )


def _check_sizes(row: int, segment: Segment, *sizes: int, minimum: int = 1) -> None:
    if any(size < minimum for size in sizes):
        raise ValueError(f"rows[{row}]: expected sizes of at least {minimum}, got {segment!r}")


def tokens_from_types(
    types: Tensor,
    *,
    image_grids: Tensor | None = None,
    video_grids: Tensor | None = None,
    mask: Tensor | None = None,
    merge_size: int = 1,
    temporal_merge_size: int = 1,
    split_frames: bool = False,
    seconds_per_frame: Tensor | Sequence[float] | None = None,
    steps: Tensor | None = None,
) -> Tokens:
    """Read a batch from token types and grids, as Hugging Face processors give them.

    Blocks are told apart by their grids, not by the text between them, so adjacent images and sequences that end in
    an image are fine.

    Args:
        types: 0 text, 1 image, 2 video.
        image_grids: (frames, rows, cols) of each image before the merge, in reading order over the whole batch.
        video_grids: the same for videos.
        mask: real tokens; padding may be on either side.
        merge_size: patches merged along each spatial side.
        temporal_merge_size: frames of ``video_grids`` merged into one (ERNIE).
        split_frames: each frame of a video is a block of its own (timestamps stand between frames, Qwen3-VL).
        seconds_per_frame: seconds between frames of each video, for schemes with absolute time.
        steps: own step of each image and then of each video, NaN where the scheme decides; frames share that of their
            video.

    Shape:
        types, mask ``(B, L)``; grids ``(blocks, 3)``; steps ``(images + videos,)``.
    """
    kind = kinds_of(types, mask)
    device = types.device
    grids: dict[int, Tensor] = {}
    times: dict[int, Tensor] = {}
    intervals: dict[int, Tensor] = {}
    repeats: dict[int, Tensor] = {}
    for code, given in ((IMAGE, image_grids), (VIDEO, video_grids)):
        grid = (
            torch.zeros(0, 3, dtype=torch.long, device=device)
            if given is None
            else given.to(device).long().reshape(-1, 3)
        )
        temporal = temporal_merge_size if code == VIDEO else 1
        frames = grid[:, 0] // temporal
        seconds = torch.full((len(grid),), float("nan"), device=device, dtype=torch.float64)
        if code == VIDEO and seconds_per_frame is not None:
            seconds = torch.as_tensor(seconds_per_frame, dtype=torch.float64).to(device)
            if seconds.shape != (len(grid),):
                raise ValueError(
                    f"seconds_per_frame: expected one value per video, {len(grid)}, got {tuple(seconds.shape)}"
                )
        grid = torch.stack([frames, grid[:, 1] // merge_size, grid[:, 2] // merge_size], dim=1)
        repeats[code] = torch.ones_like(frames)
        if code == VIDEO and split_frames:
            repeats[code] = frames
            seconds = seconds.repeat_interleave(grid[:, 0]) * 0
            grid = grid.repeat_interleave(grid[:, 0], dim=0)
            grid = torch.cat([torch.ones_like(grid[:, :1]), grid[:, 1:]], dim=1)
        grids[code] = grid
        owner = torch.repeat_interleave(grid[:, 0])
        start = grid[:, 0].cumsum(0) - grid[:, 0]
        frame = torch.arange(len(owner), device=device) - start[owner]
        times[code], intervals[code] = frame * seconds[owner], seconds
    block = torch.full_like(kind, -1)
    local = torch.zeros_like(kind)
    for code, base in ((IMAGE, 0), (VIDEO, len(grids[IMAGE]))):
        counts = grids[code].prod(1)
        ends = counts.cumsum(0)
        places = (kind == code).view(-1).nonzero()[:, 0]
        expected = int(ends[-1]) if len(ends) else 0
        if len(places) != expected:
            _report_mismatch(kind, code, counts, expected)
        owner = torch.repeat_interleave(counts)
        inside = torch.arange(len(places), device=device) - (ends - counts).index_select(0, owner)
        block.view(-1).index_copy_(0, places, owner + base if base else owner)
        local.view(-1).index_copy_(0, places, inside)
        # a block stands in one piece when its last slot is as far from its first as it is long, in the same row
        starts, stops = (ends - counts)[counts > 0], ends[counts > 0] - 1
        first, last = places[starts], places[stops]
        split = (last - first != stops - starts) | (last // kind.shape[1] != first // kind.shape[1])
        if bool(split.any()):  # padding inside a row is legal, other tokens are not
            _check_contiguous(kind, places, inside, code)
    sizes = torch.cat([grids[IMAGE], grids[VIDEO]])
    frames = sizes[:, 0]
    blocks = torch.cat([repeats[IMAGE], repeats[VIDEO]])  # of each grid
    if steps is None:
        steps = torch.full((len(blocks),), float("nan"))
    elif steps.shape != blocks.shape:
        raise ValueError(f"steps: expected one for each of {len(blocks)} images and videos, got {tuple(steps.shape)}")
    return Tokens(
        kind=kind,
        block=block,
        local=local,
        sizes=sizes,
        tiles=torch.zeros(len(sizes), 2, dtype=torch.long, device=device),
        time_start=frames.cumsum(0) - frames,
        times=torch.cat([times[IMAGE], times[VIDEO]]),
        interval=torch.cat([intervals[IMAGE], intervals[VIDEO]]),
        step=steps.to(device, torch.float64).repeat_interleave(blocks),
    )


def kinds_of(types: Tensor, mask: Tensor | None) -> Tensor:
    """Token types with padding marked, int64. Shape: ``(B, L)``."""
    if types.dim() != 2:
        raise ValueError(f"types: expected (B, L), got {tuple(types.shape)}")
    if mask is not None and mask.shape != types.shape:
        raise ValueError(f"mask: expected {tuple(types.shape)}, got {tuple(mask.shape)}")
    kind = types.long().contiguous()
    low, high = torch.aminmax(kind) if types.numel() else (TEXT, TEXT)
    if not 0 <= int(low) <= int(high) <= VIDEO:
        row, slot = ((kind < 0) | (kind > VIDEO)).nonzero()[0].tolist()
        raise ValueError(
            f"types: expected 0 (text), 1 (image) or 2 (video), got {int(kind[row, slot])} in row {row}; give tokens "
            "of other kinds, such as audio, the type of text"
        )
    if mask is not None:
        padding = mask == 0
        if bool(padding.any()):
            kind = kind.masked_fill(padding, PAD)
    return kind


def check_rows(mask: Tensor | None) -> None:
    """Raise where a row of a prompt is nothing but padding."""
    if mask is None or not mask.shape[-1] or bool(((mask[:, 0] != 0) | (mask[:, -1] != 0)).all()):
        return  # padding is on one side as a rule: a look at both ends is enough
    empty = (mask == 0).all(-1).nonzero()[:, 0]
    if len(empty):
        raise ValueError(
            f"mask: row {int(empty[0])} has no real token; 1 marks tokens and 0 padding, check that it is not the "
            "other way round, and leave empty rows out"
        )


def _report_mismatch(kind: Tensor, code: int, counts: Tensor, expected: int) -> None:
    name = "image" if code == IMAGE else "video"
    per_row = (kind == code).sum(1).tolist()
    raise ValueError(
        f"{name}_grids: the {len(counts)} grids hold {expected} tokens "
        f"({counts.tolist()[:8]}{' ...' if len(counts) > 8 else ''}), but the "
        f"batch has {sum(per_row)} {name} tokens (by row: {per_row}); check merge_size, the mask, and that no row "
        f"was cut inside a {name}"
    )


def _check_contiguous(kind: Tensor, places: Tensor, inside: Tensor, code: int) -> None:
    """A block must stand in one row without other real tokens inside."""
    rank = ((kind != PAD).flatten().cumsum(0) - 1)[places]
    row = places // kind.shape[1]
    broken = (inside[1:] > 0) & ((rank[1:] - rank[:-1] != 1) | (row[1:] != row[:-1]))
    if bool(broken.any()):
        at = int(broken.nonzero()[0, 0]) + 1
        name = "image" if code == IMAGE else "video"
        number = int((inside[: at + 1] == 0).sum()) - 1
        raise ValueError(
            f"types: {name} {number} of the batch is interrupted in row {int(row[at])} after {int(inside[at])} "
            f"tokens; its grid asks for "
            "that many tokens in one piece (videos with timestamps between frames need split_frames=True)"
        )
