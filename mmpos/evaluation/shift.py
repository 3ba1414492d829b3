"""Shifted images: does a model still give the answer it gave before its input moved by a few pixels?

Zhang, *Making Convolutional Networks Shift-Invariant Again*, arXiv 1904.11486, counts unchanged answers; vision
transformers lose theirs inside a patch (*Reviving Shift Equivariance in Vision Transformers*, arXiv 2306.07470).

Every test image, as the model receives it at its training size, is moved down, to the right, and along the diagonal by
the same number of pixels, in two ways:

* ``circular``: what leaves at one side enters at the other. No pixel is lost, so only the cut into patches changes.
* ``cropped``: the model looks through a window of the size of the image at a canvas that continues the image on all
  sides by copies of its outermost pixels, and the window moves up, left, or both. What leaves is lost; what enters
  repeats the edge. Where images have an empty border, as digits do, nothing is lost while the shift is smaller than
  the border, and the two ways are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmpos.evaluation.document import Document
from mmpos.evaluation.figures import MARKERS, percent_bars, style_axis
from mmpos.evaluation.passes import CPU_TOKENS, now
from mmpos.evaluation.report import add_figure, cost_rows, encoding_section, finish_report, percent
from mmpos.evaluation.resolution import patch_size, stack_or_none, usable_size
from mmpos.evaluation.results import Row, wilson_interval, write_results
from mmpos.plotting import PALETTE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DIRECTIONS", "SHIFT_COLUMNS", "WAYS", "ShiftEvaluation", "run_shift", "shift_figure", "shift_images"]

#: how many steps down and to the right
DIRECTIONS = {"down": (1, 0), "right": (0, 1), "diagonal": (1, 1)}
WAYS = ("circular", "cropped")
#: headings of a comparison and the metric that holds each in ``results.csv``, in the rows with shift 0
SHIFT_COLUMNS = {
    "unshifted": "accuracy",
    "circular": "circular_accuracy",
    "circular, same answer": "circular_consistency",
    "circular, always the same": "circular_always",
    "cropped": "cropped_accuracy",
    "cropped, same answer": "cropped_consistency",
    "cropped, always the same": "cropped_always",
}
UNSHIFTED = "unshifted"


@dataclass(frozen=True)
class ShiftEvaluation:
    """What was measured.

    Args:
        folder: where table and report are.
        encoding: name in the table.
        rows: the table.
        shifts: tested shifts in pixels.
    """

    folder: Path
    encoding: str
    rows: list[Row]
    shifts: list[int]

    def row(self, metric: str, shift: int = 0, coordinates: str = UNSHIFTED) -> Row | None:
        """A measured number, or ``None``."""
        key = (shift, coordinates, metric)
        return next((row for row in self.rows if (row.size, row.coordinates, row.metric) == key), None)


def shift_images(images: Tensor, down: int, right: int, *, way: str) -> Tensor:
    """Images moved down and to the right; negative numbers move up and to the left.

    Args:
        images: pixels.
        down: rows.
        right: columns.
        way: ``circular`` or ``cropped``, see the head of this module.

    Shape: ``(..., height, width)`` in and out.

    Example:
        >>> image = torch.tensor([[1.0, 2.0, 3.0]])
        >>> shift_images(image, 0, 1, way="circular").tolist(), shift_images(image, 0, 1, way="cropped").tolist()
        ([[3.0, 1.0, 2.0]], [[1.0, 1.0, 2.0]])
    """
    if way == "circular":
        return images.roll((down, right), (-2, -1))
    if way != "cropped":
        raise ValueError(f"way: expected one of {WAYS}, got {way!r}")
    height, width = images.shape[-2:]
    rows = (torch.arange(height, device=images.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) - right).clamp(0, width - 1)
    return images[..., rows[:, None], columns]


def run_shift(
    model: nn.Module,
    data: Any,
    *,
    encoding_name: str,
    output_dir: str | Path,
    shifts: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    command: str | None = None,
    progress: bool = True,
) -> ShiftEvaluation:
    """Answers and accuracy of a model on shifted test images; writes table, picture and report.

    Args:
        model: images to class logits; it has ``patch_embed.patch_size`` or ``patch_size``.
        data: a :class:`~mmpos.data.base.ImageData`.
        encoding_name: name in the table.
        output_dir: folder of ``results.csv`` (whose column ``size`` is the shift in pixels), ``report.md``,
            ``report.html`` and ``shift.png``.
        shifts: pixels; default every number from 1 to the longer side of a patch.
        device: where to run; default where the model is.
        autocast: reduced precision, such as ``torch.bfloat16``.
        config: what the run was, shown in the report.
        command: how to repeat it, shown in the report.
        progress: whether to print one line.

    Rows of a shift hold ``shifted_accuracy`` and ``consistency`` (the part of images with the answer they get
    unshifted) by way and direction. Rows of shift 0 hold the accuracy and, for each way over all its shifts and
    directions, the mean accuracy, the mean consistency, and ``always``, the part of images whose answer no shift
    changes. The intervals count images: answers about one image are not independent.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device if device is None else torch.device(device)
    patch = patch_size(model)
    used = usable_size(int(data.image_size), patch)
    steps = _check_shifts(shifts, patch, used)
    training = model.training
    model.to(device).eval()
    try:
        with data.whole():
            labels, base, moved, seconds = _logits(model, data, used, steps, device, autocast)
    finally:
        model.train(training)

    rows = _rows(encoding_name, labels, base, moved, seconds)
    write_results(folder / "results.csv", rows)
    result = ShiftEvaluation(folder, encoding_name, rows, steps)
    if progress:
        found = [
            f"{name} {100 * row.value:.1f} %" for name, metric in SHIFT_COLUMNS.items() if (row := result.row(metric))
        ]
        print(f"{encoding_name}: {', '.join(found)}", flush=True)
    _write_report(result, model, data, patch=patch, used=used, config=config, command=command)
    return result


def _check_shifts(shifts: Sequence[int] | None, patch: tuple[int, int], used: tuple[int, int]) -> list[int]:
    if shifts is None:
        return list(range(1, max(patch) + 1))
    steps = sorted({int(shift) for shift in shifts})
    if not steps or steps[0] < 1 or steps[-1] >= min(used):
        raise ValueError(
            f"shifts: expected pixels from 1 to {min(used) - 1}, less than the image, got {list(shifts)}; leave shifts "
            f"out for 1 to {max(patch)}"
        )
    return steps


Moved = dict[tuple[str, str, int], Tensor]


@torch.inference_mode()
def _logits(
    model: nn.Module,
    data: Any,
    used: tuple[int, int],
    shifts: Sequence[int],
    device: torch.device,
    autocast: torch.dtype | None,
) -> tuple[Tensor, Tensor, Moved, float]:
    """Labels, logits of the unshifted and of the shifted images, and the seconds of all passes; files are read once."""
    patch = patch_size(model)
    tokens = (used[0] // patch[0]) * (used[1] // patch[1])
    conditions = [(way, name, shift) for way in WAYS for name in DIRECTIONS for shift in shifts]
    labels: list[Tensor] = []
    base: list[Tensor] = []
    moved: dict[tuple[str, str, int], list[Tensor]] = {condition: [] for condition in conditions}
    seconds = 0.0

    def answer(images: Tensor) -> Tensor:
        nonlocal seconds
        part = max(1, CPU_TOKENS // tokens) if device.type == "cpu" else len(images)
        start = now(device)
        with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
            logits = torch.cat([model(few) for few in images.split(part)])
        seconds += now(device) - start
        return logits.double().cpu()

    for images, truth in data.test_dataloader():
        images = images[..., : used[0], : used[1]].to(device)
        labels.append(truth)
        base.append(answer(images))
        for way, name, shift in conditions:
            down, right = DIRECTIONS[name]
            moved[way, name, shift].append(answer(shift_images(images, down * shift, right * shift, way=way)))
    joined = {condition: torch.cat(parts) for condition, parts in moved.items()}
    return torch.cat(labels), torch.cat(base), joined, seconds


def _rows(encoding: str, labels: Tensor, base: Tensor, moved: Moved, seconds: float) -> list[Row]:
    count = len(labels)
    before = base.argmax(-1)
    spread = base.std().clamp_min(1e-12)

    def part(size: int, coordinates: str, metric: str, flags: Tensor) -> Row:
        # flags are (images,) or (conditions, images); a mean over conditions keeps the number of images
        value = float(flags.double().mean())
        return Row(encoding, size, coordinates, metric, value, *wilson_interval(round(value * count), count), count)

    rows = [part(0, UNSHIFTED, "accuracy", before == labels)]
    for way in WAYS:
        answers = torch.stack([logits.argmax(-1) for (each, _, _), logits in moved.items() if each == way])
        same = answers == before
        rows += [
            part(0, UNSHIFTED, f"{way}_accuracy", answers == labels),
            part(0, UNSHIFTED, f"{way}_consistency", same),
            part(0, UNSHIFTED, f"{way}_always", same.all(0)),
        ]
    speed = count * (1 + len(moved)) / max(seconds, 1e-9)
    rows.append(Row(encoding, 0, UNSHIFTED, "images_per_second", speed, n=count * (1 + len(moved))))
    for (way, name, shift), logits in moved.items():
        answer = logits.argmax(-1)
        rows += [
            part(shift, f"{way} {name}", "shifted_accuracy", answer == labels),
            part(shift, f"{way} {name}", "consistency", answer == before),
        ]
        change = (logits - base).abs() / spread  # in standard deviations of the unshifted logits
        for metric, value in (("mean_logit_change", change.mean()), ("largest_logit_change", change.max())):
            rows.append(Row(encoding, shift, f"{way} {name}", metric, float(value), n=count))
    return rows


# -- report -----------------------------------------------------------------------------------------------------------


def shift_figure(evaluation: ShiftEvaluation, patch: tuple[int, int]) -> Figure:
    """Unchanged answers and accuracy over the shift; solid is circular, dashed is cropped, a colour per direction."""
    figure = new_figure(10.2, 4.1)
    axes = figure.subplots(1, 2)
    places = [0, *evaluation.shifts]
    start = evaluation.row("accuracy")
    count = len(WAYS) * len(DIRECTIONS)
    for axis, metric, title in zip(
        axes, ("consistency", "shifted_accuracy"), ("Same answer as unshifted (%)", "Test accuracy (%)"), strict=True
    ):
        number = 0
        lowest = 100.0
        for way, style in zip(WAYS, ("-", "--"), strict=True):
            for colour, name in zip(PALETTE, DIRECTIONS, strict=False):
                found = [evaluation.row(metric, shift, f"{way} {name}") for shift in evaluation.shifts]
                rows = [row for row in found if row is not None]
                values, (low, high) = percent_bars(rows)
                first = 100.0 if metric == "consistency" or start is None else 100 * start.value
                values, low, high = [first, *values], [0.0, *low], [0.0, *high]
                offset = 0.02 * max(places) * (number - (count - 1) / 2)  # equal curves stay visible
                axis.errorbar(
                    [place + offset for place in places],
                    values,
                    [low, high],
                    color=colour,
                    ls=style,
                    marker=MARKERS[number % len(MARKERS)],
                    ms=4.5,
                    lw=1.6,
                    capsize=2,
                    elinewidth=0.9,
                    label=f"{way}, {name}",
                )
                lowest = min([lowest, *(value - end for value, end in zip(values, low, strict=True))])
                number += 1
        style_axis(axis)
        axis.set_title(title, fontsize=10.5, loc="left", fontweight="bold")
        axis.set_xlabel("shift (px)", fontsize=9.5)
        axis.set_xticks(places)
        axis.set_ylim(
            max(0.0, lowest - 0.35 * (100 - lowest) - 0.5), 100 + 0.04 * (100 - lowest) + 0.1
        )  # the legend fits
        for side in sorted(set(patch)):
            if side <= max(places):
                axis.axvline(side, color="#9aa7b4", lw=1, ls=":", zorder=0)
    axes[0].legend(fontsize=8.5, frameon=False, ncols=2, loc="lower left")
    return figure


def _reading(evaluation: ShiftEvaluation, patch: tuple[int, int]) -> str:
    """What the numbers say, in words."""
    sentences = []
    for way in WAYS:
        always, mean = evaluation.row(f"{way}_always"), evaluation.row(f"{way}_consistency")
        if always is None or mean is None:
            continue
        if always.value == 1:
            sentences.append(f"No {way} shift changes the answer to any of the {always.n:,} images.")
            continue
        rows = [row for row in evaluation.rows if row.metric == "consistency" and row.coordinates.startswith(way)]
        worst = min(rows, key=lambda row: (row.value, row.size))
        sentences.append(
            f"Under a {way} shift {100 * mean.value:.1f} % of the answers stay as they were; the worst is "
            f"{worst.size} px {worst.coordinates.removeprefix(way).strip()} with {100 * worst.value:.1f} %, and "
            f"{100 * always.value:.1f} % of the images keep their answer under all of them."
        )
    side = max(patch)
    rows = [row for row in evaluation.rows if row.metric == "consistency" and row.coordinates.startswith("circular")]
    whole, inside = (
        min((row for row in rows if (row.size % side == 0) == aligned), key=lambda row: row.value, default=None)
        for aligned in (True, False)
    )
    if whole is not None and inside is not None and inside.value < 1:
        if whole.value == 1:
            sentences.append(
                "A circular shift by whole patches changes nothing: what is lost is lost by cutting patches elsewhere."
            )
        elif (inside.ci_high or 1) < (whole.ci_low or 0):
            sentences.append(
                f"A circular shift by whole patches of {side} px keeps {100 * whole.value:.1f} % at least: cutting "
                "patches elsewhere changes more answers than moving them."
            )
        elif (whole.ci_high or 1) < (inside.ci_low or 0):
            sentences.append(
                f"A circular shift by whole patches of {side} px keeps only {100 * whole.value:.1f} %: moving patches "
                "changes more answers than cutting them elsewhere."
            )
        else:
            sentences.append("Whether shifts by whole patches change less than others is not decided here.")
    return " ".join(sentences)


def _write_report(
    evaluation: ShiftEvaluation,
    model: Any,
    data: Any,
    *,
    patch: tuple[int, int],
    used: tuple[int, int],
    config: Mapping[str, Any] | None,
    command: str | None,
) -> None:
    folder, stack = evaluation.folder, stack_or_none(model)
    document = Document(
        f"{evaluation.encoding} on shifted {data.name}",
        f"Test images of {used[0]} x {used[1]} px, moved by {evaluation.shifts[0]} to {evaluation.shifts[-1]} px "
        f"without further training; patches have {patch[0]} x {patch[1]} px.",
    )
    tiles = []
    for name in ("unshifted", "circular, same answer", "circular, always the same", "cropped, same answer"):
        row = evaluation.row(SHIFT_COLUMNS[name])
        if row is not None:
            tiles.append((f"{100 * row.value:.1f} %", name if name != "unshifted" else "accuracy, unshifted"))
    document.tiles(tiles)
    document.heading("Answers under shifts")
    start = evaluation.row("accuracy")
    add_figure(
        document,
        folder,
        "shift",
        shift_figure(evaluation, patch),
        f"{start.n if start else 0:,} test images with 95 % Wilson intervals; the dotted line is a whole patch.",
    )
    document.paragraph(_reading(evaluation, patch))
    document.table(
        ["shifts", "accuracy", "same answer", "same answer under all shifts"],
        [
            ["none", percent(start), "–", "–"],
            *(
                [way, *(percent(evaluation.row(f"{way}_{what}")) for what in ("accuracy", "consistency", "always"))]
                for way in WAYS
            ),
        ],
        mark=0,
    )
    table: list[list[Any]] = []
    for row in evaluation.rows:
        if row.metric != "largest_logit_change":
            continue
        key = (row.size, row.coordinates)
        mean = evaluation.row("mean_logit_change", *key)
        table.append(
            [
                row.coordinates,
                f"{row.size} px",
                percent(evaluation.row("shifted_accuracy", *key)),
                percent(evaluation.row("consistency", *key)),
                "" if mean is None else f"{mean.value:.2g}",
                f"{row.value:.2g}",
            ]
        )
    columns = ["shift", "by", "accuracy", "same answer", "mean change of logits", "largest"]
    document.table(columns, table, fold="Every shift")
    document.paragraph(
        "Circular: what leaves at one side enters at the other. Cropped: the window of the model moves over a canvas "
        "that continues the image by copies of its outermost pixels; what leaves the window is lost. Images that have "
        "an empty border at least as wide as the shift are the same under both. Change of logits: over all images and "
        "classes, in standard deviations of the unshifted logits; a model that cannot see a shift leaves rounding."
    )
    encoding_section(document, stack)
    document.heading("Cost")
    document.table(["quantity", "value"], cost_rows(model, stack, None, "px"))
    numbers = "All numbers of this page are in results.csv, where the column size is the shift in pixels."
    finish_report(document, folder, model, data, config=config, command=command, numbers=numbers)
