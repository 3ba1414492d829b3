"""Exponentials of skew matrices against ``torch.matrix_exp``, also where planes coincide or do not turn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos.functional.rotary import transform_blocks
from mmpos.functional.skew import (
    _PlaneExponentials,
    commuting_exponentials,
    matrix_exp,
    raster_exponentials,
    rodrigues,
    rotation_planes,
    skew_from_upper,
    upper_from_square,
)
from mmpos.testing import seeded

KINDS = ("generic", "zero", "equal", "near", "one plane")


def generators(size: int, kind: str, seed: int = 0) -> Tensor:
    """One skew matrix, float64."""
    full = skew_from_upper(seeded(size * (size - 1) // 2, seed=seed, dtype=torch.float64), size)
    if kind == "generic":
        return full
    if kind == "zero":
        return torch.zeros(size, size, dtype=torch.float64)
    turn = torch.zeros(size, size, dtype=torch.float64)
    for pair in range(size // 2 if kind != "one plane" else 1):
        speed = 1.3 + (1e-9 * pair if kind == "near" else 0.0)
        turn[2 * pair, 2 * pair + 1], turn[2 * pair + 1, 2 * pair] = -speed, speed
    basis = torch.linalg.qr(full + torch.eye(size, dtype=torch.float64))[0]
    return basis @ turn @ basis.mT


def reference(generator: Tensor, amounts: Tensor) -> Tensor:
    return torch.matrix_exp((amounts[..., None, None] * generator).contiguous())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_plane_exponentials_and_their_derivative(size: int, kind: str) -> None:
    entries = upper_from_square(generators(size, kind))[None].requires_grad_()
    amounts = seeded(1, 5, seed=1, dtype=torch.float64).requires_grad_()

    def exponentials(entries: Tensor, amounts: Tensor) -> Tensor:
        return _PlaneExponentials.apply(skew_from_upper(entries, size), amounts)

    out = exponentials(entries, amounts)
    torch.testing.assert_close(out[0], reference(generators(size, kind), amounts[0]), atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(exponentials, (entries, amounts), atol=1e-7)


def test_derivative_equals_that_of_matrix_exp_for_large_amounts() -> None:
    grads = []
    for method in ("planes", "matrix_exp"):
        entries = seeded(3, 2, 28, dtype=torch.float64).requires_grad_()
        amounts = (20 * seeded(2, 3, 4, 2, seed=1, dtype=torch.float64)).requires_grad_()
        blocks = commuting_exponentials(skew_from_upper(entries, 8), amounts, method)
        (blocks * seeded(*blocks.shape, seed=2, dtype=torch.float64)).sum().backward()
        grads.append((blocks.detach(), entries.grad, amounts.grad))
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_rotation_planes(size: int, kind: str) -> None:
    generator = generators(size, kind)
    freqs, basis = rotation_planes(generator[None])
    assert freqs.shape == (1, size // 2)
    torch.testing.assert_close(basis[0] @ basis[0].mT, torch.eye(size, dtype=torch.float64), atol=1e-13, rtol=0)
    assert (freqs[0].diff() <= 1e-8).all(), "largest first"
    assert (freqs >= -1e-12).all()
    turned = basis[0] @ reference(generator, torch.tensor(0.7, dtype=torch.float64)) @ basis[0].mT
    expected = torch.eye(size, dtype=torch.float64)
    for pair, angle in enumerate(0.7 * freqs[0]):
        rows = slice(2 * pair, 2 * pair + 2)
        expected[rows, rows] = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
    torch.testing.assert_close(turned, expected, atol=1e-8 if kind == "near" else 1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["generic", "zero"])
def test_rodrigues(kind: str) -> None:
    entries = upper_from_square(generators(3, kind))[None].requires_grad_()
    amounts = seeded(4, 1, seed=1, dtype=torch.float64).requires_grad_()
    out = rodrigues(skew_from_upper(entries, 3), amounts)
    torch.testing.assert_close(out, reference(generators(3, kind), amounts), atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(lambda e, u: rodrigues(skew_from_upper(e, 3), u), (entries, amounts))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    block=st.sampled_from([2, 3, 4]),
    shared=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_and_columns_equal_every_token_alone(sizes: list[int], block: int, shared: bool, seed: int) -> None:
    heads, count = 2, 3
    matrices = skew_from_upper(seeded(heads, count, block * (block - 1) // 2, seed=seed, dtype=torch.float64), block)
    directions = seeded(len(sizes), 1 if shared else heads, count, seed=seed + 1, dtype=torch.float64)
    ticks = [seeded(size, seed=seed + 2 + axis, dtype=torch.float64) for axis, size in enumerate(sizes)]
    coords = torch.cartesian_prod(*ticks).reshape(-1, len(sizes))
    amounts = torch.einsum("na,ahm->hnm", coords, directions)[None]
    product = raster_exponentials(matrices, directions, ticks)
    torch.testing.assert_close(product, commuting_exponentials(matrices, amounts, "matrix_exp"), atol=1e-11, rtol=0)
    torch.testing.assert_close(product, commuting_exponentials(matrices, amounts, "auto"), atol=1e-11, rtol=0)


def test_half_precision_and_strides_are_safe() -> None:
    x = skew_from_upper(seeded(5, 28) * 3, 8)
    exact = torch.matrix_exp(x.double())
    low = matrix_exp(x.bfloat16())
    assert low.dtype == torch.float32
    assert (low.double() - torch.matrix_exp(x.bfloat16().double())).abs().max() < 1e-4
    assert (matrix_exp(x.mT).double() - exact.mT).abs().max() < 1e-4  # not contiguous
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(matrix_exp(x), torch.matrix_exp(x.contiguous()))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_transform_blocks_is_the_sum_it_says(size: int, batch: int, heads: int) -> None:
    x, blocks = seeded(2, 3, 7, 2 * size + 1), seeded(batch, heads, 5, 2, size, size, seed=1)
    expected = x.clone()
    placed = x[:, :, 2:, : 2 * size].unflatten(-1, (2, size))
    expected[:, :, 2:, : 2 * size] = (blocks * placed[..., None, :]).sum(-1).flatten(-2)
    torch.testing.assert_close(transform_blocks(x, blocks, 2), expected, atol=1e-5, rtol=0)
    low = transform_blocks(x.bfloat16(), blocks, 2)
    assert low.dtype == torch.bfloat16
    # float32 arithmetic on rounded inputs, one rounding at the end
    assert torch.equal(low, transform_blocks(x.bfloat16().float(), blocks, 2).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(transform_blocks(x, blocks, 2), transform_blocks(x.clone(), blocks, 2))
        assert (transform_blocks(x, blocks, 2) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: skew_from_upper(torch.zeros(2, 5), 4), "expected 6 values"),
        (lambda: commuting_exponentials(torch.zeros(1, 2, 4, 4), torch.zeros(1, 1, 3, 5)), "expected 2 blocks"),
        (lambda: commuting_exponentials(torch.zeros(1, 2, 4, 4), torch.zeros(1, 1, 3, 2), "pade"), "expected one of"),
        (lambda: raster_exponentials(torch.zeros(1, 2, 4, 4), torch.zeros(0, 1, 2), []), "at least one axis"),
    ],
)
def test_wrong_inputs(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
