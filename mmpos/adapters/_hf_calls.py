"""One forward pass of an attached model: where its tokens are, what they may see, and what the cache remembers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mmpos.adapters._hf_families import Family, token_types
from mmpos.adapters._hf_rotary import IDS
from mmpos.multimodal import PositionLayout, Scheme
from mmpos.multimodal.segments import IMAGE, VIDEO

__all__ = [
    "EXTRA",
    "Host",
    "Prompt",
    "base_forward",
    "cache_name",
    "expand_inputs",
    "prepare_positions",
    "validate_kwargs",
]

#: arguments an attached model understands whatever its class
EXTRA = ("position_layout", "mm_token_type_ids")
_STATE = "_mmpos_state"


@dataclass(frozen=True)
class Host:
    """What is fixed about an attached model."""

    family: Family
    scheme: Scheme
    layers: int

    @property
    def reads_blocks(self) -> bool:
        """Whether images and videos are laid out differently from text at all."""
        return not (self.scheme.block == "raster" and self.scheme.cursor == "count")


@dataclass(frozen=True, eq=False)
class Prompt:
    """A layout that travels through ``generate()``, and the slot of the sequence it starts at."""

    layout: PositionLayout
    start: int


@dataclass(frozen=True, eq=False)
class _State:
    """What a cache remembers: the cursor after its last token, and how many of its last tokens are text."""

    scheme: Scheme
    cursor: Tensor
    length: int
    text_tail: int


# -- methods of the instances -----------------------------------------------------------------------------------------


def base_forward(original: Any, base: Any, host: Host, *args: Any, **kwargs: Any) -> Any:
    """``forward`` of the base model (vision tower and decoder without the head), around its ``original`` one."""
    given = _by_name(base, args, kwargs)
    layout_given = given.pop("position_layout", None)
    types_belong = "mm_token_type_ids" in _arguments(base)
    cache = given.get("cache")
    batch, length, device = _shape(given)
    past = 0 if cache is None else int(cache.get_seq_length())
    layout = _layout_of_call(host, base, given, layout_given, batch, length, past, device)
    if not types_belong:
        given.pop("mm_token_type_ids", None)
    given["position_ids"] = torch.arange(past, past + length, device=device).expand(batch, -1)
    pattern = _pattern(base, host, layout, given, past)
    if pattern is not None:
        given["attention_mask"] = pattern
    given[cache_name(base)] = given.pop("cache", None)
    token = IDS.set(layout.ids)
    try:
        out = original(**given)
    finally:
        IDS.reset(token)
    cache = getattr(out, cache_name(base), None) if cache is None else cache
    if cache is None and isinstance(out, tuple):
        cache = next((part for part in out if hasattr(part, "get_seq_length")), None)
    if cache is not None:
        visual = (layout.block >= 0).any(0).nonzero()
        before = getattr(cache, _STATE, None) if past else None
        text_before = 0 if before is None else before.text_tail - (before.length - past)
        tail = length - 1 - int(visual[-1]) if len(visual) else length + text_before
        setattr(cache, _STATE, _State(host.scheme, layout.cursor, past + length, tail))
    return out


def prepare_positions(model: Any, host: Host, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> None:
    """``_prepare_position_ids_for_generation``: lay the prompt out once, before it is repeated for beams.

    No ids are handed to ``generate()``, which would count them up by one on every axis; each forward pass takes its
    own from the layout and, behind it, from the cursor that the cache remembers.
    """
    base = model.model
    cache = model_kwargs.get(cache_name(base))
    past = 0 if cache is None else int(cache.get_seq_length())
    ids = model_kwargs.get("input_ids")
    given = {**model_kwargs, "cache": cache, "input_ids": None, "inputs_embeds": None, "position_ids": None}
    if ids is None or ids.shape[1] == 0:
        ids = inputs_tensor
    mask = model_kwargs.get("attention_mask")
    if past and mask is not None and mask.shape[1] == ids.shape[1]:
        ids = ids[:, past:]  # the whole conversation was given, its beginning is in the cache
    elif past and mask is None and ids.shape[1] > past and ids.is_floating_point():
        ids = ids[:, past:]
    given["inputs_embeds" if ids.is_floating_point() else "input_ids"] = ids
    own = given.pop("position_layout", None)
    layout = _layout_of_call(host, base, given, own, ids.shape[0], ids.shape[1], past, ids.device)
    model_kwargs["position_layout"] = Prompt(layout, past)


def expand_inputs(original: Any, **kwargs: Any) -> Any:
    """``_expand_inputs_for_generation``: absent ids are left out, which older Qwen-VL models cannot repeat."""
    if kwargs.get("position_ids", False) is None:
        del kwargs["position_ids"]
    return original(**kwargs)


def validate_kwargs(model: Any, model_kwargs: dict[str, Any]) -> None:
    """``_validate_model_kwargs``: the arguments of an attached model are not typing errors."""
    type(model)._validate_model_kwargs(model, {k: v for k, v in model_kwargs.items() if k not in EXTRA})


# -- the layout of a call ---------------------------------------------------------------------------------------------


def _layout_of_call(
    host: Host,
    base: Any,
    given: Mapping[str, Any],
    layout_given: PositionLayout | Prompt | None,
    batch: int,
    length: int,
    past: int,
    device: torch.device,
) -> PositionLayout:
    """Layout of the ``length`` new tokens, counted on from what the cache holds."""
    real = _real(given.get("attention_mask"), batch, length, device, whole=layout_given is None)
    if layout_given is not None:
        return _from_given(host, given, layout_given, real, past)
    explicit = given.get("position_ids")
    if explicit is not None:
        return _from_ids(host, explicit, real)
    cursor = _cursor(host, given, batch, past)
    types = token_types(host.family, base, given, length, device) if host.reads_blocks else None
    if types is None:
        return host.scheme.lay_out_text(real, cursor=cursor, num_layers=host.layers)
    if types.shape[0] != batch:
        raise ValueError(f"mm_token_type_ids: expected {batch} rows, got {types.shape[0]}")
    _check_hosting(host, types)
    blocks = host.family.blocks(base, given, types)
    if base.training and host.scheme.train_steps:
        blocks["steps"] = _drawn_steps(host, types, blocks)
    split = host.family.splits_frames or host.scheme.split_frames
    return host.scheme.layout_from_types(
        types, mask=real, split_frames=split, num_layers=host.layers, cursor=cursor, **blocks
    )


def _drawn_steps(host: Host, types: Tensor, blocks: Mapping[str, Any]) -> Tensor | None:
    """A step for each image and video of a training batch; tiles that stand side by side are one image."""
    counts = [
        torch.zeros(0, dtype=torch.long) if blocks.get(name) is None else blocks[name].prod(1).to(types.device)
        for name in ("image_grids", "video_grids")
    ]
    if not host.family.tiled:
        return host.scheme.draw_steps(sum(map(len, counts)))
    visual = types > 0
    opens = visual & ~torch.nn.functional.pad(visual[:, :-1], (1, 0))
    stretch = opens.flatten().cumsum(0) - 1
    owners = []
    for code, count in zip((IMAGE, VIDEO), counts, strict=True):
        places = (types == code).flatten().nonzero()[:, 0]
        if int(count.sum()) != len(places):
            return None  # the layout says what does not fit
        owners.append(stretch[places[count.cumsum(0) - count]])
    steps = host.scheme.draw_steps(int(opens.sum()))
    return None if steps is None else steps.to(types.device)[torch.cat(owners)]


def _from_given(
    host: Host, given: Mapping[str, Any], layout: PositionLayout | Prompt, real: Tensor, past: int
) -> PositionLayout:
    batch, length = real.shape
    if isinstance(layout, PositionLayout):
        known = layout.kind.shape[1]
        layout = Prompt(layout, past if known == length and past else 0)
    start, layout = past - layout.start, layout.layout
    if layout.scheme != host.scheme:
        raise ValueError(
            f"position_layout: laid out by {layout.scheme.name!r}, but the model is attached to {host.scheme.name!r}"
        )
    variants = _num_variants(host)
    if layout.num_variants != variants:
        raise ValueError(
            f"position_layout: expected {variants} sets of ids, got {layout.num_variants}; lay it out with "
            f"num_layers={host.layers}"
        )
    layout = layout.to(real.device)
    rows = layout.kind.shape[0]
    if batch != rows:
        if batch % rows:
            raise ValueError(f"position_layout: {rows} rows do not fit a batch of {batch}")
        layout = layout.rows(torch.arange(rows, device=real.device).repeat_interleave(batch // rows))
    known = layout.kind.shape[1]
    if start >= known:
        return host.scheme.lay_out_text(real, cursor=_cursor(host, given, batch, past), num_layers=host.layers)
    taken = layout.slots(start, min(start + length, known)) if start or length < known else layout
    missing = length - taken.kind.shape[1]
    if missing:  # text behind the prompt: tokens generated without a cache
        taken = taken.append(host.scheme.lay_out_text(real[:, -missing:], cursor=layout.cursor, num_layers=host.layers))
    return taken


def _from_ids(host: Host, ids: Tensor, real: Tensor) -> PositionLayout:
    """Ids given by the caller, continued by one more than the last on every axis."""
    text = host.scheme.lay_out_text(real, num_layers=host.layers)
    axes, variants = host.scheme.axes, text.num_variants
    if ids.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"position_ids: expected integers or float32/float64, got {ids.dtype}")
    if ids.dim() == 2:
        ids = host.scheme.place_text(ids)
    if ids.dim() == 3 and ids.shape[0] == axes + 1:
        ids = ids[1:]  # the first row tells the order of tokens, as generate() makes it
    if ids.dim() == 3:
        ids = ids.expand(variants, -1, -1, -1)
    if ids.dim() != 4 or ids.shape[:2] != (variants, axes) or ids.shape[-1] != real.shape[1]:
        raise ValueError(
            f"position_ids: {host.scheme.name!r} has {axes} axes; expected (B, L), ({axes}, B, L) or "
            f"({variants}, {axes}, B, L) with L = {real.shape[1]}, got {tuple(ids.shape)}"
        )
    ids = ids.to(real.device).expand(-1, -1, real.shape[0], -1)
    return replace(text, ids=ids, cursor=ids[:, 0, :, -1] + 1)


def _cursor(host: Host, given: Mapping[str, Any], batch: int, past: int) -> Tensor | None:
    """The id the first new token gets, ``(V, B)``; ``None`` without a cache."""
    if not past:
        return None
    state = getattr(given.get("cache"), _STATE, None)
    if state is None or state.length < past:
        raise ValueError(
            f"cache: it holds {past} tokens that this model did not place since {host.scheme.name!r} was attached; "
            "start with an empty cache, or pass position_ids"
        )
    if state.scheme != host.scheme:
        raise ValueError(
            f"cache: its keys were placed by {state.scheme.name!r}, but the model is attached to {host.scheme.name!r}"
        )
    cursor = state.cursor
    dropped = state.length - past
    if dropped > state.text_tail:
        raise ValueError(
            f"cache: cut back by {dropped} tokens, into an image or video; only text can be taken back "
            f"({state.text_tail} tokens here)"
        )
    if cursor.shape[1] != batch:
        if batch % cursor.shape[1]:
            raise ValueError(f"cache: it holds {cursor.shape[1]} rows, the input {batch}")
        cursor = cursor.repeat_interleave(batch // cursor.shape[1], dim=1)
    return cursor - dropped


def _check_hosting(host: Host, types: Tensor) -> None:
    block, name, family = host.scheme.block, host.scheme.name, host.family
    if family.splits_frames and block in ("absolute_time", "diagonal") and bool((types == VIDEO).any()):
        raise ValueError(
            f"scheme: {family.name} gives every frame of a video a place of its own behind its timestamp, so the time "
            f"scale of {name!r} would have no effect on videos; images work, or choose mrope_interleave"
        )
    if family.tiled and block == "thumbnail":
        raise ValueError(
            f"scheme: {name!r} needs to know how the tiles of an image are arranged, which the inputs of {family.name} "
            "do not tell; pass position_layout= with Tiles segments"
        )


def _num_variants(host: Host) -> int:
    return len(host.scheme.variants(host.layers)[0])


# -- patterns ---------------------------------------------------------------------------------------------------------


def _pattern(base: Any, host: Host, layout: PositionLayout, given: Mapping[str, Any], past: int) -> Tensor | None:
    """The 4-D mask of a pattern that is not plainly causal, ``(B, V, L, past + L)``, else ``None``."""
    rings = layout.level is not None and bool((layout.block >= 0).any())
    if not rings and layout.sequence is None:
        return None
    decoder = getattr(base, host.family.decoder)
    kind = decoder.config._attn_implementation
    if kind not in ("eager", "sdpa"):
        raise ValueError(
            f"scheme: the attention pattern of {host.scheme.name!r} needs the implementation 'eager' or 'sdpa', got "
            f"{kind!r}; call model.set_attn_implementation('sdpa')"
        )
    if getattr(decoder, "has_sliding_layers", False):
        raise ValueError(f"scheme: the pattern of {host.scheme.name!r} cannot be combined with sliding windows")
    mask, cache = given.get("attention_mask"), given.get("cache")
    flat = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
    prepared = cache is not None and getattr(cache, "is_compileable", False) and not past
    if not flat and not prepared:
        raise ValueError(
            f"attention_mask: {host.scheme.name!r} makes its own pattern; expected a 2-D mask of real tokens or None"
        )
    batch, length = layout.kind.shape
    kept = torch.ones(batch, past, dtype=torch.bool, device=layout.kind.device)
    if past and mask is not None:
        kept = mask[:, :past].bool()
    new = layout.variant_masks()
    count = new.shape[1]
    padding = ~layout.mask
    new = new | torch.diag_embed(padding)[:, None]  # a row that sees nothing would be undefined
    old = kept[:, None, None, :].expand(-1, count, length, -1)
    allowed = torch.cat([old, new], dim=-1)
    if cache is not None:
        slots = int(cache.get_mask_sizes(length, 0)[0])
        allowed = torch.nn.functional.pad(allowed, (0, max(slots - allowed.shape[-1], 0)))
    if kind == "sdpa":
        return allowed
    dtype = next(decoder.parameters()).dtype
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


# -- reading arguments ------------------------------------------------------------------------------------------------


def _arguments(base: Any) -> tuple[str, ...]:
    return _parameters(type(base).forward)


@lru_cache(maxsize=64)  # asked several times for every decoded token
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(forward).parameters if name != "self")


def cache_name(base: Any) -> str:
    """What the cache is called among the arguments and outputs: ``cache`` since transformers 5.24."""
    return "cache" if "cache" in _arguments(base) else "past_key_values"


def _by_name(base: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(zip(_arguments(base), args, strict=False)) | dict(kwargs)
    if given.get("cache") is None and given.get("past_key_values") is not None:
        given["cache"] = given.pop("past_key_values")
    given.pop("past_key_values", None)
    return given


def _shape(given: Mapping[str, Any]) -> tuple[int, int, torch.device]:
    tokens = given.get("input_ids")
    if tokens is None:
        tokens = given.get("inputs_embeds")
    if tokens is None:
        raise ValueError("input_ids: expected input_ids or inputs_embeds, got neither")
    return tokens.shape[0], tokens.shape[1], tokens.device


def _real(mask: Any, batch: int, length: int, device: torch.device, whole: bool) -> Tensor:
    """Real tokens among the new ones, ``(B, L)``; ``whole`` unless they may be a piece of a prompt laid out before."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return torch.ones(batch, length, dtype=torch.bool, device=device)
    if mask.shape[0] != batch or mask.shape[1] < length:
        raise ValueError(
            f"attention_mask: expected ({batch}, {length}) or, with a cache, longer rows; got {tuple(mask.shape)}"
        )
    real = mask[:, -length:].to(device).bool()
    if whole and mask.shape[1] == length:
        empty = (~real.any(1)).nonzero()[:, 0]
        if len(empty):
            raise ValueError(
                f"attention_mask: row {int(empty[0])} has no real token; 1 marks tokens and 0 padding, check that it "
                "is not the other way round"
            )
    return real
