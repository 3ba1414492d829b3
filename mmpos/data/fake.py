"""Fake: seeded random images with labels that can be learned, for tests and for a dry run of a large recipe."""

from __future__ import annotations

import torch

from mmpos.data.base import TensorData
from mmpos.data.images import BatchAugment, statistics


class Fake(TensorData):
    """Noise with one bright quarter-size square per image; the label says in which cell of a coarse raster it lies.

    Args:
        batch_size: images of one process in one training batch.
        eval_batch_size: images in one validation or test batch.
        image_size: height and width of the images.
        in_chans: channels.
        num_classes: classes.
        train_count: training images.
        test_count: test images; validation uses as many of its own.
        seed: seed of images, order and labels.
    """

    name = "fake"

    def __init__(
        self,
        *,
        batch_size: int = 8,
        eval_batch_size: int = 16,
        image_size: int = 16,
        in_chans: int = 1,
        num_classes: int = 4,
        train_count: int = 64,
        test_count: int = 32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = train_count + 2 * test_count
        images = torch.randint(0, 96, (count, in_chans, image_size, image_size), generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, num_classes, (count,), generator=generator)
        side = -(-num_classes // max(1, round(num_classes**0.5)))  # columns of a raster with a cell for each class
        cell = max(1, image_size // side)
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = divmod(label, side)
            image[:, row * cell : (row + 1) * cell, column * cell : (column + 1) * cell] += 128
        self.num_classes = num_classes
        self.class_names = tuple(f"class {label}" for label in range(num_classes))
        self.mean, self.std = statistics(images[:train_count])
        parts = [train_count, test_count, test_count]
        train, val, test = zip(images.split(parts), labels.split(parts), strict=True)
        super().__init__(
            train,
            val,
            test,
            augment=BatchAugment(),
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            image_size=image_size,
            seed=seed,
        )
