"""What the learned rotary and group encodings have in common: heads that own their parameters, folding a timm model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmpos import Positions, create_encoding
from mmpos.testing import encodings_of, qkv, randomise, scores, seeded

OWNED = {
    "comrope_ld": {"generators": 0},
    "comrope_ap": {"generators": 0},
    "string_cayley": {"freqs": 1, "skew": 0},
    "string_circulant": {"c": 1},
    "liere": {"generators": 1},
    "rope_mixed": {"freqs": 1},
}


@pytest.mark.parametrize("name", OWNED)
def test_each_head_learns_its_own_parameters(name: str) -> None:
    """A loss on one head reaches the slice of that head only; the dimension of the heads is stated above."""
    stack = randomise(create_encoding(name, 48, 3, train_grid=(3, 4)))
    q, k, _ = qkv(1, 3, 13, 16)
    logits = scores(stack, Positions.grid(3, 4, num_prefix=1), q, k)[:, 1]
    (logits * seeded(*logits.shape, seed=1)).sum().backward()
    for key, dim in OWNED[name].items():
        parameter = getattr(encodings_of(stack)[0], key)
        reached = [bool(grad.abs().sum() > 0) for grad in parameter.grad.unbind(dim)]
        assert reached == [False, True, False], key


def test_shared_heads_are_options() -> None:
    options: dict[str, tuple[dict[str, Any], str, int]] = {
        "string_cayley": ({"per_head": False}, "skew", 0),
        "string_circulant": ({"per_head": False}, "c", 1),
        "liere": ({"per_head": False}, "generators", 1),
    }
    for name, (given, key, dim) in options.items():
        stack = create_encoding(name, 48, 3, train_grid=(3, 4), **given)
        assert getattr(encodings_of(stack)[0], key).shape[dim] == 1
        q, k, _ = qkv(1, 3, 12, 16)
        scores(stack, Positions.grid(3, 4), q, k).square().sum().backward()
    per_head = create_encoding("comrope_ld", 48, 3, per_head=True)
    assert encodings_of(per_head)[0].scales.shape == (2, 3, 2)


@pytest.mark.parametrize("name", ["comrope_ld", "comrope_ap", "string_cayley", "string_circulant"])
def test_folding_a_timm_model(name: str) -> None:
    timm = pytest.importorskip("timm")
    from mmpos.adapters.timm import attach

    vit = timm.create_model("vit_tiny_patch16_224", img_size=(48, 80), depth=2, num_classes=10).eval()
    attach(vit, name)
    stack = next(module for module in vit.modules() if hasattr(module, "encodings_of"))
    randomise(stack)
    x = seeded(2, 3, 48, 80)
    with torch.no_grad():
        before = vit(x)
        for layer, block in enumerate(vit.blocks):
            stack.layers[layer][name].fold_(block.attn.qkv)
        assert (vit(x) - before).abs().max() < 1e-5


@pytest.mark.parametrize("name", OWNED)
def test_zero_generators_are_no_position_encoding(name: str) -> None:
    stack = randomise(create_encoding(name, 48, 3, train_grid=(3, 4)))
    with torch.no_grad():
        for key, parameter in stack.named_parameters():
            if not key.endswith("skew"):  # a basis alone does not show in scores
                parameter.zero_()
    q, k, _ = qkv(2, 3, 21, 16)
    logits = scores(stack, Positions.grid(4, 5, num_prefix=1), q, k)
    assert (logits - q @ k.mT / 4).abs().max() < 1e-5
