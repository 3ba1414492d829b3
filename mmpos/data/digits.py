"""Digits: 1,797 handwritten digits of 8 x 8 pixels inside scikit-learn. For smoke tests. Card: ``datasets/digits``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmpos.data.base import TensorData, build_augment, hold_out, keep_per_class
from mmpos.data.images import statistics

SHIFT = {"translate": 0.06}


class Digits(TensorData):
    """1,437 training and 360 test digits (20 % of each class); larger test sizes are enlarged.

    Args:
        batch_size: images of one process in one training batch.
        eval_batch_size: images in one validation or test batch.
        image_size: height and width of the training images, at most 8.
        val_fraction: part of the training images of each class kept for validation; 0 validates on the test images.
        labels_per_class: train on that many images of each class, which the seed chooses; ``None`` for all. Statistics
            of the pixels are those of all training images.
        augment: ``True`` small shifts, ``False`` none, or a mapping of :class:`~mmpos.data.images.BatchAugment`
            options to change.
        seed: seed of the order, of the augmentation and of ``labels_per_class``; the splits do not depend on it.
    """

    name = "digits"

    def __init__(
        self,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 120,
        image_size: int = 8,
        val_fraction: float = 0.1,
        labels_per_class: int | None = None,
        augment: bool | Mapping[str, Any] = True,
        seed: int = 0,
    ) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError(
                'data digits comes with scikit-learn; install it with pip install "mmpos[train]"'
            ) from error
        raw = load_digits()
        images = torch.from_numpy(raw.images).mul(255 / 16).round().to(torch.uint8)[:, None]  # stored as 0 to 16
        labels = torch.from_numpy(raw.target).long()
        test = hold_out(labels, 0.2, seed=0)
        self.num_classes = 10
        self.class_names = tuple("0123456789")
        self.mean, self.std = statistics(images[~test])
        held = torch.zeros_like(test)
        held[~test] = hold_out(labels[~test], val_fraction, seed=1)
        train = ~test & ~held
        train[train.clone()] = keep_per_class(labels[train], labels_per_class, seed)
        pick = lambda mask: (images[mask], labels[mask])  # noqa: E731
        super().__init__(
            pick(train),
            pick(held) if held.any() else None,
            pick(test),
            augment=build_augment(augment, SHIFT),
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            image_size=image_size,
            seed=seed,
        )
