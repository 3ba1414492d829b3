"""Files of images with boxes: encoded images in one ``.npz``, what is said about them in one text file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmpos.data.npz import decode_images

__all__ = ["EXTREMES", "boxed_files", "clear_extremes", "read_images"]

EXTREMES = ("highest", "lowest", "left-most", "right-most")


def boxed_files(root: str | Path | None, name: str, suffix: str) -> tuple[Path, Path]:
    """The image file and the text file in the folder a user means; raises with where it looked.

    Args:
        root: the folder, or one of the two files.
        name: the data set that asks.
        suffix: ending of the text file, such as ``.json``.
    """
    where = f"The layout, and how to get or make the files, is in datasets/{name}/README.md"
    if root is None:
        raise ValueError(f"root: data {name} needs a folder of files; give data.root=<folder>. {where}")
    folder = Path(root).expanduser().absolute()
    folder = folder.parent if folder.is_file() else folder
    found = {ending: sorted(folder.glob(f"*{ending}")) if folder.is_dir() else [] for ending in (".npz", suffix)}
    if any(len(files) != 1 for files in found.values()):
        held = ", ".join(f"{len(files)} {ending} files" for ending, files in found.items())
        what = f"it holds {held}, expected one of each" if folder.is_dir() else "it is not there"
        raise FileNotFoundError(f"root: data {name} looked in {folder} and {what}; give data.root=<folder>. {where}")
    return found[".npz"][0], found[suffix][0]


def read_images(path: Path, count: int, size: tuple[int, int]) -> np.ndarray:
    """All images of a file in memory, as colours.

    Args:
        path: the ``.npz`` file; ``jpeg`` or ``png`` holds the encoded images back to back, ``offsets`` where each
            begins and the last ends.
        count: how many there have to be.
        size: height and width they have to have.

    Shape:
        ``(count, height, width, 3)`` uint8.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    encoded = next((key for key in ("jpeg", "png") if key in arrays), None)
    if encoded is None or "offsets" not in arrays:
        raise ValueError(f"root: {path} holds {sorted(arrays)}; expected offsets and jpeg or png")
    found = len(arrays["offsets"]) - 1
    if found != count:
        raise ValueError(f"root: {path} holds {found} images, the text beside it tells of {count}")
    images = decode_images(arrays[encoded], arrays["offsets"])
    if images.shape[1:3] != size:
        raise ValueError(f"root: images of {path} have {images.shape[1]} x {images.shape[2]} pixels, expected {size}")
    return images if images.ndim == 4 else np.repeat(images[..., None], 3, -1)


def clear_extremes(
    boxes: Sequence[Sequence[float]], margin: float, names: Sequence[str] = EXTREMES
) -> list[tuple[str, int]]:
    """Which box is the highest, the lowest, the left-most, the right-most by its middle, and ahead by a margin.

    Args:
        boxes: x0, y0, x1, y1 each.
        margin: how far the next one has to be behind.
        names: words for the four.
    """
    out = []
    for name, axis, sign in zip(names, (1, 1, 0, 0), (1, -1, 1, -1), strict=True):
        along = sorted((sign * (box[axis] + box[axis + 2]) / 2, number) for number, box in enumerate(boxes))
        if len(along) == 1 or (along and along[1][0] - along[0][0] >= margin):
            out.append((name, along[0][1]))
    return out
