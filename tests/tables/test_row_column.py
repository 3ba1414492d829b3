"""TAPAS positions and embeddings, TUTA trees."""

from __future__ import annotations

import pytest
import torch

from mmpos.tables import (
    TapasEmbedding,
    TutaPositions,
    masked_tree_distance,
    position_in_cell,
    tree_distance,
    tree_index,
    visible_in_tree,
)
from mmpos.testing import assert_close, seeded

DEGREES = (3, 4, 5)


def paths(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    path = torch.stack([torch.randint(0, size, (2, 9), generator=generator) for size in DEGREES], -1)
    depth = torch.randint(0, len(DEGREES) + 1, (2, 9, 1), generator=generator)
    return path.masked_fill(torch.arange(len(DEGREES)) >= depth, -1)


def test_position_in_cell_is_that_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    row, column = torch.randint(0, 3, (2, 3, 20), generator=generator)
    got = position_in_cell(row, column, 7)
    for b in range(3):
        cells = list(zip(row[b].tolist(), column[b].tolist(), strict=True))
        assert got[b].tolist() == [min(6, n - cells.index(cell)) for n, cell in enumerate(cells)]


def test_position_in_cell_errors() -> None:
    with pytest.raises(ValueError, match="row, column: expected two equal"):
        position_in_cell(torch.zeros(1, 3).long(), torch.zeros(1, 4).long())
    with pytest.raises(ValueError, match="0 or more"):
        position_in_cell(torch.tensor([[-1]]), torch.tensor([[0]]))
    assert position_in_cell(torch.zeros(2, 0).long(), torch.zeros(2, 0).long()).shape == (2, 0)


def test_tapas_embedding_sums_and_clamps() -> None:
    module = TapasEmbedding(8, (2, 4, 4), max_positions=5)
    x = seeded(1, 4, 8)
    types = torch.tensor([[[0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 3, 2]]])
    position = torch.tensor([[0, 0, 1, 0]])
    expected = x + module.position(position) + sum(t(types[..., i]) for i, t in enumerate(module.types))
    assert_close(module(x, types), module.norm(expected))
    beyond = types.clone()
    beyond[0, 3] = torch.tensor([0, 90, 2])
    assert torch.equal(module(x, beyond), module(x, types))
    running = TapasEmbedding(8, (2, 4, 4), max_positions=3, restart=False)
    running.load_state_dict(module.state_dict() | {"position.weight": module.position.weight[:3]})
    index = torch.tensor([[0, 1, 2, 2]])
    expected = x + running.position(index) + sum(t(types[..., i]) for i, t in enumerate(module.types))
    assert_close(running(x, types), running.norm(expected))
    with pytest.raises(ValueError, match="types: expected"):
        module(x, types[..., :2])


def test_tree_index() -> None:
    index = tree_index(torch.tensor([[2, 3, 4], [1, -1, -1]]), DEGREES)
    assert index.tolist() == [[2, 6, 11], [1, 12, 12]]
    with pytest.raises(ValueError, match="path: expected 3 levels"):
        tree_index(torch.tensor([1, 2]), DEGREES)
    with pytest.raises(ValueError, match="below"):
        tree_index(torch.tensor([3, 0, 0]), DEGREES)


@pytest.mark.parametrize("combine", ["add", "max"])
def test_tree_distance_is_that_of_sets(combine: str) -> None:
    left, top = (tree_index(paths(seed), DEGREES) for seed in (0, 1))
    got = tree_distance(left, top, sum(DEGREES), combine)
    join = max if combine == "max" else sum
    for b in range(2):
        nodes = [[set(index[b, n].tolist()) - {12} for n in range(9)] for index in (left, top)]
        for i in range(9):
            expected = [join(len(side[i] ^ side[j]) for side in nodes) for j in range(9)]
            assert got[b, i].tolist() == expected


def test_tree_distance_errors() -> None:
    left = tree_index(paths(0), DEGREES)
    with pytest.raises(ValueError, match="combine"):
        tree_distance(left, left, 12, "mean")
    with pytest.raises(ValueError, match="total"):
        tree_distance(left, left, 11)


def test_masked_distance_and_visibility() -> None:
    kind = torch.tensor([[-1, 1, 2, 2, 3, 0]])
    distance = torch.tensor([[[abs(i - j) if i + j > 1 else 0 for j in range(6)] for i in range(6)]])
    distance[0, 2, 3] = distance[0, 3, 2] = 0  # two words of a cell
    visible = visible_in_tree(masked_tree_distance(distance, kind))[0]
    assert visible[0].tolist() == [True, True, True, True, True, False]  # CLS sees all but padding
    assert visible[1].tolist() == [True, True, False, False, True, False]  # a cell sees cells
    assert visible[2].tolist() == [True, False, True, True, False, False]  # a word sees its own cell
    assert not visible[5].any()
    masked = torch.tensor([8, 9, 11, 12])
    assert visible_in_tree(masked).tolist() == [True, False, False, False]
    assert visible_in_tree(masked, 1, step=1).tolist() == [True, True, False, False]
    assert visible_in_tree(masked, 9, step=1).tolist() == [True, True, True, False]


def test_tuta_positions() -> None:
    module = TutaPositions(48, DEGREES, rows=4, columns=5, orders=3)
    left, top = (tree_index(paths(seed), DEGREES) for seed in (0, 1))
    order, row, column = (torch.full((2, 9), value) for value in (1, 2, 3))
    out = module(order, row, column, left, top) - module.order.weight[1]
    assert_close(out[..., :6], module.row.weight[2].expand(2, 9, 6))
    assert_close(out[..., 6:24], module.left(left).flatten(2))
    assert_close(out[..., 24:30], module.column.weight[3].expand(2, 9, 6))
    assert_close(out[..., 30:], module.top(top).flatten(2))
    assert torch.equal(
        module(order + 9, row + 9, column + 9, left, top), module(order + 1, row + 2, column + 2, left, top)
    )
    with pytest.raises(ValueError, match="multiple of 8"):
        TutaPositions(40, DEGREES)
