"""Clouds in other frames: one trained model of points, its test clouds turned, shifted, scaled, thinner and denser.

Every cloud is tested once under every condition, in a frame drawn from the seed of the evaluation. Besides the accuracy
there is the part of the clouds that get the same answer as at rest: 1 under a motion that the model does not see.
"""

from __future__ import annotations

import copy
import platform
import statistics
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmpos.evaluation.document import DPI, Document
from mmpos.evaluation.figures import curve_figure, style_axis
from mmpos.evaluation.report import device_name, encoding_facts, flat, percent, saved_config, version
from mmpos.evaluation.resolution import CPU_TOKENS, now
from mmpos.evaluation.results import Row, wilson_interval, write_results
from mmpos.plotting import PALETTE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["POINT_COLUMNS", "Condition", "PointEvaluation", "conditions", "points_figure", "run_points"]

TRAINED = "trained"  # clouds have no resolution: coordinates are read as in training
#: headings of a comparison and the metric that holds each in ``results.csv``
POINT_COLUMNS = {
    "at rest": "accuracy",
    "about z": "about_z_accuracy",
    "any rotation": "any_rotation_accuracy",
    "shifted": "shifted_accuracy",
    "smaller": "smaller_accuracy",
    "larger": "larger_accuracy",
    "fewer points": "fewer_points_accuracy",
    "more points": "more_points_accuracy",
}
_EXAMPLES = 4


@dataclass(frozen=True)
class Condition:
    """What is done to the test clouds.

    Args:
        name: heading in tables.
        motion: arguments of :class:`~mmpos.data.points.Motion`.
        points: points of a cloud.
        meaning: what it does, in words.
    """

    name: str
    motion: Mapping[str, Any]
    points: int
    meaning: str

    @property
    def metric(self) -> str:
        """Name of its accuracy in ``results.csv``."""
        return POINT_COLUMNS[self.name]

    @property
    def same_answer(self) -> str:
        """Name in ``results.csv`` of the part of clouds with the answer they get at rest."""
        return self.name.replace(" ", "_") + "_same_answer"


def conditions(
    points: int, *, shift: float = 6.0, smaller: float = 2 / 3, larger: float = 1.5, fewer: float = 0.5, more: float = 2
) -> list[Condition]:
    """The conditions of an evaluation.

    Args:
        points: points of a training cloud.
        shift: length of the shift, in units of the clouds.
        smaller: factor on coordinates, below 1.
        larger: factor on coordinates, above 1.
        fewer: factor on the number of points, below 1.
        more: factor on the number of points, above 1.
    """
    if not (0 < smaller < 1 < larger and 0 < fewer < 1 < more and shift > 0):
        raise ValueError(
            f"smaller, larger, fewer, more, shift: expected factors below, above, below and above 1 and a positive "
            f"length, got {smaller}, {larger}, {fewer}, {more}, {shift}"
        )
    few, many = max(1, round(fewer * points)), round(more * points)
    return [
        Condition("at rest", {}, points, "as the clouds lie"),
        Condition("about z", {"turn": "z"}, points, "turned about the third axis by any angle"),
        Condition("any rotation", {"turn": "any"}, points, "turned any way, uniform over all rotations"),
        Condition("shifted", {"shift": shift}, points, f"shifted by {shift:g} units in any direction"),
        Condition("smaller", {"scale": smaller}, points, f"all coordinates times {smaller:.3g}"),
        Condition("larger", {"scale": larger}, points, f"all coordinates times {larger:.3g}"),
        Condition("fewer points", {}, few, f"{few} points instead of {points}"),
        Condition("more points", {}, many, f"{many} points instead of {points}"),
    ]


@dataclass(frozen=True)
class PointEvaluation:
    """What was measured.

    Args:
        folder: where table and report are.
        encoding: name in the table.
        rows: the table.
        conditions: what was done to the clouds.
        logit_change: largest change of a logit from that at rest, over the spread of the logits at rest, by condition.
    """

    folder: Path
    encoding: str
    rows: list[Row]
    conditions: list[Condition]
    logit_change: dict[str, float]

    def row(self, metric: str) -> Row | None:
        """A measured number, or ``None``."""
        return next((row for row in self.rows if row.metric == metric), None)


def run_points(
    model: nn.Module,
    data: Any,
    *,
    encoding_name: str,
    output_dir: str | Path,
    shift: float = 6.0,
    smaller: float = 2 / 3,
    larger: float = 1.5,
    fewer: float = 0.5,
    more: float = 2.0,
    seed: int = 0,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    overhead: bool = True,
    config: Mapping[str, Any] | None = None,
    command: str | None = None,
    progress: bool = True,
) -> PointEvaluation:
    """Accuracy of a model of points at rest and in other frames; writes table, picture and report.

    Args:
        model: a model of :func:`mmpos.models.points.create_point_transformer`.
        data: a :class:`~mmpos.data.points.PointData`.
        encoding_name: name in the table.
        output_dir: folder of ``results.csv`` (whose column ``size`` is the points of a training cloud), ``report.md``,
            ``report.html`` and ``points.png``.
        shift: see :func:`conditions`.
        smaller: see :func:`conditions`.
        larger: see :func:`conditions`.
        fewer: see :func:`conditions`.
        more: see :func:`conditions`.
        seed: seed of the frames.
        device: where to run; default where the model is.
        autocast: reduced precision, such as ``torch.bfloat16``.
        overhead: whether to compare time and parameters with the same model without position encoding.
        config: what the run was, shown in the report.
        command: how to repeat it, shown in the report.
        progress: whether to print one line.
    """
    from mmpos.data.points import Motion

    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device if device is None else torch.device(device)
    planned = conditions(data.points, shift=shift, smaller=smaller, larger=larger, fewer=fewer, more=more)
    most = getattr(data, "stored", None)  # scans have no more points than they have
    planned = [condition for condition in planned if most is None or condition.points <= most]
    training = model.training
    model.to(device).eval()
    rows: list[Row] = []
    changes: dict[str, float] = {}
    rest: Tensor | None = None
    try:
        with data.whole():
            for condition in planned:
                loader = data.test_clouds(condition.points, Motion(**condition.motion), seed=seed)
                logits, labels, seconds = _logits(model, loader, device, autocast)
                answers, count = logits.argmax(-1), len(labels)
                right = int((answers == labels).sum())
                interval = wilson_interval(right, count)
                rows.append(Row(encoding_name, data.points, TRAINED, condition.metric, right / count, *interval, count))
                if rest is None:
                    rest = logits
                    speed = count / max(seconds, 1e-9)
                    rows.append(Row(encoding_name, data.points, TRAINED, "clouds_per_second", speed, n=count))
                    continue
                same = int((answers == rest.argmax(-1)).sum())
                interval = wilson_interval(same, count)
                rows.append(
                    Row(encoding_name, data.points, TRAINED, condition.same_answer, same / count, *interval, count)
                )
                changes[condition.name] = float((logits - rest).abs().max() / rest.std().clamp_min(1e-12))
            if overhead:
                clouds = next(iter(data.test_clouds()))[0][:32].to(device)
                rows += _overhead(model, clouds, encoding_name, data.points, device)
    finally:
        model.train(training)
    write_results(folder / "results.csv", rows)
    result = PointEvaluation(folder, encoding_name, rows, planned, changes)
    if progress:
        found = [(condition.name, result.row(condition.metric)) for condition in planned]
        print(
            f"{encoding_name}: "
            + ", ".join(f"{name} {100 * row.value:.1f} %" for name, row in found if row is not None)
        )
    _write_report(result, model, data, config=config, command=command)
    return result


@torch.inference_mode()
def _logits(
    model: nn.Module, loader: Any, device: torch.device, autocast: torch.dtype | None
) -> tuple[Tensor, Tensor, float]:
    """Logits and labels of all clouds, and the seconds of the forward passes. Shape: ``(M, classes)``, ``(M,)``."""
    logits, labels, seconds = [], [], 0.0
    for clouds, classes in loader:
        clouds = clouds.to(device)
        # a CPU is fastest while the distances of a pass stay in its cache
        part = max(1, CPU_TOKENS // clouds.shape[1]) if device.type == "cpu" else len(clouds)
        start = now(device)
        with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
            logits.append(torch.cat([model(few) for few in clouds.split(part)]))
        seconds += now(device) - start
        labels.append(classes)
    return torch.cat(logits).double().cpu(), torch.cat(labels), seconds


@torch.inference_mode()
def _overhead(model: Any, clouds: Tensor, encoding: str, size: int, device: torch.device) -> list[Row]:
    """Rows ``encoding_parameters`` and ``time_over_none``; rounds alternate with the model without positions."""
    from mmpos.encodings import create_encoding

    stack = model.position_encoding
    first = stack.encodings_of(0)[0]
    bare = copy.deepcopy(model)
    bare.position_encoding = create_encoding("none", first.dim, first.num_heads, stack.depth, axes=first.axes)
    bare.to(device).eval()
    ratios: list[float] = []
    spent = 0.0
    model(clouds), bare(clouds)
    while len(ratios) < 5 or (len(ratios) < 25 and spent < 3.0):
        order = (model, bare) if len(ratios) % 2 else (bare, model)
        ticks = [now(device)]
        for each in order:
            each(clouds)
            ticks.append(now(device))
        first_time, second_time = ticks[1] - ticks[0], ticks[2] - ticks[1]
        ratios.append(first_time / second_time if order[0] is model else second_time / first_time)
        spent += first_time + second_time
    count = float(sum(parameter.numel() for parameter in stack.parameters()))
    return [
        Row(encoding, size, TRAINED, "encoding_parameters", count),
        Row(encoding, size, TRAINED, "time_over_none", statistics.median(ratios), n=len(ratios)),
    ]


# -- report -----------------------------------------------------------------------------------------------------------


def points_figure(evaluation: PointEvaluation, data: Any) -> Figure:
    """Test clouds at rest and turned, seen from the front, and a bar for each condition."""
    from mmpos.data.points import Motion

    figure = new_figure(11.0, 4.2)
    halves: Any = figure.subfigures(1, 2, width_ratios=[1, 1.25])
    left, right = halves
    index = torch.arange(min(_EXAMPLES, len(data.labels("test"))))
    panels = left.subplots(2, len(index), squeeze=False, sharex=True, sharey=True)
    clouds = data.clouds("test", index, 0, data.points)
    turned = Motion("any")(clouds, index, seed=data.source("test", 0)[0])
    for row, shown, name in zip(panels, (clouds, turned), ("at rest", "any rotation"), strict=True):
        for axis, cloud, label in zip(row, shown, data.labels("test")[index].tolist(), strict=True):
            axis.scatter(cloud[:, 0], cloud[:, 2], c=cloud[:, 1], s=2.5, cmap="viridis", linewidths=0)
            axis.set_aspect("equal")
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_title(data.class_names[label], fontsize=8, color="#33414e")
        row[0].set_ylabel(name, fontsize=9)
    axis = right.subplots()
    rows = [row for condition in evaluation.conditions if (row := evaluation.row(condition.metric)) is not None]
    values = [100 * row.value for row in rows]
    low = [max(0.0, value - 100 * (row.ci_low or 0)) for value, row in zip(values, rows, strict=True)]
    high = [max(0.0, 100 * (row.ci_high or 0) - value) for value, row in zip(values, rows, strict=True)]
    axis.bar(range(len(rows)), values, yerr=[low, high], color=PALETTE[0], width=0.62, capsize=3, zorder=2)
    axis.axhline(values[0], color=PALETTE[1], lw=1.2, ls="--", zorder=3)
    axis.axhline(100 / data.num_classes, color="#9aa7b4", lw=1, ls=":", zorder=3)
    for place, (value, top) in enumerate(zip(values, high, strict=True)):
        axis.text(place, value + top + 1, f"{value:.1f}", ha="center", fontsize=8.5, color="#1b2733")
    style_axis(axis)
    axis.set_xticks(range(len(rows)), [condition.name.replace(" ", "\n") for condition in evaluation.conditions])
    axis.set_ylim(0, 112)
    axis.set_yticks(range(0, 101, 20))
    axis.set_ylabel("test accuracy (%)", fontsize=9.5)
    return figure


def _write_report(
    evaluation: PointEvaluation,
    model: Any,
    data: Any,
    *,
    config: Mapping[str, Any] | None,
    command: str | None,
) -> None:
    folder = evaluation.folder
    config = saved_config(folder) if config is None else config
    stack = model.position_encoding
    facts = data.facts()
    document = Document(
        f"{evaluation.encoding} on {data.name}",
        f"Trained on clouds of {facts['training clouds']}; tested without further training in other frames.",
    )
    tiles = []
    for name in ("at rest", "about z", "any rotation", "shifted"):
        row = evaluation.row(POINT_COLUMNS[name])
        if row is not None:
            tiles.append((f"{100 * row.value:.1f} %", name))
    document.tiles(tiles)
    document.heading("Accuracy in other frames")
    path = folder / "points.png"
    points_figure(evaluation, data).savefig(path, dpi=DPI)
    document.figure(
        path,
        "Left: test clouds seen along y, which the colour shows. Right: accuracy with 95 % Wilson interval; dashed is "
        "the accuracy at rest, dotted is chance.",
        "points",
    )
    table: list[list[Any]] = []
    for condition in evaluation.conditions:
        same = evaluation.row(condition.same_answer)
        change = evaluation.logit_change.get(condition.name)
        table.append(
            [
                condition.name,
                condition.meaning,
                percent(evaluation.row(condition.metric)),
                percent(same),
                "–" if change is None else f"{change:.2g}",
            ]
        )
    document.table(["test clouds", "what was done", "accuracy", "same answer as at rest", "change of logits"], table, 0)
    document.paragraph(
        "Change of logits: the largest over all clouds and classes, in standard deviations of the logits at rest. A "
        "motion that the model cannot see leaves rounding, unless rounding moves the centre of a group. Tokens hold "
        f"{_CONTENT.get(model.embed.local, model.embed.local)}."
    )
    document.heading("The encoding")
    document.table(["fact", *stack.names], encoding_facts(stack))
    document.heading("Cost")
    cost = [("parameters of the model", f"{sum(p.numel() for p in model.parameters()):,}")]
    own, ratio = evaluation.row("encoding_parameters"), evaluation.row("time_over_none")
    speed = evaluation.row("clouds_per_second")
    if own is not None:
        cost.append(("of these, position encoding", f"{own.value:,.0f}"))
    if ratio is not None:
        what = "time of a forward pass over the same model without position encoding"
        cost.append((what, f"x {ratio.value:.3f} (median of {ratio.n} alternating rounds)"))
    if speed is not None:
        cost.append(("time per cloud", f"{1000 / speed.value:.2f} ms ({speed.value:,.0f} clouds/s)"))
    document.table(["quantity", "value"], cost)
    document.heading("The run")
    metrics = folder / "metrics.csv"
    curve = curve_figure(metrics) if metrics.is_file() else None
    if curve is not None:
        curve.savefig(folder / "training.png", dpi=DPI)
        document.figure(
            folder / "training.png", "Training: loss and accuracy by optimizer step (metrics.csv).", "training"
        )
    document.table(["data", ""], [(name, str(value)) for name, value in facts.items()])
    if command:
        document.code(command)
    if config:
        document.table(["setting", "value"], flat(config), fold="All settings of the run")
    document.paragraph(
        "All numbers of this page but the change of logits are in results.csv, where the column size is the points of "
        "a training cloud."
    )
    footer = f"mmpos {version()}, torch {torch.__version__}, Python {platform.python_version()}, {device_name(model)}"
    document.write(folder, "report", footer)


_CONTENT = {
    "distances": "distances inside their group, which no rotation, mirror or shift changes",
    "relative": "offsets of points from the centre of their group, which no shift changes and every rotation does",
}
