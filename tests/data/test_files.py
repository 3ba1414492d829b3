"""Image folders and tar shards."""

import io
import random
import tarfile

import numpy as np
import pytest
import torch

from mmpos.data import create_data
from mmpos.data.images import ENLARGED, REAL
from mmpos.data.transforms import FileTransform, seeded

pytest.importorskip("timm")
Image = pytest.importorskip("PIL.Image")


def picture(seed, height=20, width=26):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", 6), ("val", 3)):
        for number, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                picture(100 * number + i).save(root / split / name / f"{i}.png")
    return root


def folder_data(root, **options):
    return create_data(
        "image_folder",
        root=root,
        **{"batch_size": 4, "eval_batch_size": 4, "image_size": 16, "num_workers": 0, **options},
    )


def test_folder(folder):
    data = folder_data(folder)
    assert data.class_names == ("cat", "dog")
    assert len(data.train_dataloader()) == 3
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (4, 3, 16, 16)
    assert sorted(torch.cat([y for _, y in data.val_dataloader()]).tolist()) == [0, 0, 0, 1, 1, 1]
    assert labels.dtype == torch.int64


def test_folder_evaluation_size_and_origin(folder):
    data = folder_data(folder, crop_pct=0.8)
    loader, origin = data.test_loader(16)  # needs a short side of 20, which the images have
    assert origin == REAL
    loader, origin = data.test_loader(24)
    assert origin == ENLARGED
    assert next(iter(loader))[0].shape == (4, 3, 24, 24)


@pytest.mark.parametrize(
    "options", [{}, {"auto_augment": "rand-m9-mstd0.5-inc1", "erasing": 0.5}, {"auto_augment": "3a"}]
)
def test_folder_augmentation_is_a_function_of_seed_epoch_and_index(folder, options):
    def epoch(number, **more):
        torch.manual_seed(random.randrange(10**6))  # whatever the global state is
        loader = folder_data(folder, **options, **more).train_dataloader()
        loader.sampler.set_epoch(number)
        return torch.cat([images for images, _ in loader])

    first = epoch(1)
    assert torch.equal(first, epoch(1))
    assert not torch.equal(first, epoch(2))
    assert not torch.equal(first, epoch(1, seed=9))
    assert torch.equal(
        first[:6], torch.cat([x for x, _ in _at_epoch(folder_data(folder, batch_size=6, **options), 1)])[:6]
    )


def _at_epoch(data, epoch):
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return loader


@pytest.mark.slow
def test_folder_workers_do_not_change_the_images(folder):
    alone = torch.cat([images for images, _ in folder_data(folder).train_dataloader()])
    workers = torch.cat([images for images, _ in folder_data(folder, num_workers=2).train_dataloader()])
    assert torch.equal(alone, workers)


def test_missing_folder_says_where_it_looked(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"looked for .*/train and it is not there.*datasets/image_folder/README\.md"
    ):
        folder_data(tmp_path)


def test_folder_with_other_validation_classes(tmp_path):
    for split, name in (("train", "cat"), ("val", "cow")):
        (tmp_path / split / name).mkdir(parents=True)
        picture(0).save(tmp_path / split / name / "0.png")
    with pytest.raises(ValueError, match=r"different classes, such as \['cat', 'cow'\]"):
        folder_data(tmp_path)


def test_seeded_restores_every_generator():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    expected = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    with seeded(7):
        inside = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected  # noqa: NPY002
    with seeded(7):
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == inside  # noqa: NPY002


def test_erasing_acts():
    transform = FileTransform(16, scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0, color_jitter=0.0, erasing=1.0).train()
    plain = FileTransform(16, scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0.0, color_jitter=0.0).train()
    with seeded(3):
        erased = transform(picture(0, 16, 16))
    with seeded(3):
        kept = plain(picture(0, 16, 16))
    changed = (erased != kept).any(0)
    assert 0 < int(changed.sum()) < 256


# -- shards -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    number = 0
    for split, files, count in (("train", 4, 6), ("val", 2, 5)):
        for shard in range(files):
            with tarfile.open(root / f"{split}-{shard:02d}.tar", "w") as archive:
                for _ in range(count):
                    buffer = io.BytesIO()
                    picture(number).save(buffer, "PNG")
                    for name, content in (
                        (f"{number:04d}.png", buffer.getvalue()),
                        (f"{number:04d}.cls", str(number % 20).encode()),
                    ):
                        entry = tarfile.TarInfo(name)
                        entry.size = len(content)
                        archive.addfile(entry, io.BytesIO(content))
                    number += 1
    return root


def shard_data(root, **options):
    pytest.importorskip("webdataset")
    arguments = {
        "train_count": 24,
        "num_classes": 20,
        "batch_size": 4,
        "eval_batch_size": 4,
        "image_size": 16,
        "shuffle_buffer": 5,
    }
    return create_data(
        "webdataset", **{"train_shards": str(root), "val_shards": str(root), "num_workers": 0, **arguments, **options}
    )


def stream(data, epoch=0):
    return [(labels.tolist(), images) for images, labels in _at_epoch(data, epoch)]


def test_shards_deal_an_epoch(shards):
    batches = stream(shard_data(shards))
    assert [len(labels) for labels, _ in batches] == [4] * 6
    validation = [label for _, labels in shard_data(shards).val_dataloader() for label in labels.tolist()]
    assert validation == [number % 20 for number in range(24, 34)]


def test_shards_repeat_and_change_with_the_epoch(shards):
    first, again, other = stream(shard_data(shards)), stream(shard_data(shards)), stream(shard_data(shards), epoch=1)
    assert [labels for labels, _ in first] == [labels for labels, _ in again]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, again, strict=True))
    assert [labels for labels, _ in first] != [labels for labels, _ in other]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stop", [1, 3])
def test_shards_resume_in_the_middle(shards, workers, stop):
    expected = stream(shard_data(shards, num_workers=workers))
    loader = shard_data(shards, num_workers=workers).train_dataloader()
    state = {"epoch": 0, "batch": stop, "count": 24, "seed": 0, "global_batch": 4}
    loader.load_state_dict(state)
    resumed = [(labels.tolist(), images) for images, labels in loader]
    assert [labels for labels, _ in resumed] == [labels for labels, _ in expected[stop:]]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(resumed, expected[stop:], strict=True))


def test_ranks_read_different_shards(shards, monkeypatch):
    seen = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        data = shard_data(shards, num_classes=24)
        assert len(data.train_dataloader()) == 3
        seen.append([image.sum().item() for image, _ in data.val_dataloader() for image in image])
    assert len(seen[0]) == len(seen[1]) == 5
    assert not set(seen[0]) & set(seen[1])


def test_shards_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"looked for .*train-\*\.tar.*datasets/webdataset/README\.md"):
        shard_data(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"train-000\.tar and it is not there \(3 of 3 shards missing\)"):
        shard_data(tmp_path, train_shards=str(tmp_path / "train-{000..002}.tar"))
    with pytest.raises(ValueError, match="train_count, num_classes: data webdataset needs both"):
        shard_data(tmp_path, train_count=None)


def test_too_few_shards_for_the_workers(shards):
    with pytest.raises(ValueError, match="4 shards cannot feed 1 processes x 8 workers"):
        shard_data(shards, num_workers=8).train_dataloader()
