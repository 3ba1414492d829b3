"""Positions: what each constructor places where, subsets, masks, padding, and every error."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos import Positions

# -- construction ------------------------------------------------------------------------------------------------------


def test_grid_is_row_major_with_the_last_axis_fastest() -> None:
    positions = Positions.grid(2, 3)
    assert positions.coords[0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert positions.coords.dtype == torch.float32
    assert positions.extent.tolist() == [[2.0, 3.0]]
    assert positions.grid_size == (2, 3)
    assert positions.is_raster
    assert positions.mask is None
    assert positions.token_mask() is None


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), num_prefix=st.integers(0, 5))
def test_grid_of_any_number_of_axes(sizes: list[int], num_prefix: int) -> None:
    positions = Positions.grid(*sizes, num_prefix=num_prefix)
    count = torch.tensor(sizes).prod().item()
    assert (positions.axes, positions.num_placed, positions.num_tokens) == (len(sizes), count, num_prefix + count)
    index = torch.zeros(count, dtype=torch.long)
    for axis, size in enumerate(sizes):  # the coordinates read as digits give the raster index
        index = index * size + positions.coords[0, :, axis].long()
    assert torch.equal(index, torch.arange(count))


def test_grid_options() -> None:
    mask = torch.ones(2, 6, dtype=torch.bool)
    positions = Positions.grid(2, 3, num_prefix=2, train_grid=[4, 4], mask=mask, dtype=torch.float64)
    assert positions.coords.dtype == torch.float64
    assert positions.train_grid == (4, 4)
    assert positions.token_mask().shape == (2, 8)


def test_points_accept_one_sample_integers_and_half_precision() -> None:
    assert Positions.points(torch.tensor([[1, 2, 3]])).coords.dtype == torch.float32
    assert Positions.points(torch.ones(4, 3).bfloat16()).coords.shape == (1, 4, 3)
    assert Positions.points(torch.ones(4, 3).double()).coords.dtype == torch.float64
    positions = Positions.points(torch.rand(2, 5, 2), extent=(3.0, 4.0), num_prefix=1, train_grid=(7, 7))
    assert positions.extent.tolist() == [[3.0, 4.0]]
    assert positions.grid_size is None
    assert not positions.is_raster
    assert positions.num_tokens == 6
    own = Positions.points(torch.rand(2, 5, 2), extent=torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
    assert own.sizes("a test").shape == (2, 2)


def test_grids_pad_on_the_right() -> None:
    positions = Positions.grids([(2, 3), (4, 1)], length=7, num_prefix=1)
    assert positions.coords.shape == (2, 7, 2)
    assert positions.mask.sum(1).tolist() == [6, 4]
    assert positions.mask[1].tolist() == [True] * 4 + [False] * 3
    assert positions.token_mask()[1].tolist() == [True] * 5 + [False] * 3
    assert torch.equal(positions.coords[0, :6], Positions.grid(2, 3).coords[0])
    assert torch.equal(positions.coords[1, :4], Positions.grid(4, 1).coords[0])
    assert positions.coords[1, 4:].abs().sum() == 0
    assert positions.extent.tolist() == [[2.0, 3.0], [4.0, 1.0]]
    assert positions.grid_size is None
    assert Positions.grids([(2, 3), (4, 1)]).num_placed == 6


def test_positions_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Positions.grid(2, 3).num_prefix = 2


# -- subsets -----------------------------------------------------------------------------------------------------------


def test_take_keeps_order_and_says_which_cells() -> None:
    positions = Positions.grid(3, 4, num_prefix=1)
    few = positions.take(torch.tensor([7, 2, 2, 11]))
    assert few.coords[0].tolist() == [[1, 3], [0, 2], [0, 2], [2, 3]]
    assert few.kept.tolist() == [[7, 2, 2, 11]]
    assert few.num_tokens == 5
    assert few.grid_size == (3, 4)
    assert not few.is_raster


def test_take_per_sample_and_twice() -> None:
    positions = Positions.grid(3, 4)
    first = positions.take(torch.tensor([[7, 2, 5], [0, 11, 1]]))
    assert first.coords.shape == (2, 3, 2)
    assert first.coords[1].tolist() == [[0, 0], [2, 3], [0, 1]]
    again = first.take(torch.tensor([[2, 0], [1, 1]]))
    assert again.kept.tolist() == [[5, 7], [11, 11]]
    assert torch.equal(again.coords, positions.coords[0][again.kept])
    same = first.take(torch.tensor([1]))
    assert same.kept.tolist() == [[2], [11]]
    one_then_many = positions.take(torch.tensor([3, 4, 5])).take(torch.tensor([[0, 1], [2, 2]]))
    assert one_then_many.kept.tolist() == [[3, 4], [5, 5]]


def test_take_by_mask() -> None:
    positions = Positions.grid(2, 3)
    keep = torch.tensor([True, False, False, True, False, True])
    assert positions.take(keep).kept.tolist() == [[0, 3, 5]]


def test_take_moves_the_padding_mask() -> None:
    positions = Positions.grids([(2, 3), (2, 1)])
    few = positions.take(torch.tensor([[5, 0], [5, 1]]))
    assert few.mask.tolist() == [[True, True], [False, True]]
    assert few.kept is None  # no single raster that an index could mean
    shared = Positions.grid(2, 3, mask=torch.tensor([[True] * 6, [True] * 2 + [False] * 4]))
    few = shared.take(torch.tensor([0, 5]))
    assert few.mask.tolist() == [[True, True], [True, False]]
    assert few.coords.shape[0] == 1


def test_take_of_free_points() -> None:
    points = torch.rand(2, 5, 3)
    few = Positions.points(points).take(torch.tensor([[4, 0], [1, 1]]))
    assert torch.equal(few.coords, torch.stack([points[0, [4, 0]], points[1, [1, 1]]]))
    assert few.kept is None


# -- derived ----------------------------------------------------------------------------------------------------------


def test_with_methods_change_one_thing() -> None:
    positions = Positions.grid(2, 3, num_prefix=1, train_grid=(4, 4))
    mask = torch.ones(1, 6, dtype=torch.bool)
    assert positions.with_prefix(4).num_tokens == 10
    assert positions.with_mask(mask).mask is mask
    assert positions.with_mask(mask).with_mask(None).mask is None
    moved = positions.with_coords(positions.coords + 0.5)
    assert moved.grid_size == (2, 3)
    assert moved.train_grid == (4, 4)
    assert moved.moved
    assert not positions.moved
    assert moved.take(torch.tensor([3])).moved


def test_moving_to_a_device_moves_every_tensor() -> None:
    positions = Positions.grids([(2, 3), (2, 1)], num_prefix=1).to("meta")
    assert positions.coords.is_meta
    assert positions.mask.is_meta
    assert positions.extent.is_meta
    taken = Positions.grid(2, 3).take(torch.tensor([1])).to("meta")
    assert taken.kept.is_meta


# -- errors -----------------------------------------------------------------------------------------------------------

GRID = Positions.grid(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Positions(torch.ones(4, 2)), r"coords: expected \(B or 1, N, axes\), got \(4, 2\)"),
        (
            lambda: Positions(torch.ones(1, 4, 2, dtype=torch.int64)),
            "coords: expected float32 or float64, got torch.int",
        ),
        (lambda: Positions(torch.ones(1, 4, 2).half()), "coords: .* call coords.float"),
        (lambda: Positions.grid(2, 3, num_prefix=-1), "num_prefix: expected 0 or more, got -1"),
        (lambda: Positions.grid(), "sizes: expected at least one"),
        (lambda: Positions.grid(0, 3), "sizes: .* is the image smaller than a patch"),
        (lambda: Positions.grid(2.5, 3), "sizes: expected positive integers"),
        (lambda: Positions.grid(2, 3, train_grid=(4,)), r"train_grid: expected 2 sizes, got \(4,\)"),
        (lambda: Positions.grid(2, 3, mask=torch.ones(1, 6)), "mask: expected bool .* got torch.float32"),
        (lambda: Positions.grid(2, 3, mask=torch.ones(1, 7).bool()), r"mask: expected .*6\).* got \(1, 7\)"),
        (lambda: GRID.with_mask(torch.ones(6).bool()), r"mask: expected .* got \(6,\)"),
        (lambda: Positions.grids([(2, 3), (1, 1)]).with_mask(torch.ones(3, 6).bool()), r"mask: expected .*\(2, 6\)"),
        (lambda: Positions.grids([(2, 3), (4, 1)], length=5), "length: expected at least 6"),
        (lambda: Positions.grids([]), "sizes: expected one"),
        (lambda: Positions.grids([(2, 3), (4,)]), "sizes: expected one .* equally many axes"),
        (lambda: Positions(GRID.coords, extent=torch.ones(2)), "extent: expected"),
        (lambda: Positions(GRID.coords, extent=torch.ones(1, 3)), "extent: expected"),
        (lambda: Positions(GRID.coords, grid_size=(6,)), "grid_size: expected 2 sizes"),
        (lambda: Positions(GRID.coords, grid_size=(2, 3), kept=torch.ones(1, 5).long()), "kept: expected"),
        (lambda: Positions.points(torch.ones(4, 3)).sizes("this test"), r"extent: this test needs .*extent=\("),
        (lambda: GRID.take(torch.ones(2, 6).bool()), r"keep: a boolean mask must be \(6,\)"),
        (lambda: GRID.take(torch.tensor([0.0, 1.0])), "keep: expected integer indices"),
        (lambda: GRID.take(torch.ones(1, 1, 1).long()), "keep: expected integer indices"),
        (lambda: Positions.grids([(2, 3), (1, 1)]).take(torch.zeros(3, 1).long()), "keep: expected batch"),
        (
            lambda: GRID.check_tokens(torch.ones(1, 7, 4)),
            r"x: expected 6 tokens .*grid \(2, 3\).* got shape \(1, 7, 4\)",
        ),
        (lambda: Positions.grids([(2, 3), (1, 1)]).check_tokens(torch.ones(3, 6, 4)), "x: batch 3 does not match"),
        (
            lambda: GRID.with_mask(torch.ones(2, 6).bool()).check_tokens(torch.ones(3, 6, 4), "tokens"),
            "tokens: batch 3 .* mask of batch 2",
        ),
    ],
)
def test_errors_say_what_to_change(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_matching_tokens_pass() -> None:
    Positions.grid(2, 3, num_prefix=2).check_tokens(torch.ones(5, 8, 4))
    Positions.grids([(2, 3), (1, 1)]).check_tokens(torch.ones(2, 6, 4))
