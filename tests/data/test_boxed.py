"""Questions about NLVR pictures and BCCD photographs: answers follow from the boxes, splits do not meet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmpos.data import create_data
from mmpos.data.bccd import Bccd, Photo, clear_objects
from mmpos.data.nlvr import Nlvr, words_of
from mmpos.data.nlvr import clear_objects as clear_shapes
from mmpos.data.order import sample_seed
from mmpos.data.questions import Shape
from mmpos.data.vlm import box_overlap
from mmpos.evaluation.answers import right_answers
from tests.data.boxed_files import COLOURS, pack, write_bccd, write_nlvr

pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def nlvr(tmp_path_factory: pytest.TempPathFactory) -> Nlvr:
    folder = tmp_path_factory.mktemp("nlvr")
    write_nlvr(folder)
    made = create_data("nlvr", root=folder, batch_size=4, train_count=16, val_fraction=0.2, eval_batch_size=3)
    assert isinstance(made, Nlvr)
    return made


@pytest.fixture(scope="module")
def bccd(tmp_path_factory: pytest.TempPathFactory) -> Bccd:
    folder = tmp_path_factory.mktemp("bccd")
    write_bccd(folder)
    made = create_data("bccd", root=folder, batch_size=3, train_count=12, images=[[5, 8], [8, 5]], eval_batch_size=2)
    assert isinstance(made, Bccd)
    return made


def test_words_and_extremes_by_hand() -> None:
    assert words_of("There's ONE tower, with 4 blocks.") == ["there's", "one", "tower", "with", "4", "blocks"]
    item = lambda x, y, color: {"x": x, "y": y, "size": 10, "shape": "circle", "color": color}  # noqa: E731
    found = clear_shapes([item(0, 50, "blue"), item(40, 52, "blue"), item(90, 95, "black")])
    # two blue circles at nearly one height: only left and right are clear; the edge of the panel cuts the black one
    assert sorted(entry for entry in found if entry[1] == "blue circle") == [
        ("left-most", "blue circle", (0, 50, 10, 60)),
        ("right-most", "blue circle", (40, 52, 50, 62)),
    ]
    assert {entry[2] for entry in found if entry[1] == "black circle"} == {(90, 95, 100, 100)}


def test_answers_about_panels_follow_from_their_pixels(nlvr: Nlvr) -> None:
    shape = Shape("images", 3, 8, 8, cell=12)
    numbers = {name.lower(): colour for name, colour in COLOURS.items()}
    kinds = set()
    for key in ((int(number), seed) for number in nlvr.splits["train"][:8] for seed in range(4)):
        views, asked = nlvr.row("train", shape, key)
        record = nlvr.records[key[0]]
        assert asked[0][:3] == (
            "sentence",
            " ".join(words_of(record["sentence"])),
            "true" if record["label"] else "false",
        )
        held = [{nlvr.objects[label] for label, _ in view.objects} for view in views]
        for kind, question, answer, box, which in asked[1:]:
            kinds.add(kind)
            words = question.split()
            if kind == "where":
                colour = np.array(numbers[words[4]])
                assert words[-1] == f"#{which + 1}"
                x0, y0, x1, y1 = (round(edge) for edge in box or ())
                inside = views[which].pixels[y0 + 2 : y1 - 2, x0 + 2 : x1 - 2].astype(int)
                assert np.abs(inside - colour).max() < 8
                places = [int(word[1:-1]) for word in answer.split()]
                assert max(abs(0.96 * a - b) for a, b in zip(places, box or (), strict=True)) <= 1.0
            elif kind == "count":
                panel = views[int(words[-1][1:]) - 1]
                name = f"{words[2]}-{words[3]}"
                assert answer == f"#{sum(nlvr.objects[label] == name for label, _ in panel.objects)}"
            else:
                holders = [number for number, names in enumerate(held) if f"{words[4]}-{words[5]}" in names]
                assert answer == ("nothing" if not holders else "several" if len(holders) > 1 else f"#{holders[0] + 1}")
    assert kinds == {"where", "count", "which"}


def test_panels_change_places_in_training_only(nlvr: Nlvr) -> None:
    shape = nlvr.shapes[0]
    number = int(nlvr.splits["train"][0])
    stored = [nlvr._view(number, k, shape).pixels.tobytes() for k in range(3)]
    orders = set()
    for seed in range(40):
        shown = [view.pixels.tobytes() for view in nlvr.row("train", shape, (number, seed))[0]]
        assert sorted(shown) == sorted(stored)
        orders.add(tuple(stored.index(pixels) for pixels in shown))
    assert len(orders) == 6
    for split in ("val", "test"):
        number = int(nlvr.splits[split][0])
        shown = [view.pixels.tobytes() for view in nlvr.row(split, shape, (number, 3))[0]]
        assert shown == [nlvr._view(number, k, shape).pixels.tobytes() for k in range(3)]


def test_sentences_of_a_batch_have_one_length_and_none_is_lost(nlvr: Nlvr) -> None:
    loader = nlvr.test_form(nlvr.shapes[0], 100)
    sentences = []
    for batch in loader:
        question = batch.questions[0]
        sentences += [nlvr.vocabulary.decode(row[question.first : question.answer]) for row in batch.tokens]
        assert bool(right_answers(batch, batch.tokens).all())
        assert {block.shape[1:] for block in batch.pixels} == {(1, 3, 96, 96)}
    assert len(sentences) == 8
    known = [" ".join(words_of(nlvr.records[int(i)]["sentence"])) for i in nlvr.splits["test"]]
    assert sorted(sentences) == sorted(known)
    assert sum(len(batch) for batch in nlvr.test_form(nlvr.shapes[0], 5)) == 5
    assert [len(batch) for batch in nlvr.train_dataloader()] == [4, 4, 4, 4]


def test_pictures_of_one_sentence_stay_in_one_split(nlvr: Nlvr) -> None:
    groups = {
        split: {nlvr.records[int(i)]["id"].rsplit("-", 1)[0] for i in members} for split, members in nlvr.splits.items()
    }
    assert {split: len(found) for split, found in groups.items()} == {"train": 6, "val": 2, "test": 2}
    assert not groups["train"] & groups["val"]
    assert sum(map(len, nlvr.splits.values())) == 40


def test_answers_about_photographs_follow_from_their_pixels(bccd: Bccd) -> None:
    colours = np.array([(200, 80, 80), (90, 60, 180), (120, 120, 220)])
    names = ["red-cell", "white-cell", "platelet"]
    seen = set()
    for shape in bccd.shapes:
        for seed in range(30):
            (view,), asked = bccd.row("train", shape, (seed % 3, sample_seed(0, 0, seed)))
            assert view.pixels.shape == (shape.height, shape.width, 3)
            for label, (x0, y0, x1, y1) in view.objects:  # mirrored with the picture, cut at its border
                assert 0 <= x0 < x1 <= shape.width
                assert 0 <= y0 < y1 <= shape.height
                assert (view.pixels[int(y0) : int(y1), int(x0) : int(x1)] == colours[label]).all()
            boxes = {label: [box for of, box in view.objects if of == label] for label in range(3)}
            for kind, question, answer, box, _ in asked:
                words = question.split()
                if kind == "count":
                    assert answer == f"#{len(boxes[names.index(words[2])])}"
                elif kind == "what":
                    x, y = (int(word[1:-1]) for word in words[3:])
                    matches = np.flatnonzero((view.pixels[y, x] == colours).all(1))
                    assert answer == ("nothing" if not len(matches) else names[int(matches[0])])
                    seen.add(answer)
                else:
                    of = boxes[names.index(words[4])]
                    assert box in of
                    middles = np.array([((b[0] + b[2]) / 2, (b[1] + b[3]) / 2) for b in of])
                    axis, sign = {
                        "left-most": (0, 1),
                        "right-most": (0, -1),
                        "highest": (1, 1),
                        "lowest": (1, -1),
                        "only": (0, 0),
                    }[words[3]]
                    assert (len(of) == 1) == (words[3] == "only")
                    assert of.index(box) == int(np.argmin(sign * middles[:, axis])) or words[3] == "only"
                    seen.add(words[3])
    assert seen == {"nothing", *names, "only", "left-most", "right-most", "highest", "lowest"}


def test_crops_keep_what_has_its_middle_inside() -> None:
    photo = Photo(np.zeros((240, 320, 3), np.uint8), ((0, (10.0, 10.0, 50.0, 40.0)), (2, (90.0, 20.0, 110.0, 44.0))))
    crop = photo.crop(16, 20, 80, 84)
    assert crop.objects == ((0, (0.0, 0.0, 30.0, 24.0)), (2, (70.0, 4.0, 84.0, 28.0)))
    assert photo.crop(16, 32, 80, 80).objects == ((2, (58.0, 4.0, 78.0, 28.0)),)
    turned = photo.flipped(True, True)
    assert turned.objects[0] == (0, (270.0, 200.0, 310.0, 230.0))
    assert turned.flipped(True, True).objects == photo.objects
    near = Photo(photo.pixels, ((0, (0.0, 0.0, 20.0, 20.0)), (0, (4.0, 60.0, 24.0, 80.0))))
    assert sorted(entry[1] for entry in clear_objects(near)) == ["highest", "lowest"]  # 4 pixels apart along x


def test_photographs_come_once_and_in_their_split(bccd: Bccd) -> None:
    for shape in (*bccd.shapes, Shape("image", 1, 15, 20, cell=16)):
        batches = list(bccd.test_form(shape, 50))
        assert [len(batch) for batch in batches] == [2, 1]
        assert all(bool(right_answers(batch, batch.tokens).all()) for batch in batches)
        again = list(bccd.test_form(shape, 2))
        assert torch.equal(again[0].tokens, batches[0].tokens)
    whole = next(iter(bccd.test_form(Shape("image", 1, 15, 20, cell=16), 1)))
    pixels = whole.pixels[0][0, 0] * torch.tensor(bccd.std)[:, None, None] + torch.tensor(bccd.mean)[:, None, None]
    stored = torch.from_numpy(bccd.photos["test"][0].pixels).movedim(-1, 0).float() / 255
    torch.testing.assert_close(pixels, stored, atol=1e-5, rtol=0)


def test_dense_labels_come_with_every_panel(nlvr: Nlvr, bccd: Bccd) -> None:
    cells = nlvr.cells("val", nlvr.shapes[0], [(int(i), 0) for i in nlvr.splits["val"][:2]])
    assert tuple(cells.pixels.shape) == (6, 3, 96, 96)
    assert tuple(cells.labels.shape) == (6, 64)
    assert bool((cells.labels < 9).any(1).all())
    crops = bccd.cells("train", bccd.shapes[0], [(0, 1), (1, 2)])
    assert tuple(crops.labels.shape) == (2, 40)
    names = bccd.questions("train", bccd.shapes[0], [(0, 1), (1, 2)]).names
    assert names is not None
    assert torch.equal(names, torch.tensor(bccd.object_words)[crops.labels])


def test_wrong_files_and_options_are_named(tmp_path: Path, nlvr: Nlvr) -> None:
    for name in ("nlvr", "bccd"):
        with pytest.raises(ValueError, match=rf"give data.root=<folder>.*datasets/{name}/README.md"):
            create_data(name, root=None)
        with pytest.raises(FileNotFoundError, match=f"data {name} looked in .*it is not there"):
            create_data(name, root=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"0 \.npz files, 0 \.json files, expected one of each"):
        create_data("bccd", root=tmp_path)
    pack([np.zeros((240, 320, 3), np.uint8)] * 2, tmp_path / "a.npz", "jpeg")
    told = {"classes": ["a", "b", "c"], "images": [{"split": "train", "boxes": [[0, 0, 9, 9, 0]]}] * 2}
    text = tmp_path / "a.json"
    for change, message in (
        ({"classes": ["a"]}, "expected red cells, white cells and platelets"),
        ({"images": told["images"][:1]}, "holds 2 images, the text beside it tells of 1"),
        ({}, "no annotated photograph for val"),
        ({"images": [{"split": "dev", "boxes": []}] * 2}, "has a split 'dev'"),
    ):
        text.write_text(json.dumps({**told, **change}))
        with pytest.raises(ValueError, match=message):
            create_data("bccd", root=tmp_path)
    pack([np.zeros((100, 400, 3), np.uint8)] * 2, tmp_path / "a.npz", "png")
    record = {"id": "dev-1-0", "split": "train", "sentence": "a", "label": True}
    item = {"x": 0, "y": 0, "size": 10, "shape": "square", "color": "Blue"}
    for boxes, message in (
        ([[item], []], "has to hold 3 panels"),
        ([[{**item, "color": "red"}], [], []], "has a red square; expected colours yellow"),
    ):
        (tmp_path / "a.jsonl").write_text(json.dumps({**record, "boxes": boxes}))
        with pytest.raises(ValueError, match=message):
            create_data("nlvr", root=tmp_path)
    with pytest.raises(ValueError, match="several: expected"):
        nlvr.test_forms(images=[[4, 4]])
    with pytest.raises(ValueError, match="several: expected"):
        nlvr.test_forms(several=[[2, 8, 8]])


def test_real_pictures_show_what_their_boxes_say(data_dir: Path) -> None:
    root = data_dir / "nlvr_small"
    if not root.is_dir():
        pytest.skip(f"needs {root}")
    data = create_data("nlvr", root=root)
    assert isinstance(data, Nlvr)
    assert {split: len(members) for split, members in data.splits.items()} == {"train": 1772, "val": 202, "test": 990}
    colours = {"yellow": (255, 255, 0), "black": (0, 0, 0), "blue": (0, 153, 255)}
    shape = Shape("images", 3, 8, 8, cell=12)
    for number in data.splits["test"][:60]:
        views, _ = data.row("test", shape, (int(number), 0))
        for view in views:
            for label, (x0, y0, x1, y1) in view.objects:
                wanted = np.array(colours[data.objects[label].split("-")[0]])
                at = view.pixels[round((y0 + 2 * y1) / 3), round((x0 + x1) / 2)]
                assert np.abs(at.astype(int) - wanted).max() < 60


def test_real_photographs_and_their_white_cells(data_dir: Path) -> None:
    root = data_dir / "bccd_boxes"
    if not root.is_dir():
        pytest.skip(f"needs {root}")
    data = create_data("bccd", root=root)
    assert isinstance(data, Bccd)
    assert {split: len(photos) for split, photos in data.photos.items()} == {"train": 205, "val": 87, "test": 72}
    bluer = []
    for photo in data.photos["test"]:
        for label, (x0, y0, x1, y1) in photo.objects:
            if label == 1:  # stained: less red than the picture around it
                inside = photo.pixels[int(y0) : int(y1), int(x0) : int(x1), 0].mean()
                bluer.append(inside < photo.pixels[..., 0].mean())
    assert np.mean(bluer) > 0.9
    overlap = box_overlap(torch.tensor([[0.0, 0, 20, 20]]), torch.tensor([[2.0, 2, 22, 22]]))
    assert float(overlap) > 0.5  # what steps of four pixels can do to the box of a platelet
