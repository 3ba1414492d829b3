"""Ids of layout tokens."""

from __future__ import annotations

import pytest
import torch

from mmpos.tables import layout_token_ids


def test_layout_tokens_take_no_position() -> None:
    segment = torch.tensor([[0, 1, 1, 1, 2, 2, 2, 3, 4, 4]])
    layout = torch.tensor([[0, 1, 0, 0, 0, 0, 1, 1, 0, 1]]).bool()  # before, after, alone, after
    ids = layout_token_ids(segment, layout)
    assert ids.tolist() == [[0, 1, 1, 2, 3, 4, 3, 5, 5, 5]]
    assert torch.equal(ids[~layout], torch.arange(6))


def test_padding_on_either_side() -> None:
    segment = torch.tensor([[0, 0, 1, 1]])
    layout = torch.tensor([[1, 0, 1, 0]]).bool()
    alone = layout_token_ids(segment, layout)
    for pad in ((2, 0), (0, 3)):
        padded = torch.nn.functional.pad
        mask = padded(torch.ones(1, 4).bool(), pad)
        ids = layout_token_ids(padded(segment, pad), padded(layout, pad), mask)
        assert torch.equal(ids[mask], alone[0])
        assert not ids[~mask].any()


def test_errors() -> None:
    with pytest.raises(ValueError, match="segment, is_layout, mask"):
        layout_token_ids(torch.zeros(1, 3).long(), torch.zeros(1, 4).bool())
    with pytest.raises(ValueError, match="segment: expected 0 or more"):
        layout_token_ids(torch.tensor([[-1, 0]]), torch.zeros(1, 2).bool())
    assert layout_token_ids(torch.zeros(1, 0).long(), torch.zeros(1, 0).bool()).shape == (1, 0)
