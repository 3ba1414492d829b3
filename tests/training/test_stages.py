"""Runs of several stages: what a stage starts from, what is skipped, what the whole run tells."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmpos.evaluation.compare import find_runs
from mmpos.evaluation.results import read_results
from mmpos.training.build import build_data, build_model
from mmpos.training.stages import last_stage, stage_config, train_stages
from mmpos.training.studies import runs_of
from tests.training.conftest import weights

Make = Callable[..., dict[str, Any]]


def two_stages(small: Make) -> dict[str, Any]:
    config = small("evaluation=resolution", "sizes=[16]", "encoding=rope_axial")
    config["stages"] = {
        "first": {"trainer": {"max_epochs": 1}},
        "probe": {"model": {"checkpoint": "stage:first", "fresh": ["head.*"], "frozen": ["*", "!head.*"]}},
    }
    return config


def test_a_probe_starts_from_the_first_stage_and_moves_its_head_only(small: Make, tmp_path: Path) -> None:
    config = two_stages(small)
    metric = train_stages(config, tmp_path)
    first, probe = weights(tmp_path / "first"), weights(tmp_path / "probe")
    moved = sorted(name for name in first if not torch.equal(first[name], probe[name]))
    assert moved == ["head.bias", "head.weight"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stages"] == ["first", "probe"]
    assert "stage" not in summary
    assert summary["val/accuracy"] == metric
    metrics = {row.metric for row in read_results(tmp_path / "results.csv")}
    assert {"accuracy", "first_accuracy"} <= metrics
    # a study counts the run once
    assert [folder for folder, _ in runs_of(tmp_path)] == [tmp_path]
    assert [run.folder for run in find_runs([tmp_path])] == [tmp_path]
    assert last_stage(tmp_path) == tmp_path / "probe"
    assert last_stage(tmp_path / "probe") == tmp_path / "probe"


def test_finished_stages_are_skipped_and_a_changed_one_is_refused(small: Make, tmp_path: Path, capsys: Any) -> None:
    config = two_stages(small)
    train_stages(config, tmp_path)
    before = (tmp_path / "first" / "checkpoints" / "last.ckpt").stat().st_mtime_ns
    (tmp_path / "probe" / "summary.json").unlink()
    train_stages(config, tmp_path)
    assert "first is finished" in capsys.readouterr().out
    assert (tmp_path / "first" / "checkpoints" / "last.ckpt").stat().st_mtime_ns == before
    config["stages"]["first"]["trainer"]["max_epochs"] = 3
    with pytest.raises(ValueError, match=r"another configuration.*max_epochs: 1 -> 3"):
        train_stages(config, tmp_path)


def test_a_finished_run_takes_the_place_of_a_stage(small: Make, tmp_path: Path) -> None:
    config = two_stages(small)
    train_stages(config, tmp_path / "a")
    config["stages"]["first"] = {"run": str(tmp_path / "a" / "first")}
    train_stages(config, tmp_path / "b")
    assert not (tmp_path / "b" / "first").exists()
    assert torch.equal(weights(tmp_path / "b" / "probe")["head.bias"], weights(tmp_path / "a" / "probe")["head.bias"])
    config["stages"]["first"] = {"run": str(tmp_path / "nothing")}
    with pytest.raises(ValueError, match="not the folder of a finished run"):
        train_stages(config, tmp_path / "c")


def test_a_section_of_another_name_is_replaced_and_others_are_merged(small: Make) -> None:
    config = two_stages(small)
    config["stages"]["first"] = {"data": {"name": "fake", "image_size": 8}, "optimizer": {"lr": 0.5}}
    config["data"] = {**config["data"], "name": "digits"}
    out = stage_config(config, "first", {})
    assert out["data"] == {"name": "fake", "image_size": 8}
    assert out["optimizer"] == {**config["optimizer"], "lr": 0.5}
    assert "stages" not in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"checkpoint": "stage:later"}}, "no stage before 'probe'"),
        ({"modle": {}}, "stages.probe: unknown modle"),
        ({"evaluation": {"name": "nothing"}}, "evaluation.name"),
    ],
)
def test_faults_show_before_anything_trains(small: Make, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    config = two_stages(small)
    config["stages"]["probe"] = change
    with pytest.raises(ValueError, match=words):
        train_stages(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_pattern_without_a_parameter_is_an_error(small: Make) -> None:
    config = small()
    config["model"]["frozen"] = ["blokcs.*"]
    with pytest.raises(ValueError, match="blokcs"):
        build_model(config, build_data(config))
