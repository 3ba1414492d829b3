"""Cameras of several views: poses, intrinsics and image size, with the changes of frame and image that users need.

Convention: OpenCV, x right, y down, z forward. ``w2c`` maps world points (column vectors) into the camera.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Cameras", "invert_rigid", "lift"]

NORMALISATIONS = ("first_identity", "first_identity_unit_baseline", "max_radius", "mean_centre")


def invert_rigid(pose: Tensor) -> Tensor:
    """Inverse of rotations with translations, by transposition. Shape: ``(..., 4, 4)`` in and out."""
    turned = pose[..., :3, :3].mT
    moved = -(turned @ pose[..., :3, 3:])
    return torch.cat([torch.cat([turned, moved], -1), pose[..., 3:, :]], -2)


def lift(matrix: Tensor) -> Tensor:
    """A 3 x 3 matrix as a 4 x 4 one that leaves the fourth coordinate. Shape: ``(..., 3, 3)`` to ``(..., 4, 4)``."""
    out = F.pad(matrix, (0, 1, 0, 1))
    out[..., 3, 3] = 1.0
    return out


@dataclass(frozen=True, eq=False)
class Cameras:
    """Where the views of a batch were taken.

    Args:
        w2c: world to camera, rigid.
        K: intrinsics in pixels of images of ``size``, without skew; ``None`` when they are unknown.
        size: height and width of the images in pixels; needed with ``K``.

    Shape:
        w2c ``(B, V, 4, 4)``, K ``(B, V, 3, 3)``; float32 or float64.

    Example:
        >>> K = torch.tensor([[50.0, 0, 32], [0, 50, 24], [0, 0, 1]])
        >>> views = Cameras(torch.eye(4).expand(1, 2, 4, 4), K.expand(1, 2, 3, 3), (48, 64))
        >>> views.projection.shape, views.normalized_K[0, 0, 0].tolist()
        (torch.Size([1, 2, 4, 4]), [0.78125, 0.0, 0.0])
    """

    w2c: Tensor
    K: Tensor | None = None
    size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.w2c.dim() != 4 or self.w2c.shape[-2:] != (4, 4):
            raise ValueError(f"w2c: expected (B, V, 4, 4), got {tuple(self.w2c.shape)}; add a batch axis with [None]")
        if self.w2c.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"w2c: geometry needs float32 or float64, got {self.w2c.dtype}; cast with .float()")
        if self.K is None:
            return
        if self.K.shape != (*self.w2c.shape[:2], 3, 3):
            raise ValueError(
                f"K: expected (B, V, 3, 3) = {(*self.w2c.shape[:2], 3, 3)} as w2c, got {tuple(self.K.shape)}"
            )
        if self.size is None:
            raise ValueError("size: intrinsics are in pixels; give height and width of the images, size=(h, w)")
        if min(self.size) < 1:
            raise ValueError(f"size: expected height and width of 1 pixel or more, got {self.size}")

    @property
    def num_views(self) -> int:
        """Views of a sample."""
        return int(self.w2c.shape[1])

    @property
    def c2w(self) -> Tensor:
        """Camera to world. Shape: ``(B, V, 4, 4)``."""
        return invert_rigid(self.w2c)

    @property
    def centres(self) -> Tensor:
        """Camera centres in the world. Shape: ``(B, V, 3)``."""
        return self.c2w[..., :3, 3]

    @property
    def normalized_K(self) -> Tensor:  # noqa: N802  the name of the field
        """Intrinsics of an image that spans [-1/2, 1/2] both ways. Shape: ``(B, V, 3, 3)``."""
        if self.K is None or self.size is None:
            raise ValueError("K: this method needs intrinsics; give Cameras(w2c, K, size)")
        height, width = self.size
        scale = self.K.new_tensor([[1 / width], [1 / height], [1.0]])
        shift = self.K.new_tensor([[0, 0, -0.5], [0, 0, -0.5], [0, 0, 0]])
        # the third row is (0, 0, 1): dividing the image by its size and moving its middle to 0
        return self.K.to(self.w2c.dtype) * scale.to(self.w2c.dtype) + shift.to(self.w2c.dtype)

    @property
    def projection(self) -> Tensor:
        """``lift(K) w2c`` with normalised intrinsics, or ``w2c`` where there are none. Shape: ``(B, V, 4, 4)``."""
        return self.w2c if self.K is None else lift(self.normalized_K) @ self.w2c

    @property
    def unprojection(self) -> Tensor:
        """Inverse of :attr:`projection`, in closed form. Shape: ``(B, V, 4, 4)``."""
        if self.K is None:
            return self.c2w
        k = self.normalized_K
        inverse = torch.zeros_like(k)
        inverse[..., 0, 0], inverse[..., 1, 1] = 1 / k[..., 0, 0], 1 / k[..., 1, 1]
        inverse[..., 0, 2], inverse[..., 1, 2] = -k[..., 0, 2] / k[..., 0, 0], -k[..., 1, 2] / k[..., 1, 1]
        inverse[..., 2, 2] = 1.0
        return self.c2w @ lift(inverse)

    def views(self, index: Sequence[int] | slice | Tensor) -> Cameras:
        """Some of the views, in the order given."""
        index = list(index) if isinstance(index, Sequence) else index
        return Cameras(self.w2c[:, index], None if self.K is None else self.K[:, index], self.size)

    def moved(self, change: Tensor) -> Cameras:
        """The same cameras in another world frame: world points ``x`` are called ``change x``.

        Shape:
            change ``(4, 4)`` or ``(B, 1, 4, 4)``, rigid.
        """
        return replace(self, w2c=self.w2c @ invert_rigid(change.to(self.w2c.dtype)))

    def cropped(self, top: int, left: int, height: int, width: int) -> Cameras:
        """Cameras of a part of the images."""
        K = self._intrinsics("cropped")  # noqa: N806
        shift = torch.zeros_like(K)
        shift[..., 0, 2], shift[..., 1, 2] = -left, -top
        return Cameras(self.w2c, K + shift, (height, width))

    def resized(self, height: int, width: int) -> Cameras:
        """Cameras of the images at another size."""
        K = self._intrinsics("resized")  # noqa: N806
        assert self.size is not None
        scale = K.new_tensor([[width / self.size[1]], [height / self.size[0]], [1.0]])
        return Cameras(self.w2c, K * scale, (height, width))

    def _intrinsics(self, what: str) -> Tensor:
        if self.K is None:
            raise ValueError(f"K: {what} changes intrinsics, and these cameras have none")
        return self.K

    @classmethod
    def from_opengl(cls, c2w: Tensor, K: Tensor | None = None, size: tuple[int, int] | None = None) -> Cameras:  # noqa: N803
        """From camera-to-world poses of Blender or OpenGL (y up, z backward). Shape: c2w ``(B, V, 4, 4)``."""
        flip = torch.diag(c2w.new_tensor([1.0, -1.0, -1.0, 1.0]))
        return cls(invert_rigid(c2w @ flip), K, size)

    def normalized(self, mode: str = "first_identity_unit_baseline", *, radius: float = 0.5) -> Cameras:
        """Cameras in a frame and a scale that do not depend on the data set.

        Args:
            mode: ``first_identity`` makes the first camera the world; ``first_identity_unit_baseline`` also makes the
                distance between the first two 1 (skipped below 0.01); ``mean_centre`` moves the mean of the camera
                centres to 0; ``max_radius`` does and makes the largest distance from it ``radius``.
            radius: see ``max_radius``.

        Depths have to be multiplied by the same factor as translations.
        """
        if mode not in NORMALISATIONS:
            raise ValueError(f"mode: expected one of {', '.join(NORMALISATIONS)}, got {mode!r}")
        if mode.startswith("first_identity"):
            w2c = self.w2c @ self.c2w[:, :1]
            if mode == "first_identity":
                return replace(self, w2c=w2c)
            if self.num_views < 2:
                raise ValueError(f"mode: {mode} needs two views, got {self.num_views}; use mode='first_identity'")
            baseline = (self.centres[:, 1] - self.centres[:, 0]).norm(dim=-1)
            factor = torch.where(baseline < 0.01, 1.0, 1 / baseline.clamp_min(0.01))
            return replace(self, w2c=_scaled(w2c, factor))
        centre = self.centres.mean(1, keepdim=True)
        change = torch.eye(4, dtype=self.w2c.dtype, device=self.w2c.device).repeat(len(centre), 1, 1, 1)
        change[..., :3, 3] = -centre
        out = self.moved(change)
        if mode == "max_radius":
            largest = out.centres.norm(dim=-1).amax(1).clamp_min(1e-8)
            out = replace(out, w2c=_scaled(out.w2c, radius / largest))
        return out


def _scaled(w2c: Tensor, factor: Tensor) -> Tensor:
    """Translations times a factor of each sample."""
    scale = torch.ones_like(w2c)
    scale[..., :3, 3] = factor[:, None, None]
    return w2c * scale
