"""``Positions``: construction, subsets, masks, refusals."""

from __future__ import annotations

import pytest
import torch

from mmpos import Positions, create_encoding

LABELLED = Positions.grid(2, 3, num_prefix=1)


def test_rows_come_before_columns() -> None:
    assert LABELLED.coords[0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert LABELLED.extent is not None
    assert LABELLED.extent.tolist() == [[2, 3]]
    assert (LABELLED.axes, LABELLED.num_placed, LABELLED.num_tokens, LABELLED.is_raster) == (2, 6, 7, True)


def test_three_axes_are_time_row_column() -> None:
    assert Positions.grid(2, 1, 3).coords[0, 4].tolist() == [1, 0, 1]


def test_subset_of_a_subset() -> None:
    first = LABELLED.take(torch.tensor([[0, 2, 4, 5], [1, 3, 4, 5]]))
    assert first.kept is not None
    assert not first.is_raster
    second = first.take(torch.tensor([3, 1]))
    assert second.kept is not None
    assert second.kept.tolist() == [[5, 2], [5, 3]]
    assert second.coords.tolist() == [[[1, 2], [0, 2]], [[1, 2], [1, 0]]]
    each = first.take(torch.tensor([[0], [3]]))
    assert each.kept is not None
    assert each.kept.tolist() == [[0], [5]]
    once = LABELLED.take(torch.tensor([1, 2, 3])).take(torch.tensor([[0], [2]]))
    assert once.kept is not None
    assert once.kept.tolist() == [[1], [3]]


def test_subset_carries_mask_extent_and_prefix() -> None:
    mask = torch.tensor([[True] * 6, [True, False] * 3])
    taken = LABELLED.with_mask(mask).take(torch.tensor([1, 2], dtype=torch.int32))
    assert taken.mask is not None
    assert taken.mask.tolist() == [[True, True], [False, True]]
    assert taken.extent is LABELLED.extent
    assert taken.num_tokens == 3
    boolean = LABELLED.take(torch.tensor([True, False, False, False, False, True]))
    assert boolean.coords[0].tolist() == [[0, 0], [1, 2]]


def test_rasters_of_different_sizes() -> None:
    batch = Positions.grids([(2, 3), (3, 1)], num_prefix=1, length=7)
    assert batch.coords.shape == (2, 7, 2)
    assert batch.mask is not None
    assert batch.mask.sum(1).tolist() == [6, 3]
    assert batch.extent is not None
    assert batch.extent.tolist() == [[2, 3], [3, 1]]
    token_mask = batch.token_mask()
    assert token_mask is not None
    assert token_mask[:, 0].all()
    assert token_mask.shape == (2, 8)


def test_points_take_any_number_type() -> None:
    assert Positions.points(torch.tensor([[1, 2]])).coords.dtype == torch.float32
    assert Positions.points(torch.tensor([[1, 2.5]], dtype=torch.bfloat16)).coords.dtype == torch.float32
    assert Positions.points(torch.tensor([[1, 2.5]], dtype=torch.float64)).coords.dtype == torch.float64
    extent = Positions.points(torch.rand(4, 2), extent=(3, 5.5)).extent
    assert extent is not None
    assert extent.tolist() == [[3, 5.5]]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Positions.grid(), "at least one size"),
        (lambda: Positions.grid(0, 3), "smaller than a patch"),
        (lambda: Positions.grid(2.5, 3), "positive integers"),
        (lambda: Positions.grid(2, 3, dtype=torch.bfloat16), "float32 or float64"),
        (lambda: Positions.grid(2, 3, num_prefix=-1), "num_prefix"),
        (lambda: Positions.grid(2, 3, train_grid=(2,)), "train_grid"),
        (lambda: Positions.grid(2, 3, mask=torch.ones(1, 5).bool()), r"mask.*6\).*\(1, 5\)"),
        (lambda: Positions.grid(2, 3, mask=torch.ones(1, 6)), "mask.bool"),
        (lambda: Positions.grid(2, 3, mask=torch.ones(6).bool()), "mask"),
        (lambda: Positions.grids([]), "height, width"),
        (lambda: Positions.grids([(2, 3), (2, 3, 4)]), "equally many axes"),
        (lambda: Positions.grids([(2, 3)], length=5), "at least 6"),
        (lambda: Positions(torch.rand(4, 2)), "coords.*batch"),
        (lambda: Positions(torch.zeros(1, 4, 2).long()), "float"),
        (lambda: Positions.points(torch.rand(4, 2)).sizes("x"), "extent"),
        (lambda: LABELLED.take(torch.tensor([0.5])), "integer"),
        (lambda: LABELLED.take(torch.tensor([True, False])), "boolean mask"),
        (lambda: LABELLED.take(torch.zeros(2, 1).long()).take(torch.zeros(3, 1).long()), "batch 1 or"),
    ],
)
def test_refusals_say_what_to_change(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]


def test_tokens_that_do_not_fit_are_named() -> None:
    for shape, match in (((1, 6, 8), "7 tokens.*num_prefix 1 \\+ 6 placed.*grid \\(2, 3\\)"),):
        with pytest.raises(ValueError, match=match):
            LABELLED.check_tokens(torch.zeros(shape))
    batch = Positions.grids([(2, 3), (3, 1)])
    with pytest.raises(ValueError, match="batch 3"):
        batch.check_tokens(torch.zeros(3, 6, 8))
    with pytest.raises(ValueError, match="padding mask of batch 2"):
        LABELLED.with_mask(torch.ones(2, 6).bool()).check_tokens(torch.zeros(3, 7, 8))


def test_between_blocks_tokens_are_checked_too() -> None:
    stack = create_encoding("none", 8, 2)
    with pytest.raises(ValueError, match="expected 7 tokens"):
        stack.mix_tokens(0, torch.zeros(1, 6, 8), LABELLED)


def test_values_are_immutable() -> None:
    with pytest.raises(AttributeError):
        LABELLED.num_prefix = 2  # type: ignore[misc]
    other = LABELLED.with_prefix(5).with_coords(LABELLED.coords + 1)
    assert (LABELLED.num_prefix, other.num_prefix) == (1, 5)
    assert other.to("cpu").coords.equal(LABELLED.coords + 1)
