"""The result of a scheme: :class:`PositionLayout`, where every token of a batch is, and how to go on from there.

Three things are kept apart on purpose. The *slot* of a token is its index in the sequence and in the cache; its
*position id* is a rotary coordinate, which may repeat, jump and be fractional; what it may *attend* to is a pattern
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmpos.multimodal.segments import PAD, Segment, tokens_from_segments

if TYPE_CHECKING:
    from mmpos.multimodal.schemes import Scheme

__all__ = ["PositionLayout"]


@dataclass(frozen=True, eq=False)
class PositionLayout:
    """Position ids of a batch, with what is needed to extend, prune, pack and decode.

    Args:
        scheme: the scheme that made the ids.
        ids: position ids; int64, or float64 when the scheme is fractional. Slots of padding hold 0.
        kind: -1 padding, 0 text, 1 image, 2 video, 3 shared text.
        block: number of the image or video a token belongs to, counted over the batch; -1 for text and padding.
        cursor: id the next text token of each row gets.
        level: ring of each visual token where the attention pattern needs it, else ``None``.
        layer_variant: which variant each layer uses; ``None`` when all layers share the one variant.
        sequence: number of the packed sequence each token belongs to, ``None`` when rows are not packed.

    Shape:
        ids ``(V, A, B, L)``, kind, block, sequence ``(B, L)``, cursor ``(V, B)``, level ``(V, B, L)``.
    """

    scheme: Scheme
    ids: Tensor
    kind: Tensor
    block: Tensor
    cursor: Tensor
    level: Tensor | None = None
    layer_variant: tuple[int, ...] | None = None
    sequence: Tensor | None = None

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def mask(self) -> Tensor:
        """Real tokens, ``(B, L)``."""
        return self.kind != PAD

    @property
    def num_variants(self) -> int:
        """Distinct sets of ids over the layers; 1 for most schemes."""
        return self.ids.shape[0]

    def variant_of(self, layer: int) -> int:
        """Which set of ids a layer uses."""
        return 0 if self.layer_variant is None else self.layer_variant[layer]

    def position_ids(self, layer: int = 0) -> Tensor:
        """Ids of a layer, ``(A, B, L)``.

        Never cast them to half precision: 256 and above lose integers, let alone fractions.
        """
        return self.ids[self.variant_of(layer)]

    def rope_deltas(self, *, of_padded: bool = False, layer: int = 0) -> Tensor:
        """``cursor - length`` of each row, ``(B, 1)``.

        Valid length, or the padded one (``of_padded``) as older libraries define it.
        """
        length = self.mask.shape[1] if of_padded else self.mask.sum(1)
        return (self.cursor[self.variant_of(layer)] - length)[:, None]

    def next_ids(self, count: int = 1, layer: int = 0) -> Tensor:
        """Ids of the next ``count`` text tokens, ``(A, B, count)``.

        The cursor and on, never the length of the cache.
        """
        steps = torch.arange(count, device=self.ids.device)
        ids = self.cursor[self.variant_of(layer)][:, None] + steps
        return self.scheme.place_text(ids)

    # -- attention pattern ----------------------------------------------------------------------------------------

    def mask_mod(self, layer: int = 0) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The pattern as ``(batch, head, query slot, key slot) -> allowed``, for FlexAttention or for
        :meth:`dense_mask`.
        """
        real, block, sequence = self.mask, self.block, self.sequence
        level = None if self.level is None else self.level[self.variant_of(layer)]

        def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            visible = k <= q
            if level is not None:
                same = (block[b, q] == block[b, k]) & (block[b, q] >= 0)
                visible = torch.where(same, level[b, k] <= level[b, q], visible)
            if sequence is not None:
                visible = visible & (sequence[b, q] == sequence[b, k])
            return visible & real[b, k]

        return allowed

    def dense_mask(self, layer: int = 0) -> Tensor:
        """The pattern as booleans, ``(B, 1, L, L)`` with queries in rows; ``True`` may attend."""
        batch, length = self.kind.shape
        index = torch.arange(length, device=self.kind.device)
        b = torch.arange(batch, device=self.kind.device)[:, None, None]
        return self.mask_mod(layer)(b, torch.zeros_like(b), index[None, :, None], index[None, None, :])[:, None]

    def variant_masks(self) -> Tensor:
        """The patterns of all variants, ``(B, V, L, L)``; ``(B, 1, L, L)`` where every layer has the same."""
        if self.level is None:
            return self.dense_mask()
        levels = [replace(self, level=level[None], layer_variant=None) for level in self.level]
        return torch.cat([variant.dense_mask() for variant in levels], dim=1)

    @property
    def is_causal(self) -> bool:
        """Whether the pattern is plain causal attention over real tokens."""
        return self.level is None and self.sequence is None

    # -- going on -------------------------------------------------------------------------------------------------

    def extend(self, rows: Sequence[Sequence[Segment]]) -> PositionLayout:
        """Append further segments to every row (a second turn, a new image on a warm cache); earlier ids do not change.

        New slots stand at the end of the padded batch, so an unpadded or left-padded prefill is extended in place.
        """
        if len(rows) != self.kind.shape[0]:
            raise ValueError(f"rows: expected {self.kind.shape[0]} lists of segments, one per sample, got {len(rows)}")
        tokens = tokens_from_segments(rows, device=self.kind.device)
        layers = 1 if self.layer_variant is None else len(self.layer_variant)
        return self.append(self.scheme.lay_out(tokens, cursor=self.cursor, num_layers=layers))

    def append(self, added: PositionLayout) -> PositionLayout:
        """Join a layout whose ids were counted on from the cursor of this one; in a packed layout it goes on with the
        last sequence.
        """
        blocks = int(self.block.max()) + 1 if self.block.numel() else 0
        dtype = torch.promote_types(self.ids.dtype, added.ids.dtype)
        level = None
        if self.level is not None and added.level is not None:
            level = torch.cat([self.level, added.level], dim=-1)
        sequence = None
        if self.sequence is not None:  # more of the last packed sequence
            last = self.sequence.amax(1, keepdim=True)
            sequence = torch.cat([self.sequence, last.expand_as(added.kind)], dim=1)
        return replace(
            self,
            ids=torch.cat([self.ids.to(dtype), added.ids.to(dtype)], dim=-1),
            kind=torch.cat([self.kind, added.kind], dim=1),
            block=torch.cat([self.block, torch.where(added.block >= 0, added.block + blocks, -1)], dim=1),
            cursor=added.cursor,
            level=level,
            sequence=sequence,
        )

    def slots(self, start: int, stop: int) -> PositionLayout:
        """A stretch of consecutive slots; the cursor stays that of the whole."""
        return replace(
            self,
            ids=self.ids[..., start:stop],
            kind=self.kind[:, start:stop],
            block=self.block[:, start:stop],
            level=None if self.level is None else self.level[..., start:stop],
            sequence=None if self.sequence is None else self.sequence[:, start:stop],
        )

    def to(self, device: torch.device | str) -> PositionLayout:
        """The layout on another device. Ids keep their type: in half precision those of long inputs would collide."""
        if isinstance(device, torch.dtype):
            raise ValueError(f"device: expected a device, got {device}; ids stay whole or float64, cast the tables")
        names = ("ids", "kind", "block", "cursor", "level", "sequence")
        moved = {name: value.to(device) for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **moved)

    def rows(self, index: Tensor) -> PositionLayout:
        """Choose or repeat rows of the batch (beams, several continuations of one prompt)."""
        return replace(
            self,
            ids=self.ids[:, :, index],
            kind=self.kind[index],
            block=self.block[index],
            cursor=self.cursor[:, index],
            level=None if self.level is None else self.level[:, index],
            sequence=None if self.sequence is None else self.sequence[index],
        )

    def take(self, keep: Tensor) -> PositionLayout:
        """Keep some slots of each row, in the order given; ids stay what they were, and so does the cursor.

        Args:
            keep: slots ``(K,)`` or ``(B, K)``.
        """
        if keep.is_floating_point() or keep.dtype == torch.bool or keep.dim() not in (1, 2):
            raise ValueError(f"keep: expected integer slots (K,) or (B, K), got {keep.dtype} {tuple(keep.shape)}")
        keep = keep.expand(self.kind.shape[0], -1)
        gather = lambda t: t.gather(-1, keep.expand(*t.shape[:-1], keep.shape[-1]))  # noqa: E731
        return replace(
            self,
            ids=gather(self.ids),
            kind=gather(self.kind),
            block=gather(self.block),
            level=None if self.level is None else gather(self.level),
            sequence=None if self.sequence is None else gather(self.sequence),
        )

    def compact(self) -> PositionLayout:
        """Renumber the kept real tokens of each row 0, 1, 2, .

        What GAP shows to be harmful, offered so that it can be measured.
        """
        if self.sequence is not None:
            raise ValueError("layout: packed rows hold several sequences; call compact() before pack()")
        ids = (self.mask.long().cumsum(1) - 1).clamp_min(0)
        ids = self.scheme.place_text(ids)[None].expand(self.num_variants, -1, -1, -1)
        return replace(self, ids=ids.to(self.ids.dtype), cursor=self.mask.sum(1).expand(self.num_variants, -1))

    def pad_to(self, length: int, side: str = "right", value: int = 0) -> PositionLayout:
        """Add padding slots on one side, with ids of ``value``; ids of real tokens do not change."""
        extra = length - self.kind.shape[1]
        if extra < 0 or side not in ("left", "right"):
            raise ValueError(
                f"length, side: expected at least {self.kind.shape[1]} and 'left' or 'right', got {length}, {side!r}"
            )

        def pad(t: Tensor, fill: int) -> Tensor:
            return torch.nn.functional.pad(t, (extra, 0) if side == "left" else (0, extra), value=fill)

        return replace(
            self,
            ids=pad(self.ids, value),
            kind=pad(self.kind, PAD),
            block=pad(self.block, -1),
            level=None if self.level is None else pad(self.level, 0),
            sequence=None if self.sequence is None else pad(self.sequence, -1),
        )

    def pack(self) -> PositionLayout:
        """All rows in one row without padding; ids restart with each sequence, and sequences do not see each other.

        :meth:`extend` goes on with the last sequence that has tokens.
        """
        if self.sequence is not None:
            raise ValueError("layout: it is packed already; pack all rows at once")
        batch = self.kind.shape[0]
        filled = self.mask.any(1).nonzero()[:, 0]
        last = int(filled[-1]) if len(filled) else batch - 1
        real = self.mask.flatten()
        row = torch.arange(batch, device=self.kind.device)[:, None].expand_as(self.kind).flatten()[real]
        flat = lambda t: t.flatten(-2)[..., real].unsqueeze(-2)  # noqa: E731
        return replace(
            self,
            ids=flat(self.ids),
            kind=flat(self.kind),
            block=flat(self.block),
            level=None if self.level is None else flat(self.level),
            sequence=row[None],
            cursor=self.cursor[:, last : last + 1],
        )

    def text_only(self) -> bool:
        """Whether no row holds an image or a video; every scheme is then ordinary 1-D RoPE."""
        return not bool((self.block >= 0).any())
