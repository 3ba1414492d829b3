"""Sine-cosine features: layouts written out by hand, and what holds for all of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos import Positions
from mmpos.functional.rotary import inverse_frequencies, pixel_frequencies
from mmpos.functional.sincos import SINCOS_PRESETS, axis_widths, fourier_bands, sincos

LAYOUT = st.sampled_from(["block", "interleaved", "grouped"])
ORDER = st.sampled_from(["ij", "xy"])


def raster(*sizes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return Positions.grid(*sizes, dtype=dtype).coords[0]


@settings(max_examples=40, deadline=None)
@given(
    axes=st.integers(1, 4),
    pairs=st.integers(1, 5),
    base=st.floats(2, 20000),
    layout=LAYOUT,
    order=ORDER,
    first=st.sampled_from(["sin", "cos"]),
)
def test_gram_matrix_depends_on_differences_and_norm_is_constant(
    axes: int, pairs: int, base: float, layout: str, order: str, first: str
) -> None:
    dim = 2 * axes * pairs
    points = torch.randn(7, axes, dtype=torch.float64) * 5
    shift = torch.randn(axes, dtype=torch.float64) * 5
    options = {"layout": layout, "axis_order": order, "first": first}
    here, there = (sincos(p, dim, base, **options) for p in (points, points + shift))
    torch.testing.assert_close(here @ here.T, there @ there.T, rtol=0, atol=1e-10)
    torch.testing.assert_close(here.norm(dim=-1), torch.full((7,), math.sqrt(dim / 2), dtype=torch.float64))


def test_default_layout_written_out() -> None:
    coords, dim, base = raster(3, 5), 16, 10000.0
    k = torch.arange(4, dtype=torch.float64)
    freqs = base ** (-k / 4)
    row, col = coords[:, :1] * freqs, coords[:, 1:] * freqs
    expected = torch.cat([row.sin(), row.cos(), col.sin(), col.cos()], dim=-1)
    torch.testing.assert_close(sincos(coords, dim, base), expected)


def test_presets_written_out_on_a_rectangle() -> None:
    coords = raster(3, 5)
    freqs = 10000.0 ** (-torch.arange(2, dtype=torch.float64) / 2)
    row, col = coords[:, :1] * freqs, coords[:, 1:] * freqs
    s, c = torch.sin, torch.cos
    expected = {
        "default": [s(row), c(row), s(col), c(col)],
        "mae": [s(col), c(col), s(row), c(row)],
        "timm": [s(row), s(col), c(row), c(col)],
        "pape": [s(row), c(row), s(col), c(col)],
        "pypi": [torch.stack([s(a), c(a)], dim=-1).flatten(-2) for a in (row, col)],
    }
    assert set(expected) == set(SINCOS_PRESETS)
    for name, parts in expected.items():
        torch.testing.assert_close(sincos(coords, 8, **SINCOS_PRESETS[name]), torch.cat(parts, -1), msg=name)


def test_the_two_axis_orders_are_each_other_s_transpose() -> None:
    tall, wide = raster(5, 3), raster(3, 5)
    rows_first = sincos(tall, 8, axis_order="ij").unflatten(0, (5, 3))
    columns_first = sincos(wide, 8, axis_order="xy").unflatten(0, (3, 5)).transpose(0, 1)
    assert torch.equal(rows_first, columns_first)
    assert not torch.allclose(rows_first, sincos(tall, 8, axis_order="xy").unflatten(0, (5, 3)))


def test_cosine_first_swaps_the_halves() -> None:
    one = sincos(raster(3, 5), 8)
    other = sincos(raster(3, 5), 8, first="cos")
    assert torch.equal(one.unflatten(1, (2, 2, 2)).flip(2).flatten(1), other)


def test_odd_widths_have_one_more_sine() -> None:
    x = torch.tensor([[0.0], [1.0], [2.5]], dtype=torch.float64)
    values = sincos(x, 7, 100.0, widths="remainder")
    freqs = 100.0 ** (-2 * torch.arange(4, dtype=torch.float64) / 7)
    expected = torch.cat([(x * freqs).sin(), (x * freqs[:3]).cos()], dim=-1)
    torch.testing.assert_close(values, expected)
    alternating = sincos(x, 7, 100.0, widths="remainder", layout="interleaved")
    torch.testing.assert_close(alternating[:, 0::2], expected[:, :4])
    torch.testing.assert_close(alternating[:, 1::2], expected[:, 4:])


def test_width_rules() -> None:
    assert axis_widths(24, 3) == (8, 8, 8)
    assert axis_widths(17, 3, "remainder") == (5, 5, 7)
    assert axis_widths(10, 3, "cut") == (4, 4, 4)
    assert axis_widths(10, 2, [6, 4]) == (6, 4)
    values = sincos(raster(2, 3), 10, widths=[6, 4])
    torch.testing.assert_close(values[:, :6], sincos(raster(2, 3)[:, :1], 6))
    torch.testing.assert_close(values[:, 6:], sincos(raster(2, 3)[:, 1:], 4))


def test_cut_loses_the_last_channels_of_the_last_axis_only() -> None:
    points = raster(2, 3)
    short, whole = (sincos(points, dim, widths="cut", layout="interleaved") for dim in (10, 12))
    assert torch.equal(short, whole[:, :10])


def test_dtype_of_the_result() -> None:
    assert sincos(torch.ones(2, 2, dtype=torch.int64), 8).dtype == torch.float32
    assert sincos(torch.ones(2, 2).bfloat16(), 8).dtype == torch.float32
    assert sincos(torch.ones(2, 2).double(), 8).dtype == torch.float64
    integers = sincos(torch.tensor([[3, 5]]), 8)
    assert torch.equal(integers, sincos(torch.tensor([[3.0, 5.0]]), 8))


def test_fourier_bands() -> None:
    coords = torch.rand(2, 3, 2) * 2 - 1
    for bands in (pixel_frequencies(4, 32.0), inverse_frequencies(4, 100.0)):
        sine, cosine = fourier_bands(coords, bands)
        assert sine.shape == (2, 3, 2, 4)
        torch.testing.assert_close(sine[1, 2, 0, 3], torch.sin(coords[1, 2, 0] * bands[3]))
        torch.testing.assert_close(sine**2 + cosine**2, torch.ones_like(sine))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 10}, "dim: .* multiple of 4 channels, got 10"),
        ({"dim": 8, "layout": "woven"}, "layout: .*'woven'"),
        ({"dim": 8, "axis_order": "yx"}, "axis_order: .*'yx'"),
        ({"dim": 8, "first": "tan"}, "first: .*'tan'"),
        ({"dim": 8, "base": 0.0}, "base: expected a positive number"),
        ({"dim": 8, "widths": "some"}, "widths: .*'some'"),
        ({"dim": 8, "widths": [4, 6]}, "widths: expected 2 numbers with sum 8"),
        ({"dim": 8, "widths": [8]}, "widths: expected 2 numbers"),
        ({"dim": 3, "widths": "remainder"}, "dim: expected at least 4 channels"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sincos(torch.ones(3, 2), **options)
