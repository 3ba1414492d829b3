"""Decoder tables: allocations reduce to each other where they must, precision is that of float32, heads and
layouts agree.
"""

from __future__ import annotations

import pytest
import torch

from mmpos.functional.rotary import rotate, to_half_layout
from mmpos.multimodal import Image, Text, rotary_angles, rotary_table, rotate_grouped, scheme
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


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_grouped_queries_share_the_table_of_their_key_head(layout: str) -> None:
    """Four key/value heads, twelve query heads; the table and the index keep one entry for each key/value head."""
    rule = scheme("mhrope")
    allocation = rule.allocate(8, kv_heads=4, head_sections=(1, 2, 1))
    assert allocation.axis.untyped_storage().nbytes() == 4 * allocation.axis.element_size()
    ids = rule.layout([[Text(2), Image(2, 3)], [Text(1), Image(3, 2), Text(1)]]).position_ids()
    table = rotary_table(ids, allocation, 100.0, layout=layout)
    assert table.cos.shape == (2, 4, 8, 8)
    assert table.cos.dtype == torch.float32
    q, k = torch.randn(2, 12, 8, 20), torch.randn(2, 4, 8, 20)  # 16 of 20 channels turn
    turned = rotate_grouped(q, table)
    for head in range(12):
        sections = [(1, 0, 0), (0, 1, 0), (0, 1, 0), (0, 0, 1)][head // 3]
        of_head = rule.allocate(8, kv_heads=1, head_sections=sections)
        one = rotary_table(ids, of_head, 100.0, layout=layout)
        torch.testing.assert_close(turned[:, head : head + 1], rotate(q[:, head : head + 1], one))
    torch.testing.assert_close(rotate_grouped(k, table), rotate(k, table))
    assert rotate_grouped(q.bfloat16(), table).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="a multiple of 4 heads"):
        rotate_grouped(q[:, :6], table)


def test_layers_share_the_ids_of_their_kind() -> None:
    """64 layers of PyPE and of Circle-RoPE: as many sets of ids as there are kinds of layer, handed out as views."""
    for which, kinds in (("pype", 16), ("circlerope_age", 2)):
        layout = scheme(which).layout([[Text(2), Image(5, 7)]], num_layers=64)
        assert layout.ids.shape[0] == layout.num_variants == kinds
        for layer in range(64):
            assert layout.position_ids(layer).untyped_storage().data_ptr() == layout.ids.untyped_storage().data_ptr()
        assert torch.equal(layout.position_ids(0), layout.position_ids(2 if kinds == 2 else 3))
