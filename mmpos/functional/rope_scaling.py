"""Frequency scalings for sequences and grids larger than those of training, one axis at a time.

Sources: position interpolation (arXiv 2306.15595), NTK-aware and NTK-by-parts scaling (jquesnelle/yarn), YaRN (arXiv
2309.00071), Resonance (arXiv 2403.00071), UltraFlux (arXiv 2511.18050). With ``d`` rotary channels, base ``b``, ladder
``w_j = b ** (-2j/d)``, training length ``L``, test length ``n`` and ``s = max(1, n / L)``.

The usual defaults were chosen for language models. On a ViT with ``L = 14`` patches the fastest frequency makes only
2.2 turns, so YaRN with ``beta_fast = 32`` is nearly plain interpolation; use ``beta_fast`` of about ``L / (2 pi)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SCALINGS", "RopeScaling", "integer_wavelengths", "scale_frequencies", "snapped_exponents"]

SCALINGS = (
    "none",
    "linear",
    "ntk",
    "dynamic_ntk",
    "ntk_by_parts",
    "yarn",
    "resonance",
    "resonance_linear",
    "resonance_ntk",
    "resonance_yarn",
    "ultraflux",
)


@dataclass(frozen=True)
class RopeScaling:
    """Which scaling, and its constants.

    Args:
        kind: one of ``SCALINGS``.
        beta_fast: YaRN leaves alone frequencies with more turns than this over the training length.
        beta_slow: YaRN interpolates frequencies with fewer turns than this.
        truncate: round the YaRN band to whole indices (the paper and Hugging Face).
        factor: dynamic NTK factor ``F``; ``F = 1`` is NTK with ``s = n / L``.
        betas: NTK-by-parts, turns over which interpolation goes over into NTK.
        gammas: NTK-by-parts, turns over which NTK goes over into the unscaled ladder.
    """

    kind: str = "none"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factor: float = 1.0
    betas: tuple[float, float] = (1.25, 0.75)
    gammas: tuple[float, float] = (16.0, 2.0)

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise ValueError(f"scaling: expected one of {SCALINGS}, got {self.kind!r}")
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"beta_fast, beta_slow: expected beta_fast > beta_slow > 0, got {self.beta_fast} and {self.beta_slow}; "
                "a frequency that makes many turns is fast"
            )


def scale_frequencies(
    freqs: Tensor, scaling: RopeScaling, *, dim: int, base: float, train_length: float, scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Frequencies and table amplitude of one axis at ``scale`` times the training length.

    A learned frequency that is not on the ladder is treated as the ladder frequency of the same magnitude, so that a
    learned ladder which has not moved gets exactly the scaling of the fixed one.

    Args:
        freqs: angular frequencies, radians per patch; signs are kept.
        scaling: kind and constants.
        dim: rotary channels ``d`` of the axis.
        base: base ``b`` of the ladder.
        train_length: training length ``L`` in patches.
        scale: ``n / L``; values below 1 count as 1. A tensor scales each sample on its own.

    Shape:
        freqs ``(..., d/2)``, scale scalar or broadcastable to ``(..., 1)``; returns frequencies ``(..., d/2)`` and the
        amplitude with the shape of ``scale``.
    """
    if not base > 0 or base == 1:
        raise ValueError(
            f"base: expected a positive number other than 1, got {base}; with base 1 all frequencies are equal"
        )
    dtype = freqs.dtype
    s = torch.as_tensor(scale, dtype=dtype, device=freqs.device)
    raw, s = s, s.clamp_min(1.0)
    one = torch.ones_like(s)
    kind = scaling.kind
    if kind == "none":
        return freqs.expand(torch.broadcast_shapes(freqs.shape, s.shape)), one
    if kind == "resonance":
        return integer_wavelengths(freqs), one
    if kind.startswith("resonance_"):
        inner = RopeScaling(**{**scaling.__dict__, "kind": kind.removeprefix("resonance_")})
        scaled, amplitude = scale_frequencies(freqs, inner, dim=dim, base=base, train_length=train_length, scale=scale)
        return integer_wavelengths(scaled), amplitude
    if kind == "linear":
        return freqs / s, one
    if dim <= 2 and kind in ("ntk", "dynamic_ntk", "ntk_by_parts", "ultraflux"):
        raise ValueError(f"dim: {kind} scaling needs more than 2 rotary channels on an axis, got {dim}")
    magnitude = freqs.abs().clamp_min(1e-30)
    exponent = (-magnitude.log() / math.log(base)).clamp_min(0.0)  # 2j/d of the ladder frequency of this magnitude
    if kind == "ntk":
        return freqs * s ** (-exponent * dim / (dim - 2)), one
    if kind == "dynamic_ntk":
        grown = (scaling.factor * raw - (scaling.factor - 1)).clamp_min(1.0)
        return freqs * grown ** (-exponent * dim / (dim - 2)), one
    if kind == "yarn":
        index = exponent * dim / 2
        low = _correction_index(scaling.beta_fast, dim, base, train_length)
        high = _correction_index(scaling.beta_slow, dim, base, train_length)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        keep = 1 - ((index - low) / (high - low)).clamp(0, 1)
        return freqs * ((1 - keep) / s + keep), 0.1 * s.log() + 1
    by_parts = _ntk_by_parts(freqs, exponent, exponent, scaling, dim, base, train_length, s)
    if kind == "ntk_by_parts":
        return by_parts, one
    # UltraFlux: NTK-by-parts at exponents snapped to whole turns of the training window, and only beyond that window
    snapped = snapped_exponents(exponent, base, train_length)
    moved = torch.pow(torch.full((), base, dtype=dtype, device=freqs.device), -snapped) * freqs.sign()
    by_parts = _ntk_by_parts(moved, snapped, exponent, scaling, dim, base, train_length, s)
    beyond = raw > 1
    return torch.where(beyond, by_parts, freqs), torch.where(beyond, 0.1 * s.log() + 1, one)


def _correction_index(turns: float, dim: int, base: float, length: float) -> float:
    return dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))


def _ntk_by_parts(
    freqs: Tensor,
    exponent: Tensor,
    ladder: Tensor,
    scaling: RopeScaling,
    dim: int,
    base: float,
    length: float,
    s: Tensor,
) -> Tensor:
    # the blend follows the place on the unmoved ladder, also where the exponents were snapped
    def ramp(fast: float, slow: float) -> Tensor:
        low = max(math.floor(_correction_index(fast, dim, base, length)), 0)
        high = min(math.ceil(_correction_index(slow, dim, base, length)), dim - 1)
        width = high - low if high != low else 0.001
        return ((ladder * dim / 2 - low) / width).clamp(0, 1)

    ntk = freqs * s ** (-exponent * dim / (dim - 2))
    to_ntk = 1 - ramp(*scaling.betas)
    to_original = 1 - ramp(*scaling.gammas)
    blended = freqs / s * (1 - to_ntk) + ntk * to_ntk
    return blended * (1 - to_original) + freqs * to_original


def integer_wavelengths(freqs: Tensor) -> Tensor:
    """Resonance: the nearest frequency whose wavelength is a whole number of patches (at least 1)."""
    wavelength = (2 * math.pi / freqs.abs()).round().clamp_min(1.0)
    return 2 * math.pi / wavelength * freqs.sign()


def snapped_exponents(exponent: Tensor, base: float, train_length: float) -> Tensor:
    """Exponents moved to a whole number of turns over the training window, where there was at least one turn."""
    turns = train_length * torch.pow(torch.full((), base, dtype=exponent.dtype, device=exponent.device), -exponent)
    turns = turns / (2 * math.pi)
    whole = turns.round().clamp_min(1.0)
    target = -((2 * math.pi * whole / train_length).log() / math.log(base))
    return torch.where(turns >= 1, target, exponent)
