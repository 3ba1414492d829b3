"""A micro ViT with polyphase anchoring: no circular shift changes an answer, in float32 and with ties."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from mmpos.config import compose
from mmpos.data import create_data
from mmpos.functional.polyphase import polyphase_anchor
from mmpos.models import create_vit
from mmpos.training.build import build_model

HEIGHT, WIDTH, PATCH = 12, 20, 4
CIRCULAR = ("cpe", {"padding": "circular"})
SMALL = {"image_size": (HEIGHT, WIDTH), "patch_size": PATCH, "in_chans": 1, "embed_dim": 24, "depth": 2, "num_heads": 2}


def vit(encoding, **options):
    torch.manual_seed(0)
    return create_vit(encoding=encoding, **{**SMALL, **options}).eval()


def pictures(count: int = 6) -> Tensor:
    """Images that are rounded as stored ones are, and with components of equal norm among them."""
    generator = torch.Generator().manual_seed(3)
    images = (torch.rand(count, 1, HEIGHT, WIDTH, generator=generator) * 255).round() / 255
    images[0] = (images[0] + images[0].flip(-1)) / 2  # its own mirror image
    images[1] = (images[1] + images[1].flip((-1, -2))) / 2  # its own half turn
    images[2] = images[2, :, :2, :2].repeat(1, HEIGHT // 2, WIDTH // 2)  # a pattern shorter than a patch
    images[3] = 0.5
    return (images - 0.13) / 0.31


def shifts() -> list[tuple[int, int]]:
    return [(down, right) for down in range(0, HEIGHT, 1) for right in (0, 1, 2, 3, 4, 7, 19)]


def worst_change(model, images: Tensor) -> float:
    with torch.no_grad():
        before = model(images)
        changes = [(model(images.roll(shift, (2, 3))) - before).abs().max() for shift in shifts()]
    return float(torch.stack(changes).max() / before.std())


@pytest.mark.parametrize("encoding", ["none", CIRCULAR, ["none", CIRCULAR]])
@pytest.mark.parametrize("pooling", [{}, {"class_token": True, "global_pool": "token"}])
def test_logits_are_the_same_under_every_circular_shift(encoding, pooling):
    images = pictures()
    assert worst_change(vit(encoding, polyphase=True, **pooling), images) < 2e-5  # rounding of float32
    assert worst_change(vit(encoding, **pooling), images) > 1e-2


def test_padding_with_zeros_would_not_do():
    """What the check of the encoding is for: the border is seen by every other encoding."""
    model = vit(("cpe", {"padding": "zeros"}))
    anchored = lambda images: model(polyphase_anchor(images, PATCH)[0])  # noqa: E731
    assert worst_change(anchored, pictures()) > 1e-2


def test_ties_are_decided_by_the_picture_and_not_by_where_it_begins():
    images = pictures()
    anchored = polyphase_anchor(images, PATCH)[0]
    for shift in shifts():
        other = polyphase_anchor(images.roll(shift, (2, 3)), PATCH)[0]
        for one, two in zip(anchored, other, strict=True):
            whole = [
                one.roll((down, right), (1, 2)) for down in range(0, HEIGHT, PATCH) for right in range(0, WIDTH, PATCH)
            ]
            assert any(torch.equal(two, candidate) for candidate in whole), shift


def test_weights_have_the_names_they_had_and_copies_are_anchored_too():
    plain, model = vit(CIRCULAR), vit(CIRCULAR, polyphase=True)
    assert list(plain.state_dict()) == list(model.state_dict())
    images = pictures()
    assert torch.equal(model(images), plain(polyphase_anchor(images, PATCH)[0]))
    assert worst_change(copy.deepcopy(model), images) < 2e-5


def test_evaluation_of_shifts_finds_all_answers_unchanged(tmp_path):
    pytest.importorskip("matplotlib")
    from mmpos.evaluation import run_shift

    torch.manual_seed(0)
    data = create_data("fake", image_size=16, in_chans=1, num_classes=10, test_count=48)
    overrides = ["data=fake", "data.image_size=16", "data.num_classes=10", "encoding=cpe"]
    overrides += ["encoding.options.padding=circular", "+model.options.depth=2"]
    for polyphase in (True, False):
        model = build_model(compose([*overrides, f"+model.options.polyphase={polyphase}"]), data)
        with torch.no_grad():  # answers that differ between images
            model.patch_embed.proj.weight.mul_(8)
            model.head.weight.mul_(8)
        folder = tmp_path / str(polyphase)
        result = run_shift(model, data, encoding_name="cpe", output_dir=folder, shifts=[1, 2, 3, 4, 7], progress=False)
        always = result.row("circular_always")
        assert (always.value == 1) == polyphase, always
        whole = [result.row("consistency", 4, f"circular {name}").value for name in ("down", "right", "diagonal")]
        assert whole == [1, 1, 1]  # whole patches are permuted with or without


@pytest.mark.parametrize(
    ("encoding", "options", "message"),
    [
        ("rope_mixed", {}, "polyphase: rope_mixed tells where a patch lies"),
        ("cpe", {}, r"use encoding=none, or encoding=cpe with encoding\.options\.padding=circular"),
        (["none", "learned"], {}, "polyphase: learned tells"),
        ("none", {"patch_size": (4, 2)}, r"polyphase: expected square patches, got \(4, 2\)"),
    ],
)
def test_conditions_are_checked(encoding, options, message):
    with pytest.raises(ValueError, match=message):
        vit(encoding, polyphase=True, **options)


def test_images_must_be_whole_patches():
    with pytest.raises(ValueError, match="divisible by the patch size"):
        vit("none", polyphase=True)(torch.zeros(1, 1, 10, 8))


@pytest.mark.parametrize("encoding", ["lepe", "sincos", "swin_rpb", "rope_axial", "alibi_2d", "irpe"])
def test_other_encodings_do_change_under_circular_shifts(encoding):
    """``circular`` is a fact about what they do, not only what they say."""
    model = vit(encoding)
    with torch.no_grad():
        for parameter in model.position_encoding.parameters():
            parameter.normal_()
    assert not any(module.circular for module in model.position_encoding.encodings_of(0))
    images = pictures()
    with torch.no_grad():
        moved = model(images.roll((PATCH, 2 * PATCH), (2, 3)))
        assert float((moved - model(images)).abs().max()) > 1e-3
