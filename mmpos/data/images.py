"""Images as tensors: resizing between stored, training and test size, and augmentation of a whole batch at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.data.order import sample_uniforms

__all__ = ["BatchAugment", "ENLARGED", "REAL", "pixel_origin", "resize", "statistics"]

REAL = "real pixels"
ENLARGED = "enlarged (bicubic)"


def resize(images: Tensor, size: int) -> Tensor:
    """Square images at another size: smaller by antialiased bilinear, larger by bicubic interpolation.

    Shape:
        images float ``(B, C, H, W)``; returns ``(B, C, size, size)``.
    """
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    if size <= min(height, width):
        return F.interpolate(images, (size, size), mode="bilinear", antialias=True, align_corners=False)
    return F.interpolate(images, (size, size), mode="bicubic", align_corners=False)


def pixel_origin(stored: int, size: int) -> str:
    """Whether images stored at ``stored`` pixels have real detail at ``size`` pixels."""
    return REAL if size <= stored else ENLARGED


def statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images ``(N, C, H, W)``, on [0, 1]."""
    values = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.reshape(-1), minlength=256).double()  # exact, and no float copy of the pixels
        centre = (counts * values).sum() / counts.sum()
        mean.append(float(centre))
        std.append(float(((counts * (values - centre) ** 2).sum() / (counts.sum() - 1)).sqrt()))
    return tuple(mean), tuple(value or 1.0 for value in std)


@dataclass(frozen=True)
class BatchAugment:
    """Random geometry and brightness, drawn per sample and applied to the whole batch in one sampling step.

    Args:
        degrees: rotation in [-degrees, degrees].
        translate: shift in [-translate, translate] of the image size along each axis.
        scale: smallest and largest magnification.
        shear: horizontal shear in [-shear, shear] degrees.
        crop: smallest and largest part of the area that is cut out, anywhere inside, and stretched to the full size.
        flip: probability of a left-right flip.
        brightness: factor on the pixel values in [1 - brightness, 1 + brightness].
        padding: what lies outside: ``zeros``, ``border`` or ``reflection``.

    Example:
        >>> images = torch.rand(2, 1, 6, 4)
        >>> flipped = BatchAugment(flip=1.0)(images, torch.tensor([0, 1]), seed=0, epoch=0)
        >>> bool(torch.allclose(flipped, images.flip(-1), atol=1e-6))
        True
    """

    degrees: float = 0.0
    translate: float = 0.0
    scale: Sequence[float] = (1.0, 1.0)
    shear: float = 0.0
    crop: Sequence[float] = (1.0, 1.0)
    flip: float = 0.0
    brightness: float = 0.0
    padding: str = "zeros"

    def __post_init__(self) -> None:
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale: expected (smallest, largest) magnification above 0, got {tuple(self.scale)}")
        if len(self.crop) != 2 or not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise ValueError(f"crop: expected (smallest, largest) part of the area in (0, 1], got {tuple(self.crop)}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip: expected a probability, got {self.flip}")
        if self.padding not in ("zeros", "border", "reflection"):
            raise ValueError(f"padding: expected 'zeros', 'border' or 'reflection', got {self.padding!r}")
        if min(self.degrees, self.translate, self.shear, self.brightness) < 0:
            raise ValueError("degrees, translate, shear, brightness: expected 0 or more")

    @property
    def moves(self) -> bool:
        """Whether pixels change their place."""
        still = (0.0, 0.0, (1.0, 1.0), 0.0, (1.0, 1.0), 0.0)
        return (self.degrees, self.translate, tuple(self.scale), self.shear, tuple(self.crop), self.flip) != still

    def __call__(self, images: Tensor, index: Tensor, *, seed: int, epoch: int) -> Tensor:
        """Augment a batch; the result for a sample depends on (seed, epoch, index) alone.

        Shape:
            images float ``(B, C, H, W)`` on [0, 1], index ``(B,)``; returns the shape of ``images``.
        """
        random = sample_uniforms(seed, epoch, index, 10)
        if self.moves:
            matrix = self._matrix(random, images.shape[-1] / images.shape[-2])
            grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
            images = F.grid_sample(images, grid, mode="bilinear", padding_mode=self.padding, align_corners=False)
        if self.brightness:
            factor = 1 + self.brightness * (2 * random[:, 9] - 1)
            images = (images * factor[:, None, None, None]).clamp(0, 1)
        return images

    def _matrix(self, random: Tensor, aspect: float) -> Tensor:
        """Where each output pixel reads, on [-1, 1] coordinates (x, y).

        Shape: random ``(B, 10)``; returns ``(B, 2, 3)``.
        """
        signed = 2 * random - 1
        angle = signed[:, 0] * math.radians(self.degrees)
        shear = (signed[:, 1] * math.radians(self.shear)).tan()
        low, high = self.scale
        zoom = 1 / (low + (high - low) * random[:, 2])
        cos, sin = angle.cos() * zoom, angle.sin() * zoom
        # rotation and shear are rigid in pixels; [-1, 1] coordinates are stretched by the aspect ratio W / H
        turn = torch.stack([cos, cos * shear / aspect - sin / aspect, sin * aspect, sin * shear + cos], -1).reshape(
            -1, 2, 2
        )
        side = (self.crop[0] + (self.crop[1] - self.crop[0]) * random[:, 3]).sqrt()
        mirror = torch.where(random[:, 6] < self.flip, -1.0, 1.0)
        stretch = torch.stack([side * mirror, side], -1)
        inside = ((1 - side)[:, None] * signed[:, 4:6])[..., None]
        shift = turn @ inside + 2 * self.translate * signed[:, 7:9, None]
        return torch.cat([turn * stretch[:, None], shift], -1)
