"""Curves over rectangles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos.functional.curves import CURVES, curve_rank


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 24), st.integers(1, 24))
def test_gilbert_visits_every_cell_once_in_steps_to_neighbours(height: int, width: int) -> None:
    rank = curve_rank(height, width)
    assert rank.flatten().sort().values.tolist() == list(range(height * width))
    assert rank[0, 0] == 0
    order = rank.flatten().argsort()
    rows, columns = order // width, order % width
    steps = torch.stack([rows.diff().abs(), columns.diff().abs()], -1)
    assert (steps <= 1).all()
    diagonal = int((steps.sum(-1) == 2).sum())
    assert diagonal <= 1
    if max(height, width) % 2 == 0:
        assert diagonal == 0


def test_gilbert_runs_along_the_longer_side() -> None:
    assert curve_rank(1, 4).tolist() == [[0, 1, 2, 3]]
    assert curve_rank(5, 9)[0, -1] == 44  # ends at the far end of the longer side
    assert curve_rank(9, 5)[-1, 0] == 44
    assert torch.equal(curve_rank(9, 5), curve_rank(5, 9).T)


def test_hilbert_is_self_similar_and_starts_downwards() -> None:
    assert curve_rank(2, 2, "hilbert").tolist() == [[0, 3], [1, 2]]
    large, small = curve_rank(16, 16, "hilbert"), curve_rank(8, 8, "hilbert")
    # the quadrants are visited one after the other, and each is the smaller curve up to a symmetry of the square
    for quadrant in (large[:8, :8], large[8:, :8], large[8:, 8:], large[:8, 8:]):
        local = quadrant - quadrant.min()
        symmetries = [torch.rot90(flip, turns) for flip in (small, small.T) for turns in range(4)]
        assert any(torch.equal(local, other) for other in symmetries)


def test_snake_and_raster() -> None:
    assert curve_rank(2, 3, "raster").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert curve_rank(2, 3, "snake").tolist() == [[0, 1, 2], [5, 4, 3]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 3), "height"),
        ((3, 4, "hilbert"), "power of two"),
        ((6, 6, "hilbert"), "power of two"),
        ((2, 2, "z"), "curve"),
    ],
)
def test_bad_arguments(arguments: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        curve_rank(*arguments)


def test_a_rank_belongs_to_the_caller() -> None:
    first = curve_rank(3, 4)
    first.zero_()
    assert curve_rank(3, 4).max() == 11
    assert set(CURVES) == {"gilbert", "hilbert", "raster", "snake"}
