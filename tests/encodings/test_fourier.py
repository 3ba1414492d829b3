"""Learnable Fourier features."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos import Positions, create_encoding
from mmpos.checkpoints import fourier_layers
from mmpos.functional.fourier import fourier_features
from mmpos.testing import seeded


def build(**options: object):
    torch.manual_seed(0)
    stack = create_encoding("fourier", 12, 2, **{"features": 16, "hidden": 8, **options}).double()
    return stack, stack.shared["fourier"]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=3, max_size=3))
def test_the_product_of_features_sees_only_the_difference(shift: list[float]) -> None:
    x, frequencies = seeded(7, 3, dtype=torch.float64), seeded(20, 3, seed=1, dtype=torch.float64)
    here, there = (fourier_features(p, frequencies) for p in (x, x + torch.tensor(shift).double()))
    torch.testing.assert_close(there @ there.T, here @ here.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close((here**2).sum(-1), torch.full((7,), 0.5).double())


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_the_kernel_at_the_start_is_a_gaussian_of_width_gamma(gamma: float) -> None:
    _, encoding = build(features=200_000, gamma=gamma, coordinates="raw", hidden=1)
    x = torch.tensor([[0.0, 0.0], [gamma, 0.0], [0.6 * gamma, -0.8 * gamma], [0.0, 2 * gamma]]).double()
    r = encoding.fourier(x)[:, 0]
    distance = (x**2).sum(-1) / gamma**2
    torch.testing.assert_close(r @ r[0], (-distance / 2).exp() / 2, rtol=0, atol=0.01)


def test_init_std_overrides_gamma() -> None:
    _, encoding = build(features=20_000, init_std=3.0)
    assert encoding.frequencies.std().item() == pytest.approx(3.0, rel=0.02)


def test_groups_share_weights_and_are_joined() -> None:
    _, encoding = build(groups=2, axes=4, coordinates="raw")
    corners = seeded(5, 4, dtype=torch.float64)
    both, swapped = encoding.encode(corners), encoding.encode(corners.roll(2, -1))
    assert both.shape == (5, 12)
    torch.testing.assert_close(swapped, both.roll(6, -1))


def test_another_grid_is_the_same_field_at_other_places() -> None:
    stack, encoding = build(train_grid=(3, 5))
    coarse, fine = Positions.grid(3, 5, dtype=torch.float64), Positions.grid(9, 15, dtype=torch.float64)
    # the middle of three fine cells is the centre of a coarse cell
    middle = encoding.embed(fine)[0].unflatten(0, (9, 15))[1::3, 1::3].flatten(0, 1)
    torch.testing.assert_close(middle, encoding.embed(coarse)[0])
    stack.set_resolution("index")
    torch.testing.assert_close(
        encoding.embed(fine)[0].unflatten(0, (9, 15))[:3, :5].flatten(0, 1), encoding.embed(coarse)[0]
    )


def test_axes_are_told_apart_on_a_rectangle() -> None:
    _, encoding = build()
    wide = encoding.embed(Positions.grid(2, 5, dtype=torch.float64))[0].unflatten(0, (2, 5))
    tall = encoding.embed(Positions.grid(5, 2, dtype=torch.float64))[0].unflatten(0, (5, 2))
    assert (wide - tall.transpose(0, 1)).abs().max() > 1e-3


def test_padding_points_and_prefix() -> None:
    stack, encoding = build(coordinates="raw", axes=3, num_prefix=2, embed_prefix=True)
    points = seeded(2, 6, 3, dtype=torch.float64)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    positions = Positions.points(points, num_prefix=2, mask=mask)
    out = stack.add_to_tokens(torch.zeros(2, 8, 12).double(), positions)
    torch.testing.assert_close(out[:, :2], encoding.prefix.expand(2, -1, -1))
    torch.testing.assert_close(out[1, 2:6], encoding.encode(points[1, :4]))
    short = Positions.points(points[1:, :4], num_prefix=2)
    torch.testing.assert_close(out[1:, :6], stack.add_to_tokens(torch.zeros(1, 6, 12).double(), short))


def test_parameter_count() -> None:
    stack = create_encoding("fourier", 768, 12, features=768)
    assert sum(p.numel() for p in stack.parameters()) == 384 * 2 + 768 * 32 + 32 + 32 * 768 + 768


def test_bad_options() -> None:
    for options, text in (
        ({"features": 7}, "features"),
        ({"groups": 3}, "groups"),
        ({"coordinates": "metres"}, "coordinates"),
        ({"gamma": 0.0}, "gamma"),
    ):
        with pytest.raises(ValueError, match=text):
            build(**options)
    with pytest.raises(ValueError, match="extent"):
        build()[1].embed(Positions.points(torch.zeros(3, 2)))
    with pytest.raises(ValueError, match="mlp.4"):
        fourier_layers({"mlp.4.weight": torch.zeros(1)})
