"""WebDataset shards: tar files of ``<sample>.jpg`` next to ``<sample>.cls``, read as a stream. For clusters. Card:
``datasets/webdataset``.

The stream is a function of (seed, epoch, rank, number of processes and of workers): shards are permuted, dealt to
ranks and their workers, and shuffled in a buffer. A resumed run skips what was seen without decoding it.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mmpos.data.base import ImageData
from mmpos.data.images import REAL
from mmpos.data.loader import BatchLoader
from mmpos.data.order import sample_seed
from mmpos.data.transforms import IMAGENET_MEAN, IMAGENET_STD, FileTransform, seeded

IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")


class ShardData(ImageData):
    """Images in tar shards.

    Args:
        train_shards: a path with braces (``/data/train-{0000..0099}.tar``), a folder of ``train-*.tar``, or a list;
            URLs are possible.
        val_shards: the same for validation (``val-*.tar`` in a folder).
        train_count: number of training samples; it sets the length of an epoch.
        num_classes: number of classes.
        batch_size: images of one process in one training batch.
        eval_batch_size: images in one validation batch.
        image_size: height and width of the training images.
        crop_pct: see :class:`~mmpos.data.transforms.FileTransform`, as the next seven.
        interpolation: ``bilinear``, ``bicubic`` or, in training, ``random``.
        scale: part of the area that a random crop covers.
        ratio: aspect ratio of a random crop.
        hflip: probability of a left-right flip.
        color_jitter: strength of the colour jitter.
        auto_augment: timm policy.
        erasing: probability of erasing a rectangle.
        mean: subtracted from pixels on [0, 1].
        std: divides them.
        shuffle_buffer: samples that each worker holds to draw from.
        num_workers: reading processes.
        seed: seed of the order and of the augmentation.
    """

    name = "webdataset"
    in_chans = 3

    def __init__(
        self,
        *,
        train_shards: str | Sequence[str] | None,
        val_shards: str | Sequence[str] | None,
        train_count: int | None,
        num_classes: int | None,
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
        shuffle_buffer: int = 5000,
        num_workers: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size=batch_size, eval_batch_size=eval_batch_size, image_size=image_size, seed=seed)
        if not train_count or not num_classes:
            raise ValueError(
                f"train_count, num_classes: data webdataset needs both (shards are not counted by reading them), "
                f"got {train_count} and "
                f"{num_classes}; ImageNet-1k: data.train_count=1281167 data.num_classes=1000"
            )
        self.train_urls = _expand("train_shards", train_shards, "train")
        self.val_urls = _expand("val_shards", val_shards, "val")
        self.train_count = train_count
        self.num_classes = num_classes
        self.class_names = tuple(map(str, range(num_classes)))
        self.mean, self.std = tuple(mean), tuple(std)
        self.shuffle_buffer = shuffle_buffer
        self.num_workers = num_workers
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

    def facts(self) -> dict[str, Any]:
        train, val = len(self.train_urls), len(self.val_urls)
        text = f"{self.train_count:,} training images in {train} shards, tested on {val} validation shards"
        return {**super().facts(), "images": text}

    def train_dataloader(self) -> BatchLoader:
        """Shuffled, augmented training batches; the length comes from ``train_count``."""
        order = self.order(self.train_count, train=True)
        workers = order.world_size * max(1, self.num_workers)
        if len(self.train_urls) < workers:
            raise ValueError(
                f"train_shards: {len(self.train_urls)} shards cannot feed {order.world_size} processes x "
                f"{max(1, self.num_workers)} workers; "
                "lower data.num_workers or write more, smaller shards"
            )

        def stream(batches: list[Tensor], epoch: int) -> Any:
            done = len(order) - len(batches)
            samples = _Stream(
                self.train_urls,
                self.transform.train(),
                self.seed,
                epoch,
                order.rank,
                order.world_size,
                self.batch_size,
                done,
                self.shuffle_buffer,
            )
            return _first(self._loader(samples, self.batch_size), len(batches))

        return BatchLoader(order, stream)

    def val_dataloader(self) -> DataLoader[Any]:
        """Validation images at the training size."""
        return self.test_loader(self.image_size)[0]

    def test_loader(self, size: int) -> tuple[Any, str]:
        order = self.order(max(len(self.val_urls), self.eval_batch_size * 4096), train=False)  # only its rank is used
        mine = self.val_urls[order.rank :: order.world_size]
        return self._loader(_Evaluation(mine, self.transform.evaluate(size)), self.eval_batch_size), REAL

    def test_dataloader(self) -> Any:
        return self.test_loader(self.image_size)[0]

    def _loader(self, samples: IterableDataset[Any], batch_size: int) -> DataLoader[Any]:
        return DataLoader(samples, batch_size, num_workers=self.num_workers, pin_memory=torch.cuda.is_available())


class _Stream(IterableDataset[Any]):
    """The training stream of one rank, from batch ``done`` of an epoch on."""

    def __init__(
        self,
        urls: Sequence[str],
        transform: Callable[[Any], Tensor],
        seed: int,
        epoch: int,
        rank: int,
        world_size: int,
        batch_size: int,
        done: int,
        buffer: int,
    ) -> None:
        self.urls = urls
        self.transform = transform
        self.seed = seed
        self.epoch = epoch
        self.rank = rank
        self.world_size = world_size
        self.batch_size = batch_size
        self.done = done
        self.buffer = buffer

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        # workers deal batches in turn; after a restart the first worker deals batch `done`, which worker `done %
        # workers` would have dealt
        role = (worker + self.done) % workers
        skip = len(range(role, self.done, workers)) * self.batch_size
        number = self.rank * workers + role
        urls = list(self.urls)
        random.Random(sample_seed(self.seed, self.epoch, 0)).shuffle(urls)
        draw = random.Random(sample_seed(self.seed, self.epoch, 1 + number))
        samples = _shuffled(_endless(urls[number :: self.world_size * workers], draw), self.buffer, draw)
        for count, sample in enumerate(samples):
            if count >= skip:
                with seeded(sample_seed(self.seed, self.epoch, (1 + number) << 32 | count)):
                    yield _decoded(sample, self.transform)


class _Evaluation(IterableDataset[Any]):
    """Every sample of some shards once, in order, shards dealt to the workers."""

    def __init__(self, urls: Sequence[str], transform: Callable[[Any], Tensor]) -> None:
        self.urls = urls
        self.transform = transform

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for url in self.urls[worker::workers]:
            for sample in _read(url):
                yield _decoded(sample, self.transform)


def _first(batches: Any, count: int) -> Iterator[Any]:
    for _, batch in zip(range(count), batches, strict=False):
        yield batch


def _read(url: str) -> Iterator[dict[str, bytes]]:
    """Samples of one shard; the file is closed when reading stops early, too."""
    webdataset = _webdataset()
    with webdataset.gopen(url, "rb") as file:
        files = webdataset.tariterators.tar_file_expander(iter([{"url": url, "stream": file}]))
        yield from webdataset.tariterators.group_by_keys(files)


def _endless(urls: Sequence[str], draw: random.Random) -> Iterator[dict[str, bytes]]:
    """All samples of the shards, again and again: shards differ in size, epochs do not."""
    while True:
        found = False
        for url in urls:
            for sample in _read(url):
                found = True
                yield sample
        if not found:
            raise ValueError(f"train_shards: no sample in {list(urls)[:3]}")
        urls = draw.sample(list(urls), len(urls))


def _shuffled(samples: Iterator[Any], size: int, draw: random.Random) -> Iterator[Any]:
    """Draw from a buffer of ``size`` samples that the stream refills."""
    buffer: list[Any] = []
    for sample in samples:
        if len(buffer) < size:
            buffer.append(sample)
            continue
        place = draw.randrange(size) if size else 0
        if size:
            buffer[place], sample = sample, buffer[place]
        yield sample


def _decoded(sample: dict[str, bytes], transform: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
    from PIL import Image

    key = next((key for key in IMAGE_KEYS if key in sample), None)
    if key is None or "cls" not in sample:
        raise ValueError(
            f"shards: sample {sample.get('__key__')!r} holds {sorted(k for k in sample if not k.startswith('__'))}; "
            f"expected an image "
            f"({', '.join(IMAGE_KEYS)}) and cls, the class index as text"
        )
    with Image.open(io.BytesIO(sample[key])) as image:
        return transform(image.convert("RGB")), torch.tensor(int(sample["cls"]))


def _expand(option: str, shards: str | Sequence[str] | None, split: str) -> list[str]:
    """File names or URLs of the shards; local ones must exist."""
    if not shards:
        raise ValueError(
            f"{option}: data webdataset needs the shards, such as data.{option}='/data/{split}-{{0000..0099}}.tar' "
            f"or a folder of "
            f"{split}-*.tar; how to write them is in datasets/webdataset/README.md"
        )
    if isinstance(shards, str) and Path(shards).expanduser().is_dir():
        urls = sorted(map(str, Path(shards).expanduser().absolute().glob(f"{split}-*.tar")))
    else:
        expand = _webdataset().shardlists.expand_urls
        urls = [url for entry in ([shards] if isinstance(shards, str) else shards) for url in expand(entry)]
    missing = [url for url in urls if ":" not in url and not Path(url).is_file()]
    if missing or not urls:
        looked = Path(missing[0]).absolute() if missing else f"{Path(str(shards)).absolute()}/{split}-*.tar"
        raise FileNotFoundError(
            f"{option}: data webdataset looked for {looked} and it is not there ({len(missing)} of {len(urls)} "
            f"shards missing); give "
            f"data.{option}=<shards>. How to write shards is in datasets/webdataset/README.md"
        )
    return urls


def _webdataset() -> Any:
    try:
        import webdataset
    except ImportError as error:
        raise ImportError(
            'data webdataset needs the webdataset package; install it with pip install "mmpos[webdataset]"'
        ) from error
    return webdataset
