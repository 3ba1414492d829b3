"""Video vision transformers: a timm ViT that reads tubelets, with an encoding over (time, row, column)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmpos.adapters._attachment import require
from mmpos.adapters.timm import attach
from mmpos.models.vit import MICRO, check_sizes, initialise

__all__ = ["TubeletEmbed", "create_video_vit"]


class TubeletEmbed(nn.Module):
    """Linear embedding of tubelets: boxes of ``tubelet_size`` frames and one patch, without overlap.

    It has the constructor timm gives its patch embeddings, and three sizes (frames, height, width) where these have
    two. Any number of tubelets along each axis is taken.

    Args:
        img_size: pixels of the training videos, height before width.
        patch_size: pixels of a patch.
        in_chans: channels.
        embed_dim: model width ``D``.
        frames: frames of the training videos.
        tubelet_size: frames of a tubelet.
        bias: whether a bias is learned.
        factory: device and dtype of the weights; what timm hands to 2-D embeddings alone is not used.

    Shape:
        videos ``(B, in_chans, frames, height, width)``; returns ``(B, T, H, W, D)``.
    """

    img_size = None
    strict_img_size = False
    dynamic_img_pad = False

    def __init__(
        self,
        img_size: int | Sequence[int] = 32,
        patch_size: int | Sequence[int] = 4,
        in_chans: int = 3,
        embed_dim: int = 96,
        *,
        frames: int = 8,
        tubelet_size: int = 2,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        if factory.get("norm_layer") is not None or factory.get("dynamic_img_pad"):
            raise ValueError(
                "embed_norm_layer, dynamic_img_pad: the tubelet embedding has neither a norm nor padding; leave them "
                "out"
            )
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        rows, columns = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        self.patch_size = (tubelet_size, rows, columns)
        self.grid_size = tuple(s // p for s, p in zip((frames, height, width), self.patch_size, strict=True))
        self.num_patches = self.grid_size[0] * self.grid_size[1] * self.grid_size[2]
        self.proj = nn.Conv3d(
            in_chans, embed_dim, self.patch_size, stride=self.patch_size, bias=bias, device=device, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """Embed whole tubelets. The sizes are checked by the adapter, which knows when it may."""
        return self.proj(x).permute(0, 2, 3, 4, 1)


def create_video_vit(
    name: str = "vit_micro",
    *,
    encoding: Any = "rope_3d",
    encoding_options: Mapping[str, Any] | None = None,
    frames: int = 8,
    tubelet_size: int = 2,
    image_size: int | Sequence[int] = 32,
    patch_size: int | Sequence[int] = 4,
    in_chans: int = 3,
    num_classes: int = 10,
    train_grid: Sequence[int] | None = None,
    **timm_kwargs: Any,
) -> Any:
    """Build a timm ``VisionTransformer`` over videos of any length and size, averaging its tokens.

    Args:
        name: ``vit_micro`` or the name of a timm model of class ``VisionTransformer``, of which the blocks are used.
        encoding: an encoding of three axes: registry name, pair ``(name, options)``, or a list of these.
        encoding_options: options of a single encoding.
        frames: frames of the training videos.
        tubelet_size: frames of a tubelet.
        image_size: pixels of the training videos, height before width.
        patch_size: pixels of a patch.
        in_chans: channels.
        num_classes: classes; 0 leaves out the classifier.
        train_grid: tubelets of the training videos (time, rows, columns); default follows from the sizes.
        timm_kwargs: further arguments of the timm model, for example ``depth=2`` or ``class_token=True``.

    Example:
        >>> import torch
        >>> vit = create_video_vit(frames=4, image_size=(8, 12), in_chans=1, depth=1)
        >>> vit(torch.zeros(2, 1, 4, 8, 12)).shape, vit(torch.zeros(2, 1, 6, 16, 12)).shape
        (torch.Size([2, 10]), torch.Size([2, 10]))
    """
    timm = require("timm", "vit")
    from timm.models.vision_transformer import VisionTransformer

    check_sizes(image_size, patch_size)
    if tubelet_size < 1 or frames < 1 or frames % tubelet_size:
        raise ValueError(
            f"frames: expected a positive multiple of tubelet_size, got {frames} frames and tubelet_size "
            f"{tubelet_size}; change one of them"
        )
    if "pos_embed" in timm_kwargs:
        raise ValueError("pos_embed: a video ViT has no table of its own; use encoding='learned'")
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    arguments: dict[str, Any] = {
        "class_token": False,
        "global_pool": "avg",
        "pos_embed": "none",
        **timm_kwargs,
        "embed_layer": partial(TubeletEmbed, frames=frames, tubelet_size=tubelet_size),
        "img_size": size,
        "patch_size": patch_size if isinstance(patch_size, int) else tuple(patch_size),
        "in_chans": in_chans,
        "num_classes": num_classes,
        "dynamic_img_size": True,
    }
    micro = name == "vit_micro"
    if micro:
        vit = VisionTransformer(**{**MICRO, "weight_init": "skip", **arguments})
    else:
        if not timm.is_model(name):
            raise ValueError(
                f"name: no model is called {name!r}; 'vit_micro' and every VisionTransformer of timm.list_models() are "
                "known"
            )
        try:
            vit = timm.create_model(name, **arguments)
        except TypeError as error:
            raise ValueError(
                f"name: {name!r} cannot take a tubelet embedding ({error}); it needs a model of class VisionTransformer"
            ) from error
    attach(vit, encoding, train_grid=train_grid, **dict(encoding_options or {}))
    if micro:
        initialise(vit)
    return vit
