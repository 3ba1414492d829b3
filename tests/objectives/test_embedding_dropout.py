"""Embedding dropout: whole images without places."""

from __future__ import annotations

import pytest
import torch

from mmpos import Positions, create_encoding
from mmpos.objectives import EmbeddingDropout
from mmpos.testing import seeded

POSITIONS = Positions.grid(2, 3, num_prefix=1)


def build(rate: float = 0.5, **options: object) -> EmbeddingDropout:
    torch.manual_seed(0)
    return EmbeddingDropout(create_encoding("learned", 8, 2, train_grid=(2, 3), num_prefix=1), rate, **options)


def test_rates_zero_and_one_and_evaluation() -> None:
    x = seeded(4, 7, 8)
    module = build()
    with_places = module.stack.add_to_tokens(x, POSITIONS)
    assert torch.equal(build(0.0).train().add_to_tokens(x, POSITIONS), with_places)
    assert torch.equal(module.eval().add_to_tokens(x, POSITIONS), with_places)
    none = build(1.0).train().add_to_tokens(x, POSITIONS)
    assert torch.equal(none[:, 1:], x[:, 1:])
    assert torch.equal(none[:, 0], with_places[:, 0])
    assert torch.equal(build(1.0, drop_prefix=True).train().add_to_tokens(x, POSITIONS), x)


def test_whole_samples_are_kept_or_dropped_without_rescaling() -> None:
    x, module = seeded(2000, 7, 8), build(0.3).train()
    added = (module.add_to_tokens(x, POSITIONS, generator=torch.Generator().manual_seed(0)) - x)[:, 1:]
    full = (module.stack.add_to_tokens(x, POSITIONS) - x)[:, 1:]
    dropped = (added == 0).all((1, 2))
    torch.testing.assert_close(added[~dropped], full[~dropped])
    assert dropped.float().mean().item() == pytest.approx(0.3, abs=0.04)
    together = build(0.5, per_sample=False).train()
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        gone = ((together.add_to_tokens(x[:9], POSITIONS, generator=generator) - x[:9])[:, 1:] == 0).all((1, 2))
        assert gone.all() or not gone.any()


def test_an_explicit_choice_is_obeyed() -> None:
    x, module = seeded(3, 7, 8), build().eval()
    keep = torch.tensor([True, False, True])
    out = module.add_to_tokens(x, POSITIONS, keep=keep)
    assert torch.equal(out[1, 1:], x[1, 1:])
    assert torch.equal(out[keep], module.stack.add_to_tokens(x, POSITIONS)[keep])


def test_bad_rate() -> None:
    with pytest.raises(ValueError, match="rate"):
        build(1.5)
