"""STRING's matrices: the Cayley map, and three forms of a circulant rotation that must be one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos.functional.rotary import mixed_angles, rotate_plain, rotation_from_angles
from mmpos.functional.skew import skew_from_upper
from mmpos.functional.string import (
    cayley,
    circulant_basis,
    circulant_frequencies,
    circulant_from_frequencies,
    circulant_generators,
    rotate_circulant_fft,
)
from mmpos.testing import seeded


def test_cayley_is_orthogonal_and_the_identity_at_zero() -> None:
    skew = skew_from_upper(seeded(3, 64 * 63 // 2), 64)
    basis = cayley(skew)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(64).expand(3, -1, -1), atol=1e-5, rtol=0)
    assert torch.equal(cayley(torch.zeros(2, 5, 5)), torch.eye(5).expand(2, -1, -1))
    expected = (torch.eye(64) - skew.double()) @ torch.linalg.inv(torch.eye(64) + skew.double())
    assert (basis.double() - expected).abs().max() < 1e-5


def test_cayley_is_that_of_torch() -> None:
    linear = torch.nn.Linear(6, 6, bias=False, dtype=torch.float64)
    torch.nn.utils.parametrizations.orthogonal(linear, orthogonal_map="cayley", use_trivialization=False)
    raw = linear.parametrizations.weight.original.detach()
    lower = raw.tril(-1) - raw.tril(-1).mT
    torch.testing.assert_close(cayley(-lower / 2), linear.weight.detach(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("size", [3, 4, 7, 8, 64])
def test_fourier_basis(size: int) -> None:
    basis = circulant_basis(size, dtype=torch.float64)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(size, dtype=torch.float64), atol=1e-13, rtol=0)
    wanted = seeded(2, (size - 1) // 2, dtype=torch.float64)
    c = circulant_from_frequencies(wanted, size)
    torch.testing.assert_close(circulant_frequencies(c), wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(circulant_frequencies(c), 2 * torch.fft.rfft(c).imag[..., 1 : (size + 1) // 2])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(size=st.integers(3, 9), axes=st.integers(1, 4), seed=st.integers(0, 99))
def test_dense_fft_and_rotary_form_agree(size: int, axes: int, seed: int) -> None:
    x = seeded(2, 3, 5, size, seed=seed, dtype=torch.float64)
    c = seeded(axes, 3, size, seed=seed + 1, dtype=torch.float64)
    coords = seeded(2, 5, axes, seed=seed + 2, dtype=torch.float64)
    generators = torch.einsum("bna,ahij->bhnij", coords, circulant_generators(c))
    dense = (torch.matrix_exp(generators.contiguous()) @ x[..., None])[..., 0]
    torch.testing.assert_close(rotate_circulant_fft(x, c, coords), dense, atol=1e-10, rtol=0)
    basis = circulant_basis(size, dtype=torch.float64)
    rotation = rotation_from_angles(mixed_angles(coords, circulant_frequencies(c)))
    torch.testing.assert_close(rotate_plain(x @ basis.mT, rotation) @ basis, dense, atol=1e-10, rtol=0)
    # generators of different axes commute, and only the odd part of c matters
    first, last = circulant_generators(c[0]), circulant_generators(c[-1])
    torch.testing.assert_close(first @ last, last @ first, atol=1e-12, rtol=0)
    even = c + c.roll(-1, -1).flip(-1)  # c[i] + c[-i]
    assert circulant_generators(even).abs().max() < 1e-12


def test_spread_of_normal_entries() -> None:
    """Every bin of normal entries has standard deviation ``s sqrt(2 b)``: there is no ladder in it."""
    freqs = circulant_frequencies(0.01 * seeded(4000, 64))
    torch.testing.assert_close(freqs.std(0), torch.full((31,), 0.01 * 128**0.5), atol=0.006, rtol=0)
