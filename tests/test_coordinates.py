"""Coordinate rules on a 2 x 4 grid, where every number can be checked by hand."""

from __future__ import annotations

import pytest
import torch

from mmpos import Positions
from mmpos.coordinates import (
    COORDINATE_RULES,
    apply_rule,
    centred,
    endpoints,
    normalised,
    rescaled,
    scale_to_train,
    unit,
)

GRID = Positions.grid(2, 4)


def columns(values: torch.Tensor) -> list[float]:
    return values[0, :4, 1].tolist()


def rows(values: torch.Tensor) -> list[float]:
    return values[0, ::4, 0].tolist()


@pytest.mark.parametrize(
    ("rule", "of_rows", "of_columns"),
    [
        ("index", [0, 1], [0, 1, 2, 3]),
        ("centred", [-0.5, 0.5], [-1.5, -0.5, 0.5, 1.5]),
        ("normalised", [-0.5, 0.5], [-0.75, -0.25, 0.25, 0.75]),
        ("unit", [0.25, 0.75], [0.125, 0.375, 0.625, 0.875]),
        ("endpoints", [-1, 1], [-1, -1 / 3, 1 / 3, 1]),
    ],
)
def test_rules(rule: str, of_rows: list[float], of_columns: list[float]) -> None:
    values = apply_rule(rule, GRID)
    assert rows(values) == pytest.approx(of_rows)
    assert columns(values) == pytest.approx(of_columns)


def test_every_rule_is_named_in_the_refusal() -> None:
    with pytest.raises(ValueError, match=", ".join(f"'{rule}'" for rule in sorted(COORDINATE_RULES))):
        apply_rule("pixels", GRID)


@pytest.mark.parametrize("rule", sorted(COORDINATE_RULES))
def test_a_subset_keeps_its_coordinates(rule: str) -> None:
    keep = torch.tensor([6, 1])
    assert torch.equal(apply_rule(rule, GRID.take(keep)), apply_rule(rule, GRID)[:, keep])


def test_offset_is_added_to_the_index() -> None:
    assert columns(apply_rule("index", GRID, 0.5)) == [0.5, 1.5, 2.5, 3.5]
    assert columns(normalised(GRID, 1.0)) == pytest.approx([-0.25, 0.25, 0.75, 1.25])
    assert columns(unit(GRID, -0.5)) == pytest.approx([0, 0.25, 0.5, 0.75])


def test_one_denominator_keeps_the_aspect_ratio() -> None:
    assert rows(normalised(GRID, denominator="max")) == pytest.approx([-0.75, -0.25])
    assert columns(normalised(GRID, denominator="min")) == pytest.approx([-0.5, 0.5, 1.5, 2.5])
    with pytest.raises(ValueError, match="denominator"):
        normalised(GRID, denominator="mean")


def test_one_patch_sits_at_the_start() -> None:
    assert endpoints(Positions.grid(1, 3))[0].tolist() == [[-1, -1], [-1, 0], [-1, 1]]


def test_endpoints_are_symmetric_to_the_last_bit() -> None:
    values = endpoints(Positions.grid(1, 37))[0, :, 1]
    assert torch.equal(values, -values.flip(0))
    torch.testing.assert_close(values, torch.linspace(-1, 1, 37), rtol=0, atol=1e-7)


def test_rescaled_fits_the_training_grid() -> None:
    larger = Positions.grid(4, 6, train_grid=(2, 4))
    corner, centre = rescaled(larger), rescaled(larger, align="centre")
    assert corner[0, -1].tolist() == pytest.approx([1.5, 10 / 3])
    assert centre[0, 0].tolist() == pytest.approx([-0.25, -1 / 6])
    assert centre.mean(1)[0].tolist() == pytest.approx([0.5, 1.5])  # the middle of the field stays the middle
    assert scale_to_train(larger, (2, 4)).tolist() == [[2, 1.5]]
    assert torch.equal(rescaled(GRID, train_grid=(2, 4)), GRID.coords)
    with pytest.raises(ValueError, match="train_grid"):
        rescaled(GRID)
    with pytest.raises(ValueError, match="align"):
        rescaled(larger, align="middle")
    with pytest.raises(ValueError, match="expected 2 sizes"):
        scale_to_train(larger, (2, 4, 1))


def test_centre_of_free_points_ignores_padding() -> None:
    coords = torch.tensor([[[0.0, 0], [2, 4], [100, 100]]])
    points = Positions.points(coords, mask=torch.tensor([[True, True, False]]))
    assert centred(points)[0, :2].tolist() == [[-1, -2], [1, 2]]
    assert centred(Positions.points(coords))[0].mean(0).abs().max() < 1e-5


def test_rules_that_need_a_field_say_so() -> None:
    for rule in (normalised, unit, endpoints):
        with pytest.raises(ValueError, match="extent"):
            rule(Positions.points(torch.rand(3, 2)))
