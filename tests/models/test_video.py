"""Video ViTs: tubelets on a non-square canvas, encodings over three axes, any number of frames."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mmpos import Positions
from mmpos.adapters.timm import attach, detach, stack_of
from mmpos.models import create_video_vit
from mmpos.models.video import TubeletEmbed

SMALL = {"frames": 4, "tubelet_size": 2, "image_size": (8, 12), "patch_size": 4, "in_chans": 1, "depth": 2}
# 24 channels a head, which three axes share equally
THREE_AXES = ["rope_3d", "rope_axial", "rope_mixed", "sincos", "learned", "fourier", "string_cayley", "alibi_2d"]


def build(encoding="rope_3d", **options):
    return create_video_vit(encoding=encoding, num_heads=4, num_classes=5, **{**SMALL, **options}).eval()


def test_a_tubelet_is_the_inner_product_of_its_box_with_the_kernel():
    embed = TubeletEmbed((8, 15), (4, 5), 2, 6, frames=6, tubelet_size=3)
    x = torch.randn(2, 2, 6, 8, 15)
    out = embed(x)
    assert out.shape == (2, 2, 2, 3, 6)
    assert embed.grid_size == (2, 2, 3)
    box = x[1, :, 3:6, 4:8, 5:10]
    expected = (embed.proj.weight * box).sum((1, 2, 3, 4)) + embed.proj.bias
    assert torch.allclose(out[1, 1, 1, 1], expected, atol=1e-5)


@pytest.mark.parametrize("encoding", ["none", *THREE_AXES])
def test_encodings_take_three_axes_and_any_number_of_frames(encoding):
    vit = build(encoding)
    assert vit.patch_embed.grid_size == (2, 2, 3)
    for name, part in stack_of(vit).shared.items():
        assert (name, part.axes, part.train_grid) == (encoding, 3, (2, 2, 3))
    for frames, height, width in ((4, 8, 12), (10, 8, 12), (2, 12, 8)):
        assert vit(torch.randn(2, 1, frames, height, width)).shape == (2, 5)


def test_an_encoding_that_cannot_share_the_head_says_so():
    with pytest.raises(ValueError, match="rope_mixed needs a multiple of 6 for 3 axes, got 32"):
        create_video_vit(encoding="rope_mixed", **SMALL)
    with pytest.raises(ValueError, match="axes: lookhere supports 2 to 2 axes, got 3"):
        create_video_vit(encoding="lookhere", **SMALL)


def test_the_order_of_frames_matters_with_positions_and_only_with_them():
    x = torch.randn(2, 1, 8, 8, 12)
    tubelets = x.unflatten(2, (4, 2))
    shuffled = tubelets[:, :, [2, 0, 3, 1]].flatten(2, 3)
    none, rope = build("none"), build("rope_3d")
    assert torch.allclose(none(x), none(shuffled), atol=1e-5)
    assert (rope(x) - rope(shuffled)).abs().max() > 1e-3
    # the same with an encoding that is told to ignore time: one slice of channels each for rows and columns
    blind = build(("rope_3d", {"sections": (0, 12, 12)}))
    assert torch.allclose(blind(x), blind(shuffled), atol=1e-5)
    assert (blind(x) - blind(x.flip(-1))).abs().max() > 1e-3


def test_positions_of_the_clip_are_the_raster_of_its_tubelets():
    vit = build()
    x = torch.randn(2, 1, 6, 8, 12)
    raster = Positions.grid(3, 2, 3)
    assert torch.equal(vit(x), vit(x, positions=raster))
    # a rotary encoding sees differences only: a clip that begins later is the same clip
    later = raster.with_coords(raster.coords + torch.tensor([5.0, 0.0, 0.0]))
    assert torch.allclose(vit(x), vit(x, positions=later), atol=1e-5)
    stretched = raster.with_coords(raster.coords * torch.tensor([2.0, 1.0, 1.0]))
    assert (vit(x) - vit(x, positions=stretched)).abs().max() > 1e-4
    with pytest.raises(ValueError, match=r"grid of \(3, 2, 3\) patches, got positions of grid \(2, 2, 3\)"):
        vit(x, positions=Positions.grid(2, 2, 3))


def test_rescaled_time_reads_the_clip_as_one_of_the_training_length():
    vit = build()
    still = torch.randn(1, 1, 2, 8, 12).repeat(1, 1, 4, 1, 1)  # 8 frames that show one picture, trained on 4
    stack_of(vit).set_resolution("rescaled")
    half = Positions.grid(4, 2, 3)
    half = half.with_coords(half.coords * torch.tensor([0.5, 1.0, 1.0]))
    rescaled = vit(still)
    stack_of(vit).set_resolution("index")
    assert torch.allclose(rescaled, vit(still, positions=half), atol=1e-5)
    assert (rescaled - vit(still)).abs().max() > 1e-4


def test_checkpointing_gives_the_same_gradients():
    vit = build("rope_mixed").train()
    x = torch.randn(2, 1, 4, 8, 12)
    other = copy.deepcopy(vit)
    other.set_grad_checkpointing(True)
    for model in (vit, other):
        model(x).square().sum().backward()
    for (name, a), b in zip(vit.named_parameters(), other.parameters(), strict=True):
        assert a.grad is not None, name
        assert torch.allclose(a.grad, b.grad, atol=1e-6), name


def test_detached_and_attached_again():
    vit = build("learned")
    x = torch.randn(2, 1, 4, 8, 12)
    detach(vit)
    assert not any(name.startswith("position_encoding") for name in vit.state_dict())
    bare = vit(x)
    assert torch.allclose(attach(vit, "none")(x), bare, atol=1e-6)


def test_intermediate_features_have_a_time_axis():
    vit = build(class_token=True, global_pool="token")
    maps = vit.forward_intermediates(torch.randn(2, 1, 6, 8, 12), intermediates_only=True)
    assert [tuple(each.shape) for each in maps] == [(2, 96, 3, 2, 3)] * 2


def test_micro_starts_from_xavier():
    weight = build().patch_embed.proj.weight.detach()
    assert isinstance(build().patch_embed.proj, nn.Conv3d)
    bound = (6 / (32 + 96)) ** 0.5
    assert 0.9 * bound < float(weight.abs().max()) <= bound


def test_a_timm_model_by_name():
    vit = create_video_vit(
        "vit_tiny_patch16_224", frames=4, image_size=(32, 48), patch_size=16, num_classes=3, depth=1, encoding="rope_3d"
    )
    assert vit.embed_dim == 192
    assert vit(torch.zeros(1, 3, 6, 16, 32)).shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": 5}, "frames: expected a positive multiple of tubelet_size, got 5 frames and tubelet_size 2"),
        ({"image_size": (8, 10)}, r"image_size: expected multiples of the patch size \(4, 4\), got \(8, 10\)"),
        ({"pos_embed": "learn"}, "pos_embed: a video ViT has no table of its own"),
        ({"name": "vit_nano"}, "name: no model is called 'vit_nano'"),
        ({"name": "eva02_tiny_patch14_224"}, "name: 'eva02_tiny_patch14_224' cannot take a tubelet embedding"),
    ],
)
def test_what_cannot_be_built(options, message):
    with pytest.raises(ValueError, match=message):
        create_video_vit(**{**SMALL, **options})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 5, 8, 12), r"divisible by the tubelet \(2, 4, 4\), got \(5, 8, 12\); for example \(4, 8, 12\)"),
        ((1, 1, 4, 8, 10), r"got \(4, 8, 10\); for example \(4, 8, 8\)"),
        ((1, 1, 1, 8, 12), r"got \(1, 8, 12\); for example \(2, 8, 12\)"),
        ((1, 1, 8, 12), r"x: this model takes videos \(B, channels, frames, height, width\), got \(1, 1, 8, 12\)"),
    ],
)
def test_clips_that_do_not_fit(shape, message):
    with pytest.raises(ValueError, match=message):
        build()(torch.zeros(shape))
