"""A vision-language model on questions about places: right answers by kind, at the forms of training and beyond.

A box is right from an overlap of one half (REC accuracy at IoU 0.5, as in RefCOCO); other answers are right word for
word. In ``results.csv`` the column encoding holds the position scheme of the decoder, size the visual tokens of a row,
and coordinates the form of what it shows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmpos.evaluation.answers import IOU, box_of, greedy_answers, overlaps, right_answers
from mmpos.evaluation.document import Document
from mmpos.evaluation.figures import style_axis
from mmpos.evaluation.passes import now
from mmpos.evaluation.report import add_figure, cost_rows, encoding_section, finish_report, percent
from mmpos.evaluation.results import Row, wilson_interval, write_results
from mmpos.plotting import PALETTE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mmpos.data.vlm import VlmBatch

__all__ = ["VlmEvaluation", "run_vlm", "vlm_columns", "vlm_figure"]

_EXAMPLES = 6


@dataclass(frozen=True)
class VlmEvaluation:
    """What was measured.

    Args:
        folder: where table and report are.
        scheme: name of the scheme in the table.
        rows: the table.
        forms: names of the tested forms, in order.
        trained: which of them are forms of training.
    """

    folder: Path
    scheme: str
    rows: list[Row]
    forms: tuple[str, ...]
    trained: frozenset[str]

    def row(self, form: str, metric: str) -> Row | None:
        """A measured number, or ``None``."""
        return next((row for row in self.rows if row.coordinates == form and row.metric == metric), None)

    def kinds(self) -> list[str]:
        """Kinds of question, in order."""
        found = dict.fromkeys(row.metric for row in self.rows if row.coordinates in self.forms)
        kinds = [metric.removesuffix("_accuracy") for metric in found if metric.endswith("_accuracy")]
        return [kind for kind in kinds if kind != "all"]


def run_vlm(
    model: Any,
    data: Any,
    *,
    encoding_name: str,
    output_dir: str | Path,
    images: Sequence[Sequence[int]] | None = None,
    several: Sequence[Sequence[int]] | None = None,
    videos: Sequence[Sequence[int]] | None = None,
    count: int = 200,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    overhead: bool = True,
    config: Mapping[str, Any] | None = None,
    command: str | None = None,
    progress: bool = True,
) -> VlmEvaluation:
    """Greedy answers to the test questions of some forms; writes table, picture and report.

    Args:
        model: a :class:`~mmpos.models.vlm.Vlm`.
        data: data with questions, such as :class:`~mmpos.data.grounding.MnistGrounding`.
        encoding_name: encoding of the tower, for the report.
        output_dir: folder of ``results.csv``, ``report.md``, ``report.html`` and ``vlm.png``.
        images: forms of single images to test, as the data set takes them; ``None`` for those of training, as for the
            two below.
        several: forms of several images.
        videos: forms of videos.
        count: test rows of each form, as far as the data have as many.
        device: where to run; default where the model is.
        autocast: reduced precision, such as ``torch.bfloat16``.
        overhead: whether to time the model.
        config: what the run was, shown in the report.
        command: how to repeat it, shown in the report.
        progress: whether to print what is found.
    """
    if count < 1:
        raise ValueError(f"count: expected at least one test row of each form, got {count}")
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device if device is None else torch.device(device)
    forms = data.test_forms(images, several, videos)
    trained = frozenset(form.name for form in data.shapes)
    scheme = str(model.scheme.name)
    training = model.training
    model.to(device).eval()
    rows: list[Row] = []
    examples: list[tuple[VlmBatch, Tensor]] = []
    try:
        for form in forms:
            found, seconds = _answers(model, data, form, count, device, autocast, examples)
            tested = found["all_accuracy"].shape[0]
            for metric, values in found.items():
                told = ~values.isnan()
                value, n = float(values[told].double().mean()), int(told.sum())
                ends: tuple[float | None, float | None] = (None, None)
                if metric.endswith("accuracy"):
                    # questions about one picture are not independent: the interval counts rows
                    asked = int(told.any(1).sum())
                    ends = wilson_interval(round(value * asked), asked)
                rows.append(Row(scheme, form.tokens, form.name, metric, value, *ends, n))
            if overhead:
                speed = tested / max(seconds, 1e-9)
                rows.append(Row(scheme, form.tokens, form.name, "rows_per_second", speed, n=tested))
            if progress:
                print(
                    f"{scheme}, {form.name}: " + ", ".join(_said(row) for row in rows if row.coordinates == form.name)
                )
    finally:
        model.train(training)
    rows += _summary(rows, scheme, {form.name: form.tokens for form in data.shapes})
    write_results(folder / "results.csv", rows)
    result = VlmEvaluation(folder, scheme, rows, tuple(form.name for form in forms), trained)
    _write_report(result, model, data, examples, encoding_name=encoding_name, config=config, command=command)
    return result


def _answers(
    model: Any,
    data: Any,
    form: Any,
    count: int,
    device: torch.device,
    autocast: torch.dtype | None,
    examples: list[tuple[VlmBatch, Tensor]],
) -> tuple[dict[str, Tensor], float]:
    """What was found for each metric, ``(rows, questions)`` with NaN where a row was not asked, and the seconds."""
    parts: dict[str, list[Tensor]] = {}
    seconds = 0.0
    with data.whole():
        for number, loaded in enumerate(data.test_form(form, count)):
            batch = loaded.to(device)
            start = now(device)
            with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
                answers = greedy_answers(model, batch)
            seconds += now(device) - start
            if number == 0:
                examples.append((loaded, answers.cpu()))
            right = right_answers(batch, answers).float().cpu()
            of_batch: dict[str, list[Tensor]] = {"all_accuracy": list(right.unbind(1))}
            for which, question in enumerate(batch.questions):
                metric = question.kind.replace(" ", "_")
                overlap = overlaps(batch, answers, which)
                of_batch.setdefault(f"{metric}_accuracy", []).append(right[:, which])
                if overlap is not None:
                    of_batch.setdefault(f"{metric}_iou", []).append(overlap.float().cpu())
                for part in data.parts.get(question.kind, ()):
                    mine = (loaded.tokens[:, question.first : question.answer] == data.vocabulary.index[part]).any(1)
                    name = f"{metric}_{part.replace(' ', '_')}_accuracy"
                    of_batch.setdefault(name, []).append(right[:, which].where(mine, torch.nan))
            for metric, columns in of_batch.items():
                parts.setdefault(metric, []).append(torch.stack(columns, 1))
    found = {metric: torch.cat(values) for metric, values in parts.items()}
    return {metric: values for metric, values in found.items() if not bool(values.isnan().all())}, seconds


def _summary(rows: Sequence[Row], scheme: str, trained: Mapping[str, int]) -> list[Row]:
    """Means over the tested forms of training and over those beyond, by kind of question, and over all of training."""
    size = max(trained.values())
    out = []
    for name, inside in (("trained", True), ("beyond", False)):
        found: dict[str, list[Row]] = {}
        for row in rows:
            if row.metric.endswith("_accuracy") and (row.coordinates in trained) is inside:
                found.setdefault(row.metric, []).append(row)
        for metric, of_metric in found.items():
            mean = sum(row.value for row in of_metric) / len(of_metric)
            label = "accuracy" if (metric, inside) == ("all_accuracy", True) else f"{name}_{metric}"
            out.append(Row(scheme, size, name, label, mean, n=sum(row.n or 0 for row in of_metric)))
    return out


def vlm_columns(metrics: Sequence[str]) -> dict[str, str]:
    """Columns of a table over schemes: each kind of question in training and beyond, as far as it was tested."""
    kinds = [metric.removeprefix("trained_") for metric in metrics if metric.startswith("trained_")]
    kinds += [metric.removeprefix("beyond_") for metric in metrics if metric.startswith("beyond_")]
    out = {"all": "accuracy"}
    for kind in dict.fromkeys(kinds):
        name = kind.removesuffix("_accuracy").replace("_", " ")
        for metric, column in ((f"trained_{kind}", name), (f"beyond_{kind}", f"{name} *")):
            if metric in metrics:
                out[column] = metric
    return out


def _said(row: Row) -> str:
    if row.metric == "rows_per_second":
        return f"{row.value:.0f} rows/s"
    name = row.metric.removesuffix("_accuracy").replace("_", " ")
    return f"{name} {row.value:.2f}" if row.metric.endswith("_iou") else f"{name} {100 * row.value:.1f} %"


# -- report -----------------------------------------------------------------------------------------------------------


def vlm_figure(evaluation: VlmEvaluation, data: Any, examples: Sequence[tuple[VlmBatch, Tensor]]) -> Figure:
    """Boxes on test images, right ones green and answers orange, and accuracy by form for each kind of question."""
    figure = new_figure(11.0, 5.2)
    parts: Any = figure.subfigures(1, 2, width_ratios=[1, 1.2])
    left, right = parts
    boxed = [(batch, answers) for batch, answers in examples if batch.places is not None and _boxes(batch)]
    panels = left.subplots(2, _EXAMPLES // 2, squeeze=False).reshape(-1)
    for number, axis in enumerate(panels):
        axis.set_xticks([])
        axis.set_yticks([])
        if not boxed:
            axis.set_axis_off()
            continue
        batch, answers = boxed[number % len(boxed)]
        row = min(number // len(boxed), len(batch) - 1)
        which = _boxes(batch)[0]
        question = batch.questions[which]
        axis.imshow(_picture(batch, row, which, data), cmap="gray_r")
        for box, colour in (
            (batch.boxes[row, which], PALETTE[2]),
            (box_of(batch, answers, which)[row], PALETTE[1]),
        ):
            x0, y0, x1, y1 = (float(value) - 0.5 for value in box)
            axis.plot([x0, x1, x1, x0, x0], [y0, y0, y1, y1, y0], color=colour, lw=1.6)
        words = batch.tokens[row, question.first : question.answer].tolist()
        title = "\n".join(textwrap.wrap(data.vocabulary.decode(words), 26))
        axis.set_title(title, fontsize=8, color="#33414e")
    axis = right.subplots()
    places = {form: number for number, form in enumerate(evaluation.forms)}
    for number, kind in enumerate(evaluation.kinds()):
        found = [row for row in evaluation.rows if row.metric == f"{kind}_accuracy"]
        axis.plot(
            [100 * row.value for row in found],
            [places[row.coordinates] for row in found],
            marker="os^Dv PX*"[number % 8].strip() or "p",
            ms=7,
            lw=1,
            alpha=0.9,
            color=PALETTE[number % len(PALETTE)],
            label=kind.replace("_", " "),
        )
    axis.set_yticks(range(len(places)), [f"{form}{'' if form in evaluation.trained else ' *'}" for form in places])
    axis.invert_yaxis()
    axis.set_xlim(-3, 103)
    axis.set_xlabel("right answers (%), * beyond training", fontsize=9.5)
    style_axis(axis)
    axis.legend(fontsize=8, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def _picture(batch: VlmBatch, row: int, which: int, data: Any) -> np.ndarray:
    """The image or frame that a question is about, in colours on [0, 1] or in grey. Shape: ``(H, W)`` or with 3."""
    shown = 0 if batch.shown is None else int(batch.shown[row, which])
    frames = torch.cat([block[row] for block in batch.pixels])
    mean, std = (torch.tensor(values)[:, None, None] for values in (data.mean, data.std))
    return (frames[shown] * std + mean).clamp(0, 1).movedim(0, -1).squeeze(-1).numpy()


def _boxes(batch: VlmBatch) -> list[int]:
    return [number for number in range(len(batch.questions)) if overlaps(batch, batch.tokens, number) is not None]


def _write_report(
    evaluation: VlmEvaluation,
    model: Any,
    data: Any,
    examples: Sequence[tuple[VlmBatch, Tensor]],
    *,
    encoding_name: str,
    config: Mapping[str, Any] | None,
    command: str | None,
) -> None:
    folder = evaluation.folder
    kinds = evaluation.kinds()
    document = Document(
        f"{evaluation.scheme} on {data.name}",
        f"Questions about where things are; tower with {encoding_name}, decoder placed by {evaluation.scheme}.",
    )
    tiles = []
    for kind in kinds:
        found = [row for row in evaluation.rows if row.metric == f"{kind}_accuracy"]
        known = [row for row in found if row.coordinates in evaluation.trained]
        if known:
            mean = sum(row.value for row in known) / len(known)
            tiles.append((f"{100 * mean:.1f} %", f"{kind.replace('_', ' ')}, forms of training"))
    document.tiles(tiles[:6])
    document.heading("Right answers")
    add_figure(
        document,
        folder,
        "vlm",
        vlm_figure(evaluation, data, examples),
        "Left: test images with the right box (green) and the answer (orange). Right: right answers by form, * larger "
        "or longer than in training.",
    )
    table: list[list[Any]] = []
    for form in evaluation.forms:
        sized = next(row for row in evaluation.rows if row.coordinates == form)
        where = "in training" if form in evaluation.trained else "beyond"
        cells = [percent(evaluation.row(form, f"{kind}_accuracy")) for kind in kinds]
        table.append([form, str(sized.size), where, *cells])
    document.table(["form", "visual tokens", "", *(kind.replace("_", " ") for kind in kinds)], table)
    document.paragraph(
        f"A box is right from an overlap of {IOU:g} (intersection over union); other answers are right word for word. "
        "Answers are the most likely words, one after the other. Intervals count rows, not questions: questions about "
        "one picture are not independent."
    )
    from mmpos.adapters.timm import stack_of

    stack = stack_of(model.tower.vit)
    encoding_section(document, stack)
    document.heading("Cost")
    parts = {"tower": model.tower, "projector": model.projector, "decoder": model.decoder}
    cost = cost_rows(model, None, None, "px")
    cost += [(f"of these, {name}", f"{sum(p.numel() for p in part.parameters()):,}") for name, part in parts.items()]
    speeds = [row for row in evaluation.rows if row.metric == "rows_per_second"]
    cost += [(f"rows answered, {row.coordinates}", f"{row.value:,.0f} rows/s") for row in speeds]
    document.table(["quantity", "value"], cost)
    numbers = (
        "All numbers of this page are in results.csv, where encoding is the scheme of the decoder, size the visual "
        "tokens of a row and coordinates its form."
    )
    finish_report(document, folder, model, data, config=config, command=command, numbers=numbers)
