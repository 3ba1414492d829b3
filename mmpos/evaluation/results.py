"""The table of an evaluation, ``results.csv``: one measured number per row, with its interval and its sample size."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["COLUMNS", "Row", "read_results", "wilson_interval", "write_results"]

COLUMNS = ("encoding", "size", "coordinates", "metric", "value", "ci_low", "ci_high", "n")


@dataclass(frozen=True)
class Row:
    """One number.

    Args:
        encoding: name of the encoding.
        size: image height and width in pixels.
        coordinates: resolution rule, ``own`` for a model without an attached encoding.
        metric: ``accuracy`` (a fraction), ``images_per_second``, ``time_over_none``, ``encoding_parameters``.
        value: the number.
        ci_low: lower end of the 95 % interval, ``None`` where there is none.
        ci_high: upper end.
        n: images (accuracy, images_per_second) or rounds (time_over_none) behind the number.
    """

    encoding: str
    size: int
    coordinates: str
    metric: str
    value: float
    ci_low: float | None = None
    ci_high: float | None = None
    n: int | None = None

    @property
    def key(self) -> tuple[str, int, str, str]:
        """What a row is about; a table holds each key once."""
        return self.encoding, self.size, self.coordinates, self.metric


def wilson_interval(successes: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's score interval of a proportion, 95 % by default; it stays inside [0, 1] and is right near 0 and 1.

    Example:
        >>> [round(end, 4) for end in wilson_interval(81, 263)]
        [0.2553, 0.3662]
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"successes, n: expected 0 <= successes <= n and n >= 1, got {successes} and {n}")
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # at 0 and n successes the ends are exactly 0 and 1; rounding must not push them past
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def read_results(path: Path) -> list[Row]:
    """Rows of a ``results.csv``; raises when its columns are others."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"{path}: expected the columns {','.join(COLUMNS)}, got {','.join(reader.fieldnames or ())}"
            )
        number = lambda text: float(text) if text else None  # noqa: E731
        return [
            Row(
                row["encoding"],
                int(row["size"]),
                row["coordinates"],
                row["metric"],
                float(row["value"]),
                number(row["ci_low"]),
                number(row["ci_high"]),
                int(row["n"]) if row["n"] else None,
            )
            for row in reader
        ]


def write_results(path: Path, rows: Iterable[Row]) -> None:
    """Write rows in order, through a second file so that a kill never leaves half a table."""
    part = path.with_suffix(".csv.part")
    with part.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([_text(getattr(row, column)) for column in COLUMNS] for row in rows)
    part.replace(path)


def _text(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
