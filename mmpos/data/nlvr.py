"""Sentences that people wrote about three drawn boxes, true or false, and questions about where things are in them.

Suhr, Lewis, Yeh, Artzi, *A Corpus of Natural Language for Visual Reasoning*, ACL 2017. Card: ``datasets/nlvr``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpos.data.boxed import EXTREMES, boxed_files, clear_extremes, read_images
from mmpos.data.images import resize, statistics
from mmpos.data.order import sample_seed
from mmpos.data.questions import ROW_SEEDS, Asked, QuestionData, Shape, View, shapes_of
from mmpos.data.vlm import Places, Vocabulary

__all__ = ["Nlvr", "nlvr_words"]

SIDE, STEP, PANELS = 100, 150, 3  # pixels of a panel, from one to the next, and how many there are
CELL = 12  # pixels of a visual token
BOX_STEP = 2  # pixels of a panel between two location words, at whatever size it is shown
COLOURS, FORMS = ("yellow", "black", "blue"), ("square", "circle", "triangle")
#: what a cell can hold, as one word
_OBJECTS = tuple(f"{colour}-{form}" for colour in COLOURS for form in FORMS)
#: the same in two words, as sentences and questions say it
_NAMES = tuple(f"{colour} {form}" for colour in COLOURS for form in FORMS)
_MARGIN = 3  # pixels by which the extreme one has to be ahead of the next
MAX_NUMBER = 9
#: what is asked about each picture
QUESTIONS = ("sentence", *["where"] * 3, *["count"] * 2, *["which"] * 2)


def words_of(sentence: str) -> list[str]:
    """Lower-case words of a sentence, without marks."""
    return re.findall(r"[a-z0-9']+", sentence.lower())


def nlvr_words(sentences: Sequence[str]) -> Vocabulary:
    """Words that occur twice or more in these sentences, and those of the other questions."""
    own = [
        *["where", "is", "the", "in", "how", "many", "which", "box", "holds", "true", "false", "nothing", "several"],
        *COLOURS,
        *FORMS,
        *_OBJECTS,
        *EXTREMES,
        *(f"#{number}" for number in range(MAX_NUMBER + 1)),
        *(f"[{place}]" for place in range(0, SIDE + 1, BOX_STEP)),
    ]
    counts = Counter(word for sentence in sentences for word in words_of(sentence))
    return Vocabulary([*own, *sorted(word for word, count in counts.items() if count > 1 and word not in own)])


class Nlvr(QuestionData):
    """Three panels with coloured shapes; is a sentence about them true, where is a shape, how many are there.

    The sentence is the task of the corpus. The other questions are made from the recorded objects: ``where is the
    highest blue square in box #2`` is answered by a box, ``how many black circle in box #1`` by a number, ``which box
    holds the yellow triangle`` by the panel, ``several`` or ``nothing``. A sentence stays true or false when the
    panels change places, as in the corpus itself, so training draws their order.

    Args:
        root: folder of the two files, see the card.
        batch_size: pictures of one process in one training batch; their sentences have equally many words.
        eval_batch_size: pictures of one validation or test batch.
        several: training forms, (panels, rows, cols) in tokens of 12 pixels; there are always three panels.
        train_count: pictures of an epoch, drawn anew with their questions.
        val_count: validation pictures of each form at most.
        val_fraction: part of the training sentences held out for validation, with all their pictures.
        shuffle: draw the order of the panels in training.
        dense: deal out what lies in each cell instead of questions, to train a tower alone.
        seed: seed of the training rows; the splits do not depend on it.
    """

    name = "nlvr"

    def __init__(
        self,
        *,
        root: str | Path | None,
        batch_size: int = 8,
        eval_batch_size: int = 50,
        several: Sequence[Sequence[int]] = ((3, 8, 8),),
        train_count: int = 6000,
        val_count: int = 100,
        val_fraction: float = 0.1,
        shuffle: bool = True,
        dense: bool = False,
        seed: int = 0,
    ) -> None:
        images, text = boxed_files(root, self.name, ".jsonl")
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction: expected a part between 0 and 1, got {val_fraction}")
        self.records = read_records(text)
        self._pictures = read_images(images, len(self.records), (SIDE, (PANELS - 1) * STEP + SIDE))
        self.splits = split_records(self.records, val_fraction)
        known = [self.records[i]["sentence"] for i in self.splits["train"]]
        words = nlvr_words(known)
        self._first_place = words.index["[0]"]
        shapes = shapes_of((), several, (), CELL)
        for shape in shapes:
            self.check_shape(shape)
        shown = np.stack([self._panel(int(i), k) for i in self.splits["train"][::7] for k in range(PANELS)])
        mean, std = statistics(torch.from_numpy(shown).movedim(-1, 1))
        super().__init__(
            shapes=shapes,
            kinds=QUESTIONS,
            vocabulary=words,
            objects=_OBJECTS,
            object_words=(*_OBJECTS, "nothing"),
            ordered=((words.index["#0"], MAX_NUMBER + 1), (self._first_place, SIDE // BOX_STEP + 1)),
            mean=mean,
            std=std,
            train_count=train_count,
            val_count=val_count,
            dense=dense,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            seed=seed,
        )
        self.shuffle = shuffle
        self.lengths = np.array([len(words_of(record["sentence"])) for record in self.records])

    def facts(self) -> dict[str, Any]:
        counts = ", ".join(f"{len(members):,} {split}" for split, members in self.splits.items())
        true = np.mean([self.records[i]["label"] for i in self.splits["test"]])
        return {
            **super().facts(),
            "pictures": counts,
            "training rows": f"{self.train_count:,} in each epoch, with new questions",
            "always the more frequent answer": f"{100 * max(true, 1 - true):.1f} % of the test sentences",
        }

    def check_shape(self, shape: Shape) -> None:
        if shape.kind != "images" or shape.count != PANELS or not 2 <= shape.rows == shape.cols <= 32:
            raise ValueError(
                f"several: expected [{PANELS}, side, side] with a side of 2 to 32 tokens of {CELL} pixels and no "
                f"images or videos, got {shape.name}"
            )

    def places(self, shape: Shape) -> Places:
        return Places(self._first_place, SIDE // BOX_STEP + 1, BOX_STEP * shape.height / SIDE)

    # -- rows, whose keys are (picture, seed) --------------------------------------------------------------------------

    def train_rows(self, index: Tensor, epoch: int) -> tuple[Shape, list[tuple[int, int]]]:
        draw = np.random.default_rng(sample_seed(self.seed, epoch, int(index[0])))
        members = self.splits["train"]
        length = self.lengths[draw.choice(members)]  # as often as it occurs
        fitting = members[self.lengths[members] == length]
        shape = self.shapes[int(draw.integers(len(self.shapes)))]
        out = []
        for i in index:
            seed = sample_seed(self.seed, epoch, int(i))
            out.append((int(np.random.default_rng(seed).choice(fitting)), seed))
        return shape, out

    def rows(self, split: str, shape: Shape, count: int) -> Iterator[list[tuple[int, int]]]:
        members = self.splits[split][:count]
        for length in np.unique(self.lengths[members]):
            fitting = [int(i) for i in members[self.lengths[members] == length]]
            for first in range(0, len(fitting), self.eval_batch_size):
                chosen = fitting[first : first + self.eval_batch_size]
                yield [(number, sample_seed(ROW_SEEDS[split], 0, number)) for number in chosen]

    def row(self, split: str, shape: Shape, key: tuple[int, int]) -> tuple[list[View], list[Asked]]:
        number, seed = key
        draw = np.random.default_rng(seed)
        order = [int(k) for k in draw.permutation(PANELS)] if split == "train" and self.shuffle else range(PANELS)
        record = self.records[number]
        panels = [record["boxes"][k] for k in order]
        views = [self._view(number, k, shape) for k in order]
        return views, questions_of(record, panels, shape.height / SIDE, draw)

    def _panel(self, number: int, which: int) -> np.ndarray:
        return self._pictures[number][:, STEP * which : STEP * which + SIDE]

    def _view(self, number: int, which: int, shape: Shape) -> View:
        pixels = torch.from_numpy(self._panel(number, which).copy()).movedim(-1, 0)[None].float()
        resized = resize(pixels, shape.height)[0].round().clamp(0, 255).to(torch.uint8)
        scale = shape.height / SIDE
        objects = [
            (_NAMES.index(name_of(item)), [scale * edge for edge in box_of(item)])
            for item in self.records[number]["boxes"][which]
        ]
        return View(resized.movedim(0, -1).numpy(), objects)


def box_of(item: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Box of an object in pixels of its panel."""
    x, y, size = item["x"], item["y"], item["size"]
    return x, y, min(x + size, SIDE), min(y + size, SIDE)


def questions_of(
    record: Mapping[str, Any], panels: Sequence[Sequence[Mapping[str, Any]]], scale: float, draw: np.random.Generator
) -> list[Asked]:
    """The sentence and questions about the objects of panels in the order they are shown."""
    out = [Asked("sentence", " ".join(words_of(record["sentence"])), "true" if record["label"] else "false")]
    names = [[name_of(item) for item in panel] for panel in panels]
    clear = [(which, *entry) for which, panel in enumerate(panels) for entry in clear_objects(panel)]
    wanted = QUESTIONS.count("where")
    for chosen in draw.choice(len(clear), wanted, replace=len(clear) < wanted):
        which, extreme, name, box = clear[int(chosen)]
        places = [f"[{BOX_STEP * round(edge / BOX_STEP)}]" for edge in box]
        edges = [scale * edge for edge in box]
        out.append(Asked("where", f"where is the {extreme} {name} in box #{which + 1}", " ".join(places), edges, which))
    for _ in range(QUESTIONS.count("count")):
        which = int(draw.integers(len(panels)))
        name = str(draw.choice(names[which] if names[which] and draw.random() < 0.75 else _NAMES))
        out.append(Asked("count", f"how many {name} in box #{which + 1}", f"#{names[which].count(name)}"))
    alone = [name for name in _NAMES if sum(name in of for of in names) == 1]
    for _ in range(QUESTIONS.count("which")):
        name = str(draw.choice(alone if alone and draw.random() < 0.7 else _NAMES))
        holders = [which for which, of in enumerate(names) if name in of]
        answer = "nothing" if not holders else "several" if len(holders) > 1 else f"#{holders[0] + 1}"
        out.append(Asked("which", f"which box holds the {name}", answer))
    return out


def name_of(item: Mapping[str, Any]) -> str:
    """``blue square``."""
    return f"{item['color']} {item['shape']}"


def clear_objects(panel: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, tuple[int, int, int, int]]]:
    """(extreme, name, box) of every object that is the highest, lowest ... of its name by a clear margin."""
    out = []
    for name in sorted({name_of(item) for item in panel}):
        boxes = [box_of(item) for item in panel if name_of(item) == name]
        out += [(extreme, name, boxes[which]) for extreme, which in clear_extremes(boxes, _MARGIN)]
    return out


def read_records(path: Path) -> list[dict[str, Any]]:
    """Pictures of a file, with objects in the words of this module."""
    out = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        record = json.loads(line)
        missing = sorted({"id", "split", "sentence", "label", "boxes"} - set(record))
        if missing:
            raise ValueError(
                f"root: line {number + 1} of {path} lacks {', '.join(missing)}; see datasets/nlvr/README.md"
            )
        if len(record["boxes"]) != PANELS or not any(record["boxes"]):
            raise ValueError(f"root: line {number + 1} of {path} has to hold {PANELS} panels, not all of them empty")
        for item in (item for panel in record["boxes"] for item in panel):
            item["color"], item["shape"] = str(item["color"]).lower(), str(item["shape"]).lower()
            if item["color"] not in COLOURS or item["shape"] not in FORMS:
                raise ValueError(
                    f"root: line {number + 1} of {path} has a {item['color']} {item['shape']}; expected colours "
                    f"{', '.join(COLOURS)} and shapes {', '.join(FORMS)}"
                )
        out.append(record)
    return out


def split_records(records: Sequence[Mapping[str, Any]], val_fraction: float) -> dict[str, np.ndarray]:
    """Numbers of the pictures of each split; all pictures that one sentence was written for stay together."""
    group = [str(record["id"]).rsplit("-", 1)[0] for record in records]
    test = [i for i, record in enumerate(records) if record["split"] == "test"]
    rest = [i for i, record in enumerate(records) if record["split"] != "test"]
    names = sorted({group[i] for i in rest})
    chosen = np.random.default_rng(1).permutation(len(names))[: max(1, round(val_fraction * len(names)))]
    held = {names[int(i)] for i in chosen}
    out = {
        "train": np.array([i for i in rest if group[i] not in held], dtype=np.int64),
        "val": np.array([i for i in rest if group[i] in held], dtype=np.int64),
        "test": np.array(test, dtype=np.int64),
    }
    for split, members in out.items():
        if not len(members):
            raise ValueError(f"root: no picture is left for {split}; expected split train and test and some sentences")
    return out
