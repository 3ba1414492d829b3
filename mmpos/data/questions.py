"""What all data with questions about images share: forms of rows, loaders, and batches of one form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmpos.data.base import ImageData
from mmpos.data.loader import BatchLoader, stream_tensors
from mmpos.data.order import BatchOrder
from mmpos.data.vlm import DenseBatch, Places, VlmBatch, Vocabulary, assemble, dense_targets
from mmpos.multimodal.segments import Image, Segment, Video

__all__ = ["ROW_SEEDS", "Asked", "QuestionData", "Shape", "View", "shapes_of"]

KINDS = ("image", "images", "video")
#: validation and test rows do not depend on the seed of a run; a look at training rows is like a validation
ROW_SEEDS = {"train": 3_000_017, "val": 1_000_003, "test": 2_000_003}


@dataclass(frozen=True)
class Shape:
    """What all rows of a batch show.

    Args:
        kind: ``image``, ``images`` or ``video``.
        count: images or frames.
        rows: height of each in visual tokens.
        cols: width of each.
        cell: pixels of a visual token along each side.
    """

    kind: str
    count: int
    rows: int
    cols: int
    cell: int = 8

    @property
    def height(self) -> int:
        """Pixels."""
        return self.rows * self.cell

    @property
    def width(self) -> int:
        """Pixels."""
        return self.cols * self.cell

    @property
    def name(self) -> str:
        """``image 48 x 64`` in pixels, ``video 5 of 24 x 24``."""
        size = f"{self.height} x {self.width}"
        return f"{self.kind} {size}" if self.kind == "image" else f"{self.kind} {self.count} of {size}"

    @property
    def tokens(self) -> int:
        """Visual tokens of a row."""
        return self.count * self.rows * self.cols


def shapes_of(
    images: Sequence[Sequence[int]], several: Sequence[Sequence[int]], videos: Sequence[Sequence[int]], cell: int = 8
) -> tuple[Shape, ...]:
    """Shapes from lists of (rows, cols), (images, rows, cols) and (frames, rows, cols)."""
    for option, entries, wanted in (("images", images, 2), ("several", several, 3), ("videos", videos, 3)):
        wrong = [list(entry) for entry in entries if len(entry) != wanted]
        if wrong:
            form = "[rows, cols]" if wanted == 2 else "[count, rows, cols]"
            raise ValueError(f"{option}: expected entries {form} in visual tokens, got {wrong[0]}")
    found = [Shape("image", 1, int(rows), int(cols), cell) for rows, cols in images]
    for kind, entries in (("images", several), ("video", videos)):
        found += [Shape(kind, int(count), int(rows), int(cols), cell) for count, rows, cols in entries]
    return tuple(found)


class View(NamedTuple):
    """An image or a frame: pixels ``(H, W)`` or ``(H, W, C)`` uint8, and (class, box) of each object in pixels."""

    pixels: np.ndarray
    objects: Sequence[tuple[int, Sequence[float]]]


class Asked(NamedTuple):
    """A question, its answer, and where that is a box, the box in pixels and which image it lies in."""

    kind: str
    question: str
    answer: str
    box: Sequence[float] | None = None
    view: int = 0


class QuestionData(ImageData):
    """Rows of images, several images or videos, with questions.

    Sub-classes say what a row holds (:meth:`row`), which rows a training batch (:meth:`train_rows`) and a test
    (:meth:`rows`) have, and set :attr:`places` for each form where answers are boxes. A *key* is whatever tells
    them which row is meant.

    Args:
        shapes: forms of training.
        kinds: kinds of question.
        vocabulary: words of questions and answers.
        objects: what can lie in a cell.
        object_words: the words for these, and last for nothing.
        ordered: (first token, count) of words with an order.
        mean: of the pixels of each channel, on [0, 1].
        std: likewise.
        train_count: rows of an epoch.
        val_count: validation rows of each form.
        dense: deal out what lies in each cell instead of questions, to train a tower alone.
        batch_size: rows of one process in one training batch.
        eval_batch_size: rows of one validation or test batch.
        seed: seed of the training rows.
    """

    evaluation = "vlm"
    #: words by which the questions of a kind are also counted apart
    parts: Mapping[str, Sequence[str]] = {}

    def __init__(
        self,
        *,
        shapes: Sequence[Shape],
        kinds: Sequence[str],
        vocabulary: Vocabulary,
        objects: Sequence[str],
        object_words: Sequence[str],
        ordered: Sequence[tuple[int, int]],
        mean: Sequence[float],
        std: Sequence[float],
        train_count: int,
        val_count: int,
        dense: bool,
        batch_size: int,
        eval_batch_size: int,
        seed: int,
    ) -> None:
        if not shapes:
            raise ValueError("images, several, videos: expected at least one training form, got none")
        if train_count < batch_size or val_count < 1:
            raise ValueError(
                f"train_count, val_count: expected at least one batch of {batch_size} rows and one row, got "
                f"{train_count} and {val_count}"
            )
        longest = max(max(shape.height, shape.width) for shape in shapes)
        super().__init__(batch_size=batch_size, eval_batch_size=eval_batch_size, image_size=longest, seed=seed)
        self.shapes = tuple(shapes)
        self.kinds = tuple(dict.fromkeys(kinds))
        self.vocabulary = vocabulary
        self.objects = tuple(objects)
        #: words of the objects of :meth:`cells` and of none
        self.object_words = tuple(vocabulary.index[word] for word in object_words)
        self.ordered = tuple(ordered)
        self.mean, self.std = tuple(mean), tuple(std)
        self.in_chans = len(self.mean)
        self.train_count, self.val_count = train_count, val_count
        self.dense = dense
        self.num_classes = len(vocabulary)
        self.class_names = vocabulary.words

    def facts(self) -> dict[str, Any]:
        tokens = [shape.tokens for shape in self.shapes]
        return {
            "name": self.name,
            "training forms": ", ".join(shape.name for shape in self.shapes),
            "visual tokens in training": f"{min(tokens)} to {max(tokens)}" if min(tokens) < max(tokens) else tokens[0],
            "words": len(self.vocabulary),
        }

    # -- what a data set says -----------------------------------------------------------------------------------------

    def row(self, split: str, shape: Shape, key: Any) -> tuple[list[View], list[Asked]]:
        """What a row shows and asks; the kinds of question come in one order in all rows of a batch."""
        raise NotImplementedError

    def views(self, split: str, shape: Shape, key: Any) -> list[View]:
        """What a row shows, when nothing is asked."""
        return self.row(split, shape, key)[0]

    def train_rows(self, index: Tensor, epoch: int) -> tuple[Shape, list[Any]]:
        """Form and keys of a training batch; a function of seed, epoch and sample numbers."""
        raise NotImplementedError

    def rows(self, split: str, shape: Shape, count: int) -> Iterator[list[Any]]:
        """Keys of each batch of at most ``count`` validation or test rows; the same in every run."""
        raise NotImplementedError

    def places(self, shape: Shape) -> Places | None:
        """The words for places in images of a form."""
        return None

    def check_shape(self, shape: Shape) -> None:
        """Raise where a form cannot be shown."""

    # -- loaders ------------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> BatchLoader:
        """Training rows; all rows of a batch have one form."""

        def fetch(index: Tensor, epoch: int) -> Any:
            return self.batch("train", *self.train_rows(index, epoch))

        return BatchLoader(self.order(self.train_count, train=True), stream_tensors(fetch))

    def val_dataloader(self) -> BatchLoader:
        """The same number of rows of every training form."""
        return self.shape_loader("val", self.shapes, self.val_count)

    def test_loader(self, size: int) -> tuple[BatchLoader, str]:
        raise ValueError(f"sizes: {self.name} has forms, not sizes; use evaluation=vlm, got {size}")

    def test_dataloader(self) -> BatchLoader:
        """Test rows of every training form."""
        return self.shape_loader("test", self.shapes, self.val_count)

    def test_forms(
        self,
        images: Sequence[Sequence[int]] | None = None,
        several: Sequence[Sequence[int]] | None = None,
        videos: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Shape, ...]:
        """Forms to test, as the options of the data set; where one is ``None`` those of training."""
        given = dict(zip(KINDS, (images, several, videos), strict=True))
        chosen = shapes_of(images or (), several or (), videos or (), self.shapes[0].cell)
        own = {kind: [form for form in self.shapes if form.kind == kind] for kind in KINDS}
        forms = {kind: [form for form in chosen if form.kind == kind] for kind in KINDS}
        found = tuple(f for kind in KINDS for f in (own[kind] if given[kind] is None else forms[kind]))
        if not found:
            raise ValueError("images, several, videos: no form to test; give at least one")
        for form in found:
            self.check_shape(form)
        return found

    def test_form(self, form: Shape, count: int) -> BatchLoader:
        """At most ``count`` test rows of a form."""
        return self.shape_loader("test", [form], count)

    def shape_loader(self, split: str, shapes: Sequence[Shape], count: int) -> BatchLoader:
        """At most ``count`` rows of each form, in batches of one form."""
        batches = [(shape, keys) for shape in shapes for keys in self.rows(split, shape, count)]

        def fetch(index: Tensor, epoch: int) -> Any:
            return self.batch(split, *batches[int(index[0])])

        ranks = self.order(len(batches) * self.eval_batch_size, train=False)
        world = ranks.global_batch // ranks.batch_size
        order = BatchOrder(len(batches), 1, shuffle=False, drop_last=False, rank=ranks.rank, world_size=world)
        return BatchLoader(order, stream_tensors(fetch))

    # -- batches ------------------------------------------------------------------------------------------------------

    def batch(self, split: str, shape: Shape, keys: Sequence[Any]) -> VlmBatch | DenseBatch:
        """Rows of one form."""
        return self.cells(split, shape, keys) if self.dense else self.questions(split, shape, keys)

    def cells(self, split: str, shape: Shape, keys: Sequence[Any]) -> DenseBatch:
        """The images of rows of one form, one after the other, with what lies in their cells."""
        views = [view for key in keys for view in self.views(split, shape, key)]
        labels, edges = (torch.stack(part) for part in zip(*(self._targets(v, shape) for v in views), strict=True))
        return DenseBatch(self._pixels(views), labels, edges)

    def questions(self, split: str, shape: Shape, keys: Sequence[Any]) -> VlmBatch:
        """Rows of one form with their questions."""
        rows = [self.row(split, shape, key) for key in keys]
        pixels = torch.stack([self._pixels(views) for views, _ in rows])
        blocks: list[Segment]
        if shape.kind == "video":
            blocks, parts, prompts = [Video(shape.count, shape.rows, shape.cols)], [pixels], [""]
        else:
            blocks = [Image(shape.rows, shape.cols)] * shape.count
            parts = [pixels[:, i : i + 1] for i in range(shape.count)]
            prompts = ["image" if shape.kind == "images" else ""] * shape.count
        boxes = {
            (number, which): question.box
            for number, (_, asked) in enumerate(rows)
            for which, question in enumerate(asked)
            if question.box is not None
        }
        asked = [[question[:3] for question in of_row] for _, of_row in rows]
        batch = assemble(self.vocabulary, parts, blocks, asked, prompts=prompts, boxes=boxes)
        batch.places = self.places(shape)
        batch.shown = torch.tensor([[question.view for question in of_row] for _, of_row in rows])
        words = torch.tensor(self.object_words)
        batch.names = torch.stack([torch.cat([words[self._targets(v, shape)[0]] for v in views]) for views, _ in rows])
        return batch

    def _pixels(self, views: Sequence[View]) -> Tensor:
        """Normalised images. Shape: ``(n, C, H, W)``."""
        pixels = torch.from_numpy(np.stack([view.pixels for view in views]))
        pixels = pixels[..., None] if pixels.dim() == 3 else pixels
        return self.normalise(pixels.movedim(-1, 1).float() / 255)

    def _targets(self, view: View, shape: Shape) -> tuple[Tensor, Tensor]:
        return dense_targets(view.objects, shape.rows, shape.cols, shape.cell, len(self.objects))
