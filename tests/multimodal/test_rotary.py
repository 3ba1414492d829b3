"""Decoder tables: allocations reduce to each other where they must, precision is that of float32, heads and
layouts agree.
"""

from __future__ import annotations

import pytest
import torch

from mmpos.functional.rotary import rotate, to_half_layout
from mmpos.multimodal import Image, Text, rotary_angles, rotary_table, scheme
from mmpos.multimodal import allocation as alloc

PAIRS = 24


@pytest.mark.parametrize(
    "allocation",
    [
        alloc.chunked(PAIRS, (8, 8, 8)),
        alloc.interleaved(PAIRS, (8, 8, 8)),
        alloc.cyclic(PAIRS),
        alloc.diagonal_last(PAIRS, (4, 10, 10)),
        alloc.lumos(PAIRS),
    ],
)
def test_equal_ids_on_all_axes_are_one_dimensional_rope(allocation: alloc.Allocation) -> None:
    ids = torch.randint(0, 900, (1, 2, 7))
    ours = rotary_angles(ids.expand(3, -1, -1), allocation, 10000.0)
    assert torch.equal(ours, rotary_angles(ids, alloc.single(PAIRS), 10000.0))


def test_heads_on_one_axis_are_one_dimensional_rope_and_left_over_heads_are_not_rotated() -> None:
    ids = torch.randint(0, 50, (3, 2, 5))
    angles = rotary_angles(ids, alloc.by_head(PAIRS, 4, (2, 0, 1)), 1000.0)
    plain = [rotary_angles(ids[axis : axis + 1], alloc.single(PAIRS), 1000.0)[:, 0] for axis in (0, 2)]
    assert torch.equal(angles[:, 0], plain[0])
    assert torch.equal(angles[:, 1], plain[0])
    assert torch.equal(angles[:, 2], plain[1])
    assert not angles[:, 3].any()


def test_unrotated_time_pairs_ignore_time() -> None:
    layout = scheme("hope").layout([[Text(2), Image(2, 3)]])
    allocation = scheme("hope").allocate(PAIRS)
    ids = layout.position_ids().float()
    moved = ids.clone()
    moved[0] += 5
    assert torch.equal(rotary_angles(ids, allocation, 1e4), rotary_angles(moved, allocation, 1e4))


def test_a_common_shift_of_all_ids_leaves_scores_unchanged() -> None:
    ids = scheme("circlerope").layout([[Text(2), Image(3, 2), Text(2)]]).position_ids()
    allocation = scheme("circlerope").allocate(8)
    q, k = torch.randn(2, 1, 2, 10, 16, dtype=torch.float64)

    def scores(shift: float) -> torch.Tensor:
        table = rotary_table(
            (ids + shift).double(), allocation, 100.0, inverse_frequencies=100.0 ** -allocation.exponent.double()
        )
        return rotate(q, table) @ rotate(k, table).mT

    torch.testing.assert_close(scores(0.0), scores(37.25), atol=1e-9, rtol=0)


def test_layouts_differ_by_a_permutation_of_channels() -> None:
    ids = torch.randint(0, 40, (3, 1, 6))
    allocation = alloc.chunked(8, (2, 3, 3))
    x = torch.randn(1, 2, 6, 16)
    adjacent = rotate(x, rotary_table(ids, allocation, 100.0, layout="interleaved"))
    half = rotate(to_half_layout(x), rotary_table(ids, allocation, 100.0, layout="half"))
    torch.testing.assert_close(to_half_layout(adjacent), half)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_ids_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="ids must not be cast with the model"):
        rotary_angles(torch.zeros(1, 1, 3, dtype=dtype), alloc.single(4), 100.0)


def test_autocast_does_not_reach_the_angles() -> None:
    ids = 65536 + torch.arange(16)[None, None]
    plain = rotary_angles(ids, alloc.single(16), 10000.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotary_angles(ids, alloc.single(16), 10000.0), plain)
