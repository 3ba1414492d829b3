"""timm models of every kind keep their abilities with an attached encoding, and get their own encoding back."""

from __future__ import annotations

import copy
import logging

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.vision_transformer import (
    DiffAttention,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from mmpos import Positions, create_encoding
from mmpos.adapters import no_weight_decay
from mmpos.adapters.timm import attach, detach, stack_of

from .models import GRID, IMAGE, difference, image, mean_vit, randomise, tiny_eva, tiny_vit

COUNT = GRID[0] * GRID[1]

VITS = {
    "class_token": {},
    "registers": {"reg_tokens": 3},
    "registers_table_on_patches_only": {"reg_tokens": 2, "no_embed_class": True},
    "mean": {"class_token": False, "global_pool": "avg"},
    "distilled": {"distilled": True},
    "fixed_size": {"dynamic_img_size": False},
    "layer_scale": {"init_values": 0.5},
    "qk_norm": {"qk_norm": True, "scale_attn_norm": True},
    "pre_norm": {"pre_norm": True},
    "post_norm": {"block_fn": ResPostBlock},
    "parallel_things": {"block_fn": ParallelThingsBlock},
    "gated": {},
    "map_pool": {"global_pool": "map", "class_token": False},
    "no_bias": {"qkv_bias": False, "proj_bias": False},
}
EVAS = {
    "table": {},
    "table_and_rope": {"use_rot_pos_emb": True},
    "rope_only": {"use_rot_pos_emb": True, "use_abs_pos_emb": False, "attn_type": "rope", "qkv_fused": False},
    "rope_mixed": {"use_rot_pos_emb": True, "rope_type": "mixed", "no_embed_class": True},
    "dinov3": {"use_rot_pos_emb": True, "rope_type": "dinov3", "num_reg_tokens": 4, "rope_rotate_half": True},
    "separate_bias": {"qkv_fused": False, "qk_norm": True, "scale_attn_inner": True},
    "grouped_queries": {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 2, "use_rot_pos_emb": True},
    "post_norm": {"use_post_norm": True},
    "gated": {"attn_type": "rope", "use_rot_pos_emb": True, "class_token": False},
    "fixed_size": {"use_rot_pos_emb": True, "dynamic_img_size": False},
}


def build(kind: str):
    family, _, name = kind.partition(":")
    if family == "eva":
        return tiny_eva(**EVAS[name])
    vit = tiny_vit(**VITS[name])
    if name == "gated":
        for block in vit.blocks:
            block.attn.gate = randomise(nn.Linear(128, 128))
    return vit


KINDS = [f"vit:{name}" for name in VITS] + [f"eva:{name}" for name in EVAS]


# -- nothing of the original is lost or changed -----------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_keeping_the_own_encoding_and_adding_none_changes_nothing(kind, fused):
    """The forward pass of an attached model is timm's own, step by step: with nothing added the outputs are equal."""
    vit, x = build(kind), image()
    for module in vit.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    before = vit(x), vit.forward_features(x)
    attach(vit, "none", pos_embed="keep")
    after = vit(x), vit.forward_features(x)
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_attach_and_detach(kind):
    vit, x = build(kind), image()
    before, keys, attributes = vit(x), list(vit.state_dict()), set(vars(vit))
    decay = vit.no_weight_decay()
    attach(vit, "rope_mixed")
    assert difference(vit(x), before) > 1e-3
    assert "pos_embed" not in vit.state_dict()
    assert not any(key.startswith("rope.") for key in vit.state_dict())
    assert {"position_encoding.layers.1.rope_mixed.freqs"} <= vit.no_weight_decay()
    assert vit.no_weight_decay() & {"pos_embed"} == set()
    detach(vit)
    assert torch.equal(vit(x), before)
    assert (list(vit.state_dict()), set(vars(vit)), vit.no_weight_decay()) == (keys, attributes, decay)


@pytest.mark.parametrize("kind", [k for k in KINDS if "rope_only" not in k])
def test_adopting_the_table_keeps_the_outputs(kind):
    vit, x = build(kind), image()
    before = vit(x)
    attach(vit, "learned", pos_embed="adopt")
    assert "pos_embed" not in vit.state_dict()
    assert stack_of(vit).shared["learned"].table.requires_grad
    torch.testing.assert_close(vit(x), before, rtol=1e-6, atol=2e-6)
    detach(vit)
    assert torch.equal(vit(x), before)


@pytest.mark.parametrize(
    "kind", ["vit:class_token", "vit:registers_table_on_patches_only", "vit:distilled", "vit:mean"]
)
def test_adopting_the_table_is_exact_to_the_bit(kind):
    vit, x = build(kind), image()
    before = vit(x)
    assert torch.equal(attach(vit, "learned", pos_embed="adopt")(x), before)


def test_adopted_table_resizes_as_timm_does():
    vit, x = tiny_vit(reg_tokens=1), image(size=(20, 12))
    before = vit(x)
    assert difference(attach(vit, "learned", pos_embed="adopt")(x), before) < 2e-5


def test_adopting_together_with_another_encoding():
    vit, x = tiny_vit(), image()
    before = vit(x)
    attach(vit, ["learned", ("rope_axial", {"theta": 50.0})], pos_embed="adopt")
    assert stack_of(vit).title == "learned+rope_axial"
    assert difference(vit(x), before) > 1e-3


@pytest.mark.parametrize("options", [{"patch_drop_rate": 0.4}, {"patch_drop_rate": 0.4, "class_token": False}])
@pytest.mark.parametrize("own", ["table", "rope", "rope_mixed"])
def test_patch_dropout_draws_as_timm_does(own, options):
    if own == "table":
        pool = {} if options.get("class_token", True) else {"global_pool": "avg"}
        vit = tiny_vit(**options, **pool)
    else:
        vit = tiny_eva(**options, use_rot_pos_emb=True, rope_type="mixed" if own == "rope_mixed" else "cat")
    x = image()
    vit.train()
    torch.manual_seed(3)
    before = vit(x)
    attach(vit, "none", pos_embed="keep")
    torch.manual_seed(3)
    torch.testing.assert_close(vit(x), before, rtol=1e-5, atol=1e-5)


def test_dropout_in_training_is_timms():
    vit, x = tiny_vit(attn_drop_rate=0.3, proj_drop_rate=0.2, drop_path_rate=0.3, pos_drop_rate=0.1), image()
    vit.train()
    torch.manual_seed(3)
    before = vit(x)
    attach(vit, "none", pos_embed="keep")
    torch.manual_seed(3)
    torch.testing.assert_close(vit(x), before, rtol=1e-5, atol=1e-5)


def test_attention_masks_of_the_caller():
    vit, x = tiny_vit(), image()
    length = COUNT + 1
    boolean = torch.rand(length, length, generator=torch.Generator().manual_seed(0)) > 0.4
    boolean |= torch.eye(length, dtype=torch.bool)
    added = torch.randn(2, 1, length, length, generator=torch.Generator().manual_seed(1))
    calls = [{"attn_mask": boolean}, {"attn_mask": added}, {"is_causal": True}]
    before = [vit.forward_features(x, **call) for call in calls]
    plain = vit.forward_features(x)
    attach(vit, "none", pos_embed="keep")
    for call, expected in zip(calls, before, strict=True):
        torch.testing.assert_close(vit.forward_features(x, **call), expected, rtol=1e-5, atol=1e-5)
        assert difference(expected, plain) > 1e-3


# -- the abilities of timm models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vit:class_token", "vit:registers", "vit:mean", "vit:distilled", "eva:dinov3"])
def test_forward_intermediates(kind):
    vit, x = build(kind), image()
    calls = [
        {"indices": 1},
        {"indices": [0, 1], "norm": True, "output_fmt": "NLC"},
        {"indices": [0], "stop_early": True, "intermediates_only": True},
        {"indices": (1,), "return_prefix_tokens": True},
    ]
    if kind.startswith("vit"):
        calls.append({"output_dict": True, "return_prefix_tokens": True})
    flat = torch.utils._pytree.tree_leaves
    before = [vit.forward_intermediates(x, **call) for call in calls]
    attach(vit, "none", pos_embed="keep")
    for call, expected in zip(calls, before, strict=True):
        got = vit.forward_intermediates(x, **call)
        if kind == "vit:mean" and "return_prefix_tokens" in call and isinstance(got, tuple):
            assert all(isinstance(entry, torch.Tensor) for entry in got[1])
        assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(expected)
        for a, b in zip(flat(got), flat(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_get_intermediate_layers_and_features_of_the_last_block():
    vit, x = tiny_vit(reg_tokens=2), image(size=(8, 24))
    attach(vit, "rope_axial")
    (spatial, prefix), *_ = vit.get_intermediate_layers(x, n=[1], reshape=True, return_prefix_tokens=True, norm=True)
    assert spatial.shape == (2, 128, 2, 6)
    joined = torch.cat([prefix, spatial.flatten(2).transpose(1, 2)], dim=1)
    torch.testing.assert_close(joined, vit.forward_features(x))


def test_spatial_intermediates_need_every_patch():
    vit = attach(tiny_vit(), "rope_axial")
    positions = Positions.grid(*GRID).take(torch.tensor([0, 3, 8]))
    with pytest.raises(ValueError, match="'NCHW' needs every patch of the \\(3, 5\\) grid"):
        vit.forward_intermediates(image(), positions=positions)
    kept = vit.forward_intermediates(image(), positions=positions, output_fmt="NLC", intermediates_only=True)
    assert kept[0].shape == (2, 3, 128)


def test_set_input_size_and_back():
    for make in (tiny_vit, lambda **o: tiny_eva(use_rot_pos_emb=True, **o)):
        vit, plain = make(dynamic_img_size=False), make(dynamic_img_size=False)
        attach(vit, "rope_mixed")
        first = vit(image())
        for model in (vit, plain):
            model.set_input_size((16, 24))
        assert vit(image(size=(16, 24))).shape == (2, 7)
        assert stack_of(vit).layers[0]["rope_mixed"].train_grid == GRID
        vit.set_input_size(IMAGE)
        assert torch.equal(vit(image()), first)
        vit.set_input_size((16, 24))
        detach(vit)
        assert difference(vit(image(size=(16, 24))), plain(image(size=(16, 24)))) < 1e-5


def test_reset_classifier_and_prune():
    vit = attach(mean_vit(depth=3), "rope_mixed")
    x = image()
    second = vit.forward_intermediates(x, indices=[1], intermediates_only=True)[0]
    vit.reset_classifier(11, "max")
    assert vit(x).shape == (2, 11)
    vit.prune_intermediate_layers([1])
    assert stack_of(vit).depth == len(vit.blocks) == 2
    assert torch.equal(vit.forward_intermediates(x, indices=[1], intermediates_only=True)[0], second)
    detach(vit)
    assert "position_encoding" not in dict(vit.named_modules())


def test_feature_extractor_of_timm():
    model = timm.create_model(
        "vit_tiny_patch16_224", features_only=True, depth=3, out_indices=(0, 2), img_size=(32, 48)
    )
    attach(model.model, "rope_axial")
    assert [f.shape for f in model(torch.randn(1, 3, 32, 48))] == [(1, 192, 2, 3), (1, 192, 2, 3)]


def test_models_of_timm_by_name():
    size = (56, 84)
    for name, prefix in (
        ("vit_small_patch16_rope_mixed_224", 1),
        ("vit_medium_patch16_rope_reg1_gap_256", 1),
        ("eva02_tiny_patch14_224", 1),
        ("deit3_small_patch16_224", 1),
        (
            "vit_tiny_patch16_dinov3_qkvb"
            if timm.is_model("vit_tiny_patch16_dinov3_qkvb")
            else "vit_small_patch16_dinov3",
            5,
        ),
    ):
        patch = 14 if "patch14" in name else 16
        model = timm.create_model(name, num_classes=3, depth=2, patch_size=patch, dynamic_img_size=True).eval()
        x = torch.randn(1, 3, *(s // 14 * patch for s in size))
        before = model(x)
        attach(model, "rope_mixed", layout="half")
        assert model.num_prefix_tokens == prefix
        assert difference(model(x), before) > 0
        assert torch.equal(detach(model)(x), before)


def test_optimizer_groups():
    vit = attach(tiny_vit(), ["learned", "rope_mixed"])
    groups = param_groups_weight_decay(vit, weight_decay=0.1, no_weight_decay_list=vit.no_weight_decay())
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in vit.named_parameters() if id(p) in decayed}
    assert not any(name.startswith("position_encoding") for name in names)
    assert "blocks.0.attn.qkv.weight" in names
    scales = {}
    for group in param_groups_layer_decay(vit, layer_decay=0.5, no_weight_decay_list=vit.no_weight_decay()):
        for parameter in group["params"]:
            scales[id(parameter)] = group["lr_scale"]
    scale = {name: scales[id(p)] for name, p in vit.named_parameters()}
    for layer in (0, 1):
        own = scale[f"position_encoding.layers.{layer}.rope_mixed.freqs"]
        assert own == scale[f"blocks.{layer}.attn.qkv.weight"]
    assert scale["position_encoding.shared.learned.table"] == scale["patch_embed.proj.weight"] == min(scale.values())


def test_weight_decay_names_through_wrappers():
    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = attach(tiny_vit(), "rope_mixed")

    task = Task()
    expected = {
        f"network.{name}" for name in task.network.no_weight_decay() if name != "reg_token" and name != "dist_token"
    }
    assert no_weight_decay(task) == expected
    assert "network.position_encoding.layers.0.rope_mixed.freqs" in expected
    assert "network.cls_token" in expected


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_weights_of_the_original_load_before_and_after(caplog):
    original, x = randomise(tiny_vit()), image()
    vit = attach(tiny_vit(), "rope_mixed")
    frequencies = stack_of(vit).layers[1]["rope_mixed"].freqs.clone()
    with caplog.at_level(logging.WARNING, "mmpos"):
        vit.load_state_dict(original.state_dict(), strict=True)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "position_encoding.*: not in the checkpoint" in lines[0]
    assert lines[1].startswith("pos_embed: not used")
    assert torch.equal(stack_of(vit).layers[1]["rope_mixed"].freqs, frequencies)
    expected = attach(copy.deepcopy(original), copy.deepcopy(stack_of(vit)))
    assert torch.equal(vit(x), expected(x))
    plain = detach(vit)
    plain.load_state_dict(original.state_dict(), strict=True)
    assert torch.equal(plain(x), original(x))


def test_a_model_inside_another_module_loads_too():
    original = nn.ModuleDict({"vit": randomise(tiny_vit())})
    holder = nn.ModuleDict({"vit": attach(tiny_vit(), "rope_mixed")})
    holder.load_state_dict(original.state_dict(), strict=True)
    assert torch.equal(holder["vit"].head.weight, original["vit"].head.weight)


def test_anything_else_missing_or_unexpected_is_still_an_error():
    vit, state = attach(tiny_vit(), "rope_mixed"), tiny_vit().state_dict()
    with pytest.raises(RuntimeError, match="Unexpected key.*stranger"):
        vit.load_state_dict({**state, "stranger": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Missing key.*norm.weight"):
        vit.load_state_dict({key: value for key, value in state.items() if key != "norm.weight"})
    partly = {
        key: value for key, value in vit.state_dict().items() if key != "position_encoding.layers.1.rope_mixed.freqs"
    }
    with pytest.raises(RuntimeError, match="Missing key.*position_encoding.layers.1"):
        vit.load_state_dict(partly)


def test_adopted_table_comes_from_the_checkpoint():
    original, x = randomise(tiny_vit()), image()
    vit = attach(tiny_vit(), "learned", pos_embed="adopt")
    assert difference(vit(x), original(x)) > 1e-2
    vit.load_state_dict(original.state_dict(), strict=True)
    assert torch.equal(vit(x), original(x))


def test_learned_tables_of_another_grid_are_resized_and_reported(caplog):
    small = attach(tiny_vit(), "learned")
    large = attach(tiny_vit(img_size=(20, 28)), "learned")
    with caplog.at_level(logging.INFO, "mmpos"):
        large.load_state_dict(small.state_dict(), strict=True)
    assert any("3x5 -> 5x7" in record.getMessage() for record in caplog.records)
    x = image(size=(20, 28))
    assert difference(large(x), small(x)) < 2e-5


# -- positions given by the caller ------------------------------------------------------------------------------------


def test_two_models_attached_differently_do_not_see_each_other():
    x = image()
    alone = attach(tiny_vit(), "rope_axial")(x)
    a, b, c = tiny_vit(), tiny_vit(), tiny_vit()
    plain = c(x)
    attach(a, "rope_axial")
    torch.manual_seed(0)
    attach(b, "rope_mixed")
    other = b(x)
    assert torch.equal(a(x), alone)
    assert torch.equal(c(x), plain)
    assert torch.equal(b(x), other)
    detach(b)
    assert torch.equal(a(x), alone)
    assert torch.equal(b(x), plain)
    assert "forward" not in vars(c)
    assert VisionTransformer.forward.__module__.startswith("timm")
    assert Attention.forward.__module__.startswith("timm")


@pytest.mark.parametrize("pool", ["avg", "max", "avgmax", "token"])
def test_padding_is_not_pooled(pool):
    vit = attach(tiny_vit(reg_tokens=1, global_pool=pool), "rope_axial")
    x = image()
    mask = torch.ones(2, COUNT, dtype=torch.bool)
    mask[0, 10:] = False
    keep = torch.arange(10)
    got = vit(x, positions=Positions.grid(*GRID, mask=mask))
    assert difference(got[:1], vit(x[:1], positions=Positions.grid(*GRID).take(keep))) < 1e-5
    assert difference(got[1:], vit(x[1:])) < 1e-5
    features = vit.forward_features(x, positions=Positions.grid(*GRID, mask=mask))
    by_hand = vit.forward_head(features, positions=Positions.grid(*GRID, num_prefix=2, mask=mask))
    assert difference(by_hand, got) < 1e-6


def test_attention_pooling_refuses_a_mask():
    vit = attach(tiny_vit(global_pool="map", class_token=False), "rope_axial")
    with pytest.raises(ValueError, match="pooling 'map' cannot leave out padded tokens"):
        vit(image(), positions=Positions.grid(*GRID, mask=torch.ones(2, COUNT, dtype=torch.bool)))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_attached_to_says_so():
    with pytest.raises(ValueError, match="blocks of class ParallelScalingBlock"):
        attach(tiny_vit(block_fn=ParallelScalingBlock), "rope_axial")
    with pytest.raises(ValueError, match="DiffAttention"):
        attach(tiny_vit(attn_layer=DiffAttention), "rope_axial")
    with pytest.raises(ValueError, match="got ResNet"):
        attach(timm.create_model("resnet10t"), "rope_axial")
    with pytest.raises(ValueError, match="got NaFlexVit"):
        attach(timm.create_model("naflexvit_base_patch16_gap", depth=1), "rope_axial")
    vit = attach(tiny_vit(), "rope_axial")
    with pytest.raises(ValueError, match="'rope_axial' is already attached; call detach"):
        attach(vit, "rope_mixed")
    with pytest.raises(ValueError, match="no position encoding is attached"):
        detach(tiny_vit())
    with pytest.raises(ValueError, match="without its positions"):
        vit.blocks[0](torch.zeros(1, 16, 128))


def test_arguments_that_do_not_fit():
    with pytest.raises(ValueError, match="pos_embed: expected one of"):
        attach(tiny_vit(), "rope_axial", pos_embed="drop")
    with pytest.raises(ValueError, match="needs an encoding 'learned'"):
        attach(tiny_vit(), "rope_axial", pos_embed="adopt")
    with pytest.raises(ValueError, match="a model with a table of its own"):
        attach(mean_vit(), "learned", pos_embed="adopt")
    with pytest.raises(ValueError, match="leave out train_grid"):
        attach(tiny_vit(), "learned", pos_embed="adopt", train_grid=(5, 3))
    with pytest.raises(ValueError, match="built for depth 3"):
        attach(tiny_vit(), create_encoding("rope_axial", 128, 4, 3, num_prefix=1))
    with pytest.raises(ValueError, match="num_heads=8, the model has num_heads=4"):
        attach(tiny_vit(), create_encoding("rope_axial", 128, 8, 2, head_dim=32, num_prefix=1))
    with pytest.raises(ValueError, match="num_prefix=0, the model has num_prefix=1"):
        attach(tiny_vit(), create_encoding("rope_axial", 128, 4, 2))
    with pytest.raises(ValueError, match="cannot be given with a ready stack"):
        attach(tiny_vit(), create_encoding("rope_axial", 128, 4, 2, num_prefix=1), theta=10.0)


def test_a_failed_attach_leaves_the_model_alone():
    vit, x = tiny_vit(), image()
    before, attributes = vit(x), set(vars(vit))
    for arguments in ({"encoding": "rope_axial", "pos_embed": "adopt"}, {"encoding": "rope_axail"}):
        with pytest.raises(ValueError, match="adopt|did you mean"):
            attach(vit, **arguments)
    assert set(vars(vit)) == attributes
    assert torch.equal(vit(x), before)


def test_images_and_positions_that_do_not_fit():
    vit = attach(tiny_vit(), "rope_axial")
    with pytest.raises(ValueError, match="smaller than one patch"):
        vit(image(size=(3, 20)))
    with pytest.raises(ValueError, match="divisible by the patch size"):
        vit(image(size=(12, 18)))
    with pytest.raises(ValueError, match="takes images of \\(12, 20\\)"):
        attach(tiny_vit(dynamic_img_size=False), "rope_axial")(image(size=(20, 12)))
    with pytest.raises(ValueError, match="grid of \\(3, 5\\) patches, got positions of grid \\(5, 3\\)"):
        vit(image(), positions=Positions.grid(5, 3))
    with pytest.raises(ValueError, match="1 prefix tokens, got num_prefix 2"):
        vit(image(), positions=Positions.grid(*GRID, num_prefix=2))
    with pytest.raises(ValueError, match="expected 8 tokens"):
        vit(image(), positions=Positions.points(torch.rand(7, 2)))
    with pytest.raises(ValueError, match="knows only grids"):
        attach(tiny_eva(use_rot_pos_emb=True), "none", pos_embed="keep")(
            image(), positions=Positions.points(torch.rand(15, 2))
        )
