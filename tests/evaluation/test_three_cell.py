"""The Three-Cell Experiment as an evaluation: counts, table, report, comparison, README of the recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mmpos.config import compose
from mmpos.data import create_data
from mmpos.diagnostics import three_cell_targets
from mmpos.evaluation import run_three_cell
from mmpos.evaluation.compare import compare, compare_study
from mmpos.evaluation.results import Row, read_results, write_results
from mmpos.evaluation.three_cell import THREE_CELL_COLUMNS
from mmpos.training.evaluations import evaluate
from mmpos.training.studies import BEGIN, END, refresh_readmes

pytest.importorskip("matplotlib")

SMALL = {"cells": 6, "pixels": 2, "train_count": 64, "val_count": 16, "test_count": 300, "eval_batch_size": 64}


@pytest.fixture(scope="module")
def data():
    return create_data("three_cell", **SMALL)


class Reader(nn.Module):
    """Finds the cells in the pixels and answers right, except that it says no to every question of ``deaf``."""

    def __init__(self, deaf: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.deaf = list(deaf)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        flat = images[..., ::2, ::2].flatten(2).argmax(-1)
        answers = three_cell_targets(torch.stack([flat // 6, flat % 6], -1), 6)
        answers[:, self.deaf] = False
        return torch.stack([~answers, answers], -1).float().flatten(1) + self.weight


def test_columns_are_counts_of_right_answers(data, tmp_path, capsys):
    result = run_three_cell(Reader((1, 5)), data, encoding_name="reader", output_dir=tmp_path)
    no = 1 - data.targets["test"].double().mean(0)
    expected = {
        "distance": (1 + no[1]) / 2,
        "orientation": 1.0,
        "area": 1.0,
        "vector sum": no[5],
        "average": (1 + (1 + no[1]) / 2 + 1 + no[5]) / 4,
    }
    for column, value in expected.items():
        row = result.columns()[column]
        assert row.value == pytest.approx(float(value)), column
        assert row.n == 300
        assert row.ci_low < row.value <= row.ci_high
    assert result.answers["RG > RB"] == 1
    assert result.answers["vector sum"] == pytest.approx(float(no[5]))
    frequent = torch.maximum(no, 1 - no)
    assert result.blind["distance"] == pytest.approx(100 * float(frequent[:2].mean()))
    assert result.blind["orientation"] == pytest.approx(100 * float(frequent[2]))
    assert "reader: distance" in capsys.readouterr().out


def test_table_report_and_picture(data, tmp_path):
    from mmpos.models import create_vit

    sizes = {"image_size": 12, "patch_size": 2, "in_chans": 3, "num_classes": 12}
    model = create_vit(encoding="learned", embed_dim=24, depth=1, num_heads=2, **sizes).train()
    run_three_cell(model, data, encoding_name="learned", output_dir=tmp_path, command="python train.py", progress=False)
    assert model.training
    rows = read_results(tmp_path / "results.csv")
    assert len({row.key for row in rows}) == len(rows)
    assert {(row.size, row.coordinates) for row in rows} == {(12, "trained")}
    metrics = {row.metric for row in rows}
    assert metrics == {*THREE_CELL_COLUMNS.values(), "images_per_second", "encoding_parameters", "time_over_none"}
    report = (tmp_path / "report.md").read_text()
    for text in ("|  | distance | orientation | area | vector sum | average |", "the more frequent answer", "train.py"):
        assert text in report
    assert "<img" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "three_cell.png").stat().st_size > 10_000


def test_a_model_with_other_outputs_is_refused(data, tmp_path):
    class Ten(nn.Linear):
        def forward(self, images):
            return super().forward(images.flatten(1))

    with pytest.raises(ValueError, match="model: expected 12 outputs, two for each question, got 10"):
        run_three_cell(Ten(3 * 144, 10), data, encoding_name="none", output_dir=tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data=three_cell", "evaluation=resolution"], "holds questions about three cells; use evaluation=three_cell"),
        (["data=fake", "evaluation=three_cell"], "fake holds labelled images; use evaluation=resolution"),
        (["data=three_cell", "evaluation=three_cell", "sizes=[14,28]"], "leave sizes out"),
    ],
)
def test_data_and_evaluation_must_belong_together(overrides, message, data, tmp_path):
    config = compose(overrides)
    chosen = data if "data=three_cell" in overrides else create_data("fake")
    with pytest.raises(ValueError, match=message):
        evaluate(config, chosen, tmp_path / "last.ckpt", tmp_path)


# -- studies ----------------------------------------------------------------------------------------------------------


def run(folder: Path, encoding: str, values: list[float], seed: int = 0, overrides: tuple[str, ...] = ()) -> None:
    folder.mkdir(parents=True)
    metrics = THREE_CELL_COLUMNS.values()
    rows = [Row(encoding, 14, "trained", m, v, v - 0.01, v + 0.01, 100) for m, v in zip(metrics, values, strict=True)]
    write_results(folder / "results.csv", rows)
    text = f"seed: {seed}\nencoding: {{name: {encoding}}}\nevaluation: {{name: three_cell}}\n"
    (folder / "config.yaml").write_text(text)
    summary = {
        "recipe": "three_cell",
        "encoding": encoding,
        "evaluation": "three_cell",
        "seed": seed,
        "parameters": 1000 + len(encoding),
        "train_seconds": 100.0,
        "evaluate_seconds": 2.0,
        "date": "2026-01-02",
        "machine": "a machine",
        "overrides": [f"encoding={encoding}", *overrides],
    }
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def study(tmp_path):
    folder = tmp_path / "study"
    run(folder / "none", "none", [0.66, 0.5, 0.66, 0.58, 0.6])
    for seed, average in enumerate((0.93, 0.95)):
        run(folder / f"rope{seed}", "rope_mixed", [0.9, 0.91, 0.92, 0.93, average], seed)
    return folder


def test_comparison_has_the_columns_of_the_paper(study):
    text = compare_study(study)
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["encoding", "runs", "distance", "orientation", "area", "vector", "sum", "average"]
    assert lines[1][:4] == ["rope_mixed", "2", "90.0", "±"]
    assert lines[1][-3:] == ["94.0", "±", "1.4"]
    assert lines[2][:5] == ["none", "1", "66.0", "[65.0,", "67.0]"]
    page = (study / "comparison.md").read_text()
    assert "by question. Best average first." in page
    assert "| rope_mixed | 2 | 90.0 ± 0.0 |" in page
    assert (study / "comparison.png").stat().st_size > 5_000


def test_other_evaluations_are_compared_apart(study, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    write_results(other / "results.csv", [Row("none", 28, "index", "accuracy", 0.5)])
    message = "some runs were tested at image sizes, others at questions on three cells; compare them apart"
    with pytest.raises(ValueError, match=message):
        compare([study, other], tmp_path / "out")


def test_readme_has_a_row_for_each_encoding(study, tmp_path):
    readme = tmp_path / "recipes" / "three_cell" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nend\n")
    refresh_readmes(study, tmp_path / "recipes")
    text = readme.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("end\n")
    assert "old" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows == [
        "| encoding | distance | orientation | area | vector sum | average |",
        "| rope_mixed | 90.0 ± 0.0 | 91.0 ± 0.0 | 92.0 ± 0.0 | 93.0 ± 0.0 | 94.0 ± 1.4 |",
        "| none | 66.0 | 50.0 | 66.0 | 58.0 | 60.0 |",
    ]
    assert "1,004 to 1,010 parameters. 102 s per run" in text
    assert "python train.py -m recipe=three_cell seed=0,1 encoding=none,rope_mixed" in text
    assert len(readme.with_name("results.csv").read_text().splitlines()) == 1 + 3 * 5


def test_runs_that_differ_in_more_than_the_encoding_need_a_study_of_their_own(study, tmp_path):
    run(study / "x", "sincos", [0.5] * 5, overrides=("optimizer.lr=0.1",))
    with pytest.raises(ValueError, match="differ in more than the seed"):
        refresh_readmes(study, tmp_path)
