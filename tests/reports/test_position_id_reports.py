"""Field reports about position ids of multimodal sequences. Named after the repository and the number of the report."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from mmpos.functional.rotary import rotate
from mmpos.multimodal import Image, PositionLayout, Text, Video, rotary_angles, rotary_table, scheme


def from_types(
    name: str, types: list[list[int]], mask: list[list[int]] | None = None, **grids: object
) -> PositionLayout:
    given = {
        key: torch.tensor(value) if key.endswith("grids") and value is not None else value
        for key, value in grids.items()
    }
    real = None if mask is None else torch.tensor(mask)
    return scheme(name).layout_from_types(torch.tensor(types), mask=real, **given)


# -- 6: three meanings of "interleaved" --------------------------------------------------------------------------------


def test_multimodal_ropes_2_vllm_gaudi_1437_xllm_2120_axes_interleave_and_pairs_stay_apart() -> None:
    """Sections 24, 20, 20 of 64 pairs: which axis a pair reads says nothing about which channels form it, ids are not
    written to, and text is 1-D RoPE whatever the allocation.
    """
    allocation = scheme("mrope_interleave").allocate(64, sections=(24, 20, 20))
    channel = torch.arange(64)
    expected = torch.where(
        (channel % 3 == 1) & (channel < 60), 1, torch.where((channel % 3 == 2) & (channel < 60), 2, 0)
    )
    assert torch.equal(allocation.axis, expected)
    ids = scheme("mrope_interleave").layout([[Text(2), Image(2, 3), Text(1)]]).position_ids()
    before = ids.clone()
    angles = rotary_angles(ids, allocation, 5e6)[:, 0]
    x = torch.randn(1, 1, ids.shape[-1], 128)
    turned = rotate(x, rotary_table(ids, allocation, 5e6))
    assert torch.equal(ids, before)
    u, v, cos, sin = x[:, 0, :, :64], x[:, 0, :, 64:], angles.cos(), angles.sin()
    torch.testing.assert_close(turned[:, 0], torch.cat([u * cos - v * sin, v * cos + u * sin], dim=-1))
    text = torch.arange(9).expand(3, 1, -1)
    plain = rotary_angles(text[:1], scheme("raster").allocate(64), 5e6)
    for name, sections in (("mrope", (16, 24, 24)), ("mrope_interleave", (24, 20, 20)), ("videorope", (16, 24, 24))):
        assert torch.equal(rotary_angles(text, scheme(name).allocate(64, sections=sections), 5e6), plain)
    by_head = rotary_angles(text, scheme("mhrope").allocate(64), 5e6)
    assert torch.equal(by_head, plain.expand_as(by_head))


# -- 18: missing, one-axis or stale ids --------------------------------------------------------------------------------

SAMPLE = [Text(3), Image(2, 2), Text(1)]


def test_liger_276_transformers_40490_automodel_2172_ids_of_an_image_and_the_token_after_it() -> None:
    """A plain range shifts boxes; the offset was lost after prefill; packing restarted without the image."""
    layout = scheme("mrope").layout([SAMPLE])
    assert layout.position_ids()[:, 0].tolist() == [
        [0, 1, 2, 3, 3, 3, 3, 5],
        [0, 1, 2, 3, 3, 4, 4, 5],
        [0, 1, 2, 3, 4, 3, 4, 5],
    ]
    assert layout.rope_deltas().tolist() == [[6 - 8]]
    assert layout.next_ids()[:, 0].tolist() == [[6], [6], [6]]
    longer = scheme("mrope").layout([[*SAMPLE, Text(1)]])
    assert torch.equal(torch.cat([layout.ids, layout.next_ids()[None]], dim=-1), longer.ids)


def test_automodel_2172_packing_restarts_at_each_sequence() -> None:
    packed = scheme("mrope").layout([SAMPLE, SAMPLE]).pack()
    one = scheme("mrope").layout([SAMPLE]).position_ids()
    assert torch.equal(packed.position_ids(), torch.cat([one, one], dim=-1))
    allowed = packed.dense_mask()[0, 0]
    assert not allowed[8:, :8].any()
    assert allowed[8:, 8:].equal(torch.ones(8, 8).tril().bool())


# -- 19: time unit applied to a still image ----------------------------------------------------------------------------


def test_transformers_45325_lerobot_3648_time_scales_no_still_image() -> None:
    """An image at place 4 got time 16 with four ids a second; every further image made it worse."""
    rule = scheme("mrope_time", cursor="spatial", block_options={"tokens_per_second": 4.0})
    layout = rule.layout([[Text(4), Image(2, 2), Text(1)]])
    assert layout.position_ids()[:, 0].tolist() == [
        [0, 1, 2, 3, 4, 4, 4, 4, 6],
        [0, 1, 2, 3, 4, 4, 5, 5, 6],
        [0, 1, 2, 3, 4, 5, 4, 5, 6],
    ]
    assert layout.rope_deltas().tolist() == [[-2]]
    second = rule.layout([[Text(4), Image(2, 2), Text(1), Image(2, 2)]])
    assert second.position_ids()[0, 0, -4:].tolist() == [7, 7, 7, 7]


def test_transformers_45325_the_start_of_a_video_moves_no_id() -> None:
    """Only what passes within a video counts; times by the clock are there by name."""
    late, early = ([[Text(3), Video(2, 2, 2, times=[start, start + 0.5]), Text(1)]] for start in (10.0, 0.0))
    rule = scheme("mrope_time")
    assert torch.equal(rule.layout(late).ids, rule.layout(early).ids)
    assert rule.layout(late).position_ids()[0, 0].tolist() == [0, 1, 2, *[3] * 4, *[4] * 4, 5]
    by_clock = scheme("mrope_time", block_options={"origin": "clock"})
    assert by_clock.layout(late).position_ids()[0, 0, 3:7].tolist() == [23] * 4


# -- 20: time steps that collapse --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "step"), [(1.0, 4), (0.5, 2), (0.083, 0)])
def test_transformers_45381_48669_41152_lmms_eval_1393_the_floor_comes_last(seconds: float, step: int) -> None:
    """Seconds between frames were cut to an integer first (0.5 to 0), or the start was scaled with them."""
    rule = scheme("mrope_time", block_options={"tokens_per_second": 4.0})
    with pytest.warns(UserWarning, match="fall on one id") if step == 0 else nullcontext():  # not hidden
        layout = rule.layout_from_types(
            torch.tensor([[0, 0, 0, *[2] * 8, 0]]),
            video_grids=torch.tensor([[2, 4, 4]]),
            merge_size=2,
            seconds_per_frame=torch.tensor([seconds]),
        )
    assert layout.position_ids()[0, 0, 3:11].tolist() == [3] * 4 + [3 + step] * 4


def test_qwen3_vl_893_text_after_a_long_video_starts_behind_it() -> None:
    """Six frames of 2 x 2 from place 3: the next text token is 9; transformers 5 gives 5, which is there by name."""
    row = [Text(3), Video(6, 2, 2), Text(2)]
    original, served = (scheme(name).layout([row]) for name in ("mrope", "mrope_hf5"))
    assert original.position_ids()[0, 0, -2:].tolist() == [9, 10]
    assert original.rope_deltas().tolist() == [[11 - 29]]
    assert served.position_ids()[0, 0, -2:].tolist() == [5, 6]
    assert served.next_ids()[0, 0].tolist() == [7]  # and the first new token follows the last, not the longest axis


# -- 21: padding and ids of different lengths --------------------------------------------------------------------------


def test_llamafactory_10783_padding_to_a_multiple_keeps_ids() -> None:
    """The ids were not padded with the tokens (1234 against 1240)."""
    rows = [[Text(2), Image(2, 3), Text(1)], [Text(4), Image(1, 2)]]
    layout = scheme("mrope").layout(rows, padding_side="left")
    padded = layout.pad_to(16)
    assert padded.ids.shape[-1] == padded.kind.shape[1] == 16
    assert torch.equal(padded.ids[..., :9], layout.ids)
    for side in ("left", "right"):
        batch = scheme("mrope").layout(rows, padding_side=side, length=16)
        for number, row in enumerate(rows):
            alone = scheme("mrope").layout([row])
            assert torch.equal(batch.position_ids()[:, number, batch.mask[number]], alone.position_ids()[:, 0])
        assert torch.equal(batch.cursor, layout.cursor)


def test_megatron_patch_448_an_inverted_mask_is_noticed() -> None:
    """With 1 for padding every real token was taken for padding."""
    for types, grids in (([[0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]], [[1, 2, 2]]), ([[0, 0, 0], [0, 0, 0]], None)):
        mask = [[0] * len(types[0]), [0, *[1] * (len(types[0]) - 1)]]
        with pytest.raises(ValueError, match=r"mask: row 0 has no real token; 1 marks tokens and 0 padding"):
            from_types("mrope", types, mask, image_grids=grids)
    with pytest.raises(ValueError, match=r"1 grids hold 4 tokens.*the batch has 0 image tokens \(by row: \[0\]\)"):
        from_types("mrope", [[0, 1, 1, 1, 1, 0]], [[0, 0, 0, 0, 0, 1]], image_grids=[[1, 2, 2]])


def test_llamafactory_10783_value_and_side_of_padding_are_parameters() -> None:
    layout = scheme("mrope").layout([[Text(2), Image(1, 2)]])
    for side, value in (("left", 1), ("right", 7)):
        padded = layout.pad_to(6, side, value)
        slots = slice(0, 2) if side == "left" else slice(4, 6)
        assert bool((padded.ids[..., slots] == value).all())
        assert not bool(padded.mask[:, slots].any())


def test_agent_lightning_441_a_row_cut_inside_an_image_names_both_counts() -> None:
    """Truncation left two raw shapes in an indexing error."""
    message = r"1 grids hold 6 tokens \(\[6\]\), but the batch has 4 image tokens \(by row: \[4, 0\]\)"
    with pytest.raises(ValueError, match=message):
        from_types("mrope", [[0, 1, 1, 1, 1], [0, 0, 0, 0, 0]], image_grids=[[1, 2, 3]])


# -- 22: pruned video tokens -------------------------------------------------------------------------------------------


def test_vllm_27859_30847_22980_pruned_video_tokens_keep_their_places() -> None:
    """Three frames of 2 x 2: all of the first, none of the second, two of the third; then an image, then text."""
    layout = scheme("mrope").layout([[Text(1), Video(3, 2, 2), Image(3, 1), Text(2)]])
    keep = torch.tensor([0, 1, 2, 3, 4, 10, 12, 13, 14, 15, 16, 17])
    kept = layout.take(keep)
    assert torch.equal(kept.ids, layout.ids[..., keep])
    assert kept.position_ids()[:, 0, 1:7].T.tolist() == [
        [1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2], [3, 1, 2], [3, 2, 2],
    ]  # fmt: skip
    assert kept.kind[0].tolist() == [0, *[2] * 6, *[1] * 3, 0, 0]  # nobody counts placeholders again
    assert kept.block[0, 7:10].unique().numel() == 1
    # text behind it: as without pruning, or renumbered; the delta follows
    assert kept.next_ids()[0, 0].tolist() == layout.next_ids()[0, 0].tolist() == [9]
    assert kept.rope_deltas().tolist() == [[9 - 12]]
    compact = kept.compact()
    assert compact.position_ids()[:, 0].tolist() == [list(range(12))] * 3
    assert compact.next_ids()[0, 0].tolist() == [12]
    assert compact.rope_deltas().tolist() == [[0]]


# -- the same in a Hugging Face model ----------------------------------------------------------------------------------


def test_transformers_40490_agent_lightning_441_in_a_model() -> None:
    """Prefill and one step equal one long prefill, left padded; a row that is all padding is named."""
    pytest.importorskip("transformers")
    from mmpos.adapters.transformers import attach
    from tests.adapters.vlms import CACHE, batch_of, random_ids, tiny_vlm

    model = attach(tiny_vlm("qwen2_vl"), "mrope")
    inputs = batch_of(model, [[2, (2, 3), 1], [5]])
    token, one = random_ids(2, 1), torch.ones(2, 1, dtype=torch.long)
    mask = torch.cat([inputs["attention_mask"], one], dim=1)
    longer = {
        **inputs,
        "input_ids": torch.cat([inputs["input_ids"], token], dim=1),
        "attention_mask": mask,
        "mm_token_type_ids": torch.cat([inputs["mm_token_type_ids"], 0 * one], dim=1),
    }
    with torch.no_grad():
        cache = model(**inputs, use_cache=True)[CACHE]
        step = model(input_ids=token, attention_mask=mask, **{CACHE: cache}).logits[:, -1]
        torch.testing.assert_close(step, model(**longer).logits[:, -1], atol=1e-5, rtol=0)
        inputs["attention_mask"][1] = 0
        with pytest.raises(ValueError, match="attention_mask: row 1 has no real token"):
            model(**inputs)
