"""Interpolation: equal to torch where torch is right, and the properties that make one matrix serve every use."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos import Positions
from mmpos.functional.resample import (
    add_axis_tables,
    axis_weights,
    fit_table,
    interpolation_matrix,
    read_table,
    resample_grid,
    resample_table,
)

MODE = st.sampled_from(["bicubic", "bilinear"])
SIZE = st.integers(1, 20)
BOTH = list(itertools.product(("bicubic", "bilinear"), (True, False)))
quick = settings(max_examples=40, deadline=None)


def reference(values: Tensor, size: tuple[int, int], mode: str, antialias: bool) -> Tensor:
    """torch on an ``(H, W, D)`` table."""
    image = values.movedim(-1, 0)[None]
    return F.interpolate(image, size=size, mode=mode, antialias=antialias, align_corners=False)[0].movedim(0, -1)


# -- matrices ----------------------------------------------------------------------------------------------------------


@quick
@given(source=SIZE, size=SIZE, mode=MODE, antialias=st.booleans())
def test_rows_sum_to_one(source: int, size: int, mode: str, antialias: bool) -> None:
    matrix = interpolation_matrix(source, size, mode, antialias, dtype=torch.float64)
    assert matrix.shape == (size, source)
    torch.testing.assert_close(matrix.sum(1), torch.ones(size, dtype=torch.float64), rtol=0, atol=1e-13)


@quick
@given(size=SIZE, mode=MODE, antialias=st.booleans())
def test_same_size_is_the_exact_identity(size: int, mode: str, antialias: bool) -> None:
    assert torch.equal(interpolation_matrix(size, size, mode, antialias), torch.eye(size))


@quick
@given(source=SIZE, size=SIZE, mode=MODE, antialias=st.booleans())
def test_mirror_symmetric(source: int, size: int, mode: str, antialias: bool) -> None:
    matrix = interpolation_matrix(source, size, mode, antialias, dtype=torch.float64)
    torch.testing.assert_close(matrix.flip(0, 1), matrix, rtol=0, atol=1e-12)


@quick
@given(source=SIZE, size=SIZE, mode=MODE, antialias=st.booleans())
def test_matrix_equals_torch_on_identity_images_along_the_width(
    source: int, size: int, mode: str, antialias: bool
) -> None:
    if antialias and source == size == 1:  # torch is wrong there, see below
        return
    eye = torch.eye(source, dtype=torch.float64)[None, :, None]  # (1, n, 1, n)
    expected = F.interpolate(eye, size=(1, size), mode=mode, antialias=antialias, align_corners=False)[0, :, 0].T
    ours = interpolation_matrix(source, size, mode, antialias, dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_cubic_kernels_differ_with_antialias_even_when_enlarging_and_linear_ones_do_not() -> None:
    cubic = interpolation_matrix(7, 10, "bicubic", True) - interpolation_matrix(7, 10, "bicubic", False)
    linear = interpolation_matrix(7, 10, "bilinear", True) - interpolation_matrix(7, 10, "bilinear", False)
    assert cubic.abs().max() > 0.02
    torch.testing.assert_close(linear, torch.zeros_like(linear), rtol=0, atol=1e-6)


def test_antialias_uses_every_source_cell_when_shrinking() -> None:
    assert (interpolation_matrix(12, 3, "bilinear", True).abs().sum(0) > 0).all()
    assert (interpolation_matrix(12, 3, "bilinear", False).abs().sum(0) == 0).sum() == 6


# -- grids -------------------------------------------------------------------------------------------------------------


@quick
@given(h=SIZE, w=SIZE, new_h=SIZE, new_w=st.integers(2, 20), mode=MODE, antialias=st.booleans())
def test_grid_equals_torch(h: int, w: int, new_h: int, new_w: int, mode: str, antialias: bool) -> None:
    table = torch.randn(h, w, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(h * 100 + w))
    ours = resample_grid(table, (new_h, new_w), mode, antialias)
    torch.testing.assert_close(ours, reference(table, (new_h, new_w), mode, antialias), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mode", "antialias"), BOTH)
@pytest.mark.parametrize("width", [1, 2])
def test_new_width_of_one_where_torch_with_antialias_is_wrong(width: int, mode: str, antialias: bool) -> None:
    table = torch.randn(5, width, 4)
    ours = resample_grid(table, (3, 1), mode, antialias)
    turned = resample_grid(table.transpose(0, 1), (1, 3), mode, antialias).transpose(0, 1)
    torch.testing.assert_close(ours, turned, rtol=0, atol=2e-6)
    right = reference(table.transpose(0, 1), (1, 3), mode, antialias).transpose(0, 1)
    torch.testing.assert_close(ours, right, rtol=0, atol=2e-6)
    assert not torch.allclose(ours[0], ours[2], atol=1e-2)  # the defect of torch repeats the first row


@pytest.mark.parametrize(("mode", "antialias"), BOTH)
def test_constants_stay_and_identity_is_bit_exact(mode: str, antialias: bool) -> None:
    constant = torch.full((4, 6, 2), 3.25)
    torch.testing.assert_close(resample_grid(constant, (9, 5), mode, antialias), torch.full((9, 5, 2), 3.25))
    table = torch.randn(4, 6, 2)
    assert resample_grid(table, (4, 6), mode, antialias) is table


@pytest.mark.parametrize(("mode", "antialias"), BOTH)
def test_transposing_before_or_after_is_the_same(mode: str, antialias: bool) -> None:
    table = torch.randn(4, 6, 2)
    straight = resample_grid(table, (9, 3), mode, antialias)
    turned = resample_grid(table.transpose(0, 1), (3, 9), mode, antialias).transpose(0, 1)
    torch.testing.assert_close(straight, turned, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("mode", "antialias"), BOTH)
def test_gradient_is_the_transposed_matrix(mode: str, antialias: bool) -> None:
    table = torch.randn(4, 6, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, 2, dtype=torch.float64)
    (resample_grid(table, (7, 3), mode, antialias) * weight).sum().backward()
    rows = interpolation_matrix(4, 7, mode, antialias, dtype=torch.float64)
    cols = interpolation_matrix(6, 3, mode, antialias, dtype=torch.float64)
    torch.testing.assert_close(table.grad, torch.einsum("ij,iad,ac->jcd", rows, weight, cols))


def test_one_and_three_axes() -> None:
    line, volume = torch.randn(5, 2), torch.randn(2, 3, 4, 2)
    expected = F.interpolate(line.T[None], size=8, mode="linear", align_corners=False)[0].T
    torch.testing.assert_close(resample_grid(line, (8,), "linear", False), expected, rtol=0, atol=1e-6)
    expected = F.interpolate(volume.movedim(-1, 0)[None], size=(3, 5, 2), mode="trilinear", align_corners=False)
    ours = resample_grid(volume, (3, 5, 2), "linear", False)
    torch.testing.assert_close(ours, expected[0].movedim(0, -1), rtol=0, atol=1e-6)


def test_half_precision_tables_are_resampled_in_float32() -> None:
    table = torch.randn(4, 6, 2).bfloat16()
    expected = resample_grid(table.float(), (7, 5)).bfloat16()
    ours = resample_grid(table, (7, 5))
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, expected)


def test_autocast_does_not_touch_it() -> None:
    table = torch.randn(4, 6, 2)
    positions = Positions.grid(7, 5)
    plain = resample_grid(table, (7, 5)), read_table(table, positions.coords, positions.sizes("test"))
    with torch.autocast("cpu", torch.bfloat16):
        cast = resample_grid(table, (7, 5)), read_table(table, positions.coords, positions.sizes("test"))
    for one, other in zip(plain, cast, strict=True):
        assert torch.equal(one, other)


def test_matrices_first_made_in_inference_mode_serve_training() -> None:
    with torch.inference_mode():
        interpolation_matrix(6, 13, "bilinear")
    table = torch.randn(6, 6, 2, requires_grad=True)
    resample_grid(table, (13, 13), "bilinear").sum().backward()
    torch.testing.assert_close(table.grad.sum(), torch.tensor(13.0 * 13 * 2))


def test_matrices_made_on_meta_or_by_fake_tensors_are_not_kept() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        resample_grid(torch.empty(3, 3, 2), (11, 17))
    with torch.device("meta"):
        assert resample_grid(torch.empty(3, 3, 2), (11, 17)).is_meta
    matrix = interpolation_matrix(3, 17)
    assert type(matrix) is Tensor
    assert matrix.device.type == "cpu"
    torch.testing.assert_close(matrix.sum(1), torch.ones(17))


# -- compatibility -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("antialias", [True, False])
def test_dino_offset_equals_scale_factors_in_torch(antialias: bool) -> None:
    table, size = torch.randn(7, 7, 3, dtype=torch.float64), (10, 9)
    factors = [(s + 0.1) / 7 for s in size]
    image = table.movedim(-1, 0)[None]
    expected = F.interpolate(image, scale_factor=factors, mode="bicubic", antialias=antialias)[0].movedim(0, -1)
    ours = resample_grid(table, size, "bicubic", antialias, offset=0.1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(ours, resample_grid(table, size, "bicubic", antialias), atol=1e-3)


@pytest.mark.parametrize(("mode", "antialias"), BOTH)
def test_keeping_the_aspect_ratio_crops_a_square(mode: str, antialias: bool) -> None:
    table = torch.randn(4, 4, 3)
    expected = reference(table, (7, 7), mode, antialias)[:3, :7]
    ours = resample_grid(table, (3, 7), mode, antialias, keep_aspect=True)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)
    positions = Positions.grid(3, 7)
    single = read_table(table, positions.coords, positions.sizes("test"), mode, antialias, keep_aspect=True)
    torch.testing.assert_close(single[0], ours.flatten(0, 1), rtol=0, atol=2e-6)


def test_factorised_tables_sum_rows_and_columns() -> None:
    rows, cols = torch.randn(4, 3), torch.randn(6, 3)
    positions = Positions.grid(7, 2)
    ours = add_axis_tables([rows, cols], positions.coords, positions.sizes("test"))[0].unflatten(0, (7, 2))
    expected = resample_grid(rows, (7,), "linear", False)[:, None] + resample_grid(cols, (2,), "linear", False)
    torch.testing.assert_close(ours, expected)


# -- single places -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "antialias"), BOTH)
def test_batch_of_different_sizes_equals_one_by_one(mode: str, antialias: bool) -> None:
    table, sizes = torch.randn(4, 6, 3), [(3, 5), (9, 2), (4, 6)]
    positions = Positions.grids(sizes)
    ours = read_table(table, positions.coords, positions.sizes("test"), mode, antialias)
    for row, (h, w) in zip(ours, sizes, strict=True):
        expected = resample_grid(table, (h, w), mode, antialias).flatten(0, 1)
        torch.testing.assert_close(row[: h * w], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_real_places_equal_grid_sample_with_border(mode: str) -> None:
    table = torch.randn(4, 6, 3)
    extent = torch.tensor([[5.0, 3.0]])
    coords = torch.rand(1, 40, 2) * 8 - 2  # some lie outside
    grid = ((2 * coords + 1) / extent[:, None] - 1).flip(-1)[:, None]  # (x, y) on [-1, 1]
    image = table.movedim(-1, 0)[None]
    expected = F.grid_sample(image, grid, mode=mode, padding_mode="border", align_corners=False)[0, :, 0].T
    ours = read_table(table, coords, extent, mode, antialias=False)[0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("mode", "antialias"), BOTH)
def test_far_away_places_are_finite_and_read_the_border(mode: str, antialias: bool) -> None:
    weights = axis_weights(torch.tensor([-1e6, 1e6]), 5.0, 4, mode, antialias)
    torch.testing.assert_close(weights.sum(1), torch.ones(2))
    assert weights[0].argmax() == 0
    assert weights[1].argmax() == 3


# -- flat tables -------------------------------------------------------------------------------------------------------


def test_prefix_rows_are_copied_and_equal_token_counts_are_still_resampled() -> None:
    table = torch.randn(2, 3 + 16, 5)
    out = resample_table(table, (2, 8), (4, 4), num_prefix=3)
    assert torch.equal(out[:, :3], table[:, :3])
    expected = reference(table[1, 3:].unflatten(0, (2, 8)), (4, 4), "bicubic", True).flatten(0, 1)
    torch.testing.assert_close(out[1, 3:], expected, rtol=0, atol=2e-6)
    assert not torch.allclose(out[1, 3:], table[1, 3:], atol=0.1)


def test_fitting_a_table_says_what_it_did() -> None:
    table = torch.randn(1 + 16, 3)
    out, line = fit_table(table, (4, 4), (6, 4), num_prefix=0)
    assert line == "resized table 4x4 -> 6x4, prefix 1 -> 0"
    assert torch.equal(out, resample_table(table[1:], (4, 4), (6, 4)))
    out, line = fit_table(table, (4, 4), (4, 4), num_prefix=3)
    assert line == "resized table 4x4 -> 4x4, prefix 1 -> 3"
    assert torch.equal(out[0], table[0])
    assert torch.equal(out[1:3], torch.zeros(2, 3))
    assert torch.equal(out[3:], table[1:])
    same, line = fit_table(table, (4, 4), (4, 4), num_prefix=1)
    assert same is table
    assert line == ""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interpolation_matrix(3, 4, "nearest"), "mode: expected one of .*'nearest'"),
        (lambda: resample_grid(torch.ones(3, 4, 2), (5,)), r"new_size: expected 2 sizes .*\(3, 4\), got \(5,\)"),
        (lambda: resample_grid(torch.ones(3, 4, 2), (3, 4), "area"), "mode: .*'area'"),
        (lambda: resample_table(torch.ones(1, 13, 2), (3, 4), (5, 5)), r"table: expected 12 rows \(0 prefix"),
        (lambda: fit_table(torch.ones(9, 2), (3, 4), (5, 5)), "table: expected 12 rows"),
        (lambda: read_table(torch.ones(3, 4, 2), torch.ones(1, 5, 3), torch.ones(1, 3)), "coords: expected 2 axes"),
        (lambda: add_axis_tables([torch.ones(3, 2)], torch.ones(1, 5, 2), torch.ones(1, 2)), "tables: expected one"),
    ],
)
def test_bad_arguments(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
