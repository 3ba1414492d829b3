"""Files of images with boxes: encoded images in one ``.npz``, what is said about them in one text file beside it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["boxed_files", "channel_statistics", "read_images"]


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
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('encoded images are read with Pillow; install it with pip install "mmpos[train]"') from error
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    encoded = next((key for key in ("jpeg", "png") if key in arrays), None)
    if encoded is None or "offsets" not in arrays:
        raise ValueError(f"root: {path} holds {sorted(arrays)}; expected offsets and jpeg or png")
    raw, offsets = arrays[encoded].tobytes(), arrays["offsets"]
    if len(offsets) != count + 1:
        raise ValueError(f"root: {path} holds {len(offsets) - 1} images, the text beside it tells of {count}")
    out = np.empty((count, *size, 3), dtype=np.uint8)
    for number, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        with Image.open(io.BytesIO(raw[start:end])) as image:
            if image.size != size[::-1]:
                raise ValueError(
                    f"root: image {number} of {path} has {image.size[1]} x {image.size[0]} pixels, expected "
                    f"{size[0]} x {size[1]}"
                )
            out[number] = np.asarray(image.convert("RGB"))
    return out


def channel_statistics(images: Sequence[np.ndarray] | np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel on [0, 1]. Shape: images ``(N, H, W, C)`` uint8."""
    total = np.stack([image.reshape(-1, image.shape[-1]).astype(np.float64).mean(0) for image in images]).mean(0)
    square = np.stack([(image.reshape(-1, image.shape[-1]) / 255.0).__pow__(2).mean(0) for image in images]).mean(0)
    mean = total / 255
    return tuple(map(float, mean)), tuple(map(float, np.sqrt(square - mean**2)))
