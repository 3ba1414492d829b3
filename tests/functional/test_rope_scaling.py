"""Frequency scalings: the identities each must satisfy on one axis."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos.functional.rope_scaling import (
    SCALINGS,
    RopeScaling,
    integer_wavelengths,
    scale_frequencies,
    snapped_exponents,
)
from mmpos.functional.rotary import inverse_frequencies

D, BASE, LENGTH = 32, 100.0, 14
SCALED = [kind for kind in SCALINGS if not kind.startswith("resonance") and kind != "none"]
quick = settings(max_examples=40, deadline=None)


def ladder(dim: int = D, base: float = BASE) -> Tensor:
    return inverse_frequencies(dim // 2, base, dtype=torch.float64)


def scaled(kind: str, scale: float | Tensor, freqs: Tensor | None = None, length: float = LENGTH, **constants):
    freqs = ladder() if freqs is None else freqs
    return scale_frequencies(freqs, RopeScaling(kind, **constants), dim=D, base=BASE, train_length=length, scale=scale)


@pytest.mark.parametrize("kind", [kind for kind in SCALINGS if not kind.startswith("resonance")])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_the_training_size_and_smaller_ones_are_untouched(kind: str, scale: float) -> None:
    freqs, amplitude = scaled(kind, scale)
    torch.testing.assert_close(freqs, ladder(), rtol=1e-12, atol=0)
    assert float(amplitude) == 1.0


@pytest.mark.parametrize("kind", ["resonance", "resonance_linear", "resonance_ntk", "resonance_yarn"])
def test_resonance_at_the_training_size_only_rounds_wavelengths(kind: str) -> None:
    freqs, amplitude = scaled(kind, 1.0)
    torch.testing.assert_close(freqs, integer_wavelengths(ladder()), rtol=1e-12, atol=0)
    assert float(amplitude) == 1.0


@quick
@given(scale=st.floats(1, 16), dim=st.sampled_from([4, 8, 28, 64]), base=st.floats(10, 100000))
def test_ntk_keeps_the_first_frequency_and_divides_the_last_by_s(scale: float, dim: int, base: float) -> None:
    freqs = ladder(dim, base)
    ntk, amplitude = scale_frequencies(freqs, RopeScaling("ntk"), dim=dim, base=base, train_length=LENGTH, scale=scale)
    torch.testing.assert_close(ntk[0], freqs[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(ntk[-1], freqs[-1] / scale, rtol=1e-10, atol=0)
    new_base = base * scale ** (dim / (dim - 2))
    torch.testing.assert_close(ntk, inverse_frequencies(dim // 2, new_base, dtype=torch.float64), rtol=1e-9, atol=0)
    assert float(amplitude) == 1.0


@quick
@given(scale=st.floats(1, 16))
def test_linear_equals_scaled_coordinates(scale: float) -> None:
    places = torch.arange(30, dtype=torch.float64)
    freqs, _ = scaled("linear", scale)
    torch.testing.assert_close(places[:, None] * freqs, (places / scale)[:, None] * ladder())


@quick
@given(scale=st.floats(1, 16), fast=st.floats(1.5, 40), slow=st.floats(0.1, 1), truncate=st.booleans())
def test_yarn_lies_between_linear_and_unscaled(scale: float, fast: float, slow: float, truncate: bool) -> None:
    freqs, amplitude = scaled("yarn", scale, beta_fast=fast, beta_slow=slow, truncate=truncate)
    assert (freqs <= ladder() * (1 + 1e-12)).all()
    assert (freqs >= ladder() / scale * (1 - 1e-12)).all()
    assert float(amplitude) == pytest.approx(0.1 * math.log(scale) + 1)


def test_yarn_keeps_fast_and_stretches_slow_frequencies() -> None:
    freqs, _ = scaled("yarn", 2.0, length=200, beta_fast=8.0, beta_slow=1.0)
    turns = 200 * ladder() / (2 * math.pi)
    fast, slow = turns > 16, turns < 0.5
    assert fast.any()
    assert slow.any()
    torch.testing.assert_close(freqs[fast], ladder()[fast], rtol=1e-12, atol=0)
    torch.testing.assert_close(freqs[slow], ladder()[slow] / 2, rtol=1e-12, atol=0)


def test_the_language_default_is_nearly_plain_interpolation_on_a_vit_grid() -> None:
    language, _ = scaled("yarn", 2.0)
    suited, _ = scaled("yarn", 2.0, beta_fast=LENGTH / (2 * math.pi), beta_slow=0.25)
    interpolated = ladder() / 2
    assert ((language / interpolated - 1).abs() < 0.01).sum() > ((suited / interpolated - 1).abs() < 0.01).sum()


@pytest.mark.parametrize("kind", [kind for kind in SCALED if kind != "ultraflux"])
@pytest.mark.parametrize("scale", [1.5, 4.0])
@pytest.mark.parametrize("length", [LENGTH, 300])
def test_ladders_stay_monotone(kind: str, scale: float, length: int) -> None:
    freqs, _ = scaled(kind, scale, length=length)
    assert (freqs.diff() < 0).all()


@pytest.mark.parametrize("kind", [kind for kind in SCALINGS if kind.startswith("resonance")])
def test_resonance_tables_repeat_with_whole_wavelengths(kind: str) -> None:
    freqs, _ = scaled(kind, 2.0)
    wavelengths = 2 * math.pi / freqs
    torch.testing.assert_close(wavelengths, wavelengths.round(), rtol=0, atol=1e-9)
    places = torch.arange(40, dtype=torch.float64)[:, None]
    torch.testing.assert_close((places * freqs).cos(), ((places + wavelengths.round()) * freqs).cos())


def test_dynamic_ntk() -> None:
    assert torch.equal(scaled("dynamic_ntk", 3.0, factor=1.0)[0], scaled("ntk", 3.0)[0])
    # factor F acts as NTK at F s - (F - 1)
    torch.testing.assert_close(scaled("dynamic_ntk", 3.0, factor=2.0)[0], scaled("ntk", 5.0)[0])


def test_ntk_by_parts_goes_over_from_linear_to_unscaled() -> None:
    freqs, amplitude = scaled("ntk_by_parts", 3.0, length=2000)
    turns = 2000 * ladder() / (2 * math.pi)
    assert turns.max() > 100
    torch.testing.assert_close(freqs[turns > 40], ladder()[turns > 40], rtol=1e-12, atol=0)
    low = ladder(64, 1e6)
    slow, _ = scale_frequencies(low, RopeScaling("ntk_by_parts"), dim=64, base=1e6, train_length=LENGTH, scale=3.0)
    few = LENGTH * low / (2 * math.pi) < 0.2
    assert few.any()
    torch.testing.assert_close(slow[few], low[few] / 3, rtol=1e-12, atol=0)
    assert float(amplitude) == 1.0


def test_ultraflux_snaps_to_whole_turns_of_the_training_window() -> None:
    freqs, amplitude = scaled("ultraflux", 2.0, length=2000)
    turns = 2000 * freqs / (2 * math.pi)
    fast = 2000 * ladder() / (2 * math.pi) > 40  # not touched by the blend
    torch.testing.assert_close(turns[fast], turns[fast].round(), rtol=0, atol=1e-6)
    assert float(amplitude) == pytest.approx(0.1 * math.log(2) + 1)
    # the blend follows the place on the ladder, not the snapped exponent: with one narrow band the first frequency is
    # snapped and otherwise left alone
    first, _ = scale_frequencies(
        inverse_frequencies(6, 1e4, dtype=torch.float64),
        RopeScaling("ultraflux"),
        dim=12,
        base=1e4,
        train_length=8,
        scale=9 / 8,
    )
    assert float(first[0]) == pytest.approx(2 * math.pi / 8)


def test_snapped_exponents_leave_slow_frequencies() -> None:
    exponent = torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64)
    snapped = snapped_exponents(exponent, BASE, LENGTH)
    turns = LENGTH * BASE**-snapped / (2 * math.pi)
    torch.testing.assert_close(turns[:1], torch.tensor([2.0], dtype=torch.float64))
    assert snapped[2] == exponent[2]


@pytest.mark.parametrize("kind", SCALED)
def test_a_tensor_scales_each_sample_on_its_own_and_signs_stay(kind: str) -> None:
    scale = torch.tensor([1.0, 1.7, 3.0], dtype=torch.float64)
    freqs, amplitude = scaled(kind, scale[:, None], -ladder())
    assert freqs.shape == (3, D // 2)
    assert amplitude.shape == (3, 1)
    for i, value in enumerate(scale):
        alone, factor = scaled(kind, float(value))
        torch.testing.assert_close(freqs[i], -alone)
        torch.testing.assert_close(amplitude[i, 0], factor)


@pytest.mark.parametrize("kind", SCALED)
def test_learned_frequencies_on_the_ladder_scale_as_the_ladder(kind: str) -> None:
    order = torch.randperm(D // 2)
    shuffled, _ = scaled(kind, 2.0, ladder()[order])
    torch.testing.assert_close(shuffled, scaled(kind, 2.0)[0][order])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RopeScaling("llama3"), "scaling: expected one of .*'llama3'"),
        (lambda: RopeScaling("yarn", beta_fast=1.0, beta_slow=32.0), "beta_fast > beta_slow"),
        (
            lambda: scale_frequencies(
                torch.ones(1), RopeScaling("ntk"), dim=2, base=BASE, train_length=LENGTH, scale=2.0
            ),
            "dim: ntk scaling needs more than 2",
        ),
        (
            lambda: scale_frequencies(
                torch.ones(4), RopeScaling("ntk"), dim=8, base=1.0, train_length=LENGTH, scale=2.0
            ),
            "base: expected a positive number other than 1",
        ),
    ],
)
def test_bad_arguments(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
