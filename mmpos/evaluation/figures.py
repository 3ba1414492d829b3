"""Pictures of an evaluation: accuracy over resolution, speed, confusion, mistakes, training curve."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpos.plotting import PALETTE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mmpos.evaluation.resolution import Evaluation
    from mmpos.evaluation.results import Row

__all__ = [
    "RULE_COLOURS",
    "bar_axis",
    "confusion_figure",
    "curve_figure",
    "mistakes_figure",
    "percent_bars",
    "resolution_figure",
    "style_axis",
]

#: one colour per resolution rule, the same in every report
RULE_COLOURS = {
    "index": PALETTE[1],
    "rescaled": PALETTE[0],
    "interpolated": PALETTE[0],
    "ntk": PALETTE[2],
    "yarn": PALETTE[3],
    "linear": PALETTE[4],
    "own": PALETTE[6],
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def rule_colours(rules: Sequence[str]) -> dict[str, str]:
    """A colour for every rule; rules without one of their own take what is left."""
    used = {RULE_COLOURS[rule] for rule in rules if rule in RULE_COLOURS}
    free = [colour for colour in PALETTE[::-1] if colour not in used] or list(PALETTE)
    out = {}
    for rule in rules:
        out[rule] = RULE_COLOURS.get(rule) or free.pop(0)
        free = free or list(PALETTE)
    return out


def percent_bars(rows: Sequence[Row]) -> tuple[list[float], list[list[float]]]:
    """Values in percent, and how far their intervals reach below and above them."""
    values = [100 * row.value for row in rows]
    low = [max(0.0, value - 100 * (row.ci_low or 0)) for value, row in zip(values, rows, strict=True)]
    high = [max(0.0, 100 * (row.ci_high or 0) - value) for value, row in zip(values, rows, strict=True)]
    return values, [low, high]


def bar_axis(axis: Any, rows: Sequence[Row], names: Sequence[str]) -> list[float]:
    """A bar with its interval and its number for each row; returns the values in percent."""
    values, ends = percent_bars(rows)
    axis.bar(range(len(rows)), values, yerr=ends, color=PALETTE[0], width=0.62, capsize=3, zorder=2)
    for place, (value, top) in enumerate(zip(values, ends[1], strict=True)):
        axis.text(place, value + top + 1, f"{value:.1f}", ha="center", fontsize=9, color="#1b2733")
    style_axis(axis)
    axis.set_xticks(range(len(rows)), [name.replace(" ", "\n") for name in names])
    axis.set_ylim(0, 112)
    axis.set_yticks(range(0, 101, 20))
    return values


def style_axis(axis: Any) -> None:
    """Light grid behind the data, no box."""
    axis.grid(True, color="#e3e8ee", lw=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#9aa7b4")
    axis.tick_params(labelsize=9, colors="#33414e")


def resolution_figure(evaluation: Evaluation, chance: float) -> Figure:
    """Accuracy with 95 % interval, and images per second, over the image size; one line per resolution rule."""
    figure = new_figure(10.2, 4.1)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.75, 1]})
    colours = rule_colours(evaluation.rules)
    spread = 0.004 * (max(evaluation.sizes) - min(evaluation.sizes) or max(evaluation.sizes))
    for number, rule in enumerate(evaluation.rules):
        rows = [row for size in evaluation.sizes if (row := evaluation.accuracy(size, rule)) is not None]
        if not rows:
            continue
        shift = spread * (number - (len(evaluation.rules) - 1) / 2)  # intervals of equal curves stay visible
        y, ends = percent_bars(rows)
        left.errorbar(
            [row.size + shift for row in rows],
            y,
            ends,
            color=colours[rule],
            marker=MARKERS[number % len(MARKERS)],
            ms=5.5,
            lw=1.8,
            capsize=2.5,
            elinewidth=1,
            label=rule,
        )
        speed = [evaluation.value(row.size, rule, "images_per_second") or np.nan for row in rows]
        right.plot(
            [row.size for row in rows], speed, color=colours[rule], marker=MARKERS[number % len(MARKERS)], ms=5, lw=1.5
        )
    left.axhline(100 * chance, color="#9aa7b4", lw=1, ls=":")
    left.text(
        0.5,
        100 * chance - 1,
        "chance",
        transform=left.get_yaxis_transform(),
        ha="center",
        va="top",
        fontsize=8,
        color="#5b6b7b",
    )
    for axis in (left, right):
        style_axis(axis)
        axis.axvline(evaluation.train_size, color="#9aa7b4", lw=1, ls="--", zorder=0)
        axis.set_xticks(evaluation.sizes)
        axis.set_xlabel("image size at test time (px)", fontsize=9.5)
    top = left.get_ylim()[1]
    left.set_ylim(0, max(103.0, min(top, 104.0)))
    left.text(evaluation.train_size, 1.5, " trained here", fontsize=8, color="#5b6b7b", va="bottom")
    left.set_ylabel("test accuracy (%)", fontsize=9.5)
    left.set_title("Accuracy, 95 % Wilson interval", fontsize=10.5, loc="left", fontweight="bold")
    left.legend(
        title="coordinates",
        fontsize=8.5,
        title_fontsize=8.5,
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0.02, 0.1),
    )
    right.set_ylim(bottom=0)
    right.set_ylabel("images per second", fontsize=9.5)
    right.set_title("Speed of this evaluation", fontsize=10.5, loc="left", fontweight="bold")
    return figure


def confusion_figure(labels: np.ndarray, predictions: np.ndarray, names: Sequence[str]) -> Figure:
    """Which class is taken for which: rows are true classes, colour is the part of the row, numbers are images."""
    count = len(names)
    table = np.zeros((count, count), dtype=np.int64)
    np.add.at(table, (labels, predictions), 1)
    part = table / np.maximum(table.sum(1, keepdims=True), 1)
    side = min(9.0, 2.6 + 0.4 * count)
    figure = new_figure(side, side * 0.92)
    axis = figure.subplots()
    image = axis.imshow(part, cmap="Blues", vmin=0, vmax=1)
    if count <= 25:
        for row, column in np.argwhere(table > 0):
            colour = "white" if part[row, column] > 0.55 else "#1b2733"
            axis.text(
                column,
                row,
                table[row, column],
                ha="center",
                va="center",
                fontsize=8 if count <= 12 else 6.5,
                color=colour,
            )
        axis.set_xticks(
            range(count),
            names,
            rotation=0 if max(map(len, names)) < 3 else 60,
            ha="right" if max(map(len, names)) > 2 else "center",
        )
        axis.set_yticks(range(count), names)
    axis.tick_params(labelsize=8, length=0)
    axis.set_xlabel("predicted", fontsize=9.5)
    axis.set_ylabel("true", fontsize=9.5)
    for spine in axis.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(image, ax=axis, fraction=0.046, pad=0.03)
    bar.set_label("part of the true class", fontsize=8.5)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    return figure


def mistakes_figure(predictions: Mapping[str, np.ndarray], names: Sequence[str]) -> Figure:
    """The most confident mistakes with what the model said and what is true."""
    images, index = predictions["example_images"], predictions["example_index"]
    columns = min(8, len(index))
    rows = -(-len(index) // columns)
    figure = new_figure(1.25 * columns + 0.2, 1.62 * rows)
    axes = np.atleast_1d(figure.subplots(rows, columns)).reshape(-1)
    for axis in axes:
        axis.set_axis_off()
    for axis, image, i in zip(axes, images, index, strict=False):
        pixels = image.transpose(1, 2, 0) if image.shape[0] == 3 else image[0]
        axis.imshow(pixels, cmap=None if pixels.ndim == 3 else "gray", vmin=0, vmax=255)
        said, true = names[predictions["predictions"][i]], names[predictions["labels"][i]]
        text = f"{said}, is {true}" if len(said) + len(true) < 12 else f"{said[:16]}\nis {true[:16]}"
        axis.set_title(f"{text}\n{100 * predictions['confidence'][i]:.0f} %", fontsize=7.5, color="#33414e")
    return figure


def curve_figure(metrics: Path) -> Figure | None:
    """Loss and validation accuracy over the steps of ``metrics.csv``; ``None`` when it holds neither."""
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "epoch") and value not in (None, "") and row.get("step"):
                x, y = series.setdefault(name, ([], []))
                x.append(float(row["step"]))
                y.append(float(value))
    losses = {name: points for name, points in series.items() if "loss" in name and not name.endswith("_epoch")}
    accuracies = {name: points for name, points in series.items() if "acc" in name}
    if not losses and not accuracies:
        return None
    figure = new_figure(10.2, 3.2)
    axes = figure.subplots(1, 2)
    for axis, title, chosen, factor in zip(axes, ("Loss", "Accuracy (%)"), (losses, accuracies), (1, 100), strict=True):
        for number, (name, (x, y)) in enumerate(chosen.items()):
            marker = "o" if len(x) <= 40 else None
            axis.plot(
                x,
                [factor * value for value in y],
                color=PALETTE[number % len(PALETTE)],
                lw=1.5,
                marker=marker,
                ms=3.5,
                label=name,
            )
        style_axis(axis)
        axis.set_title(title, fontsize=10.5, loc="left", fontweight="bold")
        axis.set_xlabel("step", fontsize=9.5)
        if chosen:
            axis.legend(fontsize=8.5, frameon=False)
    return figure
