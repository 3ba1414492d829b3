"""Write tar shards from a folder of class folders.

``python datasets/webdataset/prepare.py <folder> <out> --split train``
"""

from __future__ import annotations

import argparse
import io
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path

ENDINGS = {".jpg": "jpg", ".jpeg": "jpg", ".png": "png", ".webp": "webp"}


def write_shards(folder: Path, out: Path, *, split: str, per_shard: int, seed: int) -> tuple[int, int]:
    """Write ``<split>-<number>.tar``; returns the number of shards and of samples."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    samples = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in ENDINGS
    ]
    if not samples:
        raise SystemExit(f"{folder}: expected <class>/*.jpg (or png, webp), found none")
    random.Random(seed).shuffle(samples)
    out.mkdir(parents=True, exist_ok=True)
    shards = range(0, len(samples), per_shard)
    for number, start in enumerate(shards):
        part = out / f"{split}-{number:05d}.tar.part"
        with tarfile.open(part, "w") as archive:
            for place, (path, label) in enumerate(samples[start : start + per_shard], start):
                _add(archive, f"{place:08d}.{ENDINGS[path.suffix.lower()]}", path.read_bytes())
                _add(archive, f"{place:08d}.cls", str(label).encode())
        part.rename(part.with_suffix(""))
    return len(shards), len(samples)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds one folder of images per class")
    parser.add_argument("out", type=Path, help="where the shards go")
    parser.add_argument("--split", default="train", help="train or val (default: %(default)s)")
    parser.add_argument("--per-shard", type=int, default=10000, help="samples in a shard (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    shards, samples = write_shards(**vars(options))
    print(f"{options.out}: {samples:,} samples in {shards:,} shards")


if __name__ == "__main__":
    main()
