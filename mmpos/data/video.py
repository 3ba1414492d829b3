"""Videos: handwritten digits that move, and recorded pen movements, with any number of frames at test time.

Cards: ``datasets/moving_mnist5k``, ``datasets/omniglot_pen_video``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpos.data.base import ImageData, build_augment
from mmpos.data.images import resize
from mmpos.data.loader import BatchLoader, stream_tensors
from mmpos.data.npz import find_npz
from mmpos.data.order import sample_uniforms

__all__ = ["DENSER", "LONGER", "MovingMnist5k", "PenVideo", "VideoData"]

LONGER = "longer"  # more frames of the same step: the clip lasts longer
DENSER = "denser"  # more frames of the same clip: the steps are shorter
COMPASS = ("east", "south-east", "south", "south-west", "west", "north-west", "north", "north-east")
_FIXED = 2_718_281_828  # seed of validation and test clips: the same for every run


class VideoData(ImageData):
    """Labelled clips ``(B, C, frames, height, width)``.

    Args:
        frames: frames of the training clips.
        canvas: height and width of a frame.
        common: ``batch_size``, ``eval_batch_size``, ``seed``.

    Sub-classes set ``tasks``, the questions about a clip and the number of answers to each. Labels are ``(B, tasks)``,
    and the model has one output for each answer to each question, ``num_classes`` in all.
    """

    evaluation = "frames"
    image_size: Any
    tasks: dict[str, int]
    #: how a clip may get more frames; the first one is what plain numbers of an evaluation mean
    clips: tuple[str, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    in_chans = 1

    def __init__(self, *, frames: int, canvas: Sequence[int], **common: Any) -> None:
        if frames < 1:
            raise ValueError(f"frames: expected 1 or more, got {frames}")
        if isinstance(canvas, int) or len(canvas) != 2 or min(canvas) < 1:
            raise ValueError(f"canvas_size: expected (height, width) in pixels, got {canvas}")
        super().__init__(image_size=0, **common)
        self.image_size = (int(canvas[0]), int(canvas[1]))
        self.frames = frames

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Outputs of the model: the answers to all questions together."""
        return sum(self.tasks.values())

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the outputs."""
        return tuple(f"{task} {answer}" for task, count in self.tasks.items() for answer in range(count))

    def counts(self) -> dict[str, int]:
        """Clips of the splits ``train``, ``val`` and ``test``."""
        raise NotImplementedError

    def render(self, split: str, index: Tensor, epoch: int, frames: int, clip: str) -> tuple[Tensor, Tensor]:
        """Clips and labels of samples, a function of (seed, epoch, index) alone.

        Shape: index ``(B,)``; returns ``(B, 1, frames, height, width)`` on [0, 1] and ``(B, tasks)``.
        """
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        height, width = self.image_size
        counts = self.counts()
        return {
            "name": self.name,
            "questions": ", ".join(f"{task} ({count})" for task, count in self.tasks.items()),
            "training clips": f"{self.frames} frames of {height} x {width} px",
            "clips": f"{counts['train']:,} training, {counts['test']:,} test, {counts['val']:,} validation",
        }

    def train_dataloader(self) -> BatchLoader:
        """Shuffled training clips, others in each epoch."""
        return self._loader("train", self.frames, self.clips[0])

    def val_dataloader(self) -> BatchLoader:
        """Validation clips as long as the training clips."""
        return self._loader("val", self.frames, self.clips[0])

    def test_dataloader(self) -> BatchLoader:
        """Test clips as long as the training clips."""
        return self.test_clips(self.frames)

    def test_loader(self, size: int) -> tuple[BatchLoader, str]:
        raise ValueError(f"evaluation: {self.name} is tested at other frame counts; use evaluation=frames")

    def test_clips(self, frames: int, clip: str | None = None) -> BatchLoader:
        """Test clips with another number of frames: ``longer`` or ``denser``, by default the first of ``clips``."""
        clip = self.clips[0] if clip is None else clip
        if clip not in self.clips:
            raise ValueError(f"clip: {self.name} has {list(self.clips)} clips, got {clip!r}")
        if frames < 1:
            raise ValueError(f"frames: expected 1 or more, got {frames}")
        return self._loader("test", frames, clip)

    def _loader(self, split: str, frames: int, clip: str) -> BatchLoader:
        def fetch(index: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
            clips, labels = self.render(split, index, epoch, frames, clip)
            return (clips - self.mean[0]) / self.std[0], labels

        train = split == "train"
        return BatchLoader(self.order(self.counts()[split], train=train), stream_tensors(fetch))

    def measure(self) -> tuple[float, float]:
        """Mean and standard deviation of the pixels of a part of the training clips."""
        clips = self.render("train", torch.arange(min(256, self.counts()["train"])), 0, self.frames, self.clips[0])[0]
        return float(clips.mean()), float(clips.std())


class MovingMnist5k(VideoData):
    """A digit of MNIST-5k moves in one of eight directions: which way does it move, and which digit is it?

    The canvas is a torus: what leaves at one side comes in at the other, so a direction holds for clips of any length.
    Start, speed and direction of a training clip are drawn anew in each epoch; validation and test clips are fixed.

    Args:
        batch_size: clips of one process in one training batch.
        eval_batch_size: clips in one validation or test batch.
        frames: frames of the training clips.
        canvas_size: height and width of the frames.
        digit_size: pixels of a digit, at most 28.
        speed: smallest and largest step in pixels.
        hold: frames that show the same place. As many as a tubelet has frames means that no tubelet contains a
            movement, so that only the order of tubelets tells the direction.
        val_fraction: part of the training digits of each class kept for validation; 0 validates on the test digits.
        augment: ``False``, ``True`` (small rotations, scales and shears of the digits of training clips), or a mapping
            of :class:`~mmpos.data.images.BatchAugment` options to change.
        seed: seed of the order, the paths and the augmentation; the digits of the splits do not depend on it.
    """

    name = "moving_mnist5k"
    clips = (LONGER, DENSER)

    def __init__(
        self,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 100,
        frames: int = 8,
        canvas_size: Sequence[int] = (20, 28),
        digit_size: int = 14,
        speed: Sequence[float] = (3.0, 5.0),
        hold: int = 2,
        val_fraction: float = 0.05,
        augment: bool | Mapping[str, Any] = True,
        seed: int = 0,
    ) -> None:
        from mmpos.data.mnist5k import Mnist5k

        super().__init__(
            frames=frames, canvas=canvas_size, batch_size=batch_size, eval_batch_size=eval_batch_size, seed=seed
        )
        if not 4 <= digit_size <= 28:
            raise ValueError(f"digit_size: expected 4 to 28 px (digits are stored at 28), got {digit_size}")
        if digit_size > min(self.image_size):
            raise ValueError(
                f"canvas_size: {self.image_size} is smaller than a digit of {digit_size} px; enlarge canvas_size or "
                "reduce digit_size"
            )
        if len(speed) != 2 or not 0 < speed[0] <= speed[1]:
            raise ValueError(f"speed: expected (smallest, largest) step above 0 px, got {tuple(speed)}")
        if hold < 1 or frames // hold < 2:
            raise ValueError(
                f"hold: expected 1 to {max(frames // 2, 1)} so that {frames} frames show at least two places, got "
                f"{hold}"
            )
        if 2 * speed[1] >= min(self.image_size):
            raise ValueError(
                f"speed: a step of {speed[1]} px is half of the canvas {self.image_size} or more, so that it cannot be "
                "told from one the other way around; choose less"
            )
        stored = Mnist5k(val_fraction=val_fraction)
        self.digits = {
            split: (resize(images.float() / 255, digit_size), labels)
            for split, (images, labels) in stored.splits.items()
        }
        self.tasks = {"direction": len(COMPASS), "digit": 10}
        self.speed = (float(speed[0]), float(speed[1]))
        self.hold = hold
        small = {"degrees": 10.0, "scale": (0.9, 1.1), "shear": 5.0}
        self.augment = build_augment(augment, small)
        mean, std = self.measure()
        self.mean, self.std = (mean,), (std,)

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*COMPASS, *"0123456789")

    def counts(self) -> dict[str, int]:
        return {split: len(labels) for split, (_, labels) in self.digits.items()}

    def paths(self, split: str, index: Tensor, epoch: int, frames: int, clip: str) -> tuple[Tensor, Tensor]:
        """Where the top left corner of the digit is in each frame, and the direction.

        Shape: returns ``(B, frames, 2)``, not yet wrapped, and ``(B,)``.
        """
        seed, epoch = (self.seed, epoch) if split == "train" else (_FIXED + (split == "val"), 0)
        random = sample_uniforms(seed, epoch, index, 16)[:, 12:]  # the first ten serve the augmentation
        direction = (random[:, 0] * len(COMPASS)).long()
        angle = direction * (2 * torch.pi / len(COMPASS))
        low, high = self.speed
        step = (low + (high - low) * random[:, 1])[:, None] * torch.stack([angle.sin(), angle.cos()], dim=-1)
        if clip == DENSER:
            step = step * (self.frames / frames)
        start = random[:, 2:4] * torch.tensor(self.image_size)
        moves = torch.arange(frames) // self.hold
        return start[:, None] + moves[:, None] * step[:, None], direction

    def render(self, split: str, index: Tensor, epoch: int, frames: int, clip: str) -> tuple[Tensor, Tensor]:
        digits, labels = self.digits[split]
        images = digits[index]
        if split == "train":
            images = self.augment(images, index, seed=self.seed, epoch=epoch)
        corner, direction = self.paths(split, index, epoch, frames, clip)
        rows, columns = (
            _placement(corner[..., axis], images.shape[-1], self.image_size[axis]) for axis in range(2)
        )  # (B, frames, size, digit)
        clips = rows @ images @ columns.transpose(-1, -2)
        return clips[:, None], torch.stack([direction, labels[index]], dim=-1)


class PenVideo(VideoData):
    """Handwriting as it was written: each frame shows the ink of its part of the time. Which character is it?

    Args:
        root: the ``.npz`` file, or a folder that holds exactly one. Its layout is in the card.
        batch_size: clips of one process in one training batch.
        eval_batch_size: clips in one validation or test batch.
        frames: frames of the training clips; test clips with more frames show the same movement in finer parts.
        canvas_size: height and width of the frames.
        characters: how many characters, spread over those of the file, or their names; ``None`` takes all.
        playback: also ask whether the clip runs backwards, which half of the clips do.
        cumulative: frames show all ink so far instead of that of their part of the time.
        augment: largest shift of training clips, as a part of the canvas; 0 for none.
        seed: seed of the order and the augmentation; the splits (by who drew) do not depend on it.
    """

    name = "omniglot_pen_video"
    clips = (DENSER,)

    def __init__(
        self,
        *,
        root: str | Path | None,
        batch_size: int = 32,
        eval_batch_size: int = 100,
        frames: int = 8,
        canvas_size: Sequence[int] = (24, 28),
        characters: int | Sequence[str] | None = 20,
        playback: bool = False,
        cumulative: bool = False,
        augment: float = 0.08,
        seed: int = 0,
    ) -> None:
        super().__init__(
            frames=frames, canvas=canvas_size, batch_size=batch_size, eval_batch_size=eval_batch_size, seed=seed
        )
        if not 0 <= augment < 0.5:
            raise ValueError(f"augment: expected a part of the canvas, 0 <= augment < 0.5, got {augment}")
        path = find_npz(root, self.name)
        arrays = _read_pen(path)
        names = [str(name) for name in arrays["classes"]]
        chosen = _choose(names, characters)
        self.characters = tuple(names[label] for label in chosen)
        place = np.full(len(names), -1)
        place[chosen] = np.arange(len(chosen))
        labels = place[arrays["label"].astype(np.int64)]
        drawers = np.unique(arrays["drawer"])
        held = len(drawers) // 4  # the last quarter of the drawers tests, the one before them validates
        if held < 1:
            raise ValueError(
                f"root: drawer of {path} names {len(drawers)} people; at least 4 are needed for the splits"
            )
        parts = {"train": drawers[: -held - 1], "val": drawers[-held - 1 : -held], "test": drawers[-held:]}
        self._drawings = {
            split: np.flatnonzero((labels >= 0) & np.isin(arrays["drawer"], part)) for split, part in parts.items()
        }
        empty = [split for split, drawings in self._drawings.items() if not len(drawings)]
        if empty:
            raise ValueError(f"characters: no drawing of {self.characters} for {', '.join(empty)} in {path}")
        self._labels = torch.from_numpy(labels)
        self._ink = [_ink(arrays, int(drawing)) for drawing in range(len(labels)) if labels[drawing] >= 0]
        self._ink_of = {int(drawing): place for place, drawing in enumerate(np.flatnonzero(labels >= 0))}
        self.tasks = {"character": len(chosen), **({"playback": 2} if playback else {})}
        self.playback = playback
        self.cumulative = cumulative
        self.augment = augment
        mean, std = self.measure()
        self.mean, self.std = (mean,), (std,)

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.characters, *(("forwards", "backwards") if self.playback else ()))

    def counts(self) -> dict[str, int]:
        return {split: len(drawings) for split, drawings in self._drawings.items()}

    def render(self, split: str, index: Tensor, epoch: int, frames: int, clip: str) -> tuple[Tensor, Tensor]:
        train = split == "train"
        random = sample_uniforms(self.seed if train else _FIXED, epoch if train else 0, index, 3)
        shift = (2 * random[:, :2] - 1) * (self.augment if train else 0.0)
        backwards = (random[:, 2] < 0.5) & self.playback
        drawings = [int(self._drawings[split][i]) for i in index.tolist()]
        out = torch.zeros(len(drawings), frames, *self.image_size)
        for clip_, drawing, offset, back in zip(out, drawings, shift, backwards.tolist(), strict=True):
            ink, time = self._ink[self._ink_of[drawing]]
            _draw(clip_, ink + offset, 1 - time if back else time)
        if self.cumulative:
            out = out.cummax(dim=1)[0]
        labels = self._labels[torch.tensor(drawings)]
        questions = [labels, backwards.long()] if self.playback else [labels]
        return out[:, None], torch.stack(questions, dim=-1)


# -- drawing ----------------------------------------------------------------------------------------------------------


def _placement(corner: Tensor, digit: int, size: int) -> Tensor:
    """How much of each of ``digit`` pixels, laid from ``corner`` on a circle, falls on each of ``size`` pixels.

    Shape: corner ``(B, frames)`` in pixels, real-valued; returns ``(B, frames, size, digit)``.
    """
    place = corner[..., None, None] + torch.arange(digit)  # (B, frames, 1, digit)
    away = (torch.arange(size)[:, None] - place).remainder(size)
    return (1 - torch.minimum(away, size - away)).clamp_min(0)


def _read_pen(path: Path) -> dict[str, np.ndarray]:
    needed = ("xy", "t_ms", "stroke", "offsets", "label", "drawer", "classes")
    with np.load(path, allow_pickle=False) as file:
        missing = [key for key in needed if key not in file.files]
        if missing:
            raise ValueError(
                f"root: {path} lacks {', '.join(missing)}; the layout is in datasets/omniglot_pen_video/README.md"
            )
        return {key: file[key] for key in needed}


def _choose(names: Sequence[str], characters: int | Sequence[str] | None) -> np.ndarray:
    """Classes by number, spread evenly, or by name."""
    if characters is None:
        return np.arange(len(names))
    if isinstance(characters, int):
        if not 2 <= characters <= len(names):
            raise ValueError(f"characters: expected 2 to {len(names)}, the characters of the file, got {characters}")
        return np.linspace(0, len(names) - 1, characters).round().astype(np.int64)
    unknown = [name for name in characters if name not in names]
    if unknown:
        raise ValueError(f"characters: the file has no {', '.join(unknown)}; its names are like {names[0]!r}")
    return np.array([names.index(name) for name in characters])


def _ink(arrays: Mapping[str, np.ndarray], drawing: int) -> tuple[Tensor, Tensor]:
    """Dots along the strokes of a drawing, half a unit of 105 apart, and when each was written.

    Shape: returns ``(P, 2)`` (row, column) on [0, 1] and ``(P,)`` on [0, 1].
    """
    part = slice(int(arrays["offsets"][drawing]), int(arrays["offsets"][drawing + 1]))
    points = arrays["xy"][part].astype(np.float64)[:, ::-1]
    time = arrays["t_ms"][part].astype(np.float64)
    time = time / max(time.max(), 1.0)
    stroke = arrays["stroke"][part]
    length = np.where(stroke[1:] == stroke[:-1], np.abs(np.diff(points, axis=0)).max(1), 0.0)
    along = np.concatenate([[0.0], np.cumsum(np.maximum(length, 1e-9))])
    # between strokes the pen is up: the dots there are left out
    dots = np.arange(0.0, along[-1], 0.5)
    segment = np.minimum(np.searchsorted(along, dots, side="right") - 1, max(len(length) - 1, 0))
    dots = dots[length[segment] > 0] if len(length) else dots[:0]
    dots = np.sort(np.concatenate([dots, along]))
    columns = [np.interp(dots, along, values) for values in (points[:, 0], points[:, 1], time)]
    ink = np.stack(columns[:2], axis=-1) / 105
    return torch.from_numpy(ink).float(), torch.from_numpy(columns[2]).float()


def _draw(clip: Tensor, ink: Tensor, time: Tensor) -> None:
    """Set the pixels of each frame where ink is written in its part of the time. Shape: clip ``(frames, H, W)``."""
    frames, height, width = clip.shape
    frame = (time * frames).long().clamp(0, frames - 1)
    row, column = (ink[:, 0] * height).floor().long(), (ink[:, 1] * width).floor().long()
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    clip[frame[inside], row[inside], column[inside]] = 1.0
