"""The losses of SeqPE and the coordinates they are computed on."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos.functional.digits import digit_count
from mmpos.objectives.seqpe import (
    contrastive_candidates,
    contrastive_loss,
    edit_digits,
    nearest_candidate,
    random_shift,
    transfer_loss,
)
from mmpos.testing import seeded


@pytest.mark.parametrize("heads", [None, 2])
def test_contrastive_loss_is_the_cross_entropy_of_products(heads: int | None) -> None:
    pivot, candidates, labels = seeded(3, 8), seeded(3, 5, 8, seed=1), torch.tensor([4, 0, 2])
    losses = []
    for part in range(heads or 1):
        size = 8 // (heads or 1)
        cut = slice(part * size, (part + 1) * size)
        logits = (candidates[..., cut] * pivot[:, None, cut]).sum(-1) * 0.7
        losses.append(F.cross_entropy(logits, labels, label_smoothing=0.1))
    ours = contrastive_loss(pivot, candidates, labels, num_heads=heads, logit_scale=0.7, label_smoothing=0.1)
    torch.testing.assert_close(ours, torch.stack(losses).mean())


def test_contrastive_loss_is_least_when_products_order_like_distance() -> None:
    pivot_at, at = torch.tensor([[3, 4]]), torch.tensor([[[3, 5], [9, 9], [0, 0], [5, 4]]])
    label = nearest_candidate(pivot_at, at)
    assert label.tolist() == [0]
    # vectors whose product is minus the squared distance up to a constant of the pivot
    lift = lambda x: torch.cat([x, torch.ones_like(x[..., :1]), -(x**2).sum(-1, keepdim=True)], -1).float()  # noqa: E731
    candidates = lift(at)
    pivot = torch.cat([2 * pivot_at, torch.zeros(1, 1), torch.ones(1, 1)], -1)
    good = contrastive_loss(pivot, candidates, label, logit_scale=10.0)
    assert good < 1e-3
    assert contrastive_loss(-pivot, candidates, label, logit_scale=10.0) > 1


@pytest.mark.parametrize("heads", [None, 2])
def test_transfer_loss_is_the_symmetric_divergence(heads: int | None) -> None:
    teacher, student = seeded(2, 5, 8), seeded(2, 5, 8, seed=1)
    split = lambda t: t.unflatten(-1, (heads or 1, -1)).transpose(1, 2)  # noqa: E731
    t, s = (F.log_softmax(split(x) @ split(x).mT * 0.3, -1) for x in (teacher, student))
    kl = lambda a, b: (b.exp() * (b - a)).mean()  # noqa: E731
    ours = transfer_loss(teacher, student, num_heads=heads, logit_scale=0.3)
    torch.testing.assert_close(ours, kl(s, t) + kl(t, s))
    torch.testing.assert_close(
        transfer_loss(teacher, student, num_heads=heads, logit_scale=0.3, reduction="batchmean"), 5 * ours
    )
    mse = transfer_loss(teacher, student, num_heads=heads, logit_scale=0.3, metric="mse")
    torch.testing.assert_close(mse, ((t - s) ** 2).mean())
    assert transfer_loss(teacher, teacher) == 0


@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_only_below_one_does_the_teacher_learn(beta: float) -> None:
    teacher, student = (seeded(1, 4, 6, seed=i, dtype=torch.float64).requires_grad_() for i in range(2))
    transfer_loss(teacher, student, beta=beta).backward()
    alone = seeded(1, 4, 6, seed=1, dtype=torch.float64).requires_grad_()
    transfer_loss(teacher.detach(), alone, beta=1.0).backward()
    torch.testing.assert_close(student.grad, beta * alone.grad)
    if beta == 1.0:
        assert teacher.grad is None
    else:
        mirrored = teacher.detach().clone().requires_grad_()
        transfer_loss(student.detach(), mirrored, beta=1.0).backward()
        torch.testing.assert_close(teacher.grad, (1 - beta) * mirrored.grad)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(2, 150), st.integers(0, 1000))
def test_candidates_are_in_range_and_never_the_pivot(axes: int, max_index: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pivot = torch.randint(max_index, (20, axes), generator=generator)
    found = contrastive_candidates(pivot, 16, max_index, generator=generator)
    assert found.shape == (20, 16, axes)
    assert found.min() >= 0
    assert found.max() < max_index
    assert not (found == pivot[:, None]).all(-1).any()


def test_the_three_kinds_of_candidates() -> None:
    pivot = torch.full((200, 2), 45)
    generator = torch.Generator().manual_seed(0)
    window = contrastive_candidates(pivot, 32, 100, shares=(0.0, 0.0, 1.0), window=6, generator=generator)
    spread = window.amax(1) - window.amin(1)
    assert spread.max() <= 6  # 5, and one more where a candidate had to leave the pivot
    assert window.float().mean(1).std() > 20  # placed anywhere, not about the pivot
    uniform = contrastive_candidates(pivot, 32, 100, shares=(1.0, 0.0, 0.0), generator=generator)
    mixed = contrastive_candidates(pivot, 32, 100, shares=(0.0, 1.0, 0.0), hard=0.5, generator=generator)
    share = lambda t: (t == 45).any(-1).float().mean()  # noqa: E731
    assert share(uniform) < 0.05
    assert share(mixed[:, :16]) > 0.3  # edits leave an axis alone often
    assert share(mixed[:, 16:]) < 0.05


def test_edits_change_the_written_number_a_little() -> None:
    coords = torch.full((4000, 1), 123)
    found = edit_digits(coords, 1000, generator=torch.Generator().manual_seed(0)).flatten().tolist()
    assert max(found) < 1000
    for expected in (12, 13, 23, 213, 132, 321, 124, 923):  # deleted, exchanged, replaced
        assert expected in found, expected
    assert any(235 <= n <= 239 or 230 <= n <= 234 for n in found)  # inserted: 123 -> 23x
    assert len(set(found)) > 100
    assert digit_count(1000) == 3


def test_shifts_cover_the_room_on_a_rectangle() -> None:
    generator = torch.Generator().manual_seed(0)
    shifts = torch.stack([random_shift((3, 7), 10, generator=generator) for _ in range(600)])
    assert shifts[:, 0].unique().tolist() == list(range(8))
    assert shifts[:, 1].unique().tolist() == list(range(4))
    with pytest.raises(ValueError, match="max_index"):
        random_shift((3, 7), 6)


def test_bad_arguments() -> None:
    x = seeded(1, 3, 4)
    for options, text in (
        ({"metric": "js"}, "metric"),
        ({"reduction": "sum"}, "reduction"),
        ({"num_heads": 3}, "num_heads"),
    ):
        with pytest.raises(ValueError, match=text):
            transfer_loss(x, x, **options)
    with pytest.raises(ValueError, match="shares"):
        contrastive_candidates(torch.zeros(1, 2).long(), 4, 10, shares=(1.0, 1.0, 0.0))
    assert math.isfinite(float(transfer_loss(x * 50, -x * 50)))
