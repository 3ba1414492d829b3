"""Buckets of iRPE: the piecewise function, rows, and their symmetries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos import Positions
from mmpos.functional.buckets import (
    BUCKET_METHODS,
    bucket_index,
    compact,
    largest_bucket,
    mirror_rows,
    num_buckets,
    piecewise_index,
)

ratios = st.floats(1.5, 50, allow_nan=False)


def g(values: object, ratio: float) -> torch.Tensor:
    return piecewise_index(torch.as_tensor(values, dtype=torch.float64), ratio, 2 * ratio, 8 * ratio)


def test_published_values():
    assert g(list(range(20)), 1.9).tolist() == [0, 1, 2, 2, 3, 3] + [3] * 14
    assert g(list(range(12)), 2.0).tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4]
    assert [num_buckets("product", ratio) for ratio in (1.9, 2.0, 2.5, 3.0)] == [49, 81, 121, 169]


@settings(max_examples=50, deadline=None)
@given(ratio=ratios, x=st.floats(0, 4000))
def test_odd_bounded_and_never_decreasing(ratio, x):
    values = torch.tensor([x, x + 0.5, x + 7.0], dtype=torch.float64)
    forward = g(values, ratio)
    assert torch.equal(g(-values, ratio), -forward)
    assert forward.max() <= largest_bucket(ratio)
    assert bool((forward.diff() >= 0).all())
    if x <= ratio:
        assert forward[0] == round(x)


@pytest.mark.parametrize("ratio", [1.5, 1.9, 2.0, 2.5, 20.0, 33.0])
def test_single_precision_is_enough(ratio):
    offsets = torch.arange(-4000, 4001)
    assert torch.equal(piecewise_index(offsets, ratio, 2 * ratio, 8 * ratio), g(offsets, ratio))


@pytest.mark.parametrize("method", BUCKET_METHODS)
@settings(max_examples=15, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    ratio=st.sampled_from([1.5, 1.9, 4.0]),
    prefix=st.integers(0, 2),
)
def test_the_opposite_pair_and_translation(method, grid, ratio, prefix):
    coords = Positions.grid(*grid).coords
    offsets = [c[:, :, None] - c[:, None, :] for c in coords.unbind(-1)]
    rows = num_buckets(method, ratio)
    for index in bucket_index(offsets, method, ratio):
        full = compact(index, rows, prefix).long()
        assert 0 <= int(index.min()) <= int(index.max()) < rows
        assert torch.equal(mirror_rows(full, None if method in ("euclidean", "quantization") else rows), full.mT)
        assert bool((full[:, :prefix] == rows).all())
        assert bool((full[:, :, :prefix] == rows).all())
        view = index[0].view(*grid, *grid)
        if min(grid) > 1:  # the row depends on the offset only
            assert torch.equal(view[1:, 1:, 1:, 1:], view[:-1, :-1, :-1, :-1])


def test_bad_numbers():
    with pytest.raises(ValueError, match="alpha, beta, gamma"):
        piecewise_index(torch.zeros(1), 2.0, 4.0, 1.0)
    with pytest.raises(ValueError, match="method: expected one of"):
        num_buckets("quant", 1.9)
