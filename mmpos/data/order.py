"""Which samples form which batch, and the random numbers of a sample: pure functions of (seed, epoch, index).

Nothing here depends on what was drawn before. A run that resumes in the middle of an epoch therefore sees the batches
it would have seen, and ``k`` processes deal among them the batches of one process with the ``k``-fold batch size.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

__all__ = ["BatchOrder", "sample_seed", "sample_uniforms"]

_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64 finaliser.

    Every bit of the input reaches every bit of the output. ``x`` is uint64 with at least one axis.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, epoch: int, index: np.ndarray) -> np.ndarray:
    key = _mix(np.array([(seed * _STEP + _STEP) & _MASK], dtype=np.uint64))
    key = _mix(key + np.array([(epoch * _STEP + _STEP) & _MASK], dtype=np.uint64))
    return _mix(key + index.astype(np.uint64) * np.uint64(_STEP) + np.uint64(_STEP))


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A seed for the random generators that augment one sample in one epoch, 0 <= seed < 2**63."""
    return int(_keys(seed, epoch, np.array([index]))[0] >> np.uint64(1))


def sample_uniforms(seed: int, epoch: int, index: Tensor, count: int) -> Tensor:
    """``count`` random numbers on [0, 1) for every sample, each a function of (seed, epoch, index) alone.

    Shape:
        index ``(B,)`` integers; returns ``(B, count)`` float32.

    Example:
        >>> both = sample_uniforms(0, 3, torch.tensor([5, 9]), 2)
        >>> bool((both[1:] == sample_uniforms(0, 3, torch.tensor([9]), 2)).all())
        True
    """
    keys = _keys(seed, epoch, index.cpu().numpy())[:, None]
    columns = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP))[None]
    return torch.from_numpy(((_mix(keys + columns) >> np.uint64(40)).astype(np.float64) / 2**24).astype(np.float32))


class BatchOrder:
    """The batches of an epoch: a seeded permutation cut into global batches, of which each rank takes its slice.

    Args:
        count: number of samples.
        batch_size: samples of one process in one batch.
        seed: seed of the permutations.
        shuffle: whether the order changes from epoch to epoch; ``False`` is the stored order.
        drop_last: whether an incomplete last global batch is left out.
        rank: which slice of each global batch is dealt.
        world_size: number of processes.

    Without ``drop_last`` every sample is dealt exactly once by exactly one rank, and all ranks deal equally many
    batches, none of them empty: a remainder smaller than the number of ranks joins the batch before it.

    Example:
        >>> order = BatchOrder(10, 3, seed=1)
        >>> [len(batch) for batch in order], len(BatchOrder(10, 3, drop_last=False))
        ([3, 3, 3], 4)
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected 1 or more, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0 to {world_size - 1} for world_size {world_size}, got {rank}")
        self.global_batch = batch_size * world_size
        full, rest = divmod(count, self.global_batch)
        self.num_batches = full if drop_last or (full and rest < world_size) else full + (rest > 0)
        if self.num_batches == 0 or (not full and count < world_size):
            raise ValueError(
                f"batch_size: {batch_size} x {world_size} processes is more than the {count} samples there are, so "
                f"an epoch would have "
                "no batch; lower batch_size"
            )
        self.count = count
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def __len__(self) -> int:
        return self.num_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; Lightning calls this before each."""
        self.epoch = epoch

    def permutation(self) -> Tensor:
        """Order of all samples in this epoch. Shape: ``(count,)``."""
        if not self.shuffle:
            return torch.arange(self.count)
        generator = torch.Generator().manual_seed(sample_seed(self.seed, self.epoch, self.count))
        return torch.randperm(self.count, generator=generator)

    def batches(self, start: int = 0) -> list[Tensor]:
        """Sample indices of the batches of this rank, from batch ``start`` of the epoch on."""
        order = self.permutation()
        out = []
        for number in range(start, self.num_batches):
            last = number == self.num_batches - 1 and not self.drop_last
            whole = order[number * self.global_batch : None if last else (number + 1) * self.global_batch]
            out.append(whole.tensor_split(self.world_size)[self.rank])
        return out

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches())
