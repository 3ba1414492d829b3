"""Weights of rope-vit and timm's rope models give the same outputs in our modules."""

from __future__ import annotations

import pytest
import timm
import torch

from mmpos.adapters.timm import attach
from mmpos.checkpoints import rope_mixed_freqs, rope_vit_state_dict

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": (48, 80), "num_classes": 5, "dynamic_img_size": True}


@pytest.mark.parametrize(
    ("name", "encoding", "pos_embed"),
    [
        ("vit_small_patch16_rope_224", ("rope_axial", {"theta": 100.0}), "remove"),
        ("vit_small_patch16_rope_mixed_224", "rope_mixed", "remove"),
    ],
)
def test_timm_rope_models(name: str, encoding: object, pos_embed: str) -> None:
    reference = timm.create_model(name, **SMALL).eval()
    ours = attach(timm.create_model(name, **SMALL), encoding, pos_embed=pos_embed).eval()
    ours.load_state_dict(rope_vit_state_dict(reference.state_dict(), num_heads=3, into="eva"))
    for size in ((48, 80), (64, 32)):
        x = torch.randn(2, 3, *size)
        torch.testing.assert_close(ours(x), reference(x), atol=1e-5, rtol=0)


def test_names_of_rope_vit() -> None:
    weights = {
        "freqs": torch.randn(2, 2, 3 * 8),
        "freqs_t_x": torch.zeros(15),
        "freqs_t_y": torch.zeros(15),
        "blocks.0.gamma_1": torch.ones(48),
        "blocks.1.gamma_2": torch.ones(48),
        "blocks.1.attn.qkv.weight": torch.ones(144, 48),
    }
    out = rope_vit_state_dict(weights, num_heads=3)
    assert sorted(out) == [
        "blocks.0.ls1.gamma",
        "blocks.1.attn.qkv.weight",
        "blocks.1.ls2.gamma",
        "position_encoding.layers.0.rope_mixed.freqs",
        "position_encoding.layers.1.rope_mixed.freqs",
    ]
    # stored as x then y, heads joined; ours is (row, col)
    expected = weights["freqs"].view(2, 2, 3, 8)[:, 1].flip(0)
    assert torch.equal(out["position_encoding.layers.1.rope_mixed.freqs"], expected)


def test_wrong_depth_or_model_is_named() -> None:
    with pytest.raises(ValueError, match="check depth and num_heads"):
        rope_mixed_freqs(torch.zeros(2, 10), depth=2, num_heads=3)
    with pytest.raises(ValueError, match=r"blocks\.<i>"):
        rope_vit_state_dict({"conv.weight": torch.zeros(1)}, num_heads=3)
