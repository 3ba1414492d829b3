"""The report of a resolution evaluation.

What the run was, what it reached at each size, what the encoding costs and looks like.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from mmpos.encodings import EncodingStack, encoding_class, encoding_options
from mmpos.evaluation.document import DPI, Document
from mmpos.evaluation.figures import confusion_figure, curve_figure, mistakes_figure, resolution_figure
from mmpos.evaluation.results import Row
from mmpos.plotting import plot_encoding

if TYPE_CHECKING:
    from mmpos.evaluation.resolution import Evaluation

__all__ = ["write_report"]

MEANING = {
    "index": "the spacing of patches is kept, a larger image runs beyond the trained range",
    "rescaled": "patch indices are stretched onto the training grid, the extent is kept",
    "interpolated": "the learned table is resampled to the new grid",
    "ntk": "the base of the frequencies grows with the grid (NTK-aware)",
    "yarn": "low frequencies are interpolated, high ones kept, logits warmed (YaRN)",
    "linear": "all frequencies are divided by the growth of the grid",
    "resonance": "wavelengths are rounded to whole patches",
    "resonance_yarn": "YaRN with wavelengths rounded to whole patches",
    "own": "whatever the model itself does",
}


def write_report(
    evaluation: Evaluation,
    model: nn.Module,
    data: Any,
    stack: EncodingStack | None,
    *,
    patch: tuple[int, int],
    config: Mapping[str, Any] | None,
    command: str | None,
) -> tuple[Path, Path]:
    """Write ``report.md``, ``report.html`` and their pictures next to ``results.csv``; returns the two paths."""
    folder = evaluation.folder
    document = Document(f"{evaluation.encoding} on {data.name}", _lead(evaluation, data))
    document.tiles(_tiles(evaluation))

    document.heading("Accuracy at other resolutions")
    add_figure(
        document,
        folder,
        "resolution",
        resolution_figure(evaluation, 1 / data.num_classes),
        _resolution_caption(evaluation),
    )
    document.paragraph(_reading(evaluation))
    _accuracy_table(document, evaluation)
    document.paragraph(_pixels(evaluation, patch))

    document.heading("The encoding")
    if stack is None:
        document.paragraph("The model carries the position encoding it was built with, which has no resolution rules.")
    else:
        grid = stack.encodings_of(0)[0].train_grid or tuple(
            size // p for size, p in zip((data.image_size,) * 2, patch, strict=True)
        )
        add_figure(document, folder, "encoding", plot_encoding(stack, grid), _encoding_caption(stack))
        document.table(["fact", *stack.names], encoding_facts(stack))
    document.heading("Cost")
    document.table(["quantity", "value"], _cost(evaluation, model, stack))

    predictions = evaluation.predictions
    if predictions:
        where = f"at {_reference(evaluation)} px, coordinates {evaluation.rules[0]}"
        wrong = int((predictions["labels"] != predictions["predictions"]).sum())
        document.heading("What is confused")
        if data.num_classes <= 100:
            picture = confusion_figure(predictions["labels"], predictions["predictions"], data.class_names)
            caption = (
                f"Test images {where}: {wrong} of {len(predictions['labels'])} wrong. Rows are the true classes; "
                "numbers are images."
            )
            add_figure(document, folder, "confusion", picture, caption)
        pairs = _worst_pairs(predictions, data.class_names)
        if pairs:
            document.table(["true class", "taken for", "images", "of the true class"], pairs)
        if len(predictions["example_index"]):
            picture = mistakes_figure(predictions, data.class_names)
            add_figure(
                document,
                folder,
                "mistakes",
                picture,
                f"The most confident mistakes {where}: answer, truth, confidence.",
            )

    return finish_report(document, folder, model, data, config=config, command=command)


# -- sections that all reports share ----------------------------------------------------------------------------------


def encoding_section(document: Document, stack: EncodingStack | None) -> None:
    """The facts of the encoding, under their heading."""
    document.heading("The encoding")
    if stack is None:
        document.paragraph("No position encoding of this package is attached to the model.")
    else:
        document.table(["fact", *stack.names], encoding_facts(stack))


def cost_rows(model: nn.Module, stack: EncodingStack | None, ratio: Row | None, unit: str) -> list[tuple[str, str]]:
    """Parameters of the model and of its encoding, and its time over no encoding at ``ratio.size`` of a unit."""
    total = sum(parameter.numel() for parameter in model.parameters())
    rows = [("parameters of the model", f"{total:,}")]
    if stack is not None:
        own = sum(parameter.numel() for parameter in stack.parameters())
        rows.append(("of these, position encoding", f"{own:,} ({100 * own / max(total, 1):.2g} %)"))
    if ratio is not None:
        rows.append(
            (
                "time of a forward pass over the same model without position encoding",
                f"x {ratio.value:.3f} (median of {ratio.n} alternating rounds at {ratio.size} {unit})",
            )
        )
    return rows


def finish_report(
    document: Document,
    folder: Path,
    model: nn.Module,
    data: Any,
    *,
    config: Mapping[str, Any] | None,
    command: str | None,
    training: str = "",
    numbers: str = "All numbers of this page are in results.csv.",
) -> tuple[Path, Path]:
    """Add the section on the run and the footer, and write the pages; returns their paths.

    Args:
        document: the page so far.
        folder: where it goes.
        model: the tested model.
        data: its data module.
        config: settings of the run; ``None`` reads those of the folder.
        command: how to repeat it.
        training: what else to say under the training curve.
        numbers: where the numbers of the page are.
    """
    config = saved_config(folder) if config is None else config
    document.heading("The run")
    metrics = folder / "metrics.csv"
    curve = curve_figure(metrics) if metrics.is_file() else None
    if curve is not None:
        caption = f"Training: loss and accuracy by optimizer step (metrics.csv).{training}"
        add_figure(document, folder, "training", curve, caption)
    document.table(["data", ""], [(name, str(value)) for name, value in data.facts().items()])
    if command:
        document.code(command)
    if config:
        document.table(["setting", "value"], flat(config), fold="All settings of the run")
    document.paragraph(numbers)
    footer = f"mmpos {version()}, torch {torch.__version__}, Python {platform.python_version()}, {device_name(model)}"
    return document.write(folder, "report", footer)


# -- sentences ------------------------------------------------------------------------------------------------------


def percent(row: Row | None) -> Any:
    """``97.2 %`` with its interval as a remark; a dash where nothing was measured."""
    if row is None:
        return "–"
    return f"{100 * row.value:.1f} %", f"[{100 * (row.ci_low or 0):.1f}, {100 * (row.ci_high or 0):.1f}]"


def _lead(evaluation: Evaluation, data: Any) -> str:
    sizes = ", ".join(str(size) for size in evaluation.sizes)
    return (
        f"Trained at {data.image_size} px, tested without further training at {sizes} px under "
        f"{_count(len(evaluation.rules), 'resolution rule')}: {', '.join(evaluation.rules)}."
    )


def _tiles(evaluation: Evaluation) -> list[tuple[str, str]]:
    tiles = []
    reference, largest = _reference(evaluation), evaluation.sizes[-1]
    row = evaluation.accuracy(reference, evaluation.rules[0])
    if row is not None:
        label = (
            f"{reference} px, trained at {evaluation.train_size} px"
            if reference != evaluation.train_size
            else f"at {reference} px, the training size"
        )
        tiles.append((f"{100 * row.value:.1f} %", label))
    if largest != reference:
        shown = [rule for rule in ("index", "rescaled") if rule in evaluation.rules] or evaluation.rules[:2]
        for rule in shown:
            row = evaluation.accuracy(largest, rule)
            if row is not None:
                tiles.append((f"{100 * row.value:.1f} %", f"at {largest} px, {rule}"))
    ratio = next((row.value for row in evaluation.rows if row.metric == "time_over_none"), None)
    if ratio is not None:
        tiles.append((f"x {ratio:.2f}", "time per image over no encoding"))
    return tiles


def _reading(evaluation: Evaluation) -> str:
    """The comparison that the table holds, in words."""
    reference, largest = _reference(evaluation), evaluation.sizes[-1]
    base = evaluation.accuracy(reference, evaluation.rules[0])
    rows = [row for rule in evaluation.rules if (row := evaluation.accuracy(largest, rule)) is not None]
    if base is None or not rows or largest == reference:
        return "Only one size was tested."
    rows.sort(key=lambda row: -row.value)
    best, worst = rows[0], rows[-1]
    text = (
        f"At {largest} px ({largest / evaluation.train_size:.3g} x the training size) {best.coordinates} reaches "
        f"{100 * best.value:.1f} %, "
        f"{_points(best.value - base.value)} against {reference} px"
    )
    if len(rows) > 1 and (best.ci_low or 0) > (worst.ci_high or 1):
        text += f"; {worst.coordinates} reaches {100 * worst.value:.1f} %, {_points(worst.value - base.value)}"
    elif len(rows) > 1:
        text += "; the intervals of the rules overlap, so the choice between them is not decided here"
    return text + "."


def _points(difference: float) -> str:
    points = 100 * difference
    return "unchanged" if abs(points) < 0.05 else f"{abs(points):.1f} points {'more' if points > 0 else 'less'}"


def _resolution_caption(evaluation: Evaluation) -> str:
    rows = [row for row in evaluation.rows if row.metric == "accuracy"]
    return (
        f"Test accuracy ({max((row.n or 0 for row in rows), default=0):,} images) and images per second over the "
        f"image size. " + " ".join(f"{rule}: {MEANING[rule]}." for rule in evaluation.rules if rule in MEANING)
    )


def _pixels(evaluation: Evaluation, patch: tuple[int, int]) -> str:
    """Where the pixels come from and what was cut off."""
    by_origin: dict[str, list[str]] = {}
    for size, origin in evaluation.origins.items():
        by_origin.setdefault(origin, []).append(str(size))
    text = " ".join(
        f"Images of {', '.join(sizes)} px are {_ORIGIN.get(origin, origin)}." for origin, sizes in by_origin.items()
    )
    for size, (height, width) in evaluation.used.items():
        if (height, width) != (size, size):
            text += (
                f" At {size} px the model sees {height} x {width}: the rest does not fill a patch of {patch[0]} px and "
                "is cut at the bottom and the right."
            )
    return text


_ORIGIN = {
    "real pixels": "real pixels of the data set, reduced where they are stored larger",
    "enlarged (bicubic)": "enlarged from the stored size by bicubic interpolation: objects grow, detail does not",
}


def _encoding_caption(stack: EncodingStack) -> str:
    own: Any = stack.layers
    shown = "layer 0 of the trained model" if any(len(layer) for layer in own) else "the trained model"
    names = " + ".join(stack.names)
    return f"{names} as it is in {shown}, on the training grid; the circle marks the reference position or offset 0."


# -- tables -----------------------------------------------------------------------------------------------------------


def _accuracy_table(document: Document, evaluation: Evaluation) -> None:
    rows = [
        [
            f"{size} px",
            f"{size / evaluation.train_size:.3g} x",
            *(percent(evaluation.accuracy(size, rule)) for rule in evaluation.rules),
        ]
        for size in evaluation.sizes
    ]
    mark = evaluation.sizes.index(evaluation.train_size) if evaluation.train_size in evaluation.sizes else None
    document.table(["image size", "of training", *evaluation.rules], rows, mark=mark)


def encoding_facts(stack: EncodingStack) -> list[list[str]]:
    facts = [encoding_class(name).facts for name in stack.names]
    encodings = stack.encodings_of(0)
    size = [sum(p.numel() for name_, p in stack.named_parameters() if name in name_.split(".")) for name in stack.names]
    return [
        ["method", *(fact.title for fact in facts)],
        ["source", *(fact.source for fact in facts)],
        ["acts on", *(", ".join(fact.plugs_into) or "nothing" for fact in facts)],
        [
            "parameters",
            *(
                f"{count:,}" + (" in all layers" if fact.scope == "layer" else "")
                for fact, count in zip(facts, size, strict=True)
            ),
        ],
        ["relative", *("yes" if fact.relative else "no" for fact in facts)],
        ["other resolutions", *(", ".join(fact.resolution_rules) for fact in facts)],
        ["options", *(_options(name, encoding) for name, encoding in zip(stack.names, encodings, strict=True))],
    ]


def _options(name: str, encoding: nn.Module) -> str:
    """The options of an encoding as they are set."""
    known = [
        key
        for key in encoding_options(name)
        if isinstance(getattr(encoding, key, None), (bool, int, float, str, tuple))
    ]
    return ", ".join(f"{key}={getattr(encoding, key)}" for key in known if key != "resolution") or "none"


def _cost(evaluation: Evaluation, model: nn.Module, stack: EncodingStack | None) -> list[tuple[str, str]]:
    ratio = next((row for row in evaluation.rows if row.metric == "time_over_none"), None)
    rows = cost_rows(model, stack, ratio, "px")
    speed = evaluation.value(_reference(evaluation), evaluation.rules[0], "images_per_second")
    if speed is not None:
        rows.append(
            (f"time per image at {_reference(evaluation)} px", f"{1000 / speed:.2f} ms ({speed:,.0f} images/s)")
        )
    return rows


def _worst_pairs(predictions: Mapping[str, np.ndarray], names: Sequence[str]) -> list[list[str]]:
    """The five most frequent confusions, at least two images each."""
    wrong = predictions["labels"] != predictions["predictions"]
    pairs, counts = np.unique(
        np.stack([predictions["labels"][wrong], predictions["predictions"][wrong]]), axis=1, return_counts=True
    )
    out = []
    for i in np.argsort(-counts, kind="stable")[:5]:
        true, said = pairs[:, i]
        if counts[i] > 1:
            of_class = int((predictions["labels"] == true).sum())
            out.append([names[true], names[said], str(counts[i]), f"{100 * counts[i] / of_class:.1f} % of {of_class}"])
    return out


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            rows += flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", str(value)))
    return rows


# -- small things -----------------------------------------------------------------------------------------------------


def add_figure(document: Document, folder: Path, name: str, figure: Any, caption: str) -> None:
    """Save a picture into the folder of a report and show it."""
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=DPI)
    document.figure(path, caption, name)


def _reference(evaluation: Evaluation) -> int:
    return min(evaluation.sizes, key=lambda size: abs(size - evaluation.train_size))


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def saved_config(folder: Path) -> Mapping[str, Any] | None:
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    import yaml  # type: ignore[import-untyped]

    return yaml.safe_load(path.read_text())


def version() -> str:
    import mmpos

    return mmpos.__version__


def device_name(model: nn.Module) -> str:
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads of a {platform.machine()} CPU"
