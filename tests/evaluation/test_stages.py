"""The report of a run of several stages: every stage's numbers, side by side."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from mmpos.evaluation.results import COLUMNS, Row, write_results
from mmpos.evaluation.stages import Stage, stages_figure, write_stages_report
from mmpos.training.studies import BEGIN, END, refresh_readmes


def rows(*values: float, prefix: str = "") -> list[Row]:
    return [
        Row("sincos", size, rule, f"{prefix}accuracy", value, value - 0.05, value + 0.05, 100)
        for (size, rule), value in zip(
            ((28, "index"), (42, "index"), (28, "rescaled"), (42, "rescaled")), values, strict=True
        )
    ]


def stages() -> list[Stage]:
    return [
        Stage("pretrain", "pretrain", {"val/accuracy": 0.4321, "steps": 7, "train_seconds": 12.4}, "val/accuracy"),
        Stage("scratch", "scratch", {"val/accuracy": 0.5}, "val/accuracy", rows(0.31, 0.12, 0.31, 0.22)),
        Stage("finetune", "finetune", {"val/accuracy": 0.75}, "val/accuracy", rows(0.61, 0.42, 0.61, 0.52)),
    ]


def test_the_table_holds_every_tested_stage_and_the_others_are_named(tmp_path: Path) -> None:
    text = write_stages_report(tmp_path, stages()).read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert any(line.startswith("| scratch | index | 31.0 % 26.0 to 36.0 | 12.0 %") for line in table)
    assert any(line.startswith("| finetune | rescaled | 61.0 %") for line in table)
    assert any("| pretrain | pretrain | val/accuracy 0.4321 | 7 | 12 s | - |" in line for line in table)
    assert not any(line.startswith("| pretrain | index") for line in table)
    assert (tmp_path / "stages.png").stat().st_size > 5000
    assert "stages.png" in text
    assert (tmp_path / "report.html").is_file()


def test_without_tested_stages_there_is_no_picture(tmp_path: Path) -> None:
    text = write_stages_report(tmp_path, stages()[:1]).read_text()
    assert "Test accuracy" not in text
    assert not (tmp_path / "stages.png").exists()


def test_the_picture_has_a_panel_for_each_rule_and_a_line_for_each_stage() -> None:
    figure = stages_figure(stages()[1:])
    assert [axis.get_title() for axis in figure.axes] == ["index", "rescaled"]
    for axis, ends in zip(figure.axes, ([12.0, 42.0], [22.0, 52.0]), strict=True):
        lines = [container.lines[0] for container in axis.containers]
        assert [round(float(line.get_ydata()[-1]), 6) for line in lines] == ends


def test_readme_tells_stages_apart(tmp_path: Path) -> None:
    recipes, study = tmp_path / "recipes", tmp_path / "study"
    (recipes / "two").mkdir(parents=True)
    (recipes / "two" / "README.md").write_text(f"# two\n\n{BEGIN}\n{END}\n")
    for seed, shift in ((0, 0.0), (1, 0.02)):
        run = study / f"seed{seed}"
        (run / "pretrain").mkdir(parents=True)
        own = [rows(*(v + shift for v in values), prefix=p) for p, values in (("scratch_", (0.31, 0.12, 0.31, 0.22)),)]
        write_results(run / "results.csv", [*own[0], *rows(0.61 + shift, 0.42, 0.61, 0.52)])
        summary = {
            "recipe": "two",
            "encoding": "sincos",
            "evaluation": "resolution",
            "seed": seed,
            "parameters": 10,
            "train_seconds": None,
            "evaluate_seconds": None,
            "stages": ["pretrain", "scratch", "finetune"],
            "stage_metrics": {"pretrain": 0.4 + shift, "scratch": 0.5, "finetune": 0.6},
        }
        (run / "summary.json").write_text(json.dumps(summary))
        for stage in ("scratch", "finetune"):
            (run / stage).mkdir()
            (run / stage / "results.csv").write_text(",".join(COLUMNS) + "\n")
    refresh_readmes(study, recipes)
    lines = (recipes / "two" / "README.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| ") and "px" not in line]
    assert [line.split(" | ")[0] for line in table] == [
        "| index, scratch",
        "| rescaled, scratch",
        "| index, finetune",
        "| rescaled, finetune",
    ]
    assert table[0] == "| index, scratch | 32.0 ± 1.4 | 13.0 ± 1.4 |"
    assert table[2] == "| index, finetune | 62.0 ± 1.4 | 42.0 ± 0.0 |"
    facts = next(line for line in lines if "2 seeds" in line)
    assert "pretrain 41.0 ± 1.4 %" in facts
    assert "scratch 5" not in facts
    with (recipes / "two" / "results.csv").open(newline="") as file:
        assert {row["metric"] for row in csv.DictReader(file)} == {"scratch_accuracy", "accuracy"}
