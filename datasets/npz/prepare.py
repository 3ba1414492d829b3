"""Pack a folder of class folders into one .npz file that ``data=npz`` reads.

``python datasets/npz/prepare.py <folder> <out.npz> --size 128``
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


def pack(
    folder: Path,
    out: Path,
    *,
    size: int,
    quality: int,
    test: float,
    max_per_class: int | None,
    classes: Sequence[str] | None,
    seed: int,
) -> dict[str, int]:
    """Write the file; returns the number of images of each class."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if classes is None else list(classes)
    missing = [name for name in names if not (folder / name).is_dir()]
    if missing or not names:
        raise SystemExit(f"{folder}: expected one folder per class, missing {missing or 'all of them'}")
    chosen = random.Random(seed)
    files: list[bytes] = []
    labels: list[int] = []
    split: list[int] = []
    sources: list[str] = []
    for label, name in enumerate(names):
        paths = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in ENDINGS)
        chosen.shuffle(paths)
        paths = paths[:max_per_class]
        held = round(test * len(paths))
        for number, path in enumerate(paths):
            with Image.open(path) as image:
                square = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            square.save(buffer, "JPEG", quality=quality)
            files.append(buffer.getvalue())
            labels.append(label)
            split.append(1 if number < held else 0)
            sources.append(f"{name}/{path.name}")
    np.savez(
        out,
        jpeg=np.frombuffer(b"".join(files), dtype=np.uint8),
        offsets=np.cumsum([0, *map(len, files)]).astype(np.int64),
        label=np.array(labels, dtype=np.int16),
        split=np.array(split, dtype=np.uint8),
        classes=np.array(names),
        names=np.array(sources),
    )
    return {name: labels.count(label) for label, name in enumerate(names)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds one folder of images per class")
    parser.add_argument("out", type=Path, help="the .npz file to write")
    parser.add_argument("--size", type=int, default=128, help="height and width in pixels (default: %(default)s)")
    parser.add_argument("--quality", type=int, default=85, help="JPEG quality (default: %(default)s)")
    parser.add_argument("--test", type=float, default=0.2, help="part of each class that tests (default: %(default)s)")
    parser.add_argument("--max-per-class", type=int, help="at most this many images of a class, a seeded sample")
    parser.add_argument("--classes", nargs="+", help="only these class folders")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    counts = pack(**vars(options))
    print(
        f"{options.out}: {sum(counts.values())} images of {len(counts)} classes, {options.out.stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    main()
