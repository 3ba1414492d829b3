"""The Three-Cell Experiment as an evaluation: the columns of the paper, for a model with any encoding.

Chowdhury, Rahman, Taki, arXiv 2504.14386. Columns are accuracies over the answers of a kind (two questions on distance,
one on orientation, two on area, one on the vector sum); the average is over the four columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmpos.diagnostics.three_cell import TARGETS, three_cell_columns
from mmpos.evaluation.document import Document
from mmpos.evaluation.figures import bar_axis
from mmpos.evaluation.passes import logits_of
from mmpos.evaluation.report import add_figure, cost_rows, encoding_section, finish_report, percent
from mmpos.evaluation.resolution import OWN, stack_or_none, time_over_none
from mmpos.evaluation.results import Row, wilson_interval, write_results
from mmpos.plotting import PALETTE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["THREE_CELL_COLUMNS", "ThreeCellEvaluation", "run_three_cell", "three_cell_figure"]

#: the columns of the paper and the metric that holds each in ``results.csv``
THREE_CELL_COLUMNS = {
    "distance": "distance_accuracy",
    "orientation": "orientation_accuracy",
    "area": "area_accuracy",
    "vector sum": "vector_sum_accuracy",
    "average": "accuracy",
}
TRAINED = "trained"  # there is one size, that of the training: no resolution rule acts
_EXAMPLES = 6


@dataclass(frozen=True)
class ThreeCellEvaluation:
    """What was measured.

    Args:
        folder: where table and report are.
        encoding: name in the table.
        rows: the table.
        answers: accuracy of each of the six questions.
        blind: columns of the best answers that do not look at the picture: the more frequent one to each question.
    """

    folder: Path
    encoding: str
    rows: list[Row]
    answers: dict[str, float]
    blind: dict[str, float]

    def row(self, metric: str) -> Row | None:
        """A measured number, or ``None``."""
        return next((row for row in self.rows if row.metric == metric), None)

    def columns(self) -> dict[str, Row]:
        """The paper's columns."""
        found = {column: self.row(metric) for column, metric in THREE_CELL_COLUMNS.items()}
        return {column: row for column, row in found.items() if row is not None}


def run_three_cell(
    model: nn.Module,
    data: Any,
    *,
    encoding_name: str,
    output_dir: str | Path,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    overhead: bool = True,
    config: Mapping[str, Any] | None = None,
    command: str | None = None,
    progress: bool = True,
) -> ThreeCellEvaluation:
    """Accuracy of a model on the test pictures by kind of question; writes table, picture and report.

    Args:
        model: a ViT with two outputs for each question.
        data: a :class:`~mmpos.data.three_cell.ThreeCellData`.
        encoding_name: name in the table.
        output_dir: folder of ``results.csv``, ``report.md``, ``report.html`` and ``three_cell.png``.
        device: where to run; default where the model is.
        autocast: reduced precision, such as ``torch.bfloat16``.
        overhead: whether to compare time and parameters with the same model without position encoding.
        config: what the run was, shown in the report.
        command: how to repeat it, shown in the report.
        progress: whether to print the columns.

    The intervals count pictures, not answers: two answers about one picture are not independent.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device if device is None else torch.device(device)
    training = model.training
    model.to(device).eval()
    try:
        with data.whole():
            loader = data.test_dataloader()
            outputs, answers, seconds = logits_of(model, loader, device, autocast, tokens=data.cells**2)
            logits, targets = _answers(outputs), answers.double()
            stack = stack_or_none(model)
            count, size = len(targets), int(data.image_size)
            rows = []
            for name, value in three_cell_columns(logits, targets).items():
                metric = THREE_CELL_COLUMNS[name.replace("_", " ")]
                interval = wilson_interval(round(value / 100 * count), count)
                rows.append(Row(encoding_name, size, TRAINED, metric, value / 100, *interval, count))
            rows.append(Row(encoding_name, size, TRAINED, "images_per_second", count / max(seconds, 1e-9), n=count))
            if overhead and stack is not None:
                images = next(iter(data.test_dataloader()))[0][:64].to(device)
                cost = time_over_none(model, images, encoding_name, OWN, size, device)
                rows += [replace(row, coordinates=TRAINED) for row in cost]
    finally:
        model.train(training)
    write_results(folder / "results.csv", rows)
    frequent = (targets.mean(0) > 0.5).double().expand_as(targets)
    right = ((logits > 0) == (targets > 0.5)).double().mean(0)
    result = ThreeCellEvaluation(
        folder,
        encoding_name,
        rows,
        dict(zip(TARGETS, right.tolist(), strict=True)),
        {name.replace("_", " "): value for name, value in three_cell_columns(frequent - 0.5, targets).items()},
    )
    if progress:
        print(f"{encoding_name}: " + ", ".join(f"{c} {100 * r.value:.1f} %" for c, r in result.columns().items()))
    _write_report(result, model, data, config=config, command=command)
    return result


def _answers(outputs: Tensor) -> Tensor:
    """Logits of yes against no. Shape: ``(N, 12)`` to ``(N, 6)``."""
    if outputs.shape[-1] != 2 * len(TARGETS):
        raise ValueError(
            f"model: expected {2 * len(TARGETS)} outputs, two for each question, got {outputs.shape[-1]}; train it "
            "with data=three_cell"
        )
    no, yes = outputs.unflatten(-1, (-1, 2)).unbind(-1)
    return yes - no


# -- report -----------------------------------------------------------------------------------------------------------


def three_cell_figure(evaluation: ThreeCellEvaluation, data: Any) -> Figure:
    """Test pictures with their answers, and a bar for each column over what is reached without looking."""
    figure = new_figure(10.2, 4.0)
    halves: Any = figure.subfigures(1, 2, width_ratios=[1.15, 1])
    left, right = halves
    count = min(_EXAMPLES, len(data.places["test"]))
    images, answers = data.render("test", torch.arange(count))
    panels = left.subplots(2, -(-count // 2), squeeze=False).reshape(-1)
    for axis in panels:
        axis.set_axis_off()
    for axis, image, answer in zip(panels, images, answers.tolist(), strict=False):
        axis.set_axis_on()
        axis.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest", vmin=0, vmax=1)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_title(" ".join("yes" if value else "no" for value in answer), fontsize=7, color="#33414e")
    axis = right.subplots()
    columns = evaluation.columns()
    bar_axis(axis, list(columns.values()), list(columns))
    for place, column in enumerate(columns):
        axis.plot([place - 0.38, place + 0.38], 2 * [evaluation.blind[column]], color=PALETTE[1], lw=2, zorder=3)
    axis.set_ylabel("right answers (%)", fontsize=9.5)
    return figure


def _write_report(
    evaluation: ThreeCellEvaluation,
    model: nn.Module,
    data: Any,
    *,
    config: Mapping[str, Any] | None,
    command: str | None,
) -> None:
    folder = evaluation.folder
    stack = stack_or_none(model)
    columns = evaluation.columns()
    document = Document(
        f"{evaluation.encoding} in the Three-Cell Experiment",
        "Three coloured cells on an empty picture; only where they are answers the questions.",
    )
    document.tiles([(f"{100 * row.value:.1f} %", column) for column, row in columns.items()])
    document.heading("Right answers")
    add_figure(
        document,
        folder,
        "three_cell",
        three_cell_figure(evaluation, data),
        f"Left: test pictures; the answers above each are to {', '.join(TARGETS)}, where RG > RB compares distances. "
        "Right: accuracy with 95 % Wilson interval; the line is reached by always giving the more frequent answer.",
    )
    blind = [f"{evaluation.blind[column]:.1f} %" for column in columns]
    document.table(
        ["", *columns],
        [
            [evaluation.encoding, *(percent(row) for row in columns.values())],
            ["the more frequent answer", *blind],
        ],
        mark=0,
    )
    document.table(
        ["question", "right"], [(target, f"{100 * value:.1f} %") for target, value in evaluation.answers.items()]
    )
    encoding_section(document, stack)
    document.heading("Cost")
    document.table(["quantity", "value"], cost_rows(model, stack, evaluation.row("time_over_none"), "px"))
    training = " val/accuracy counts pictures with all six answers right."
    finish_report(document, folder, model, data, config=config, command=command, training=training)
