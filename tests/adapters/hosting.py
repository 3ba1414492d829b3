"""Passes through attached and unattached models that the tests of the transformers adapter share."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmpos.adapters.transformers import attach
from mmpos.multimodal import Image, PositionLayout, Scheme, Text, Video, channel_tables, rotary_angles
from tests.adapters.vlms import GRID_MODELS, tiny_vlm

# several images, adjacent ones, rows that differ, a row that ends in an image
ROWS = [[3, (4, 5), 2, (2, 3), (3, 2), 1], [2, (4, 3), 1]]
APART = [[3, (4, 5), 2, (2, 3), 1], [2, (4, 3), 1]]  # the models themselves cannot tell adjacent images apart
QUIET = list(range(90, 96))  # special tokens, which a random model would produce without images for them
OPTIONS: dict[str, dict[str, Any]] = {"mhrope": {"sections": (1, 1, 0)}, "pype": {"layer_options": {"jump": 1}}}


def attached(name: str, which: str, **text: Any) -> Any:
    """A tiny model with a scheme."""
    return attach(tiny_vlm(name, **text), which, **OPTIONS.get(which, {}))


def generate(model: Any, count: int = 5, **inputs: Any) -> Tensor:
    """The next tokens, of text only, greedily unless asked otherwise."""
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "suppress_tokens": QUIET}
    return model.generate(**{**options, **inputs})[:, -count:]


@torch.no_grad()
def logits(model: Any, inputs: dict[str, Any]) -> Tensor:
    """One pass."""
    return model(**inputs).logits


def on_real(values: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Values of the tokens that are no padding."""
    return values[inputs["attention_mask"].bool()]


def decoder_of(model: Any) -> Any:
    """The decoder, whatever the model calls it."""
    return getattr(model.model, "language_model", None) or model.model.text_model


def tables_for(model: Any, angles: Tensor) -> tuple[Tensor, ...]:
    """Cosine and sine of angles in the form in which a model makes its own: channels and axes may be laid out
    differently, also by the version.

    Shape: angles ``(B, L, pairs)``.
    """
    places = torch.arange(3)[None] if model.config.model_type not in GRID_MODELS else torch.arange(3).expand(3, 1, -1)
    own = decoder_of(model).rotary_emb(torch.zeros(1), places)[0]
    tables = channel_tables(angles, "interleaved" if torch.equal(own[..., 0::2], own[..., 1::2]) else "half")
    return tuple(table.expand(3, -1, -1, -1) for table in tables) if own.dim() == 4 else tables


@torch.no_grad()
def by_hand(
    model: Any, inputs: dict[str, Any], layout: PositionLayout, rule: Scheme, sections: tuple[int, ...] | None = None
) -> Tensor:
    """Logits of an unattached model whose layers get the tables and the pattern of a layout, one by one."""
    decoder = decoder_of(model)
    pairs = len(decoder.rotary_emb.inv_freq)
    allocation = rule.allocate(pairs) if sections is None else rule.allocate(pairs, sections=sections)
    hooks = []
    for number, layer in enumerate(decoder.layers):
        angles = rotary_angles(layout.position_ids(number), allocation, 1e4)[:, 0]
        allowed = layout.dense_mask(number) | torch.eye(angles.shape[1], dtype=torch.bool)
        given = {"position_embeddings": tables_for(model, angles), "attention_mask": allowed}
        hooks.append(layer.self_attn.register_forward_pre_hook(partial(_swap, given), with_kwargs=True))
    unused = {}
    if model.config.model_type in GRID_MODELS:
        unused["position_ids"] = torch.zeros(3, *inputs["input_ids"].shape, dtype=torch.long)
    out = logits(model, {**inputs, **unused})
    for hook in hooks:
        hook.remove()
    return out


def _swap(given: dict[str, Any], module: Any, args: Any, kwargs: Any) -> Any:
    return args, {**kwargs, **given}


def segments_of(rows: list[list[Any]]) -> list[list[Any]]:
    """Pieces as segments."""

    def segment(piece: Any) -> Any:
        if isinstance(piece, int):
            return Text(piece)
        return Image(*piece) if len(piece) == 2 else Video(*piece)

    return [[segment(piece) for piece in row] for row in rows]


def check_generation(model: Any, inputs: dict[str, Any]) -> None:
    """With a cache, without one, and recomputing the whole sequence for every token."""
    cached = generate(model, **inputs)
    assert torch.equal(generate(model, use_cache=False, **inputs), cached)
    grown = dict(inputs)
    for step in range(cached.shape[1]):
        scores = logits(model, {**grown, "use_cache": False})[:, -1]
        scores[:, QUIET] = -torch.inf
        assert torch.equal(scores.argmax(-1), cached[:, step])
        grown["input_ids"] = torch.cat([grown["input_ids"], cached[:, step : step + 1]], dim=1)
        one = torch.ones(len(cached), 1, dtype=torch.long)
        grown["attention_mask"] = torch.cat([grown["attention_mask"], one], dim=1)
        if "mm_token_type_ids" in grown:
            grown["mm_token_type_ids"] = torch.cat([grown["mm_token_type_ids"], 0 * one], dim=1)
