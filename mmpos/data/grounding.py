"""Questions about where handwritten digits are: in an image, in several images, in a video.

Nothing is downloaded: the digits are those of MNIST-5k. Card: ``datasets/mnist_grounding``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpos.data.base import ImageData
from mmpos.data.loader import BatchLoader, stream_tensors
from mmpos.data.mnist5k import Mnist5k
from mmpos.data.order import BatchOrder, sample_seed
from mmpos.data.scenes import CELL, Canvas, Digits, draw_canvas
from mmpos.data.vlm import DenseBatch, Places, VlmBatch, Vocabulary, assemble, dense_targets
from mmpos.multimodal.segments import Image, Segment, Video

__all__ = ["MnistGrounding", "Shape", "grounding_words"]

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
_VAL, _TEST = 1_000_003, 2_000_003  # seeds: validation and test scenes do not depend on that of a run


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


@dataclass(frozen=True)
class Shape:
    """What all rows of a batch show.

    Args:
        kind: ``image``, ``images`` or ``video``.
        count: images or frames.
        rows: height of each in visual tokens of 8 pixels.
        cols: width of each.
    """

    kind: str
    count: int
    rows: int
    cols: int

    def __post_init__(self) -> None:
        fits = {"image": self.count == 1, "images": 2 <= self.count <= MAX_NUMBER, "video": self.count >= 2}
        if not fits.get(self.kind, False) or self.count > MAX_NUMBER:
            raise ValueError(
                f"shapes: expected an image, 2 to {MAX_NUMBER} images or a video of 2 to {MAX_NUMBER} frames, got "
                f"{self.kind!r} with count {self.count}"
            )
        if not (2 <= self.rows <= MAX_SIDE // CELL and 2 <= self.cols <= MAX_SIDE // CELL):
            raise ValueError(
                f"shapes: expected 2 to {MAX_SIDE // CELL} tokens of {CELL} pixels along each side, got {self.rows} x "
                f"{self.cols}"
            )

    @property
    def name(self) -> str:
        """``image 48 x 64`` in pixels, ``video 5 of 24 x 24``."""
        size = f"{self.rows * CELL} x {self.cols * CELL}"
        return f"{self.kind} {size}" if self.kind == "image" else f"{self.kind} {self.count} of {size}"

    @property
    def tokens(self) -> int:
        """Visual tokens of a row."""
        return self.count * self.rows * self.cols


def shapes_of(
    images: Sequence[Sequence[int]], several: Sequence[Sequence[int]], videos: Sequence[Sequence[int]]
) -> tuple[Shape, ...]:
    """Shapes from lists of (rows, cols), (images, rows, cols) and (frames, rows, cols)."""
    for option, entries, wanted in (("images", images, 2), ("several", several, 3), ("videos", videos, 3)):
        wrong = [list(entry) for entry in entries if len(entry) != wanted]
        if wrong:
            form = "[rows, cols]" if wanted == 2 else "[count, rows, cols]"
            raise ValueError(f"{option}: expected entries {form} in visual tokens, got {wrong[0]}")
    found = [Shape("image", 1, *map(int, entry)) for entry in images]
    found += [Shape("images", *map(int, entry)) for entry in several]
    return (*found, *(Shape("video", *map(int, entry)) for entry in videos))


class MnistGrounding(ImageData):
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
    evaluation = "vlm"
    in_chans = 1

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
        self.shapes = shapes_of(images, several, videos)
        if not self.shapes:
            raise ValueError("images, several, videos: expected at least one training form, got none")
        if len(sides) != 2 or not 4 <= sides[0] <= sides[1] <= 28:
            raise ValueError(f"sides: expected 4 <= smallest <= largest <= 28 pixels, got {list(sides)}")
        if train_count < batch_size or val_count < 1:
            raise ValueError(
                f"train_count, val_count: expected at least one batch of {batch_size} rows and one row, got "
                f"{train_count} and {val_count}"
            )
        of_kind = [[shape for shape in self.shapes if shape.kind == kind] for kind in QUESTIONS]
        if len(mix) != len(of_kind) or min(mix) < 0 or not sum(p for p, f in zip(mix, of_kind, strict=True) if f):
            raise ValueError(
                f"mix: expected parts of one image, several and videos, 0 or more and not all 0 where there are forms, "
                f"got {list(mix)}"
            )
        parts = np.array([part for part, forms in zip(mix, of_kind, strict=True) if forms], dtype=np.float64)
        self.forms, self.mix = [forms for forms in of_kind if forms], parts / parts.sum()
        longest = max((shape.rows, shape.cols) for shape in self.shapes)
        super().__init__(
            batch_size=batch_size, eval_batch_size=eval_batch_size, image_size=CELL * max(longest), seed=seed
        )
        source = Mnist5k(val_fraction=0.05)
        self.digits = {split: Digits(images_[:, 0], labels) for split, (images_, labels) in source.splits.items()}
        self.train_count, self.val_count = train_count, val_count
        self.sides = (int(sides[0]), int(sides[1]))
        self.dense = dense
        self.kinds = tuple(dict.fromkeys(kind for shape in self.shapes for kind in QUESTIONS[shape.kind]))
        self.objects = tuple(map(str, range(10)))
        self.vocabulary = words = grounding_words()
        self.places = Places(words.index["[0]"], MAX_SIDE // BOX_STEP + 1, float(BOX_STEP))
        #: words of the objects of :meth:`cells` and of none
        self.object_words = tuple(words.index[word] for word in (*self.objects, "nothing"))
        #: (first token, count) of words with an order
        self.ordered = ((words.index["#0"], MAX_NUMBER + 1), (self.places.first, self.places.count))
        self.num_classes = len(self.vocabulary)
        self.class_names = self.vocabulary.words
        self.mean, self.std = (0.08,), (0.24,)

    def facts(self) -> dict[str, Any]:
        tokens = [shape.tokens for shape in self.shapes]
        return {
            "name": self.name,
            "training rows": f"{self.train_count:,} in each epoch, new ones every time",
            "training forms": ", ".join(shape.name for shape in self.shapes),
            "visual tokens in training": f"{min(tokens)} to {max(tokens)}",
            "words": len(self.vocabulary),
        }

    # -- loaders ------------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> BatchLoader:
        """Training rows; all rows of a batch have one form, drawn with the first of them."""

        def fetch(index: Tensor, epoch: int) -> Any:
            draw = np.random.default_rng(sample_seed(self.seed, epoch, int(index[0])))
            forms = self.forms[int(draw.choice(len(self.forms), p=self.mix))]
            shape = forms[int(draw.integers(len(forms)))]
            return self.batch("train", shape, [sample_seed(self.seed, epoch, int(i)) for i in index])

        return BatchLoader(self.order(self.train_count, train=True), stream_tensors(fetch))

    def val_dataloader(self) -> BatchLoader:
        """The same number of rows of every training form."""
        return self.shape_loader("val", self.shapes, self.val_count, _VAL)

    def test_loader(self, size: int) -> tuple[BatchLoader, str]:
        raise ValueError(f"sizes: {self.name} has forms, not sizes; use evaluation=vlm, got {size}")

    def test_dataloader(self) -> BatchLoader:
        """Test rows of every training form."""
        return self.shape_loader("test", self.shapes, self.val_count, _TEST)

    def test_forms(
        self,
        images: Sequence[Sequence[int]] | None = None,
        several: Sequence[Sequence[int]] | None = None,
        videos: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Shape, ...]:
        """Forms to test, as the options of the data set; where one is ``None`` those of training."""
        given = dict(zip(QUESTIONS, (images, several, videos), strict=True))
        chosen = shapes_of(images or (), several or (), videos or ())
        forms = {kind: [form for form in chosen if form.kind == kind] for kind in QUESTIONS}
        own = {kind: [form for form in self.shapes if form.kind == kind] for kind in QUESTIONS}
        found = tuple(f for kind in QUESTIONS for f in (own[kind] if given[kind] is None else forms[kind]))
        if not found:
            raise ValueError("images, several, videos: no form to test; give at least one")
        return found

    def test_form(self, form: Shape, count: int) -> BatchLoader:
        """``count`` test rows of a form."""
        return self.shape_loader("test", [form], count)

    def shape_loader(self, split: str, shapes: Sequence[Shape], count: int, seed: int = _TEST) -> BatchLoader:
        """``count`` rows of each form, in batches of one form; the same rows whatever other forms are asked for."""
        size = min(self.eval_batch_size, count)
        batches = -(-count // size)

        def fetch(index: Tensor, epoch: int) -> Any:
            number = int(index[0]) // batches
            shape, first = shapes[number], size * (int(index[0]) % batches)
            rows = range(first, min(first + size, count))
            key = int.from_bytes(shape.name.encode(), "little") % 1_000_000_007
            return self.batch(split, shape, [sample_seed(seed, key, row) for row in rows])

        ranks = self.order(batches * len(shapes) * self.eval_batch_size, train=False)
        world = ranks.global_batch // ranks.batch_size
        order = BatchOrder(batches * len(shapes), 1, shuffle=False, drop_last=False, rank=ranks.rank, world_size=world)
        return BatchLoader(order, stream_tensors(fetch))

    # -- rows ---------------------------------------------------------------------------------------------------------

    def batch(self, split: str, shape: Shape, seeds: Sequence[int]) -> VlmBatch | DenseBatch:
        """Rows of one form, each from its own seed."""
        return self.cells(split, shape, seeds) if self.dense else self.questions(split, shape, seeds)

    def cells(self, split: str, shape: Shape, seeds: Sequence[int]) -> DenseBatch:
        """Canvases of rows of one form, one after the other, with what lies in their cells."""
        canvases = [c for seed in seeds for c in self.canvases(split, shape, np.random.default_rng(seed))]
        pixels = torch.from_numpy(np.stack([canvas.pixels for canvas in canvases]))[:, None].float() / 255
        targets = [self._targets(canvas, shape) for canvas in canvases]
        labels, edges = (torch.stack(part) for part in zip(*targets, strict=True))
        return DenseBatch((pixels - self.mean[0]) / self.std[0], labels, edges)

    def questions(self, split: str, shape: Shape, seeds: Sequence[int]) -> VlmBatch:
        """Rows of one form with their questions, whose kinds come in the same order in each row."""
        kinds = QUESTIONS[shape.kind]
        rows = [self._row(split, shape, kinds, np.random.default_rng(seed)) for seed in seeds]
        pixels = torch.stack([torch.from_numpy(np.stack([canvas.pixels for canvas in row[0]])) for row in rows])
        pixels = ((pixels[:, :, None].float() / 255) - self.mean[0]) / self.std[0]
        boxes = {
            (number, which): question[3]
            for number, row in enumerate(rows)
            for which, question in enumerate(row[1])
            if question[3] is not None
        }
        blocks: list[Segment]
        if shape.kind == "video":
            blocks, parts, prompts = [Video(shape.count, shape.rows, shape.cols)], [pixels], [""]
        else:
            blocks = [Image(shape.rows, shape.cols)] * shape.count
            parts = [pixels[:, i : i + 1] for i in range(shape.count)]
            prompts = ["image" if shape.kind == "images" else ""] * shape.count
        asked = [[question[:3] for question in row[1]] for row in rows]
        batch = assemble(self.vocabulary, parts, blocks, asked, prompts=prompts, boxes=boxes)
        batch.places = self.places
        batch.names = torch.stack([self._names(row[0], shape) for row in rows])
        return batch

    def _targets(self, canvas: Canvas, shape: Shape) -> tuple[Tensor, Tensor]:
        digits = [(digit.label, digit.box) for digit in canvas.digits]
        return dense_targets(digits, shape.rows, shape.cols, CELL, len(self.objects))

    def _names(self, canvases: Sequence[Canvas], shape: Shape) -> Tensor:
        """Words of what lies in the cells of a row. Shape: ``(visual tokens,)``."""
        labels = torch.cat([self._targets(canvas, shape)[0] for canvas in canvases])
        return torch.tensor(self.object_words)[labels]

    def canvases(self, split: str, shape: Shape, draw: np.random.Generator) -> list[Canvas]:
        """What one row shows."""
        height, width = shape.rows * CELL, shape.cols * CELL
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
    ) -> tuple[list[Canvas], list[tuple[str, str, str, Sequence[float] | None]]]:
        while True:
            canvases = self.canvases(split, shape, draw)
            if shape.kind != "image" or canvases[0].unique():
                break
        if shape.kind == "image":
            return canvases, _image_questions(canvases[0], kinds, draw)
        return canvases, _sequence_questions([canvas.digits[0].label for canvas in canvases], kinds, draw)


def _image_questions(
    canvas: Canvas, kinds: Sequence[str], draw: np.random.Generator
) -> list[tuple[str, str, str, Sequence[float] | None]]:
    unique = canvas.unique()
    order = [unique[i] for i in draw.permutation(len(unique))]
    labels = [digit.label for digit in canvas.digits]
    clear = _clear_directions(canvas)
    some = [entry for entry in clear if entry[2] != "nothing"]
    out: list[tuple[str, str, str, Sequence[float] | None]] = []
    for number, kind in enumerate(kinds):
        if kind == "where":
            digit = order[number % len(order)]
            places = [BOX_STEP * (edge // BOX_STEP) for edge in digit.box[:2]]
            places += [BOX_STEP * -(-edge // BOX_STEP) for edge in digit.box[2:]]
            answer = " ".join(f"[{place}]" for place in places)
            out.append((kind, f"where is the {digit.label}", answer, digit.box))
        elif kind == "direction":
            chosen = some if some and draw.random() < 0.75 else clear
            label, direction, answer = chosen[int(draw.integers(len(chosen)))]
            out.append((kind, f"what is {direction} the {label}", answer, None))
        else:
            label = int(draw.choice(labels)) if draw.random() < 0.75 else int(draw.integers(10))
            out.append((kind, f"how many {label}", f"#{labels.count(label)}", None))
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


def _sequence_questions(
    labels: Sequence[int], kinds: Sequence[str], draw: np.random.Generator
) -> list[tuple[str, str, str, Sequence[float] | None]]:
    """Questions about images or frames with one digit each; only digits that occur once are asked for."""
    once = [place for place, label in enumerate(labels) if list(labels).count(label) == 1]
    out: list[tuple[str, str, str, Sequence[float] | None]] = []
    for kind in kinds:
        place = once[int(draw.integers(len(once)))]
        if kind == "which image":
            out.append((kind, f"which image shows the {labels[place]}", f"#{place + 1}", None))
        elif kind == "in image":
            place = int(draw.integers(len(labels)))
            out.append((kind, f"what is in image #{place + 1}", str(labels[place]), None))
        elif kind == "which frame":
            out.append((kind, f"which frame shows the {labels[place]}", f"#{place + 1}", None))
        else:
            answer = str(labels[place + 1]) if place + 1 < len(labels) else "nothing"
            out.append((kind, f"what follows the {labels[place]}", answer, None))
    return out
