"""What the data of a small vision-language model consist of: words, batches with questions, and how answers count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmpos.multimodal.segments import Segment, Text

__all__ = [
    "IGNORED",
    "DenseBatch",
    "Places",
    "Question",
    "VlmBatch",
    "Vocabulary",
    "assemble",
    "box_overlap",
    "dense_targets",
]

#: label of a token whose prediction does not count
IGNORED = -100


class Vocabulary:
    """Whole words and special tokens, each with a number.

    Args:
        words: all words besides ``<pad>``, ``<image>``, ``<start>``, ``<end>`` and ``<unknown>``, which come first.

    Example:
        >>> words = Vocabulary(["where", "is"])
        >>> words.encode("where is it"), words.decode([5, 6])
        ([5, 6, 4], 'where is')
    """

    SPECIAL = ("<pad>", "<image>", "<start>", "<end>", "<unknown>")
    PAD, IMAGE, START, END, UNKNOWN = range(5)

    def __init__(self, words: Iterable[str]) -> None:
        self.words = (*self.SPECIAL, *words)
        self.index = {word: number for number, word in enumerate(self.words)}
        if len(self.index) != len(self.words):
            twice = sorted({word for word in self.words if self.words.count(word) > 1})
            raise ValueError(f"words: expected different words, got {', '.join(twice)} more than once")

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """Numbers of the words of a text; words that are not known become ``<unknown>``."""
        return [self.index.get(word, self.UNKNOWN) for word in text.split()]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of token numbers."""
        return " ".join(self.words[int(token)] for token in tokens)


@dataclass(frozen=True)
class Places:
    """Words for places along one axis.

    Args:
        first: token number of the place at 0 pixels.
        count: number of places.
        step: pixels between two of them.
    """

    first: int
    count: int
    step: float

    def holds(self, tokens: Tensor) -> Tensor:
        """Which tokens are places."""
        return (tokens >= self.first) & (tokens < self.first + self.count)

    def pixels(self, tokens: Tensor) -> Tensor:
        """Pixels of places, 0 for other words."""
        return (tokens - self.first).double() * self.step * self.holds(tokens)


@dataclass(frozen=True)
class Question:
    """Where a question stands in every row of a batch.

    Args:
        kind: what is asked, a key of the accuracies.
        first: slot of its first token.
        answer: slot of the first token of its answer.
        length: tokens of the answer, without ``<end>``.
    """

    kind: str
    first: int
    answer: int
    length: int


@dataclass
class VlmBatch:
    """Rows of one structure: the same images or videos and kinds of question in the same slots.

    Args:
        pixels: images, tiles or frames of every visual block, normalised.
        segments: what a row is made of, one row for all.
        tokens: token numbers, questions and right answers.
        labels: the token each slot should hold, :data:`IGNORED` where nothing is learned. The model predicts slot
            ``i`` from slot ``i - 1``.
        branch: 0 for what every question sees, ``k`` for the tokens of question ``k``, which only they see.
        questions: where the questions stand, in order of their branches.
        boxes: the right box of each question that has one, ``x0, y0, x1, y1`` in pixels (else zeros).
        places: the words for places, where there are such.
        shown: in which image or frame the box of each question lies.
        names: token number of the word for what lies in each visual token, where that is known.

    Shape:
        pixels each ``(B, n, C, H, W)``, tokens and labels ``(B, L)``, branch ``(L,)``, boxes ``(B, questions, 4)``,
        shown ``(B, questions)``, names ``(B, visual tokens)``.
    """

    pixels: list[Tensor]
    segments: tuple[Segment, ...]
    tokens: Tensor
    labels: Tensor
    branch: Tensor
    questions: tuple[Question, ...]
    boxes: Tensor
    places: Places | None = None
    shown: Tensor | None = None
    names: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: Any, **options: Any) -> VlmBatch:
        """The batch on another device."""
        names = ("tokens", "labels", "branch", "boxes")
        moved: dict[str, Any] = {name: getattr(self, name).to(device, **options) for name in names}
        for name, part in (("shown", self.shown), ("names", self.names)):
            moved[name] = None if part is None else part.to(device, **options)
        return replace(self, pixels=[block.to(device, **options) for block in self.pixels], **moved)


@dataclass
class DenseBatch:
    """Images and what lies in each of their cells.

    Args:
        pixels: normalised images.
        labels: class of the object that covers most of each cell; the number of classes where none covers a quarter.
        edges: distances from the middle of each cell to the left, upper, right and lower edge of that object, in cells.

    Shape:
        pixels ``(N, C, H, W)``, labels ``(N, cells)``, edges ``(N, cells, 4)``.
    """

    pixels: Tensor
    labels: Tensor
    edges: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def to(self, device: Any, **options: Any) -> DenseBatch:
        """The batch on another device."""
        return DenseBatch(*(part.to(device, **options) for part in (self.pixels, self.labels, self.edges)))


def dense_targets(
    objects: Sequence[tuple[int, Sequence[float]]], rows: int, cols: int, cell: int, none: int
) -> tuple[Tensor, Tensor]:
    """Class and edges for every cell of an image.

    Args:
        objects: (class, box) of each object, boxes as x0, y0, x1, y1 in pixels.
        rows: cells along the height.
        cols: cells along the width.
        cell: pixels of a cell.
        none: class of cells no object covers a quarter of.

    Shape:
        Returns ``(rows * cols,)`` and ``(rows * cols, 4)``.
    """
    top, left = torch.meshgrid(torch.arange(rows) * cell, torch.arange(cols) * cell, indexing="ij")
    low = torch.stack([left, top], dim=-1).flatten(0, 1).float()
    if not objects:
        return torch.full((rows * cols,), none), torch.zeros(rows * cols, 4)
    boxes = torch.tensor([list(box) for _, box in objects], dtype=torch.float32)
    first, last = torch.maximum(low[:, None], boxes[:, :2]), torch.minimum(low[:, None] + cell, boxes[:, 2:])
    covered, which = (last - first).clamp_min(0).prod(-1).max(1)
    classes = torch.tensor([label for label, _ in objects])[which]
    middle = low + cell / 2
    edges = torch.cat([middle - boxes[which, :2], boxes[which, 2:] - middle], dim=-1) / cell
    return torch.where(covered >= cell**2 / 4, classes, none), edges


def assemble(
    words: Vocabulary,
    pixels: Sequence[Tensor],
    blocks: Sequence[Segment],
    asked: Sequence[Sequence[tuple[str, str, str]]],
    *,
    prompts: Sequence[str] = (),
    boxes: Mapping[tuple[int, int], Sequence[float]] | None = None,
) -> VlmBatch:
    """A batch from visual blocks and questions.

    Args:
        words: vocabulary.
        pixels: as in :class:`VlmBatch`.
        blocks: the visual segments, one for each entry of ``pixels``.
        asked: for each row its questions as (kind, question, answer); question ``k`` has as many words in every row,
            and so has its answer.
        prompts: text before each block.
        boxes: right boxes by (row, question).
    """
    prompts = prompts or [""] * len(blocks)
    segments: list[Segment] = [Text(1)]
    prefix: list[int] = [Vocabulary.START]
    for prompt, block in zip(prompts, blocks, strict=True):
        before = words.encode(prompt)
        if before:
            segments.append(Text(len(before)))
        segments.append(block)
        prefix += [*before, *[Vocabulary.IMAGE] * _tokens_of(block)]
    count = len(asked[0])
    columns: list[Tensor] = [torch.tensor(prefix).expand(len(asked), -1)]
    labels: list[Tensor] = [torch.full_like(columns[0], IGNORED)]
    branch, questions, slot = [torch.zeros(len(prefix), dtype=torch.long)], [], len(prefix)
    for number in range(count):
        kinds = {row[number][0] for row in asked}
        question = _block(words, [row[number][1] for row in asked], number)
        answer = _block(words, [f"{row[number][2]} <end>" for row in asked], number)
        if len(kinds) > 1:
            raise ValueError(f"asked: question {number} has to be of one kind in every row, got {sorted(kinds)}")
        length = question.shape[1] + answer.shape[1]
        columns += [question, answer]
        labels += [torch.full_like(question, IGNORED), answer]
        branch.append(torch.full((length,), number + 1))
        segments.append(Text(length, shared=True))
        questions.append(Question(kinds.pop(), slot, slot + question.shape[1], answer.shape[1] - 1))
        slot += length
    found = torch.zeros(len(asked), count, 4)
    for (row, number), box in (boxes or {}).items():
        found[row, number] = torch.tensor(box)
    return VlmBatch(
        list(pixels),
        tuple(segments),
        torch.cat(columns, dim=1),
        torch.cat(labels, dim=1),
        torch.cat(branch),
        tuple(questions),
        found,
    )


def _tokens_of(block: Segment) -> int:
    from mmpos.multimodal.segments import tokens_from_segments

    return int(tokens_from_segments([[block]]).kind.shape[1])


def _block(words: Vocabulary, texts: Sequence[str], number: int) -> Tensor:
    rows = [words.encode(text) for text in texts]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"asked: question {number} and its answer need as many words in every row, got "
            f"{sorted({len(row) for row in rows})} words"
        )
    return torch.tensor(rows)


def box_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes. Shape: ``(..., 4)`` as x0, y0, x1, y1, twice; returns ``(...)``."""
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    inside = (high - low).clamp_min(0).prod(-1)
    area = lambda box: (box[..., 2:] - box[..., :2]).clamp_min(0).prod(-1)  # noqa: E731
    return inside / (area(a) + area(b) - inside).clamp_min(1e-9)
