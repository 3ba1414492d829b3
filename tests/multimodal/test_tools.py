"""Streams, interleaved frames, soft masks, re-indexing, markers and learned planes."""

from __future__ import annotations

import pytest
import torch

from mmpos.functional.rotary import rotate
from mmpos.multimodal import Image, Text, rotary_table, scheme
from mmpos.multimodal.grape import Grape
from mmpos.multimodal.interleave import interleave_frames
from mmpos.multimodal.reindex import event_positions, insert_markers, regional_positions
from mmpos.multimodal.sofa import sofa_attention, sofa_mask
from mmpos.multimodal.streaming import stream_ids, streaming_pattern


def test_streams_meet_where_their_rule_says() -> None:
    overlapped = stream_ids("overlapped", 4, [5, 5], [2, 7])
    assert overlapped.answer[0] == overlapped.video[5] == 9
    assert overlapped.next_video == 14
    assert stream_ids("group_decoupled", 4, [5], [2]).answer.tolist() == [0, 1]
    assert stream_ids("gap_isolated", 4, [5], [2], gap=50).answer.tolist() == [50, 51]
    with pytest.raises(ValueError, match="rule: expected one of"):
        stream_ids("both", 1, [1], [1])


def test_the_token_predicted_decides_what_an_answer_sees() -> None:
    pattern = streaming_pattern(2, 3, 2, 1, 1, [2, 2])
    assert pattern[10].tolist()[:9] == [True] * 5 + [False] * 4  # predicts the second token of round 0
    assert pattern[11].tolist()[:9] == [True] * 9  # predicts the first token of round 1


def test_one_group_of_frames_is_plain_causal() -> None:
    layout = interleave_frames(4, 1, tokens_per_frame=2, prefix=3, suffix=1, question=2)
    assert layout.position_ids.tolist() == list(range(14))
    assert layout.next_id == 14
    assert torch.equal(layout.allowed, torch.ones(14, 14).tril().bool())


def test_soft_mask_limits_and_both_readings_agree_there() -> None:
    image = torch.tensor([-1, 0, 0, 1, 1, -1])
    causal = torch.ones(6, 6).tril().double()
    assert torch.equal(sofa_mask(image, 0.0), causal)
    q, k, v = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    for sigma in (0.0, 1.0):
        torch.testing.assert_close(
            sofa_attention(q, k, v, image, sigma), sofa_attention(q, k, v, image, sigma, reading="blend")
        )
    with pytest.raises(ValueError, match="sigma"):
        sofa_mask(image, 1.5)


def test_regions_keep_aspect_and_stay_in_their_box() -> None:
    ids = regional_positions([(2, 4)], torch.tensor([[10.0, 20.0, 18.0, 30.0]]), align=1.0)
    assert ids[1].min() == 26
    assert ids[2].tolist()[:4] == [10, 12, 14, 16]
    with pytest.raises(ValueError, match="right > left"):
        regional_positions([(2, 4)], torch.tensor([[10.0, 20.0, 5.0, 30.0]]))


def test_a_frame_between_two_events_is_as_near_to_both() -> None:
    frames, text, event = event_positions(torch.tensor([0.0, 3.0]), torch.tensor([[0.0, 3.0], [3.0, 4.0]]), 8.0)
    assert event.tolist() == [0, 1]
    assert float(frames[1] - text[0]) == float(text[1] - frames[1])


def test_markers_carry_the_id_of_their_patch() -> None:
    layout = scheme("mrope").layout([[Text(2), Image(3, 2), Text(1)]])
    marked = insert_markers(layout, [1, 8], torch.tensor([4, 7]))
    assert marked.kind[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    assert torch.equal(marked.position_ids()[:, 0, 2], layout.position_ids()[:, 0, 4])
    assert torch.equal(marked.position_ids()[:, 0, 10], layout.position_ids()[:, 0, 7])
    assert torch.equal(marked.next_ids(), layout.next_ids())
    with pytest.raises(ValueError, match="ascending"):
        insert_markers(layout, [8, 1], torch.tensor([4, 7]))


@pytest.mark.parametrize("mode", ["mixed", "block_mixed"])
def test_initial_planes_are_cyclic_rotary_on_adjacent_pairs(mode: str) -> None:
    module = Grape(16, mode, block_size=8)
    ids = torch.randint(0, 30, (3, 2, 5))
    x = torch.randn(2, 2, 5, 16)
    table = rotary_table(ids, scheme("imrope").allocate(8), 10000.0, layout="interleaved")
    torch.testing.assert_close(module(x, ids), rotate(x, table), atol=1e-5, rtol=0)


def test_learned_planes_train() -> None:
    module = Grape(8, "axis")
    module(torch.randn(1, 1, 4, 8), torch.randint(1, 9, (3, 1, 4))).square().sum().backward()
    module(torch.randn(1, 1, 4, 8), torch.randint(1, 9, (3, 1, 4)))[..., 0].sum().backward()
    assert module.a.grad is not None
    assert module.b.grad is not None
    assert bool(module.a.grad.abs().sum() > 0)


def test_soft_masks_of_as_many_rows_as_heads_belong_to_rows() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 6, 4, dtype=torch.float64).unbind(0)
    image = torch.tensor([[0, 0, 1, 1, -1, -1], [-1, 0, 0, 0, 1, -1]])
    together = sofa_attention(q, k, v, image, 0.5)
    for row in range(2):
        alone = sofa_attention(q[row : row + 1], k[row : row + 1], v[row : row + 1], image[row], 0.5)
        torch.testing.assert_close(together[row : row + 1], alone)
    with pytest.raises(ValueError, match=r"expected .*got \(2, 2, 6, 4\) with \(3, 6\)"):
        sofa_attention(q, k, v, torch.zeros(3, 6), 0.5)


def test_streams_need_a_round() -> None:
    with pytest.raises(ValueError, match="at least one round"):
        stream_ids("sequential", 3, [], [])
    with pytest.raises(ValueError, match="at least one answer chunk"):
        streaming_pattern(2, 4, 1, 1, 1, [])
