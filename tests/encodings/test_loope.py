"""LOOPE: the learned order, other resolutions, padding, pruning, and a model that has no image to give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmpos import Positions, create_encoding
from mmpos.functional.curves import curve_rank
from mmpos.functional.sincos import sincos

PATCH = 4
GRID = (3, 5)


def build(**options: object):
    torch.manual_seed(0)
    stack = create_encoding("loope", 16, 2, train_grid=GRID, **{"patch_size": PATCH, "coord_scale": 0.05, **options})
    return stack.eval(), stack.shared["loope"]


def picture(height: int, width: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, height * PATCH, width * PATCH, generator=torch.Generator().manual_seed(1))


def test_without_context_it_is_a_sinusoid_along_the_curve() -> None:
    stack, encoding = build(context="none")
    assert not stack.needs_image
    assert not list(encoding.parameters())
    positions = Positions.grid(*GRID, num_prefix=2)
    out = stack.add_to_tokens(torch.ones(1, 17, 16), positions)
    rank = curve_rank(*GRID).flatten().float()
    assert torch.equal(out[:, :2], torch.ones(1, 2, 16))
    frequencies = 10000.0 ** (-torch.arange(8) / 8)
    expected = torch.cat([(rank[:, None] * frequencies).sin(), (rank[:, None] * frequencies).cos()], -1)
    torch.testing.assert_close(out[0, 2:], 1 + expected)


@pytest.mark.parametrize("context", ["dense", "conv"])
@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_the_image_moves_a_patch_by_less_than_one(context: str, act: str) -> None:
    stack, encoding = build(context=context, act=act)
    assert stack.needs_image
    positions, image = Positions.grid(*GRID), picture(*GRID)
    shift = encoding.bias(positions, image)
    assert shift.shape == (2, 15)
    assert shift.abs().max() < 1
    assert shift.std() > 0
    # the content decides, and where the content stands as well: not invariant to shifts
    assert not torch.allclose(shift[0], shift[1])
    assert not torch.allclose(
        encoding.bias(positions, image.roll(PATCH, -1)).reshape(2, *GRID), shift.reshape(2, *GRID).roll(1, -1)
    )
    embedded = encoding.embed(positions, image)
    torch.testing.assert_close(embedded, sincos((encoding.ranks(positions) + shift)[..., None], 16))
    assert encoding.embed(positions, image).requires_grad


@pytest.mark.parametrize("context", ["dense", "conv"])
def test_gradients_reach_every_parameter(context: str) -> None:
    stack, encoding = build(context=context, act="gelu")
    stack.train()
    encoding.embed(Positions.grid(*GRID), picture(*GRID))[..., 0].square().sum().backward()
    for name, parameter in encoding.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_other_grids_index_and_rescaled() -> None:
    stack, encoding = build(context="none")
    positions = Positions.grid(6, 10)
    stack.set_resolution("index")
    assert encoding.ranks(positions).max() == 59
    stack.set_resolution("rescaled")
    torch.testing.assert_close(encoding.ranks(positions)[0].reshape(6, 10), curve_rank(6, 10).float() / 4)


def test_the_dense_context_meets_another_grid_through_that_of_training() -> None:
    stack, encoding = build(act="relu")
    at_home = encoding.bias(Positions.grid(*GRID), picture(*GRID))
    away = encoding.bias(Positions.grid(6, 10), picture(6, 10))
    assert away.shape == (2, 60)
    assert away.abs().max() < 1
    # the identity resize at home changes nothing: the definition, layer by layer
    x = picture(*GRID)
    rows, columns = torch.arange(12.0) * 0.05, torch.arange(20.0) * 0.05
    planes = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).expand(2, -1, -1, -1)
    x = torch.cat([planes, x], 1)
    for conv in encoding.convs:
        x = F.relu(conv(x))
    torch.testing.assert_close(at_home, torch.tanh(encoding.mix(encoding.norm(x).flatten(1))))


@pytest.mark.parametrize("context", ["conv", "dense"])
@pytest.mark.parametrize("train", [True, False])
def test_padded_patches_change_nothing(context: str, train: bool) -> None:
    stack, encoding = build(context=context, act="gelu")
    encoding.train(train)
    mask = torch.ones(2, *GRID, dtype=torch.bool)
    mask[1, :, 3:] = False
    mask[1, 2:] = False
    positions = Positions.grid(*GRID, mask=mask.flatten(1))
    image = picture(*GRID)
    noisy = image.clone()
    noisy[1, :, :, 3 * PATCH :] = 1e3
    noisy[1, :, 2 * PATCH :] = -50
    out, same = (encoding.embed(positions, given) for given in (image, noisy))
    torch.testing.assert_close(same, out, rtol=0, atol=0)


def test_a_padded_grid_gives_the_convolutions_of_the_smaller_one() -> None:
    stack, encoding = build(context="conv", act="gelu")
    mask = torch.zeros(1, *GRID, dtype=torch.bool)
    mask[:, :2, :3] = True
    image = picture(*GRID, batch=1)
    whole = encoding.bias(Positions.grid(*GRID, mask=mask.flatten(1)), image).reshape(*GRID)[:2, :3]
    part = encoding.bias(Positions.grid(2, 3), image[..., : 2 * PATCH, : 3 * PATCH]).reshape(2, 3)
    torch.testing.assert_close(whole, part)


def test_pruned_tokens_keep_their_place() -> None:
    stack, _ = build()
    positions, image = Positions.grid(*GRID, num_prefix=1), picture(*GRID)
    keep = torch.tensor([[4, 0, 11], [2, 14, 7]])
    whole = stack.add_to_tokens(torch.zeros(2, 16, 16), positions, image=image)
    pruned = stack.add_to_tokens(torch.zeros(2, 4, 16), positions.take(keep), image=image)
    torch.testing.assert_close(pruned[:, 1:], whole[:, 1:].gather(1, keep[..., None].expand(-1, -1, 16)))


def test_images_of_different_sizes_in_one_batch() -> None:
    stack, encoding = build(context="none")
    ranks = encoding.ranks(Positions.grids([(2, 3), (3, 4)]))
    assert ranks[0, :6].tolist() == curve_rank(2, 3).flatten().tolist()
    assert ranks[1].tolist() == curve_rank(3, 4).flatten().tolist()


def test_parameter_count_of_the_paper() -> None:
    stack = create_encoding("loope", 768, 12, train_grid=(14, 14))
    weights = 5 * 32 * 256 + 25 * (32 * 16 + 16 * 8 + 8 * 4 + 4)
    assert sum(p.numel() for p in stack.parameters()) == weights + (32 + 16 + 8 + 4 + 1) + 2 + 196**2 + 196


def test_other_encodings_ignore_the_image() -> None:
    stack = create_encoding(["sincos", ("loope", {"patch_size": PATCH, "context": "conv"})], 16, 2)
    assert stack.needs_image
    x = stack.eval().add_to_tokens(torch.zeros(2, 15, 16), Positions.grid(*GRID), image=picture(*GRID))
    parts = [
        create_encoding("sincos", 16, 2).add_to_tokens(
            torch.zeros(2, 15, 16), Positions.grid(*GRID), image=picture(*GRID)
        ),
        stack.shared["loope"].embed(Positions.grid(*GRID), picture(*GRID)),
    ]
    torch.testing.assert_close(x, sum(parts))


def test_bad_input_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="train_grid"):
        create_encoding("loope", 16, 2)
    for options, text in (
        ({"context": "mlp"}, "context"),
        ({"act": "elu"}, "act"),
        ({"kernel": 4}, "kernel"),
        ({"curve": "z"}, "curve"),
    ):
        with pytest.raises(ValueError, match=text):
            build(**options)
    stack, encoding = build()
    with pytest.raises(ValueError, match="context='none'"):
        stack.add_to_tokens(torch.zeros(1, 15, 16), Positions.grid(*GRID))
    with pytest.raises(ValueError, match="12, 20"):
        encoding.bias(Positions.grid(*GRID), torch.zeros(1, 3, 20, 12))
    with pytest.raises(ValueError, match="expected 3 channels, got 1 .* create loope with channels=1"):
        encoding.bias(Positions.grid(*GRID), torch.zeros(1, 1, 12, 20))
    _, grey = build(channels=1)
    moved = grey.bias(Positions.grid(*GRID), torch.zeros(1, 1, 12, 20))
    assert moved is not None
    assert moved.shape == (1, 15)
    with pytest.raises(ValueError, match="free or moved"):
        encoding.ranks(Positions.points(torch.zeros(3, 2)))
    positions = Positions.grid(*GRID)
    with pytest.raises(ValueError, match="free or moved"):
        encoding.ranks(positions.with_coords(positions.coords + 0.5))
