"""Rotary ids of tables."""

from __future__ import annotations

import pytest
import torch

from mmpos.functional.rotary import inverse_frequencies, rotate
from mmpos.tables import Table, table_axes, table_rotary, table_tokens
from mmpos.testing import assert_close, seeded


def test_ids() -> None:
    tokens = table_tokens([[2, Table([[1, 3, 1], [1, 1, 1]]), 2, Table([[1], [1]]), 1], [1]])
    row, column, index = table_axes(tokens)
    # three columns and three words in a cell: text goes on three ids after the start
    assert row[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9]
    assert column[0].tolist() == [0, 1, 2, 3, 3, 3, 4, 2, 3, 4, 5, 6, 7, 7, 9]
    assert index[0].tolist() == [0, 1, 2, 2, 3, 4, 2, 2, 2, 2, 5, 6, 7, 7, 9]
    assert row[1].tolist() == list(range(15))


def test_a_long_cell_never_meets_the_text_after_it() -> None:
    ids = table_axes(table_tokens([[1, Table([[5, 1]]), 1]]))
    assert int(ids[:, 0, -1].min()) == int(ids[:, 0, :-1].max()) + 1 == 6


def test_table_deals_pairs_to_axes() -> None:
    ids = torch.tensor([[[0, 1]], [[0, 2]], [[0, 3]]])
    table = table_rotary(ids, 16, sections=(3, 3, 2))
    expected = torch.tensor([1.0, 1, 1, 2, 2, 2, 3, 3]) * inverse_frequencies(8, 10000.0)
    assert_close(table.cos[0, 0, 1], expected.cos())
    assert_close(table.sin[0, 0, 1], expected.sin())
    assert torch.equal(table_rotary(ids, 16).sin, table.sin)  # the default split
    with pytest.raises(ValueError, match="sections"):
        table_rotary(ids, 16, sections=(4, 4))


def test_logits_depend_on_offsets_only() -> None:
    ids = table_axes(table_tokens([[2, Table([[1, 2], [1, 1]]), 2]]))
    q, k = seeded(2, 1, 2, 9, 12, dtype=torch.float64).unbind(0)
    scores = [rotate(q, table_rotary(i, 12)) @ rotate(k, table_rotary(i, 12)).mT for i in (ids, ids + 5)]
    assert float((scores[0] - scores[1]).abs().max()) < 1e-5  # float32 angles
