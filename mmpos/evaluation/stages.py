"""Report of a run of several stages: what each came to, side by side, as table and picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmpos.evaluation.document import DPI, Document
from mmpos.evaluation.figures import MARKERS, style_axis
from mmpos.evaluation.results import Row
from mmpos.plotting import PALETTE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Stage", "stages_figure", "write_stages_report"]


@dataclass(frozen=True)
class Stage:
    """One stage of a run.

    Args:
        name: its name.
        folder: where it lies, as a link in the report.
        summary: what the run wrote about it.
        monitor: name of the number in the summary that it was watched by.
        rows: numbers of its evaluation, empty where it had none.
    """

    name: str
    folder: str
    summary: dict[str, Any]
    monitor: str
    rows: list[Row] = field(default_factory=list)

    def accuracy(self, size: int, rule: str) -> Row | None:
        """The accuracy at a size under a resolution rule."""
        return next((r for r in self.rows if (r.size, r.coordinates, r.metric) == (size, rule, "accuracy")), None)


def write_stages_report(folder: Path, stages: Sequence[Stage]) -> Path:
    """Write ``report.md`` and ``report.html``, with a picture where two stages were tested; returns the first."""
    names = " -> ".join(stage.name for stage in stages)
    document = Document(folder.name, f"A run of {len(stages)} stages: {names}.")
    tested = [stage for stage in stages if any(row.metric == "accuracy" for row in stage.rows)]
    if tested:
        sizes, rules = _axes(tested)
        document.heading("Test accuracy")
        rows = [
            [stage.name, rule, *(_percent(stage.accuracy(size, rule)) for size in sizes)]
            for rule in rules
            for stage in tested
        ]
        document.table(["stage", "coordinates", *(str(size) for size in sizes)], rows)
        if len(tested) > 1 and len(sizes) > 1:
            path = folder / "stages.png"
            stages_figure(tested).savefig(path, dpi=DPI)
            document.figure(
                path,
                "Test accuracy of each stage over the size at test, one panel for each resolution rule. Bars: 95 % "
                "intervals from the number of test samples; other seeds vary too.",
                "accuracy of the stages over the test size",
            )
    document.heading("Stages")
    rows = []
    for stage in stages:
        value = stage.summary.get(stage.monitor)
        seconds = stage.summary.get("train_seconds")
        rows.append(
            [
                stage.name,
                stage.folder,
                "-" if value is None else f"{stage.monitor} {value:.4g}",
                str(stage.summary.get("steps", "-")),
                "-" if seconds is None else f"{seconds:.0f} s",
                f"{stage.folder}/report.md" if stage.rows else "-",
            ]
        )
    document.table(["stage", "folder", "at its end", "steps", "training", "report"], rows)
    return document.write(folder, "report", "Each stage has a folder with its configuration, curves and checkpoints.")[
        0
    ]


def stages_figure(stages: Sequence[Stage]) -> Figure:
    """Accuracy over test size, one line for each stage, one panel for each resolution rule."""
    sizes, rules = _axes(stages)
    figure = new_figure(3.6 * len(rules) + 1.4, 3.6)
    axes = figure.subplots(1, len(rules), sharey=True, squeeze=False)[0]
    for axis, rule in zip(axes, rules, strict=True):
        for number, stage in enumerate(stages):
            found = [row for size in sizes if (row := stage.accuracy(size, rule)) is not None]
            values = [100 * row.value for row in found]
            low = [100 * (row.value - (row.value if row.ci_low is None else row.ci_low)) for row in found]
            high = [100 * ((row.value if row.ci_high is None else row.ci_high) - row.value) for row in found]
            axis.errorbar(
                [row.size for row in found],
                values,
                yerr=[low, high],
                color=PALETTE[number % len(PALETTE)],
                marker=MARKERS[number % len(MARKERS)],
                capsize=3,
                label=stage.name,
            )
        style_axis(axis)
        axis.set_title(rule, fontsize=10)
        axis.set_xticks(sizes)
        axis.set_xlabel("size at test")
        axis.set_ylim(0, 102)
    axes[0].set_ylabel("test accuracy in %")
    axes[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _axes(stages: Sequence[Stage]) -> tuple[list[int], list[str]]:
    """Sizes and rules of the accuracies of all stages."""
    rows = [row for stage in stages for row in stage.rows if row.metric == "accuracy"]
    return sorted({row.size for row in rows}), list(dict.fromkeys(row.coordinates for row in rows))


def _percent(row: Row | None) -> Any:
    if row is None:
        return "-"
    if row.ci_low is None or row.ci_high is None:
        return f"{100 * row.value:.1f} %"
    return f"{100 * row.value:.1f} %", f"{100 * row.ci_low:.1f} to {100 * row.ci_high:.1f}"
