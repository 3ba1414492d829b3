"""Every supported model, one by one: passes made by hand, videos, beams, padding, embeddings, further turns, half
precision and neighbours in the process.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from mmpos.adapters._hf_rotary import IDS
from mmpos.adapters.transformers import attach, detach, own_scheme
from mmpos.multimodal import Image, Text, Video, channel_tables, scheme
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
)
from tests.adapters.vlms import (
    CACHE,
    GRID_MODELS,
    IMAGE,
    MODELS,
    SPLIT_MODELS,
    START,
    VIDEO,
    VIDEO_MODELS,
    batch_of,
    random_ids,
    tiny_vlm,
)

PLACEHOLDER_MODELS = [name for name in MODELS if name not in GRID_MODELS]
# what an image is in each model with fixed sizes: blocks of (rows, columns), a newline token at the end of each row
FIXED = {"llava": [(3, 3)], "internvl": [(2, 2)], "smolvlm": [(2, 2)], "idefics3": [(2, 2)]}
TILED = [[(3, 3), (3, 7)], [(3, 3), (6, 4)], [(3, 3), (6, 7)], [(3, 3), (6, 4)]]  # images of 9x24, 24x12, 20x22, 24x9


def images_of(name: str, pieces: list[Any], first: int) -> list[Any]:
    """Segments of a row for a model with fixed image sizes; ``first`` images came before."""
    row: list[Any] = []
    for piece in pieces:
        if isinstance(piece, int):
            row.append(Text(piece))
            continue
        row += [Image(*size) for size in FIXED.get(name, TILED[first % 4])]
        first += 1
    return row


def layout_of(name: str, rule: Any, rows: list[list[Any]], layers: int = 2) -> Any:
    if name in GRID_MODELS:
        return rule.layout(segments_of(rows), padding_side="left", num_layers=layers)
    before = [sum(not isinstance(p, int) for row in rows[:n] for p in row) for n in range(len(rows))]
    segments = [images_of(name, row, first) for row, first in zip(rows, before, strict=True)]
    return rule.layout(segments, padding_side="left", num_layers=layers)


def count_images(row: list[Any]) -> int:
    return sum(not isinstance(piece, int) for piece in row)


def row_of(inputs: dict[str, Any], rows: list[list[Any]], number: int) -> dict[str, Any]:
    """One row of a batch of images, without its padding."""
    keep = inputs["attention_mask"][number].bool()
    before = sum(count_images(row) for row in rows[:number])
    images = slice(before, before + count_images(rows[number]))
    alone = {"input_ids": inputs["input_ids"][number : number + 1, keep]}
    if "mm_token_type_ids" in inputs:
        alone["mm_token_type_ids"] = inputs["mm_token_type_ids"][number : number + 1, keep]
    if images.start == images.stop:
        return alone
    pixels = inputs["pixel_values"]
    if "image_grid_thw" in inputs:
        alone["image_grid_thw"] = inputs["image_grid_thw"][images]
        ends = inputs["image_grid_thw"].prod(1).cumsum(0).tolist()
        pixels = pixels[ends[images.start - 1] if images.start else 0 : ends[images.stop - 1]]
    elif pixels.dim() == 5 and "image_sizes" not in inputs:  # SmolVLM: (rows, images, ...)
        pixels = pixels[number : number + 1, : count_images(rows[number])]
    else:
        pixels = pixels[images]
    if "image_sizes" in inputs:
        alone["image_sizes"] = inputs["image_sizes"][images]
    if "batch_num_images" in inputs:
        alone["batch_num_images"] = inputs["batch_num_images"][number : number + 1]
    return {**alone, "pixel_values": pixels}


# -- against a pass made by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["v2pe", "pype", "circlerope_age", "videorope"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_a_pass_with_explicit_tables(name: str, which: str) -> None:
    # one image a row: LLaVA-OneVision does not cut rows of several into tiles
    rows = [[3, (4, 5), 2], [1, (3, 2)]] if name == "llava_onevision" else ROWS
    model = tiny_vlm(name)
    inputs = batch_of(model, rows)
    rule = scheme(which, **OPTIONS.get(which, {}))
    layout = layout_of(name, rule, rows)
    sections = None
    if which == "circlerope_age" and own_scheme(model).allocation == "chunked":
        sections = tuple(decoder_of(model).config.rope_parameters["mrope_section"])
    expected = on_real(by_hand(model, inputs, layout, rule, sections), inputs)
    plain = on_real(logits(attach(copy.deepcopy(model), own_scheme(model)), inputs), inputs)
    out = on_real(logits(attach(model, rule), inputs), inputs)
    torch.testing.assert_close(out, expected, atol=3e-5, rtol=0)
    assert (out - plain).abs().max() > 1e-2


@pytest.mark.parametrize("which", ["pype", "circlerope_age"])
@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
def test_five_layers_take_turns(name: str, which: str) -> None:
    """Levels that fall every second layer, rings and grids in turn; ids and tables are kept once for each kind of
    layer, not once for each layer.
    """
    rule = scheme(which, layer_options={"jump": 2} if which == "pype" else {})
    model = tiny_vlm(name, num_hidden_layers=5)
    rows = [[3, (6, 7), 2], [1, (2, 3)]]
    inputs = batch_of(model, rows)
    layout = layout_of(name, rule, rows, layers=5)
    expected = by_hand(model, inputs, layout, rule)
    attach(model, rule)
    seen: list[Tensor] = []
    decoder_of(model).rotary_emb.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    torch.testing.assert_close(on_real(logits(model, inputs), inputs), on_real(expected, inputs), atol=5e-5, rtol=0)
    kinds = 3 if which == "pype" else 2
    assert layout.ids.shape[0] == layout.num_variants == kinds
    assert seen[0].shape[0] == kinds
    check_generation(model, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_heads_turn_with_their_own_axis(name: str) -> None:
    """Keys in the cache: those the model projects, the first head turned by time, the second by rows; queries follow
    the head whose keys they meet, from a table with one entry for each key/value head.
    """
    model = tiny_vlm(name)
    inputs = batch_of(model, [[2, (2, 3), 2]])
    angles = layout_of(name, scheme("mhrope"), [[2, (2, 3), 2]]).position_ids()[:2, 0].float()[..., None]
    decoder = decoder_of(model)
    attention = decoder.layers[0].self_attn
    parts = [getattr(attention, f"{part}_norm", None) or getattr(attention, f"{part}_proj") for part in "qk"]
    seen: list[Tensor] = []
    hooks = [part.register_forward_hook(lambda module, args, out: seen.append(out[0])) for part in parts]
    logits(model, inputs)
    attach(model, "mhrope", sections=(1, 1, 0))
    del seen[2:]  # attaching tries each layer once
    for hook, part in zip(hooks, parts, strict=True):
        hook.remove()  # what the adapter's own hook has done is seen only by hooks behind it
        part.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    tables: list[tuple[Tensor, Tensor]] = []
    decoder.rotary_emb.register_forward_hook(lambda module, args, out: tables.append(out))
    logits(model, inputs)
    pairs = len(decoder.rotary_emb.ladder)
    angles = angles * 1e4 ** -(torch.arange(pairs) / pairs)
    torch.testing.assert_close(tables[0][0][0], angles.cos())
    if name == "glm4v":  # neighbouring channels, half of them
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    width = int(attention.head_dim)
    assert width == (4 if name == "glm4v" else 2) * pairs
    for still, turned, heads in zip(seen[:2], seen[2:], (4, 2), strict=True):
        still, turned = (part.reshape(part.shape[0], heads, width).transpose(0, 1) for part in (still, turned))
        cos, sin = (table.repeat_interleave(heads // 2, dim=0) for table in (angles.cos(), angles.sin()))
        expected, u, v = still.clone(), still[..., first], still[..., second]
        expected[..., first], expected[..., second] = u * cos - v * sin, v * cos + u * sin
        torch.testing.assert_close(turned, expected, atol=1e-5, rtol=0)


# -- videos -----------------------------------------------------------------------------------------------------------


def video_rows(name: str) -> list[list[Any]]:
    """Two videos in a row, one in another, text alone, and an image; GLM-V reads no images beside videos."""
    if name == "llava_onevision":  # all videos of a call have equally many frames
        return [[2, (2, 2, 2), 1, (2, 2, 2), 2], [1, (2, 2, 2), 1], [5], [2, (3, 2), 1]]
    rows: list[list[Any]] = [[2, (3, 2, 3), 1, (2, 1, 2), 2], [1, (2, 2, 3), 1], [5]]
    return rows if name == "glm4v" else [*rows, [2, (3, 2), 1]]


@pytest.mark.parametrize("name", VIDEO_MODELS)
def test_own_scheme_changes_nothing_on_videos(name: str) -> None:
    model = tiny_vlm(name)
    inputs = batch_of(model, video_rows(name))
    before, tokens = logits(model, inputs), generate(model, **inputs)
    attach(model, own_scheme(model))
    out = logits(model, inputs)
    if name in GRID_MODELS:
        assert torch.equal(out, before)
    torch.testing.assert_close(on_real(out, inputs), on_real(before, inputs), atol=1e-5, rtol=0)
    assert torch.equal(generate(model, **inputs), tokens)


def test_own_scheme_decodes_behind_a_long_video_as_it_prefills() -> None:
    """Six frames of 2 x 2 tokens: Qwen2-VL itself puts text of the prompt behind the longer side of a frame, but new
    tokens behind the last frame, so its steps do not continue its prefill. Those of an attached model do.
    """
    model = tiny_vlm("qwen2_vl")
    inputs = batch_of(model, [[2, (6, 2, 2), 1]])
    expected = logits(model, inputs)
    attach(model, own_scheme(model))
    assert torch.equal(logits(model, inputs), expected)
    check_generation(model, inputs)


@pytest.mark.parametrize("which", ["mrope", "v2pe", "cca", "pype", "mrope_interleave_reset", "mhrope"])
@pytest.mark.parametrize("name", VIDEO_MODELS)
def test_generation_from_videos_images_and_text_alone(name: str, which: str) -> None:
    model = attached(name, which)
    check_generation(model, batch_of(model, video_rows(name)))


@pytest.mark.parametrize("which", ["v2pe", "vrope", "cca"])
@pytest.mark.parametrize("name", VIDEO_MODELS)
def test_padding_changes_nothing_beside_videos(name: str, which: str) -> None:
    model = attached(name, which)
    left, right = (batch_of(model, video_rows(name), side=side) for side in ("left", "right"))
    torch.testing.assert_close(
        on_real(logits(model, left), left), on_real(logits(model, right), right), atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("which", ["v2pe", "vrope", "circlerope"])
@pytest.mark.parametrize("name", VIDEO_MODELS)
def test_logits_of_videos_equal_a_pass_with_explicit_tables(name: str, which: str) -> None:
    model = tiny_vlm(name)
    rows = video_rows(name)[:3]
    inputs = batch_of(model, rows)
    rule = scheme(which)
    segments: list[list[Any]] = []
    for row in rows:
        parts: list[Any] = []
        for piece in row:
            if isinstance(piece, int):
                parts.append(Text(piece))
            elif name in SPLIT_MODELS:  # each frame by itself, between the tokens of its timestamp
                parts += [Text(1), Video(1, *piece[1:]), Text(1)] * piece[0]
            elif name == "llava_onevision":
                parts += [Video(*piece), Video(1, 1, 1)]
            else:
                parts.append(Video(*piece))
        segments.append(parts)
    layout = rule.layout(segments, padding_side="left", num_layers=2)
    sections = None
    if which == "circlerope" and own_scheme(model).allocation == "chunked":
        sections = tuple(decoder_of(model).config.rope_parameters["mrope_section"])
    expected = by_hand(model, inputs, layout, rule, sections)
    out = logits(attach(model, rule), inputs)
    torch.testing.assert_close(on_real(out, inputs), on_real(expected, inputs), atol=3e-5, rtol=0)


# -- what cannot be hosted --------------------------------------------------------------------------------------------


def test_patterns_and_sliding_windows_exclude_each_other_and_ids_do_not() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_vlm("llava_onevision", **windows)
    inputs = batch_of(model, [[2, (3, 2), 3]])
    before, tokens = logits(model, inputs), generate(model, **inputs)
    attach(model, "raster")
    torch.testing.assert_close(logits(model, inputs), before, atol=1e-5, rtol=0)
    assert torch.equal(generate(model, **inputs), tokens)
    detach(model)
    attach(model, "cca")
    with pytest.raises(ValueError, match="the pattern of 'cca' cannot be combined with sliding windows"):
        model(**inputs)


@pytest.mark.parametrize(("which", "made_by"), [("grape", "grape.Grape"), ("sofa", "sofa.sofa_mask")])
def test_rules_that_are_no_ids_say_where_they_are(which: str, made_by: str) -> None:
    with pytest.raises(ValueError, match=f"{which!r} cannot be hosted.*made by mmpos.multimodal.{made_by}"):
        attach(tiny_vlm("llava"), which)


@pytest.mark.parametrize("which", ["mrope_time", "videorope", "hope"])
@pytest.mark.parametrize("name", SPLIT_MODELS)
def test_time_scales_say_that_frames_stand_apart(name: str, which: str) -> None:
    model = attached(name, which)
    with pytest.raises(
        ValueError, match=rf"{name} gives every frame of a video a place of its own.*{which}.*no effect"
    ):
        model(**batch_of(model, [[2, (2, 2, 3), 1]]))
    assert logits(model, batch_of(model, [[2, (2, 3), 1]])).isfinite().all()


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision", "internvl", "smolvlm", "idefics3"])
def test_tiles_say_that_their_arrangement_is_not_told(name: str) -> None:
    model = attached(name, "rope_dhr")
    with pytest.raises(ValueError, match=rf"how the tiles of an image are arranged, which the inputs of {name} do not"):
        model(**batch_of(model, [[2, (2, 3), 1]]))


# -- loss, beams, padding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_own_scheme_leaves_loss_and_gradients(name: str) -> None:
    model = tiny_vlm(name)
    inputs = batch_of(model, APART[1:])
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, -100)
    results = []
    for step in range(2):
        if step:
            attach(model, own_scheme(model))
        model.zero_grad()
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        results.append((loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen3_vl_moe"])  # no experts in float64
def test_gradients_of_another_scheme_lead_downhill(name: str) -> None:
    """The change of the loss along its gradient is what the gradient says, through the scheme's tables and pattern."""
    model = attached(name, "mhrope" if name in GRID_MODELS else "pype").double()
    inputs = batch_of(model, APART[1:])
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, -100)
    weights = [layer.self_attn.k_proj.weight for layer in decoder_of(model).layers]
    model(**inputs, labels=labels).loss.backward()
    gradients = [weight.grad.clone() for weight in weights]
    slope = sum(float(g.square().sum()) for g in gradients)
    assert slope > 1e-8
    losses = []
    with torch.no_grad():
        for step in (1e-3, -2e-3):
            for weight, gradient in zip(weights, gradients, strict=True):
                weight += step * gradient
            losses.append(float(model(**inputs, labels=labels).loss))
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(slope, rel=2e-2)


@pytest.mark.parametrize("name", MODELS)
def test_beams(name: str) -> None:
    """With a cache and without one, several continuations of a prompt; the own scheme gives the model's own beams."""
    model = tiny_vlm(name)
    inputs = batch_of(model, [[3, (4, 5), 2], [2, (2, 3), 1]])
    images = inputs["input_ids"] == IMAGE
    inputs["input_ids"][:, :-1][images[:, 1:] & ~images[:, :-1]] = START  # by which older Qwen-VL count images
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, **inputs}
    expected = generate(model, **options)
    for which in ("pype", "v2pe", None):
        other = copy.deepcopy(model)
        attach(other, own_scheme(model) if which is None else scheme(which, **OPTIONS.get(which, {})))
        found = generate(other, **options)
        assert found.shape == (4, 5)
        assert torch.equal(generate(other, use_cache=False, **options), found)
        if which is None:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("which", ["v2pe", "cca", "videorope"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_and_batching_change_nothing(name: str, which: str) -> None:
    model = attached(name, which)
    rows = [*ROWS, [5]]  # the last of text alone
    left, right = (batch_of(model, rows, side=side) for side in ("left", "right"))
    out = logits(model, left)
    torch.testing.assert_close(on_real(out, left), on_real(logits(model, right), right), atol=2e-5, rtol=0)
    for number in range(len(rows)):
        alone = logits(model, row_of(left, rows, number))[0]
        torch.testing.assert_close(out[number, left["attention_mask"][number].bool()], alone, atol=2e-5, rtol=0)


# -- what a call may bring --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_of_the_placeholders_equal_token_ids(name: str) -> None:
    model = attached(name, "cca")
    inputs = batch_of(model, APART)
    expected, tokens = logits(model, inputs), generate(model, **inputs)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    # the mask first: generate() takes the size of the batch from the first tensor it meets
    given = {"attention_mask": inputs["attention_mask"], **inputs, "inputs_embeds": embeds}
    del given["input_ids"]
    torch.testing.assert_close(on_real(logits(model, given), inputs), on_real(expected, inputs), atol=1e-5, rtol=0)
    assert torch.equal(generate(model, **given), tokens)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("qwen3")])  # which adds features later
def test_embeddings_that_hold_the_features_need_token_types_only(name: str) -> None:
    model = attached(name, "cca")
    inputs = batch_of(model, APART)
    expected, tokens = logits(model, inputs), generate(model, **inputs)
    images = inputs["input_ids"] == IMAGE
    kept: list[Tensor] = []
    hook = decoder_of(model).register_forward_pre_hook(
        lambda module, args, kw: kept.append(kw["inputs_embeds"]), with_kwargs=True
    )
    logits(model, inputs)
    hook.remove()
    sizes = {k: v for k, v in inputs.items() if k in ("image_grid_thw", "image_sizes", "batch_num_images")}
    given = {"attention_mask": inputs["attention_mask"], **sizes, "inputs_embeds": kept[0]}
    given["mm_token_type_ids"] = images.long()
    torch.testing.assert_close(on_real(logits(model, given), inputs), on_real(expected, inputs), atol=1e-5, rtol=0)
    assert torch.equal(generate(model, **given), tokens)


@pytest.mark.parametrize("name", [name for name in VIDEO_MODELS if name != "glm4v"])  # marks frames by another token
def test_embeddings_of_the_placeholders_of_videos_equal_token_ids(name: str) -> None:
    model = attached(name, "v2pe_span")  # whose ids tell an image from a video by its tokens
    inputs = batch_of(model, video_rows(name))
    expected, tokens = logits(model, inputs), generate(model, **inputs)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"attention_mask": inputs["attention_mask"], **inputs, "inputs_embeds": embeds}
    del given["input_ids"]
    torch.testing.assert_close(on_real(logits(model, given), inputs), on_real(expected, inputs), atol=1e-5, rtol=0)
    assert torch.equal(generate(model, **given), tokens)


def test_a_video_whose_frames_cannot_be_counted_needs_a_layout() -> None:
    model = attached("llava_onevision", "v2pe_span")
    inputs = batch_of(model, [[2, (2, 2, 2), 1]])
    expected = logits(model, inputs)
    kept: list[Tensor] = []
    hook = decoder_of(model).register_forward_pre_hook(
        lambda module, args, kwargs: kept.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    logits(model, inputs)
    hook.remove()
    given = {"inputs_embeds": kept[0], "attention_mask": inputs["attention_mask"]}
    types = 2 * (inputs["input_ids"] == VIDEO).long()
    with pytest.raises(ValueError, match="pixel_values_videos: needed to count the frames.*position_layout="):
        logits(model, {**given, "mm_token_type_ids": types})
    layout = scheme("v2pe_span").layout([[Text(2), Video(2, 2, 2), Video(1, 1, 1), Text(1)]], num_layers=2)
    torch.testing.assert_close(logits(model, {**given, "position_layout": layout}), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("which", ["v2pe", "cca"])
@pytest.mark.parametrize("name", MODELS)
def test_gapped_ids_without_a_cache_are_no_packed_sequences(name: str, which: str) -> None:
    model = attached(name, which)
    inputs = batch_of(model, APART[1:])
    del inputs["attention_mask"]
    without = logits(model, {**inputs, "use_cache": False})
    torch.testing.assert_close(without, logits(model, {**inputs, "use_cache": True}), atol=1e-5, rtol=0)
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][:, 0] += 1  # and what comes before the gap is seen behind it
    assert (logits(model, {**inputs, "use_cache": False}) - without)[:, -1].abs().max() > 1e-3


# -- further turns ----------------------------------------------------------------------------------------------------


def joined(name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Turns of one conversation as one call."""
    whole: dict[str, Any] = {}
    for key in {key for part in parts for key in part}:
        found = [part[key] for part in parts if key in part]
        sequence = key in ("input_ids", "mm_token_type_ids", "attention_mask")
        rows_first = key == "pixel_values" and name in ("smolvlm", "idefics3")
        whole[key] = torch.cat(found, dim=1 if sequence or rows_first else 0)
    return whole


@pytest.mark.parametrize("which", ["v2pe", "pype", "mrope_interleave_reset"])
@pytest.mark.parametrize("name", MODELS)
def test_second_turn_with_a_new_image_on_a_warm_cache(name: str, which: str) -> None:
    check_second_turn(name, which, (4, 5), (3, 2))


@pytest.mark.parametrize("which", ["v2pe", "pype", "mrope_interleave_reset"])
@pytest.mark.parametrize("name", VIDEO_MODELS)
def test_second_turn_with_a_new_video_on_a_warm_cache(name: str, which: str) -> None:
    check_second_turn(name, which, (2, 2, 3), (2, 3, 2))


def check_second_turn(name: str, which: str, first_piece: Any, second_piece: Any) -> None:
    """Turn one, two tokens of answer, turn two: the same as all of it at once; also through ``generate()``."""
    model = attached(name, which)
    first, second = batch_of(model, [[2, first_piece, 1]]), batch_of(model, [[1, second_piece, 2]], seed=7)
    answer = {"input_ids": random_ids(1, 2, seed=9), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    if "mm_token_type_ids" in first:
        answer["mm_token_type_ids"] = 0 * answer["input_ids"]
    whole = joined(name, [first, answer, second])
    expected = logits(model, whole)
    with torch.no_grad():
        out = model(**first, use_cache=True)
        for token in answer["input_ids"].unbind(1):
            out = model(input_ids=token[:, None], **{CACHE: out[CACHE]}, use_cache=True)
        warm = copy.deepcopy(out[CACHE])
        new = {k: v for k, v in second.items() if k != "attention_mask"}
        out = model(**new, **{CACHE: out[CACHE]}, use_cache=True)
    torch.testing.assert_close(out.logits, expected[:, -out.logits.shape[1] :], atol=3e-5, rtol=0)
    asked = {**new, **{k: whole[k] for k in ("input_ids", "mm_token_type_ids") if k in whole}}
    assert torch.equal(generate(model, **{CACHE: warm}, **asked), generate(model, **whole))


# -- neighbours, half precision ---------------------------------------------------------------------------------------


def test_models_attached_differently_in_one_process_do_not_meet() -> None:
    """All models with schemes in turn, called in turn: each gives what it gives alone."""
    schemes = ["v2pe", "pype", "cca", "mrope", "raster"]
    chosen = {name: schemes[number % len(schemes)] for number, name in enumerate(MODELS)}
    alone = {}
    for name, which in chosen.items():
        model = attached(name, which)
        inputs = batch_of(model, APART)
        alone[name] = (logits(model, inputs), generate(model, 3, **inputs))
    models = {name: attached(name, which) for name, which in chosen.items()}
    plain = {name: tiny_vlm(name) for name in ("qwen2_vl", "llava")}
    before = {name: logits(model, batch_of(model, APART)) for name, model in plain.items()}
    for name, model in models.items():
        inputs = batch_of(model, APART)
        assert torch.equal(logits(model, inputs), alone[name][0])
        assert torch.equal(generate(model, 3, **inputs), alone[name][1])
    for name, model in plain.items():
        assert torch.equal(logits(model, batch_of(model, APART)), before[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_fractional_ids_stay_apart_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """300 tokens before an image: in half precision its ids would merge to a few."""
    model = attach(tiny_vlm(name), "v2pe", block_options={"step": 1 / 16}).to(dtype)
    inputs = batch_of(model, [[300, (3, 5)]])
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    seen: list[tuple[Tensor, Tensor]] = []
    rotary = decoder_of(model).rotary_emb
    rotary.register_forward_hook(lambda module, args, out: seen.append(out))
    assert logits(model, inputs).dtype == dtype
    rule = scheme("v2pe", block_options={"step": 1 / 16})
    ids = layout_of(name, rule, [[300, (3, 5)]], layers=2).position_ids()[0, 0]
    visual = ids[300:]
    assert visual.unique().numel() == len(visual) > visual.to(dtype).unique().numel()
    exact = channel_tables(ids[None, :, None] * rotary.ladder.double(), rotary.layout)
    for found, wanted in zip(seen[0], exact, strict=True):
        found = found[0] if found.dim() == 4 else found
        assert found.dtype == dtype
        assert (found.double() - wanted).abs().max() < 2**-8


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_drawn_for_each_image_in_training_and_fixed_in_evaluation(name: str) -> None:
    model = attached(name, "v2pe")
    rotary = decoder_of(model).rotary_emb
    rows = [[3, (4, 6), 2, (4, 3), 1], [2, (2, 3), 1], [4]]
    inputs = batch_of(model, rows)
    ids: list[Tensor] = []
    rotary.register_forward_pre_hook(lambda module, args, kwargs: ids.append(IDS.get()), with_kwargs=True)
    fixed = [logits(model, inputs) for _ in range(2)]
    assert torch.equal(fixed[0], fixed[1])
    assert torch.equal(ids[0], ids[1])
    model.train()
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        logits(model, inputs)
    assert torch.equal(ids[2], ids[3])
    assert not torch.equal(ids[2], ids[4])
    drawn = set()
    for number, row in enumerate(rows[:2]):
        visual = inputs["input_ids"][number] == IMAGE
        inside = visual[1:] & visual[:-1]
        starts = (visual & ~torch.nn.functional.pad(visual[:-1], (1, 0))).long().cumsum(0)
        for image in range(1, count_images(row) + 1):
            steps = ids[4][0, 0, number].diff()[inside & (starts[1:] == image)].unique()
            if name not in ("llava_next", "llava_onevision"):
                assert len(steps) == 1  # between blocks of a tiled image the counter is rounded up
            assert float(steps.min()) in scheme("v2pe").train_steps
            drawn.add(float(steps.min()))
    assert len(drawn) > 1
    text = ids[4][0, 0, 2][inputs["attention_mask"][2].bool()]
    assert text.tolist() == [0, 1, 2, 3]
    assert torch.equal(logits(model.eval(), inputs), fixed[0])
