"""A folder of class folders, laid out as ImageNet-1k is: ``<root>/train/<class>/*.jpg``, ``<root>/val/<class>/*.jpg``.

Card: ``datasets/image_folder``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmpos.data.base import ImageData
from mmpos.data.images import pixel_origin
from mmpos.data.loader import BatchLoader, stream_dataset
from mmpos.data.order import sample_seed
from mmpos.data.transforms import IMAGENET_MEAN, IMAGENET_STD, FileTransform, seeded


class ImageFolderData(ImageData):
    """Image files, read by worker processes and augmented by timm.

    Args:
        root: folder that holds ``train`` and ``val``.
        batch_size: images of one process in one training batch.
        eval_batch_size: images in one validation batch.
        image_size: height and width of the training images.
        crop_pct: see :class:`~mmpos.data.transforms.FileTransform`, as the next seven.
        interpolation: ``bilinear``, ``bicubic`` or, in training, ``random``.
        scale: part of the area that a random crop covers.
        ratio: aspect ratio of a random crop.
        hflip: probability of a left-right flip.
        color_jitter: strength of the colour jitter.
        auto_augment: timm policy: ``rand-m9-mstd0.5-inc1`` (RandAugment), ``3a`` (3-Augment of DeiT-III).
        erasing: probability of erasing a rectangle.
        mean: subtracted from pixels on [0, 1].
        std: divides them.
        num_workers: reading processes.
        seed: seed of the order and of the augmentation.
    """

    name = "image_folder"
    in_chans = 3

    def __init__(
        self,
        *,
        root: str | Path,
        batch_size: int = 256,
        eval_batch_size: int = 256,
        image_size: int = 224,
        crop_pct: float = 0.875,
        interpolation: str = "bicubic",
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        hflip: float = 0.5,
        color_jitter: float = 0.3,
        auto_augment: str | None = None,
        erasing: float = 0.0,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        num_workers: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, eval_batch_size=eval_batch_size, image_size=image_size, seed=seed)
        self.root = Path(root).expanduser().absolute()
        self.num_workers = num_workers
        self.mean, self.std = tuple(mean), tuple(std)
        self.transform = FileTransform(
            image_size,
            crop_pct,
            interpolation,
            scale,
            ratio,
            hflip,
            color_jitter,
            auto_augment,
            erasing,
            self.mean,
            self.std,
        )
        self._train, self._val = self._index("train"), self._index("val")
        if self._train.classes != self._val.classes:
            odd = sorted(set(self._train.classes) ^ set(self._val.classes))
            raise ValueError(
                f"root: train and val of {self.root} hold different classes, such as {odd[:3]}; both need the same "
                f"folders"
            )
        self.class_names = tuple(self._train.classes)
        self.num_classes = len(self.class_names)

    def facts(self) -> dict[str, Any]:
        text = f"{len(self._train):,} training, {len(self._val):,} validation images, tested on the validation images"
        return {**super().facts(), "folder": str(self.root), "images": text}

    def train_dataloader(self) -> BatchLoader:
        """Shuffled, augmented training batches."""
        order = self.order(len(self._train), train=True)
        return BatchLoader(order, self._stream(_Files(self._train, self.transform.train(), self.seed)))

    def val_dataloader(self) -> BatchLoader:
        """Validation images at the training size."""
        return self.test_loader(self.image_size)[0]

    def test_loader(self, size: int) -> tuple[BatchLoader, str]:
        files = _Files(self._val, self.transform.evaluate(size), None)
        origin = pixel_origin(self._short_side(), round(size / self.transform.crop_pct))
        return BatchLoader(self.order(len(self._val), train=False), self._stream(files)), origin

    def _stream(self, files: Dataset[Any]) -> Any:
        return stream_dataset(files, self.num_workers, pin_memory=True)

    def _short_side(self) -> int:
        """Median shorter side of up to 64 validation images, evenly spread over the classes."""
        from PIL import Image

        paths = [path for path, _ in self._val.samples[:: max(1, len(self._val) // 64)]]
        sides = []
        for path in paths:
            with Image.open(path) as image:  # reads the header only
                sides.append(min(image.size))
        return sorted(sides)[len(sides) // 2]

    def _index(self, split: str) -> Any:
        try:
            from torchvision.datasets import ImageFolder
        except ImportError as error:
            raise ImportError(
                'data image_folder needs torchvision; install it with pip install "mmpos[train]"'
            ) from error
        folder = self.root / split
        if not folder.is_dir():
            raise FileNotFoundError(
                f"root: data image_folder looked for {folder} and it is not there. Expected "
                f"{self.root}/train/<class>/*.jpg and "
                f"{self.root}/val/<class>/*.jpg, the layout of ImageNet-1k; give another place with "
                f"data.root=<folder>. How to get ImageNet "
                "is in datasets/image_folder/README.md; data=mnist5k needs nothing."
            )
        return ImageFolder(str(folder))


class _Files(Dataset[Any]):
    """Images by ``(epoch, index)``.

    With a seed, the random transform of a sample depends on (seed, epoch, index) alone.
    """

    def __init__(self, files: Any, transform: Callable[[Any], Tensor], seed: int | None) -> None:
        self.files = files
        self.transform = transform
        self.seed = seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        epoch, index = key
        image, label = self.files[index]
        if self.seed is None:
            return self.transform(image), torch.tensor(label)
        with seeded(sample_seed(self.seed, epoch, index)):
            return self.transform(image), torch.tensor(label)
