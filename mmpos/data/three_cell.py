"""The Three-Cell Experiment as data: three coloured cells, six yes-or-no questions. Card: ``datasets/three_cell``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mmpos.data.base import ImageData
from mmpos.data.images import REAL
from mmpos.data.loader import BatchLoader, stream_tensors
from mmpos.diagnostics.three_cell import TARGETS, three_cell_images, three_cell_sample, three_cell_targets

__all__ = ["ThreeCellData"]

#: the questions :data:`~mmpos.diagnostics.three_cell.TARGETS` as names of metrics
QUESTIONS = ("distance_rg", "distance_rb", "orientation", "area_rg", "area_rb", "vector_sum")
_TEST, _VAL = 1_414_213_562, 1_732_050_807  # seeds of the pictures that are the same for every run


class ThreeCellData(ImageData):
    """Pictures of a red, a green and a blue cell; where they are decides every answer.

    Labels are ``(B, 6)``, one yes or no for each question, and the model has two outputs for each: the cross-entropy of
    the two is the binary cross-entropy of their difference. No training picture is a validation or test picture.

    Args:
        batch_size: pictures of one process in one training batch.
        eval_batch_size: pictures in one validation or test batch.
        cells: cells along a side.
        pixels: side of a cell. With a patch of the same size each token is one cell.
        background: value of all channels outside of the three cells, 0 to 1.
        train_count: training pictures.
        val_count: validation pictures.
        test_count: test pictures.
        seed: seed of the training pictures and of their order; validation and test pictures do not depend on it.
    """

    name = "three_cell"
    evaluation = "three_cell"
    in_chans = 3
    class_names = tuple(f"{target}: {answer}" for target in TARGETS for answer in ("no", "yes"))
    num_classes = len(class_names)

    def __init__(
        self,
        *,
        batch_size: int = 64,
        eval_batch_size: int = 250,
        cells: int = 14,
        pixels: int = 16,
        background: float = 0.0,
        train_count: int = 48_000,
        val_count: int = 1_000,
        test_count: int = 4_000,
        seed: int = 0,
    ) -> None:
        if pixels < 1:
            raise ValueError(f"pixels: expected a side of 1 px or more, got {pixels}")
        if not 0 <= background <= 1:
            raise ValueError(f"background: expected a value from 0 to 1, got {background}")
        counts = {"train_count": train_count, "val_count": val_count, "test_count": test_count}
        for option, count in counts.items():
            if count < 1:
                raise ValueError(f"{option}: expected 1 or more pictures, got {count}")
        super().__init__(batch_size=batch_size, eval_batch_size=eval_batch_size, image_size=cells * pixels, seed=seed)
        self.tasks = dict.fromkeys(QUESTIONS, 2)
        self.cells, self.pixels, self.background = cells, pixels, background
        test = _draw(test_count, cells, _TEST)
        val = _draw(val_count, cells, _VAL, exclude=test)
        train = _draw(train_count, cells, seed, exclude=torch.cat([test, val]))
        self.places = {"train": train, "val": val, "test": test}
        self.targets = {split: three_cell_targets(places, cells).long() for split, places in self.places.items()}
        # each channel is 1 in one cell, 0 in two and the background in all others, in every picture
        count = cells**2
        mean = (1 + (count - 3) * background) / count
        std = math.sqrt((1 + (count - 3) * background**2) / count - mean**2)
        self.mean, self.std = (mean,) * 3, (std,) * 3

    def facts(self) -> dict[str, Any]:
        counts = {split: len(places) for split, places in self.places.items()}
        return {
            "name": self.name,
            "questions": ", ".join(TARGETS),
            "pictures": f"{self.cells} x {self.cells} cells of {self.pixels} px, background {self.background:g}",
            "images": f"{counts['train']:,} training, {counts['test']:,} test, {counts['val']:,} validation images",
        }

    def render(self, split: str, index: Tensor) -> tuple[Tensor, Tensor]:
        """Pictures and answers.

        Shape: index ``(B,)``; returns ``(B, 3, size, size)`` on [0, 1] and ``(B, 6)``.
        """
        options: dict[str, Any] = {"cells": self.cells, "pixels": self.pixels, "background": self.background}
        return three_cell_images(self.places[split][index], **options), self.targets[split][index]

    def train_dataloader(self) -> BatchLoader:
        """Shuffled training pictures; they are never flipped, turned or shifted, which would change the answers."""
        return self._loader("train")

    def val_dataloader(self) -> BatchLoader:
        """Validation pictures."""
        return self._loader("val")

    def test_loader(self, size: int) -> tuple[BatchLoader, str]:
        if size != self.image_size:
            raise ValueError(
                f"sizes: {self.name} has pictures of {self.image_size} px (data.cells x data.pixels), got {size}; "
                "use evaluation=three_cell, which tests at this size"
            )
        return self._loader("test"), REAL

    def _loader(self, split: str) -> BatchLoader:
        def fetch(index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
            images, labels = self.render(split, index)
            return self.normalise(images), labels

        return BatchLoader(self.order(len(self.places[split]), train=split == "train"), stream_tensors(fetch))


def _draw(count: int, cells: int, seed: int, exclude: Tensor | None = None) -> Tensor:
    return three_cell_sample(count, cells=cells, generator=torch.Generator().manual_seed(seed), exclude=exclude)
