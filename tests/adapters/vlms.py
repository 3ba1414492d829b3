"""Tiny Hugging Face vision-language models with random weights, and inputs for them. Grids are never square."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2VLModel

IMAGE, VIDEO, START, PAD = 90, 91, 92, 0
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": 93}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 12,
    "patch_size": 4,
    "projection_dim": 16,
}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
_LLAMA = {"model_type": "llama", **_TEXT}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_ANYRES = [[12, 24], [24, 12], [24, 24]]
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {
            **_TEXT, "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 2, "mlp_ratio": 1,
        },
        **_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32, "num_heads": 2,
            "patch_size": 2, "tokens_per_second": 3, "window_size": 8, "fullatt_block_indexes": [0],
        },
        **_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {
            **_TEXT, "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            "depth": 2, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32, "num_heads": 2,
            "patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
        **_TOKENS,
    },
    "glm4v": {
        "text_config": {
            **_TEXT, "hidden_size": 64,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 64, "num_heads": 2,
            "patch_size": 2, "image_size": 16,
        },
        **_TOKENS, "video_start_token_id": 94, "video_end_token_id": 95, "image_start_token_id": 92,
        "image_end_token_id": 93,
    },
    "llava": {"text_config": _LLAMA, "vision_config": _CLIP, "image_token_id": IMAGE},
    "llava_next": {
        "text_config": _LLAMA, "vision_config": _CLIP, "image_token_id": IMAGE, "image_grid_pinpoints": _ANYRES,
    },
    "llava_onevision": {
        "text_config": {"model_type": "qwen2", **_TEXT}, "vision_config": _SIGLIP, "image_token_id": IMAGE,
        "video_token_id": VIDEO, "image_grid_pinpoints": _ANYRES, "vision_feature_layer": -1,
    },
    "internvl": {
        "text_config": {"model_type": "qwen3", **_TEXT, "head_dim": 8}, "image_token_id": IMAGE,
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": [16, 16], "patch_size": [4, 4],
        },
    },
    "smolvlm": {
        "text_config": _LLAMA, "image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": PAD,
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4,
        },
    },
}  # fmt: skip
_CONFIGS["idefics3"] = _CONFIGS["smolvlm"]
_CONFIGS["qwen3_vl_moe"] = {
    **_CONFIGS["qwen3_vl"],
    "text_config": {
        **_CONFIGS["qwen3_vl"]["text_config"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
}  # fmt: skip
GRID_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")
VIDEO_MODELS = (*GRID_MODELS, "llava_onevision")
SPLIT_MODELS = ("qwen3_vl", "qwen3_vl_moe", "glm4v")
MODELS = tuple(_CONFIGS)
#: what transformers calls the cache, as an argument and as an output
CACHE = "cache" if "cache" in inspect.signature(Qwen2VLModel.forward).parameters else "past_key_values"


def tiny_vlm(name: str, *, seed: int = 0, **text: Any) -> Any:
    """A model of two layers, weights far from zero so that every position counts."""
    torch.manual_seed(seed)
    config = {**_CONFIGS[name], "text_config": {**_CONFIGS[name]["text_config"], **text}}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter[0].numel() ** -0.5 * 1.5)
    return model


def random_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 90, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(model: Any, rows: list[list[Any]], *, side: str = "left", seed: int = 1) -> dict[str, Any]:
    """Inputs for rows of pieces: a number is that many text tokens; ``(rows, cols)`` an image, ``(frames, rows, cols)``
    a video as the decoder sees them. Models with fixed image sizes take any pair for an image, and any triple for a
    video of that many frames.
    """
    name = model.config.model_type
    inputs = _grid_inputs(name, rows) if name in GRID_MODELS else _placeholder_inputs(model, rows)
    kinds = inputs.pop("kinds")
    length = max(len(kind) for kind in kinds)
    ids, mask, types = (torch.zeros(len(rows), length, dtype=torch.long) for _ in range(3))
    for number, kind in enumerate(kinds):
        place = slice(length - len(kind), None) if side == "left" else slice(0, len(kind))
        kind = torch.tensor(kind)
        text = random_ids(len(kind), seed=seed + 10 * number)
        video = IMAGE if name == "glm4v" else VIDEO  # GLM-V marks frames of videos with image tokens
        ids[number, place] = torch.where(kind == 1, IMAGE, torch.where(kind == 2, video, text))
        types[number, place] = kind
        mask[number, place] = 1
    inputs |= {"input_ids": ids, "attention_mask": mask}
    if name in GRID_MODELS:
        inputs["mm_token_type_ids"] = types
    return inputs


def _grid_inputs(name: str, rows: list[list[Any]]) -> dict[str, Any]:
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    kinds = []
    for row in rows:
        kind: list[int] = []
        for piece in row:
            if isinstance(piece, int):
                kind += [0] * piece
            elif len(piece) == 2:
                grids[1].append([1, 2 * piece[0], 2 * piece[1]])
                kind += [1] * (piece[0] * piece[1])
            else:
                frames, high, wide = piece
                grids[2].append([frames, 2 * high, 2 * wide])
                frame = [2] * (high * wide)
                kind += ([0] + frame + [0]) * frames if name in SPLIT_MODELS else frame * frames
        kinds.append(kind)
    inputs: dict[str, Any] = {"kinds": kinds}
    for code, pixels, grid in ((1, "pixel_values", "image_grid_thw"), (2, "pixel_values_videos", "video_grid_thw")):
        if grids[code]:
            inputs[grid] = torch.tensor(grids[code])
            inputs[pixels] = noise(int(inputs[grid].prod(1).sum()), 24, seed=code)
    return inputs


def _placeholder_inputs(model: Any, rows: list[list[Any]]) -> dict[str, Any]:
    name = model.config.model_type
    per_row = [sum(not isinstance(piece, int) and len(piece) == 2 for piece in row) for row in rows]
    images = sum(per_row)
    inputs: dict[str, Any] = {}
    lengths: list[int] = []
    if images:
        size = 12 if name.startswith("llava") else 16
        if name in ("llava", "internvl"):
            inputs["pixel_values"] = noise(images, 3, size, size)
        elif name in ("smolvlm", "idefics3"):
            pixels = torch.zeros(len(rows), max(per_row), 3, size, size)
            for number, count in enumerate(per_row):
                pixels[number, :count] = noise(count, 3, size, size, seed=number) if count else 0
            inputs["pixel_values"] = pixels
        else:
            sizes = [[9, 24], [24, 12], [20, 22], [24, 9]]
            inputs["image_sizes"] = torch.tensor([sizes[number % 4] for number in range(images)])
            inputs["pixel_values"] = noise(images, 5, 3, size, size)
            if name == "llava_onevision":
                inputs["batch_num_images"] = torch.tensor(per_row)
        if name in ("smolvlm", "idefics3"):
            lengths = [int(model.model.image_seq_len)] * images
        else:
            with torch.no_grad():
                features = model.model.get_image_features(**inputs, return_dict=True).pooler_output
            lengths = [len(part) for part in features]
    frames = [piece[0] for row in rows for piece in row if not isinstance(piece, int) and len(piece) == 3]
    if frames:
        inputs["pixel_values_videos"] = noise(len(frames), frames[0], 3, 12, 12, seed=3)
    kinds, left = [], iter(lengths)
    for row in rows:
        kind: list[int] = []
        for piece in row:
            if isinstance(piece, int):
                kind += [0] * piece
            else:  # a video: frames of 2 x 2 tokens, and one that ends it
                kind += [1] * next(left) if len(piece) == 2 else [2] * (4 * piece[0] + 1)
        kinds.append(kind)
    return {**inputs, "kinds": kinds}
