"""Small files in the layouts of data=nlvr and data=bccd, whose pixels tell what their boxes say."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

COLOURS = {"Yellow": (255, 255, 0), "Black": (0, 0, 0), "Blue": (0, 153, 255)}


def pack(pictures: list[np.ndarray], path: Path, key: str) -> None:
    image = pytest.importorskip("PIL.Image")
    files = []
    for picture in pictures:
        out = io.BytesIO()
        image.fromarray(picture).save(out, "png")
        files.append(out.getvalue())
    offsets = np.cumsum([0, *map(len, files)])
    np.savez(path, offsets=offsets, **{key: np.frombuffer(b"".join(files), np.uint8)})


def nlvr_picture(panels: list[list[dict]]) -> np.ndarray:
    picture = np.full((100, 400, 3), 211, np.uint8)
    picture[:, 100:150] = picture[:, 250:300] = 128
    for k, panel in enumerate(panels):
        for item in panel:
            x, y, side = 150 * k + item["x"], item["y"], item["size"]
            picture[y : y + side, x : x + side] = COLOURS[item["color"]]
    return picture


def write_nlvr(folder: Path) -> None:
    """Ten sentences, each about four pictures of squares; two sentences are test."""
    draw = np.random.default_rng(0)
    records, pictures = [], []
    sentences = ["There is a black square.", "there is a blue square in a box", "A yellow square, at the top!"]
    for number in range(40):
        panels = []
        for _ in range(3):
            places = draw.permutation([(x, y) for x in (0, 32, 66) for y in (2, 35, 68)])[: int(draw.integers(1, 6))]
            panels.append(
                [
                    {"x": int(x), "y": int(y), "size": int(draw.choice([10, 20, 30])), "shape": "square", "color": name}
                    for (x, y), name in zip(places, draw.choice(list(COLOURS), 9), strict=False)
                ]
            )
        group = number // 4
        split = "test" if group >= 8 else "train"
        records.append(
            {
                "id": f"{'test' if split == 'test' else 'dev'}-{group}-{number % 4}",
                "split": split,
                "sentence": sentences[group % 3],
                "label": bool(draw.integers(2)),
                "boxes": panels,
            }
        )
        pictures.append(nlvr_picture(panels))
    pack(pictures, folder / "nlvr_png.npz", "png")
    (folder / "nlvr.jsonl").write_text("\n".join(map(json.dumps, records)))


def write_bccd(folder: Path) -> None:
    """Nine photographs whose cells are flat boxes of the colour of their class."""
    draw = np.random.default_rng(1)
    images, records = [], []
    for number in range(9):
        picture, boxes = np.full((240, 320, 3), 220, np.uint8), []
        for left in range(0, 320, 80):
            for top in range(0, 240, 80):
                label = 1 if (left, top) == (80, 80) else int(draw.choice([0, 0, 2]))
                side = (40, 70, 18)[label]
                x, y = left + int(draw.integers(2, 79 - side)), top + int(draw.integers(2, 79 - side))
                picture[y : y + side, x : x + side] = ((200, 80, 80), (90, 60, 180), (120, 120, 220))[label]
                boxes.append([x, y, x + side, y + side, label])
        images.append(picture)
        records.append({"name": str(number), "split": ("train", "val", "test")[number % 3], "boxes": boxes})
    pack(images, folder / "bccd.npz", "jpeg")  # the name of the array does not say how the bytes are read
    (folder / "annotations.json").write_text(json.dumps({"classes": ["RBC", "WBC", "P"], "images": records}))
