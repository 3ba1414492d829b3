"""Tiny Hugging Face vision-language models with random weights, and inputs for them. Grids are never square."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

IMAGE, VIDEO, PAD = 90, 91, 0
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
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 92, "vision_end_token_id": 93}
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
_ANYRES = [[12, 24], [24, 12], [24, 24]]
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 2, "mlp_ratio": 1},
        **_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
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
SPLIT_MODELS = ("qwen3_vl", "qwen3_vl_moe", "glm4v")
MODELS = tuple(_CONFIGS)


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
