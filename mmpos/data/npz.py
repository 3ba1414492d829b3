"""Images in one ``.npz`` file that the user names. Card of the two layouts: ``datasets/npz``.

*Files*: ``jpeg`` (or ``png``) holds the encoded images back to back as uint8, ``offsets`` where each begins and the
last ends.

*Arrays*: ``images`` holds uint8 pixels ``(N, H, W)`` or ``(N, H, W, C)``. Both come with ``label``, and
optionally ``split`` (0 train, 1 test, 2 validation) and ``classes`` (names).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpos.data.base import TensorData, build_augment, hold_out
from mmpos.data.images import statistics

PHOTO = {"crop": (0.5, 1.0), "flip": 0.5, "brightness": 0.2, "padding": "reflection"}


class NpzData(TensorData):
    """A labelled image set in one file, trained below the stored size so that larger test sizes have real detail.

    Args:
        root: the ``.npz`` file, or a folder that holds exactly one.
        batch_size: images of one process in one training batch.
        eval_batch_size: images in one validation or test batch.
        image_size: height and width of the training images; ``None`` is half the stored size.
        val_fraction: part of the training images of each class kept for validation where the file has no validation
            split; 0 validates on the test images.
        augment: ``True`` random crop, flip and brightness, ``False`` none, or a mapping of
            :class:`~mmpos.data.images.BatchAugment` options to change.
        seed: seed of the order and of the augmentation; the splits do not depend on it.
    """

    name = "npz"

    def __init__(
        self,
        *,
        root: str | Path | None,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        image_size: int | None = None,
        val_fraction: float = 0.1,
        augment: bool | Mapping[str, Any] = True,
        seed: int = 0,
    ) -> None:
        path = find_npz(root)
        images, labels, split, self.class_names = read_npz(path)
        self.name = path.stem
        self.num_classes = len(self.class_names)
        test = split == 1
        rest = ~test
        self.mean, self.std = statistics(images[rest])
        held = split == 2
        if not held.any():
            held[rest] = hold_out(labels[rest], val_fraction, seed=1)
        train = rest & ~held
        pick = lambda mask: (images[mask], labels[mask])  # noqa: E731
        super().__init__(
            pick(train),
            pick(held) if held.any() else None,
            pick(test),
            augment=build_augment(augment, PHOTO),
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            image_size=images.shape[-1] // 2 if image_size is None else image_size,
            seed=seed,
        )


def find_npz(root: str | Path | None, name: str = "npz") -> Path:
    """The one ``.npz`` file a user means; raises with where it looked. ``name`` is the data set that asks."""
    if root is None:
        raise ValueError(
            f"root: data {name} needs the file or its folder; give data.root=<file.npz>. The layout is in "
            f"datasets/{name}/README.md"
        )
    path = Path(root).expanduser().absolute()
    if path.is_file():
        return path
    found = sorted(path.glob("*.npz")) if path.is_dir() else []
    if len(found) == 1:
        return found[0]
    what = (
        f"it holds {len(found)} .npz files ({', '.join(f.name for f in found[:4])})"
        if path.is_dir()
        else "it is not there"
    )
    raise FileNotFoundError(
        f"root: data {name} looked for {path} and {what}; give data.root=<file.npz>, or the folder of exactly one. The "
        f"layout, and how to get or make such a file, is in datasets/{name}/README.md"
    )


def read_npz(path: Path) -> tuple[Tensor, Tensor, Tensor, tuple[str, ...]]:
    """Images ``(N, C, H, W)`` uint8, labels ``(N,)``, split ``(N,)`` and the class names of a file."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    encoded = next((key for key in ("jpeg", "png") if key in arrays), None)
    if "label" not in arrays or not (encoded and "offsets" in arrays or "images" in arrays):
        raise ValueError(
            f"root: {path} holds {sorted(arrays)}; expected label with either images, or jpeg (or png) and offsets. "
            f"See datasets/npz/README.md"
        )
    pixels = decode_images(arrays[encoded], arrays["offsets"]) if encoded else arrays["images"]
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4):
        raise ValueError(
            f"root: images of {path} must be uint8 (N, H, W) or (N, H, W, C), got {pixels.dtype} {pixels.shape}"
        )
    if pixels.shape[1] != pixels.shape[2]:
        raise ValueError(
            f"root: images of {path} must be square, got {pixels.shape[1]} x {pixels.shape[2]}; crop or pad them first"
        )
    images = torch.from_numpy(pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2).copy())
    labels = torch.from_numpy(arrays["label"].astype(np.int64))
    if len(labels) != len(images):
        raise ValueError(f"root: {path} has {len(images)} images and {len(labels)} labels")
    names = arrays.get("classes")
    classes = tuple(map(str, names)) if names is not None else tuple(map(str, range(int(labels.max()) + 1)))
    if "split" in arrays:
        split = torch.from_numpy(arrays["split"].astype(np.int64))
    else:
        split = hold_out(labels, 0.2, seed=0).long()
    if not (split == 1).any() or not (split == 0).any():
        raise ValueError(
            f"root: split of {path} must mark training (0) and test (1) images, got {split.unique().tolist()}"
        )
    return images, labels, split, classes


def decode_images(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Encoded images that stand back to back. Shape: ``(N, H, W)`` or ``(N, H, W, 3)`` uint8."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('encoded images are read with Pillow; install it with pip install "mmpos[train]"') from error
    raw, images = data.tobytes(), []
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        with Image.open(io.BytesIO(raw[start:end])) as image:
            images.append(np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB")))
    if len({image.shape for image in images}) != 1:
        if len({image.shape[:2] for image in images}) != 1:
            raise ValueError("root: all images of the file must have one size")
        # grey images among coloured ones
        images = [image if image.ndim == 3 else np.repeat(image[..., None], 3, -1) for image in images]
    return np.stack(images)
