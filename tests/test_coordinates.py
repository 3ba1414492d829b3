"""Coordinate rules on rectangles, one, two and three axes, and free points."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos import Positions
from mmpos.coordinates import (
    COORDINATE_RULES,
    apply_rule,
    centred,
    endpoints,
    index,
    normalised,
    rescaled,
    scale_to_train,
    unit,
)

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=3)
quick = settings(max_examples=40, deadline=None)


def along(values: torch.Tensor, axis: int, sizes: list[int]) -> torch.Tensor:
    """Values of one axis along that axis, the other indices zero."""
    volume = values[0, :, axis].unflatten(0, sizes)
    picked = [slice(None) if i == axis else 0 for i in range(len(sizes))]
    return volume[tuple(picked)]


@quick
@given(sizes=SIZES)
def test_every_axis_depends_on_its_own_index_only(sizes: list[int]) -> None:
    positions = Positions.grid(*sizes, train_grid=[4] * len(sizes))
    for rule in [*COORDINATE_RULES.values(), rescaled]:
        values = rule(positions)
        for axis in range(len(sizes)):
            volume = values[0, :, axis].unflatten(0, sizes).movedim(axis, 0).reshape(sizes[axis], -1)
            assert torch.equal(volume, volume[:, :1].expand_as(volume))


@quick
@given(size=st.integers(2, 40), other=st.integers(1, 5))
def test_endpoints_equal_linspace_to_the_last_bit_and_are_symmetric(size: int, other: int) -> None:
    values = along(endpoints(Positions.grid(size, other)), 0, [size, other])
    torch.testing.assert_close(values, torch.linspace(-1, 1, size), rtol=0, atol=6e-8)
    assert torch.equal(values, -values.flip(0))


def test_one_patch_sits_at_the_first_endpoint_as_in_linspace() -> None:
    assert endpoints(Positions.grid(1, 3))[0].tolist() == [[-1, -1], [-1, 0], [-1, 1]]


@quick
@given(size=st.integers(1, 40))
def test_unit_and_normalised_are_patch_centres(size: int) -> None:
    positions = Positions.grid(2, size)
    edges = torch.linspace(0, 1, size + 1)
    centres = (edges[:-1] + edges[1:]) / 2
    torch.testing.assert_close(along(unit(positions), 1, [2, size]), centres)
    torch.testing.assert_close(along(normalised(positions), 1, [2, size]), 2 * centres - 1, rtol=0, atol=1e-6)


def test_normalised_denominators_on_a_rectangle() -> None:
    positions = Positions.grid(2, 4)
    separate = normalised(positions)
    assert separate[0, 0].tolist() == [-0.5, -0.75]
    largest = normalised(positions, denominator="max")
    assert largest[0, 0].tolist() == [-0.75, -0.75]
    assert largest[0, -1].tolist() == [-0.25, 0.75]
    smallest = normalised(positions, denominator="min")
    assert smallest[0, -1].tolist() == [0.5, 2.5]


@quick
@given(sizes=SIZES)
def test_centred_has_mean_zero_and_unit_steps(sizes: list[int]) -> None:
    positions = Positions.grid(*sizes)
    values = centred(positions)
    torch.testing.assert_close(values.mean(1), torch.zeros(1, len(sizes)), rtol=0, atol=1e-6)
    torch.testing.assert_close(values.diff(dim=1), positions.coords.diff(dim=1), rtol=0, atol=1e-6)


def test_centred_subset_keeps_the_middle_of_the_field() -> None:
    positions = Positions.grid(3, 5)
    few = positions.take(torch.tensor([0, 1]))
    assert torch.equal(centred(few), centred(positions)[:, :2])


def test_centred_free_points_ignore_padding() -> None:
    points = torch.tensor([[[0.0, 2.0], [4.0, 0.0], [99.0, 99.0]]])
    mask = torch.tensor([[True, True, False]])
    values = centred(Positions.points(points, mask=mask))
    assert values[0, :2].tolist() == [[-2, 1], [2, -1]]
    assert centred(Positions.points(points[:, :2]))[0].tolist() == [[-2, 1], [2, -1]]


def test_offset_is_in_patches() -> None:
    positions = Positions.grid(2, 5, train_grid=(4, 4))
    assert torch.equal(index(positions, 1.0), positions.coords + 1)
    assert index(positions) is positions.coords
    torch.testing.assert_close(unit(positions, 1.0) - unit(positions), torch.tensor([1 / 2, 1 / 5]).expand(1, 10, 2))
    torch.testing.assert_close(centred(positions, 0.5), centred(positions) + 0.5)
    torch.testing.assert_close(
        rescaled(positions, 1.0) - rescaled(positions), torch.tensor([2.0, 0.8]).expand(1, 10, 2)
    )


def test_rescaled_corner_and_centre() -> None:
    positions = Positions.grid(2, 8, train_grid=(4, 4))
    corner = rescaled(positions)
    assert along(corner, 0, [2, 8]).tolist() == [0, 2]
    assert along(corner, 1, [2, 8]).tolist() == [i / 2 for i in range(8)]
    centre = rescaled(positions, align="centre")
    assert along(centre, 0, [2, 8]).tolist() == [0.5, 2.5]
    assert along(centre, 1, [2, 8]).tolist() == [i / 2 - 0.25 for i in range(8)]
    difference = centre - corner
    torch.testing.assert_close(difference, difference[:, :1].expand_as(difference))


@pytest.mark.parametrize("align", ["corner", "centre"])
def test_rescaled_is_the_identity_at_the_training_grid(align: str) -> None:
    positions = Positions.grid(3, 5, train_grid=(3, 5))
    assert torch.equal(rescaled(positions, align=align), positions.coords)
    assert torch.equal(rescaled(Positions.grid(3, 5), train_grid=(3, 5), align=align), positions.coords)


def test_explicit_training_grid_goes_before_that_of_the_positions() -> None:
    positions = Positions.grid(2, 8, train_grid=(4, 4))
    assert torch.equal(rescaled(positions, train_grid=(2, 8)), positions.coords)
    assert scale_to_train(positions, (4, 4)).tolist() == [[0.5, 2.0]]


def test_every_sample_of_a_batch_has_its_own_size() -> None:
    sizes = [(2, 6), (4, 3)]
    batch = Positions.grids(sizes, train_grid=(4, 4))
    for rule in [*COORDINATE_RULES.values(), rescaled]:
        values = rule(batch)
        for row, size in zip(values, sizes, strict=True):
            assert torch.equal(row, rule(Positions.grid(*size, train_grid=(4, 4)))[0])


def test_float64_stays_float64() -> None:
    positions = Positions.grid(3, 5, dtype=torch.float64, train_grid=(4, 4))
    for rule in [*COORDINATE_RULES.values(), rescaled]:
        assert rule(positions).dtype == torch.float64


def test_free_points_with_an_extent() -> None:
    points = Positions.points(torch.tensor([[0.25, 7.5]]), extent=(1.0, 8.0))
    assert unit(points)[0].tolist() == [[0.75, 1.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: apply_rule("polar", Positions.grid(2, 3)), r"coordinates: expected one of \['centred', .*'polar'"),
        (lambda: normalised(Positions.grid(2, 3), denominator="mean"), "denominator: .*'mean'"),
        (lambda: unit(Positions.points(torch.ones(2, 2))), "extent: a normalised coordinate rule needs"),
        (lambda: endpoints(Positions.points(torch.ones(2, 2))), "extent: "),
        (lambda: rescaled(Positions.grid(2, 3)), "train_grid: .*not known"),
        (lambda: rescaled(Positions.grid(2, 3), train_grid=(4,)), r"train_grid: expected 2 sizes, got \(4,\)"),
        (lambda: rescaled(Positions.grid(2, 3), train_grid=(4, 4), align="edge"), "align: .*'edge'"),
        (lambda: rescaled(Positions.points(torch.ones(2, 2)), train_grid=(4, 4)), "extent: comparing"),
    ],
)
def test_errors_say_what_to_change(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_rules_by_name() -> None:
    positions = Positions.grid(2, 5)
    for name, rule in COORDINATE_RULES.items():
        assert torch.equal(apply_rule(name, positions, 0.5), rule(positions, offset=0.5))
