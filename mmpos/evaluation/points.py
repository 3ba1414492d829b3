"""Clouds in other frames: one trained model of points, its test clouds turned, shifted, scaled, thinner and denser.

Every cloud is tested once under every condition, in a frame drawn from the seed of the evaluation. Besides the accuracy
there is the part of the clouds that get the same answer as at rest: 1 under a motion that the model does not see.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmpos.evaluation.document import Document
from mmpos.evaluation.figures import bar_axis
from mmpos.evaluation.passes import logits_of, time_ratio
from mmpos.evaluation.report import add_figure, cost_rows, encoding_section, finish_report, percent
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
                logits, labels, seconds = logits_of(model, loader, device, autocast, condition.points)
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
def _overhead(model: Any, clouds: Tensor, encoding: str, size: int, device: torch.device) -> list[Row]:
    """Rows ``encoding_parameters`` and ``time_over_none``, against the model without positions."""
    from mmpos.encodings import create_encoding

    stack = model.position_encoding
    first = stack.encodings_of(0)[0]
    bare = copy.deepcopy(model)
    bare.position_encoding = create_encoding("none", first.dim, first.num_heads, stack.depth, axes=first.axes)
    bare.to(device).eval()
    ratio, rounds = time_ratio(model, bare, clouds, device)
    count = float(sum(parameter.numel() for parameter in stack.parameters()))
    return [
        Row(encoding, size, TRAINED, "encoding_parameters", count),
        Row(encoding, size, TRAINED, "time_over_none", ratio, n=rounds),
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
    values = bar_axis(axis, rows, [condition.name for condition in evaluation.conditions])
    axis.axhline(values[0], color=PALETTE[1], lw=1.2, ls="--", zorder=3)
    axis.axhline(100 / data.num_classes, color="#9aa7b4", lw=1, ls=":", zorder=3)
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
    add_figure(
        document,
        folder,
        "points",
        points_figure(evaluation, data),
        "Left: test clouds seen along y, which the colour shows. Right: accuracy with 95 % Wilson interval; dashed is "
        "the accuracy at rest, dotted is chance.",
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
    encoding_section(document, stack)
    document.heading("Cost")
    cost = cost_rows(model, stack, evaluation.row("time_over_none"), "points")
    speed = evaluation.row("clouds_per_second")
    if speed is not None:
        cost.append(("time per cloud", f"{1000 / speed.value:.2f} ms ({speed.value:,.0f} clouds/s)"))
    document.table(["quantity", "value"], cost)
    numbers = (
        "All numbers of this page but the change of logits are in results.csv, where the column size is the points of "
        "a training cloud."
    )
    finish_report(document, folder, model, data, config=config, command=command, numbers=numbers)


_CONTENT = {
    "distances": "distances inside their group, which no rotation, mirror or shift changes",
    "relative": "offsets of points from the centre of their group, which no shift changes and every rotation does",
}
