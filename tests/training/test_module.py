"""Loss, mixing and seeding of a training step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmpos.training.module import Objective, seed_step


def test_cross_entropy_smooths_labels() -> None:
    logits, labels = torch.randn(3, 5), torch.tensor([0, 4, 2])
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert torch.equal(Objective(5, {"label_smoothing": 0.1})(logits, labels), expected)


def test_binary_cross_entropy_counts_every_mixed_class_as_present() -> None:
    logits = torch.randn(2, 3)
    soft = torch.tensor([[0.7, 0.3, 0.0], [0.0, 1.0, 0.0]])
    expected = F.binary_cross_entropy_with_logits(logits, torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]))
    assert torch.equal(Objective(3, {"loss": "bce", "mixup": 0.8})(logits, soft), expected)
    smoothed = torch.tensor([[0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3]])
    got = Objective(3, {"loss": "bce", "label_smoothing": 0.1})(logits[:1], torch.tensor([0]))
    assert torch.allclose(got, F.binary_cross_entropy_with_logits(logits[:1], smoothed))


def test_mixing_leaves_the_batch_alone_and_smooths_once() -> None:
    objective = Objective(4, {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1})
    images, labels = torch.randn(6, 1, 8, 12), torch.tensor([0, 1, 2, 3, 0, 1])
    kept = images.clone()
    seed_step(0, 0, 0, 0)
    mixed, targets = objective.prepare(images, labels)
    assert torch.equal(images, kept)
    assert not torch.equal(mixed, images)
    assert torch.allclose(targets.sum(-1), torch.ones(6))
    logits = torch.randn(6, 4)
    assert torch.equal(objective(logits, targets), F.cross_entropy(logits, targets))
    with pytest.raises(ValueError, match="even batch, got 5 images"):
        objective.prepare(images[:5], labels[:5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mse"}, "objective.loss: expected 'ce' or 'bce', got 'mse'"),
        ({"label_smoothing": 1.0}, "objective.label_smoothing"),
        ({"mixpu": 0.1}, "objective: unknown mixpu"),
    ],
)
def test_wrong_objectives_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(3, options)


def test_a_step_is_a_function_of_its_place() -> None:
    def draw(*place: int) -> tuple[float, float, float]:
        seed_step(*place)
        return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002

    first = draw(0, 1, 2, 3)
    draw(5, 5, 5, 5)
    assert draw(0, 1, 2, 3) == first
    others = [draw(1, 1, 2, 3), draw(0, 2, 2, 3), draw(0, 1, 3, 3), draw(0, 1, 2, 4)]
    assert len({first, *others}) == 5
