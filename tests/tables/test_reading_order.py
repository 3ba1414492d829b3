"""Reading-order codes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos.tables import ReadingOrderBias, code_sinusoid, nearest_neighbours, reading_order_codes, signed_codes
from mmpos.testing import seeded


def graph(seed: int, words: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    edges = (torch.rand(words, words, generator=generator) < 0.4) | torch.eye(words).bool()
    return edges, torch.randperm(words, generator=generator)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_codes_count_neighbours_and_are_equivariant(seed: int, words: int) -> None:
    edges, rank = graph(seed, words)
    codes = reading_order_codes(edges, rank)
    for i in range(words):
        found = [j for j in rank.argsort().tolist() if edges[i, j]]
        assert codes[i, found].tolist() == list(range(len(found)))
        assert (codes[i][~edges[i]] == -1).all()
    assert torch.equal(reading_order_codes(edges, 3 * rank**2 + 7), codes)  # monotone relabelling
    order = torch.randperm(words, generator=torch.Generator().manual_seed(seed + 1))
    assert torch.equal(reading_order_codes(edges[order][:, order], rank[order]), codes[order][:, order])


def test_batches() -> None:
    pairs = [graph(seed) for seed in (0, 1)]
    together = reading_order_codes(*(torch.stack(part) for part in zip(*pairs, strict=True)))
    for number, pair in enumerate(pairs):
        assert torch.equal(together[number], reading_order_codes(*pair))


def test_signed_codes() -> None:
    edges, rank = graph(3)
    codes = reading_order_codes(edges, rank)
    signed = signed_codes(codes)
    assert (signed.diagonal() == 0).all()
    assert torch.equal(signed < 0, edges & (rank[None] < rank[:, None]))
    with pytest.raises(ValueError, match="own neighbours"):
        signed_codes(reading_order_codes(edges & ~torch.eye(9).bool(), rank))


def test_sinusoid() -> None:
    waves = code_sinusoid(torch.tensor([[0, 2], [-1, 0]]), 4, 100.0)
    assert waves[0, 0].tolist() == [0, 1, 0, 1]
    expected = torch.tensor([2.0, 0.2])
    assert torch.allclose(waves[0, 1], torch.stack([expected.sin(), expected.cos()], -1).flatten())
    assert float(waves[1, 0].abs().max()) == 0


def test_nearest_neighbours() -> None:
    centres = torch.tensor([[0.0, 0.0], [1.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    assert nearest_neighbours(centres, 1).long().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert nearest_neighbours(seeded(2, 8, 2), 3).sum(-1).eq(4).all()
    with pytest.raises(ValueError, match="count"):
        nearest_neighbours(centres, 4)


def test_bias() -> None:
    edges, rank = graph(5)
    codes = reading_order_codes(edges, rank)
    module = ReadingOrderBias(2, reach=1)
    with torch.no_grad():
        module.table.copy_(torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]))
    out = module(codes[None])
    assert out.shape == (1, 2, 9, 9)
    signed = signed_codes(codes)
    expected = torch.where(edges, 2.0 + signed.sign(), 4.0)
    assert torch.equal(out[0, 0], expected)
    assert torch.equal(out[0, 1], expected + 4)
    with pytest.raises(ValueError, match="reach"):
        ReadingOrderBias(2, reach=-1)


def test_errors() -> None:
    edges, rank = graph(0)
    with pytest.raises(ValueError, match="rank: expected distinct"):
        reading_order_codes(edges, torch.zeros_like(rank))
    with pytest.raises(ValueError, match="neighbours, rank"):
        reading_order_codes(edges, rank[:3])
