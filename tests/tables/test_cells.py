"""Cells, orders and grid ids of linearised tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos.tables import Table, table_tokens
from mmpos.tables.cells import CELL, PADDING, SEPARATOR, TEXT

TABLES = st.integers(1, 4).flatmap(
    lambda columns: st.lists(st.lists(st.integers(1, 3), min_size=columns, max_size=columns), min_size=1, max_size=4)
)


def loop_order(row: list) -> list[int]:
    """The column order, written as loops over cells."""
    order: list[int] = []
    for entry in row:
        start = len(order)
        if isinstance(entry, int):
            order += range(start, start + entry)
            continue
        grid = entry.grid()
        place, following = {}, start
        for column in range(len(grid[0])):
            for line in range(len(grid)):
                place[line, column] = list(range(following, following + grid[line][column]))
                following += grid[line][column]
        order += [p for line in range(len(grid)) for column in range(len(grid[0])) for p in place[line, column]]
    return order


@settings(max_examples=40, deadline=None)
@given(TABLES, TABLES, st.booleans(), st.integers(0, 3), st.integers(0, 2))
def test_column_order_is_that_of_loops(first: list, second: list, separators: bool, before: int, between: int) -> None:
    row = [before, Table(first, separators), between, Table(second, not separators), 1]
    tokens = table_tokens([row, [2]])
    order = tokens.column_order()
    expected = loop_order(row)
    assert order[0].tolist() == expected
    assert sorted(expected) == list(range(len(expected)))
    assert order[1].tolist() == list(range(len(expected)))  # padding keeps its slots
    outside = ~tokens.in_table
    assert torch.equal(order[outside], tokens.row_order()[outside])


@settings(max_examples=30, deadline=None)
@given(TABLES)
def test_transposed_table_has_the_inverse_order(counts: list) -> None:
    order = table_tokens([[2, Table(counts), 1]]).column_order()[0]
    turned = [list(column) for column in zip(*counts, strict=True)]
    assert torch.equal(table_tokens([[2, Table(turned), 1]]).column_order()[0], order.argsort())


def test_fields() -> None:
    tokens = table_tokens([[1, Table([[1, 2]], separators=True), 1], [1]])
    assert tokens.kind[0].tolist() == [TEXT, CELL, SEPARATOR, CELL, CELL, *[SEPARATOR] * 7, TEXT]
    assert tokens.row[0].tolist() == [-1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1]
    assert tokens.column[0].tolist() == [-1, 0, 1, 2, 2, 3, 4, 0, 1, 2, 3, 4, -1]
    assert tokens.index[0].tolist() == [0, 0, 0, 0, 1, *[0] * 8]
    assert tokens.data_row[0].tolist() == [-1, *[0] * 11, -1]
    assert tokens.data_column[0].tolist() == [-1, 0, 0, 1, 1, 1, 2, 0, 0, 1, 1, 2, -1]
    assert tokens.kind[1].tolist() == [TEXT, *[PADDING] * 12]
    assert tokens.next_ids(2).tolist() == [[13, 14], [1, 2]]


def test_grid_positions_have_equal_gaps() -> None:
    tokens = table_tokens([[2, Table([[1, 2, 1], [1, 1, 1]]), 1, Table([[3]]), 2], [3]])
    x, y = tokens.grid_positions()
    # 2 rows and 3 columns after 2 ids: steps of 4 on x and of 3 on y, text at 1 + 12
    assert x[0].tolist() == [0, 1, 5, 5, 5, 5, 9, 9, 9, 13, 15, 15, 15, 17, 18]
    assert y[0].tolist() == [0, 1, 4, 7, 7, 10, 4, 7, 10, 13, 15, 15, 15, 17, 18]
    assert x[1].tolist() == list(range(15))


@pytest.mark.parametrize(
    ("counts", "message"), [([[1, 2], [1]], "counts: .*one length"), ([], "counts"), ([[1, 0]], "at least 1 token")]
)
def test_wrong_tables(counts: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Table(counts)


def test_wrong_rows() -> None:
    with pytest.raises(ValueError, match=r"rows\[1\]"):
        table_tokens([[1], [-1]])
    with pytest.raises(ValueError, match=r"rows\[0\]"):
        table_tokens([["text"]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="length: expected at least 3"):
        table_tokens([[3]], length=2)
    assert table_tokens([[3]], length=5).mask.tolist() == [[True] * 3 + [False] * 2]
