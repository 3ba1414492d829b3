"""The generated parts of README.md: ``python -m mmpos.docs [README.md] [--check]``.

A generated part stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; everything else is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mmpos.encodings import encoding_class, list_encodings

__all__ = ["encoding_table", "recipe_table", "rewrite"]

PLACES = {
    "tokens": "tokens",
    "qk": "queries, keys",
    "qkvo": "queries, keys, values, output",
    "bias": "logits",
    "conv": "convolution",
}


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def encoding_table() -> str:
    """One row for each registered encoding, from its facts."""
    rows = []
    for name in list_encodings():
        facts = encoding_class(name).facts
        low, high = facts.axes
        rows.append(
            [
                f"`{name}`",
                facts.title,
                ", ".join(PLACES.get(place, place) for place in facts.plugs_into) or "nothing",
                f"{low}" if low == high else f"{low}-{high}",
                "per layer" if facts.learned and facts.scope == "layer" else "yes" if facts.learned else "no",
                "yes" if facts.relative else "no",
                "raster" if facts.needs_grid else "any points" if facts.fractional else "whole numbers",
                ", ".join(f"`{rule}`" for rule in facts.resolution_rules),
                facts.source,
            ]
        )
    columns = ["name", "method", "acts on", "axes", "learned", "relative", "places", "resolution rules", "source"]
    return _table(columns, rows)


def recipe_table(configs: Path) -> str:
    """One row for each recipe: its command, what its comment says, and where its numbers are."""
    rows = []
    for path in sorted(configs.glob("*.yaml")):
        comments = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        what = [line for line in comments if line and not line.startswith("@package") and "train.py" not in line]
        name = path.stem
        rows.append([f"`{name}`", what[0] if what else "", f"[recipes/{name}](recipes/{name}/README.md)"])
    return _table(["recipe=", "what it trains", "measured numbers"], rows)


def rewrite(text: str, root: Path) -> str:
    """The text with every generated part brought up to date."""
    parts = {"encodings": encoding_table(), "recipes": recipe_table(root / "configs" / "recipe")}
    for name, content in parts.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, found = re.subn(pattern, lambda match, c=content: f"{match[1]}{c}\n{match[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"README: expected one part <!-- {name} --> ... <!-- /{name} -->, found {found}")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mmpos.docs", description=__doc__)
    parser.add_argument("readme", nargs="?", type=Path, default=Path("README.md"))
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when something would change")
    options = parser.parse_args(arguments)
    if not options.readme.is_file():
        print(f"{options.readme} is not a file; run this in a checkout of the repository", file=sys.stderr)
        return 2
    old = options.readme.read_text(encoding="utf-8")
    new = rewrite(old, options.readme.resolve().parent)
    if new != old and not options.check:
        options.readme.write_text(new, encoding="utf-8")
    return int(new != old and options.check)


if __name__ == "__main__":
    sys.exit(main())
