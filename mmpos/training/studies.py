"""Studies: many runs in one folder, one table over them, and the measured numbers in the READMEs of the recipes."""

from __future__ import annotations

import csv
import json
import math
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.experimental.callback import Callback

__all__ = ["StudyReport", "machine", "refresh_readmes", "runs_of"]

BEGIN, END = "<!-- measured: begin (written by `mmpos readme`) -->", "<!-- measured: end -->"


class StudyReport(Callback):
    """Hydra callback: after a multi-run, one comparison table and plot over all finished runs of its folder."""

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        """Compare what is there; a study with no finished run gets no table."""
        folder = Path(config.hydra.sweep.dir)
        if runs_of(folder):
            from mmpos.evaluation.compare import compare_study

            print(compare_study(folder))


def machine() -> str:
    """Kind of machine, for the side of a measured number."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    return f"{name}, {torch.get_num_threads()} threads"


def runs_of(study: Path | str) -> list[tuple[Path, dict[str, Any]]]:
    """Finished runs with an evaluation below a folder, with their summaries, sorted by path."""
    found = []
    for path in sorted(Path(study).rglob("summary.json")):
        summary = json.loads(path.read_text())
        if (path.parent / "results.csv").is_file() and "stage" not in summary:  # a stage is told of by its run
            found.append((path.parent, summary))
    return found


def refresh_readmes(study: Path | str, recipes: Path | str) -> list[Path]:
    """Write the numbers of a study into README.md and results.csv of each recipe; returns the changed files.

    Args:
        study: folder of a multi-run; its runs must differ in recipe and seed only, those of the Three-Cell Experiment
            may differ in the encoding too.
        recipes: folder with one folder per recipe. The README keeps everything outside the two markers.
    """
    groups: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for folder, summary in runs_of(study):
        groups.setdefault(summary["recipe"], []).append((folder, summary))
    if not groups:
        raise ValueError(
            f"study: {study} holds no finished run with results.csv; run python train.py -m recipe=... seed=0,1,2 first"
        )
    changed = []
    for recipe, runs in groups.items():
        settings = {tuple(_settings(summary)) for _, summary in runs}
        if len(settings) > 1:
            raise ValueError(
                f"study: runs of {recipe} in {study} differ in more than the seed: {sorted(settings)}; give a "
                "study of its own"
            )
        readme = Path(recipes) / recipe / "README.md"
        if not readme.is_file() or BEGIN not in readme.read_text() or END not in readme.read_text():
            raise ValueError(f"recipes: {readme} is missing or lacks the lines {BEGIN!r} and {END!r}")
        text = readme.read_text()
        head, tail = text[: text.index(BEGIN)], text[text.index(END) + len(END) :]
        readme.write_text(f"{head}{BEGIN}\n\n{_measured(recipe, runs)}\n{END}{tail}")
        table = readme.with_name("results.csv")
        rows = [{"recipe": recipe, "seed": summary["seed"], **row} for folder, summary in runs for row in _rows(folder)]
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        changed += [readme, table]
    return changed


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


#: what a table with a row for each value of it may differ in, by evaluation
_SWEPT = {"three_cell": "encoding=", "vlm": "model.options.scheme="}


def _settings(summary: dict[str, Any]) -> list[str]:
    """What the user changed, apart from what a table has a row for and what cannot change a number."""
    swept = _SWEPT.get(summary.get("evaluation") or "", "\0")
    given = [text.lstrip("+") for text in summary.get("overrides", ())]
    silent = re.compile(r"stages\.\w+\.run=|callbacks\.progress=")
    return [text for text in given if not text.startswith(swept) and not silent.match(text)]


def _measured(recipe: str, runs: Sequence[tuple[Path, dict[str, Any]]]) -> str:
    """Markdown: accuracy by size and rule, mean and standard deviation over seeds, and what it took."""
    evaluation = runs[0][1].get("evaluation")
    if evaluation == "vlm" and len({row["encoding"] for folder, _ in runs for row in _rows(folder)}) == 1:
        table = _by_form(runs)
    else:
        columns = _columns(evaluation, runs)
        table = _by_question(runs, columns) if columns else _by_size(runs)
    return "\n".join([*table, "", *_circumstances(recipe, runs), ""])


def _columns(evaluation: str | None, runs: Sequence[tuple[Path, dict[str, Any]]]) -> Mapping[str, str]:
    """Headings and metrics of an evaluation whose table has a column for each question; else empty."""
    from mmpos.evaluation.shift import SHIFT_COLUMNS
    from mmpos.evaluation.three_cell import THREE_CELL_COLUMNS
    from mmpos.evaluation.vlm import vlm_columns

    if evaluation == "vlm":
        return vlm_columns(list(dict.fromkeys(row["metric"] for folder, _ in runs for row in _rows(folder))))
    return {"three_cell": THREE_CELL_COLUMNS, "shift": SHIFT_COLUMNS}.get(evaluation or "", {})


def _by_question(runs: Sequence[tuple[Path, dict[str, Any]]], columns: Mapping[str, str]) -> list[str]:
    """A row for each encoding, best accuracy first; a column for each kind of question."""
    values: dict[tuple[str, str], list[float]] = {}
    for folder, _ in runs:
        for row in _rows(folder):
            values.setdefault((row["encoding"], row["metric"]), []).append(float(row["value"]))
    found = dict.fromkeys(encoding for encoding, _ in values)
    order = sorted(found, key=lambda name: -statistics.fmean(values.get((name, "accuracy"), [0.0])))
    what = "scheme" if runs[0][1].get("evaluation") == "vlm" else "encoding"
    lines = [f"| {what} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for encoding in order:
        cells = [_cell(values.get((encoding, metric), [])) for metric in columns.values()]
        lines.append(f"| {encoding} | {' | '.join(cells)} |")
    return lines


def _by_form(runs: Sequence[tuple[Path, dict[str, Any]]]) -> list[str]:
    """A row for each form of what is shown, a column for each kind of question."""
    values: dict[tuple[str, str], list[float]] = {}
    tokens: dict[str, str] = {}
    for folder, _ in runs:
        for row in _rows(folder):
            if row["metric"].endswith("_accuracy") and row["coordinates"] not in ("trained", "beyond"):
                values.setdefault((row["coordinates"], row["metric"]), []).append(float(row["value"]))
                tokens[row["coordinates"]] = row["size"]
    kinds = [kind for kind in dict.fromkeys(kind for _, kind in values) if kind != "all_accuracy"]
    names = [kind.removesuffix("_accuracy").replace("_", " ") for kind in kinds]
    lines = [f"| form | visual tokens | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for form, count in tokens.items():
        cells = [_cell(values.get((form, kind), [])) for kind in kinds]
        lines.append(f"| {form} | {count} | {' | '.join(cells)} |")
    return lines


def _by_size(runs: Sequence[tuple[Path, dict[str, Any]]]) -> list[str]:
    """A row for each resolution rule and question, or stage, a column for each size."""
    values: dict[tuple[str, int], list[float]] = {}
    stages = list(runs[0][1].get("stages", ()))
    for folder, _ in runs:
        for row in _rows(folder):
            if "accuracy" in row["metric"]:
                what = " ".join(part for part in row["metric"].split("_") if part != "accuracy")
                what = what or (stages[-1] if len(stages) > 1 else "")
                label = f"{row['coordinates']}, {what}" if what else row["coordinates"]
                values.setdefault((label, int(row["size"])), []).append(float(row["value"]))
    of = lambda rule: rule.partition(", ")[2]  # noqa: E731
    place = {what: number for number, what in enumerate(stages)}
    rules = sorted(dict.fromkeys(rule for rule, _ in values), key=lambda rule: (place.get(of(rule), -1), of(rule)))
    unit = {"frames": "frames", "points": "points"}.get(runs[0][1].get("evaluation", ""), "px")
    sizes = sorted({size for _, size in values})
    lines = [f"| coordinates | {' | '.join(f'{size} {unit}' for size in sizes)} |", f"|---|{'---|' * len(sizes)}"]
    for rule in rules:
        cells = [_cell(values.get((rule, size), [])) for size in sizes]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return lines


def _circumstances(recipe: str, runs: Sequence[tuple[Path, dict[str, Any]]]) -> list[str]:
    """How many seeds, what it took, and the command."""
    summaries = [summary for _, summary in runs]
    seeds = sorted({summary["seed"] for summary in summaries})
    # a run that was held up has no time: what the clock shows is then no property of the recipe
    known = [summary for summary in summaries if summary["train_seconds"] is not None]
    seconds = sorted({round(summary["train_seconds"] + summary["evaluate_seconds"]) for summary in known})
    settings = [re.sub(r"(?<=\broot=).*", "<folder>", text) for text in _settings(summaries[0])]  # whose disk it was
    overrides = " ".join(settings)
    encodings = list(dict.fromkeys(summary["encoding"] for summary in summaries))
    if summaries[0].get("evaluation") == "three_cell":
        overrides = " ".join([f"encoding={','.join(encodings)}", *settings])
    schemes = list(dict.fromkeys(row["encoding"] for folder, _ in runs for row in _rows(folder)))
    if summaries[0].get("evaluation") == "vlm" and len(schemes) > 1:
        overrides = " ".join([f"model.options.scheme={','.join(schemes)}", *settings])
    sizes = sorted({summary["parameters"] for summary in summaries})
    parameters = " to ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1])))
    machines = ", ".join(sorted({summary.get("machine", "unknown machine") for summary in summaries}))
    dates = sorted({summary.get("date", "") for summary in summaries})
    command = f"python train.py -m recipe={recipe} seed={','.join(map(str, seeds))} {overrides}".strip()
    watched = _untested_stages(runs)
    over = f"mean and standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else "one seed"
    span = " to ".join(dict.fromkeys(map(str, seconds[:1] + seconds[-1:])))
    took = f"{span} s per run, training and evaluation together, on" if seconds else "Run on"
    return [
        f"Test accuracy in %, {over}. {parameters} parameters. {took} {machines}; "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}.{watched}",
        "",
        "```bash",
        command,
        "```",
    ]


def _untested_stages(runs: Sequence[tuple[Path, dict[str, Any]]]) -> str:
    """What stages without a test came to, as one more sentence."""
    metrics: dict[str, list[float]] = {}
    for folder, summary in runs:
        for name, value in summary.get("stage_metrics", {}).items():
            if value is not None and not (folder / name / "results.csv").is_file():
                metrics.setdefault(name, []).append(float(value))
    cells = [f"{name} {_cell(values)} %" for name, values in metrics.items()]
    return (
        f" Accuracy on the validation data at the end of a stage without labels: {', '.join(cells)}." if cells else ""
    )


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    percent = [100 * value for value in values] if max(values) <= 1 else values
    spread = f" ± {statistics.stdev(percent):.1f}" if len(percent) > 1 else ""
    mean = statistics.fmean(percent)
    return "-" if math.isnan(mean) else f"{mean:.1f}{spread}"
