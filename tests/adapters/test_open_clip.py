"""Both kinds of open_clip image towers take an encoding; the text tower does not notice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mmpos import Positions
from mmpos.adapters import no_weight_decay
from mmpos.adapters.open_clip import attach, detach, stack_of

from .models import difference, randomise

open_clip = pytest.importorskip("open_clip")
from open_clip.model import CLIP, CustomTextCLIP  # noqa: E402

SIZE = (24, 40)
GRID = (3, 5)
COUNT = 15
TEXT = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
NATIVE = {"image_size": SIZE, "patch_size": 8, "width": 64, "layers": 2, "head_width": 16, "mlp_ratio": 2.0}
TOWERS = {
    "native": {},
    "native_ln_after_pool": {"final_ln_after_pool": True, "pool_type": "avg"},
    "native_custom_block": {"block_type": "custom", "qk_norm": True, "scale_heads": True, "scale_attn_inner": True},
    "native_layer_scale": {"ls_init_value": 0.3, "no_ln_pre": True},
    "native_attentional_pool": {"attentional_pool": True, "attn_pooler_queries": 3, "attn_pooler_heads": 2},
    "timm": {
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_pool": "token",
        "timm_proj": "linear",
        "image_size": 224,
    },
}


def build(kind: str = "native", text=CLIP):
    torch.manual_seed(0)
    vision = {**NATIVE, **TOWERS[kind]} if kind != "timm" else TOWERS[kind]
    return randomise(text(embed_dim=32, vision_cfg=vision, text_cfg=TEXT), std=0.1).eval()


def picture(kind: str = "native", size=None, seed: int = 1):
    size = size or ((224, 224) if kind == "timm" else SIZE)
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(seed))


def words():
    return torch.randint(1, 50, (2, 8), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("text", [CLIP, CustomTextCLIP])
@pytest.mark.parametrize("kind", TOWERS)
def test_attach_and_detach(kind, text):
    model, x, t = build(kind, text), picture(kind), words()
    before, texts, keys = model.encode_image(x), model.encode_text(t), list(model.state_dict())
    holders = [model, model.visual, *model.visual.modules()]
    attributes = [set(vars(module)) for module in holders]
    assert attach(model, "rope_mixed") is model
    assert difference(model.encode_image(x), before) > 1e-3
    assert torch.equal(model.encode_text(t), texts)
    assert not any("visual.positional_embedding" in key or "trunk.pos_embed" in key for key in model.state_dict())
    assert stack_of(model).depth == (12 if kind == "timm" else 2)
    detach(model)
    assert torch.equal(model.encode_image(x), before)
    assert list(model.state_dict()) == keys
    assert [set(vars(module)) for module in holders] == attributes


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize("mode", [("learned", "adopt"), ("none", "keep")])
def test_adopted_and_kept_tables_leave_the_outputs(kind, mode):
    model, x, t = build(kind), picture(kind), words()
    before, texts = model.encode_image(x), model.encode_text(t)
    attach(model, mode[0], pos_embed=mode[1])
    torch.testing.assert_close(model.encode_image(x), before, rtol=1e-6, atol=2e-6)
    assert torch.equal(model.encode_text(t), texts)
    image_features, text_features, *_ = model(x, t)
    torch.testing.assert_close(image_features, nn.functional.normalize(before, dim=-1), rtol=1e-5, atol=2e-6)
    assert torch.equal(text_features, nn.functional.normalize(texts, dim=-1))


def test_only_the_requested_encoding_acts():
    quiet, loud = build(), build()
    with torch.no_grad():
        loud.visual.positional_embedding.mul_(10).add_(1)
    x = picture()
    assert difference(quiet.encode_image(x), loud.encode_image(x)) > 1e-2
    outputs = []
    for model in (quiet, loud):
        torch.manual_seed(5)
        outputs.append(attach(model, "rope_mixed").encode_image(x))
    assert torch.equal(*outputs)
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    taken = quiet.visual(x, positions=Positions.grid(*GRID).take(order))
    assert difference(taken, outputs[0]) < 1e-5


@pytest.mark.parametrize("kind", ["native", "native_custom_block"])
def test_intermediates(kind):
    model, x = build(kind), picture()
    calls = [
        {"indices": 1},
        {"indices": [0, 1], "normalize_intermediates": True, "output_fmt": "NLC", "output_extra_tokens": True},
        {"indices": [0], "stop_early": True, "intermediates_only": True},
    ]
    before = [model.visual.forward_intermediates(x, **call) for call in calls]
    attach(model, "none", pos_embed="keep")
    for call, expected in zip(calls, before, strict=True):
        got = model.visual.forward_intermediates(x, **call)
        assert got.keys() == expected.keys()
        for a, b in zip(*map(torch.utils._pytree.tree_leaves, (got, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_patch_dropout_draws_as_open_clip_does():
    torch.manual_seed(0)
    vision = {**NATIVE, "patch_dropout": 0.5}
    model, x = CLIP(embed_dim=32, vision_cfg=vision, text_cfg=TEXT).train(), picture()
    torch.manual_seed(3)
    before = model.encode_image(x)
    attach(model, "none", pos_embed="keep")
    torch.manual_seed(3)
    torch.testing.assert_close(model.encode_image(x), before, rtol=1e-5, atol=1e-6)


def test_other_image_sizes_and_padding():
    model = attach(build(), "rope_axial")
    assert model.encode_image(picture(size=(16, 64))).shape == (2, 32)
    for size, message in (((4, 64), "smaller than one patch"), ((20, 64), "divisible by the patch size")):
        with pytest.raises(ValueError, match=message):
            model.encode_image(picture(size=size))
    for kind in ("native", "native_ln_after_pool"):
        tower, x = attach(build(kind).visual, "rope_axial"), picture()
        mask = torch.ones(2, COUNT, dtype=torch.bool)
        mask[:, 9:] = False
        kept = tower(x, positions=Positions.grid(*GRID).take(torch.arange(9)))
        assert difference(tower(x, positions=Positions.grid(*GRID, mask=mask)), kept) < 1e-5
    with pytest.raises(ValueError, match="attentional pooling cannot leave out"):
        attach(build("native_attentional_pool"), "rope_axial").visual(x, positions=Positions.grid(*GRID, mask=mask))


def test_checkpointing_gives_equal_gradients_and_copies_are_independent():
    model, x = attach(build(), "rope_mixed"), picture()
    gradients = []
    for enable in (False, True):
        model.visual.set_grad_checkpointing(enable)
        model.zero_grad()
        model.encode_image(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.visual.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    assert all(float(layer["rope_mixed"].freqs.grad.abs().max()) > 0 for layer in stack_of(model).layers)
    before, other = model.encode_image(x), copy.deepcopy(model)
    randomise(other)
    assert difference(other.encode_image(x), before) > 1e-3
    assert torch.equal(model.encode_image(x), before)


@pytest.mark.parametrize("kind", ["native", "timm"])
def test_compile_without_graph_breaks(kind):
    torch._dynamo.reset()
    model, x = attach(build(kind), "rope_axial"), picture(kind)
    compiled = torch.compile(model.visual, fullgraph=True, backend="eager")
    assert difference(compiled(x), model.visual(x)) < 1e-5


@pytest.mark.parametrize("kind", ["native", "timm"])
def test_weights_of_the_original_load_and_names_without_decay(kind):
    original, x = build(kind), picture(kind)
    randomise(original)
    expected = original.encode_image(x)
    model = attach(build(kind), "learned", pos_embed="adopt")
    model.load_state_dict(original.state_dict(), strict=True)
    torch.testing.assert_close(model.encode_image(x), expected, rtol=1e-6, atol=2e-6)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({k: v for k, v in original.state_dict().items() if k != "logit_scale"}, strict=True)
    stem = "visual.trunk" if kind == "timm" else "visual"
    names = no_weight_decay(model)
    assert f"{stem}.position_encoding.shared.learned.table" in names
    assert f"{stem}.{'cls_token' if kind == 'timm' else 'class_embedding'}" in names
    assert not any("qkv" in name or "in_proj" in name for name in names)


def test_locking_the_tower_freezes_the_encoding_with_the_stem():
    model = attach(build(), "rope_mixed")
    model.lock_image_tower(unlocked_groups=2)
    assert not any(p.requires_grad for p in stack_of(model).parameters())
    assert model.visual.proj.requires_grad
    model.lock_image_tower(unlocked_groups=5)
    assert all(p.requires_grad for p in stack_of(model).parameters())
    assert model.visual.positional_embedding is None
    assert detach(model).visual.positional_embedding.shape == (16, 64)


def test_what_cannot_be_attached_to_says_so():
    vision = {"image_size": 64, "layers": (1, 1, 1, 1), "width": 8, "patch_size": None}
    resnet = CLIP(embed_dim=32, vision_cfg=vision, text_cfg=TEXT)
    with pytest.raises(ValueError, match="got ModifiedResNet"):
        attach(resnet, "rope_axial")
    scaled = CLIP(embed_dim=32, vision_cfg={**NATIVE, "scaled_cosine_attn": True}, text_cfg=TEXT)
    with pytest.raises(ValueError, match="scaled cosine attention are not supported"):
        attach(scaled, "rope_axial")
    model = attach(build(), "rope_axial")
    with pytest.raises(ValueError, match="already attached"):
        attach(model, "rope_axial")
    with pytest.raises(ValueError, match="without its positions"):
        model.visual.transformer.resblocks[0](torch.zeros(1, 16, 64))
    with pytest.raises(ValueError, match="no position encoding is attached"):
        detach(build())
