"""The builder: the small ViT of the recipes and timm models by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmpos import create_encoding
from mmpos.adapters.timm import stack_of
from mmpos.models import create_vit, initialise


@pytest.mark.parametrize(
    ("encoding", "size", "patch", "channels", "classes", "parameters"),
    [
        ("none", 28, 4, 1, 10, 673_834),
        ("sincos", 28, 4, 1, 10, 673_834),
        ("rope_axial", 28, 4, 1, 10, 673_834),
        ("rope_mixed", 28, 4, 1, 10, 674_410),
        ("learned", 28, 4, 1, 10, 678_538),
        ("rope_mixed", 64, 8, 3, 20, 692_276),
        ("learned", 64, 8, 3, 20, 697_844),
    ],
)
def test_micro_has_the_parameters_of_its_description(encoding, size, patch, channels, classes, parameters):
    vit = create_vit(encoding=encoding, image_size=size, patch_size=patch, in_chans=channels, num_classes=classes)
    assert sum(p.numel() for p in vit.parameters()) == parameters
    assert type(vit).__module__ == "timm.models.vision_transformer"
    assert (vit.embed_dim, len(vit.blocks), vit.blocks[0].attn.num_heads, vit.num_prefix_tokens) == (96, 6, 3, 0)
    norms = [m for m in vit.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 13
    assert all(norm.eps == 1e-5 for norm in norms)
    assert all(m.approximate == "none" for m in vit.modules() if isinstance(m, nn.GELU))


def test_micro_starts_from_xavier_and_averages_normed_tokens():
    vit = create_vit(encoding="rope_axial", image_size=(16, 24), in_chans=1).eval()
    for linear in (m for m in vit.modules() if isinstance(m, nn.Linear)):
        bound = (6 / (linear.in_features + linear.out_features)) ** 0.5
        assert 0.9 * bound < float(linear.weight.detach().abs().max()) <= bound
        assert float(linear.bias.detach().abs().max()) == 0
    x = torch.randn(2, 1, 16, 24)
    assert torch.equal(vit(x), vit.head(vit.forward_features(x).mean(1)))
    torch.manual_seed(1)
    initialise(vit)
    first = vit(x)
    torch.manual_seed(1)
    initialise(vit)
    assert torch.equal(vit(x), first)


def test_images_of_any_size_and_an_explicit_training_grid():
    vit = create_vit(encoding="learned", image_size=(16, 24), patch_size=(4, 8), train_grid=(2, 5))
    assert stack_of(vit).shared["learned"].train_grid == (2, 5)
    assert create_vit(encoding="learned", image_size=(16, 24), patch_size=(4, 8)).position_encoding.shared[
        "learned"
    ].train_grid == (4, 3)
    for size in ((16, 24), (8, 40)):
        assert vit(torch.zeros(1, 3, *size)).shape == (1, 10)


def test_encodings_are_given_as_names_pairs_and_lists():
    vit = create_vit(encoding=["learned", ("rope_mixed", {"theta": 20.0})], image_size=(16, 24))
    assert stack_of(vit).title == "learned+rope_mixed"
    assert stack_of(vit).layers[3]["rope_mixed"].theta == 20.0
    vit = create_vit(
        encoding="rope_axial", encoding_options={"theta": 7.0}, image_size=(16, 24), depth=2, mlp_ratio=2.0
    )
    assert stack_of(vit).shared["rope_axial"].theta == 7.0
    assert len(vit.blocks) == 2
    assert vit.blocks[0].mlp.fc1.out_features == 192
    ready = create_encoding("rope_axial", 96, 3, 6)
    assert stack_of(create_vit(encoding=ready, image_size=16)) is ready


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit3_small_patch16_224", "eva02_tiny_patch14_224"])
def test_timm_models_by_name(name):
    vit = create_vit(name, encoding="rope_mixed", image_size=(32, 48), patch_size=16, num_classes=4, depth=2)
    assert vit.pos_embed is None
    assert getattr(vit, "rope", None) is None
    assert stack_of(vit).layers[0]["rope_mixed"].train_grid == (2, 3)
    assert vit(torch.zeros(1, 3, 48, 16)).shape == (1, 4)


def test_own_table_may_be_adopted():
    vit = create_vit("vit_tiny_patch16_224", encoding="learned", pos_embed="adopt", image_size=(32, 48), depth=1)
    assert stack_of(vit).shared["learned"].table.shape == (7, 192)
    assert 0.01 < float(stack_of(vit).shared["learned"].table.detach().std()) < 0.03


def test_bad_arguments_say_what_to_change():
    with pytest.raises(ValueError, match="did you mean 'vit_tiny_patch16_224'"):
        create_vit("vit_tiny_patch16_244")
    with pytest.raises(ValueError, match="did you mean 'vit_micro'"):
        create_vit("vit_mikro")
    with pytest.raises(ValueError, match=r"image_size: \(3, 8\) is smaller than one patch of \(4, 4\)"):
        create_vit(image_size=(3, 8))
    with pytest.raises(
        ValueError, match=r"multiples of the patch size \(4, 4\), got \(42, 42\); for example \(40, 40\)"
    ):
        create_vit(image_size=42)
    with pytest.raises(ValueError, match=r"multiples of the patch size \(16, 16\), got \(40, 40\)"):
        create_vit("vit_tiny_patch16_224", image_size=40)
    with pytest.raises(ValueError, match="patch_size: expected positive integers"):
        create_vit(patch_size=-4)
    with pytest.raises(ValueError, match="'resnet10t' is not a model this function can build"):
        create_vit("resnet10t")
    with pytest.raises(ValueError, match="did you mean 'rope_mixed'"):
        create_vit(encoding="rope_mixd", image_size=16)
    with pytest.raises(ValueError, match="rope_axial has no option 'teta'"):
        create_vit(encoding="rope_axial", encoding_options={"teta": 1.0}, image_size=16)
    with pytest.raises(ValueError, match="head_dim: rope_axial needs a multiple of 4"):
        create_vit(encoding="rope_axial", image_size=16, num_heads=16)
