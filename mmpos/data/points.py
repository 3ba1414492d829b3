"""Point clouds: digits as points of ink in space, and scanned objects, moved and turned by a seed.

Cards: ``datasets/mnist_points``, ``datasets/ycb_scans``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpos.data.base import ImageData, build_augment, hold_out
from mmpos.data.loader import BatchLoader, stream_tensors
from mmpos.data.npz import find_npz
from mmpos.data.order import sample_uniforms
from mmpos.functional.points import random_rotations, rotations_about_z

__all__ = ["TURNS", "MnistPoints", "Motion", "PointData", "YcbScans"]

TURNS = ("none", "z", "any")
_FIXED = 3_141_592_653  # seed of validation and test clouds: the same for every run
_MOVED = 577_215_664  # added to the seed of a cloud for the way it moves


@dataclass(frozen=True)
class Motion:
    """How clouds are put into another frame: turned, made larger, shifted, in this order.

    Args:
        turn: ``none``, ``z`` (about the upright axis, any angle) or ``any`` (uniform over all rotations).
        shift: length of a shift in a random direction, in the unit of the clouds.
        scale: factor on all coordinates, or the smallest and largest of a random one.
    """

    turn: str = "none"
    shift: float = 0.0
    scale: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        if self.turn not in TURNS:
            raise ValueError(f"turn: expected one of {TURNS}, got {self.turn!r}")
        low, high = self.limits
        if self.shift < 0 or not 0 < low <= high:
            raise ValueError(
                f"shift, scale: expected a length of 0 or more and a positive factor (or two, the smaller first), got "
                f"{self.shift} and {self.scale}"
            )

    @property
    def limits(self) -> tuple[float, float]:
        """Smallest and largest scale."""
        if isinstance(self.scale, (int, float)):
            return float(self.scale), float(self.scale)
        low, high = self.scale
        return float(low), float(high)

    def __call__(self, clouds: Tensor, index: Tensor, *, seed: int, epoch: int = 0) -> Tensor:
        """Move a batch; the motion of a cloud depends on (seed, epoch, index) alone.

        Shape:
            clouds ``(B, N, 3)``, index ``(B,)``; returns the shape of ``clouds``.
        """
        random = sample_uniforms(seed + _MOVED, epoch, index, 6).to(clouds.dtype)
        if self.turn != "none":
            turn = rotations_about_z(random[:, 0]) if self.turn == "z" else random_rotations(random[:, :3])
            clouds = clouds @ turn.mT
        low, high = self.limits
        if (low, high) != (1.0, 1.0):
            clouds = clouds * (low + (high - low) * random[:, 3])[:, None, None]
        if self.shift:
            height = 2 * random[:, 4] - 1
            angle = 2 * torch.pi * random[:, 5]
            ring = (1 - height**2).sqrt()
            direction = torch.stack([ring * angle.cos(), ring * angle.sin(), height], dim=-1)
            clouds = clouds + self.shift * direction[:, None]
        return clouds


class PointData(ImageData):
    """Labelled point clouds ``(B, N, 3)`` in coordinates (x, y, z), z upright.

    Args:
        points: points of a training cloud.
        motion: how training and validation clouds move; test clouds lie as they are.
        common: ``batch_size``, ``eval_batch_size``, ``seed``.
    """

    evaluation = "points"
    in_chans = 3
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    #: what one unit of the coordinates is
    unit: str

    def __init__(self, *, points: int, motion: Motion, **common: Any) -> None:
        if points < 1:
            raise ValueError(f"points: expected 1 or more, got {points}")
        super().__init__(image_size=0, **common)
        self.points = points
        self.motion = motion

    def labels(self, split: str) -> Tensor:
        """Classes of the clouds of ``train``, ``val`` or ``test``. Shape: ``(count,)``."""
        raise NotImplementedError

    def clouds(self, split: str, index: Tensor, epoch: int, points: int) -> Tensor:
        """Clouds as they lie, a function of (seed, epoch, index) alone. Shape: index ``(B,)`` to ``(B, points, 3)``."""
        raise NotImplementedError

    def source(self, split: str, epoch: int) -> tuple[int, int]:
        """Seed and epoch that the random numbers of a split come from: the test is the same in every run."""
        return (self.seed, epoch) if split == "train" else (_FIXED + (split == "val"), 0)

    def facts(self) -> dict[str, Any]:
        counts = {split: len(self.labels(split)) for split in ("train", "val", "test")}
        turned = {"none": "not turned", "z": "turned about the upright axis", "any": "turned any way"}
        low, high = self.motion.limits
        moved = [turned[self.motion.turn]]
        moved += [f"scaled by {low:g} to {high:g}"] if (low, high) != (1.0, 1.0) else []
        moved += [f"shifted by {self.motion.shift:g}"] if self.motion.shift else []
        return {
            "name": self.name,
            "classes": self.num_classes,
            "training clouds": f"{self.points} points, {', '.join(moved)}",
            "unit": self.unit,
            "clouds": f"{counts['train']:,} training, {counts['test']:,} test, {counts['val']:,} validation",
        }

    def train_dataloader(self) -> BatchLoader:
        """Shuffled training clouds, with other points and other motions in each epoch."""
        return self._loader("train", self.points, self.motion)

    def val_dataloader(self) -> BatchLoader:
        """Validation clouds, moved as the training clouds are."""
        return self._loader("val", self.points, self.motion)

    def test_dataloader(self) -> BatchLoader:
        """Test clouds as they lie."""
        return self.test_clouds()

    def test_loader(self, size: int) -> tuple[BatchLoader, str]:
        raise ValueError(f"evaluation: {self.name} is tested in other frames; use evaluation=points")

    def test_clouds(self, points: int | None = None, motion: Motion | None = None, *, seed: int = 0) -> BatchLoader:
        """Test clouds of another density or in another frame.

        Args:
            points: points of a cloud; default as many as in training.
            motion: how clouds move; default not at all.
            seed: seed of the motions.
        """
        return self._loader("test", self.points if points is None else points, motion or Motion(), seed)

    def _loader(self, split: str, points: int, motion: Motion, seed: int = 0) -> BatchLoader:
        labels = self.labels(split)

        def fetch(index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
            source, epoch = self.source(split, epoch)
            clouds = self.clouds(split, index, epoch, points)
            return motion(clouds, index, seed=source + seed, epoch=epoch), labels[index]

        return BatchLoader(self.order(len(labels), train=split == "train"), stream_tensors(fetch))


class MnistPoints(PointData):
    """Digits of MNIST-5k as clouds of points: ink in space, standing upright like a sign on a bent sheet.

    Points are drawn where the ink is, as often as it is dark, anywhere in their pixel. The stroke is as thick as it is
    dark, and the sheet bows away at the sides, so that front and back differ. x runs along the row, y into the
    sheet, z up. Training clouds have other points in each epoch; validation and test clouds are fixed.

    Args:
        batch_size: clouds of one process in one training batch.
        eval_batch_size: clouds in one validation or test batch.
        points: points of a training cloud.
        turn: how training clouds are turned: ``none``, ``z`` about the upright axis, ``any``.
        shift: length of a random shift of training clouds, in units.
        scale: factor on training clouds, or the smallest and largest of a random one.
        pixels: pixels of a unit: 2 make a cloud about as wide as a grid of 14 patches.
        depth: half the thickness of black ink, in pixels.
        bow: how far the sheet has bowed away 10 pixels from its middle, in pixels.
        val_fraction: part of the training digits of each class kept for validation; 0 validates on the test digits.
        augment: ``True`` small rotations, scales and shears of the digits before points are drawn, ``False`` none, or a
            mapping of :class:`~mmpos.data.images.BatchAugment` options to change.
        seed: seed of the order, the points, the motions and the augmentation; the digits of the splits do not depend
            on it.
    """

    name = "mnist_points"

    def __init__(
        self,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 100,
        points: int = 256,
        turn: str = "z",
        shift: float = 0.0,
        scale: float | Sequence[float] = 1.0,
        pixels: float = 2.0,
        depth: float = 1.5,
        bow: float = 2.0,
        val_fraction: float = 0.05,
        augment: bool | Mapping[str, Any] = True,
        seed: int = 0,
    ) -> None:
        from mmpos.data.mnist5k import Mnist5k

        super().__init__(
            points=points,
            motion=Motion(turn, shift, scale),
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            seed=seed,
        )
        if not pixels > 0 or depth < 0:
            raise ValueError(f"pixels, depth: expected a positive unit and a depth of 0 or more, got {pixels}, {depth}")
        stored = Mnist5k(val_fraction=val_fraction)
        self.digits = stored.splits
        self.num_classes = 10
        self.class_names = stored.class_names
        self.pixels = pixels
        self.depth = depth
        self.bow = bow
        self.unit = f"{pixels:g} pixels"
        self.augment = build_augment(augment, {"degrees": 10.0, "scale": (0.9, 1.1), "shear": 5.0})

    def labels(self, split: str) -> Tensor:
        return self.digits[split][1]

    def clouds(self, split: str, index: Tensor, epoch: int, points: int) -> Tensor:
        seed, epoch = self.source(split, epoch)
        ink = self.digits[split][0][index].float() / 255
        if split == "train":
            ink = self.augment(ink, index, seed=seed, epoch=epoch)
        height, width = ink.shape[-2:]
        # the first sixteen serve the augmentation and whatever it may grow by
        random = sample_uniforms(seed, epoch, index, 16 + 4 * points)[:, 16:].unflatten(1, (4, points))
        grey = ink.flatten(1).clamp_min(0)
        total = grey.cumsum(1, dtype=torch.float64)
        pixel = torch.searchsorted(total, random[:, 0].double() * total[:, -1:], right=True).clamp_max(
            grey.shape[1] - 1
        )
        row, column = pixel // width, pixel % width
        x = column + random[:, 1] - width / 2
        z = height / 2 - row - random[:, 2]
        y = self.depth * grey.gather(1, pixel) * (2 * random[:, 3] - 1) + self.bow * (x / 10) ** 2
        return torch.stack([x, y, z], dim=-1) / self.pixels


class YcbScans(PointData):
    """Partial scans of household objects, seen from one side: which object is it?

    Args:
        root: the ``.npz`` file, or a folder that holds exactly one. Its layout is in the card.
        batch_size: clouds of one process in one training batch.
        eval_batch_size: clouds in one validation or test batch.
        points: points of a training cloud, drawn anew in each epoch from those of the scan.
        turn: how training clouds are turned: ``none``, ``z`` about the line of sight, ``any``.
        shift: length of a random shift of training clouds, in units.
        scale: factor on training clouds, or the smallest and largest of a random one.
        metres: metres of a unit.
        val_fraction: part of the training clouds of each class kept for validation; 0 validates on the test clouds.
        seed: seed of the order, the points and the motions; the splits do not depend on it.
    """

    name = "ycb_scans"

    def __init__(
        self,
        *,
        root: str | Path | None,
        batch_size: int = 32,
        eval_batch_size: int = 100,
        points: int = 256,
        turn: str = "z",
        shift: float = 0.0,
        scale: float | Sequence[float] = 1.0,
        metres: float = 0.015,
        val_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(
            points=points,
            motion=Motion(turn, shift, scale),
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            seed=seed,
        )
        if not metres > 0:
            raise ValueError(f"metres: expected a positive unit, got {metres}")
        path = find_npz(root, self.name)
        scans, labels, test, self.class_names = _read_scans(path)
        self.stored = scans.shape[1]
        self._check_points(points)
        held = torch.zeros_like(test)
        held[~test] = hold_out(labels[~test], val_fraction, seed=1)
        parts = {"train": ~test & ~held, "val": held if bool(held.any()) else test, "test": test}
        self._scans = {split: (scans[part] / metres, labels[part]) for split, part in parts.items()}
        self.num_classes = len(self.class_names)
        self.unit = f"{100 * metres:g} cm"

    def labels(self, split: str) -> Tensor:
        return self._scans[split][1]

    def clouds(self, split: str, index: Tensor, epoch: int, points: int) -> Tensor:
        self._check_points(points)
        seed, epoch = self.source(split, epoch)
        scans = self._scans[split][0][index]
        chosen = sample_uniforms(seed, epoch, index, self.stored).argsort(1)[:, :points]
        return scans.gather(1, chosen[..., None].expand(-1, -1, 3))

    def _check_points(self, points: int) -> None:
        if points > self.stored:
            raise ValueError(f"points: a scan has {self.stored} points, got {points}; ask for fewer")


def _read_scans(path: Path) -> tuple[Tensor, Tensor, Tensor, tuple[str, ...]]:
    """Clouds in metres ``(M, N, 3)``, labels ``(M,)``, which of them test ``(M,)``, and the class names of a file."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    missing = sorted({"points_mm", "scale", "label", "split", "classes"} - set(arrays))
    if missing:
        raise ValueError(
            f"root: {path} lacks {', '.join(missing)} (it holds {', '.join(sorted(arrays))}); the layout is in "
            "datasets/ycb_scans/README.md"
        )
    points, label, split = arrays["points_mm"], arrays["label"], arrays["split"]
    if points.ndim != 3 or points.shape[-1] != 3 or not len(points) == len(label) == len(split):
        raise ValueError(
            f"root: points_mm of {path} must be (clouds, points, 3) with one label and split each, got {points.shape}, "
            f"{label.shape} and {split.shape}"
        )
    scans = torch.from_numpy(points.astype(np.float32)) * (float(arrays["scale"]) / 1000)
    test = torch.from_numpy(split == 1)
    if bool(test.all()) or not bool(test.any()):
        raise ValueError(
            f"root: split of {path} must mark training (0) and test (1) clouds, got {np.unique(split).tolist()}"
        )
    return scans, torch.from_numpy(label.astype(np.int64)), test, tuple(map(str, arrays["classes"]))
