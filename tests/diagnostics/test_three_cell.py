"""The Three-Cell Experiment: questions, balance, pictures."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from mmpos.diagnostics import (
    ThreeCell,
    three_cell_columns,
    three_cell_images,
    three_cell_relations,
    three_cell_sample,
    three_cell_targets,
)


def draw(count: int, seed: int = 0, cells: int = 14) -> torch.Tensor:
    return three_cell_sample(count, cells=cells, generator=torch.Generator().manual_seed(seed))


def test_targets_are_the_formulas_of_the_paper() -> None:
    places = draw(400)
    for triple, found in zip(places.tolist(), three_cell_targets(places).tolist(), strict=True):
        (yr, xr), (yg, xg), (yb, xb) = triple
        rg, rb = (xr - xg) ** 2 + (yr - yg) ** 2, (xr - xb) ** 2 + (yr - yb) ** 2
        area_rg, area_rb = Fraction(abs((yr + yg) * (xg - xr)), 2), Fraction(abs((yr + yb) * (xb - xr)), 2)
        turn = (xg - xr) * (yb - yr) - (yg - yr) * (xb - xr)
        sums = xr + xg + xb > 13 and yr + yg + yb > 13
        assert found == [rg > rb, rb > rg, turn > 0, area_rg > area_rb, area_rb > area_rg, sums]
        assert turn != 0
        assert len(set(map(tuple, triple))) == 3


def test_relations_are_equally_likely_and_independent() -> None:
    relations = three_cell_relations(draw(9000))
    counts = ((relations[:, 0] + 1) * 3 + relations[:, 1] + 1).bincount(minlength=9)
    # nine classes of 1000: six standard deviations
    assert (counts - 1000).abs().max() < 6 * (1000 * 8 / 9) ** 0.5
    targets = three_cell_targets(draw(9000, seed=1)).double().mean(0)
    assert (targets[[0, 1, 3, 4]] - 1 / 3).abs().max() < 0.03
    assert abs(float(targets[2]) - 0.5) < 0.03


def test_within_a_relation_cells_are_drawn_uniformly() -> None:
    places = draw(30_000, cells=5)
    relations = three_cell_relations(places)
    every = torch.cartesian_prod(*[torch.arange(5)] * 6).reshape(-1, 3, 2)
    same = (relations == torch.tensor([1, -1])).all(-1)
    candidates = every[(three_cell_relations(every) == torch.tensor([1, -1])).all(-1)]
    (yr, yg, yb), (xr, xg, xb) = candidates[..., 0].unbind(-1), candidates[..., 1].unbind(-1)
    candidates = candidates[(xg - xr) * (yb - yr) != (yg - yr) * (xb - xr)]
    expected = torch.zeros(5, 5)
    expected.index_put_(tuple(candidates[:, 0].T), torch.ones(len(candidates)), accumulate=True)
    found = torch.zeros(5, 5)
    found.index_put_(tuple(places[same][:, 0].T), torch.ones(int(same.sum())), accumulate=True)
    assert (found / found.sum() - expected / expected.sum()).abs().max() < 0.01


def test_seeds() -> None:
    assert torch.equal(draw(50, 3), draw(50, 3))
    assert not torch.equal(draw(50, 3), draw(50, 4))
    assert draw(0).shape == (0, 3, 2)


def test_excluded_triples_do_not_come_and_the_balance_stays() -> None:
    first = draw(400, 1, cells=5)
    generator = torch.Generator().manual_seed(2)
    rest = three_cell_sample(4000, cells=5, generator=generator, exclude=first)
    seen = {tuple(triple.flatten().tolist()) for triple in first}
    assert not seen & {tuple(triple.flatten().tolist()) for triple in rest}
    assert seen & {tuple(triple.flatten().tolist()) for triple in draw(4000, 2, cells=5)}
    assert torch.equal(three_cell_relations(rest), three_cell_relations(draw(4000, 2, cells=5)))


def test_pictures_are_pure_colours_on_a_constant() -> None:
    places = torch.tensor([[[0, 13], [2, 5], [13, 0]]])
    image = three_cell_images(places, background=0.25)[0]
    assert image.shape == (3, 224, 224)
    for colour, (row, column) in enumerate(places[0].tolist()):
        cell = image[:, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
        assert torch.equal(cell, torch.eye(3)[colour][:, None, None].expand(3, 16, 16))
    assert int((image == 0.25).all(0).sum()) == (196 - 3) * 256


def test_data_set() -> None:
    data = ThreeCell(20, seed=5, cells=6, pixels=4)
    image, target = data[7]
    assert image.shape == (3, 24, 24)
    assert image.dtype == torch.float32
    assert torch.equal(target, three_cell_targets(data.places[7], 6).float())
    assert torch.equal(ThreeCell(20, seed=5, cells=6, pixels=4).places, data.places)
    assert torch.equal(data[-1][1], data.targets[19])
    assert len(list(data)) == 20


def test_columns_average_over_headings_not_targets() -> None:
    targets = torch.zeros(4, 6)
    logits = torch.full((4, 6), -1.0)
    logits[0, 0] = 1  # one of eight distance answers wrong
    logits[:2, 5] = 1  # half of the vector sums wrong
    assert three_cell_columns(logits, targets) == {
        "distance": 87.5,
        "orientation": 100.0,
        "area": 100.0,
        "vector_sum": 50.0,
        "average": 84.375,
    }


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="cells"):
        three_cell_sample(1, cells=3)
    with pytest.raises(ValueError, match="count"):
        three_cell_sample(-1)
    with pytest.raises(ValueError, match="places"):
        three_cell_images(torch.zeros(3, 2).long())
    with pytest.raises(ValueError, match="logits"):
        three_cell_columns(torch.zeros(2, 5), torch.zeros(2, 5))
    with pytest.raises(IndexError, match="index"):
        ThreeCell(2)[2]
