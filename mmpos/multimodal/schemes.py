"""Schemes: the four independent choices (block layout, text rule, cursor rule, frequency allocation), and the
published ones by name.

A named scheme is a row of :data:`SCHEMES`; a user may change any choice: ``scheme("mrope", cursor="spatial")``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmpos.multimodal import allocation as alloc
from mmpos.multimodal._grid import grid_ids
from mmpos.multimodal.allocation import Allocation
from mmpos.multimodal.blocks import BLOCK_LAYOUTS, cells_of, rings
from mmpos.multimodal.cursor import CURSOR_RULES
from mmpos.multimodal.layout import PositionLayout
from mmpos.multimodal.segments import (
    IMAGE,
    PAD,
    SHARED_TEXT,
    TEXT,
    VIDEO,
    Segment,
    Text,
    Tokens,
    check_rows,
    kinds_of,
    tokens_from_segments,
    tokens_from_types,
)

__all__ = ["SCHEMES", "Scheme", "list_schemes", "scheme"]

AXES = {
    "raster": 1,
    "mirrored": 4,
    "fractional": 1,
    "concentric": 1,
    "thumbnail": 1,
    "shared": 1,
    "by_row": 1,
    "by_column": 1,
}
TEXT_RULES = ("all", "first")
STEPPED = ("fractional", "diagonal")


@dataclass(frozen=True)
class Scheme:
    """One way of telling a decoder where its tokens are.

    Args:
        name: name of the scheme.
        block: block layout, a key of ``BLOCK_LAYOUTS``.
        block_options: options of the layout.
        text: ``all`` puts a text token on the same id of every axis, ``first`` on the first axis only, the others 0.
        cursor: cursor rule, a key of ``CURSOR_RULES``.
        reset: axes 1 and up of a block do not carry the cursor (spatial reset).
        allocation: name of the frequency allocation.
        allocation_options: options of the allocation.
        split_frames: whether the scheme expects each frame of a video as a block of its own.
        train_steps: steps of which training draws one for every image and video (V2PE, HoPE); evaluation always takes
            the one of ``block_options``.
        layers: how layers differ: ``same``, ``pyramid`` (PyPE) or ``alternate`` (Circle-RoPE's AGE).
        layer_options: options of the layer rule.
        source: paper and arXiv id.
    """

    name: str
    block: str = "grid"
    block_options: Mapping[str, Any] = field(default_factory=dict)
    text: str = "all"
    cursor: str = "max"
    reset: bool = False
    allocation: str = "chunked"
    allocation_options: Mapping[str, Any] = field(default_factory=dict)
    split_frames: bool = False
    train_steps: tuple[float, ...] = ()
    layers: str = "same"
    layer_options: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        for argument, value, known in (
            ("block", self.block, BLOCK_LAYOUTS),
            ("cursor", self.cursor, CURSOR_RULES),
            ("text", self.text, TEXT_RULES),
            ("allocation", self.allocation, ALLOCATIONS),
            ("layers", self.layers, ("same", "pyramid", "alternate")),
        ):
            if value not in known:
                raise ValueError(f"{argument}: expected one of {sorted(known)}, got {value!r}")
        if self.train_steps and (self.block not in STEPPED or min(self.train_steps) <= 0):
            raise ValueError(
                f"train_steps: expected positive steps of a layout that has a step ({', '.join(STEPPED)}), got "
                f"{self.train_steps} with block {self.block!r}; give train_steps=()"
            )

    @property
    def axes(self) -> int:
        """Axes of the ids."""
        return AXES.get(self.block, 3)

    # -- ids ------------------------------------------------------------------------------------------------------

    def layout(
        self,
        rows: Sequence[Sequence[Segment]],
        *,
        padding_side: str = "right",
        length: int | None = None,
        num_layers: int = 1,
    ) -> PositionLayout:
        """Ids of a batch given as segments, one list per sample.

        Example:
            >>> from mmpos.multimodal import Image, Text, scheme
            >>> scheme("mrope").layout([[Text(2), Image(2, 3), Text(1)]]).position_ids()[:, 0].tolist()
            [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
        """
        return self.lay_out(tokens_from_segments(rows, padding_side=padding_side, length=length), num_layers=num_layers)

    def draw_steps(self, count: int, generator: torch.Generator | None = None) -> Tensor | None:
        """Steps of ``count`` images and videos of a training batch; ``None`` where the scheme draws none.

        Shape: ``(count,)``, float64.
        """
        if not self.train_steps:
            return None
        drawn = torch.randint(len(self.train_steps), (count,), generator=generator)
        return torch.tensor(self.train_steps, dtype=torch.float64)[drawn]

    def randomise(
        self, rows: Sequence[Sequence[Segment]], generator: torch.Generator | None = None
    ) -> list[list[Segment]]:
        """Segments of a training batch: every image and video gets a drawn step, unless it has one of its own.

        Example:
            >>> from mmpos.multimodal import Image, Text, scheme
            >>> rows = scheme("v2pe").randomise([[Text(2), Image(2, 3)]], torch.Generator().manual_seed(0))
            >>> rows[0][1].step in scheme("v2pe").train_steps
            True
        """
        steps = self.draw_steps(sum(len(row) for row in rows), generator)
        if steps is None:
            return [list(row) for row in rows]
        each = iter(steps.tolist())

        def drawn(segment: Segment, step: float) -> Segment:
            return segment if isinstance(segment, Text) or segment.step is not None else replace(segment, step=step)

        return [[drawn(segment, next(each)) for segment in row] for row in rows]

    def layout_from_types(
        self, types: Tensor, *, num_layers: int = 1, cursor: Tensor | None = None, **grids: Any
    ) -> PositionLayout:
        """Ids of a batch given as token types and grids, from ``cursor (V, B)`` on; see
        :func:`~mmpos.multimodal.segments.tokens_from_types`.
        """
        grids.setdefault("split_frames", self.split_frames)
        if cursor is None:  # a turn of a conversation may leave rows without a word
            check_rows(grids.get("mask"))
        short = self._short_way(types, cursor, **grids)
        return short or self.lay_out(tokens_from_types(types, **grids), cursor=cursor, num_layers=num_layers)

    def _short_way(
        self,
        types: Tensor,
        cursor: Tensor | None,
        *,
        image_grids: Tensor | None = None,
        video_grids: Tensor | None = None,
        mask: Tensor | None = None,
        merge_size: int = 1,
        split_frames: bool = False,
        **others: Any,
    ) -> PositionLayout | None:
        """Plain grids with whole ids, by lines of tokens; ``None`` where only the general way leads."""
        plain = self.block == "grid" and not self.block_options and self.text == "all" and self.layers == "same"
        if not plain or others.get("temporal_merge_size", 1) != 1:
            return None
        if self.cursor not in ("max", "spatial", "extent") or (cursor is not None and cursor.is_floating_point()):
            return None
        kind = kinds_of(types, mask)
        sizes, advance = {}, {}
        for code, given in ((IMAGE, image_grids), (VIDEO, video_grids)):
            size = torch.zeros(0, 3, dtype=torch.long) if given is None else given.long().reshape(-1, 3)
            size = torch.stack([size[:, 0], size[:, 1] // merge_size, size[:, 2] // merge_size], dim=1)
            if code == VIDEO and split_frames:
                size = size.repeat_interleave(size[:, 0], dim=0)
                size[:, 0] = 1
            size = size.to(types.device)
            sizes[code] = size
            advance[code] = (size[:, 1:] if self.cursor == "spatial" else size).amax(1)
        found = grid_ids(kind, sizes, advance, None if cursor is None else cursor[0], self.reset)
        if found is None:
            return None
        ids, block, total = found
        return PositionLayout(scheme=self, ids=ids[None], kind=kind, block=block, cursor=total[None])

    def lay_out(self, tokens: Tokens, *, cursor: Tensor | None = None, num_layers: int = 1) -> PositionLayout:
        """Ids of flat tokens, from ``cursor (V, B)`` on (default 0)."""
        variants, layer_variant = self.variants(num_layers)
        places, cells = cells_of(tokens)
        ends = cells.ends  # the last token of each block carries its whole advance
        last, ended = places[ends], cells.block[ends]
        real_text = tokens.kind == TEXT
        padding = tokens.kind == PAD
        has_shared = bool((tokens.kind == SHARED_TEXT).any())
        ids, cursors, levels = [], [], []
        for number, variant in enumerate(variants):
            offsets = BLOCK_LAYOUTS[variant.block](cells, **variant.block_options)
            advance = CURSOR_RULES[variant.cursor](cells, offsets)
            dtype = torch.float64 if offsets.is_floating_point() or advance.is_floating_point() else torch.int64
            start = None if cursor is None else cursor[number]
            if start is not None and start.is_floating_point():
                dtype = torch.float64
            step = real_text.to(dtype)
            step.view(-1)[last] = advance.to(dtype)[ended]
            total = step.cumsum(1)
            before = total - step  # exclusive sum: the cursor each token finds, equal over a block
            if start is not None:
                before += start[:, None].to(dtype)
            carried = before.view(-1).index_select(0, places)
            if has_shared:
                before = before + torch.where(tokens.kind == SHARED_TEXT, tokens.local, 0)
            out = self.place_text(before.masked_fill_(padding, 0)).clone(memory_format=torch.contiguous_format)
            for axis in range(out.shape[0]):
                carries = axis == 0 or not variant.reset
                values = offsets[axis].to(dtype)
                out[axis].view(-1).index_copy_(0, places, values + carried if carries else values)
            ids.append(out)
            cursors.append(step.sum(1) + (0 if start is None else start.to(dtype)))
            if variant.block == "concentric":
                level = torch.zeros_like(tokens.kind)
                level.view(-1)[places] = rings(cells, **variant.block_options)
                levels.append(level)
        wide = torch.float64 if any(i.is_floating_point() for i in ids) else torch.int64
        return PositionLayout(
            scheme=self,
            ids=torch.stack([i.to(wide) for i in ids]) if len(ids) > 1 else ids[0][None],
            kind=tokens.kind,
            block=tokens.block,
            cursor=torch.stack([c.to(wide) for c in cursors]),
            level=torch.stack(levels) if levels else None,
            layer_variant=layer_variant,
        )

    def lay_out_text(self, real: Tensor, *, cursor: Tensor | None = None, num_layers: int = 1) -> PositionLayout:
        """Ids of a stretch that holds nothing but text and padding: what every decoding step needs, and nothing more.

        Shape: real ``(B, n)``, true for tokens; cursor ``(V, B)``.
        """
        variants, layer_variant = self.variants(num_layers)
        step = real.long()
        before = step.cumsum(1) - step
        if cursor is None:
            cursor = torch.zeros(len(variants), real.shape[0], dtype=torch.long, device=real.device)
        flat = (before + cursor[..., None]).masked_fill(~real, 0)
        concentric = any(variant.block == "concentric" for variant in variants)
        return PositionLayout(
            scheme=self,
            ids=torch.stack([self.place_text(ids) for ids in flat]),
            kind=step - 1,  # 0 text, -1 padding
            block=torch.full_like(step, -1),
            cursor=cursor + step.sum(1),
            level=step.new_zeros(len(variants), *step.shape) if concentric else None,
            layer_variant=layer_variant,
        )

    def place_text(self, ids: Tensor) -> Tensor:
        """Put text ids on the axes. Shape: ``(B, n)`` to ``(A, B, n)``."""
        if self.text == "all" or self.axes == 1:
            return ids.expand(self.axes, *ids.shape)
        return torch.cat([ids[None], torch.zeros_like(ids).expand(self.axes - 1, *ids.shape)])

    def variants(self, num_layers: int) -> tuple[list[Scheme], tuple[int, ...] | None]:
        """The distinct schemes over the layers of a model, and which one each layer uses (``None`` for one for all)."""
        if self.layers == "same":
            return [self], None
        if self.layers == "pyramid":
            jump = int(self.layer_options.get("jump", 4))
            drops = [layer // jump for layer in range(num_layers)]
            unique = sorted(set(drops))
            variants = [
                replace(self, layers="same", block_options={**self.block_options, "drop": drop}) for drop in unique
            ]
            return variants, tuple(unique.index(drop) for drop in drops)
        # Circle-RoPE's alternation: ring ids in some layers, M-RoPE ids in the others, each with its own cursor
        strategy = int(self.layer_options.get("strategy", 4))
        half = num_layers // 2
        on_ring = {
            1: [True] * num_layers,
            2: [layer < half for layer in range(num_layers)],
            3: [layer >= half for layer in range(num_layers)],
            4: [layer % 2 == 0 for layer in range(num_layers)],
        }
        if strategy not in on_ring:
            raise ValueError(f"strategy: expected one of {sorted(on_ring)}, got {strategy}")
        ring = replace(self, layers="same")
        grid = replace(self, layers="same", block="grid", block_options={}, cursor="max")
        return [ring, grid], tuple(0 if ring_here else 1 for ring_here in on_ring[strategy])

    # -- frequencies ----------------------------------------------------------------------------------------------

    def allocate(self, pairs: int, **options: Any) -> Allocation:
        """Frequency allocation for heads with ``pairs`` rotary pairs; options override those of the scheme.

        Default sections are those of the paper scaled to ``pairs``.
        """
        merged = {**self.allocation_options, **options}
        build = ALLOCATIONS[self.allocation]
        if self.allocation in ("chunked", "interleaved", "diagonal_last") and "sections" in merged:
            sections = merged["sections"]
            if "sections" not in options and sum(sections) != pairs:
                merged["sections"] = scaled_sections(sections, pairs)
        return build(pairs, **merged)


def scaled_sections(sections: Sequence[int], pairs: int) -> tuple[int, ...]:
    """Sections of a paper (for its own head size) in the same proportions for another one; h and w stay equal."""
    total = sum(sections)
    spatial = round(pairs * sections[1] / total)
    return (pairs - 2 * spatial, spatial, spatial)


def _separate(pairs: int, axes_dim: Sequence[int]) -> Allocation:
    made = alloc.separate(axes_dim)
    if made.pairs != pairs:
        raise ValueError(f"axes_dim: expected channels that sum to {2 * pairs}, got {tuple(axes_dim)}")
    return made


ALLOCATIONS: Mapping[str, Any] = {
    "single": alloc.single,
    "chunked": alloc.chunked,
    "interleaved": alloc.interleaved,
    "cyclic": alloc.cyclic,
    "diagonal_last": alloc.diagonal_last,
    "lumos": alloc.lumos,
    "separate": _separate,
    "by_head": alloc.by_head,
}

_QWEN2 = {"sections": (16, 24, 24)}
_QWEN3 = {"sections": (24, 20, 20)}

SCHEMES: dict[str, Scheme] = {
    row.name: row
    for row in (
        Scheme(
            "raster",
            block="raster",
            cursor="count",
            allocation="single",
            source="the ids of the language model: LLaVA, arXiv 2304.08485",
        ),
        Scheme("mrope", allocation_options=_QWEN2, source="Qwen2-VL, arXiv 2409.12191"),
        Scheme(
            "mrope_hf5",
            cursor="spatial",
            allocation_options=_QWEN2,
            source="arXiv 2409.12191 in transformers 5",
        ),
        Scheme("mrope_time", block="absolute_time", allocation_options=_QWEN2, source="Qwen2.5-VL, arXiv 2502.13923"),
        Scheme(
            "mrope_interleave",
            cursor="spatial",
            allocation="interleaved",
            allocation_options=_QWEN3,
            split_frames=True,
            source="Qwen3-VL; Huang et al., arXiv 2510.23095",
        ),
        Scheme(
            "mrope_interleave_reset",
            cursor="extent",
            reset=True,
            allocation="interleaved",
            allocation_options=_QWEN3,
            split_frames=True,
            source="Huang et al., arXiv 2510.23095",
        ),
        Scheme("imrope", cursor="spatial", allocation="cyclic", split_frames=True, source="I-MRoPE, arXiv 2510.03230"),
        Scheme(
            "mhrope",
            cursor="extent",
            reset=True,
            allocation="by_head",
            allocation_options={"kv_heads": 8, "head_sections": (2, 3, 3)},
            split_frames=True,
            source="Huang et al., arXiv 2510.23095",
        ),
        Scheme(
            "videorope",
            block="diagonal",
            cursor="time",
            allocation="diagonal_last",
            allocation_options=_QWEN2,
            source="Wei et al., arXiv 2502.05173",
        ),
        Scheme(
            "hope",
            block="diagonal",
            block_options={"scale": 1.0},
            train_steps=(0.5, 0.75, 1.0, 1.25, 1.5),
            cursor="time",
            allocation="diagonal_last",
            allocation_options={**_QWEN2, "rotate_time": False},
            source="Li et al., arXiv 2505.20444",
        ),
        Scheme(
            "vrope",
            block="mirrored",
            cursor="corner_sums",
            allocation="cyclic",
            allocation_options={"axes": 4},
            source="Liu et al., arXiv 2502.11664",
        ),
        Scheme("circlerope", block="circle", allocation_options=_QWEN2, source="Wang et al., arXiv 2505.16416"),
        Scheme(
            "circlerope_age",
            block="circle",
            allocation_options=_QWEN2,
            layers="alternate",
            source="Wang et al., arXiv 2505.16416, alternating layers",
        ),
        Scheme("omnirope", cursor="extent", reset=True, allocation_options=_QWEN2, source="OmniGen2, arXiv 2506.18871"),
        Scheme(
            "ilrope", cursor="extent", reset=True, text="first", allocation="cyclic", source="Mogao, arXiv 2505.05472"
        ),
        Scheme("mmrope", allocation="lumos", source="Lumos-1, arXiv 2507.08801"),
        Scheme(
            "v2pe",
            block="fractional",
            train_steps=tuple(2.0**-k for k in range(8, -1, -1)),
            cursor="ceil",
            allocation="single",
            source="V2PE, arXiv 2412.09616",
        ),
        Scheme(
            "v2pe_span",
            block="fractional",
            block_options={"span": 16.0},
            cursor="ceil",
            allocation="single",
            source="V2PE with a fixed span per block, arXiv 2412.09616",
        ),
        Scheme("cca", block="concentric", allocation="single", source="Concentric causal attention, arXiv 2410.15926"),
        Scheme("pype", block="concentric", layers="pyramid", allocation="single", source="PyPE, arXiv 2501.10967"),
        Scheme("rope_dhr", block="thumbnail", allocation="single", source="CoMemo, arXiv 2506.06279"),
        Scheme("share_all", block="shared", allocation="single", source="MouSi, arXiv 2401.17221"),
        Scheme("share_by_row", block="by_row", allocation="single", source="MouSi, arXiv 2401.17221"),
        Scheme("share_by_column", block="by_column", allocation="single", source="MouSi, arXiv 2401.17221"),
    )
}


def list_schemes() -> list[str]:
    """Names of all schemes, sorted."""
    return sorted(SCHEMES)


def scheme(name: str, **changes: Any) -> Scheme:
    """A named scheme, with any of its choices changed.

    Example:
        >>> scheme("mrope", cursor="spatial").cursor
        'spatial'
    """
    if name not in SCHEMES:
        near = difflib.get_close_matches(name, SCHEMES, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"name: no scheme is called {name!r}; {hint}schemes: {', '.join(list_schemes())}")
    unknown = [key for key in changes if key not in Scheme.__dataclass_fields__]
    if unknown:
        raise ValueError(
            f"changes: a scheme has no {', '.join(unknown)}; its choices are {sorted(Scheme.__dataclass_fields__)}"
        )
    return replace(SCHEMES[name], **changes)
