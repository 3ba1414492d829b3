"""What each supported Hugging Face model is like: where its decoder is, what its own ids are, and which blocks its
inputs hold.

Inputs of a forward pass come in as a mapping of its arguments. Two kinds of model: those whose processor gives token
types and grids (Qwen-VL, GLM-V), and those whose visual tokens replace placeholder ids and whose grids follow from the
configuration and the image sizes (LLaVA, InternVL, SmolVLM).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmpos.multimodal import Scheme, scheme
from mmpos.multimodal.segments import IMAGE, VIDEO

__all__ = ["FAMILIES", "Family", "family_of", "token_types"]

Blocks = dict[str, Any]
VISUAL_INPUTS = (
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "image_sizes",
    "mm_encoder_outputs",
)


@dataclass(frozen=True)
class Family:
    """Facts of one ``model_type``.

    Args:
        name: model type.
        own: the scheme whose ids and frequencies the model has itself.
        blocks: arguments of :meth:`Scheme.layout_from_types` for the visual tokens of a call.
        decoder: attribute of the decoder in the base model.
        multi_axis: whether the model's own rotary module reads ids of several axes.
        splits_frames: each frame of a video is a block of its own, with a timestamp before it.
        tiled: an image may arrive as several tiles whose arrangement the inputs do not tell.
        placeholders: whether token ids alone tell images from videos.
        pairing: which channels the model turns together, ``half`` or ``interleaved``.
    """

    name: str
    own: Scheme
    blocks: Callable[[Any, Mapping[str, Any], Tensor], Blocks]
    decoder: str = "language_model"
    multi_axis: bool = False
    splits_frames: bool = False
    tiled: bool = False
    placeholders: bool = True
    pairing: str = "half"


def family_of(model: Any) -> Family:
    """The family of a model; what is not supported is refused by name."""
    kind = str(getattr(getattr(model, "config", None), "model_type", None))
    if kind not in FAMILIES:
        raise ValueError(
            f"model: {type(model).__name__} (model type {kind!r}) is not supported; supported are "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[kind]


def token_types(
    family: Family, base: Any, given: Mapping[str, Any], length: int, device: torch.device
) -> Tensor | None:
    """0 text, 1 image, 2 video for the ``length`` tokens of a call, ``None`` when all are text. Shape: ``(B, L)``.

    Token types win; otherwise a call with visual inputs is read from its placeholder ids. Embeddings that already hold
    visual features cannot be read: they need token types.
    """
    types = given.get("mm_token_type_ids")
    if types is not None:
        if types.dim() != 2 or types.shape[1] < length:
            raise ValueError(
                f"mm_token_type_ids: expected (B, {length}) or longer, one type per token, got {tuple(types.shape)}"
            )
        types = types[:, -length:].to(device)
        return types if bool(types.any()) else None
    if all(given.get(name) is None for name in VISUAL_INPUTS):
        return None
    if not family.placeholders:
        raise ValueError(
            f"mm_token_type_ids: {family.name} marks videos with image tokens, so visual inputs need token types; the "
            "processor returns them beside input_ids"
        )
    config = base.config
    places = {
        IMAGE: getattr(config, "image_token_id", None),
        VIDEO: getattr(config, "video_token_id", None),
    }
    ids: Any = given.get("input_ids")
    embeds: Any = given.get("inputs_embeds")
    found = torch.zeros((ids if ids is not None else embeds[..., 0]).shape, dtype=torch.long, device=device)
    for code, token in places.items():
        if token is None:
            continue
        if ids is not None:
            found[ids == token] = code
        else:
            row = base.get_input_embeddings()(torch.full((), token, dtype=torch.long, device=device))
            found[(embeds == row).all(-1)] = code
    return found if bool(found.any()) else None


# -- blocks of a call -------------------------------------------------------------------------------------------------


def _grid_blocks(base: Any, given: Mapping[str, Any], types: Tensor) -> Blocks:
    """Grids as the processor gives them."""
    for code, name in ((IMAGE, "image_grid_thw"), (VIDEO, "video_grid_thw")):
        if given.get(name) is None and bool((types == code).any()):
            raise ValueError(
                f"{name}: the token types hold {int((types == code).sum())} tokens of that kind, but {name} was not "
                "given; pass it with the token types, also to models that get inputs_embeds"
            )
    has = {code: bool((types == code).any()) for code in (IMAGE, VIDEO)}
    blocks: Blocks = {
        "image_grids": given.get("image_grid_thw") if has[IMAGE] else None,
        "video_grids": given.get("video_grid_thw") if has[VIDEO] else None,
        "merge_size": base.config.vision_config.spatial_merge_size,
    }
    seconds = given.get("second_per_grid_ts")
    if has[VIDEO] and hasattr(base.config.vision_config, "tokens_per_second"):
        videos = len(given["video_grid_thw"])
        blocks["seconds_per_frame"] = [1.0] * videos if seconds is None else seconds
    return blocks


def _side(config: Any, name: str = "vision_config") -> int:
    vision = getattr(config, name)
    size, patch = vision.image_size, vision.patch_size
    sides = {int(s) // int(p) for s, p in zip(_pair(size), _pair(patch), strict=True)}
    if len(sides) != 1:
        raise ValueError(f"position_layout: images of {size} in patches of {patch} need an explicit layout")
    return sides.pop()


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _equal_blocks(types: Tensor, side: int) -> Tensor:
    """As many ``side x side`` images as the image tokens make. Shape: ``(images, 3)``."""
    tokens = int((types == IMAGE).sum())
    count, rest = divmod(tokens, side * side)
    if rest:
        raise ValueError(
            f"input_ids: {tokens} image tokens are no whole number of {side} x {side} images; pass position_layout= "
            "with the segments of each row"
        )
    return torch.tensor([[1, side, side]] * count, dtype=torch.long).reshape(-1, 3)


def _llava_blocks(base: Any, given: Mapping[str, Any], types: Tensor) -> Blocks:
    if given.get("image_sizes") is not None:  # a tower with native resolutions (Pixtral)
        patch = base.vision_tower.patch_size
        sizes = torch.as_tensor(given["image_sizes"]) // patch
        return {"image_grids": torch.cat([torch.ones_like(sizes[:, :1]), sizes], dim=1)}
    return {"image_grids": _equal_blocks(types, _side(base.config))}


def _next_blocks(base: Any, given: Mapping[str, Any], types: Tensor) -> Blocks:
    """The whole image small, then the cut-out of its tiles with a newline token at the end of each row."""
    return {"image_grids": _anyres_grids(base, given, types, limit=None)}


def _onevision_blocks(base: Any, given: Mapping[str, Any], types: Tensor) -> Blocks:
    aspect = given.get("vision_aspect_ratio") or base.config.vision_aspect_ratio
    blocks: Blocks = {}
    if bool((types == IMAGE).any()):
        blocks["image_grids"] = _anyres_grids(base, given, types, limit=int(aspect.rsplit("_", 1)[-1]))
    if bool((types == VIDEO).any()):
        # one newline token closes a video; it counts as a block of one token
        videos = given.get("pixel_values_videos")
        side = math.ceil(_side(base.config) / 2)
        if videos is None:
            raise ValueError("pixel_values_videos: needed to count the frames of a video, or pass position_layout=")
        grids = [[videos.shape[1], side, side], [1, 1, 1]] * videos.shape[0]
        blocks["video_grids"] = torch.tensor(grids)
    return blocks


def _anyres_grids(base: Any, given: Mapping[str, Any], types: Tensor, limit: int | None) -> Tensor:
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

    sizes = given.get("image_sizes")
    if sizes is None:
        raise ValueError("image_sizes: needed to know the rows and columns of each image, or pass position_layout=")
    side = _side(base.config)
    counts = given.get("batch_num_images")
    tiled = [True] * len(sizes) if counts is None else [int(n) == 1 for n in counts for _ in range(int(n))]
    grids: list[list[int]] = []
    for size, is_tiled in zip(torch.as_tensor(sizes).tolist(), tiled, strict=True):
        grids.append([1, side, side])
        if not is_tiled:
            grids.append([1, 1, 1])
            continue
        down, across = get_anyres_image_grid_shape(
            size, base.config.image_grid_pinpoints, base.config.vision_config.image_size
        )
        rows, cols = _unpadded(size, down * side, across * side)
        if limit is not None:
            ratio = math.sqrt(rows * cols / (limit * side**2))
            if ratio > 1.1:
                rows, cols = int(rows // ratio), int(cols // ratio)
        grids.append([1, rows, cols + 1])
    return torch.tensor(grids, dtype=torch.long)


def _unpadded(size: Sequence[int], rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of features left after the padding of the aspect ratio is cut off on both sides."""
    height, width = size
    if width / height > cols / rows:
        kept = int(round(height * (cols / width), 7))
        return rows - 2 * ((rows - kept) // 2), cols
    kept = int(round(width * (rows / height), 7))
    return rows, cols - 2 * ((cols - kept) // 2)


def _internvl_blocks(base: Any, given: Mapping[str, Any], types: Tensor) -> Blocks:
    return {"image_grids": _equal_blocks(types, int(_side(base.config) * base.config.downsample_ratio))}


def _idefics_blocks(base: Any, given: Mapping[str, Any], types: Tensor) -> Blocks:
    return {"image_grids": _equal_blocks(types, math.isqrt(base.image_seq_len))}


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("qwen2_vl", scheme("mrope_hf5"), _grid_blocks, multi_axis=True),
        Family("qwen2_5_vl", scheme("mrope_time", cursor="spatial"), _grid_blocks, multi_axis=True),
        Family("qwen3_vl", scheme("mrope_interleave"), _grid_blocks, multi_axis=True, splits_frames=True),
        Family("qwen3_vl_moe", scheme("mrope_interleave"), _grid_blocks, multi_axis=True, splits_frames=True),
        Family(
            "glm4v",
            scheme("mrope_hf5"),
            _grid_blocks,
            multi_axis=True,
            splits_frames=True,
            placeholders=False,
            pairing="interleaved",
        ),
        Family("llava", scheme("raster"), _llava_blocks),
        Family("llava_next", scheme("raster"), _next_blocks, tiled=True),
        Family("llava_onevision", scheme("raster"), _onevision_blocks, tiled=True),
        Family("internvl", scheme("raster"), _internvl_blocks, tiled=True),
        Family("smolvlm", scheme("raster"), _idefics_blocks, decoder="text_model", tiled=True),
        Family("idefics3", scheme("raster"), _idefics_blocks, decoder="text_model", tiled=True),
    )
}
