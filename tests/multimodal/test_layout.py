"""What must hold for every scheme.

Decode continues prefill, padding and batching change nothing, text alone is 1-D RoPE.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos.multimodal import SCHEMES, Image, Text, Tiles, Video, list_schemes, scheme
from mmpos.multimodal.segments import tokens_from_segments

LAYERS = 9


@st.composite
def segment_rows(draw: st.DrawFn) -> list:
    """One to three rows with text, images (also adjacent, also last), videos and tiles on non-square grids."""

    def segment() -> object:
        kind = draw(st.integers(0, 3))
        if kind == 0:
            return Text(draw(st.integers(1, 4)))
        rows, cols = draw(st.integers(1, 5)), draw(st.integers(1, 5))
        if kind == 1:
            return Image(rows, cols)
        if kind == 2:
            frames = draw(st.integers(1, 4))
            return Video(frames, rows, cols, times=[7.0 + 0.6 * frame for frame in range(frames)])
        return Tiles(draw(st.integers(1, 2)), draw(st.integers(1, 3)), rows)

    return [[segment() for _ in range(draw(st.integers(1, 4)))] for _ in range(draw(st.integers(1, 3)))]


@pytest.mark.parametrize("name", list_schemes())
@settings(max_examples=15, deadline=None, derandomize=True)
@given(rows=segment_rows(), cut=st.integers(0, 4))
def test_prefill_and_steps_equal_one_shot(name: str, rows: list, cut: int) -> None:
    whole = scheme(name).layout(rows, num_layers=LAYERS)
    first = scheme(name).layout([row[:cut] for row in rows], padding_side="left", num_layers=LAYERS)
    grown = first.extend([row[cut:] for row in rows])
    for layer in range(LAYERS):
        for number in range(len(rows)):
            torch.testing.assert_close(
                grown.position_ids(layer)[:, number, grown.mask[number]],
                whole.position_ids(layer)[:, number, whole.mask[number]],
                check_dtype=False,
            )
        torch.testing.assert_close(grown.next_ids(3, layer), whole.next_ids(3, layer), check_dtype=False)
        for number in range(len(rows)):
            patterns = [part.dense_mask(layer)[number, 0][part.mask[number]] for part in (grown, whole)]
            kept = [p[:, part.mask[number]] for p, part in zip(patterns, (grown, whole), strict=True)]
            assert torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("name", list_schemes())
@settings(max_examples=10, deadline=None, derandomize=True)
@given(rows=segment_rows(), count=st.integers(1, 4))
def test_prefill_and_steps_of_one_token_equal_one_shot(name: str, rows: list, count: int) -> None:
    """A left-padded batch, decoded token by token."""
    whole = scheme(name).layout([[*row, Text(count)] for row in rows], padding_side="left", num_layers=LAYERS)
    grown = scheme(name).layout(rows, padding_side="left", num_layers=LAYERS)
    for step in range(count):
        for layer in (0, LAYERS - 1):
            at = whole.kind.shape[1] - count + step
            expected = whole.position_ids(layer)[..., at : at + 1]
            torch.testing.assert_close(grown.next_ids(1, layer), expected, check_dtype=False)
        grown = grown.extend([[Text(1)]] * len(rows))
    torch.testing.assert_close(grown.ids, whole.ids, check_dtype=False)
    torch.testing.assert_close(grown.cursor, whole.cursor, check_dtype=False)
    assert torch.equal(grown.kind, whole.kind)


@pytest.mark.parametrize("name", list_schemes())
@settings(max_examples=10, deadline=None, derandomize=True)
@given(rows=segment_rows(), side=st.sampled_from(["left", "right"]), merge=st.integers(1, 2), split=st.booleans())
def test_types_and_grids_equal_segments(name: str, rows: list, side: str, merge: int, split: bool) -> None:
    """Rows of text alone between rows of images and videos, read as a processor gives them."""
    rows = [[part for part in row if not isinstance(part, Tiles)] for row in rows]
    rows = [row for row in rows if sum(getattr(part, "length", 1) for part in row)] + [[Text(3)]]  # no empty rows
    if split:  # frames of a video as blocks of their own
        apart = [[[Video(1, s.rows, s.cols)] * s.frames if isinstance(s, Video) else [s] for s in row] for row in rows]
        expected_rows = [[frame for segment in row for frame in segment] for row in apart]
    else:
        expected_rows = [[Video(s.frames, s.rows, s.cols) if isinstance(s, Video) else s for s in row] for row in rows]
    expected = scheme(name).layout(expected_rows, padding_side=side, num_layers=LAYERS)
    grids: dict[str, torch.Tensor | None] = {}
    for key, kind in (("image_grids", Image), ("video_grids", Video)):
        found = [s for row in rows for s in row if isinstance(s, kind)]
        sizes = [[getattr(s, "frames", 1), merge * s.rows, merge * s.cols] for s in found]
        grids[key] = torch.tensor(sizes) if sizes else None
    read = scheme(name).layout_from_types(
        expected.kind.clamp_min(0),
        mask=expected.mask,
        merge_size=merge,
        split_frames=split,
        num_layers=LAYERS,
        **grids,
    )
    torch.testing.assert_close(read.ids, expected.ids, check_dtype=False)
    torch.testing.assert_close(read.cursor, expected.cursor, check_dtype=False)
    assert torch.equal(read.dense_mask(), expected.dense_mask())


@pytest.mark.parametrize("name", list_schemes())
def test_decoding_text_one_by_one_equals_text_in_the_prompt(name: str) -> None:
    prompt = [Text(2), Image(2, 3), Video(2, 3, 2, times=[0.0, 0.7])]
    whole = scheme(name).layout([[*prompt, Text(4)]], num_layers=LAYERS)
    start = scheme(name).layout([prompt], num_layers=LAYERS)
    for layer in range(LAYERS):
        torch.testing.assert_close(start.next_ids(4, layer), whole.position_ids(layer)[..., -4:], check_dtype=False)


@pytest.mark.parametrize("name", list_schemes())
@settings(max_examples=10, deadline=None, derandomize=True)
@given(rows=segment_rows(), side=st.sampled_from(["left", "right"]), extra=st.integers(0, 3))
def test_padding_and_batching_change_nothing(name: str, rows: list, side: str, extra: int) -> None:
    longest = scheme(name).layout(rows, num_layers=LAYERS).kind.shape[1]
    batch = scheme(name).layout(rows, padding_side=side, length=longest + extra, num_layers=LAYERS)
    for number, row in enumerate(rows):
        alone = scheme(name).layout([row], num_layers=LAYERS)
        for layer in (0, LAYERS - 1):
            torch.testing.assert_close(
                batch.position_ids(layer)[:, number, batch.mask[number]],
                alone.position_ids(layer)[:, 0],
                check_dtype=False,
            )
            keep = batch.mask[number]
            assert torch.equal(batch.dense_mask(layer)[number, 0][keep][:, keep], alone.dense_mask(layer)[0, 0])


@pytest.mark.parametrize("name", list_schemes())
def test_text_alone_is_ordinary(name: str) -> None:
    layout = scheme(name).layout([[Text(3), Text(4)]], num_layers=LAYERS)
    ids = layout.position_ids()
    axes = ids if scheme(name).text == "all" else ids[:1]
    assert torch.equal(axes, torch.arange(7).expand(axes.shape[0], 1, -1).to(ids.dtype))
    assert layout.text_only()
    assert torch.equal(layout.dense_mask()[0, 0], torch.ones(7, 7).tril().bool())


def test_types_and_segments_agree_with_adjacent_images_and_an_image_at_the_end() -> None:
    rows = [[Text(1), Image(2, 3), Image(1, 2), Text(2), Video(2, 2, 1)], [Text(4)], [Image(3, 1)]]
    segments = scheme("mrope").layout(rows, padding_side="left")
    types = torch.where(segments.kind < 0, 0, segments.kind)
    read = scheme("mrope").layout_from_types(
        types,
        image_grids=torch.tensor([[1, 4, 6], [1, 2, 4], [1, 6, 2]]),
        video_grids=torch.tensor([[2, 4, 2]]),
        mask=segments.mask,
        merge_size=2,
    )
    assert torch.equal(read.ids, segments.ids)
    assert torch.equal(read.cursor, segments.cursor)


def test_wrong_counts_name_rows_and_both_counts() -> None:
    types = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"1 grids hold 6 tokens.*6 image tokens|image_grids"):
        scheme("mrope").layout_from_types(types, image_grids=torch.tensor([[1, 2, 4]]))
    with pytest.raises(ValueError, match="image 0 of the batch is interrupted in row 1 after 3 tokens"):
        scheme("mrope").layout_from_types(types, image_grids=torch.tensor([[1, 2, 3]]))


def test_gap_keeps_ids_of_kept_tokens_and_compact_renumbers() -> None:
    layout = scheme("mrope").layout([[Text(2), Image(3, 2), Text(2)]])
    keep = torch.tensor([0, 1, 3, 7, 8, 9])
    kept = layout.take(keep)
    assert torch.equal(kept.ids, layout.ids[..., keep])
    assert torch.equal(kept.next_ids(), layout.next_ids())
    compact = kept.compact()
    assert compact.position_ids()[0, 0].tolist() == list(range(6))
    assert int(compact.next_ids()[0, 0, 0]) == 6


def test_pack_restarts_and_separates_sequences() -> None:
    layout = scheme("cca").layout([[Text(1), Image(4, 4)], [Text(3)]], padding_side="left")
    packed = layout.pack()
    assert packed.kind.shape == (1, 20)
    alone = [scheme("cca").layout([[Text(1), Image(4, 4)]]), scheme("cca").layout([[Text(3)]])]
    assert torch.equal(packed.ids[..., :17], alone[0].ids)
    assert torch.equal(packed.ids[..., 17:], alone[1].ids)
    pattern = packed.dense_mask()[0, 0]
    assert torch.equal(pattern[:17, :17], alone[0].dense_mask()[0, 0])
    assert not pattern[17:, :17].any()
    assert not pattern[:17, 17:].any()


def test_a_packed_layout_goes_on_with_its_last_sequence() -> None:
    rule = scheme("cca")
    rows = [[Text(1), Image(4, 4)], [Text(2), Image(2, 3)]]
    packed = rule.layout(rows).pack().extend([[Text(1), Image(3, 2), Text(2)]])
    alone = rule.layout([[*rows[1], Text(1), Image(3, 2), Text(2)]])
    assert torch.equal(packed.ids[..., 17:], alone.ids)
    pattern = packed.dense_mask()[0, 0]
    assert torch.equal(pattern[17:, 17:], alone.dense_mask()[0, 0])
    assert not pattern[17:, :17].any()
    assert torch.equal(packed.cursor, alone.cursor)
    with pytest.raises(ValueError, match=r"call compact\(\) before pack\(\)"):
        packed.compact()


def test_rows_keep_slots_of_their_own_and_go_on_where_they_were() -> None:
    layout = scheme("cca").layout([[Text(2), Image(3, 5), Text(1)], [Text(9)]], padding_side="left")
    keep = torch.tensor([[0, 1, 5, 9, 17], [9, 11, 13, 15, 17]])
    kept = layout.take(keep)
    for row in range(2):
        assert torch.equal(kept.ids[:, :, row], layout.ids[:, :, row, keep[row]])
        pattern = layout.dense_mask()[row, 0]
        assert torch.equal(kept.dense_mask()[row, 0], pattern[keep[row]][:, keep[row]])
    assert torch.equal(kept.extend([[Text(1)], [Text(1)]]).ids[..., -1:], layout.next_ids()[None])


def test_concentric_pattern_is_a_preorder_on_rings_and_symmetric_under_flips() -> None:
    layout = scheme("cca").layout([[Image(6, 4)]])
    pattern = layout.dense_mask()[0, 0]
    ring = layout.position_ids()[0, 0]
    assert torch.equal(pattern, ring[None, :] <= ring[:, None])
    grid = ring.view(6, 4)
    assert torch.equal(grid, grid.flip(0))
    assert torch.equal(grid, grid.flip(1))


def test_pyramid_starts_as_concentric_and_loses_levels() -> None:
    pype = scheme("pype", layer_options={"jump": 2}).layout([[Text(2), Image(8, 6), Text(1)]], num_layers=8)
    cca = scheme("cca").layout([[Text(2), Image(8, 6), Text(1)]])
    assert torch.equal(pype.position_ids(0), cca.position_ids())
    levels = [int(pype.position_ids(layer)[0, 0, 2:-1].unique().numel()) for layer in range(8)]
    assert levels == [3, 3, 2, 2, 1, 1, 1, 1]


def test_ring_is_equally_far_from_any_text() -> None:
    layout = scheme("circlerope").layout([[Text(3), Image(5, 4), Text(6)]])
    ids = layout.position_ids()[:, 0]
    image, text = ids[:, 3:23], ids[:, [0, 24]]
    for column in range(2):
        distance = (image - text[:, column : column + 1]).norm(dim=0)
        assert float(distance.max() - distance.min()) < 1e-5


def test_frames_keep_their_mean_under_mirrored_sums() -> None:
    ids = scheme("vrope").layout([[Video(3, 4, 2)]]).position_ids()[:, 0].double()
    means = ids.mean(0).view(3, 8)
    assert torch.equal(means, (torch.arange(3) * 5 + 2.0).double()[:, None].expand(3, 8))


def test_fraction_steps_need_no_integer_ids() -> None:
    layout = scheme("v2pe", block_options={"step": 1 / 256}).layout([[Text(300), Image(16, 16), Text(1)]])
    ids = layout.position_ids()[0, 0].float()
    assert ids[300:556].unique().numel() == 256
    assert float(ids[-1]) == 301.0


def test_schemes_report_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="did you mean 'mrope'"):
        scheme("mrop")
    with pytest.raises(ValueError, match="cursor: expected one of"):
        scheme("mrope", cursor="middle")
    with pytest.raises(ValueError, match="a scheme has no blok"):
        scheme("mrope", blok="grid")
    with pytest.raises(ValueError, match=r"sections: expected .* exactly 16 rotary pairs"):
        scheme("mrope").allocate(16, sections=(4, 4, 4))
    with pytest.raises(ValueError, match=r"2 frames but 3 times"):
        scheme("mrope").layout([[Video(2, 1, 1, times=[0, 1, 2])]])
    with pytest.raises(ValueError, match=r"rows\[0\]: expected sizes of at least 1"):
        scheme("mrope").layout([[Image(0, 3)]])


def test_every_scheme_names_its_source_and_allocates_any_even_head() -> None:
    for row in SCHEMES.values():
        assert row.source
        if row.allocation != "by_head":
            assert row.allocate(32).pairs == 32


@pytest.mark.parametrize("name", list_schemes())
def test_text_alone_has_a_short_way_with_the_same_result(name: str) -> None:
    start = scheme(name).layout([[Text(2), Image(2, 3)], [Text(4)]], padding_side="left", num_layers=LAYERS)
    real = torch.tensor([[True, True, True], [False, True, True]])
    short = scheme(name).lay_out_text(real, cursor=start.cursor, num_layers=LAYERS)
    long = start.extend([[Text(3)], [Text(2)]])
    for layer in (0, LAYERS - 1):
        assert torch.equal(short.position_ids(layer)[:, 0].double(), long.position_ids(layer)[:, 0, -3:].double())
        assert torch.equal(short.position_ids(layer)[:, 1, 1:].double(), long.position_ids(layer)[:, 1, -3:-1].double())
        assert torch.equal(short.next_ids(2, layer).double(), long.next_ids(2, layer).double())
    assert torch.equal(short.mask, real)


@pytest.mark.parametrize("name", ["mrope", "cca", "pype", "circlerope_age"])
def test_a_layout_cut_in_two_is_joined_again(name: str) -> None:
    rows = [[Text(2), Image(4, 5), Text(3)], [Text(1), Image(2, 3)]]
    layout = scheme(name).layout(rows, padding_side="left", num_layers=LAYERS)
    first, second = layout.slots(0, 22), layout.slots(22, 25)
    joined = first.append(second)
    assert torch.equal(joined.ids, layout.ids)
    assert torch.equal(joined.kind, layout.kind)
    assert torch.equal(joined.cursor, layout.cursor)
    twice = layout.rows(torch.tensor([1, 0, 0]))
    for layer in (0, LAYERS - 1):
        assert torch.equal(twice.dense_mask(layer), layout.dense_mask(layer)[[1, 0, 0]])
        assert torch.equal(twice.next_ids(2, layer), layout.next_ids(2, layer)[:, [1, 0, 0]])


def test_a_block_in_two_rows_or_with_text_inside_is_refused_but_padding_inside_is_not() -> None:
    grids = torch.tensor([[1, 2, 2]])
    with pytest.raises(ValueError, match="interrupted in row 1 after 1 tokens"):
        scheme("mrope").layout_from_types(torch.tensor([[0, 0, 1], [1, 1, 1]]), image_grids=grids)
    types = torch.tensor([[0, 1, 1, 0, 1, 1]])
    with pytest.raises(ValueError, match="interrupted in row 0 after 2 tokens"):
        scheme("mrope").layout_from_types(types, image_grids=grids)
    mask = torch.tensor([[1, 1, 1, 0, 1, 1]])
    layout = scheme("mrope").layout_from_types(types, image_grids=grids, mask=mask)
    assert layout.position_ids()[:, 0, [1, 2, 4, 5]].tolist() == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 1, 2]]


@pytest.mark.parametrize(
    "name", ["mrope", "mrope_hf5", "mrope_interleave", "mrope_interleave_reset", "mhrope", "omnirope"]
)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=segment_rows(), side=st.sampled_from(["left", "right"]), extra=st.integers(0, 2), second=st.booleans())
def test_grids_laid_out_by_lines_equal_the_general_way(
    name: str, rows: list, side: str, extra: int, second: bool
) -> None:
    """The short way for types and grids against segments, also counted on from a cursor."""
    rows = [[part for part in row if not isinstance(part, Tiles)] or [Text(1)] for row in rows]
    rule = scheme(name, split_frames=False)
    longest = rule.layout(rows).kind.shape[1]
    tokens = tokens_from_segments(rows, padding_side=side, length=longest + extra)
    cursor = torch.arange(3, 3 + len(rows))[None] if second else None
    expected = rule.lay_out(tokens, cursor=cursor)
    sizes = [[torch.tensor([s.rows, s.cols]) for row in rows for s in row if isinstance(s, Image)]]
    videos = [torch.tensor([s.frames, s.rows, s.cols]) for row in rows for s in row if isinstance(s, Video)]
    images = [torch.cat([torch.ones(1, dtype=torch.long), size]) for size in sizes[0]]
    found = rule._short_way(
        tokens.kind.clamp_min(0),
        cursor,
        image_grids=torch.stack(images) if images else None,
        video_grids=torch.stack(videos) if videos else None,
        mask=tokens.mask,
    )
    assert found is not None
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.kind, expected.kind)
    assert torch.equal(found.cursor, expected.cursor)
    together = (found.block[:, :, None] == found.block[:, None]) == (
        expected.block[:, :, None] == expected.block[:, None]
    )
    assert together.all()
    assert torch.equal(found.block < 0, expected.block < 0)


# -- steps drawn in training ------------------------------------------------------------------------------------------


def test_training_draws_one_step_for_every_image_and_evaluation_none() -> None:
    rule = scheme("v2pe")
    rows = [[Text(2), Image(4, 8), Text(1), Image(2, 4), Tiles(1, 2, 4)], [Video(2, 2, 4), Image(1, 8, step=0.5)]]
    drawn = rule.randomise(rows, torch.Generator().manual_seed(3))
    again = rule.randomise(rows, torch.Generator().manual_seed(3))
    other = rule.randomise(rows, torch.Generator().manual_seed(4))
    assert drawn == again != other
    assert drawn[1][1].step == 0.5  # its own
    layout = rule.layout(drawn)
    for number, row in enumerate(drawn):
        start = 0
        for segment in row:
            count = segment.length if isinstance(segment, Text) else tokens_from_segments([[segment]]).kind.shape[1]
            ids = layout.position_ids()[0, number, start : start + count]
            step = 1.0 if isinstance(segment, Text) else segment.step
            torch.testing.assert_close(ids.diff(), torch.full((count - 1,), step, dtype=torch.float64), atol=0, rtol=0)
            start += count
    seen = {rule.randomise([[Image(1, 1)]], torch.Generator().manual_seed(seed))[0][0].step for seed in range(200)}
    assert seen == {2.0**-k for k in range(9)} == set(rule.train_steps)
    assert scheme("mrope").randomise(rows) == rows
    assert torch.equal(rule.layout(rows[:1]).position_ids()[0, 0, 2:34].diff().unique(), torch.tensor([0.25]).double())
    hope = scheme("hope").randomise([[Video(3, 2, 2)]], torch.Generator().manual_seed(0))
    time = scheme("hope").layout(hope).position_ids()[0, 0, ::4].diff()
    assert time.tolist() == [hope[0][0].step] * 2


def test_steps_beside_token_types_are_those_of_segments() -> None:
    rule = scheme("v2pe")
    rows = [[Text(1), Image(2, 3, step=0.5), Video(2, 1, 2, step=0.125)], [Image(1, 2, step=1.0)]]
    expected = rule.layout(rows)
    types = expected.kind.clamp_min(0)
    grids = {"image_grids": torch.tensor([[1, 2, 3], [1, 1, 2]]), "video_grids": torch.tensor([[2, 1, 2]])}
    steps = torch.tensor([0.5, 1.0, 0.125])
    found = rule.layout_from_types(types, mask=expected.mask, steps=steps, **grids)
    assert torch.equal(found.ids, expected.ids)
    frames = rule.layout_from_types(types, mask=expected.mask, steps=steps, split_frames=True, **grids)
    assert frames.position_ids()[0, 0, 7:].diff()[[0, 2]].tolist() == [0.125, 0.125]
    with pytest.raises(ValueError, match=r"steps: expected one for each of 3 images and videos, got \(2,\)"):
        rule.layout_from_types(types, mask=expected.mask, steps=steps[:2], **grids)
    with pytest.raises(ValueError, match=r"train_steps: expected positive steps.*block 'grid'; give train_steps=\(\)"):
        scheme("v2pe", block="grid")


def test_masks_of_variants_are_those_of_their_layers_and_devices_carry_all() -> None:
    rows = [[Text(1), Image(4, 5), Text(2)], [Text(3)]]
    for name, count in (("pype", 2), ("cca", 1), ("mrope", 1)):
        layout = scheme(name).layout(rows, num_layers=8)
        masks = layout.variant_masks()
        assert masks.shape == (2, count, 23, 23)
        for layer in range(8):
            variant = layout.variant_of(layer) if count > 1 else 0
            assert torch.equal(masks[:, variant : variant + 1], layout.dense_mask(layer))
        moved = layout.to("meta")
        tensors = [moved.ids, moved.kind, moved.block, moved.cursor, *([] if moved.level is None else [moved.level])]
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        assert (moved.level is None) == (layout.level is None)


def test_what_a_layout_cannot_do_says_so() -> None:
    rule = scheme("mrope")
    packed = rule.layout([[Text(2), Image(2, 2)], [Text(3)]]).pack()
    with pytest.raises(ValueError, match="packed already"):
        packed.pack()
    with pytest.raises(ValueError, match="ids stay whole or float64"):
        packed.to(torch.bfloat16)  # type: ignore[arg-type]
    for types in ([[0, 3, 3]], [[0, -1, 0]]):
        with pytest.raises(ValueError, match=r"expected 0 \(text\), 1 \(image\) or 2 \(video\), got -?\d in row 0"):
            rule.layout_from_types(torch.tensor(types))


def test_a_packed_layout_goes_on_with_the_last_sequence_that_has_tokens() -> None:
    packed = scheme("mrope").layout([[Text(2)], [Text(5)], []]).pack()
    longer = packed.extend([[Text(2)]])
    assert longer.position_ids()[0, 0].tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6]
    assert longer.dense_mask()[0, 0][-1].tolist() == [False] * 2 + [True] * 7


@pytest.mark.parametrize("rate", [2.0, 3.0, 25.0])
@pytest.mark.parametrize("fps", [1, 2, 3, 5, 10, 12.5, 25])
def test_frames_stand_on_whole_ids_where_their_times_do(rate: float, fps: float) -> None:
    """Rounding must not put a frame an id early: k / fps * rate is exact here in whole numbers."""
    if rate < fps:
        return  # frames would share ids
    count = 60
    wanted = [int(k * int(2 * rate) // int(2 * fps)) for k in range(count)]
    rule = scheme("mrope_time", block_options={"tokens_per_second": rate})
    segments = rule.layout([[Video(count, 1, 1, times=[100 + k / fps for k in range(count)])]])
    assert segments.position_ids()[0, 0].tolist() == wanted
    for seconds in ([1 / fps], torch.tensor([1 / fps])):
        types = rule.layout_from_types(
            torch.full((1, count), 2), video_grids=torch.tensor([[count, 1, 1]]), seconds_per_frame=seconds
        )
        interval = (torch.tensor(1 / fps, dtype=torch.float64) * rate).float()
        if isinstance(seconds, torch.Tensor):
            interval = seconds[0] * rate
        expected = (torch.arange(count) * interval).long().tolist()  # as transformers counts
        assert types.position_ids()[0, 0].tolist() == expected
    if rate == fps:
        assert expected == wanted
