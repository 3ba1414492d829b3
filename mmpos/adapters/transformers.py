"""Position schemes for Hugging Face vision-language models: :func:`attach`, :func:`detach`.

Supported are instances of ``qwen2_vl``, ``qwen2_5_vl``, ``qwen3_vl``, ``qwen3_vl_moe``, ``glm4v``, ``llava``,
``llava_next``, ``llava_onevision``, ``internvl``, ``smolvlm`` and ``idefics3`` (the ``...ForConditionalGeneration``
object) from transformers 5.6 up to but without 6; tested with 5.6, 5.13, 5.17, 5.20 and 5.24. Only the instance
changes: no class, module or registry is touched, and :func:`detach` gives it back as it was.

Versions differ in two things that show. The cache is called ``past_key_values`` before 5.24 and ``cache`` since, in
an attached model too. Qwen2.5-VL itself cuts the seconds between frames to whole ones before 5.18; an attached model
never does.

What then decides over positions:

- Every forward pass takes its ids from the scheme: from token types and grids (Qwen-VL, GLM-V), from placeholder ids
  and image sizes (the others), from ``position_layout=`` (a :class:`~mmpos.multimodal.PositionLayout` of the new tokens
  or of the whole sequence, made from segments), or from ``position_ids=``. ``mm_token_type_ids=`` is understood by
  every attached model, also next to ``inputs_embeds``.
- A cache remembers the cursor, so decoding, further turns with new images and several conversations on one model go on
  where they stopped. The model itself keeps nothing between calls.
- ``generate()`` lays the prompt out once; the ids of new tokens follow the scheme, never "last id plus one".
- In training mode, schemes that draw a step for every image and video (``v2pe``, ``hope``) do so from torch's global
  generator; in evaluation mode the step is always the scheme's own.
- Ids never reach the code that takes jumps for the boundaries of packed sequences.

What cannot be hosted says so:

- Time scales (``mrope_time``, ``videorope``, ``hope``) on videos of Qwen3-VL and GLM-V, which put timestamps between
  frames, so that each frame is an image to them; still images work.
- ``rope_dhr`` without ``position_layout=`` where images come as tiles: their inputs do not tell how tiles are arranged.
- Patterns (``cca``, ``pype``) with flash attention or sliding windows, which have room for one pattern only.
- Ladders that change with the length of the input (dynamic NTK, LongRoPE), unless ``theta=`` replaces them.
- ``mhrope`` without ``sections=`` where the key/value heads are not the eight of the paper.
- Rules that are no ids (GRAPE's learned planes, SoFA's soft mask): they are functions of :mod:`mmpos.multimodal`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mmpos.adapters._attachment import require
from mmpos.adapters._hf_calls import Host, base_forward, expand_inputs, prepare_positions, validate_kwargs
from mmpos.adapters._hf_families import FAMILIES, Family, family_of
from mmpos.adapters._hf_rotary import (
    SchemeRotary,
    by_head_forward,
    check_heads,
    pick_variant,
    rotate_projection,
    table_layout,
)
from mmpos.multimodal import SCHEMES, Allocation, Scheme, published_rules
from mmpos.multimodal import scheme as named_scheme

__all__ = ["attach", "detach", "own_scheme", "scheme_of", "supported_models"]

_RECORD = "_mmpos_attachment"
_HEADS_OF_PAPER = 8
#: transformers that can be hosted, from and up to but without
_VERSIONS = ((5, 6), (6, 0))


@dataclass
class _Record:
    """What it takes to undo an attachment."""

    host: Host
    rotary: nn.Module
    hooks: list[Any] = field(default_factory=list)
    methods: list[tuple[Any, str, Any]] = field(default_factory=list)

    def bind(self, module: Any, name: str, function: Any) -> None:
        """Put a method on an instance; one that the instance had itself comes back in :meth:`undo`."""
        self.methods.append((module, name, vars(module).get(name)))
        setattr(module, name, function)

    def undo(self, decoder: Any) -> None:
        """Everything as it was."""
        for hook in self.hooks:
            hook.remove()
        for module, name, own in reversed(self.methods):
            if own is None:  # it was only on the class
                delattr(module, name)
            else:
                setattr(module, name, own)
        like = next(decoder.parameters())
        decoder.rotary_emb = self.rotary.to(like.device).train(decoder.training)


def attach(
    model: Any,
    scheme: str | Scheme,
    *,
    theta: float | None = None,
    sections: Sequence[int] | None = None,
    **changes: Any,
) -> Any:
    """Place the tokens of a vision-language model by another scheme, in place, and return the model.

    Args:
        model: a ``...ForConditionalGeneration`` instance of a supported model.
        scheme: name of a scheme or a :class:`Scheme`.
        theta: base of the rotary ladder; default the model's own ladder, scaling included.
        sections: rotary pairs of each axis, or heads of each axis for ``mhrope``; default the model's own where it
            deals its pairs out in the same way, else those of the scheme in proportion.
        changes: other choices of the scheme, as for :func:`mmpos.multimodal.scheme`.

    Example:
        >>> import torch
        >>> from transformers import LlavaConfig, LlavaForConditionalGeneration
        >>> small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> config = LlavaConfig(
        ...     vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **small},
        ...     text_config={"model_type": "llama", "vocab_size": 20, "num_key_value_heads": 2, **small},
        ...     image_token_id=19,
        ... )
        >>> model = attach(LlavaForConditionalGeneration(config).eval(), "v2pe")
        >>> model(input_ids=torch.tensor([[1, 19, 19, 19, 19, 2]]), pixel_values=torch.zeros(1, 3, 8, 8)).logits.shape
        torch.Size([1, 6, 20])
    """
    _check_version(str(require("transformers", "vlm").__version__))
    family = family_of(model)
    if hasattr(model, _RECORD):
        raise ValueError(f"model: {scheme_of(model).name!r} is already attached; call detach(model) first")
    base: Any = getattr(model, "model", None)
    decoder = getattr(base, family.decoder, None)
    if decoder is None or not hasattr(model, "_prepare_position_ids_for_generation"):
        raise ValueError(
            f"model: expected a {family.name} model for conditional generation (a ...ForConditionalGeneration object), "
            f"got {type(model).__name__}"
        )
    chosen = _with_model_facts(_resolve(scheme, changes), base)
    own = getattr(decoder, "rotary_emb", None)
    if not isinstance(own, nn.Module):
        raise ValueError(
            f"model: the decoder {type(decoder).__name__} has no rotary module 'rotary_emb' to stand in for"
        )
    like = next(decoder.parameters())
    layout, by_axis = table_layout(own, family.multi_axis, like)
    ladder, scaling = _ladder(own, decoder.config, theta)
    allocation = _allocation(chosen, family, decoder, own, len(ladder), sections)
    if not torch.equal(allocation.exponent, torch.arange(len(ladder)) / len(ladder)):
        ladder = allocation.inverse_frequencies(theta if theta is not None else _theta(decoder.config))
    host = Host(family, chosen, len(decoder.layers))
    rotary = SchemeRotary(allocation, ladder.to(like.device), scaling, layout, by_axis)
    record = _Record(host, own)
    decoder.rotary_emb = rotary
    record.bind(base, "forward", partial(base_forward, base.forward, base, host))
    record.bind(model, "_prepare_position_ids_for_generation", partial(prepare_positions, model, host))
    record.bind(model, "_expand_inputs_for_generation", partial(expand_inputs, model._expand_inputs_for_generation))
    record.bind(model, "_validate_model_kwargs", partial(validate_kwargs, model))
    try:
        _hook_layers(record, decoder, rotary)
    except ValueError:
        record.undo(decoder)
        raise
    setattr(model, _RECORD, record)
    return model


def detach(model: Any) -> Any:
    """Give the model back as it came: methods, rotary module and outputs."""
    record = _record_of(model)
    record.undo(getattr(model.model, record.host.family.decoder))
    delattr(model, _RECORD)
    return model


def scheme_of(model: Any) -> Scheme:
    """The scheme attached to a model."""
    return _record_of(model).host.scheme


def own_scheme(model: Any) -> Scheme:
    """The scheme a supported model has itself; attaching it leaves the logits of a pass as they were.

    Generation too, but for prompts with a video of more frames than its longer side has tokens: Qwen-VL and GLM-V put
    the text of the prompt behind the longer side, and then the tokens they generate behind the last frame. An attached
    model goes on where the prompt ends.
    """
    family = family_of(model)
    return _with_model_facts(family.own, model.model)


def supported_models() -> list[str]:
    """Model types that can be attached to, sorted."""
    return sorted(FAMILIES)


def _check_version(installed: str) -> None:
    """Refuse what is outside the range with a word on what to install, rather than failing somewhere inside."""
    found = re.match(r"(\d+)\.(\d+)", installed)
    first, end = _VERSIONS
    if found is None or not first <= (int(found[1]), int(found[2])) < end:
        wanted = f">={first[0]}.{first[1]},<{end[0]}"
        raise ImportError(
            f"transformers: expected a version {wanted}, got {installed}; run pip install 'transformers{wanted}'"
        )


def _record_of(model: Any) -> _Record:
    record = getattr(model, _RECORD, None)
    if record is None:
        raise ValueError("model: no position scheme is attached; call attach(model, scheme) first")
    return record


# -- schemes and frequencies ------------------------------------------------------------------------------------------


def _resolve(scheme: str | Scheme, changes: dict[str, Any]) -> Scheme:
    if isinstance(scheme, str):
        beside = {rule.name: rule.made_by for rule in published_rules() if rule.name not in SCHEMES}
        if scheme in beside:
            raise ValueError(
                f"scheme: {scheme!r} cannot be hosted, it is no scheme but made by mmpos.multimodal.{beside[scheme]}; "
                "choose a scheme and apply it to the layout or inside your own attention"
            )
        return named_scheme(scheme, **changes)
    if not isinstance(scheme, Scheme):
        raise ValueError(f"scheme: expected a name or a Scheme, got {scheme!r}")
    return replace(scheme, **changes)


def _with_model_facts(scheme: Scheme, base: Any) -> Scheme:
    """Absolute time ticks as often as the model was trained to, unless the scheme says otherwise."""
    ticks = getattr(getattr(base.config, "vision_config", None), "tokens_per_second", None)
    if scheme.block != "absolute_time" or ticks is None or "tokens_per_second" in scheme.block_options:
        return scheme
    return replace(scheme, block_options={**scheme.block_options, "tokens_per_second": float(ticks)})


def _theta(config: Any) -> float:
    return float(config.rope_parameters["rope_theta"])


def _ladder(own: Any, config: Any, theta: float | None) -> tuple[torch.Tensor, float]:
    """Inverse frequencies on which pairs turn, and the factor of the tables."""
    frequencies = own.inv_freq.detach().float()
    if theta is not None:
        if not theta > 0:
            raise ValueError(f"theta: expected a positive number, got {theta}")
        pairs = len(frequencies)
        return 1.0 / theta ** (torch.arange(pairs, dtype=torch.float32) / pairs), 1.0
    kind = getattr(own, "rope_type", "default")
    if "dynamic" in kind or kind == "longrope":
        raise ValueError(
            f"model: its ladder changes with the length of the input (rope_type {kind!r}), which cannot be hosted; "
            "give theta="
        )
    return frequencies.clone(), float(getattr(own, "attention_scaling", 1.0))


def _allocation(
    scheme: Scheme, family: Family, decoder: Any, own: Any, pairs: int, sections: Sequence[int] | None
) -> Allocation:
    if scheme.allocation == "by_head":
        return _by_head(scheme, decoder, pairs, sections)
    sized = scheme.allocation in ("chunked", "interleaved", "diagonal_last")
    if sections is not None:
        if not sized:
            raise ValueError(f"sections: the allocation {scheme.allocation!r} of {scheme.name!r} has none")
        return scheme.allocate(pairs, sections=tuple(sections))
    default = SCHEMES.get(scheme.name)
    chosen_by_user = default is None or default.allocation_options != scheme.allocation_options
    model_sections = getattr(own, "mrope_section", None) or decoder.config.rope_parameters.get("mrope_section")
    if model_sections is not None and family.own.allocation == scheme.allocation and not chosen_by_user:
        return scheme.allocate(pairs, sections=tuple(model_sections))
    return scheme.allocate(pairs)


def _by_head(scheme: Scheme, decoder: Any, pairs: int, sections: Sequence[int] | None) -> Allocation:
    heads = int(decoder.config.num_key_value_heads)
    options = dict(scheme.allocation_options)
    if sections is None and heads != options.get("kv_heads", _HEADS_OF_PAPER):
        dealt = options.get("kv_heads", _HEADS_OF_PAPER)
        raise ValueError(
            f"sections: {scheme.name!r} deals out {dealt} key/value heads, the model has {heads}; give "
            "sections=(heads of t, of h, of w)"
        )
    if sections is not None:
        options["head_sections"] = tuple(sections)
    options["kv_heads"] = heads
    return scheme.allocate(pairs, **options)


def _hook_layers(record: _Record, decoder: Any, rotary: SchemeRotary) -> None:
    """Per-layer tables and patterns, and rotations per head, where the scheme has them."""
    host = record.host
    variants, of_layer = host.scheme.variants(host.layers)
    for number, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        if len(variants) > 1 and of_layer is not None:
            hook = pick_variant(of_layer[number], len(variants))
            record.hooks.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
        if rotary.by_head:
            pairing = rotary.layout if rotary.layout == "interleaved" else host.family.pairing
            record.bind(attention, "forward", partial(by_head_forward, attention.forward, pairing, rotary.by_axis))
            turn = rotate_projection(int(attention.head_dim))
            for part in ("q", "k"):
                module = getattr(attention, f"{part}_norm", None) or getattr(attention, f"{part}_proj", None)
                if module is None:
                    raise ValueError(
                        f"scheme: {host.scheme.name!r} turns heads differently, which needs separate query and key "
                        f"projections; {type(attention).__name__} has none"
                    )
                record.hooks.append(module.register_forward_hook(turn))
            why = check_heads(attention, rotary, next(attention.parameters()))
            if why:
                raise ValueError(
                    f"scheme: {host.scheme.name!r} turns heads differently, which {type(attention).__name__} of layer "
                    f"{number} cannot do: {why}; choose a scheme with one table for all heads"
                )
