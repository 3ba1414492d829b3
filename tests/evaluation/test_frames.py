"""Other frame counts: table, report, rules that act on time alone, and the recipe from the command to the report."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmpos.config import compose
from mmpos.data.base import ImageData
from mmpos.data.video import VideoData
from mmpos.evaluation.frames import default_frames, run_frames
from mmpos.evaluation.results import COLUMNS, read_results
from mmpos.models import create_video_vit, create_vit

FRAMES = [4, 6, 8]


class Sweep(VideoData):
    """A bright column moves left or right on 4 x 6 pixels; the other question is how bright its clip is."""

    name = "sweep"
    clips = ("longer", "denser")

    def __init__(self) -> None:
        super().__init__(frames=4, canvas=(4, 6), batch_size=8, eval_batch_size=8, seed=0)
        self.tasks = {"side": 2, "level": 3}

    def counts(self):
        return {"train": 16, "val": 8, "test": 20}

    def render(self, split, index, epoch, frames, clip):
        side, level = index % 2, index % 3
        step = (2 * side - 1)[:, None] * torch.arange(frames) * (4 / frames if clip == "denser" else 1)
        column = (index[:, None] + step).floor().long().remainder(6)
        clips = torch.zeros(len(index), 1, frames, 4, 6)
        clips.scatter_(-1, column[:, None, :, None, None].expand(-1, -1, -1, 4, 1), 1.0)
        return clips * (level[:, None, None, None, None] + 1) / 3, torch.stack([side, level], -1)


class Oracle(nn.Module):
    """Answers both questions from the pixels: the side by the first step, the level by the brightest pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = SimpleNamespace(patch_size=(2, 2, 2))
        self.weight = nn.Parameter(torch.zeros(1))
        self.lengths: list[int] = []

    def forward(self, x):
        self.lengths.append(x.shape[2])
        column = x[:, 0, :, 0].argmax(-1)
        moved = (column[:, 1] - column[:, 0]).remainder(6)
        side = (moved == 1).long() if x.shape[2] == 4 else torch.ones(len(x), dtype=torch.long)
        level = (x.amax((1, 2, 3, 4)) * 3).round().long() - 1
        one_hot = nn.functional.one_hot
        return torch.cat([one_hot(side, 2), one_hot(level, 3)], -1).float() + self.weight


def small_vit(encoding="rope_3d"):
    options = {"frames": 4, "image_size": (4, 6), "patch_size": 2, "in_chans": 1, "depth": 1, "embed_dim": 24}
    return create_video_vit(encoding=encoding, num_heads=2, num_classes=5, **options)


def test_counts_of_right_answers(tmp_path):
    model = Oracle()
    result = run_frames(model, Sweep(), [6, 4], encoding_name="oracle", output_dir=tmp_path, progress=False)
    # 20 clips, half of them to the right; away from 4 frames the oracle always says right
    assert result.row(4, "own", "side_accuracy").value == 1.0
    assert result.row(4, "own", "accuracy").value == 1.0
    assert result.row(6, "own", "side_accuracy").value == 0.5
    assert result.row(6, "own", "level_accuracy").value == 1.0
    assert result.row(6, "own", "accuracy").value == 0.5
    assert result.row(6, "own", "side_accuracy_denser").value == 0.5
    assert result.row(6, "own", "side_accuracy").n == 20
    assert result.row(6, "own", "side_accuracy").ci_low == pytest.approx(0.2993, abs=1e-3)
    assert set(model.lengths) == {4, 6}


def test_table_report_and_picture(tmp_path, capsys):
    result = run_frames(
        small_vit(), Sweep(), FRAMES, encoding_name="rope_3d", output_dir=tmp_path, command="python train.py"
    )
    with (tmp_path / "results.csv").open(newline="") as file:
        assert tuple(next(csv.reader(file))) == COLUMNS
    rows = read_results(tmp_path / "results.csv")
    assert len({row.key for row in rows}) == len(rows)
    assert result.rules == ["index", "rescaled", "ntk", "yarn"]
    metrics = {name + kind for name in ("accuracy", "side_accuracy", "level_accuracy") for kind in ("", "_denser")}
    for frames in FRAMES:
        for rule in result.rules:
            found = {row.metric for row in rows if (row.size, row.coordinates) == (frames, rule)}
            assert metrics | {"clips_per_second"} <= found
    assert {row.size for row in rows if row.metric == "time_over_none"} == {4}
    report = (tmp_path / "report.md").read_text()
    for text in ("Trained on clips of 4 frames", "Longer clips", "Denser clips", "python train.py", "| 6 | 1.5 x |"):
        assert text in report
    assert "<img" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "frames.png").stat().st_size > 10_000
    assert "rope_3d at 8 frames (denser): index side" in capsys.readouterr().out


def test_rules_differ_in_time_and_agree_at_the_training_length(tmp_path):
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}
    model = small_vit()
    plain = model.forward

    def spy(x, **options):
        out = plain(x, **options)
        seen.setdefault((x.shape[2], model.position_encoding.shared["rope_3d"].resolution), []).append(out)
        return out

    model.forward = spy
    run_frames(
        model,
        Sweep(),
        [4, 8],
        encoding_name="rope_3d",
        output_dir=tmp_path,
        rules=["index", "rescaled"],
        overhead=False,
        progress=False,
    )
    assert torch.equal(seen[4, "index"][0], seen[4, "rescaled"][0])
    assert (seen[8, "index"][0] - seen[8, "rescaled"][0]).abs().max() > 1e-5
    assert model.position_encoding.shared["rope_3d"].resolution == "index"  # as it was
    assert model.training


def test_without_positions_the_side_is_a_coin(tmp_path):
    """The bag of tubelets of a clip and of its mirror in time is the same: no sense of direction."""
    clips, labels = Sweep().render("test", torch.arange(2), 0, 4, "longer")
    held = clips.repeat_interleave(2, dim=2)  # each place for as long as a tubelet
    back = held.flip(2)
    none, rope = small_vit("none").eval(), small_vit("rope_3d").eval()
    assert torch.allclose(none(held), none(back), atol=1e-6)
    assert (rope(held) - rope(back)).abs().max() > 1e-4
    result = run_frames(none, Sweep(), [4], encoding_name="none", output_dir=tmp_path, progress=False)
    assert result.rules == ["index"]


def test_default_frames_are_whole_tubelets():
    assert default_frames(8, 2) == [8, 12, 16, 24]
    assert default_frames(6, 4) == [8, 12, 16]


def test_what_cannot_be_measured(tmp_path):
    common = {"encoding_name": "x", "output_dir": tmp_path}
    with pytest.raises(ValueError, match=r"frames: expected multiples of the tubelet of 2 frames, got \[5\]"):
        run_frames(small_vit(), Sweep(), [4, 5], **common)
    with pytest.raises(ValueError, match="model: expected a video ViT whose patch embedding has a tubelet"):
        run_frames(create_vit(image_size=8, depth=1), Sweep(), **common)
    with pytest.raises(ValueError, match="rules: .*nearest"):
        run_frames(small_vit(), Sweep(), rules=["nearest"], **common)


@pytest.mark.parametrize("recipe", ["video_rope3d", "video_none"])
def test_recipes_compose(recipe):
    config = compose([f"recipe={recipe}"])
    assert config["evaluation"]["name"] == "frames"
    assert config["evaluation"]["frames"] == [8, 12, 16, 24]
    assert config["data"]["name"] == "moving_mnist5k"
    assert config["encoding"]["name"] == {"video_rope3d": "rope_3d", "video_none": "none"}[recipe]
    tubelet = config["model"]["options"]["tubelet_size"]
    assert config["data"]["hold"] == tubelet  # otherwise tubelets themselves tell the direction
    assert all(frames % tubelet == 0 for frames in config["evaluation"]["frames"])


def small_recipe(*overrides):
    config = compose(
        [
            "recipe=video_rope3d",
            "trainer=cpu",
            "trainer.max_epochs=1",
            "trainer.log_every_n_steps=1",
            "logger=csv",
            "model.options.depth=1",
            "evaluation.frames=[4,6]",
            "data.frames=4",
            *overrides,
        ]
    )
    config.pop("resume")
    config.pop("ckpt_path")
    return config


@pytest.fixture
def sweep(monkeypatch):
    import mmpos.training.run as run

    monkeypatch.setattr(run, "build_data", lambda config: Sweep())
    return run


def test_the_recipe_trains_two_steps_and_reports(sweep, tmp_path):
    config = small_recipe("model.patch_size=2")
    value = sweep.train(config, tmp_path)
    assert 0 <= value <= 1
    with (tmp_path / "metrics.csv").open(newline="") as file:
        columns = next(csv.reader(file))
    assert {"val/accuracy", "val/side_accuracy", "val/level_accuracy", "val/loss"} <= set(columns)
    rows = read_results(tmp_path / "results.csv")
    assert {row.size for row in rows} == {4, 6}
    assert "Training: loss and accuracy" in (tmp_path / "report.md").read_text()
    evaluated = tmp_path / "again"
    again = {
        "run": str(tmp_path),
        "checkpoint": None,
        "evaluation": {"name": "frames", "overhead": False},
        "sizes": [8],
    }
    sweep.evaluate_run({**again, "device": "cpu"}, evaluated, config)
    assert {row.size for row in read_results(evaluated / "results.csv")} == {8}
    with pytest.raises(ValueError, match="evaluation: moving_mnist5k holds videos; use evaluation=frames"):
        sweep.evaluate_run({**again, "device": "cpu", "evaluation": {"name": "resolution"}}, evaluated, config)


def test_the_measured_table_says_frames(sweep, tmp_path):
    from mmpos.training.studies import BEGIN, END, refresh_readmes

    config = {**small_recipe("model.patch_size=2"), "recipe_name": "video_rope3d"}
    sweep.train(config, tmp_path / "study" / "seed0")
    readme = tmp_path / "recipes" / "video_rope3d" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text(f"# Title\n\n{BEGIN}\n{END}\n")
    refresh_readmes(tmp_path / "study", tmp_path / "recipes")
    text = readme.read_text()
    assert "| coordinates | 4 frames | 6 frames |" in text
    assert "| index, side |" in text
    assert "| rescaled, level denser |" in text


def test_several_questions_are_not_mixed(sweep, tmp_path):
    with pytest.raises(ValueError, match=r"objective: several questions about one sample \(side, level\)"):
        sweep.train(small_recipe("model.patch_size=2", "objective.mixup=0.2"), tmp_path)


def test_image_data_have_no_frames():
    assert not hasattr(ImageData, "frames")
