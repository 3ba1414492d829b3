"""From a plain configuration to its data module, model, loggers and trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn

from mmpos.adapters._attachment import require
from mmpos.config import (
    CallbacksConfig,
    EncodingConfig,
    LoggerConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainerConfig,
    check_keys,
)
from mmpos.encodings import EncodingStack
from mmpos.evaluation.weights import load_weights
from mmpos.training.callbacks import Progress
from mmpos.training.evaluations import EVALUATIONS
from mmpos.training.objectives import OBJECTIVES

__all__ = [
    "MODELS",
    "SECTIONS",
    "build_data",
    "build_loggers",
    "build_model",
    "build_trainer",
    "check_config",
    "describe",
    "encoding_specs",
    "freeze",
]

SECTIONS = {
    "encoding": EncodingConfig,
    "model": ModelConfig,
    "objective": ObjectiveConfig,
    "optimizer": OptimizerConfig,
    "trainer": TrainerConfig,
    "logger": LoggerConfig,
    "callbacks": CallbacksConfig,
}

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
    objective = (config.get("objective") or {}).get("name", "classification")
    if objective not in OBJECTIVES:
        problems.append(f"objective.name: expected one of {', '.join(OBJECTIVES)}, got {objective!r}")
    evaluation = (config.get("evaluation") or {}).get("name")
    if evaluation not in (None, "none", *EVALUATIONS):
        problems.append(f"evaluation.name: expected one of none, {', '.join(EVALUATIONS)}, got {evaluation!r}")
    if config["model"]["name"] == "vlm_micro":
        require("transformers", "vlm")  # now, and not when the stages before it have trained
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


def build_model(config: Mapping[str, Any], data: Any, *, start: bool = True) -> nn.Module:
    """The model of a configuration with its encoding, for the samples and classes of ``data``.

    Args:
        config: plain configuration of a run.
        data: its data module.
        start: load the weights ``model.checkpoint`` names, except those that ``model.fresh`` leaves at their
            initialisation, and hold those that match ``model.frozen``.
    """
    options = config["model"]
    build = MODELS.get(options["name"], build_vit)
    model = build(config, data)
    if start:
        if options.get("checkpoint"):
            load_weights(model, options["checkpoint"], fresh=options.get("fresh") or ())
        freeze(model, options.get("frozen") or ())
    return model


def build_vit(config: Mapping[str, Any], data: Any) -> nn.Module:
    """A ViT for images, or for videos where the data module counts ``frames``."""
    from mmpos.models import create_video_vit, create_vit

    model = config["model"]
    options = dict(model.get("options") or {})
    if model.get("patch_size") is not None:
        options["patch_size"] = model["patch_size"]
    if data.evaluation == "points":
        raise ValueError(
            f"model.name: {data.name} holds point clouds, which {model['name']!r} cannot read; use model=point_micro"
        )
    if data.evaluation == "vlm":
        raise ValueError(
            f"model.name: {data.name} asks questions, which {model['name']!r} cannot answer; use model=vlm_micro"
        )
    frames = getattr(data, "frames", None)
    create: Any = create_vit if frames is None else partial(create_video_vit, frames=frames)
    return create(
        model["name"],
        encoding=encoding_specs(config["encoding"]),
        image_size=data.image_size,
        in_chans=data.in_chans,
        num_classes=data.num_classes,
        **options,
    )


def build_points(config: Mapping[str, Any], data: Any) -> nn.Module:
    """A transformer over point clouds."""
    from mmpos.models import create_point_transformer

    model = config["model"]
    if data.evaluation != "points":
        raise ValueError(
            f"model.name: {model['name']!r} reads point clouds, and {data.name} holds none; use data=mnist_points or "
            "model=vit_micro"
        )
    if model.get("patch_size") is not None:
        raise ValueError(f"model.patch_size: {model['name']!r} has no patches, got {model['patch_size']}; set null")
    return create_point_transformer(
        encoding=encoding_specs(config["encoding"]),
        num_classes=data.num_classes,
        features=data.in_chans - 3,
        **dict(model.get("options") or {}),
    )


def build_cswin(config: Mapping[str, Any], data: Any) -> nn.Module:
    """CSWin for images of any size; its encoding acts inside its stripes."""
    from mmpos.models.cswin import CSWin

    model = config["model"]
    if data.evaluation not in ("resolution", "three_cell"):
        raise ValueError(
            f"model.name: {model['name']!r} reads images, and {data.name} holds none; use data=mnist5k or another model"
        )
    specs = encoding_specs(config["encoding"])
    if len(specs) > 1:
        raise ValueError(f"encoding.name: {model['name']!r} takes lepe or none, got {config['encoding']['name']!r}")
    patch = {} if model.get("patch_size") is None else {"patch": model["patch_size"]}
    return CSWin(
        data.num_classes, in_chans=data.in_chans, encoding=specs[0], **patch, **dict(model.get("options") or {})
    )


def build_vlm(config: Mapping[str, Any], data: Any) -> nn.Module:
    """A small vision-language model, or its tower with an output for each cell."""
    from mmpos.models.vlm import create_dense_tower, create_vlm

    model = config["model"]
    if data.evaluation != "vlm":
        raise ValueError(
            f"model.name: {model['name']!r} answers questions about images, and {data.name} asks none; use "
            "data=mnist_grounding or model=vit_micro"
        )
    options = dict(model.get("options") or {})
    if model.get("patch_size") is not None:
        options["tower"] = {**dict(options.get("tower") or {}), "patch_size": model["patch_size"]}
    common = {"encoding": encoding_specs(config["encoding"]), "in_chans": data.in_chans}
    if model["name"] == "vlm_tower":
        return create_dense_tower(num_classes=len(data.objects), **common, **options)
    words = data.vocabulary
    return create_vlm(
        vocabulary=len(words), image_token=words.IMAGE, ordered=data.ordered, **common, **_with_places(options)
    )


def _with_places(options: dict[str, Any]) -> dict[str, Any]:
    """``visual_encoding: {name: sincos, base: 100}`` as a pair (name, options)."""
    chosen = options.get("visual_encoding")
    if isinstance(chosen, Mapping):
        rest = {key: value for key, value in chosen.items() if key != "name"}
        options["visual_encoding"] = (str(chosen["name"]), rest)
    return options


#: models with a builder of their own, by ``model.name``; every other name is ``vit_micro`` or a ViT of timm
MODELS: dict[str, Callable[[Mapping[str, Any], Any], nn.Module]] = {
    "point_micro": build_points,
    "cswin_micro": build_cswin,
    "vlm_micro": build_vlm,
    "vlm_tower": build_vlm,
}


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Hold the parameters that match any pattern, except those that match one starting with ``!``.

    Args:
        model: the model; ``requires_grad`` of its parameters is set to ``False`` where they are held.
        patterns: shell patterns of parameter names: ``["*", "!head.*"]`` trains a linear probe.
    """
    holds = [pattern for pattern in patterns if not pattern.startswith("!")]
    spares = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    names = [name for name, _ in model.named_parameters()]
    stray = [pattern for pattern in [*holds, *spares] if not any(fnmatchcase(name, pattern) for name in names)]
    if stray:
        raise ValueError(
            f"model.frozen: {', '.join(stray)} matches no parameter; names are such as {', '.join(names[:3])}, "
            f"{', '.join(names[-2:])}"
        )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, p) for p in holds) and not any(fnmatchcase(name, p) for p in spares):
            parameter.requires_grad_(False)


def describe(config: Mapping[str, Any], data: Any, model: nn.Module) -> str:
    """One line on what is about to train."""
    total = sum(p.numel() for p in model.parameters())
    stacks = [module for module in model.modules() if isinstance(module, EncodingStack)]
    own = sum(p.numel() for p in {p for stack in stacks for p in stack.parameters()})
    facts = data.facts()
    samples = facts.get("training clips") or facts.get("training clouds") or f"{data.image_size} px"
    return (
        f"{config['model']['name']} with {config['encoding']['name']}: {total:,} parameters, {own:,} of them "
        f"positions; {config['data']['name']}, {samples}, {data.num_classes} classes"
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
