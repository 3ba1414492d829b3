"""Rotary weights of randomly initialised timm models in our modules: the same tables in every layer."""

from __future__ import annotations

import pytest
import torch

from mmpos import Positions, create_encoding
from mmpos.checkpoints import rope_mixed_freqs
from mmpos.testing import seeded

timm = pytest.importorskip("timm")
SIZES = {"embed_dim": 96, "depth": 3, "num_heads": 3, "img_size": (48, 80)}


@pytest.mark.parametrize("name", ["vit_small_patch16_rope_mixed_224", "vit_small_patch16_rope_mixed_ape_224"])
def test_timm_mixed(name: str) -> None:
    model = timm.create_model(name, **SIZES)
    freqs = rope_mixed_freqs(model.state_dict()["rope.freqs"], depth=3, num_heads=3)
    stack = create_encoding("rope_mixed", 96, 3, 3)
    for layer, value in zip(stack.layers, freqs, strict=True):
        layer["rope_mixed"].load_state_dict({"freqs": value})
    with torch.no_grad():
        theirs = model.rope.get_embed((3, 5))  # (depth, heads, N, sin and cos per channel)
        for layer, state in enumerate(stack.prepare(Positions.grid(3, 5))):
            sin, cos = theirs[layer].chunk(2, -1)
            assert (state.prepared[0].cos[0] - cos[..., ::2]).abs().max() < 1e-5
            assert (state.prepared[0].sin[0] - sin[..., ::2]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "encoding", "options"),
    [
        ("vit_small_patch16_rope_224", "rope_axial", {"theta": 100.0}),
        ("vit_small_patch16_dinov3", "rope_dinov3", {}),
    ],
)
def test_timm_fixed_ladders(name: str, encoding: str, options: dict[str, float]) -> None:
    """These models store no frequencies: the options alone must give their tables and rotated queries."""
    model = timm.create_model(name, **SIZES).eval()
    assert not [key for key in model.state_dict() if "rope" in key]
    embed = model.rope.get_embed((3, 5))
    half = encoding == "rope_dinov3"
    q = seeded(1, 3, 15, 32)
    theirs = timm.layers.apply_rot_embed_cat(q, embed, half=half)
    stack = create_encoding(encoding, 96, 3, **options)
    ours = stack.shared[encoding].transform_qkv(q, q, q, stack.prepare(Positions.grid(3, 5))[0].prepared[0])[0]
    assert (ours - theirs).abs().max() < 1e-5
