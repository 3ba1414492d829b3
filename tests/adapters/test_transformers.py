"""Schemes attached to Hugging Face models: nothing changes for a model's own scheme, others equal a hand-made pass,
and caches, padding, batches, beams and further turns never matter.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import position_ids
from mmpos.adapters import transformers as transformers_adapter
from mmpos.adapters.transformers import attach, detach, own_scheme, scheme_of, supported_models
from mmpos.multimodal import Image, Text, Tiles, channel_tables, rotary_angles, scheme
from tests.adapters.hosting import (
    APART,
    OPTIONS,
    ROWS,
    attached,
    by_hand,
    check_generation,
    decoder_of,
    generate,
    logits,
    on_real,
    segments_of,
    tables_for,
)
from tests.adapters.vlms import (
    CACHE,
    GRID_MODELS,
    IMAGE,
    MODELS,
    SPLIT_MODELS,
    START,
    VERSION,
    batch_of,
    noise,
    random_ids,
    tiny_vlm,
)

FAST = ["raster", "mrope", "mrope_interleave_reset", "videorope", "v2pe", "cca", "pype", "circlerope_age"]
MORE = ["mhrope", "ilrope", "vrope", "hope", "mmrope", "omnirope", "imrope", "circlerope", "share_all", "v2pe_span"]


# -- the model's own scheme -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_own_scheme_changes_nothing(name: str) -> None:
    model = tiny_vlm(name)
    inputs = batch_of(model, APART)
    expected, tokens = logits(model, inputs), generate(model, **inputs)
    attach(model, own_scheme(model))
    torch.testing.assert_close(on_real(logits(model, inputs), inputs), on_real(expected, inputs), atol=1e-5, rtol=0)
    assert torch.equal(generate(model, **inputs), tokens)
    if name in GRID_MODELS:
        assert torch.equal(logits(model, inputs), expected)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_own_scheme_with_videos(name: str) -> None:
    model = tiny_vlm(name)
    inputs = batch_of(model, [[2, (3, 2, 3), 1, (2, 1), 2], [1, (2, 1), 1, (2, 3, 2), 1]])
    if name == "qwen2_5_vl":
        whole = VERSION < (5, 18)  # which cut seconds to whole ones
        inputs["second_per_grid_ts"] = torch.tensor([1.0, 2.0] if whole else [0.5, 1.5])
    expected = logits(model, inputs)
    attach(model, own_scheme(model))
    assert torch.equal(logits(model, inputs), expected)


@pytest.mark.skipif(VERSION < (5, 18), reason="transformers before 5.18 cut the seconds of Qwen2.5-VL to whole ones")
@pytest.mark.parametrize("rate", [2, 3, 25])
@pytest.mark.parametrize("seconds", [1 / 25, 1 / 12, 1 / 3, 1.0])
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.filterwarnings("ignore:tokens_per_second. frames of:UserWarning")
def test_own_scheme_with_absolute_time_at_any_rate(rate: int, seconds: float, as_list: bool) -> None:
    """Times round as in the model: 0.04 s at 25 ids a second is one id for each frame, also for the fifth."""
    model = tiny_vlm("qwen2_5_vl")
    model.config.vision_config.tokens_per_second = rate
    inputs = batch_of(model, [[2, (12, 1, 2), 1], [1, (8, 2, 1), 6]])
    inputs["second_per_grid_ts"] = [seconds, 1 / 7] if as_list else torch.tensor([seconds, 1 / 7])
    expected = logits(model, inputs)
    attach(model, own_scheme(model))
    assert torch.equal(logits(model, inputs), expected)


def test_beams_of_several_images_equal_those_of_the_model() -> None:
    model = tiny_vlm("qwen2_vl")
    inputs = batch_of(model, APART)
    images = inputs["input_ids"] == IMAGE
    inputs["input_ids"][:, :-1][images[:, 1:] & ~images[:, :-1]] = START  # by which older versions count images
    expected = generate(model, num_beams=3, **inputs)
    attach(model, "mrope_hf5")
    assert torch.equal(generate(model, num_beams=3, **inputs), expected)


# -- other schemes equal a hand-made pass -----------------------------------------------------------------------------


@pytest.mark.parametrize("which", [*FAST, *(name for name in MORE if name != "mhrope")])
def test_logits_equal_a_pass_with_explicit_tables(which: str) -> None:
    model = tiny_vlm("qwen2_vl")
    inputs = batch_of(model, ROWS)
    rule = scheme(which, **OPTIONS.get(which, {}))
    layout = rule.layout(segments_of(ROWS), padding_side="left", num_layers=2)
    expected = by_hand(model, inputs, layout, rule)
    own = logits(attach(copy.deepcopy(model), own_scheme(model)), inputs)
    attach(model, rule)
    out = logits(model, inputs)
    torch.testing.assert_close(on_real(out, inputs), on_real(expected, inputs), atol=2e-5, rtol=0)
    if which != "mrope":  # the same as the model's own on images
        assert (on_real(out, inputs) - on_real(own, inputs)).abs().max() > 1e-2


def test_heads_turn_with_their_own_axis() -> None:
    """MHRoPE by hand: queries and keys of each head turned outside the model, its own rotation switched off."""
    model = tiny_vlm("qwen3_vl")
    inputs = batch_of(model, [[2, (2, 3), 2]])
    layout = scheme("mhrope").layout([[Text(2), Image(2, 3), Text(2)]])
    attach(model, "mhrope", sections=(1, 1, 0))
    seen: dict[str, Tensor] = {}
    attention = model.model.language_model.layers[0].self_attn
    cache = model(**inputs, use_cache=True)[CACHE]
    keys = cache.layers[0].keys  # as the model stores them, turned
    detach(model)
    attention.k_norm.register_forward_hook(lambda module, args, out: seen.update(k=out))
    logits(model, inputs)
    angles = layout.position_ids()[:2, 0].float()[..., None] * 1e4 ** -(torch.arange(8) / 8)  # head 0: t, head 1: h
    k = seen["k"][0].transpose(0, 1)
    first, second = k[..., :8], k[..., 8:]
    cos, sin = angles.cos(), angles.sin()
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    torch.testing.assert_close(keys[0], expected, atol=1e-5, rtol=0)


def test_theta_and_sections_are_used() -> None:
    model = tiny_vlm("qwen2_vl")
    inputs = batch_of(model, ROWS)
    layout = scheme("mrope").layout(segments_of(ROWS), padding_side="left")
    attach(model, "mrope", theta=50.0, sections=(0, 4, 4))
    out = logits(model, inputs)
    detach(model)
    allocation = scheme("mrope").allocate(8, sections=(0, 4, 4))
    tables = tables_for(model, rotary_angles(layout.position_ids(), allocation, 50.0)[:, 0])
    model.model.language_model.rotary_emb.forward = lambda x, position_ids: tables
    expected = logits(model, {**inputs, "position_ids": torch.zeros(3, *inputs["input_ids"].shape, dtype=torch.long)})
    torch.testing.assert_close(on_real(out, inputs), on_real(expected, inputs), atol=1e-5, rtol=0)


# -- caches, steps, padding, batches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [*FAST, "mhrope", "ilrope"])  # ilrope: text on the first axis only
def test_generation_with_cache_without_cache_and_step_by_step(which: str) -> None:
    model = attached("qwen2_vl", which)
    check_generation(model, batch_of(model, ROWS))


@pytest.mark.parametrize("which", ["v2pe", "pype"])
def test_generation_of_models_with_one_axis(which: str) -> None:
    model = attached("llava_next", which)
    check_generation(model, batch_of(model, ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("which", [*FAST, *MORE])
@pytest.mark.parametrize("name", MODELS)
def test_generation_everywhere(name: str, which: str) -> None:
    model = attached(name, which)
    check_generation(model, batch_of(model, ROWS))


@pytest.mark.parametrize("which", FAST)
def test_padding_and_batching_change_nothing(which: str) -> None:
    model = attached("qwen2_vl", which)
    together = {side: batch_of(model, ROWS, side=side) for side in ("left", "right")}
    out = {side: on_real(logits(model, inputs), inputs) for side, inputs in together.items()}
    torch.testing.assert_close(out["left"], out["right"], atol=2e-5, rtol=0)
    left = together["left"]
    images, patches = 3, int(left["image_grid_thw"][:3].prod(1).sum())
    for number, (grids, pixels) in enumerate(
        ((slice(images), slice(patches)), (slice(images, None), slice(patches, None)))
    ):
        keep = left["attention_mask"][number].bool()
        alone = {
            "input_ids": left["input_ids"][number : number + 1, keep],
            "mm_token_type_ids": left["mm_token_type_ids"][number : number + 1, keep],
            "image_grid_thw": left["image_grid_thw"][grids],
            "pixel_values": left["pixel_values"][pixels],
        }
        single = logits(model, alone)[0]
        torch.testing.assert_close(logits(model, left)[number, keep], single, atol=2e-5, rtol=0)


@pytest.mark.parametrize("which", ["mrope", "v2pe", "circlerope_age"])
def test_gapped_ids_without_a_cache_are_no_packed_sequences(which: str) -> None:
    model = attached("qwen2_vl", which)
    inputs = batch_of(model, ROWS[1:])
    del inputs["attention_mask"]
    torch.testing.assert_close(
        logits(model, {**inputs, "use_cache": False}), logits(model, {**inputs, "use_cache": True}), atol=1e-5, rtol=0
    )
    llava = attached("llava", which)
    inputs = batch_of(llava, ROWS[1:])
    del inputs["attention_mask"]
    torch.testing.assert_close(
        logits(llava, {**inputs, "use_cache": False}), logits(llava, {**inputs, "use_cache": True}), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("which", ["mrope", "v2pe", "cca", "pype", "ilrope", "mhrope"])
def test_second_turn_with_a_new_image_on_a_warm_cache(which: str) -> None:
    """Turn one, two tokens of answer, turn two with an image: the same as all of it at once."""
    model = attached("qwen2_vl", which)
    first, second = batch_of(model, [[2, (4, 5), 1]]), batch_of(model, [[1, (4, 4), 2]], seed=7)
    answer = random_ids(1, 2, seed=9)
    whole = {
        "input_ids": torch.cat([first["input_ids"], answer, second["input_ids"]], dim=1),
        "mm_token_type_ids": torch.cat([first["mm_token_type_ids"], 0 * answer, second["mm_token_type_ids"]], dim=1),
        "image_grid_thw": torch.cat([first["image_grid_thw"], second["image_grid_thw"]]),
        "pixel_values": torch.cat([first["pixel_values"], second["pixel_values"]]),
    }
    expected = logits(model, whole)
    with torch.no_grad():
        out = model(**first, use_cache=True)
        for token in answer.unbind(1):
            out = model(input_ids=token[:, None], **{CACHE: out[CACHE]}, use_cache=True)
        warm = copy.deepcopy(out[CACHE])
        second.pop("attention_mask")
        out = model(**second, **{CACHE: out[CACHE]}, use_cache=True)
    torch.testing.assert_close(out.logits, expected[:, -out.logits.shape[1] :], atol=2e-5, rtol=0)
    # the same through generate(), which gets the whole conversation but only the new picture
    asked = {**second, "input_ids": whole["input_ids"], "mm_token_type_ids": whole["mm_token_type_ids"]}
    assert torch.equal(generate(model, **{CACHE: warm}, **asked), generate(model, **whole))


def test_two_conversations_on_one_model_do_not_meet() -> None:
    model = attached("llava", "cca")
    first, second = batch_of(model, [[2, (3, 3), 1]]), batch_of(model, [[4, (3, 3), (3, 3), 2]], seed=5)
    token = random_ids(1, 1)
    with torch.no_grad():
        caches = [model(**inputs, use_cache=True)[CACHE] for inputs in (first, second)]
        alone = [model(input_ids=token, **{CACHE: copy.deepcopy(cache)}).logits for cache in caches]
        crossed = [model(input_ids=token, **{CACHE: cache}).logits for cache in reversed(caches)][::-1]
    assert torch.equal(crossed[0], alone[0])
    assert torch.equal(crossed[1], alone[1])


def test_a_cache_cut_back_to_text_goes_on_and_into_an_image_does_not() -> None:
    model = attached("qwen2_vl", "mrope")
    inputs = batch_of(model, [[2, (2, 3), 3]])
    with torch.no_grad():
        cache = model(**inputs, use_cache=True)[CACHE]
        cache.crop(-2)  # two of the three last text tokens are dropped
        out = model(input_ids=inputs["input_ids"][:, 9:], **{CACHE: cache}).logits
        torch.testing.assert_close(out, logits(model, inputs)[:, 9:], atol=1e-5, rtol=0)
        cache.crop(-4)
        with pytest.raises(ValueError, match="into an image or video"):
            model(input_ids=inputs["input_ids"][:, 9:], **{CACHE: cache})


def test_a_foreign_cache_is_refused() -> None:
    model = tiny_vlm("qwen2_vl")
    inputs = batch_of(model, [[2, (2, 3), 3]])
    cache = model(**inputs, use_cache=True)[CACHE]
    attach(model, "mrope")
    token = random_ids(1, 1)
    with pytest.raises(ValueError, match="holds 11 tokens that this model did not place"):
        model(input_ids=token, **{CACHE: cache})
    placed = model(**inputs, use_cache=True)[CACHE]
    detach(model)
    attach(model, "videorope")
    with pytest.raises(ValueError, match="placed by 'mrope'.*attached to 'videorope'"):
        model(input_ids=token, **{CACHE: placed})


# -- what a call may bring --------------------------------------------------------------------------------------------


def test_embeddings_with_token_types_equal_token_ids() -> None:
    for name in ("qwen2_vl", "llava"):
        model = attached(name, "videorope")
        inputs = batch_of(model, ROWS[1:])
        expected, tokens = logits(model, inputs), generate(model, **inputs)
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        with torch.no_grad():
            arguments = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_grid_thw")}
            features = model.model.get_image_features(**arguments, return_dict=True).pooler_output
        embeds[inputs["input_ids"] == IMAGE] = torch.cat(list(features))
        given = {
            "inputs_embeds": embeds,
            "attention_mask": inputs["attention_mask"],
            "mm_token_type_ids": (inputs["input_ids"] == IMAGE).long(),
        }
        if name == "qwen2_vl":
            given["image_grid_thw"] = inputs["image_grid_thw"]
        torch.testing.assert_close(logits(model, given), expected, atol=1e-5, rtol=0)
        assert torch.equal(generate(model, **given), tokens)


def test_an_explicit_layout_replaces_what_the_inputs_say() -> None:
    model = attached("internvl", "rope_dhr")
    inputs = batch_of(model, [[2, (2, 2), (2, 2), (2, 2), 2]])
    with pytest.raises(ValueError, match="how the tiles of an image are arranged.*position_layout"):
        model(**inputs)
    layout = scheme("rope_dhr").layout([[Text(2), Tiles(2, 1, 2), Text(2)]], num_layers=2)
    tokens = generate(model, position_layout=layout, **inputs)
    assert torch.equal(generate(model, position_layout=layout, use_cache=False, **inputs), tokens)
    assert torch.equal(generate(model, position_layout=layout, num_beams=1, num_return_sequences=1, **inputs), tokens)
    explicit = logits(model, {**inputs, "position_ids": layout.position_ids()})
    torch.testing.assert_close(logits(model, {**inputs, "position_layout": layout}), explicit, atol=1e-6, rtol=0)
    other = scheme("raster").layout([[Text(16)]])
    with pytest.raises(ValueError, match="laid out by 'raster'.*attached to 'rope_dhr'"):
        model(**inputs, position_layout=other)


def test_a_packed_layout_keeps_sequences_apart() -> None:
    model = attached("qwen2_vl", "mrope")
    inputs = batch_of(model, ROWS)
    expected = on_real(logits(model, inputs), inputs)
    real = inputs["attention_mask"].bool()
    layout = scheme("mrope").layout(segments_of(ROWS), padding_side="left").pack()
    packed = {
        "input_ids": inputs["input_ids"][real][None],
        "mm_token_type_ids": inputs["mm_token_type_ids"][real][None],
        "image_grid_thw": inputs["image_grid_thw"],
        "pixel_values": inputs["pixel_values"],
        "position_layout": layout,
        "use_cache": False,
    }
    torch.testing.assert_close(logits(model, packed)[0], expected, atol=2e-5, rtol=0)


def test_eager_attention_gives_what_sdpa_gives() -> None:
    model = attached("qwen2_vl", "pype")
    inputs = batch_of(model, ROWS)
    expected = on_real(logits(model, inputs), inputs)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(on_real(logits(model, inputs), inputs), expected, atol=2e-5, rtol=0)


def test_static_cache() -> None:
    for which in ("mrope", "pype"):
        model = attached("qwen2_vl", which)
        inputs = batch_of(model, ROWS)
        expected = generate(model, **inputs)
        assert torch.equal(generate(model, cache_implementation="static", disable_compile=True, **inputs), expected)


def test_gradient_checkpointing_leaves_gradients() -> None:
    for which in ("pype", "mhrope"):
        model = attached("qwen2_vl", which).train()
        inputs = batch_of(model, ROWS)
        gradients = []
        for step in range(2):
            if step:
                switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
                switch({"use_reentrant": False})
            model.zero_grad()
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            gradients.append([p.grad.clone() for p in model.model.language_model.layers.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)


def test_half_precision_keeps_ids_apart() -> None:
    """Ids and angles stay in float32; 300 tokens before an image would otherwise merge its ids."""
    model = attached("qwen2_vl", "v2pe").to(torch.bfloat16)
    rotary = model.model.language_model.rotary_emb
    assert rotary.ladder.dtype == torch.float32
    ids = scheme("v2pe").layout([[Text(300), Image(3, 5)]]).ids
    seen = []
    rotary.register_forward_hook(lambda module, args, out: seen.append(out))
    inputs = batch_of(model, [[300, (3, 5)]])
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    logits(model, inputs)
    exact = channel_tables(ids[0, 0, ..., None].double() * 1e4 ** -(torch.arange(8) / 8).double())
    assert (seen[0][0].double() - exact[0]).abs().max() < 2**-8
    with pytest.raises(ValueError, match="position_ids: expected integers or float32"):
        model(**inputs, position_ids=torch.zeros(1, 315, dtype=torch.bfloat16))


# -- attaching and detaching ------------------------------------------------------------------------------------------


def hooks_of(model: Any) -> list[int]:
    """Hooks of every module; the models install some of their own in their first pass."""
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "llava", "smolvlm"])
def test_detach_gives_the_model_back_bit_for_bit(name: str) -> None:
    model = tiny_vlm(name)
    inputs = batch_of(model, APART)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = logits(model, inputs)
    names = {id(module): set(vars(module)) for module in model.modules()}
    hooks = hooks_of(model)
    rotary = (getattr(model.model, "language_model", None) or model.model.text_model).rotary_emb
    for which in ("pype", "mhrope"):
        attach(model, which, **OPTIONS[which])
        assert list(model.state_dict()) == list(before)
        logits(model, inputs)
        assert detach(model) is model
    assert torch.equal(logits(model, inputs), expected)
    assert any(module is rotary for module in model.modules())
    assert {id(module): set(vars(module)) for module in model.modules()} == names
    assert hooks_of(model) == hooks


def test_methods_that_an_instance_has_itself_are_called_and_come_back() -> None:
    """Compilers and device hooks put a forward of their own on instances."""
    model = tiny_vlm("qwen2_vl")
    inputs = batch_of(model, APART)
    expected = logits(model, inputs)
    calls = []
    places = {"base": model.model, "layer": decoder_of(model).layers[1].self_attn}
    for name, module in places.items():
        original = module.forward
        module.forward = lambda *args, n=name, f=original, **kwargs: calls.append(n) or f(*args, **kwargs)
    own = {name: module.forward for name, module in places.items()}
    for which in ("mrope_hf5", "mhrope"):
        attach(model, which, **OPTIONS.get(which, {}))
        calls.clear()
        found = logits(model, inputs)
        assert sorted(calls) == ["base", "layer"]
        detach(model)
        assert {name: module.forward for name, module in places.items()} == own
        if which == "mrope_hf5":
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ({"model_type": "glm4"}, "its output on text changes by"),
        ({"model_type": "ernie4_5"}, "its output on text changes by"),
        ({"model_type": "stablelm", "qk_layernorm": True}, "its output on text changes by"),
        ({"model_type": "olmo", "clip_qkv": 0.05}, "its output on text changes by"),
        ({"model_type": "exaone4"}, "it raised"),
    ],
)
def test_heads_that_turn_in_a_way_of_their_own_are_refused(text: dict, why: str) -> None:
    model = tiny_vlm("llava", **text)
    inputs = batch_of(model, ROWS)
    expected = logits(model, inputs)
    names = {id(module): set(vars(module)) for module in model.modules()}
    with pytest.raises(ValueError, match=rf"'mhrope' turns heads differently, which \w+ of layer 0 cannot do: {why}"):
        attach(model, "mhrope", **OPTIONS["mhrope"])
    assert {id(module): set(vars(module)) for module in model.modules()} == names
    assert torch.equal(logits(model, inputs), expected)
    attach(model, "v2pe")  # one table for all heads can be hosted


@pytest.mark.parametrize("text", [{"model_type": "qwen3"}, {"model_type": "olmo2"}, {"model_type": "cohere"}])
def test_heads_of_other_decoders_turn_on_text_as_their_own(text: dict) -> None:
    model = tiny_vlm("llava", **text)
    words = {"input_ids": random_ids(2, 9), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    expected = logits(model, words)
    attach(model, "mhrope", **OPTIONS["mhrope"])
    torch.testing.assert_close(logits(model, words), expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_in_chunks_may_begin_with_padding() -> None:
    model = attached("llava", "raster")
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :9] = 0
    prompt = {"input_ids": random_ids(2, 12), "attention_mask": mask}
    whole = generate(model, **prompt)
    assert torch.equal(generate(model, prefill_chunk_size=4, **prompt), whole)


def test_two_models_attached_differently_in_one_process() -> None:
    one, two, plain = (tiny_vlm("qwen2_vl") for _ in range(3))
    inputs = batch_of(one, APART)
    expected = logits(plain, inputs)
    attach(one, "mrope_hf5")
    attach(two, "cca")
    first, second = logits(one, inputs), logits(two, inputs)
    assert torch.equal(first, expected)
    assert torch.equal(logits(plain, inputs), expected)
    assert (second - expected).abs().max() > 1e-2
    assert (scheme_of(one).name, scheme_of(two).name) == ("mrope_hf5", "cca")
    assert torch.equal(logits(one, inputs), first)


def test_a_copy_is_attached_by_itself() -> None:
    model = attached("qwen2_vl", "pype")
    inputs = batch_of(model, APART)
    expected = logits(model, inputs)
    other = copy.deepcopy(model)
    detach(model)
    assert torch.equal(logits(other, inputs), expected)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert not logits(other, inputs).any()
    detach(other)
    assert logits(model, inputs).any()


def test_what_cannot_be_hosted_says_why() -> None:
    model = tiny_vlm("qwen3_vl")
    with pytest.raises(ValueError, match="no scheme is called 'mropes'.*mrope"):
        attach(model, "mropes")
    with pytest.raises(ValueError, match="deals out 8 key/value heads, the model has 2; give sections="):
        attach(model, "mhrope")
    attach(model, "videorope")
    with pytest.raises(ValueError, match="time scale of 'videorope' would have no effect"):
        model(**batch_of(model, [[2, (2, 2, 3), 1]]))
    with pytest.raises(ValueError, match="'videorope' is already attached"):
        attach(model, "mrope")
    with pytest.raises(ValueError, match="image_grid_thw: the token types hold 6 tokens"):
        model(input_ids=random_ids(1, 8), mm_token_type_ids=torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0]]))
    detach(model)
    with pytest.raises(ValueError, match="no position scheme is attached"):
        detach(model)
    with pytest.raises(ValueError, match=r"sections: the allocation 'single' of 'v2pe' has none"):
        attach(model, "v2pe", sections=(1, 1, 1))
    with pytest.raises(
        ValueError, match=r"Linear \(model type 'None'\) is not supported; supported are glm4v, idefics3"
    ):
        attach(torch.nn.Linear(2, 2), "mrope")
    scaled = tiny_vlm("llava", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match="its ladder changes with the length"):
        attach(scaled, "v2pe")
    flash = attached("llava", "cca")
    flash.model.language_model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="needs the implementation 'eager' or 'sdpa', got 'flash_attention_2'"):
        flash(**batch_of(flash, ROWS))


@pytest.mark.parametrize("installed", ["4.57.6", "5.5.4", "6.0.0.dev0", "unknown"])
def test_another_transformers_is_refused_with_the_range(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_vlm("llava")
    monkeypatch.setattr("transformers.__version__", installed)
    with pytest.raises(
        ImportError, match=rf"expected a version >=5\.6,<6, got {re.escape(installed)}; run pip install"
    ):
        attach(model, "raster")
    for fine in ("5.6.0", "5.10.0rc1", "5.99.1"):
        monkeypatch.setattr("transformers.__version__", fine)
        detach(attach(model, "raster"))


def test_the_range_of_transformers_is_the_one_of_the_extra_and_the_documentation() -> None:
    root = Path(__file__).parents[2]
    text = (root / "pyproject.toml").read_text()
    assert re.search(r'^vlm = \["transformers>=5\.6,<6"\]$', text, re.MULTILINE)
    assert "transformers 5.6 up to but without 6" in str(transformers_adapter.__doc__).replace("\n", " ")
    assert "transformers >= 5.6, < 6" in (root / "README.md").read_text().replace("\n", " ")


def test_rope_scaling_of_the_model_is_kept() -> None:
    for parameters in (
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
    ):
        model = tiny_vlm("llava", rope_parameters=parameters)
        inputs = batch_of(model, APART)
        expected = on_real(logits(model, inputs), inputs)
        attach(model, "raster")
        torch.testing.assert_close(on_real(logits(model, inputs), inputs), expected, atol=1e-5, rtol=0)


def test_every_tested_model_is_a_supported_one() -> None:
    assert sorted(MODELS) == supported_models()
    assert set(SPLIT_MODELS) < set(GRID_MODELS)
    assert noise(2).shape == (2,)
    assert replace(scheme("mrope"), cursor="spatial").cursor == scheme("mrope_hf5").cursor


def test_ids_equal_those_of_transformers_on_a_large_batch() -> None:
    inputs, model = position_ids.batch(tokens=12000, images=60, videos=4), position_ids.reference_model()
    expected, deltas = model.get_rope_index(inputs["mm_token_type_ids"], **inputs)
    layout = position_ids.ours(inputs)
    assert torch.equal(layout.position_ids(), expected)
    assert deltas.shape == layout.rope_deltas().shape
