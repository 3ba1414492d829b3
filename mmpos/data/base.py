"""What every data set offers.

Loaders in a reproducible order, test images at any size, and the facts a report states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:
    from lightning import LightningDataModule
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError('mmpos.data needs Lightning; install it with pip install "mmpos[train]"') from error

from mmpos.data.images import BatchAugment, pixel_origin, resize
from mmpos.data.loader import BatchLoader, stream_tensors
from mmpos.data.order import BatchOrder

__all__ = ["ImageData", "TensorData", "hold_out", "keep_per_class"]


class ImageData(LightningDataModule):
    """Labelled images.

    Args:
        batch_size: images of one process in one training batch.
        eval_batch_size: images in one validation or test batch.
        image_size: height and width of the training images.
        seed: seed of the order and of the augmentation.

    Sub-classes set ``num_classes``, ``in_chans``, ``class_names``, ``mean`` and ``std`` (of pixels on [0, 1]) when
    they are built.
    """

    name: str = ""
    #: the evaluation these data are made for
    evaluation: str = "resolution"
    num_classes: int
    in_chans: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(self, *, batch_size: int, eval_batch_size: int, image_size: int, seed: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.image_size = image_size
        self.seed = seed
        self._whole = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Loaders made inside deal everything to this process: one process evaluates after many have trained."""
        before, self._whole = self._whole, True
        try:
            yield
        finally:
            self._whole = before

    def facts(self) -> dict[str, Any]:
        """What a report says about the data: name, splits, classes, sizes."""
        return {
            "name": self.name,
            "classes": self.num_classes,
            "channels": self.in_chans,
            "training size": f"{self.image_size} px",
        }

    def order(self, count: int, *, train: bool) -> BatchOrder:
        """Order of a split for this process: the rank comes from the trainer, else from torch.distributed."""
        if self._whole:
            rank, world = 0, 1
        elif self.trainer is not None:
            rank, world = self.trainer.global_rank, self.trainer.world_size
        elif dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        else:
            rank, world = 0, 1
        batch = self.batch_size if train else self.eval_batch_size
        # overfitting on the first batches means the same batches in every epoch
        shuffle = train and not getattr(self.trainer, "overfit_batches", 0)
        return BatchOrder(count, batch, seed=self.seed, shuffle=shuffle, drop_last=train, rank=rank, world_size=world)

    def test_loader(self, size: int) -> tuple[BatchLoader, str]:
        """Test images at another size, and whether they have real detail there or were enlarged."""
        raise NotImplementedError

    def test_dataloader(self) -> BatchLoader:
        """Test images at the training size."""
        return self.test_loader(self.image_size)[0]

    def normalise(self, images: Tensor) -> Tensor:
        """``(image - mean) / std`` for images on [0, 1]."""
        mean, std = (torch.tensor(values, dtype=images.dtype)[:, None, None] for values in (self.mean, self.std))
        return (images - mean) / std


class TensorData(ImageData):
    """A small data set that lives in memory as uint8 tensors; batches are made in this process, without workers.

    Args:
        train: training images ``(N, C, H, W)`` and labels ``(N,)``, at the stored size.
        val: validation images and labels, or ``None`` when the test images serve for validation.
        test: test images and labels.
        augment: random changes of the training images.
        common: arguments of :class:`ImageData`.
    """

    def __init__(
        self,
        train: tuple[Tensor, Tensor],
        val: tuple[Tensor, Tensor] | None,
        test: tuple[Tensor, Tensor],
        *,
        augment: BatchAugment,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.splits = {"train": train, "val": test if val is None else val, "test": test}
        self.val_is_test = val is None
        self.augment = augment
        self.stored_size = int(test[0].shape[-1])
        self.in_chans = int(test[0].shape[1])
        if pixel_origin(self.stored_size, self.image_size) != pixel_origin(1, 1):
            raise ValueError(
                f"image_size: {self.name} is stored at {self.stored_size} px, training at {self.image_size} px "
                f"would enlarge every image; "
                f"choose {self.stored_size} or less"
            )
        images, labels = train
        if self.image_size != self.stored_size:  # once, so that no epoch pays for it
            parts = [
                resize(part.float(), self.image_size).round().clamp(0, 255).to(torch.uint8)
                for part in images.split(256)
            ]
            images = torch.cat(parts) if parts else images
        self._train = (images, labels)

    def facts(self) -> dict[str, Any]:
        counts = {split: len(labels) for split, (_, labels) in self.splits.items()}
        text = f"{counts['train']:,} training, {counts['test']:,} test"
        text += ", validation on the test images" if self.val_is_test else f", {counts['val']:,} validation images"
        return {**super().facts(), "stored size": f"{self.stored_size} px", "images": text}

    def train_dataloader(self) -> BatchLoader:
        """Shuffled, augmented training batches."""
        images, labels = self._train

        def fetch(index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
            batch = self.augment(images[index].float() / 255, index, seed=self.seed, epoch=epoch)
            return self.normalise(batch), labels[index]

        return BatchLoader(self.order(len(labels), train=True), stream_tensors(fetch))

    def val_dataloader(self) -> BatchLoader:
        """Validation images at the training size."""
        return self._eval_loader("val", self.image_size)

    def test_loader(self, size: int) -> tuple[BatchLoader, str]:
        return self._eval_loader("test", size), pixel_origin(self.stored_size, size)

    def _eval_loader(self, split: str, size: int) -> BatchLoader:
        images, labels = self.splits[split]

        def fetch(index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
            return self.normalise(resize(images[index].float() / 255, size)), labels[index]

        return BatchLoader(self.order(len(labels), train=False), stream_tensors(fetch))


def hold_out(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """A seeded sample of ``fraction`` of each class.

    Shape: labels ``(N,)``; returns a boolean mask ``(N,)``, ``True`` = held out.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"val_fraction: expected 0 <= fraction < 1, got {fraction}")
    generator = torch.Generator().manual_seed(seed)
    out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        chosen = members[torch.randperm(len(members), generator=generator)]
        out[chosen[: round(fraction * len(members))]] = True
    return out


def keep_per_class(labels: Tensor, count: int | None, seed: int) -> Tensor:
    """A seeded choice of ``count`` samples of each class, all when ``None``; more per class hold the fewer of a seed.

    Shape: labels ``(N,)``; returns a boolean mask ``(N,)``, ``True`` = kept.
    """
    if count is None:
        return torch.ones_like(labels, dtype=torch.bool)
    fewest = int(labels.bincount().min())
    if not 1 <= count <= fewest:
        raise ValueError(f"labels_per_class: expected 1 to {fewest}, the size of the smallest class, got {count}")
    generator = torch.Generator().manual_seed(seed)
    out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        out[members[torch.randperm(len(members), generator=generator)][:count]] = True
    return out


def build_augment(augment: Mapping[str, Any] | bool, default: Mapping[str, Any]) -> BatchAugment:
    """``True`` is the default of the data set, ``False`` nothing, a mapping changes single values of the default."""
    if augment is False:
        return BatchAugment()
    given = {} if augment is True else dict(augment)
    known = sorted(BatchAugment.__dataclass_fields__)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"augment: no option {', '.join(map(repr, unknown))}; its options are {known}")
    return BatchAugment(**{**default, **given})
