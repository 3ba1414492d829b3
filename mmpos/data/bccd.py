"""Blood cells in microscope photographs, with questions about where they are, how many, and what is at a place.

BCCD, GitHub ``Shenggan/BCCD_Dataset`` (MIT). Card: ``datasets/bccd``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpos.data.boxed import EXTREMES, boxed_files, clear_extremes, read_images
from mmpos.data.images import statistics
from mmpos.data.order import sample_seed
from mmpos.data.questions import ROW_SEEDS, Asked, QuestionData, Shape, View, shapes_of
from mmpos.data.vlm import Places, Vocabulary

__all__ = ["Bccd", "bccd_words"]

HEIGHT, WIDTH = 240, 320
CELL = 16  # pixels of a visual token
BOX_STEP = 4  # pixels between two location words
MAX_NUMBER = 40
#: words of the classes, in the order of the file
OBJECTS = ("red-cell", "white-cell", "platelet")
QUESTIONS = (*["where"] * 4, *["what"] * 3, *["count"] * 2)
_MARGIN = 6.0  # pixels by which the extreme one has to be ahead of the next
_TRIES = 40


def bccd_words() -> Vocabulary:
    """Words of questions and answers: numbers with ``#``, places in pixels in ``[ ]``."""
    return Vocabulary(
        [
            *["where", "is", "the", "what", "at", "how", "many", "nothing", "only"],
            *EXTREMES,
            *OBJECTS,
            *(f"#{number}" for number in range(MAX_NUMBER + 1)),
            *(f"[{place}]" for place in range(0, WIDTH + 1, BOX_STEP)),
        ]
    )


@dataclass(frozen=True, eq=False)
class Photo:
    """Pixels ``(H, W, 3)`` uint8 and (class, box) of what lies in them, boxes as x0, y0, x1, y1 in pixels."""

    pixels: np.ndarray
    objects: tuple[tuple[int, tuple[float, ...]], ...]

    def crop(self, top: int, left: int, height: int, width: int) -> Photo:
        """A part of it, with everything whose middle lies inside; boxes end at its border."""
        kept = []
        for label, (x0, y0, x1, y1) in self.objects:
            x, y = (x0 + x1) / 2 - left, (y0 + y1) / 2 - top
            if 0 <= x < width and 0 <= y < height:
                box = (max(x0 - left, 0), max(y0 - top, 0), min(x1 - left, width), min(y1 - top, height))
                kept.append((label, tuple(map(float, box))))
        return Photo(self.pixels[top : top + height, left : left + width], tuple(kept))

    def flipped(self, across: bool, down: bool) -> Photo:
        """Mirrored left to right, and top to bottom."""
        height, width = self.pixels.shape[:2]
        pixels = self.pixels[:: -1 if down else 1, :: -1 if across else 1]
        kept = []
        for label, (x0, y0, x1, y1) in self.objects:
            x0, x1 = (width - x1, width - x0) if across else (x0, x1)
            y0, y1 = (height - y1, height - y0) if down else (y0, y1)
            kept.append((label, (x0, y0, x1, y1)))
        return Photo(np.ascontiguousarray(pixels), tuple(kept))


class Bccd(QuestionData):
    """Microscope photographs of blood with boxes around red cells, white cells and platelets.

    ``where is the only white-cell`` (``left-most``, ``highest`` ... where there are several) is answered by a box,
    ``what is at [120] [64]`` by a class or ``nothing``, ``how many platelet`` by a number. Training shows crops of
    several forms, mirrored at random, so that each row, column and place word is trained; the whole photograph is then
    new in nothing but its size and the number of cells.

    Args:
        root: folder of the two files, see the card.
        batch_size: crops of one process in one training batch; all of a batch have one form.
        eval_batch_size: crops of one validation or test batch.
        images: training forms, (rows, cols) in tokens of 16 pixels.
        train_count: crops of an epoch.
        val_count: validation photographs of each form at most.
        flip: mirror training crops.
        dense: deal out what lies in each cell instead of questions, to train a tower alone.
        seed: seed of the training rows.
    """

    name = "bccd"
    parts = {"where": OBJECTS}

    def __init__(
        self,
        *,
        root: str | Path | None,
        batch_size: int = 8,
        eval_batch_size: int = 24,
        images: Sequence[Sequence[int]] = ((8, 12), (12, 8), (10, 10), (5, 20), (15, 7)),
        train_count: int = 4000,
        val_count: int = 87,
        flip: bool = True,
        dense: bool = False,
        seed: int = 0,
    ) -> None:
        pictures, text = boxed_files(root, self.name, ".json")
        shapes = shapes_of(images, (), (), CELL)
        for shape in shapes:
            self.check_shape(shape)
        self.photos = read_photos(pictures, text)
        words = bccd_words()
        self._places = Places(words.index["[0]"], WIDTH // BOX_STEP + 1, float(BOX_STEP))
        mean, std = statistics(torch.from_numpy(np.stack([p.pixels for p in self.photos["train"]])).movedim(-1, 1))
        super().__init__(
            shapes=shapes,
            kinds=QUESTIONS,
            vocabulary=words,
            objects=OBJECTS,
            object_words=(*OBJECTS, "nothing"),
            ordered=((words.index["#0"], MAX_NUMBER + 1), (self._places.first, self._places.count)),
            mean=mean,
            std=std,
            train_count=train_count,
            val_count=val_count,
            dense=dense,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            seed=seed,
        )
        self.flip = flip

    def facts(self) -> dict[str, Any]:
        counts = ", ".join(f"{len(members):,} {split}" for split, members in self.photos.items())
        return {
            **super().facts(),
            "photographs": counts,
            "training rows": f"{self.train_count:,} crops in each epoch, new ones every time",
        }

    def check_shape(self, shape: Shape) -> None:
        most = HEIGHT // CELL, WIDTH // CELL
        if shape.kind != "image" or not (3 <= shape.rows <= most[0] and 3 <= shape.cols <= most[1]):
            raise ValueError(
                f"images: expected [rows, cols] of 3 to {most[0]} and 3 to {most[1]} tokens of {CELL} pixels, and no "
                f"several or videos, got {shape.name}"
            )

    def places(self, shape: Shape) -> Places:
        return self._places

    # -- rows, whose keys are (photograph, seed) -----------------------------------------------------------------------

    def train_rows(self, index: Tensor, epoch: int) -> tuple[Shape, list[tuple[int, int]]]:
        draw = np.random.default_rng(sample_seed(self.seed, epoch, int(index[0])))
        shape = self.shapes[int(draw.integers(len(self.shapes)))]
        count = len(self.photos["train"])
        return shape, [(int(i) % count, sample_seed(self.seed, epoch, int(i))) for i in index]

    def rows(self, split: str, shape: Shape, count: int) -> Iterator[list[tuple[int, int]]]:
        count = min(count, len(self.photos[split]))
        for first in range(0, count, self.eval_batch_size):
            numbers = range(first, min(first + self.eval_batch_size, count))
            yield [(number, sample_seed(ROW_SEEDS[split], shape.tokens, number)) for number in numbers]

    def row(self, split: str, shape: Shape, key: tuple[int, int]) -> tuple[list[View], list[Asked]]:
        number, seed = key
        draw = np.random.default_rng(seed)
        photo, asked = self.photos[split][number], []
        if split == "train" and self.flip:
            photo = photo.flipped(*(draw.random(2) < 0.5))
        for _ in range(_TRIES):  # a crop that shows cells
            crop = photo.crop(*place_crop(photo, shape, draw), shape.height, shape.width)
            asked = questions_of(crop, draw)
            if asked:
                break
        if not asked:
            raise ValueError(
                f"images: {_TRIES} crops of {shape.height} x {shape.width} pixels of {split} photograph {number} show "
                "no cell that a question could be about; ask for larger crops"
            )
        return [View(crop.pixels, crop.objects)], asked


def place_crop(photo: Photo, shape: Shape, draw: np.random.Generator) -> tuple[int, int]:
    """Upper and left edge of a crop around one of the objects; rare classes are chosen as often as others."""
    free = HEIGHT - shape.height, WIDTH - shape.width
    spread = draw.random(2)
    if not photo.objects:
        return int(spread[0] * (free[0] + 1)), int(spread[1] * (free[1] + 1))
    label = draw.choice(sorted({entry[0] for entry in photo.objects}))
    boxes = [box for of, box in photo.objects if of == label]
    x0, y0, x1, y1 = boxes[int(draw.integers(len(boxes)))]
    out = []
    for low, high, side, room, part in (
        (y0, y1, shape.height, free[0], spread[0]),
        (x0, x1, shape.width, free[1], spread[1]),
    ):
        first, last = max(0.0, high - side), min(float(room), low)  # where the whole object is inside
        first, last = (first, last) if first <= last else (min(max((low + high - side) / 2, 0.0), float(room)),) * 2
        out.append(int(min(max(round(first + part * (last - first)), 0), room)))
    return out[0], out[1]


def questions_of(photo: Photo, draw: np.random.Generator) -> list[Asked]:
    """Questions about a photograph; none when nothing can be asked."""
    clear = clear_objects(photo)
    if not clear:
        return []
    out: list[Asked] = []
    rare = sorted({label for label, _, _ in clear})
    for _ in range(QUESTIONS.count("where")):  # every class that is there as often as others
        label = int(draw.choice(rare))
        options = [entry for entry in clear if entry[0] == label]
        _, which, box = options[int(draw.integers(len(options)))]
        places = " ".join(f"[{BOX_STEP * round(edge / BOX_STEP)}]" for edge in box)
        out.append(Asked("where", f"where is the {which} {OBJECTS[label]}", places, box))
    for _ in range(QUESTIONS.count("what")):
        x, y, there = a_place(photo, draw)
        answer = "nothing" if there is None else OBJECTS[there]
        out.append(Asked("what", f"what is at [{x}] [{y}]", answer))
    labels = [label for label, _ in photo.objects]
    for _ in range(QUESTIONS.count("count")):
        label = int(draw.integers(len(OBJECTS)))
        out.append(Asked("count", f"how many {OBJECTS[label]}", f"#{labels.count(label)}"))
    return out


def clear_objects(photo: Photo) -> list[tuple[int, str, tuple[float, ...]]]:
    """(class, which one, box) of every object that is the only, the highest, ... of its class by a clear margin."""
    out = []
    for label in range(len(OBJECTS)):
        boxes = [box for of, box in photo.objects if of == label]
        if len(boxes) == 1:
            out.append((label, "only", boxes[0]))
            continue
        if boxes:
            out += [(label, extreme, boxes[which]) for extreme, which in clear_extremes(boxes, _MARGIN)]
    return out


def a_place(photo: Photo, draw: np.random.Generator) -> tuple[int, int, int | None]:
    """A place in steps of the location words and the class there, ``None`` where nothing is near.

    Inside, it is near the middle of an object and in no box of another class; outside, it is half a token away from
    every box. Where neither is found it is a place anywhere, with the class of the nearest box it is in.
    """
    height, width = photo.pixels.shape[:2]
    classes = sorted({label for label, _ in photo.objects})
    for _ in range(_TRIES):
        wanted: int | None = None
        if classes and draw.random() < 0.75:
            wanted = int(draw.choice(classes))
            boxes = [box for label, box in photo.objects if label == wanted]
            x0, y0, x1, y1 = boxes[int(draw.integers(len(boxes)))]
            at = draw.random(2) * 0.5 + 0.25
            x, y = x0 + at[0] * (x1 - x0), y0 + at[1] * (y1 - y0)
        else:
            y, x = draw.random(2) * (height, width)
        col, row = (BOX_STEP * int(min(value, side - 1) // BOX_STEP) for value, side in ((x, width), (y, height)))
        room = 0.0 if wanted is not None else CELL / 2
        near = {
            label
            for label, (x0, y0, x1, y1) in photo.objects
            if x0 - room <= col <= x1 + room and y0 - room <= row <= y1 + room
        }
        if near == (set() if wanted is None else {wanted}):
            return col, row, wanted
    inside = [
        ((x1 - x0) * (y1 - y0), label)
        for label, (x0, y0, x1, y1) in photo.objects
        if x0 <= col <= x1 and y0 <= row <= y1
    ]
    return col, row, min(inside)[1] if inside else None


def read_photos(pictures: Path, text: Path) -> dict[str, list[Photo]]:
    """Photographs of each split."""
    told: Mapping[str, Any] = json.loads(text.read_text(encoding="utf-8"))
    if not {"classes", "images"} <= set(told):
        raise ValueError(f"root: {text} holds {sorted(told)}; expected classes and images, see datasets/bccd/README.md")
    if len(told["classes"]) != len(OBJECTS):
        raise ValueError(
            f"root: {text} has classes {', '.join(told['classes'])}; expected red cells, white cells and platelets, in "
            "this order"
        )
    images = read_images(pictures, len(told["images"]), (HEIGHT, WIDTH))
    out: dict[str, list[Photo]] = {"train": [], "val": [], "test": []}
    for record, pixels in zip(told["images"], images, strict=True):
        if record.get("split") not in out:
            raise ValueError(f"root: {text} has a split {record.get('split')!r}; expected train, val or test")
        # photographs with no box at all were not annotated: nothing true can be asked about them
        if record["boxes"]:
            objects = tuple((int(box[4]), tuple(map(float, box[:4]))) for box in record["boxes"])
            out[record["split"]].append(Photo(pixels, objects))
    for split, members in out.items():
        if not members:
            raise ValueError(f"root: {text} has no annotated photograph for {split}; expected train, val and test")
    return out
