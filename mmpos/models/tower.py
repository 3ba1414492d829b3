"""The vision tower of a small vision-language model: a timm ViT whose tokens are merged 2 x 2, and its own training.

Merging 2 x 2 tokens before the decoder is that of Qwen2-VL, arXiv 2409.12191.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.models.vit import create_vit

__all__ = ["MERGE", "DenseTower", "Tower", "create_dense_tower", "create_tower", "initialise_linear"]

#: tokens of the tower along each side of one visual token of the decoder
MERGE = 2


class Tower(nn.Module):
    """A ViT of :func:`~mmpos.models.create_vit` without its classifier: images of whole cells to features.

    Args:
        vit: a timm vision transformer with an encoding.
    """

    def __init__(self, vit: Any) -> None:
        super().__init__()
        self.vit = vit
        self.width = MERGE**2 * int(vit.embed_dim)
        self.patch = int(vit.patch_embed.patch_size[0])

    @property
    def cell(self) -> int:
        """Side in pixels of one visual token."""
        return MERGE * self.patch

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Visual tokens of an image along its sides."""
        if height % self.cell or width % self.cell or min(height, width) < self.cell:
            raise ValueError(
                f"pixels: expected sides that are multiples of {self.cell} pixels (patches of {self.patch}, merged "
                f"{MERGE} x {MERGE}), got {height} x {width}; pad or resize the image"
            )
        return height // self.cell, width // self.cell

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of cells. Shape: ``(N, C, H, W)`` to ``(N, rows * cols, 4 D)``."""
        rows, cols = self.grid(*pixels.shape[-2:])
        x = self.vit.forward_features(pixels)[:, self.vit.num_prefix_tokens :]
        x = x.unflatten(1, (rows, MERGE, cols, MERGE)).transpose(2, 3)
        return x.reshape(len(x), rows * cols, self.width)


class DenseTower(nn.Module):
    """The tower with an output for each cell: which object lies there, and how far its four edges are.

    Args:
        tower: the tower.
        num_classes: objects; one more class is "none".
        hidden: width of the output layers.
    """

    def __init__(self, tower: Tower, num_classes: int, hidden: int = 128) -> None:
        super().__init__()
        self.tower = tower
        self.num_classes = num_classes
        self.dense = nn.Sequential(
            nn.LayerNorm(tower.width), nn.Linear(tower.width, hidden), nn.GELU(), nn.Linear(hidden, num_classes + 5)
        )

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits and distances to the left, upper, right and lower edge, in cells.

        Shape: ``(N, C, H, W)`` to ``(N, cells, classes + 1)`` and ``(N, cells, 4)``.
        """
        out = self.dense(self.tower(pixels))
        return out[..., : self.num_classes + 1], out[..., self.num_classes + 1 :]


def create_tower(
    encoding: Any, *, in_chans: int, train_grid: Sequence[int], patch_size: int = 4, **options: Any
) -> Tower:
    """The vision tower: a micro ViT (or a timm ViT by ``name``) for images of ``train_grid`` patches."""
    name = options.pop("name", "vit_micro")
    sizes = tuple(side * patch_size for side in train_grid)
    vit = create_vit(
        name, encoding=encoding, image_size=sizes, patch_size=patch_size, in_chans=in_chans, num_classes=0, **options
    )
    return Tower(vit)


def create_dense_tower(
    *,
    encoding: Any = "rope_mixed",
    in_chans: int = 1,
    num_classes: int = 10,
    train_grid: Sequence[int] = (12, 16),
    tower: Mapping[str, Any] | None = None,
) -> DenseTower:
    """A tower that learns what lies where, before it becomes part of a :class:`Vlm`."""
    made = create_tower(encoding, in_chans=in_chans, train_grid=train_grid, **dict(tower or {}))
    model = DenseTower(made, num_classes)
    initialise_linear(model.dense)
    return model


@torch.no_grad()
def initialise_linear(module: nn.Module) -> None:
    """Xavier-uniform weights and zero biases."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)
