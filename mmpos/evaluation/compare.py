"""Many runs in one table: mean and spread over seeds, index and rescaled coordinates side by side.

``python -m mmpos.evaluation.compare runs/studies/<study>`` reads every ``results.csv`` below the folders it is given.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmpos.evaluation.document import DPI, Document
from mmpos.evaluation.figures import MARKERS, rule_colours, style_axis
from mmpos.evaluation.points import POINT_COLUMNS
from mmpos.evaluation.results import Row, read_results
from mmpos.evaluation.shift import SHIFT_COLUMNS
from mmpos.evaluation.three_cell import THREE_CELL_COLUMNS
from mmpos.evaluation.vlm import vlm_columns
from mmpos.plotting import PALETTE, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COMPARISON_COLUMNS", "Cell", "Comparison", "compare", "compare_study", "find_runs"]

COMPARISON_COLUMNS = ("label", "encoding", "size", "coordinates", "metric", "mean", "std", "low", "high", "runs")
_NOT_A_SETTING = ("seed", "resume", "ckpt_path", "recipe_name", "name")
_TESTS = {  # every other evaluation: image sizes
    "frames": "frame counts",
    "three_cell": "questions on three cells",
    "points": "frames of point clouds",
    "vlm": "questions about images",
    "shift": "shifts",
}


@dataclass(frozen=True)
class Run:
    """One run folder with its numbers and its settings (empty where it has no ``config.yaml``)."""

    folder: Path
    rows: list[Row]
    settings: dict[str, str]

    @property
    def encoding(self) -> str:
        """Name of the encoding in its table."""
        return self.rows[0].encoding


@dataclass(frozen=True)
class Cell:
    """One number over the runs that share a label.

    Args:
        values: value of each run.
        interval: 95 % interval of the one run, where there is only one.
    """

    values: tuple[float, ...]
    interval: tuple[float, float] | None

    @property
    def mean(self) -> float:
        """Mean over runs."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Sample standard deviation over runs, ``None`` for one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """The merged table.

    Args:
        labels: groups of runs, best first.
        encodings: encoding of each group.
        sizes: image sizes, or numbers of frames.
        rules: resolution rules.
        cells: by (label, size, rule, metric).
        sort_size: the size the order comes from.
        unit: unit of the sizes, ``px`` or ``frames``.
        columns: headings and metrics of a table by question instead of by size and rule, as in the Three-Cell
            Experiment.
    """

    labels: list[str]
    encodings: dict[str, str]
    sizes: list[int]
    rules: list[str]
    cells: dict[tuple[str, int, str, str], Cell]
    sort_size: int
    unit: str = "px"
    columns: Mapping[str, str] = field(default_factory=dict)

    def best(self, label: str, size: int) -> float:
        """Highest mean accuracy of a group at a size over the rules; -1 where it was not measured."""
        return max(
            (
                cell.mean
                for (name, s, _, metric), cell in self.cells.items()
                if (name, s, metric) == (label, size, "accuracy")
            ),
            default=-1.0,
        )


def find_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Every folder with a ``results.csv`` in or below the given ones, sorted by path; stages belong to their run."""
    tables: dict[Path, None] = {}
    for folder in folders:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"folders: {folder} is not a folder")
        tables.update(dict.fromkeys(sorted(Path(folder).rglob("results.csv"))))
    runs = [
        Run(table.parent, rows, _settings(table.parent))
        for table in tables
        if not _is_stage(table.parent) and (rows := read_results(table))
    ]
    if not runs:
        raise ValueError(
            f"folders: no results.csv with numbers below {', '.join(map(str, folders))}; evaluate the runs first"
        )
    return runs


def _is_stage(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.is_file() and "stage" in json.loads(summary.read_text())


def compare(
    folders: Sequence[str | Path], output_dir: str | Path, *, size: int | None = None, title: str = "Comparison of runs"
) -> Comparison:
    """Merge the results of many runs; writes ``comparison.csv``, ``.md``, ``.html`` and ``comparison.png``.

    Args:
        folders: run folders, or folders above them.
        output_dir: where the comparison goes.
        size: image size whose accuracy (of the best rule) orders the table; default the largest.
        title: title of the page.

    Runs of one encoding that differ in nothing but the seed are averaged. Where runs of an encoding differ in other
    settings (``config.yaml`` of the run folder), the settings in which they differ become part of the label.
    """
    runs = find_runs(folders)
    comparison = _merge(runs, size)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _write_csv(folder / "comparison.csv", comparison)
    comparison_figure(comparison).savefig(folder / "comparison.png", dpi=DPI)
    _write_document(folder, comparison, runs, title)
    return comparison


def compare_study(folder: str | Path, *, size: int | None = None) -> str:
    """Compare the runs of a study in its own folder; returns the table as text for the terminal."""
    comparison = compare([folder], folder, size=size, title=f"Study {Path(folder).resolve().name}")
    header, rows = _accuracy_table(comparison)
    texts = [
        header,
        *(
            [" ".join(part for part in cell if part) if isinstance(cell, tuple) else cell for cell in row]
            for row in rows
        ),
    ]
    widths = [max(len(row[column]) for row in texts) for column in range(len(header))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in texts]
    return "\n".join([*lines, f"table and plot: {Path(folder) / 'comparison.html'}"])


def _merge(runs: Sequence[Run], size: int | None) -> Comparison:
    tests = {_test(run) for run in runs}
    if len(tests) > 1:
        raise ValueError(f"folders: some runs were tested at {', others at '.join(sorted(tests))}; compare them apart")
    test = tests.pop()
    unit = {_TESTS["frames"]: "frames", _TESTS["points"]: "points"}.get(test, "px")
    columns = {
        _TESTS["three_cell"]: THREE_CELL_COLUMNS,
        _TESTS["points"]: POINT_COLUMNS,
        _TESTS["shift"]: SHIFT_COLUMNS,
    }.get(test, {})
    labels = _labels(runs)
    gathered: dict[tuple[str, int, str, str], list[Row]] = {}
    for run, label in zip(runs, labels, strict=True):
        for row in run.rows:
            gathered.setdefault((label, row.size, row.coordinates, row.metric), []).append(row)
    cells = {
        key: Cell(
            tuple(row.value for row in rows),
            (rows[0].ci_low, rows[0].ci_high)
            if len(rows) == 1 and rows[0].ci_low is not None and rows[0].ci_high is not None
            else None,
        )
        for key, rows in gathered.items()
    }
    if test == _TESTS["vlm"]:
        columns = vlm_columns(list(dict.fromkeys(key[3] for key in cells)))
    sizes = sorted({key[1] for key in cells if key[3] == "accuracy"})
    if not sizes:
        raise ValueError("folders: the results hold no accuracy")
    if size is not None and size not in sizes:
        raise ValueError(f"size: no run was tested at {size} {unit}; tested were {sizes}")
    first = ("index", "rescaled")
    seen = list(dict.fromkeys(key[2] for key in cells if key[3] == "accuracy"))
    rules = [rule for rule in first if rule in seen] + [rule for rule in seen if rule not in first]
    out = Comparison(
        [],
        dict(zip(labels, (run.encoding for run in runs), strict=True)),
        sizes,
        rules,
        cells,
        size or sizes[-1],
        unit,
        columns,
    )
    out.labels.extend(sorted(dict.fromkeys(labels), key=lambda label: (-out.best(label, out.sort_size), label)))
    return out


def _test(run: Run) -> str:
    """What a run was tested at; its table tells where it has no settings."""
    if any(row.metric == SHIFT_COLUMNS["circular, same answer"] for row in run.rows):
        return _TESTS["shift"]
    return _TESTS.get(run.settings.get("evaluation.name", ""), "image sizes")


def _labels(runs: Sequence[Run]) -> list[str]:
    """The encoding of each run, with the settings in which runs of this encoding differ."""
    labels = []
    for run in runs:
        same = [other for other in runs if other.encoding == run.encoding]
        keys = dict.fromkeys(key for other in same for key in other.settings)
        odd = [key for key in keys if len({other.settings.get(key) for other in same}) > 1]
        labels.append(" ".join([run.encoding, *(f"{key}={run.settings.get(key, 'unset')}" for key in odd)]))
    return labels


def _settings(folder: Path) -> dict[str, str]:
    """Settings of a run, flat, without what names the run or only seeds it."""
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    import yaml  # type: ignore[import-untyped]

    out: dict[str, str] = {}

    def flatten(node: Mapping[str, Any], prefix: str) -> None:
        for key, value in node.items():
            if isinstance(value, Mapping):
                flatten(value, f"{prefix}{key}.")
            elif (prefix.startswith("stages.") and key == "run") or (prefix, key) == ("callbacks.", "progress"):
                continue  # where a finished stage was taken from, and what was shown meanwhile
            elif key not in _NOT_A_SETTING or prefix not in ("", "data.", "encoding."):
                out[f"{prefix}{key}"] = str(value)

    flatten(yaml.safe_load(path.read_text()) or {}, "")
    return out


# -- output -----------------------------------------------------------------------------------------------------------


def _write_csv(path: Path, comparison: Comparison) -> None:
    place = {label: number for number, label in enumerate(comparison.labels)}
    rule_place = {rule: number for number, rule in enumerate(comparison.rules)}
    keys = sorted(
        comparison.cells, key=lambda key: (place[key[0]], key[3], key[1], rule_place.get(key[2], len(rule_place)))
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COMPARISON_COLUMNS)
        for key in keys:
            label, size, rule, metric = key
            cell = comparison.cells[key]
            std = "" if cell.std is None else f"{cell.std:.6g}"
            numbers = [f"{cell.mean:.6g}", std, f"{min(cell.values):.6g}", f"{max(cell.values):.6g}"]
            writer.writerow([label, comparison.encodings[label], size, rule, metric, *numbers, len(cell.values)])


def _accuracy_table(comparison: Comparison) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: for each size index and rescaled next to each other, then the best of the other rules.

    With ``columns`` a table by question.
    """
    if comparison.columns:
        return _column_table(comparison)
    first = [rule for rule in ("index", "rescaled") if rule in comparison.rules]
    other = [rule for rule in comparison.rules if rule not in first]
    columns = [*first, "other"] if other else first
    sizes = [f"{size} {comparison.unit}" for size in comparison.sizes]
    header = ["encoding", "runs", *(f"{size} {column}" for size in sizes for column in columns)]
    rows: list[list[Any]] = []
    for label in comparison.labels:
        cells: list[Any] = []
        runs = 0
        for size in comparison.sizes:
            found = {rule: comparison.cells.get((label, size, rule, "accuracy")) for rule in comparison.rules}
            runs = max([runs, *(len(cell.values) for cell in found.values() if cell is not None)])
            cells += [_percent(found[rule]) for rule in first]
            if other:
                rest = [(cell.mean, rule, cell) for rule in other if (cell := found[rule]) is not None]
                best = max(rest, key=lambda entry: entry[0], default=None)
                cells.append("–" if best is None else _percent(best[2], best[1]))
        rows.append([label, str(runs), *cells])
    return header, rows


def _column_table(comparison: Comparison) -> tuple[list[str], list[list[Any]]]:
    """Header and rows by question, at the size and the rule of the training."""
    rows = []
    for label in comparison.labels:
        found = [_column_cell(comparison, label, metric) for metric in comparison.columns.values()]
        runs = max(len(cell.values) for cell in found if cell is not None)
        rows.append([label, str(runs), *map(_percent, found)])
    return ["encoding", "runs", *comparison.columns], rows


def _column_cell(comparison: Comparison, label: str, metric: str) -> Cell | None:
    keys = [key for key in comparison.cells if (key[0], key[1], key[3]) == (label, comparison.sort_size, metric)]
    return comparison.cells[keys[0]] if keys else None


def _percent(cell: Cell | None, rule: str = "") -> Any:
    if cell is None:
        return "–"
    remark = ""
    if cell.std is not None:
        remark = f"± {100 * cell.std:.1f}"
    elif cell.interval is not None:
        remark = f"[{100 * cell.interval[0]:.1f}, {100 * cell.interval[1]:.1f}]"
    return f"{100 * cell.mean:.1f}", " ".join(part for part in (remark, rule) if part)


def _write_document(folder: Path, comparison: Comparison, runs: Sequence[Run], title: str) -> None:
    groups, tested = len(comparison.labels), ", ".join(map(str, comparison.sizes))
    lead = (
        f"{len(runs)} runs in {groups} groups, tested at {tested} {comparison.unit}. Best accuracy at "
        f"{comparison.sort_size} {comparison.unit} first."
    )
    reading = (
        "Test accuracy in %. ± is the standard deviation over runs (seeds), brackets the 95 % interval of one run; "
        "other is the best of the remaining resolution rules. All of them are in comparison.csv."
    )
    if comparison.columns:
        first = next(name for name, metric in comparison.columns.items() if metric == "accuracy")
        lead = f"{len(runs)} runs in {groups} groups, by question. Best {first} first."
        reading = (
            "Test accuracy in %. ± is the standard deviation over runs (seeds), brackets the 95 % interval of one run."
        )
        if first == "average":
            reading += " average is the mean of the columns before it."
        if any(metric.startswith("beyond_") for metric in comparison.columns.values()):
            reading += " Columns with *, hollow marks, are forms larger or longer than in training."
        if comparison.columns is SHIFT_COLUMNS:
            lead = f"{len(runs)} runs in {groups} groups, on shifted images. Best accuracy on unshifted ones first."
            reading += (
                " Same answer is the part of images that get the answer they get unshifted, a mean over all shifts; "
                "always the same, the part whose answer no shift changes."
            )
    document = Document(title, lead)
    document.heading("Accuracy")
    document.figure(
        folder / "comparison.png",
        "Mean test accuracy of each group; bars: standard deviation over runs, or the 95 % interval of a single run.",
        "comparison",
    )
    document.paragraph(reading)
    document.table(*_accuracy_table(comparison), mark=0)
    cost = _cost_table(comparison)
    if cost:
        document.heading("Cost")
        document.table(["encoding", "parameters of the encoding", "time per image over no encoding"], cost)
    document.heading("Runs")
    document.table(
        ["folder", "encoding"],
        [(_relative(run.folder, folder), run.encoding) for run in runs],
        fold=f"All {len(runs)} folders",
    )
    document.write(
        folder, "comparison", "All numbers of this page are in comparison.csv; those of each run in its results.csv."
    )


def _cost_table(comparison: Comparison) -> list[tuple[str, str, str]]:
    rows = []
    for label in comparison.labels:
        found = {
            key[3]: cell
            for key, cell in comparison.cells.items()
            if key[0] == label and key[3] in ("encoding_parameters", "time_over_none")
        }
        if found:
            count, ratio = found.get("encoding_parameters"), found.get("time_over_none")
            rows.append(
                (label, "–" if count is None else f"{count.mean:,.0f}", "–" if ratio is None else f"x {ratio.mean:.2f}")
            )
    return rows


def _relative(path: Path, base: Path) -> str:
    path, base = path.resolve(), base.resolve()
    return str(path.relative_to(base)) if path.is_relative_to(base) else str(path)


def comparison_figure(comparison: Comparison) -> Figure:
    """One panel per size, one row per group, one mark per resolution rule; with ``columns`` a panel per question."""
    if comparison.columns:
        return _column_figure(comparison)
    count = len(comparison.labels)
    longest = max(map(len, comparison.labels))
    figure = new_figure(2.0 + 0.055 * min(longest, 60) + 2.6 * len(comparison.sizes), 1.7 + 0.42 * count)
    axes = figure.subplots(1, len(comparison.sizes), sharey=True, squeeze=False)[0]
    colours = rule_colours(comparison.rules)
    handles: dict[str, Any] = {}
    places = _places(comparison)
    for axis, size in zip(axes, comparison.sizes, strict=True):
        for number, rule in enumerate(comparison.rules):
            points = [
                (places[label, rule], cell)
                for label in comparison.labels
                if (cell := comparison.cells.get((label, size, rule, "accuracy"))) is not None
            ]
            if not points:
                continue
            low, high = zip(*(_bar(cell) for _, cell in points), strict=True)
            handles[rule] = axis.errorbar(
                [100 * cell.mean for _, cell in points],
                [place for place, _ in points],
                xerr=[low, high],
                fmt=MARKERS[number % len(MARKERS)],
                color=colours[rule],
                ms=5.5,
                elinewidth=1.1,
                capsize=2,
            )
        style_axis(axis)
        axis.set_title(f"{size} {comparison.unit}", fontsize=10.5, loc="left", fontweight="bold")
        axis.set_xlabel("test accuracy (%)", fontsize=9)
        axis.set_xlim(left=max(0.0, axis.get_xlim()[0]))
    axes[0].set_yticks(range(count), [label if len(label) <= 60 else f"{label[:57]}..." for label in comparison.labels])
    axes[0].set_ylim(count - 0.5, -0.5)
    figure.legend(
        handles.values(),
        handles.keys(),
        title="coordinates",
        loc="outside upper right",
        ncols=min(len(handles), max(1, int(figure.get_figwidth() / 1.6))),
        frameon=False,
        fontsize=8.5,
        title_fontsize=8.5,
    )
    return figure


def _places(comparison: Comparison) -> dict[tuple[str, str], float]:
    """Height of each mark: around the row of its group, beside the other rules of that group and of no other."""
    out = {}
    for row, label in enumerate(comparison.labels):
        own = [
            rule
            for rule in comparison.rules
            if any((label, size, rule, "accuracy") in comparison.cells for size in comparison.sizes)
        ]
        step = min(0.13, 0.8 / len(own))
        out.update({(label, rule): row + step * (number - (len(own) - 1) / 2) for number, rule in enumerate(own)})
    return out


def _column_figure(comparison: Comparison) -> Figure:
    """One panel per question, one row per group; a column ``x *`` is a hollow mark in the panel of ``x``."""
    count = len(comparison.labels)
    longest = max(map(len, comparison.labels))
    panels = [column for column in comparison.columns if column.removesuffix(" *") == column]
    figure = new_figure(1.6 + 0.055 * min(longest, 60) + 1.75 * len(panels), 1.3 + 0.42 * count)
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for column, colour, face in ((panel, PALETTE[0], PALETTE[0]), (f"{panel} *", PALETTE[1], "white")):
            if column not in comparison.columns:
                continue
            found = [_column_cell(comparison, label, comparison.columns[column]) for label in comparison.labels]
            points = [(place, cell) for place, cell in enumerate(found) if cell is not None]
            low, high = zip(*(_bar(cell) for _, cell in points), strict=True)
            axis.errorbar(
                [100 * cell.mean for _, cell in points],
                [place for place, _ in points],
                xerr=[low, high],
                fmt="o",
                color=colour,
                markerfacecolor=face,
                ms=5.5,
                elinewidth=1.1,
                capsize=2,
            )
        style_axis(axis)
        axis.set_title(panel, fontsize=10.5, loc="left", fontweight="bold")
        axis.set_xlabel("test accuracy (%)", fontsize=9)
    axes[0].set_yticks(range(count), [label if len(label) <= 60 else f"{label[:57]}..." for label in comparison.labels])
    axes[0].set_ylim(count - 0.5, -0.5)
    return figure


def _bar(cell: Cell) -> tuple[float, float]:
    """Length of the error bar to the left and to the right, in points."""
    if cell.std is not None:
        return 100 * cell.std, 100 * cell.std
    if cell.interval is None:
        return 0.0, 0.0
    return max(0.0, 100 * (cell.mean - cell.interval[0])), max(0.0, 100 * (cell.interval[1] - cell.mean))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(
        prog="python -m mmpos.evaluation.compare", description="One table and plot over many runs."
    )
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or folders above them")
    parser.add_argument("--output", type=Path, help="where the comparison goes (default: the first folder)")
    parser.add_argument("--size", type=int, help="image size whose accuracy orders the table (default: the largest)")
    options = parser.parse_args(arguments)
    output = options.output or options.folders[0]
    comparison = compare(options.folders, output, size=options.size)
    print(f"{len(comparison.labels)} groups; {output / 'comparison.html'}")


if __name__ == "__main__":
    main()
