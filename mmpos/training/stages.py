"""Runs of several stages: one configuration, a few changes per stage, one folder each, finished ones skipped."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mmpos.config import TrainConfig
from mmpos.evaluation.results import Row, read_results, write_results
from mmpos.evaluation.stages import Stage, write_stages_report
from mmpos.evaluation.weights import newest_checkpoint
from mmpos.training.build import check_config
from mmpos.training.run import changes, finished, read_config, train

__all__ = ["last_stage", "stage_config", "train_stages"]

PREFIX = "stage:"


def stage_config(config: Mapping[str, Any], name: str, folders: Mapping[str, Path]) -> dict[str, Any]:
    """The configuration of one stage.

    Args:
        config: plain configuration of the run; ``config["stages"][name]`` holds what the stage changes. A section with
            another ``name`` replaces the section, otherwise single values are replaced.
        name: the stage.
        folders: run folders of the stages before it; ``model.checkpoint: stage:<name>`` refers to their weights.
    """
    out = {key: copy.deepcopy(value) for key, value in config.items() if key != "stages"}
    change = {key: value for key, value in config["stages"][name].items() if key != "run"}
    known = set(TrainConfig.__dataclass_fields__) - {"stages", "resume", "ckpt_path", "recipe_name"}
    unknown = sorted(set(change) - known)
    if unknown:
        raise ValueError(f"stages.{name}: unknown {', '.join(unknown)}; known are run, {', '.join(sorted(known))}")
    for key, value in change.items():
        old = out.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            out[key] = dict(value) if value.get("name", old.get("name")) != old.get("name") else _merge(old, value)
        else:
            out[key] = copy.deepcopy(value)
    source = out["model"].get("checkpoint")
    if source is not None and source.startswith(PREFIX):
        source = source.removeprefix(PREFIX)
        if source not in folders:
            raise ValueError(
                f"stages.{name}.model.checkpoint: {source!r} is no stage before {name!r}; these are "
                f"{', '.join(folders) or 'none'}"
            )
        out["model"]["checkpoint"] = str(newest_checkpoint(folders[source] / "checkpoints") or folders[source])
    return out


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(copy.deepcopy(dict(old)))
    for key, value in new.items():
        before = out.get(key)
        out[key] = _merge(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return out


def last_stage(folder: Path) -> Path:
    """The run folder whose weights a run of several stages ends with; a run without stages is its own."""
    stages = read_config(folder).get("stages") or {}
    if not stages:
        return folder
    name = list(stages)[-1]
    return Path(stages[name].get("run") or folder / name)


def train_stages(
    config: dict[str, Any], folder: Path | str, *, single_process: bool = False, overrides: Sequence[str] = ()
) -> float:
    """Train every stage in ``<folder>/<stage>`` that is not finished yet; returns the metric of the last one.

    Args:
        config: plain configuration with ``stages``. ``stages.<name>.run`` names a finished run that takes the place of
            a stage.
        folder: run folder. Its ``results.csv`` holds the numbers of the last stage as they are and those of the stages
            before it with the name of the stage before the metric.
        single_process: as for :func:`mmpos.training.run.train`.
        overrides: as for :func:`mmpos.training.run.train`.
    """
    folder = Path(folder)
    names = list(config["stages"])
    places = {name: Path(config["stages"][name].get("run") or folder / name) for name in names}
    for number, name in enumerate(names):  # every fault shows before anything trains
        check_config(stage_config(config, name, {done: places[done] for done in names[:number]}))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    summaries: dict[str, dict[str, Any]] = {}
    monitors: dict[str, str] = {}
    metric = float("nan")
    for number, name in enumerate(names):
        place = places[name]
        stage = stage_config(config, name, {done: places[done] for done in names[:number]})
        summary = finished(place)
        if summary is None and config["stages"][name].get("run"):
            raise ValueError(f"stages.{name}.run: {place} is not the folder of a finished run; it has no summary.json")
        if summary is None:
            print(f"stage {number + 1} of {len(names)}: {name}", flush=True)
            checkpoint = None
            if (place / "config.yaml").is_file():
                _same(place, stage)
                checkpoint = newest_checkpoint(place / "checkpoints")
            train(stage, place, ckpt_path=checkpoint, single_process=single_process, overrides=overrides, stage=name)
            summary = finished(place)
            if summary is None:  # fast_dev_run leaves nothing behind, so that no later stage could start from it
                return metric
        else:
            if place == folder / name:
                _same(place, stage)
            print(f"stage {number + 1} of {len(names)}: {name} is finished, in {place}", flush=True)
        summaries[name] = summary
        monitors[name] = stage["callbacks"]["monitor"]
        metric = float(summary[monitors[name]])
    _gather(folder, places, summaries, monitors)
    return metric


def _same(place: Path, stage: Mapping[str, Any]) -> None:
    differences = changes(place, stage)
    if differences:
        raise ValueError(
            f"stages: {place} holds a stage with another configuration ({'; '.join(differences[:5])}); choose another "
            "folder"
        )


def _gather(
    folder: Path,
    places: Mapping[str, Path],
    summaries: Mapping[str, dict[str, Any]],
    monitors: Mapping[str, str],
) -> None:
    """Table, page and summary of the whole run from those of its stages."""
    names = list(summaries)
    rows: list[Row] = []
    for name in names:
        path = places[name] / "results.csv"
        if path.is_file():
            found = read_results(path)
            rows += found if name == names[-1] else [replace(row, metric=f"{name}_{row.metric}") for row in found]
    write_results(folder / "results.csv", rows)
    stages = []
    for name in names:
        path = places[name] / "results.csv"
        relative = places[name].relative_to(folder) if places[name].is_relative_to(folder) else places[name]
        found = read_results(path) if path.is_file() else []
        stages.append(Stage(name, str(relative), summaries[name], monitors[name], found))
    write_stages_report(folder, stages)
    total = {key: value for key, value in summaries[names[-1]].items() if key != "stage"}
    for key in ("train_seconds", "evaluate_seconds"):
        times: list[Any] = [summary.get(key) for summary in summaries.values()]
        total[key] = None if None in times else round(sum(map(float, times)), 1)
    total["stages"] = names
    total["stage_metrics"] = {name: summaries[name].get(monitors[name]) for name in names}
    (folder / "summary.json").write_text(json.dumps(total, indent=2) + "\n")
