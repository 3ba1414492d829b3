"""Unpack the three ImageNet-1k archives into ``train/<class>`` and ``val/<class>``.

``python datasets/image_folder/prepare.py <folder with the archives>``

Needs torchvision, checks the MD5 sums, downloads nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

ARCHIVES = ("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz")
COUNTS = {"train": 1_281_167, "val": 50_000}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds the three archives; train and val are made in it")
    folder = parser.parse_args(arguments).folder
    missing = [name for name in ARCHIVES if not (folder / name).is_file()]
    if missing:
        raise SystemExit(f"{folder}: missing {', '.join(missing)}; get them from image-net.org after registering")
    from torchvision.datasets import ImageNet

    for split, expected in COUNTS.items():
        found = len(ImageNet(str(folder), split=split))
        if found != expected:
            raise SystemExit(
                f"{folder / split}: expected {expected:,} images, found {found:,}; delete the folder and run again"
            )
        print(f"{folder / split}: {found:,} images")


if __name__ == "__main__":
    main()
