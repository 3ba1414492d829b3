"""DropPos: soft labels on the real grid, the loss, and what the encoder can still know of a hidden place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmpos import Positions, create_encoding
from mmpos.objectives import (
    DropPos,
    attentive_weights,
    position_accuracy,
    position_loss,
    random_subset,
    smoothing_sigma,
    smoothing_targets,
)
from mmpos.testing import image_for, seeded
from tests.objectives.trunk import SmallTrunk

GRID = (4, 6)
ENCODINGS = ["sincos", "learned", "fourier", "rope_axial", "rope_mixed", "pape", "pape_ri", "irpe", "none"]


def test_soft_labels_on_a_rectangle() -> None:
    soft = smoothing_targets((3, 5), 0.8, dtype=torch.float64)
    torch.testing.assert_close(soft.sum(1), torch.ones(15).double())
    places = Positions.grid(3, 5).coords[0].double()
    raw = (-((places[:, None] - places) ** 2).sum(-1) / 0.64).exp()
    torch.testing.assert_close(soft, raw / raw.sum(1, keepdim=True))
    # the cells above and below are five apart, not four: the neighbours of cell 7 are 2, 6, 8 and 12
    assert soft[7].topk(5).indices.sort().values.tolist() == [2, 6, 7, 8, 12]
    assert torch.equal(smoothing_targets((3, 5), 0.0), torch.eye(15))


def test_the_reference_divides_columns() -> None:
    quirk = smoothing_targets((14, 14), 1.0, reference_quirk=True, dtype=torch.float64)
    sums = quirk.sum(1)
    assert sums.min().item() == pytest.approx(0.89, abs=0.006)
    assert sums.max().item() == pytest.approx(1.11, abs=0.006)
    torch.testing.assert_close(quirk, smoothing_targets((14, 14), 1.0, dtype=torch.float64).T)


def test_sigma_falls_straight_to_zero() -> None:
    assert [smoothing_sigma(p, 2.0) for p in (-1, 0, 0.25, 1, 3)] == [2.0, 2.0, 1.5, 0.0, 0.0]


def test_loss_and_accuracy_count_what_they_are_told() -> None:
    logits, cells = seeded(2, 3, 15), torch.tensor([[0, 7, 14], [3, 3, 9]])
    counted = torch.tensor([[True, False, True], [False, True, False]])
    each = F.cross_entropy(logits.flatten(0, 1), cells.flatten(), reduction="none").reshape(2, 3)
    torch.testing.assert_close(position_loss(logits, cells, counted), each[counted].mean())
    weight = seeded(2, 3, seed=1).abs() * counted
    soft = smoothing_targets((3, 5), 1.0)
    each = F.cross_entropy(logits.flatten(0, 1), soft[cells].flatten(0, 1), reduction="none").reshape(2, 3)
    torch.testing.assert_close(position_loss(logits, cells, weight, soft), (each * weight).sum() / weight.sum())
    perfect = F.one_hot(cells, 15).float()
    perfect[0, 1] = 0
    assert position_accuracy(perfect, cells, counted) == 1
    assert position_accuracy(-perfect, cells, counted) == 0
    assert position_loss(logits, cells, torch.zeros(2, 3)) == 0


def test_attentive_weights_follow_the_class_token() -> None:
    cls, patches = seeded(2, 8), seeded(2, 10, 8, seed=1)
    patches[0, 4] = 3 * cls[0]
    visible = torch.tensor([[1, 4, 6], [0, 2, 9]])
    weight = attentive_weights(cls, patches, visible)
    torch.testing.assert_close(weight.sum(1), torch.ones(2))
    assert weight[0].argmax() == 1
    cosine = F.cosine_similarity(patches[1, visible[1]], cls[1][None], dim=-1)
    torch.testing.assert_close(weight[1], (cosine / 0.1).softmax(-1))


def test_random_subsets_are_uniform_and_skip_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    found = random_subset(4000, 8, 3, generator=generator)
    assert all(len(set(row)) == 3 for row in found[:50].tolist())
    share = found.flatten().bincount(minlength=8) / 4000
    assert (share - 3 / 8).abs().max() < 0.03
    mask = torch.tensor([[True] * 5 + [False] * 3]).expand(50, -1)
    assert random_subset(50, 8, 5, mask=mask, generator=generator).max() == 4
    with pytest.raises(ValueError, match="real tokens"):
        random_subset(50, 8, 6, mask=mask)
    with pytest.raises(ValueError, match="size"):
        random_subset(1, 4, 5)


def setting(name: str, num_prefix: int = 1, **options: object):
    torch.manual_seed(0)
    stack = create_encoding(name, 24, 2, depth=2, train_grid=GRID, num_prefix=num_prefix)
    model = DropPos(24, GRID, keep=0.5, drop=0.5, width=16, heads=2, **options).eval()
    positions = Positions.grid(*GRID, num_prefix=num_prefix)
    return model, SmallTrunk(stack).eval(), seeded(2, 24 + num_prefix, 24), positions


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("mode", ["learned", "zeros"])
def test_a_hidden_place_leaves_no_trace(name: str, mode: str) -> None:
    """The same content hidden at another cell gives the same logits; shown there, it does not."""
    model, trunk, tokens, positions = setting(name, mode=mode)
    visible = random_subset(2, 24, 12, generator=torch.Generator().manual_seed(1))
    hidden = torch.zeros(2, 12, dtype=torch.bool)
    hidden[:, [1, 5, 6]] = True

    def logits(index: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return model(trunk, given, positions, visible=index, hidden=hidden).logits

    def moved_to_unused(slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        index, given = visible.clone(), tokens.clone()
        for row in range(2):
            unused = next(c for c in range(24) if c not in visible[row].tolist())
            index[row, slot] = unused
            given[row, 1 + unused] = tokens[row, 1 + int(visible[row, slot])]
        return index, given

    reference = logits(visible, tokens)
    torch.testing.assert_close(logits(*moved_to_unused(5)), reference, rtol=1e-4, atol=1e-5)
    if name not in ("none", "irpe"):  # irpe starts with empty tables
        assert (logits(*moved_to_unused(0)) - reference).abs().max() > 1e-5


@pytest.mark.parametrize("name", ENCODINGS)
def test_shuffled_places_are_exchanged_among_the_hidden(name: str) -> None:
    model, trunk, tokens, positions = setting(name, mode="shuffle")
    visible = random_subset(2, 24, 12, generator=torch.Generator().manual_seed(1))
    none_hidden_but_one = torch.zeros(2, 12, dtype=torch.bool)
    none_hidden_but_one[:, 3] = True  # one token alone can only keep its place
    out = model(trunk, tokens, positions, visible=visible, hidden=none_hidden_but_one).logits
    start = positions.num_prefix
    placed = trunk.stack.add_to_tokens(tokens, positions)
    sequence = torch.cat([placed[:, :start], placed[:, start:].gather(1, visible[..., None].expand(-1, -1, 24))], 1)
    expected = model.decoder(trunk(sequence, positions.take(visible)))[:, start:]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["learned", "zeros", "shuffle"])
def test_defaults_counts_and_gradients(mode: str) -> None:
    stack = create_encoding("sincos", 24, 2)
    model = DropPos(24, GRID, width=16, heads=2, mode=mode)
    tokens = seeded(3, 24, 24).requires_grad_()
    out = model(SmallTrunk(stack), tokens, Positions.grid(*GRID), generator=torch.Generator().manual_seed(0))
    assert out.logits.shape == (3, 6, 24)
    assert out.hidden.sum(1).tolist() == [4, 4, 4]  # three quarters of six, rounded
    position_loss(out.logits, out.cells, out.hidden, smoothing_targets(GRID, 1.0)).backward()
    seen = tokens.grad.abs().sum(-1) > 0
    for row in range(3):
        assert sorted(out.cells[row].tolist()) == seen[row].nonzero()[:, 0].tolist()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_order_of_the_output_is_that_of_the_visible_tokens() -> None:
    model, trunk, tokens, positions = setting("sincos")
    visible = random_subset(2, 24, 12, generator=torch.Generator().manual_seed(1))
    hidden = torch.zeros(2, 12, dtype=torch.bool)
    hidden[0, [2, 7]], hidden[1, [0, 11]] = True, True
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    straight = model(trunk, tokens, positions, visible=visible, hidden=hidden)
    mixed = model(trunk, tokens, positions, visible=visible[:, order], hidden=hidden[:, order])
    torch.testing.assert_close(mixed.logits, straight.logits[:, order], rtol=1e-4, atol=1e-5)


def test_padding_is_never_visible() -> None:
    model, trunk, tokens, _ = setting("sincos", num_prefix=0)
    mask = (torch.arange(24) < 18).expand(2, -1)
    positions = Positions.grid(*GRID, mask=mask)
    out = model(trunk, tokens[:, :24], positions, generator=torch.Generator().manual_seed(0))
    assert out.cells.max() < 18


def test_encodings_that_read_the_image() -> None:
    stack = create_encoding("loope", 24, 2, train_grid=GRID, patch_size=4).eval()
    positions = Positions.grid(*GRID)
    model = DropPos(24, GRID, width=16, heads=2)
    out = model(SmallTrunk(stack), seeded(2, 24, 24), positions, image=image_for(stack, positions, 2))
    assert torch.isfinite(out.logits).all()


def test_bad_arguments() -> None:
    for options, text in (
        ({"mode": "mask"}, "mode"),
        ({"keep": 0.0}, "keep"),
        ({"drop": 1.5}, "drop"),
        ({"heads": 3}, "heads"),
    ):
        with pytest.raises(ValueError, match=text):
            DropPos(24, GRID, **{"width": 16, **options})
    model, trunk, tokens, positions = setting("sincos")
    with pytest.raises(ValueError, match="complete grid"):
        model(trunk, tokens, Positions.grid(6, 4, num_prefix=1))
    uneven = torch.tensor([[True, False], [True, True]])
    with pytest.raises(ValueError, match="equally many"):
        model(trunk, tokens, positions, visible=torch.tensor([[0, 1], [2, 3]]), hidden=uneven)
    with pytest.raises(ValueError, match="targets"):
        position_loss(seeded(1, 2, 15), torch.zeros(1, 2).long(), torch.ones(1, 2), torch.eye(14))
    with pytest.raises(ValueError, match="sigma"):
        smoothing_targets(GRID, -1.0)
