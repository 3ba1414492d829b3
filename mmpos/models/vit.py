"""Vision transformers with a chosen position encoding: the small one of the recipes, and any of timm by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from mmpos.adapters._attachment import require
from mmpos.adapters.timm import attach, stack_of
from mmpos.models.polyphase import anchor_patches

__all__ = ["MICRO", "create_vit", "initialise"]

#: the model of the laptop recipes: 0.67 to 0.70 million parameters with a linear patch embedding, mean pooling and no
#: CLS token
MICRO: dict[str, Any] = {
    "embed_dim": 96,
    "depth": 6,
    "num_heads": 3,
    "class_token": False,
    "global_pool": "avg",
    "fc_norm": False,
    "norm_layer": partial(nn.LayerNorm, eps=1e-5),
    "act_layer": nn.GELU,
}


def create_vit(
    name: str = "vit_micro",
    *,
    encoding: Any = "none",
    encoding_options: Mapping[str, Any] | None = None,
    image_size: int | Sequence[int] | None = None,
    patch_size: int | Sequence[int] | None = None,
    in_chans: int = 3,
    num_classes: int = 10,
    train_grid: Sequence[int] | None = None,
    pos_embed: str = "remove",
    polyphase: bool = False,
    **timm_kwargs: Any,
) -> Any:
    """Build a timm vision transformer that takes images of any size and carries an encoding.

    Args:
        name: ``vit_micro`` or the name of a timm model of class ``VisionTransformer`` or ``Eva``.
        encoding: registry name, pair ``(name, options)``, or a list of these.
        encoding_options: options of a single encoding.
        image_size: pixels of the training images, height before width; default 32 for ``vit_micro``, else that of the
            model.
        patch_size: pixels of a patch; default 4 for ``vit_micro``, else that of the model.
        in_chans: image channels.
        num_classes: classes; 0 leaves out the classifier.
        train_grid: patches of the training images; default follows from ``image_size``.
        pos_embed: what happens to the encoding the model came with, see :func:`mmpos.adapters.timm.attach`.
        polyphase: whether images are anchored first, which makes answers the same under every circular shift; the
            encoding must be ``none`` or ``cpe`` with circular padding, see
            :func:`~mmpos.models.polyphase.anchor_patches`.
        timm_kwargs: further arguments of the timm model, for example ``depth=2`` or ``drop_path_rate=0.1``.

    Example:
        >>> vit = create_vit(encoding="rope_mixed", image_size=(16, 24), in_chans=1)
        >>> vit(torch.zeros(1, 1, 8, 32)).shape, sum(p.numel() for p in vit.parameters())
        (torch.Size([1, 10]), 674410)
    """
    timm = require("timm", "vit")
    micro = name == "vit_micro"
    if not micro and not timm.is_model(name):
        near = _near_names(timm, name)
        raise ValueError(
            f"name: no model is called {name!r}; {near}'vit_micro' and every ViT of timm.list_models() are known"
        )
    if micro:
        image_size, patch_size = image_size or 32, patch_size or 4
    check_sizes(image_size, patch_size)
    arguments = {**timm_kwargs, "in_chans": in_chans, "num_classes": num_classes, "dynamic_img_size": True}
    if image_size is not None:
        arguments["img_size"] = _pair(image_size)
    if patch_size is not None:
        arguments["patch_size"] = _pair(patch_size)
    if micro:
        from timm.models.vision_transformer import VisionTransformer

        vit = VisionTransformer(**{**MICRO, "pos_embed": "none", "weight_init": "skip", **arguments})
    else:
        try:
            vit = timm.create_model(name, **arguments)
        except TypeError as error:
            raise ValueError(
                f"name: {name!r} is not a model this function can build ({error}); it needs a ViT that takes "
                "dynamic_img_size"
            ) from error
    if micro or vit.patch_embed.img_size is not None:
        check_sizes(vit.patch_embed.img_size, vit.patch_embed.patch_size)
    attach(vit, encoding, pos_embed=pos_embed, train_grid=train_grid, **dict(encoding_options or {}))
    if polyphase:
        anchor_patches(vit, stack_of(vit))
    if micro:
        initialise(vit)
    return vit


@torch.no_grad()
def initialise(vit: Any) -> None:
    """Xavier-uniform weights, zero biases, and the encoding's own initialisation: the start of the laptop recipes.

    Call it after ``to_empty`` when the model was built on the meta device.
    """
    stack = stack_of(vit)
    of_the_encoding = set(stack.modules())
    for module in vit.modules():
        if module in of_the_encoding:
            continue
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
            nn.init.xavier_uniform_(module.weight.flatten(1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name in ("cls_token", "reg_token", "dist_token", "pos_embed"):
        parameter = getattr(vit, name, None)
        if parameter is not None:
            nn.init.normal_(parameter, std=0.02)
    stack.reset_parameters()


def check_sizes(image_size: int | Sequence[int] | None, patch_size: int | Sequence[int] | None) -> None:
    """Raise unless an image is a whole number of patches, at least one."""
    if patch_size is not None and min(_pair(patch_size)) < 1:
        raise ValueError(f"patch_size: expected positive integers, got {patch_size}")
    if image_size is None or patch_size is None:
        return
    image, patch = _pair(image_size), _pair(patch_size)
    if any(i < p for i, p in zip(image, patch, strict=True)):
        raise ValueError(
            f"image_size: {image} is smaller than one patch of {patch}; enlarge image_size or reduce patch_size"
        )
    if any(i % p for i, p in zip(image, patch, strict=True)):
        fitting = tuple(i // p * p for i, p in zip(image, patch, strict=True))
        raise ValueError(
            f"image_size: expected multiples of the patch size {patch}, got {image}; for example {fitting}"
        )


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)


def _near_names(timm: Any, name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, ["vit_micro", *timm.list_models()], n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""
