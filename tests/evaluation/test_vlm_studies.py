"""Vision-language runs side by side: the comparison and the pages of recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from mmpos.evaluation.compare import compare_study
from mmpos.evaluation.results import Row, read_results, write_results
from mmpos.evaluation.vlm import _summary, vlm_columns
from mmpos.training.studies import BEGIN, END, refresh_readmes

pytest.importorskip("matplotlib")

TRAINED = {"image 48 x 64": 48, "video 5 of 24 x 24": 45}


def form_rows(scheme: str, where: float, frame: float, far: float) -> list[Row]:
    rows = [
        Row(scheme, 48, "image 48 x 64", "where_accuracy", where, 0.0, 1.0, 40),
        Row(scheme, 48, "image 48 x 64", "where_iou", 0.7, n=40),
        Row(scheme, 48, "image 48 x 64", "all_accuracy", where, 0.0, 1.0, 40),
        Row(scheme, 45, "video 5 of 24 x 24", "which_frame_accuracy", frame, 0.0, 1.0, 30),
        Row(scheme, 45, "video 5 of 24 x 24", "all_accuracy", frame, 0.0, 1.0, 30),
        Row(scheme, 144, "image 96 x 96", "where_accuracy", far, 0.0, 1.0, 40),
        Row(scheme, 144, "image 96 x 96", "all_accuracy", far, 0.0, 1.0, 40),
    ]
    return rows + _summary(rows, scheme, TRAINED)


def run(folder: Path, scheme: str, values: tuple[float, float, float], seed: int, recipe: str = "vlm_schemes") -> None:
    folder.mkdir(parents=True)
    write_results(folder / "results.csv", form_rows(scheme, *values))
    config = {
        "seed": seed,
        "evaluation": {"name": "vlm"},
        "model": {"options": {"scheme": scheme}},
        "stages": {"tower": {"run": f"towers/seed{seed}"}},
        "callbacks": {"progress": seed == 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    summary = {
        "recipe": recipe,
        "encoding": "rope_mixed",
        "evaluation": "vlm",
        "seed": seed,
        "parameters": 1000,
        "train_seconds": 90.0,
        "evaluate_seconds": 10.0,
        "date": "2026-01-02",
        "machine": "a machine",
        "overrides": [
            f"callbacks.progress={seed == 0}",
            f"model.options.scheme={scheme}",
            "stages.tower.run=towers/seed${seed}",
            "data.root=/disk of/somebody",
        ],
        "stages": ["tower", "whole"],
    }
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    folder = tmp_path / "study"
    run(folder / "raster0", "raster", (0.2, 0.4, 0.1), 0)
    run(folder / "mrope0", "mrope", (0.6, 0.8, 0.3), 0)
    run(folder / "mrope1", "mrope", (0.8, 0.8, 0.5), 1)
    return folder


def test_summary_is_the_mean_over_forms_in_and_beyond_training() -> None:
    rows = {row.metric: row for row in form_rows("mrope", 0.6, 0.8, 0.3) if row.coordinates in ("trained", "beyond")}
    assert {metric: row.value for metric, row in rows.items()} == pytest.approx(
        {
            "trained_where_accuracy": 0.6,
            "trained_which_frame_accuracy": 0.8,
            "accuracy": 0.7,
            "beyond_where_accuracy": 0.3,
            "beyond_all_accuracy": 0.3,
        }
    )
    assert {row.size for row in rows.values()} == {48}
    assert rows["accuracy"].n == 70


def test_columns_are_the_kinds_of_question_in_and_beyond_training() -> None:
    metrics = [row.metric for row in form_rows("mrope", 0.6, 0.8, 0.3)]
    assert vlm_columns(metrics) == {
        "all": "accuracy",
        "where": "trained_where_accuracy",
        "where *": "beyond_where_accuracy",
        "which frame": "trained_which_frame_accuracy",
        "all *": "beyond_all_accuracy",
    }


def test_comparison_has_a_row_for_each_scheme_whatever_tower_it_started_from(study: Path) -> None:
    lines = [line.split() for line in compare_study(study).splitlines()]
    assert lines[1][:5] == ["mrope", "2", "75.0", "±", "7.1"]
    assert lines[2][:3] == ["raster", "1", "30.0"]
    page = (study / "comparison.md").read_text()
    assert "Columns with *, hollow marks, are forms larger or longer than in training." in page
    assert "stages.tower" not in page


def test_readme_of_a_sweep_has_a_row_for_each_scheme(study: Path, tmp_path: Path) -> None:
    readme = tmp_path / "recipes" / "vlm_schemes" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text(f"# T\n\n{BEGIN}\n{END}\n")
    refresh_readmes(study, tmp_path / "recipes")
    rows = [line for line in readme.read_text().splitlines() if line.startswith("| ")]
    assert rows == [
        "| scheme | all | where | where * | which frame | all * |",
        "| mrope | 75.0 ± 7.1 | 70.0 ± 14.1 | 40.0 ± 14.1 | 80.0 ± 0.0 | 40.0 ± 14.1 |",
        "| raster | 30.0 | 20.0 | 10.0 | 40.0 | 10.0 |",
    ]
    command = "python train.py -m recipe=vlm_schemes seed=0,1 model.options.scheme=mrope,raster data.root=<folder>"
    assert command in readme.read_text().splitlines()


def test_readme_of_one_scheme_has_a_row_for_each_form(tmp_path: Path) -> None:
    for seed in (0, 1):
        run(tmp_path / f"study/seed{seed}", "mrope", (0.6 + 0.2 * seed, 0.8, 0.3), seed, "vlm_grounding")
    readme = tmp_path / "recipes" / "vlm_grounding" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text(f"# T\n\n{BEGIN}\n{END}\n")
    refresh_readmes(tmp_path / "study", tmp_path / "recipes")
    page = next((tmp_path / "recipes").rglob("README.md")).read_text()
    assert "data.root=<folder>" in page
    assert "somebody" not in page
    rows = [line for line in readme.read_text().splitlines() if line.startswith("| ")]
    assert rows == [
        "| form | visual tokens | where | which frame |",
        "| image 48 x 64 | 48 | 70.0 ± 14.1 | - |",
        "| video 5 of 24 x 24 | 45 | - | 80.0 ± 0.0 |",
        "| image 96 x 96 | 144 | 30.0 ± 0.0 | - |",
    ]
    assert len(read_results(tmp_path / "study/seed0/results.csv")) == 12
