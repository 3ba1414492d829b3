"""Handwritten digits at seeded places on canvases: images, several images, videos. All of it is drawn by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CELL", "Canvas", "Digits", "Placed", "draw_canvas"]

#: side in pixels of what becomes one visual token: 2 x 2 patches of 4 pixels
CELL = 8
INK = 40  # of 255: what counts as ink where the box of a digit is measured
_TRIES = 60


@dataclass(frozen=True)
class Placed:
    """A digit on a canvas. ``box`` is the smallest one around its ink: x0, y0, x1, y1 in pixels."""

    label: int
    box: tuple[int, int, int, int]

    @property
    def centre(self) -> tuple[float, float]:
        """Row and column of the middle of the box."""
        return (self.box[1] + self.box[3]) / 2, (self.box[0] + self.box[2]) / 2


@dataclass(frozen=True, eq=False)
class Canvas:
    """Pixels ``(H, W)`` uint8 and the digits on them."""

    pixels: np.ndarray
    digits: tuple[Placed, ...]

    def unique(self) -> list[Placed]:
        """Digits that occur once."""
        labels = [digit.label for digit in self.digits]
        return [digit for digit in self.digits if labels.count(digit.label) == 1]


class Digits:
    """Ink of handwritten digits, cut out and scaled to a longer side of a few pixels.

    Args:
        images: ``(N, 28, 28)`` uint8.
        labels: ``(N,)``.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels.numpy()
        self.of = [np.flatnonzero(self.labels == label) for label in range(10)]
        if min(map(len, self.of)) == 0:
            raise ValueError("labels: expected at least one picture of each digit 0 to 9")
        self._cut: dict[tuple[int, int], np.ndarray] = {}

    def cut(self, index: int, side: int) -> np.ndarray:
        """Ink of one digit whose longer side is ``side`` pixels. Shape: ``(h, w)`` uint8, no empty border."""
        key = (index, side)
        if key not in self._cut:
            picture = _trim(self.images[index].numpy())
            height, width = picture.shape
            scale = side / max(height, width)
            size = max(round(height * scale), 2), max(round(width * scale), 2)
            wide = torch.from_numpy(picture).float()[None, None]
            scaled = F.interpolate(wide, size, mode="bilinear", antialias=True, align_corners=False)
            self._cut[key] = _trim(scaled[0, 0].round().clamp(0, 255).to(torch.uint8).numpy())
        return self._cut[key]


def _trim(picture: np.ndarray) -> np.ndarray:
    ink = picture > INK
    rows, cols = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    return picture[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1]


def draw_canvas(
    digits: Digits,
    labels: Sequence[int],
    height: int,
    width: int,
    sides: tuple[int, int],
    draw: np.random.Generator,
    gap: int = 2,
) -> Canvas:
    """Place digits at random without overlap; those that find no room are left out, but never the first.

    Args:
        digits: where the ink comes from.
        labels: which digits.
        height: rows of pixels.
        width: columns of pixels.
        sides: smallest and largest longer side of a digit in pixels.
        draw: where the randomness comes from.
        gap: empty pixels between boxes.
    """
    pixels = np.zeros((height, width), dtype=np.uint8)
    placed: list[Placed] = []
    for label in labels:
        index = digits.of[label][draw.integers(len(digits.of[label]))]
        ink = digits.cut(int(index), int(draw.integers(sides[0], min(sides[1], height, width) + 1)))
        h, w = ink.shape
        tries = draw.random((_TRIES, 2))
        for down, right in tries:
            y, x = int(down * (height - h + 1)), int(right * (width - w + 1))
            box = (x, y, x + w, y + h)
            if all(_apart(box, other.box, gap) for other in placed):
                pixels[y : y + h, x : x + w] = ink
                placed.append(Placed(label, box))
                break
    return Canvas(pixels, tuple(placed))


def _apart(a: tuple[int, ...], b: tuple[int, ...], gap: int) -> bool:
    return a[0] >= b[2] + gap or b[0] >= a[2] + gap or a[1] >= b[3] + gap or b[1] >= a[3] + gap
