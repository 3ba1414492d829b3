"""Tiny models and helpers that the adapter tests share. Grids are never square."""

from __future__ import annotations

import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from mmpos import list_encodings
from mmpos.encodings import encoding_class

PATCH = 4
GRID = (3, 5)
IMAGE = (GRID[0] * PATCH, GRID[1] * PATCH)
SIZES = {"img_size": IMAGE, "patch_size": PATCH, "embed_dim": 128, "depth": 2, "num_heads": 4, "num_classes": 7}


def flat_encodings() -> list[str]:
    """Names of the encodings that serve images, that is two axes."""
    facts = {name: encoding_class(name).facts for name in list_encodings()}
    return [name for name, f in facts.items() if f.axes[0] <= 2 <= f.axes[1]]


def tiny_vit(**options) -> VisionTransformer:
    torch.manual_seed(0)
    cls = VisionTransformerDistilled if options.pop("distilled", False) else VisionTransformer
    return randomise(cls(**{**SIZES, "dynamic_img_size": True, **options})).eval()


def tiny_eva(**options) -> Eva:
    torch.manual_seed(0)
    return randomise(Eva(**{**SIZES, "dynamic_img_size": True, **options})).eval()


def mean_vit(**options) -> VisionTransformer:
    """No class token, mean pooling, no table."""
    return tiny_vit(**{"class_token": False, "global_pool": "avg", "pos_embed": "none", **options})


@torch.no_grad()
def randomise(model, std: float = 0.3):
    """Values far from their initialisation, so that no parameter is idle by being zero or equal."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * std * (0.3 if parameter.dim() > 1 else 1.0))
    return model


def image(batch: int = 2, size: tuple[int, int] = IMAGE, channels: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(seed))


def shuffle_patches(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The image whose patch ``i`` is patch ``order[i]`` of ``x``."""
    batch, channels, height, width = x.shape
    grid = (height // PATCH, width // PATCH)
    cells = x.reshape(batch, channels, grid[0], PATCH, grid[1], PATCH).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)[:, order]
    return cells.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)


def order_of(count: int, seed: int = 3) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())


__all__ = [
    "GRID",
    "IMAGE",
    "PATCH",
    "difference",
    "flat_encodings",
    "image",
    "mean_vit",
    "order_of",
    "randomise",
    "shuffle_patches",
    "tiny_eva",
    "tiny_vit",
]
