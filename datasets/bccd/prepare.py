"""Pack the BCCD photographs and boxes into the two files of data=bccd, at half their size.

python datasets/bccd/prepare.py <clone of Shenggan/BCCD_Dataset>/BCCD datasets/bccd/data
"""

from __future__ import annotations

import argparse
import io
import json
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("RBC", "WBC", "Platelets")
SIZE = (320, 240)


def read_boxes(path: Path, scale: float) -> list[list[float]]:
    """Boxes of a photograph as x0, y0, x1, y1 and class, those without an area left out."""
    out = []
    for item in xml.parse(path).getroot().iter("object"):
        edges = [float(item.findtext(f"bndbox/{edge}", "nan")) * scale for edge in ("xmin", "ymin", "xmax", "ymax")]
        edges = [round(min(max(edge, 0.0), side), 1) for edge, side in zip(edges, SIZE * 2, strict=True)]
        if edges[2] > edges[0] and edges[3] > edges[1]:
            out.append([*edges, CLASSES.index(item.findtext("name", ""))])
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``annotations.json`` and ``bccd320.npz``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with Annotations, ImageSets and JPEGImages")
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--quality", type=int, default=88, help="of the JPEGs")
    chosen = parser.parse_args(arguments)
    split_of = {}
    for split in ("train", "val", "test"):
        path = chosen.source / "ImageSets" / "Main" / f"{split}.txt"
        if not path.is_file():
            raise SystemExit(f"{path} is not there; give the folder BCCD of a clone of the data set")
        split_of.update(dict.fromkeys(path.read_text(encoding="utf-8").split(), split))
    images, records = [], []
    for name in sorted(split_of):
        with Image.open(chosen.source / "JPEGImages" / f"{name}.jpg") as image:
            scale = SIZE[0] / image.width
            small = image.convert("RGB").resize(SIZE, Image.Resampling.LANCZOS)
        out = io.BytesIO()
        small.save(out, "jpeg", quality=chosen.quality)
        images.append(out.getvalue())
        boxes = read_boxes(chosen.source / "Annotations" / f"{name}.xml", scale)
        records.append({"name": f"{name}.jpg", "split": split_of[name], "size": list(SIZE), "boxes": boxes})
    chosen.out.mkdir(parents=True, exist_ok=True)
    told = {"classes": CLASSES, "images": records}
    (chosen.out / "annotations.json").write_text(json.dumps(told, separators=(",", ":")), encoding="utf-8")
    offsets = np.cumsum([0, *map(len, images)])
    np.savez(chosen.out / "bccd320.npz", jpeg=np.frombuffer(b"".join(images), np.uint8), offsets=offsets)
    print(f"{len(records)} photographs, {sum(len(record['boxes']) for record in records):,} boxes in {chosen.out}")


if __name__ == "__main__":
    main()
