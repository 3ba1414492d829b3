"""STRING (arXiv 2502.02562): the Cayley map, and circulant generators as frequencies in a fixed real Fourier basis."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmpos.functional.rotary import _no_autocast

__all__ = [
    "cayley",
    "circulant_basis",
    "circulant_frequencies",
    "circulant_from_frequencies",
    "circulant_generators",
    "rotate_circulant_fft",
]


def cayley(skew: Tensor) -> Tensor:
    """Cayley map ``(I - S)(I + S)^-1`` of skew matrices: orthogonal, the identity at ``S = 0``.

    Shape: ``(..., d, d)``.
    """
    eye = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    with _no_autocast(skew):
        # both factors are polynomials in S, so their order does not matter
        return torch.linalg.solve(eye + skew, eye - skew)


def _sines(size: int, like: Tensor) -> Tensor:
    """``sin(2 pi i k / b)`` for channels ``i`` and turning bins ``k = 1 .. ceil(b/2) - 1``.

    Shape: ``(b, (b - 1) // 2)``.
    """
    i = torch.arange(size, device=like.device)
    # whole turns are taken off in integers, so the sine is exact for any size
    steps = (i[:, None] * i[None, 1 : (size + 1) // 2]) % size
    return torch.sin(steps.to(like.dtype) * (2 * math.pi / size))


def circulant_frequencies(c: Tensor) -> Tensor:
    """Frequencies ``2 Im fft(c)_k`` of the bins that turn.

    Args:
        c: first columns of the circulant matrices ``C``, with generator ``C - C^T``.

    Shape:
        c ``(..., b)``; returns ``(..., (b - 1) // 2)``.
    """
    # elementwise: a matmul or an fft would follow autocast
    return -2 * (c[..., :, None] * _sines(c.shape[-1], c)).sum(-2)


def circulant_from_frequencies(freqs: Tensor, size: int) -> Tensor:
    """The odd first column whose frequencies are given, the inverse of :func:`circulant_frequencies`.

    Shape:
        freqs ``(..., (b - 1) // 2)``; returns ``(..., b)``.
    """
    return -(freqs[..., None, :] * _sines(size, freqs)).sum(-1) / size


def circulant_basis(size: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Orthonormal real Fourier basis: rows real and imaginary part of each turning bin, then the bins that never turn.

    Shape:
        Returns ``(b, b)``.
    """
    i = torch.arange(size, device=device)
    bins = torch.arange(1, (size + 1) // 2, device=device)
    turn = ((bins[:, None] * i) % size).to(torch.float64) * (2 * math.pi / size)
    rows = torch.stack([turn.cos(), -turn.sin()], dim=1).flatten(0, 1) * math.sqrt(2 / size)
    fixed = [torch.ones(size, device=device, dtype=torch.float64)]
    if size % 2 == 0:
        fixed.append(1 - 2 * (i % 2).to(torch.float64))
    return torch.cat([rows, torch.stack(fixed) / math.sqrt(size)]).to(dtype)


def circulant_generators(c: Tensor) -> Tensor:
    """Dense generators ``C - C^T`` with ``C[i, j] = c[(i - j) mod b]``, the definition.

    Shape: ``(..., b)`` to ``(..., b, b)``.
    """
    i = torch.arange(c.shape[-1], device=c.device)
    matrix = c[..., (i[:, None] - i) % c.shape[-1]]
    return matrix - matrix.mT


def rotate_circulant_fft(x: Tensor, c: Tensor, coords: Tensor) -> Tensor:
    """The FFT form of the paper, kept as an oracle: ``ifft(exp(2 i sum_axis r_axis Im fft(c_axis)) fft(x))``.

    Shape:
        x ``(B, heads, N, b)``, c ``(A, heads, b)``, coords ``(B or 1, N, A)``; returns the shape of ``x``.
    """
    imaginary = torch.fft.fft(c).imag
    phase = 2 * torch.einsum("bna,ahk->bhnk", coords, imaginary)
    return torch.fft.ifft(torch.polar(torch.ones_like(phase), phase) * torch.fft.fft(x)).real
