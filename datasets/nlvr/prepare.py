"""Pack the NLVR corpus into the two files of data=nlvr: pictures in one .npz, sentences and objects in one .jsonl.

    python datasets/nlvr/prepare.py <clone of lil-lab/nlvr>/nlvr datasets/nlvr/data

A split of the corpus is a folder with its ``.json`` and ``images/*/<split>-<identifier>-0.png``.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLOURS = {"#0099ff": "Blue", "yellow": "Yellow", "black": "Black", "blue": "Blue"}
COLOURS_OF_A_PNG = 32  # a picture has a dozen: flat areas and their smoothed edges


def read_split(folder: Path, table: str) -> list[dict[str, Any]]:
    """Lines of the table of one split."""
    path = folder / table
    if not path.is_file():
        raise SystemExit(
            f"{path} is not there; give the folder nlvr of a clone of the corpus, or other --train, --test"
        )
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def objects_of(panel: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Objects of a panel by the names that data=nlvr reads."""
    return [
        {
            "x": item["x_loc"],
            "y": item["y_loc"],
            "size": item["size"],
            "shape": item["type"],
            "color": COLOURS[str(item["color"]).lower()],
        }
        for item in panel
    ]


def encode(path: Path) -> bytes:
    """A picture as a small PNG."""
    out = io.BytesIO()
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS_OF_A_PNG, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return out.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``nlvr.jsonl`` and ``nlvr_png.npz``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder with dev, hidden, test (and train)")
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--train", nargs="+", default=["dev/dev.json", "hidden/hidden_final.json"], metavar="TABLE")
    parser.add_argument("--test", nargs="+", default=["test/test.json"], metavar="TABLE")
    chosen = parser.parse_args(arguments)
    records, pictures = [], []
    for split, tables in (("train", chosen.train), ("test", chosen.test)):
        for table in tables:
            name = Path(table).parent.name
            for entry in read_split(chosen.corpus, table):
                picture = f"{name}-{entry['identifier']}-0.png"
                found = sorted((chosen.corpus / name / "images").glob(f"*/{picture}"))
                if not found:
                    raise SystemExit(f"{chosen.corpus / name / 'images'}: no */{picture}, which {table} tells of")
                pictures.append(encode(found[0]))
                records.append(
                    {
                        "id": f"{name}-{entry['identifier']}",
                        "split": split,
                        "sentence": entry["sentence"],
                        "label": str(entry["label"]).lower() == "true",
                        "boxes": [objects_of(panel) for panel in entry["structured_rep"]],
                    }
                )
    chosen.out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, separators=(",", ":")) for record in records]
    (chosen.out / "nlvr.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    offsets = np.cumsum([0, *map(len, pictures)])
    np.savez(chosen.out / "nlvr_png.npz", png=np.frombuffer(b"".join(pictures), np.uint8), offsets=offsets)
    print(f"{len(records):,} pictures with sentences in {chosen.out}")


if __name__ == "__main__":
    main()
