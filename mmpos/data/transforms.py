"""timm's image transforms for files and shards, drawn from a seed per sample instead of the global random state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "FileTransform", "seeded"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, NumPy's and torch's generators seeded for a moment; what they held before comes back."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - what timm uses
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


@dataclass(frozen=True)
class FileTransform:
    """The options of timm's transforms that image files are read with.

    Args:
        image_size: height and width of the training images.
        crop_pct: at test time the short side becomes ``size / crop_pct`` and the centre is cut out.
        interpolation: ``bilinear``, ``bicubic`` or, in training, ``random``.
        scale: part of the area that a random crop covers.
        ratio: aspect ratio of a random crop.
        hflip: probability of a left-right flip.
        color_jitter: strength of the colour jitter.
        auto_augment: a timm policy such as ``rand-m9-mstd0.5-inc1`` (RandAugment) or ``3a`` (3-Augment); ``None`` for
            none.
        erasing: probability of erasing a rectangle.
        mean: subtracted from pixels on [0, 1].
        std: divides them.
    """

    image_size: int
    crop_pct: float = 0.875
    interpolation: str = "bicubic"
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    color_jitter: float = 0.3
    auto_augment: str | None = None
    erasing: float = 0.0
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD

    def train(self) -> Callable[[Any], Tensor]:
        """From a PIL image to an augmented, normalised tensor ``(3, image_size, image_size)``."""
        return _create_transform()(
            self.image_size,
            is_training=True,
            scale=tuple(self.scale),
            ratio=tuple(self.ratio),
            hflip=self.hflip,
            color_jitter=self.color_jitter,
            auto_augment=self.auto_augment,
            interpolation=self.interpolation,
            re_prob=self.erasing,
            re_mode="pixel",
            mean=tuple(self.mean),
            std=tuple(self.std),
        )

    def evaluate(self, size: int) -> Callable[[Any], Tensor]:
        """From a PIL image to a normalised centre crop ``(3, size, size)``."""
        return _create_transform()(
            size,
            is_training=False,
            crop_pct=self.crop_pct,
            interpolation="bicubic" if self.interpolation == "random" else self.interpolation,
            mean=tuple(self.mean),
            std=tuple(self.std),
        )


def _create_transform() -> Callable[..., Any]:
    try:
        from timm.data import create_transform
    except ImportError as error:
        raise ImportError(
            'image files are read with timm and torchvision; install them with pip install "mmpos[train]"'
        ) from error
    return create_transform
