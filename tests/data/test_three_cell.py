"""The Three-Cell Experiment as data: what a run gets, which pictures splits share, what is refused."""

from __future__ import annotations

import pytest
import torch

from mmpos.data import create_data
from mmpos.data.three_cell import QUESTIONS
from mmpos.diagnostics import three_cell_images, three_cell_relations, three_cell_targets

SMALL = {"cells": 6, "pixels": 2, "train_count": 900, "val_count": 90, "test_count": 300, "batch_size": 32}


def triples(places: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(triple.flatten().tolist()) for triple in places}


def test_batches_are_normalised_pictures_and_their_answers() -> None:
    data = create_data("three_cell", **SMALL, background=0.25, seed=3)
    loader = data.train_dataloader()
    index = loader.sampler.batches()[0]
    images, labels = next(iter(loader))
    places = data.places["train"][index]
    raw = three_cell_images(places, cells=6, pixels=2, background=0.25)
    assert images.shape == (32, 3, 12, 12)
    assert torch.allclose(images, (raw - data.mean[0]) / data.std[0])
    assert torch.equal(labels, three_cell_targets(places, 6).long())
    everything = torch.cat([images for images, _ in data.train_dataloader()]).double()
    assert everything.mean((0, 2, 3)) == pytest.approx([0, 0, 0], abs=1e-6)
    assert everything.std((0, 2, 3), correction=0) == pytest.approx([1, 1, 1], abs=1e-6)


def test_the_model_has_two_outputs_for_each_question() -> None:
    data = create_data("three_cell", **SMALL)
    assert data.tasks == dict.fromkeys(QUESTIONS, 2)
    assert (data.num_classes, len(data.class_names), data.in_chans, data.image_size) == (12, 12, 3, 12)
    assert data.facts()["images"] == "900 training, 300 test, 90 validation images"


def test_default_pictures_are_those_of_the_paper() -> None:
    data = create_data("three_cell", train_count=64, val_count=9, test_count=9)
    assert next(iter(data.train_dataloader()))[0].shape == (64, 3, 224, 224)
    assert (data.cells, data.pixels, data.background) == (14, 16, 0.0)


def test_splits_are_balanced_and_share_no_picture() -> None:
    data = create_data("three_cell", **SMALL)
    train, val, test = (triples(data.places[split]) for split in ("train", "val", "test"))
    assert not train & test
    assert not train & val
    assert not val & test
    relations = three_cell_relations(data.places["train"])
    counts = ((relations[:, 0] + 1) * 3 + relations[:, 1] + 1).bincount(minlength=9)
    assert (counts - 100).abs().max() < 6 * (100 * 8 / 9) ** 0.5


def test_only_training_pictures_belong_to_the_seed() -> None:
    first, second = (create_data("three_cell", **SMALL, seed=seed) for seed in (0, 1))
    again = create_data("three_cell", **SMALL, seed=0)
    assert torch.equal(first.places["test"], second.places["test"])
    assert torch.equal(first.places["val"], second.places["val"])
    assert not torch.equal(first.places["train"], second.places["train"])
    assert torch.equal(first.places["train"], again.places["train"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pixels": 0}, "pixels: expected"),
        ({"background": 1.5}, "background: expected"),
        ({"test_count": 0}, "test_count: expected"),
        ({"cells": 3}, "cells: expected at least 4"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_data("three_cell", **{**SMALL, **options})


def test_other_sizes_are_refused() -> None:
    data = create_data("three_cell", **SMALL)
    with pytest.raises(ValueError, match="pictures of 12 px .* got 18; use evaluation=three_cell"):
        data.test_loader(18)
    assert len(data.test_loader(12)[0]) == 2
