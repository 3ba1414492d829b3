"""Cayley- and Circulant-STRING: rotary encodings in a constant basis, and what folding that basis leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmpos import EncodingStack, Positions, attend, create_encoding
from mmpos.checkpoints import string_cayley_layer, string_circulant_layer
from mmpos.functional.rotary import rotate
from mmpos.functional.skew import skew_from_upper
from mmpos.functional.string import circulant_generators
from mmpos.testing import assert_close, encodings_of, qkv, randomise, scores, seeded

METHODS = ("string_cayley", "string_circulant")
both = pytest.mark.parametrize("name", METHODS)


def make(name: str, head_dim: int = 16, axes: int = 2, **options: Any) -> EncodingStack:
    torch.manual_seed(3)
    return create_encoding(name, 2 * head_dim, 2, axes=axes, **options)


def only(stack: EncodingStack) -> Any:
    return encodings_of(stack)[0]


def group_elements(stack: EncodingStack, coords: torch.Tensor) -> torch.Tensor:
    """The full matrices ``P^T RoPE(r) P``. Shape: ``(N, A)`` to ``(heads, N, d, d)``."""
    encoding = only(stack)
    rotation = encoding.prepare(Positions.points(coords))
    units = torch.eye(encoding.head_dim, dtype=coords.dtype)[:, None, None].expand(-1, 2, len(coords), -1)
    columns = rotate(units, rotation).permute(1, 2, 3, 0)
    return rotation.basis.mT[:, None] @ columns


@both
@settings(max_examples=15, deadline=None, derandomize=True)
@given(axes=st.integers(1, 4), seed=st.integers(0, 99))
def test_group_depends_on_differences_only(name: str, axes: int, seed: int) -> None:
    stack = randomise(make(name, axes=axes).double(), seed=seed)
    r, s = (3 * seeded(2, 4, axes, seed=seed, dtype=torch.float64)).unbind(0)
    at_r, at_s, difference = (group_elements(stack, c).detach() for c in (r, s, s - r))
    eye = torch.eye(16, dtype=torch.float64)
    assert (at_r.mT @ at_s - difference).abs().max() < 1e-11
    assert (at_r.mT @ at_r - eye).abs().max() < 1e-12
    assert (group_elements(stack, 0 * r) - eye).abs().max() < 1e-12


@both
def test_norms_are_kept_prefix_included(name: str) -> None:
    stack = randomise(make(name))
    q, k, v = qkv(2, 2, 17, 16)
    turned = only(stack).transform_qkv(q, k, v, stack.prepare(Positions.grid(3, 5, num_prefix=2))[0].prepared[0])
    assert_close(turned[0].norm(dim=-1), q.norm(dim=-1))
    assert turned[2] is v


@pytest.mark.parametrize("axes", [1, 2, 4])
def test_cayley_starts_as_mixed(axes: int) -> None:
    stack = make("string_cayley", axes=axes)
    torch.manual_seed(3)
    mixed = create_encoding("rope_mixed", 32, 2, axes=axes)
    assert torch.equal(only(stack).freqs, encodings_of(mixed)[0].freqs)
    positions = Positions.grid(*(3, 4, 2, 2)[:axes], num_prefix=1)
    q, k, _ = qkv(2, 2, positions.num_tokens, 16)
    assert_close(scores(stack, positions, q, k), scores(mixed, positions, q, k))


@pytest.mark.parametrize("block", [16, 8, 4])
def test_circulant_is_mixed_in_the_fourier_basis(block: int) -> None:
    stack = randomise(make("string_circulant", block_size=block))
    mixed = create_encoding("rope_mixed", 32, 2)
    with torch.no_grad():
        encodings_of(mixed)[0].freqs.copy_(only(stack).frequencies())
    still = only(stack).frequencies()[..., -16 // block :]
    assert torch.equal(still, torch.zeros_like(still)), "two channels of each block never turn"
    assert (only(stack).frequencies()[..., : -16 // block] != 0).all()
    positions = Positions.grid(3, 5, num_prefix=1)
    q, k, _ = qkv(2, 2, 16, 16)
    basis = only(stack).orthogonal()
    assert_close(scores(stack, positions, q, k), scores(mixed, positions, q @ basis.mT, k @ basis.mT))


@pytest.mark.parametrize("block", [16, 8, 5])
def test_circulant_is_the_exponential_of_its_generators(block: int) -> None:
    head_dim = 20 if block == 5 else 16
    stack = randomise(make("string_circulant", head_dim=head_dim, block_size=block)).double()
    coords = seeded(5, 2, dtype=torch.float64)
    generators = torch.einsum("na,ahmij->hnmij", coords, circulant_generators(only(stack).c.detach()))
    dense = torch.matrix_exp(generators.contiguous())
    full = torch.zeros(2, 5, head_dim, head_dim, dtype=torch.float64)
    for index in range(head_dim // block):
        rows = slice(index * block, (index + 1) * block)
        full[:, :, rows, rows] = dense[:, :, index]
    assert (group_elements(stack, coords) - full).abs().max() < 1e-11


def test_circulant_starts_on_the_ladder_of_mixed() -> None:
    torch.manual_seed(3)
    mixed = create_encoding("rope_mixed", 32, 2)
    freqs = only(make("string_circulant")).frequencies()
    assert_close(freqs[..., :-1], encodings_of(mixed)[0].freqs[..., :-1])
    normal = only(make("string_circulant", init="normal", init_std=0.0))
    assert torch.equal(normal.frequencies(), torch.zeros(2, 2, 8))


def test_prefix_tokens_are_in_the_basis_at_position_zero() -> None:
    stack = randomise(make("string_cayley"))
    q, k, v = qkv(1, 2, 8, 16)
    turned = only(stack).transform_qkv(q, k, v, stack.prepare(Positions.grid(2, 3, num_prefix=2))[0].prepared[0])[0]
    assert_close(turned[:, :, :2], q[:, :, :2] @ only(stack).orthogonal().mT)


@both
@pytest.mark.parametrize("bias", [True, False])
def test_folding_keeps_the_outputs(name: str, bias: bool) -> None:
    stack = randomise(make(name))
    torch.manual_seed(0)
    fused = nn.Linear(32, 96, bias=bias)
    positions = Positions.grid(3, 5, num_prefix=1)
    x = seeded(2, 16, 32)

    def attention() -> torch.Tensor:
        q, k, v = fused(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return attend(q, k, v, stack.prepare(positions)[0])

    before = attention().detach()
    only(stack).fold_(fused)
    rotation = stack.prepare(positions)[0].prepared[0]
    assert rotation.basis is None
    assert rotation.cos.shape[-1] == 8, "a full table: the fast path of RoPE-Mixed"
    assert (attention() - before).abs().max() < 1e-5


def test_folding_is_not_for_channel_weights_behind_the_projection() -> None:
    """The documented limit: a weighted norm between projection and rotation does not commute with the basis."""
    stack = randomise(make("string_cayley"))
    torch.manual_seed(0)
    fused, weight = nn.Linear(32, 96), 1 + 0.5 * seeded(16)
    positions = Positions.grid(3, 5)
    x = seeded(2, 15, 32)

    def logits(scale: torch.Tensor) -> torch.Tensor:
        q, k = fused(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)[:2]
        q, k = (t / t.square().mean(-1, keepdim=True).sqrt() * scale for t in (q, k))
        return scores(stack, positions, q, k).detach()

    plain, weighted = logits(torch.ones(16)), logits(weight)
    only(stack).fold_(fused)
    assert (logits(torch.ones(16)) - plain).abs().max() < 1e-4
    assert (logits(weight) - weighted).abs().max() > 1e-2


@both
def test_linear_scaling_is_stretched_coordinates(name: str) -> None:
    stack = make(name, train_grid=(3, 4))
    large, small = Positions.grid(6, 9), Positions.grid(2, 4)
    q, k, _ = qkv(1, 2, 54, 16)
    results = {}
    for rule in ("index", "linear", "rescaled"):
        stack.set_resolution(rule)
        results[rule] = scores(stack, large, q, k)
    assert_close(results["linear"], results["rescaled"])
    assert (results["index"] - results["linear"]).abs().max() > 0.1
    stack.set_resolution("index")
    plain = scores(stack, small, q[:, :, :8], k[:, :, :8])
    stack.set_resolution("linear")  # never finer than trained
    assert_close(scores(stack, small, q[:, :, :8], k[:, :, :8]), plain)


def test_weights_written_as_matrices() -> None:
    upper = seeded(2, 120)
    state = string_cayley_layer(skew_from_upper(upper, 16), seeded(2, 2, 8))
    assert torch.equal(state["skew"], upper)
    only(make("string_cayley")).load_state_dict(state)
    only(make("string_circulant")).load_state_dict(string_circulant_layer(seeded(2, 2, 16)))
    with pytest.raises(ValueError, match="antisymmetric"):
        string_cayley_layer(seeded(2, 16, 16), seeded(2, 2, 8))
    with pytest.raises(ValueError, match="expected"):
        string_cayley_layer(skew_from_upper(upper, 16), seeded(2, 2, 7))


def test_parameter_count_of_the_paper() -> None:
    """ViT-B, two axes, one layer: D(D-1)/2 per head for the basis and the frequencies."""
    stack = create_encoding("string_cayley", 768, 12)
    assert sum(p.numel() for p in stack.parameters()) == 12 * (64 * 63 // 2 + 2 * 32)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("string_circulant", {"block_size": 5}, "block_size: expected a divisor of head_dim 16"),
        ("string_circulant", {"block_size": 2}, "at least 3"),
        ("string_circulant", {"init": "x"}, "init"),
        ("string_cayley", {"init": "x"}, "init"),
        ("string_cayley", {"theta": 0.0}, "theta"),
        ("string_cayley", {"head_dim": 15}, "even head_dim"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_encoding(name, 32, 2, **options)
