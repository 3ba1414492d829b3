"""MP3: only the context answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmpos import Positions, create_encoding
from mmpos.objectives import MP3, context_mask
from mmpos.testing import seeded
from tests.objectives.trunk import SmallTrunk

GRID = (3, 5)


def setting(**options: object):
    torch.manual_seed(0)
    trunk = SmallTrunk(create_encoding("none", 24, 2, depth=2)).eval()
    return MP3(24, GRID, **options), trunk, seeded(2, 16, 24), Positions.grid(*GRID, num_prefix=1)


def test_context_has_its_share_and_the_prefix() -> None:
    keys, chosen = context_mask(
        Positions.grid(4, 6, num_prefix=2), 50, 0.25, generator=torch.Generator().manual_seed(0)
    )
    assert keys.shape == (50, 1, 1, 26)
    assert keys[..., :2].all()
    assert chosen.sum(1).tolist() == [6] * 50
    assert torch.equal(keys[:, 0, 0, 2:], chosen)
    assert chosen.any(0).all()


def test_other_tokens_ask_but_do_not_answer() -> None:
    model, trunk, tokens, positions = setting()
    context = torch.tensor([[0, 3, 7, 9], [14, 2, 5, 6]])
    out = model(trunk, tokens, positions, context=context)
    changed = tokens.clone()
    changed[0, 1 + 1] += 3 * seeded(24, seed=5)  # outside the context of sample 0
    changed[1, 1 + 5] += 3 * seeded(24, seed=6)  # inside the context of sample 1
    after = model(trunk, changed, positions, context=context)
    others = [i for i in range(15) if i != 1]
    torch.testing.assert_close(after.logits[0, others], out.logits[0, others])
    assert (after.logits[0, 1] - out.logits[0, 1]).abs().max() > 1e-3
    assert ((after.logits[1] - out.logits[1]).abs().amax(-1) > 1e-6).all()


def test_loss_on_all_or_masked_tokens() -> None:
    context = torch.tensor([[0, 3, 7, 9], [14, 2, 5, 6]])
    for loss_on in ("all", "masked"):
        model, trunk, tokens, positions = setting(loss_on=loss_on)
        out = model(trunk, tokens, positions, context=context)
        each = F.cross_entropy(out.logits.flatten(0, 1), torch.arange(15).repeat(2), reduction="none").reshape(2, 15)
        expected = each.mean() if loss_on == "all" else each[~out.context].mean()
        torch.testing.assert_close(out.loss, expected)


def test_padding_and_subsets() -> None:
    model, trunk, tokens, _ = setting()
    mask = (torch.arange(15) < 10).expand(2, -1)
    positions = Positions.grid(*GRID, num_prefix=1, mask=mask)
    out = model(trunk, tokens, positions, generator=torch.Generator().manual_seed(0))
    assert not out.context[:, 10:].any()
    each = F.cross_entropy(out.logits.flatten(0, 1), torch.arange(15).repeat(2), reduction="none").reshape(2, 15)
    torch.testing.assert_close(out.loss, each[:, :10].mean())
    keep = torch.tensor([[4, 0, 11], [2, 14, 7]])
    part = model(trunk, tokens[:, :4], Positions.grid(*GRID, num_prefix=1).take(keep), context=torch.tensor([[0], [2]]))
    torch.testing.assert_close(part.loss, F.cross_entropy(part.logits.flatten(0, 1), keep.flatten()))


def test_it_learns_from_content_that_gives_the_place_away() -> None:
    torch.manual_seed(0)
    trunk = SmallTrunk(create_encoding("none", 24, 2))
    model = MP3(24, GRID)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    marks = seeded(15, 24)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60):
        out = model(trunk, marks.expand(4, -1, -1), Positions.grid(*GRID), generator=generator)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert losses[-1] < 0.2 < 2 < losses[0]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="loss_on"):
        MP3(24, GRID, loss_on="context")
    with pytest.raises(ValueError, match="share"):
        MP3(24, GRID, share=0.0)
    with pytest.raises(ValueError, match="share"):
        context_mask(Positions.grid(2, 3), 1, 1.5)
    model, trunk, tokens, _ = setting()
    with pytest.raises(ValueError, match="grid"):
        model(trunk, tokens, Positions.grid(5, 3, num_prefix=1))
