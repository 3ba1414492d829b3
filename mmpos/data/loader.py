"""A loader that knows where it is: an iterable of batches with ``state_dict`` in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mmpos.data.order import BatchOrder

__all__ = ["BatchLoader", "stream_dataset", "stream_tensors"]

Batch = tuple[Tensor, Tensor]
Stream = Callable[[list[Tensor], int], Iterable[Batch]]


class BatchLoader:
    """Batches ``(images, labels)`` in the order of a :class:`BatchOrder`.

    It is a plain iterable, not a torch ``DataLoader``: Lightning then neither replaces its sampler under DDP (the
    order already deals slices to ranks) nor warns on resuming, because it finds ``state_dict`` and
    ``load_state_dict`` here.

    Args:
        order: which samples form which batch.
        stream: turns ``(sample indices of each batch, epoch)`` into the batches.
    """

    batch_sampler = None  # Lightning looks for it in whatever has a sampler

    def __init__(self, order: BatchOrder, stream: Stream) -> None:
        self.sampler = order  # the name under which Lightning looks for set_epoch
        self.stream = stream
        self._epoch = order.epoch
        self._done = 0
        self._start = 0

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def batch_size(self) -> int:
        """Samples of this process in one batch."""
        return self.sampler.batch_size

    def __iter__(self) -> Iterator[Batch]:
        # a generator, so that the epoch and the place to start are read with the first batch: Lightning makes the
        # iterator of a resumed run before it sets the epoch
        order = self.sampler
        start = self._start if self._epoch == order.epoch else 0
        self._epoch, self._start, self._done = order.epoch, 0, start
        for batch in self.stream(order.batches(start), order.epoch):
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Epoch, batches dealt in it, and what the order was made of."""
        order = self.sampler
        return {
            "epoch": self._epoch,
            "batch": self._done,
            "count": order.count,
            "seed": order.seed,
            "global_batch": order.global_batch,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the batch of the state; raises when the order is another one."""
        order = self.sampler
        for name in ("count", "seed", "global_batch"):
            if state[name] != getattr(order, name):
                raise ValueError(
                    f"state_dict: the run that is resumed had {name} {state[name]}, this one has "
                    f"{getattr(order, name)}, so the batches "
                    "would be others; keep data, seed and (batch_size x processes), or start a new run"
                )
        self._epoch = order.epoch = state["epoch"]
        self._start = self._done = state["batch"]
        if self._start >= len(order):  # saved with the last batch: the next epoch starts afresh
            self._start = 0


def stream_tensors(fetch: Callable[[Tensor, int], Batch]) -> Stream:
    """Batches made in this process by ``fetch(indices, epoch)``: for data that live in memory."""
    return lambda batches, epoch: (fetch(index, epoch) for index in batches)


def stream_dataset(dataset: Dataset[Any], num_workers: int = 0, pin_memory: bool = False) -> Stream:
    """Batches from a map-style data set whose key is ``(epoch, index)``, through worker processes when asked for."""

    def stream(batches: list[Tensor], epoch: int) -> Iterable[Batch]:
        keys = [[(epoch, int(i)) for i in batch] for batch in batches]
        # mypy cannot express that a list of lists is a batch sampler
        return DataLoader(
            dataset,
            batch_sampler=keys,  # type: ignore[arg-type]
            num_workers=num_workers,
            pin_memory=pin_memory and torch.cuda.is_available(),
        )

    return stream
