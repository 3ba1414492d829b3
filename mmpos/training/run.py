"""One run: from a plain configuration to a trained model, a checkpoint and a report."""

from __future__ import annotations

import csv
import json
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from mmpos.config import (
    CallbacksConfig,
    EncodingConfig,
    LoggerConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainerConfig,
    check_keys,
    difference,
)
from mmpos.evaluation.weights import load_weights, newest_checkpoint, read_checkpoint
from mmpos.training.callbacks import LastCheckpoint, Progress, create_callbacks
from mmpos.training.module import Classifier
from mmpos.training.studies import machine

__all__ = ["build_data", "build_model", "check_config", "evaluate", "evaluate_run", "finished", "read_config", "train"]

SECTIONS = {
    "encoding": EncodingConfig,
    "model": ModelConfig,
    "objective": ObjectiveConfig,
    "optimizer": OptimizerConfig,
    "trainer": TrainerConfig,
    "logger": LoggerConfig,
    "callbacks": CallbacksConfig,
}

EVALUATIONS = (None, "none", "resolution", "frames")

# -- building -----------------------------------------------------------------------------------------------------


def encoding_specs(section: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Pairs (name, options) of an encoding section; ``learned+rope_mixed`` keeps its options by name."""
    names = str(section["name"]).split("+")
    options = dict(section.get("options") or {})
    if len(names) == 1:
        return [(names[0], options)]
    stray = sorted(set(options) - set(names))
    if stray:
        raise ValueError(
            f"encoding.options: with several encodings options are kept by name ({', '.join(names)}), got "
            f"{', '.join(stray)}"
        )
    return [(name, dict(options.get(name) or {})) for name in names]


def check_config(config: Mapping[str, Any]) -> None:
    """Raise one error with every wrong name and option of a configuration, before anything is built."""
    from mmpos.data import data_options
    from mmpos.encodings import encoding_options

    problems = []

    def attempt(check: Any, *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except ValueError as error:
            problems.append(str(error))
            return None

    for name, schema in SECTIONS.items():
        if name in config:
            attempt(check_keys, name, config[name], schema)
    own = config["encoding"]["name"] == "own"  # evaluate.py: the encoding a timm model comes with
    for name, options in [] if own else attempt(encoding_specs, config["encoding"]) or []:
        known = attempt(encoding_options, name)
        unknown = [] if known is None else sorted(set(options) - set(known))
        if unknown:
            problems.append(
                f"encoding.options: {name} has no option {', '.join(unknown)}; its options are {sorted(known)}"
            )
    data = dict(config["data"])
    known = attempt(data_options, data.pop("name", None))
    unknown = [] if known is None else sorted(set(data) - set(known))
    if unknown:
        problems.append(
            f"data: {config['data']['name']} has no option {', '.join(unknown)}; its options are {sorted(known)}"
        )
    evaluation = (config.get("evaluation") or {}).get("name")
    if evaluation not in EVALUATIONS:
        problems.append(f"evaluation.name: expected one of {', '.join(map(str, EVALUATIONS[1:]))}, got {evaluation!r}")
    if problems:
        raise ValueError(
            "\n".join(problems)
            if len(problems) == 1
            else "\n".join(["the configuration has several faults:", *problems])
        )


def build_data(config: Mapping[str, Any]) -> Any:
    """The data module of a configuration, with the seed of the run."""
    from mmpos.data import create_data, data_options

    options = dict(config["data"])
    name = options.pop("name")
    if "seed" in data_options(name):
        options.setdefault("seed", config.get("seed", 0))
    return create_data(name, **options)


def build_model(config: Mapping[str, Any], data: Any) -> nn.Module:
    """The ViT of a configuration with its encoding, for the images or videos and classes of ``data``."""
    from mmpos.models import create_video_vit, create_vit

    model = config["model"]
    options = dict(model.get("options") or {})
    if model.get("patch_size") is not None:
        options["patch_size"] = model["patch_size"]
    frames = getattr(data, "frames", None)
    create: Any = create_vit if frames is None else partial(create_video_vit, frames=frames)
    vit = create(
        model["name"],
        encoding=encoding_specs(config["encoding"]),
        image_size=data.image_size,
        in_chans=data.in_chans,
        num_classes=data.num_classes,
        **options,
    )
    if model.get("checkpoint"):
        load_weights(vit, model["checkpoint"])
    return vit


def describe(config: Mapping[str, Any], data: Any, model: nn.Module) -> str:
    """One line on what is about to train."""
    total = sum(p.numel() for p in model.parameters())
    own = sum(p.numel() for name, p in model.named_parameters() if name.startswith("position_encoding."))
    return (
        f"{config['model']['name']} with {config['encoding']['name']}: {total:,} parameters, {own:,} of them "
        f"positions; {config['data']['name']}, {data.facts().get('training clips') or f'{data.image_size} px'}, "
        f"{data.num_classes} classes"
    )


def build_loggers(options: LoggerConfig, folder: Path, rows: list[dict[str, Any]]) -> list[Any]:
    """Loggers by name. ``rows`` are earlier lines of ``metrics.csv`` that a resumed run keeps."""
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

    loggers: list[Any] = []
    for name in options.names:
        if name == "csv":
            logger = CSVLogger(folder, name="", version="")
            with warnings.catch_warnings():  # the folder is not empty: it holds the configuration
                warnings.filterwarnings("ignore", message="Experiment logs directory")
                writer = logger.experiment
            if getattr(rank_zero_only, "rank", 0) == 0 and rows:
                writer.metrics.extend(rows)
                logger.save()
            loggers.append(logger)
        elif name == "tensorboard":
            try:
                loggers.append(TensorBoardLogger(folder, name="", version="tensorboard", default_hp_metric=False))
            except ModuleNotFoundError as error:
                raise ImportError('logger tensorboard: pip install "mmpos[train]", or logger=csv') from error
        elif name == "wandb":
            try:
                loggers.append(WandbLogger(project=options.project, save_dir=folder, name=folder.name))
            except ModuleNotFoundError as error:
                raise ImportError('logger wandb: pip install "mmpos[wandb]"') from error
        else:
            raise ValueError(f"logger.names: expected csv, tensorboard or wandb, got {name!r}")
    return loggers


def build_strategy(options: TrainerConfig, model: nn.Module) -> Any:
    """A Lightning strategy name, or FSDP with one shard unit per transformer block."""
    if options.strategy != "fsdp":
        return options.strategy
    from lightning.pytorch.strategies import FSDPStrategy

    blocks = {type(block) for block in getattr(model, "blocks", [])}
    return FSDPStrategy(auto_wrap_policy=blocks or None, state_dict_type="full")


def build_trainer(
    options: TrainerConfig, model: nn.Module, *, callbacks: list[Any], loggers: list[Any], folder: Path
) -> pl.Trainer:
    """The Lightning trainer of a configuration."""
    torch.set_float32_matmul_precision(options.matmul_precision)
    given = {name: value for name, value in vars(options).items() if name not in ("matmul_precision", "strategy")}
    return pl.Trainer(
        **given,
        strategy=build_strategy(options, model),
        callbacks=callbacks,
        logger=loggers,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # the loaders deal out slices of the global batch themselves
        enable_model_summary=False,
        enable_progress_bar=any(isinstance(callback, Progress) for callback in callbacks),
    )


# -- running ------------------------------------------------------------------------------------------------------


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
) -> float:
    """Train, evaluate and report; returns the monitored metric.

    Args:
        config: plain configuration, as :func:`mmpos.config.compose` returns it.
        folder: run folder; everything is written here.
        ckpt_path: checkpoint to continue from.
        single_process: refuse to start further processes, which inside a Hydra multi-run would start sweeps.
        overrides: what the user changed on the command line besides recipe and seed, for the record.
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
    module = Classifier(
        model,
        num_classes=data.num_classes,
        optimizer=config["optimizer"],
        objective=config["objective"],
        seed=config["seed"],
        config=config,
        tasks=getattr(data, "tasks", None),
    )
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


def evaluate(
    config: Mapping[str, Any],
    data: Any,
    checkpoint: Path,
    folder: Path,
    *,
    sizes: Sequence[int] | None = None,
    device: str = "auto",
    command: str | None = None,
) -> None:
    """The evaluation of a configuration on the weights of a checkpoint; writes results and report into ``folder``."""
    evaluation = dict(config["evaluation"])
    name = evaluation.pop("name", None)
    if name in (None, "none"):
        return
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if (name == "frames") != hasattr(data, "frames"):
        raise ValueError(
            f"evaluation: {config['data']['name']} holds {'videos' if name != 'frames' else 'images'}; use "
            f"evaluation={'frames' if name != 'frames' else 'resolution'}"
        )
    if name == "frames":
        from mmpos.evaluation.frames import run_frames

        own_frames = evaluation.pop("frames", None)
        vit = build_model({**config, "model": {**config["model"], "checkpoint": None}}, data)
        load_weights(vit, checkpoint)
        run_frames(
            vit,
            data,
            sizes or config.get("sizes") or own_frames,
            encoding_name=config["encoding"]["name"],
            output_dir=folder,
            device=device,
            config=config,
            **{"command": command, **evaluation},
        )
        return
    from mmpos.evaluation.checkpoint import evaluate_checkpoint

    own_sizes = evaluation.pop("sizes", None)
    names = [] if config["encoding"]["name"] == "own" else encoding_specs(config["encoding"])
    model = config["model"]
    patch = {} if model.get("patch_size") is None else {"patch_size": model["patch_size"]}
    evaluate_checkpoint(
        checkpoint,
        model=model["name"],
        data=data,
        output_dir=folder,
        sizes=sizes or config.get("sizes") or own_sizes,
        encoding=names or None,
        model_options={**patch, **dict(model.get("options") or {})},
        device=device,
        config=config,
        **{"command": command, **evaluation},
    )


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
    evaluate(
        {**source, "evaluation": config["evaluation"]},
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
    strip = lambda c: {key: value for key, value in c.items() if key not in ignored}  # noqa: E731
    return difference(strip(read_config(folder)), strip(config))


def _launched_outside(trainer: pl.Trainer) -> bool:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return environment is not None and environment.creates_processes_externally
