"""The report of a frame-count evaluation: what the run was, what it reached at each length, what the encoding costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from mmpos.encodings import EncodingStack
from mmpos.evaluation.document import Document
from mmpos.evaluation.figures import MARKERS, percent_bars, rule_colours, style_axis
from mmpos.evaluation.report import MEANING, add_figure, cost_rows, encoding_section, finish_report, percent
from mmpos.plotting import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mmpos.evaluation.frames import FrameEvaluation

__all__ = ["frames_figure", "write_frames_report"]

KINDS = {
    "longer": "longer clips: the same step from frame to frame",
    "denser": "denser clips: the same movement in smaller steps",
}
#: what the rules of :mod:`mmpos.evaluation.report` mean when only the number of frames changes
TIME_MEANING = {
    **MEANING,
    "index": "frames keep their spacing, a longer clip runs beyond the trained range",
    "rescaled": "time is stretched onto that of the training clips",
    "interpolated": "the learned table is resampled to the new number of frames",
    "ntk": "the base of the frequencies of time grows with the clip (NTK-aware)",
    "yarn": "low frequencies of time are interpolated, high ones kept, logits warmed (YaRN)",
}


def write_frames_report(
    evaluation: FrameEvaluation,
    model: nn.Module,
    data: Any,
    stack: EncodingStack | None,
    *,
    config: Mapping[str, Any] | None,
    command: str | None,
) -> tuple[Path, Path]:
    """Write ``report.md``, ``report.html`` and their pictures next to ``results.csv``; returns the two paths."""
    folder = evaluation.folder
    tested = ", ".join(map(str, evaluation.frames))
    lead = (
        f"Trained on clips of {evaluation.train_frames} frames, tested without further training on {tested} frames "
        f"under the resolution rules {', '.join(evaluation.rules)}."
    )
    document = Document(f"{evaluation.encoding} on {data.name}", lead)
    document.tiles(_tiles(evaluation))
    document.heading("Accuracy at other frame counts")
    meanings = " ".join(f"{rule}: {TIME_MEANING[rule]}." for rule in evaluation.rules if rule in TIME_MEANING)
    caption = f"Test accuracy over the number of frames, 95 % Wilson interval. {meanings}"
    add_figure(document, folder, "frames", frames_figure(evaluation), caption)
    for clip in evaluation.clips:
        document.paragraph(f"{KINDS.get(clip, clip).capitalize()}.")
        _table(document, evaluation, clip)
    encoding_section(document, stack)
    document.heading("Cost")
    document.table(["quantity", "value"], _cost(evaluation, model, stack))
    numbers = "All numbers of this page are in results.csv, where the column size is the number of frames."
    return finish_report(document, folder, model, data, config=config, command=command, numbers=numbers)


def frames_figure(evaluation: FrameEvaluation) -> Figure:
    """One row per kind of clips, one panel per question, one line per rule; accuracy over the number of frames."""
    questions, clips = evaluation.questions(), evaluation.clips
    figure = new_figure(3.6 * len(questions) + 0.6, 3.1 * len(clips) + 0.5)
    axes = figure.subplots(len(clips), len(questions), squeeze=False, sharex=True, sharey=True)
    colours = rule_colours(evaluation.rules)
    spread = 0.006 * (max(evaluation.frames) - min(evaluation.frames) or max(evaluation.frames))
    for clip, panels in zip(clips, axes, strict=True):
        for task, axis in zip(questions, panels, strict=True):
            metric = evaluation.metric(task, clip)
            for number, rule in enumerate(evaluation.rules):
                rows = [row for count in evaluation.frames if (row := evaluation.row(count, rule, metric)) is not None]
                shift = spread * (number - (len(evaluation.rules) - 1) / 2)  # equal curves stay visible
                values, ends = percent_bars(rows)
                axis.errorbar(
                    [row.size + shift for row in rows],
                    values,
                    ends,
                    color=colours[rule],
                    marker=MARKERS[number % len(MARKERS)],
                    ms=5,
                    lw=1.7,
                    capsize=2.5,
                    elinewidth=1,
                    label=rule,
                )
            style_axis(axis)
            axis.axhline(100 * _chance(evaluation, task), color="#9aa7b4", lw=1, ls=":")
            axis.axvline(evaluation.train_frames, color="#9aa7b4", lw=1, ls="--", zorder=0)
            axis.set_xticks(evaluation.frames)
            axis.set_ylim(0, 103)
            axis.set_title(f"{task or 'all answers right'}, {clip}", fontsize=10, loc="left", fontweight="bold")
        panels[0].set_ylabel("test accuracy (%)", fontsize=9.5)
    for axis in axes[-1]:
        axis.set_xlabel("frames at test time", fontsize=9.5)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, title="coordinates", loc="outside right upper", frameon=False, fontsize=8.5, title_fontsize=8.5
    )
    return figure


def _chance(evaluation: FrameEvaluation, task: str | None) -> float:
    if task is not None:
        return 1 / evaluation.tasks[task]
    chance = 1.0
    for count in evaluation.tasks.values():
        chance /= count
    return chance


def _tiles(evaluation: FrameEvaluation) -> list[tuple[str, str]]:
    tiles = []
    first, clip = evaluation.rules[0], evaluation.clips[0]
    reference = min(evaluation.frames, key=lambda count: abs(count - evaluation.train_frames))
    named: list[str | None] = [*evaluation.tasks] if len(evaluation.tasks) > 1 else [None]
    for task in named:
        row = evaluation.row(reference, first, evaluation.metric(task, clip))
        if row is not None:
            tiles.append((f"{100 * row.value:.1f} %", f"{task or 'accuracy'} at {reference} frames"))
    largest = evaluation.frames[-1]
    for rule in [rule for rule in ("index", "rescaled") if rule in evaluation.rules] if largest != reference else []:
        row = evaluation.row(largest, rule, evaluation.metric(named[0], clip))
        if row is not None:
            tiles.append((f"{100 * row.value:.1f} %", f"{named[0] or 'accuracy'} at {largest} frames, {clip}, {rule}"))
    return tiles


def _table(document: Document, evaluation: FrameEvaluation, clip: str) -> None:
    questions = evaluation.questions()
    header = ["frames", "of training", *(f"{task or 'all'} {rule}" for task in questions for rule in evaluation.rules)]
    rows: list[list[Any]] = [
        [
            str(count),
            f"{count / evaluation.train_frames:.3g} x",
            *(
                percent(evaluation.row(count, rule, evaluation.metric(task, clip)))
                for task in questions
                for rule in evaluation.rules
            ),
        ]
        for count in evaluation.frames
    ]
    trained = evaluation.train_frames
    document.table(header, rows, mark=evaluation.frames.index(trained) if trained in evaluation.frames else None)


def _cost(evaluation: FrameEvaluation, model: nn.Module, stack: EncodingStack | None) -> list[tuple[str, str]]:
    ratio = next((row for row in evaluation.rows if row.metric == "time_over_none"), None)
    rows = cost_rows(model, stack, ratio, "frames")
    for count in evaluation.frames:
        row = evaluation.row(count, evaluation.rules[0], "clips_per_second")
        if row is not None:
            rows.append((f"time per clip of {count} frames", f"{1000 / row.value:.2f} ms ({row.value:,.0f} clips/s)"))
    return rows
