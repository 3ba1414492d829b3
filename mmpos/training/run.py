"""One run: from a plain configuration to a trained model, a checkpoint and a report."""

from __future__ import annotations

import csv
import json
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml  # type: ignore[import-untyped]

from mmpos.config import difference
from mmpos.evaluation.weights import newest_checkpoint, read_checkpoint
from mmpos.training.build import (
    SECTIONS,
    build_data,
    build_loggers,
    build_model,
    build_trainer,
    check_config,
    describe,
)
from mmpos.training.callbacks import LastCheckpoint, create_callbacks
from mmpos.training.evaluations import evaluate
from mmpos.training.objectives import build_module
from mmpos.training.studies import machine

__all__ = ["changes", "evaluate_run", "finished", "read_config", "train"]


def read_config(folder: Path | str) -> dict[str, Any]:
    """The configuration a run folder was made with."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(
            f"run folder: {folder} holds no config.yaml, so it is not the folder of a run of train.py"
        )
    return yaml.safe_load(path.read_text())


def finished(folder: Path) -> dict[str, Any] | None:
    """The summary of a run that reached its end, else ``None``."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else None


def train(
    config: dict[str, Any],
    folder: Path | str,
    *,
    ckpt_path: Path | str | None = None,
    single_process: bool = False,
    overrides: Sequence[str] = (),
    stage: str | None = None,
) -> float:
    """Train, evaluate and report; returns the monitored metric.

    Args:
        config: plain configuration, as :func:`mmpos.config.compose` returns it.
        folder: run folder; everything is written here.
        ckpt_path: checkpoint to continue from.
        single_process: refuse to start further processes, which inside a Hydra multi-run would start sweeps.
        overrides: what the user changed on the command line besides recipe and seed, for the record.
        stage: name of the stage this is part of, for the record.
    """
    folder = Path(folder)
    started = time.time()
    logging.getLogger("lightning.pytorch").setLevel(
        logging.WARNING
    )  # its notes on devices and hints come twice under Hydra
    check_config(config)
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    data = build_data(config)
    model = build_model(config, data)
    sections = {name: schema(**config[name]) for name, schema in SECTIONS.items() if name not in ("encoding", "model")}
    options: Any = sections["trainer"]
    if sections["callbacks"].ema_decay is not None and options.strategy == "fsdp":
        raise ValueError(
            "callbacks.ema_decay: averaging needs the whole model on each device and does not work with trainer=fsdp; "
            "set null"
        )
    module = build_module(config, model, data)
    checkpoints = folder / "checkpoints"
    rows = []
    if ckpt_path is not None:
        content = read_checkpoint(ckpt_path)
        rows = earlier_rows(folder, int(content.get("global_step", 0)))
        del content
    callbacks = create_callbacks(sections["callbacks"], checkpoints)
    last = next(callback for callback in callbacks if isinstance(callback, LastCheckpoint))
    trainer = build_trainer(
        options,
        model,
        callbacks=callbacks,
        loggers=[] if options.fast_dev_run else build_loggers(sections["logger"], folder, rows),
        folder=folder,
    )
    if single_process and trainer.num_devices > 1 and not _launched_outside(trainer):
        raise ValueError(
            f"trainer.devices: {trainer.num_devices} processes in a multi-run (-m) would each start the sweep again; "
            "use one device per job, start the jobs one by one, or launch with torchrun or a cluster launcher "
            "(hydra/launcher=submitit_slurm)"
        )
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        print(describe(config, data, model), flush=True)
    if config["model"].get("compile"):
        model.compile()  # in place: reassigning the attribute would rename every weight
    with warnings.catch_warnings():
        # Lightning 2.6 asks torch 2.14 for a class that is about to go; nothing a user could change
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        if ckpt_path is not None:
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)
        if last.measured_at < trainer.global_step and not options.fast_dev_run:  # cut off before its last validation
            trainer.validate(module, datamodule=data, verbose=False)
    metric = last.metric
    zero, world = trainer.is_global_zero, trainer.world_size
    if world > 1 and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    if zero and not options.fast_dev_run:
        trained = time.time()
        data.trainer = None  # the evaluation sees all test images, whatever the number of processes was
        recipe = config.get("recipe_name", "custom")
        named = [] if recipe == "custom" else [f"recipe={recipe}"]
        command = " ".join(["python train.py", *named, f"seed={config['seed']}", *overrides])
        evaluate(config, data, checkpoints / "last.ckpt", folder, command=command)
        summary = {
            "recipe": recipe,
            **({"stage": stage} if stage else {}),
            "encoding": config["encoding"]["name"],
            "evaluation": config["evaluation"].get("name"),
            "seed": config["seed"],
            sections["callbacks"].monitor: metric,
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "parameters": sum(p.numel() for p in model.parameters()),
            "train_seconds": round(last.seconds, 1),
            "evaluate_seconds": round(time.time() - trained, 1),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "overrides": list(overrides),
        }
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(f"done in {time.time() - started:.0f} s; report: {folder / 'report.md'}")
    if metric != metric and not options.fast_dev_run:
        raise FloatingPointError(
            f"{sections['callbacks'].monitor}: not a number at the end of training; see {folder / 'metrics.csv'}"
        )
    return metric


def evaluate_run(config: Mapping[str, Any], folder: Path, changed: Mapping[str, Any] | None = None) -> None:
    """``evaluate.py``: a run folder, or a checkpoint with model, encoding and data.

    Args:
        config: plain configuration of ``evaluate.yaml``.
        folder: where results go.
        changed: configuration of the run with the user's changes; ``None`` evaluates ``config`` itself.
    """
    source = config if changed is None else changed
    check_config(source)
    pl.seed_everything(source.get("seed", 0), workers=True, verbose=False)
    checkpoint = config["checkpoint"]
    if checkpoint is None and changed is not None:
        checkpoint = newest_checkpoint(Path(config["run"]) / "checkpoints")
    if checkpoint is None:
        raise ValueError(
            "run, checkpoint: nothing to evaluate; give run=<run folder>, or checkpoint=<file> with model=..., "
            "encoding=... and data=..."
            if changed is None
            else f"run: {config['run']} has no checkpoint yet; continue it with python train.py resume={config['run']}"
        )
    source = {**source, "evaluation": config["evaluation"]}
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.yaml").exists():  # a comparison tells runs apart by their settings
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(source), sort_keys=False))
    evaluate(
        source,
        build_data(source),
        Path(checkpoint),
        folder,
        sizes=config.get("sizes"),
        device=config.get("device", "auto"),
    )


def earlier_rows(folder: Path, step: int) -> list[dict[str, Any]]:
    """Lines of ``metrics.csv`` up to a step."""
    path = folder / "metrics.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = [{key: value for key, value in row.items() if value not in ("", None)} for row in csv.DictReader(file)]
    return [row for row in rows if int(row.get("step", 0)) < step]


def changes(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """In what a configuration differs from that of a run folder, apart from where it runs."""
    ignored = ("resume", "ckpt_path", "recipe_name")
    strip = lambda c: {key: value for key, value in with_defaults(c).items() if key not in ignored}  # noqa: E731
    return difference(strip(read_config(folder)), strip(config))


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the fields its version did not have yet, at the values that mean what it did."""
    out = {"stages": {}, **config}
    for name, schema in SECTIONS.items():
        if name in out:
            known = {
                entry.name: entry.default_factory() if callable(entry.default_factory) else entry.default
                for entry in fields(schema)
            }
            out[name] = {**known, **out[name]}
    return out


def _launched_outside(trainer: pl.Trainer) -> bool:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return environment is not None and environment.creates_processes_externally
