"""Small trained ViTs with four position encodings, stored under short names, as weights of ``create_vit("vit_micro")``.

Names in the files: ``proj``; per block ``b.<i>.`` with ``n1``, ``qkv``, ``o``, ``n2``, ``m.0``, ``m.2``; ``n``, ``h``;
``pe.p`` (learned table) or ``pe.f`` (RoPE-Mixed frequencies, x before y). The metadata key ``spec`` is JSON with
``pe``, ``patch``, ``mean``, ``std`` and ``acc``, whose smallest size is that of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmpos.checkpoints.rope_vit import rope_mixed_freqs

__all__ = ["micro_vit_arguments", "micro_vit_state_dict"]

_ENCODINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ape": ("learned", {}),
    "sincos": ("sincos", {"base": 10000.0}),
    "ropeaxial": ("rope_axial", {"theta": 100.0}),
    "ropemixed": ("rope_mixed", {"theta": 10.0}),
}
_OUTER = {"proj": "patch_embed.proj", "n": "norm", "h": "head"}
_BLOCK = {"n1": "norm1", "qkv": "attn.qkv", "o": "attn.proj", "n2": "norm2", "m.0": "mlp.fc1", "m.2": "mlp.fc2"}
_HEADS = 3


def micro_vit_arguments(tensors: Mapping[str, Tensor], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`mmpos.models.create_vit` for such a file."""
    encoding, options = _encoding(spec)
    return {
        "encoding": encoding,
        "encoding_options": dict(options),
        "image_size": _train_grid(spec) * int(spec["patch"]),
        "patch_size": int(spec["patch"]),
        "in_chans": tensors["proj.weight"].shape[1],
        "num_classes": tensors["h.weight"].shape[0],
    }


def micro_vit_state_dict(tensors: Mapping[str, Tensor], spec: Mapping[str, Any]) -> dict[str, Tensor]:
    """State dict of ``create_vit("vit_micro", **micro_vit_arguments(tensors, spec))``, in float32."""
    encoding, _ = _encoding(spec)
    depth = 1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("b."))
    state: dict[str, Tensor] = {}
    for key, value in tensors.items():
        value = value.float()
        stem, _, kind = key.rpartition(".")
        block = stem.split(".", 2)
        if stem in _OUTER:
            state[f"{_OUTER[stem]}.{kind}"] = value
        elif block[0] == "b" and block[2] in _BLOCK:
            state[f"blocks.{block[1]}.{_BLOCK[block[2]]}.{kind}"] = value
        elif key == "pe.p" and encoding == "learned":
            grid = _train_grid(spec)
            state["position_encoding.shared.learned.table"] = value.reshape(grid * grid, -1)
            state["position_encoding.shared.learned.table_grid"] = torch.tensor([grid, grid])
        elif key == "pe.f" and encoding == "rope_mixed":
            for layer, freqs in enumerate(rope_mixed_freqs(value, depth=depth, num_heads=_HEADS)):
                state[f"position_encoding.layers.{layer}.rope_mixed.freqs"] = freqs
        else:
            raise ValueError(f"tensors: unknown name {key!r} for position encoding {spec['pe']!r}")
    return state


def _encoding(spec: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if spec.get("pe") not in _ENCODINGS:
        raise ValueError(f"spec: expected 'pe' to be one of {sorted(_ENCODINGS)}, got {spec.get('pe')!r}")
    return _ENCODINGS[spec["pe"]]


def _train_grid(spec: Mapping[str, Any]) -> int:
    return min(int(size) for size in spec["acc"]) // int(spec["patch"])
