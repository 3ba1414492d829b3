"""The configuration of a run: its schema, where the YAML files are, and how a configuration is composed and stored.

Hydra's objects stop here. Everything below works on plain dataclasses, dicts and lists (:func:`to_plain`), so a
checkpoint never holds an OmegaConf node and a list in a file is a list in the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

__all__ = [
    "EvaluateConfig",
    "TrainConfig",
    "compose",
    "config_dir",
    "difference",
    "encoding_yaml",
    "recipe_lines",
    "register",
    "to_plain",
    "write_encoding_configs",
]

MISSING: Any = "???"  # OmegaConf's mark of a value that has to be given


# -- schema -------------------------------------------------------------------------------------------------------


@dataclass
class EncodingConfig:
    """Which encoding, by registry name (``learned+rope_mixed`` for several), and its options."""

    name: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelConfig:
    """Which ViT: ``vit_micro`` or any timm name. ``options`` go to the constructor of the model.

    Training starts from the weights of ``checkpoint``, except for the names ``fresh`` matches, and holds the parameters
    ``frozen`` matches (``["*", "!head.*"]`` for a linear probe).
    """

    name: str = MISSING
    patch_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    fresh: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    compile: bool = False


@dataclass
class ObjectiveConfig:
    """What is minimised, by name, with its ``options``.

    ``classification`` takes ``ce`` or ``bce``, smoothed, on images that may be mixed (alphas of 0 switch mixing off).
    """

    name: str = "classification"
    options: dict[str, Any] = field(default_factory=dict)
    loss: str = "ce"
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5


@dataclass
class OptimizerConfig:
    """A timm optimizer and its schedule per step: linear warm-up, then ``cosine`` or ``constant``."""

    name: str = MISSING
    lr: float = MISSING
    weight_decay: float = 0.0
    betas: list[float] | None = None
    eps: float | None = None
    schedule: str = "cosine"
    warmup: float = 0.05
    warmup_lr: float = 0.0
    min_lr: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainerConfig:
    """Arguments of ``lightning.Trainer``; ``strategy`` is ``auto``, ``ddp``, ``fsdp`` or another Lightning name."""

    accelerator: str = "auto"
    devices: Any = "auto"
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str = "32-true"
    max_epochs: int = 10
    max_steps: int = -1
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    log_every_n_steps: int = 25
    check_val_every_n_epoch: int = 1
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    overfit_batches: Any = 0.0
    fast_dev_run: Any = False
    deterministic: bool = False
    benchmark: bool = False
    detect_anomaly: bool = False
    profiler: str | None = None
    matmul_precision: str = "highest"


@dataclass
class LoggerConfig:
    """Loggers by name: ``csv``, ``tensorboard``, ``wandb``."""

    names: list[str] = field(default_factory=lambda: ["csv", "tensorboard"])
    project: str = "mmpos"


@dataclass
class CallbacksConfig:
    """Checkpoints, averaging and what is shown. ``checkpoint_every_n_steps`` is how much a killed run may lose."""

    monitor: str = "val/accuracy"
    mode: str = "max"
    checkpoint_every_n_steps: int = 100
    ema_decay: float | None = None
    ema_start_step: int = 0
    progress: bool = True


@dataclass
class TrainConfig:
    """The whole configuration of ``train.py``."""

    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: dict[str, Any] = field(default_factory=dict)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    evaluation: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, Any] = field(default_factory=dict)
    sizes: list[int] | None = None
    seed: int = 0
    recipe_name: str = "custom"
    resume: str | None = None
    ckpt_path: str | None = None


@dataclass
class EvaluateConfig:
    """The whole configuration of ``evaluate.py``: a run folder, or a checkpoint with model, encoding and data.

    The encoding ``own`` is whatever the timm model comes with.
    """

    encoding: EncodingConfig = field(default_factory=lambda: EncodingConfig(name="own"))
    model: ModelConfig = field(default_factory=ModelConfig)
    data: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    run: str | None = None
    checkpoint: str | None = None
    sizes: list[int] | None = None
    device: str = "auto"
    seed: int = 0


# -- files --------------------------------------------------------------------------------------------------------


def config_dir() -> Path:
    """Folder of the YAML files: ``configs/`` of a checkout, ``mmpos/_configs`` of an installed wheel."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_configs", package.parent / "configs"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(
        f"configs: no train.yaml in {package / '_configs'} or {package.parent / 'configs'}; reinstall mmpos or "
        "run from a complete checkout"
    )


def recipe_lines(_: Any = None) -> str:
    """The recipes with one line each, for ``--help``: the second comment of the file, after its command."""
    rows = []
    for path in sorted((config_dir() / "recipe").glob("*.yaml")):
        comments = [
            line.lstrip("# ")
            for line in path.read_text().splitlines()
            if line.startswith("# ") and "@package" not in line
        ]
        rows.append(f"  {path.stem:<26}{next(iter(comments[1:]), '')}")
    return "\n".join(rows)


def run_folder(resume: str | None, recipe: str | None, now: str) -> str:
    """Where a run writes: the folder it resumes, else ``runs/<recipe>/<time>``."""
    return resume if resume else f"runs/{recipe or 'custom'}/{now}"


def job_folder(recipe: str | None, seed: Any, overrides: str) -> str:
    """Folder of one job inside a sweep, readable and without characters that shells or Hydra give a meaning to."""
    extra = re.sub(r"[^A-Za-z0-9_.-]+", "-", overrides).strip("-")
    return "/".join(part[:120] for part in (recipe or "custom", extra, f"seed{seed}") if part)


def register() -> None:
    """Make the schema and the resolvers known to Hydra; safe to call again."""
    from omegaconf import OmegaConf

    _import_hydra().core.config_store.ConfigStore.instance().store("train_schema", TrainConfig)
    _import_hydra().core.config_store.ConfigStore.instance().store("evaluate_schema", EvaluateConfig)
    OmegaConf.register_new_resolver("mmpos.recipes", recipe_lines, replace=True)
    OmegaConf.register_new_resolver("mmpos.run_folder", run_folder, replace=True)
    OmegaConf.register_new_resolver("mmpos.job_folder", job_folder, replace=True)


def compose(overrides: Sequence[str] = (), primary: str = "train") -> dict[str, Any]:
    """The resolved configuration as plain containers, for notebooks: ``compose(["recipe=vit_ropemixed"])``."""
    hydra = _import_hydra()
    register()
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        return to_plain(hydra.compose(primary, list(overrides)))


def to_plain(cfg: Any) -> dict[str, Any]:
    """Resolved dicts and lists of an OmegaConf node."""
    from omegaconf import DictConfig, OmegaConf

    out = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True) if isinstance(cfg, DictConfig) else cfg
    return dict(out)  # type: ignore[arg-type]


def check_keys(section: str, given: Mapping[str, Any], schema: type) -> None:
    """Raise for keys a section of the schema does not have: Hydra's ``+key=`` gets past its own check."""
    known = {entry.name for entry in fields(schema)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{section}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def difference(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line ``key: old -> new`` for each value in which two plain configurations differ."""
    lines: list[str] = []
    for key in dict.fromkeys([*old, *new]):
        a, b, name = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += difference(a, b, f"{name}.")
        elif a != b:
            lines.append(f"{name}: {a} -> {b}")
    return lines


def overlay(saved: Mapping[str, Any], composed: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A saved configuration with the values the user named on this command line taken from the composed one.

    Args:
        saved: plain configuration of the run folder.
        composed: plain configuration of this command.
        keys: dotted keys or group names that were overridden.
    """
    import copy

    out = copy.deepcopy(dict(saved))
    for key in keys:
        parts = key.lstrip("+~").split("@")[0].split(".")
        if parts[0] in ("recipe", "debug"):
            raise ValueError(
                f"{parts[0]}: cannot change in a run that exists; give the single values to change, such as "
                "trainer.devices=1"
            )
        source: Any = composed
        target: Any = out
        for part in parts[:-1]:
            source, target = source[part], target.setdefault(part, {})
        if parts[-1] in source:
            target[parts[-1]] = copy.deepcopy(source[parts[-1]])
        else:
            target.pop(parts[-1], None)
    return out


# -- encoding files -----------------------------------------------------------------------------------------------

#: options that follow from the model an encoding is attached to
MODEL_FACTS = ("channels", "patch_size")


def encoding_yaml(name: str) -> str:
    """The text of ``configs/encoding/<name>.yaml``: every option with its default, but those the model determines."""
    import inspect

    import yaml  # type: ignore[import-untyped]

    from mmpos.encodings import encoding_class, encoding_options

    facts = encoding_class(name).facts
    options = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in sorted(encoding_options(name).items())
        if value is not inspect.Parameter.empty and key not in MODEL_FACTS
    }
    body = yaml.safe_dump({"name": name, "options": options}, sort_keys=False, default_flow_style=False)
    return f"# {facts.title}: {facts.source}\n{body}"


def write_encoding_configs() -> list[Path]:
    """Write the file of every registered encoding; returns the ones that changed."""
    from mmpos.encodings import list_encodings

    changed = []
    for name in list_encodings():
        path = config_dir() / "encoding" / f"{name}.yaml"
        text = encoding_yaml(name)
        if not path.is_file() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            changed.append(path)
    return changed


def _import_hydra() -> Any:
    try:
        import hydra
        import hydra.core.config_store
    except ImportError as error:
        raise ImportError('Hydra is needed to compose configurations: pip install "mmpos[train]"') from error
    return hydra
