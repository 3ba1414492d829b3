"""Commands: ``train.py`` / ``mmpos-train``, ``evaluate.py`` / ``mmpos-evaluate`` (Hydra) and ``mmpos`` (argparse)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmpos.config import config_dir, overlay, recipe_lines, register, to_plain, write_encoding_configs

__all__ = ["evaluate_command", "main", "train_command"]


# -- train and evaluate: Hydra owns the command line --------------------------------------------------------------


def train_command() -> None:
    """Entry of ``train.py`` and ``mmpos-train``."""
    _hydra_main(_train_job, "train")


def evaluate_command() -> None:
    """Entry of ``evaluate.py`` and ``mmpos-evaluate``."""
    _hydra_main(_evaluate_job, "evaluate")


def _hydra_main(job: Any, name: str) -> None:
    try:
        import hydra
    except ImportError:
        sys.exit(f'mmpos-{name} needs Hydra and Lightning: pip install "mmpos[train]"')
    register()
    hydra.main(config_path=str(config_dir()), config_name=name, version_base="1.3")(job)()


def _train_job(cfg: Any) -> float:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from mmpos.evaluation.weights import newest_checkpoint
    from mmpos.training.run import changes, finished, read_config, train
    from mmpos.training.stages import train_stages

    hydra_cfg = HydraConfig.get()
    folder = Path(hydra_cfg.runtime.output_dir)
    sweep = hydra_cfg.mode == RunMode.MULTIRUN
    config = to_plain(cfg)
    config["recipe_name"] = hydra_cfg.runtime.choices.get("recipe") or "custom"
    ckpt_path = config.pop("ckpt_path")
    resume = config.pop("resume")
    if resume is not None:
        if sweep:
            raise ValueError(
                "resume: one run at a time; an interrupted study goes on with the same command and "
                "hydra.sweep.dir=<its folder>"
            )
        saved = read_config(resume)
        config = overlay(saved, config, [key for key in _overridden(hydra_cfg) if key not in ("resume", "ckpt_path")])
        ckpt_path = ckpt_path or newest_checkpoint(Path(resume) / "checkpoints")
        if ckpt_path is None and not config.get("stages"):
            raise FileNotFoundError(f"resume: {resume}/checkpoints holds no checkpoint; start the run again")
        differences = changes(Path(resume), config)
        print(
            f"resuming {resume} from {Path(ckpt_path).name if ckpt_path else 'its unfinished stage'}; "
            + ("nothing changed" if not differences else "changed:")
        )
        print("".join(f"  {line}\n" for line in differences), end="")
    elif sweep and (folder / "config.yaml").is_file():
        differences = changes(folder, config)
        if differences:
            raise ValueError(
                f"hydra.sweep.dir: {folder} holds a run with another configuration ({'; '.join(differences[:5])}); "
                "choose another folder"
            )
        summary = finished(folder)
        if summary is not None:
            print(f"{folder} is finished already; skipped")
            return float(summary[config["callbacks"]["monitor"]])
        ckpt_path = newest_checkpoint(folder / "checkpoints")
    given = [
        text for text in hydra_cfg.overrides.task if text.split("=")[0] not in ("recipe", "seed", "resume", "ckpt_path")
    ]
    if config.get("stages"):
        if ckpt_path is not None:
            raise ValueError(
                "ckpt_path: a run of several stages starts none of them from it; set stages.<name>.model.checkpoint"
            )
        return train_stages(config, folder, single_process=sweep, overrides=given)
    return train(config, folder, ckpt_path=ckpt_path, single_process=sweep, overrides=given)


def _evaluate_job(cfg: Any) -> None:
    from hydra.core.hydra_config import HydraConfig

    from mmpos.training.run import evaluate_run, read_config
    from mmpos.training.stages import last_stage

    hydra_cfg = HydraConfig.get()
    config = to_plain(cfg)
    changed = None
    if config["run"] is not None:
        config["run"] = str(last_stage(Path(config["run"])))
        own = ("run", "checkpoint", "sizes", "device", "evaluation", "seed")
        keys = [key for key in _overridden(hydra_cfg) if key.split(".")[0] not in own]
        changed = overlay(read_config(config["run"]), config, keys)
    evaluate_run(config, Path(hydra_cfg.runtime.output_dir), changed)


def _overridden(hydra_cfg: Any) -> list[str]:
    """Keys and groups the user named on the command line."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return [
        override.key_or_group for override in OverridesParser.create().parse_overrides(list(hydra_cfg.overrides.task))
    ]


# -- mmpos list | show | plot: no Hydra ---------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of ``mmpos``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="mmpos", description="Position encodings for vision and vision-language transformers."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    listing = commands.add_parser("list", help="all encodings, or all position schemes of vision-language decoders")
    listing.add_argument(
        "--kind", choices=("encoding", "scheme"), default="encoding", help="what to list (default: %(default)s)"
    )
    show = commands.add_parser("show", help="facts and options of an encoding")
    show.add_argument("name")
    plot = commands.add_parser("plot", help="picture of an encoding")
    plot.add_argument("name")
    plot.add_argument("--grid", default="14x14", help="rows x columns (default: %(default)s)")
    plot.add_argument("--output", type=Path, help="image file (default: <name>.png)")
    metrics = commands.add_parser("pesi", help="PESI metrics: how well similarity follows distance in the plane")
    metrics.add_argument("names", nargs="*", metavar="name", help="encodings, built untrained")
    metrics.add_argument("--run", type=Path, help="run folder of train.py: the encoding of its model, layer by layer")
    metrics.add_argument("--grid", help="rows x columns (default: 14x14, with --run the training grid)")
    metrics.add_argument("--dim", type=int, default=768, help="model width (default: %(default)s)")
    metrics.add_argument("--heads", type=int, default=12, help="attention heads (default: %(default)s)")
    metrics.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the encoding")
    metrics.add_argument(
        "--kernel",
        choices=("auto", "cosine", "odds", "logits"),
        default="auto",
        help="similarity of methods that act in the attention (default: %(default)s)",
    )
    metrics.add_argument("--json", action="store_true", help="print JSON instead of a table")
    commands.add_parser("recipes", help="recipes of mmpos-train")
    commands.add_parser("configs", help="write configs/encoding/*.yaml of the registered encodings")
    readme = commands.add_parser("readme", help="put the measured numbers of a study into recipes/*/README.md")
    readme.add_argument("study", type=Path, help="folder of a multi-run")
    readme.add_argument(
        "--recipes", type=Path, default=Path("recipes"), help="folder of the recipes (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        _COMMANDS[options.command](options)
    except (ValueError, ImportError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _list(options: argparse.Namespace) -> None:
    if options.kind == "scheme":
        _list_schemes()
        return
    from mmpos.encodings import encoding_class, list_encodings

    rows = []
    for name in list_encodings():
        facts = encoding_class(name).facts
        rows.append(
            [
                name,
                facts.title,
                " ".join(facts.plugs_into) or "-",
                _axes(facts),
                " ".join(facts.resolution_rules),
                facts.source,
            ]
        )
    _table(["name", "method", "acts on", "axes", "other resolutions", "source"], rows)


def _list_schemes() -> None:
    from mmpos.multimodal import published_rules

    rows = [
        [rule.name, rule.block, rule.text, rule.cursor, rule.allocation, rule.made_by, rule.source]
        for rule in published_rules()
    ]
    _table(["name", "block layout", "text rule", "cursor rule", "allocation", "in mmpos.multimodal", "source"], rows)


def _show(options: argparse.Namespace) -> None:
    import inspect

    from mmpos.encodings import encoding_class, encoding_options

    cls = encoding_class(options.name)
    facts = cls.facts
    yes = lambda value: "yes" if value else "no"  # noqa: E731
    summary = inspect.getdoc(cls) or ""
    rows = [
        ["what", summary.split("\n\n")[0].replace("\n", " ")],
        ["source", facts.source],
        ["acts on", ", ".join(facts.plugs_into) or "nothing"],
        ["axes", _axes(facts)],
        [
            "parameters",
            f"{yes(facts.learned)}, {'one set per layer' if facts.scope == 'layer' else 'shared by all layers'}",
        ],
        ["relative", yes(facts.relative)],
        ["needs a grid", yes(facts.needs_grid)],
        ["fractional places", yes(facts.fractional)],
        ["other resolutions", ", ".join(facts.resolution_rules) + f" (default {facts.resolution_rules[0]})"],
        ["head dimension", facts.head_dim_rule or "any"],
        ["torch.export", yes(facts.exportable)],
        ["file", f"{cls.__module__}"],
    ]
    _table([options.name, facts.title], rows)
    described = _described(cls)
    _table(
        ["option", "default", "meaning"],
        [
            [name, "required" if default is inspect.Parameter.empty else repr(default), described.get(name, "")]
            for name, default in sorted(encoding_options(options.name).items())
        ],
    )


def _described(cls: type) -> dict[str, str]:
    """Meaning of each option, from the ``Args`` of the docstrings of a class and its bases."""
    import inspect
    import re

    found: dict[str, str] = {}
    for base in cls.__mro__:
        text = inspect.getdoc(base) if base.__dict__.get("__doc__") else None
        part = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)+)", text or "", re.M)
        for name, body in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", part[1] if part else "", re.M):
            found.setdefault(name, " ".join(body.split()))
    return found


def _plot(options: argparse.Namespace) -> None:
    grid = _grid(options.grid)
    from mmpos.plotting import plot_encoding

    output = options.output or Path(f"{options.name}.png")
    plot_encoding(options.name, grid, output)
    print(output)


def _grid(text: str) -> tuple[int, ...]:
    import re

    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise ValueError(f"--grid: expected sizes such as 14x14, got {text!r}")
    return tuple(int(size) for size in text.split("x"))


def _pesi(options: argparse.Namespace) -> None:
    import json

    from mmpos.diagnostics import pesi
    from mmpos.encodings import create_encoding

    if bool(options.names) == (options.run is not None):
        raise ValueError("pesi: expected names of encodings, or --run <run folder>")
    grid = None if options.grid is None else _grid(options.grid)
    stacks: list[tuple[str, Any]]
    if options.run is not None:
        if options.option:
            raise ValueError("--option: the encoding of a run has its options already")
        name, stack, trained = _stack_of_run(options.run)
        grid, stacks = grid or trained, [(name, stack)]
    else:
        import torch

        torch.manual_seed(0)  # learned encodings start at random
        grid = grid or (14, 14)
        settings = {"train_grid": grid, **_options(options.option)}
        stacks = [(name, create_encoding(name, options.dim, options.heads, **settings)) for name in options.names]
    if len(grid) != 2:
        raise ValueError(f"--grid: PESI metrics are of the plane, expected rows x columns, got {grid}")
    rows = []
    for name, stack in stacks:
        found = [pesi(stack, (grid[0], grid[1]), kernel=options.kernel, layer=n) for n in range(stack.depth)]
        same = len({str(metrics) for metrics in found}) == 1
        for layer, metrics in enumerate(found[:1] if same else found):
            rows.append((name, "all" if same else str(layer), metrics))
    if options.json:
        keys = ("undirected", "directed", "asymmetry")
        dicts = [
            {"encoding": name, "layer": layer, "grid": list(grid)} | {key: getattr(metrics, key) for key in keys}
            for name, layer, metrics in rows
        ]
        print(json.dumps(dicts, indent=2))
        return
    numbers = [
        [name, layer, *(f"{value:.4f}" for value in (m.undirected, m.directed, m.asymmetry))] for name, layer, m in rows
    ]
    _table(["encoding", "layer", "M_U", "M_D", "A_SU"], numbers)
    print(
        "M_U, M_D: similarity falls with distance over rings, within directions (2 is best); A_SU: uneven rings (0 is)"
    )


def _options(texts: Sequence[str]) -> dict[str, Any]:
    """Options from ``KEY=VALUE``; a value is JSON, or else text."""
    import json

    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option: expected KEY=VALUE, got {text!r}")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def _stack_of_run(folder: Path) -> tuple[str, Any, tuple[int, ...]]:
    """Name and weights of the encoding of a run, and the grid it was trained on."""
    from mmpos.adapters.timm import stack_of
    from mmpos.evaluation.weights import load_weights, newest_checkpoint
    from mmpos.training.build import build_data, build_model
    from mmpos.training.run import read_config
    from mmpos.training.stages import last_stage

    folder = last_stage(folder)
    config = read_config(folder)
    checkpoint = newest_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        raise FileNotFoundError(f"--run: {folder}/checkpoints holds no checkpoint")
    model = build_model(config, build_data(config), start=False)
    load_weights(model, checkpoint)
    patches: Any = model.patch_embed
    return config["encoding"]["name"], stack_of(model), tuple(patches.grid_size)


def _recipes(_: argparse.Namespace) -> None:
    print(recipe_lines())


def _configs(_: argparse.Namespace) -> None:
    for path in write_encoding_configs():
        print(path)


def _readme(options: argparse.Namespace) -> None:
    from mmpos.training.studies import refresh_readmes

    for path in refresh_readmes(options.study, options.recipes):
        print(path)


_COMMANDS = {
    "list": _list,
    "show": _show,
    "plot": _plot,
    "pesi": _pesi,
    "recipes": _recipes,
    "configs": _configs,
    "readme": _readme,
}


def _axes(facts: Any) -> str:
    low, high = facts.axes
    return str(low) if low == high else f"{low}-{high}"


def _table(header: list[str], rows: list[list[str]]) -> None:
    """A table by rich, or aligned text where rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header) - 1)]
        for row in [header, *rows]:
            print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip())
        return
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:  # in a pipe or a file lines are not cut to a screen width
        console = Console(width=200)
    console.print(table, markup=False)


if __name__ == "__main__":
    sys.exit(main())
