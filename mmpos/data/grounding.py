"""Questions about where handwritten digits are: in an image, in several images, in a video.

Nothing is downloaded: the digits are those of MNIST-5k. Card: ``datasets/mnist_grounding``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from mmpos.data.mnist5k import Mnist5k
from mmpos.data.order import sample_seed
from mmpos.data.questions import ROW_SEEDS, Asked, QuestionData, Shape, View, shapes_of
from mmpos.data.scenes import CELL, Canvas, Digits, draw_canvas
from mmpos.data.vlm import Places, Vocabulary

__all__ = ["MnistGrounding", "grounding_words"]

BOX_STEP = 2  # pixels between two location words
MAX_SIDE = 96  # pixels that location words reach
MAX_NUMBER = 16
DIRECTIONS = ("left-of", "right-of", "above", "below")
#: what is asked about a row of each kind
QUESTIONS = {
    "image": (*["where"] * 4, *["direction"] * 2, *["count"] * 2),
    "images": (*["which image"] * 3, *["in image"] * 3),
    "video": (*["which frame"] * 3, *["follows"] * 3),
}
_MARGIN = 3.0  # pixels by which the answer to a question about directions has to be clear


def grounding_words() -> Vocabulary:
    """Words of questions and answers: digits as they are, numbers with ``#``, places in pixels in ``[ ]``."""
    return Vocabulary(
        [
            *["where", "is", "what", "the", "how", "many", "in", "which", "frame", "image", "shows", "follows"],
            *DIRECTIONS,
            "nothing",
            *map(str, range(10)),
            *(f"#{number}" for number in range(MAX_NUMBER + 1)),
            *(f"[{place}]" for place in range(0, MAX_SIDE + 1, BOX_STEP)),
        ]
    )


class MnistGrounding(QuestionData):
    """MNIST-5k digits on canvases, with questions whose answers are places, digits and numbers.

    A canvas holds some digits at random places; ``where is the 7`` is answered by the box around its ink in steps of
    two pixels, ``what is left-of the 3`` by the nearest digit in that quarter, ``how many 5`` by a number. Of several
    images, and of the frames of a video with one digit each, it is asked where a digit is, what another shows and what
    follows it. Training canvases have many forms of about 50 visual tokens, so that each row, column and place word is
    trained, while larger ones are new.

    Args:
        batch_size: rows of one process in one training batch; all rows of a batch have one form.
        eval_batch_size: rows of one validation or test batch.
        images: training forms of single images, (rows, cols) in tokens of 8 pixels.
        several: training forms of several images, (images, rows, cols).
        videos: training forms of videos, (frames, rows, cols).
        mix: part of the training batches that show one image, several, a video.
        train_count: rows of an epoch; each epoch draws new ones.
        val_count: validation rows of each form.
        sides: smallest and largest longer side of a digit in pixels.
        dense: deal out what lies in each cell of the canvases instead of questions, to train a tower alone.
        seed: seed of the training rows.
    """

    name = "mnist_grounding"

    def __init__(
        self,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 50,
        images: Sequence[Sequence[int]] = ((6, 8), (8, 6), (4, 12), (12, 4), (5, 10), (10, 5)),
        several: Sequence[Sequence[int]] = ((2, 4, 6), (2, 6, 4), (3, 4, 4), (6, 3, 3)),
        videos: Sequence[Sequence[int]] = ((3, 4, 4), (5, 3, 3), (8, 3, 2), (12, 2, 2)),
        mix: Sequence[float] = (0.6, 0.15, 0.25),
        train_count: int = 8_000,
        val_count: int = 50,
        sides: Sequence[int] = (11, 20),
        dense: bool = False,
        seed: int = 0,
    ) -> None:
        shapes = shapes_of(images, several, videos, CELL)
        for shape in shapes:
            self.check_shape(shape)
        if len(sides) != 2 or not 4 <= sides[0] <= sides[1] <= 28:
            raise ValueError(f"sides: expected 4 <= smallest <= largest <= 28 pixels, got {list(sides)}")
        words = grounding_words()
        objects = tuple(map(str, range(10)))
        self._places = Places(words.index["[0]"], MAX_SIDE // BOX_STEP + 1, float(BOX_STEP))
        super().__init__(
            shapes=shapes,
            kinds=[kind for shape in shapes for kind in QUESTIONS[shape.kind]],
            vocabulary=words,
            objects=objects,
            object_words=(*objects, "nothing"),
            ordered=((words.index["#0"], MAX_NUMBER + 1), (self._places.first, self._places.count)),
            mean=(0.08,),
            std=(0.24,),
            train_count=train_count,
            val_count=val_count,
            dense=dense,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            seed=seed,
        )
        of_kind = [[shape for shape in shapes if shape.kind == kind] for kind in QUESTIONS]
        if len(mix) != len(of_kind) or min(mix) < 0 or not sum(p for p, f in zip(mix, of_kind, strict=True) if f):
            raise ValueError(
                f"mix: expected parts of one image, several and videos, 0 or more and not all 0 where there are forms, "
                f"got {list(mix)}"
            )
        parts = np.array([part for part, forms in zip(mix, of_kind, strict=True) if forms], dtype=np.float64)
        self.forms, self.mix = [forms for forms in of_kind if forms], parts / parts.sum()
        source = Mnist5k(val_fraction=0.05)
        self.digits = {split: Digits(images_[:, 0], labels) for split, (images_, labels) in source.splits.items()}
        self.sides = (int(sides[0]), int(sides[1]))

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "training rows": f"{self.train_count:,} in each epoch, new ones every time"}

    def check_shape(self, shape: Shape) -> None:
        fits = {"image": shape.count == 1, "images": 2 <= shape.count <= MAX_NUMBER, "video": shape.count >= 2}
        if not fits[shape.kind] or shape.count > MAX_NUMBER:
            raise ValueError(
                f"several, videos: expected 2 to {MAX_NUMBER} images or frames, got {shape.kind} with {shape.count}"
            )
        if not (2 <= shape.rows <= MAX_SIDE // CELL and 2 <= shape.cols <= MAX_SIDE // CELL):
            raise ValueError(
                f"images, several, videos: expected 2 to {MAX_SIDE // CELL} tokens of {CELL} pixels along each side, "
                f"got {shape.rows} x {shape.cols}"
            )

    def places(self, shape: Shape) -> Places:
        return self._places

    # -- rows, whose keys are seeds -----------------------------------------------------------------------------------

    def train_rows(self, index: Tensor, epoch: int) -> tuple[Shape, list[int]]:
        draw = np.random.default_rng(sample_seed(self.seed, epoch, int(index[0])))
        forms = self.forms[int(draw.choice(len(self.forms), p=self.mix))]
        shape = forms[int(draw.integers(len(forms)))]
        return shape, [sample_seed(self.seed, epoch, int(i)) for i in index]

    def rows(self, split: str, shape: Shape, count: int) -> Iterator[list[int]]:
        size, seed = min(self.eval_batch_size, count), ROW_SEEDS[split]
        key = int.from_bytes(shape.name.encode(), "little") % 1_000_000_007
        for first in range(0, count, size):
            yield [sample_seed(seed, key, row) for row in range(first, min(first + size, count))]

    def row(self, split: str, shape: Shape, key: int) -> tuple[list[View], list[Asked]]:
        canvases, asked = self._row(split, shape, QUESTIONS[shape.kind], np.random.default_rng(key))
        return [_view(canvas) for canvas in canvases], asked

    def views(self, split: str, shape: Shape, key: int) -> list[View]:
        return [_view(canvas) for canvas in self.canvases(split, shape, np.random.default_rng(key))]

    def canvases(self, split: str, shape: Shape, draw: np.random.Generator) -> list[Canvas]:
        """What one row shows."""
        height, width = shape.height, shape.width
        out = []
        if shape.kind == "image":
            cells = shape.rows * shape.cols
            count = int(draw.integers(max(2, cells // 16), max(3, min(9, cells // 9)) + 1))
            labels = draw.permutation(10)[:count]
            if draw.random() < 0.5:  # one digit more than once, so that there is something to count
                labels[count - int(draw.integers(1, max(2, count - 2))) :] = labels[0]
            out.append(draw_canvas(self.digits[split], labels.tolist(), height, width, self.sides, draw))
        else:
            labels = draw.permutation(10)
            if shape.count > 10:  # longer than there are digits: the last ones come again
                labels = np.concatenate([labels, draw.choice(labels[5:], shape.count - 10)])
            for label in labels[: shape.count]:
                out.append(draw_canvas(self.digits[split], [int(label)], height, width, self.sides, draw))
        return out

    def _row(
        self, split: str, shape: Shape, kinds: Sequence[str], draw: np.random.Generator
    ) -> tuple[list[Canvas], list[Asked]]:
        while True:
            canvases = self.canvases(split, shape, draw)
            if shape.kind != "image" or canvases[0].unique():
                break
        if shape.kind == "image":
            return canvases, _image_questions(canvases[0], kinds, draw)
        return canvases, _sequence_questions([canvas.digits[0].label for canvas in canvases], kinds, draw)


def _view(canvas: Canvas) -> View:
    return View(canvas.pixels, [(digit.label, digit.box) for digit in canvas.digits])


def _image_questions(canvas: Canvas, kinds: Sequence[str], draw: np.random.Generator) -> list[Asked]:
    unique = canvas.unique()
    order = [unique[i] for i in draw.permutation(len(unique))]
    labels = [digit.label for digit in canvas.digits]
    clear = _clear_directions(canvas)
    some = [entry for entry in clear if entry[2] != "nothing"]
    out: list[Asked] = []
    for number, kind in enumerate(kinds):
        if kind == "where":
            digit = order[number % len(order)]
            places = [BOX_STEP * (edge // BOX_STEP) for edge in digit.box[:2]]
            places += [BOX_STEP * -(-edge // BOX_STEP) for edge in digit.box[2:]]
            answer = " ".join(f"[{place}]" for place in places)
            out.append(Asked(kind, f"where is the {digit.label}", answer, digit.box))
        elif kind == "direction":
            chosen = some if some and draw.random() < 0.75 else clear
            label, direction, answer = chosen[int(draw.integers(len(chosen)))]
            out.append(Asked(kind, f"what is {direction} the {label}", answer))
        else:
            label = int(draw.choice(labels)) if draw.random() < 0.75 else int(draw.integers(10))
            out.append(Asked(kind, f"how many {label}", f"#{labels.count(label)}"))
    return out


def _clear_directions(canvas: Canvas) -> list[tuple[int, str, str]]:
    """(digit, direction, answer) wherever the answer is clear by some pixels; where none is, the clearest."""
    found: list[tuple[float, int, str, str]] = []
    for digit in canvas.unique():
        row, col = digit.centre
        for direction in DIRECTIONS:
            margins, inside = [_MARGIN * 2], []
            for other in canvas.digits:
                if other is digit:
                    continue
                down, right = other.centre[0] - row, other.centre[1] - col
                along, across = {
                    "left-of": (-right, abs(down)),
                    "right-of": (right, abs(down)),
                    "above": (-down, abs(right)),
                    "below": (down, abs(right)),
                }[direction]
                margins.append(abs(along - across))  # how far it is from the border of the quarter
                if along > across:
                    inside.append((float(np.hypot(along, across)), other.label))
            inside.sort()
            if len(inside) > 1 and inside[0][1] != inside[1][1]:
                margins.append(inside[1][0] - inside[0][0])
            found.append((min(margins), digit.label, direction, str(inside[0][1]) if inside else "nothing"))
    clear = [entry[1:] for entry in found if entry[0] >= _MARGIN]
    return clear or [max(found)[1:]]


def _sequence_questions(labels: Sequence[int], kinds: Sequence[str], draw: np.random.Generator) -> list[Asked]:
    """Questions about images or frames with one digit each; only digits that occur once are asked for."""
    once = [place for place, label in enumerate(labels) if list(labels).count(label) == 1]
    out: list[Asked] = []
    for kind in kinds:
        place = once[int(draw.integers(len(once)))]
        if kind == "which image":
            out.append(Asked(kind, f"which image shows the {labels[place]}", f"#{place + 1}"))
        elif kind == "in image":
            place = int(draw.integers(len(labels)))
            out.append(Asked(kind, f"what is in image #{place + 1}", str(labels[place])))
        elif kind == "which frame":
            out.append(Asked(kind, f"which frame shows the {labels[place]}", f"#{place + 1}"))
        else:
            answer = str(labels[place + 1]) if place + 1 < len(labels) else "nothing"
            out.append(Asked(kind, f"what follows the {labels[place]}", answer))
    return out
