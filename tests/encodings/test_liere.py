"""LieRE: orthogonal, layer by layer, and not relative; what it becomes when its generators commute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos import EncodingStack, Positions, create_encoding
from mmpos.checkpoints import liere_layers
from mmpos.functional.rotary import Rotation
from mmpos.testing import assert_close, assert_relative, encodings_of, qkv, scores, seeded


def make(head_dim: int = 16, axes: int = 2, depth: int = 1, **options: Any) -> EncodingStack:
    torch.manual_seed(3)
    options = {"generator_dim": 4, "coordinates": "index"} | options
    return create_encoding("liere", 2 * head_dim, 2, depth, axes=axes, **options)


def only(stack: EncodingStack) -> Any:
    return encodings_of(stack)[0]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(axes=st.integers(1, 4), size=st.sampled_from([3, 4, 8]), seed=st.integers(0, 99))
def test_blocks_are_rotations(axes: int, size: int, seed: int) -> None:
    encoding = only(make(axes=axes, generator_dim=size).double())
    coords = seeded(2, 5, axes, seed=seed, dtype=torch.float64)
    blocks = encoding.blocks(coords)
    assert blocks.shape == (2, 2, 5, 16 // size, size, size)
    eye = torch.eye(size, dtype=torch.float64)
    assert (blocks.mT @ blocks - eye).abs().max() < 1e-10
    assert (torch.linalg.det(blocks) - 1).abs().max() < 1e-10
    assert torch.equal(encoding.blocks(0 * coords), eye.expand_as(blocks))


def test_attention_depends_on_absolute_places() -> None:
    """The negative control: for two axes neither a common shift nor the product by axes leaves the matrices alone."""
    encoding = only(make(generator_dim=8, coordinates="index"))
    r, s, shift = seeded(3, 1, 6, 2).unbind(0)
    moved = encoding.blocks(r + shift).mT @ encoding.blocks(s + shift)
    assert (moved - encoding.blocks(r).mT @ encoding.blocks(s)).abs().max() > 0.3
    row, column = r * torch.tensor([1.0, 0.0]), r * torch.tensor([0.0, 1.0])
    assert (encoding.blocks(row) @ encoding.blocks(column) - encoding.blocks(r)).abs().max() > 0.3
    with pytest.raises(AssertionError, match="after a shift"):
        assert_relative(make(generator_dim=8), Positions.grid(3, 4), (0.7, -0.4))


def test_one_axis_and_commuting_generators_are_relative() -> None:
    assert_relative(make(axes=1).double(), Positions.grid(7, dtype=torch.float64), (1.3,))
    stack = make().double()
    with torch.no_grad():
        only(stack).generators[1] = 0.4 * only(stack).generators[0]
    assert_relative(stack, Positions.grid(3, 4, dtype=torch.float64), (0.7, -2.3))


def test_size_two_is_mixed_turning_the_other_way() -> None:
    stack = make(generator_dim=2).double()
    mixed = create_encoding("rope_mixed", 32, 2).double()
    with torch.no_grad():
        encodings_of(mixed)[0].freqs.copy_(-only(stack).generators[..., 0])
    positions = Positions.grid(3, 5, num_prefix=1, dtype=torch.float64)
    q, k, v = qkv(2, 2, 16, 16, dtype=torch.float64)
    table, _ = stack.prepare(positions)[0].prepared[0]
    assert isinstance(table, Rotation)
    ours = only(stack).transform_qkv(q, k, v, (table, 0))[0]
    assert_close(ours, encodings_of(mixed)[0].transform_qkv(q, k, v, mixed.prepare(positions)[0].prepared[0])[0])
    # and the closed form is the exponential
    blocks = only(stack).blocks(positions.coords)
    dense = (blocks @ q[:, :, 1:].unflatten(-1, (8, 2))[..., None])[..., 0].flatten(-2)
    assert_close(ours[:, :, 1:], dense, terms=256)


def test_prefix_and_leftover_channels_are_untouched() -> None:
    stack = make(head_dim=15, generator_dim=4)
    q, k, v = qkv(2, 2, 14, 15)
    turned = only(stack).transform_qkv(q, k, v, stack.prepare(Positions.grid(3, 4, num_prefix=2))[0].prepared[0])
    for before, after in zip((q, k), turned, strict=False):
        assert torch.equal(after[:, :, :2], before[:, :, :2])
        assert torch.equal(after[..., 12:], before[..., 12:])
        assert (after[:, :, 3:, :12] != before[:, :, 3:, :12]).all()
    assert turned[2] is v


def test_coordinates_end_at_the_ratio_of_the_grids() -> None:
    encoding = only(make(coordinates="linspace", train_grid=(3, 4)))
    coords = encoding.coordinate_values(Positions.grid(6, 4))[0].view(6, 4, 2)
    assert torch.allclose(coords[:, 0, 0], torch.linspace(0, 2, 6))
    assert torch.allclose(coords[0, :, 1], torch.linspace(0, 1, 4))
    assert float(coords[1, 0, 0]) == pytest.approx(2 / 5), "not the trained 1 / 2"
    encoding.set_resolution("rescaled")
    assert torch.allclose(encoding.coordinate_values(Positions.grid(6, 1))[0, :, 0], torch.linspace(0, 1, 6))
    assert float(encoding.coordinate_values(Positions.grid(6, 1))[..., 1].abs().max()) == 0
    with pytest.raises(ValueError, match="train_grid"):
        only(make(coordinates="linspace")).prepare(Positions.grid(3, 4))


@pytest.mark.parametrize("per_head", [True, False])
def test_every_layer_learns_its_own_generators(per_head: bool) -> None:
    stack = make(depth=3, per_head=per_head)
    positions = Positions.grid(3, 4, num_prefix=1)
    q, k, _ = qkv(1, 2, 13, 16)
    for layer in range(3):
        stack.zero_grad()
        logits = scores(stack, positions, q, k, layer=layer)
        (logits * seeded(*logits.shape, seed=1)).sum().backward()
        for other, encoding in enumerate(encodings_of(stack)):
            grad = encoding.generators.grad
            assert (grad is not None and bool((grad != 0).all())) == (other == layer)


def test_reference_parameters() -> None:
    """Only the strict upper triangle acts, and each stored layer goes to its own layer."""
    raw = seeded(2, 3, 2 * 4, 4, 4)
    changed = raw + torch.tril(torch.ones(4, 4))
    stack = make(depth=3)
    for layer, (a, b) in enumerate(zip(*(liere_layers(w, num_heads=2) for w in (raw, changed)), strict=True)):
        assert torch.equal(a["generators"], b["generators"])
        encodings_of(stack)[layer].load_state_dict(a)
        upper = raw[:, layer].triu(1)
        expected = torch.matrix_exp((upper - upper.mT).unflatten(1, (2, 4)).sum(0))
        blocks = encodings_of(stack)[layer].blocks(torch.ones(1, 1, 2))
        assert (blocks[0, :, 0] - expected).abs().max() < 1e-5
    with pytest.raises(ValueError, match="num_heads is 1"):
        liere_layers(raw, num_heads=3)


def test_parameter_count_of_the_paper() -> None:
    count = {
        g: sum(p.numel() for p in create_encoding("liere", 768, 12, generator_dim=g).parameters()) for g in (64, 8)
    }
    assert count == {64: 12 * 2 * 2016, 8: 12 * 2 * 8 * 28}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator_dim": 1}, "generator_dim: expected 2 to head_dim 16"),
        ({"generator_dim": 17}, "generator_dim"),
        ({"coordinates": "polar"}, "coordinates: expected 'linspace'"),
        ({"init_scale": -1.0}, "init_scale"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_encoding("liere", 32, 2, **options)
