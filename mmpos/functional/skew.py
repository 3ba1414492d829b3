"""Exponentials of skew-symmetric matrices: the group elements of ComRoPE, LieRE and STRING.

A skew ``b x b`` matrix ``G`` turns ``floor(b / 2)`` planes, each with its own frequency, so ``exp(u G)`` is a rotary
table in the basis of these planes. :func:`commuting_exponentials` uses that for every amount ``u`` at once, with an
exact derivative that stays finite where frequencies coincide; :func:`rotation_planes` returns frequencies and basis for
folding. Matrices that do not share their planes (LieRE with two or more axes) go through :func:`matrix_exp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.functional.rotary import _no_autocast, _real_form_wanted

__all__ = [
    "commuting_exponentials",
    "matrix_exp",
    "raster_exponentials",
    "rodrigues",
    "rotation_planes",
    "skew_from_upper",
    "upper_from_square",
]

METHODS = ("auto", "planes", "matrix_exp")


def matrix_exp(x: Tensor) -> Tensor:
    """``torch.matrix_exp`` where it can be trusted: float32 or float64, contiguous, outside autocast.

    In half precision it returns garbage without an error, and a non-contiguous batch raises. Shape: ``(..., b, b)`` in
    and out.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    with _no_autocast(wide):
        return torch.matrix_exp(wide)


def skew_from_upper(entries: Tensor, size: int) -> Tensor:
    """Skew matrix ``U - U^T`` from the entries of the strict upper triangle ``U``, row by row.

    Shape:
        entries ``(..., b (b - 1) / 2)``; returns ``(..., b, b)``.

    Example:
        >>> skew_from_upper(torch.tensor([1.0, 2.0, 3.0]), 3).tolist()
        [[0.0, 1.0, 2.0], [-1.0, 0.0, 3.0], [-2.0, -3.0, 0.0]]
    """
    if entries.shape[-1] != size * (size - 1) // 2:
        raise ValueError(
            f"entries: expected {size * (size - 1) // 2} values for size {size}, got {tuple(entries.shape)}"
        )
    row, column = torch.triu_indices(size, size, 1, device=entries.device)
    upper = entries.new_zeros(*entries.shape[:-1], size * size).index_copy(-1, row * size + column, entries)
    upper = upper.unflatten(-1, (size, size))
    return upper - upper.mT


def upper_from_square(matrix: Tensor) -> Tensor:
    """Entries of the strict upper triangle, row by row. Shape: ``(..., b, b)`` to ``(..., b (b - 1) / 2)``."""
    size = matrix.shape[-1]
    row, column = torch.triu_indices(size, size, 1, device=matrix.device)
    return matrix[..., row, column]


@torch.no_grad()
def rotation_planes(generators: Tensor) -> tuple[Tensor, Tensor]:
    """Frequencies and a real orthonormal basis of the planes that ``exp(u G)`` turns.

    ``exp(u G) = Q^T T(u) Q`` where the rows of ``Q`` are ``a_1, b_1, a_2, b_2, ...`` (for odd ``b`` one fixed direction
    last) and ``T(u)`` turns each pair ``(a_j, b_j)`` by ``u w_j``. Not differentiable: the planes of equal frequencies
    are arbitrary.

    Shape:
        generators ``(..., b, b)``; returns ``w (..., floor(b / 2))``, largest first, and ``Q (..., b, b)``.
    """
    size = generators.shape[-1]
    pairs = size // 2
    wide = generators.double()
    with _no_autocast(wide):
        # i G (a + i b) = w (a + i b)  <=>  G a = w b and G b = -w a
        vectors = torch.linalg.eigh(torch.complex(torch.zeros_like(wide), wide))[1][..., size - pairs :].flip(-1)
        columns = torch.stack([vectors.real, vectors.imag], dim=-1).flatten(-2) * 2**0.5
        # leaves planes of nonzero frequency as they are and completes those without rotation, whose vectors may be
        # dependent
        basis, triangle = torch.linalg.qr(columns, mode="complete")
        sign = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
        basis = basis * F.pad(sign, (0, size - 2 * pairs), value=1.0).unsqueeze(-2)
        first, second = basis[..., 0 : 2 * pairs : 2], basis[..., 1 : 2 * pairs : 2]
        freqs = (second * torch.matmul(wide, first)).sum(-2)
    return freqs.to(generators.dtype), basis.mT.to(generators.dtype)


def rodrigues(generators: Tensor, amounts: Tensor) -> Tensor:
    """``exp(u G)`` for ``3 x 3`` skew matrices in closed form.

    Shape:
        generators ``(..., 3, 3)``, amounts broadcastable to ``(...)``; returns ``(..., 3, 3)``.
    """
    with _no_autocast(generators):
        square = torch.matmul(generators, generators)
    # the tiny constant keeps the derivative of the length finite (zero) at G = 0
    length = (upper_from_square(generators).square().sum(-1) + 1e-30).sqrt()
    turn = amounts * length
    one = amounts * torch.sinc(turn / torch.pi)
    two = amounts.square() / 2 * torch.sinc(turn / (2 * torch.pi)).square()
    eye = torch.eye(3, dtype=generators.dtype, device=generators.device)
    return eye + one[..., None, None] * generators + two[..., None, None] * square


class _PlaneExponentials(torch.autograd.Function):
    """``exp(u G)`` from one eigendecomposition of each ``G``, and its derivative by divided differences of the
    exponential.
    """

    @staticmethod
    def forward(ctx: Any, generators: Tensor, amounts: Tensor) -> Tensor:
        wide = generators.double()
        # G v = -i w v
        w, v = torch.linalg.eigh(torch.complex(torch.zeros_like(wide), wide))
        projections = torch.einsum("kai,kbi->kiab", v, v.conj())
        spans = torch.cat([projections.real, projections.imag], dim=1).flatten(-2).to(generators.dtype)
        phase = amounts[..., None] * w[:, None].to(amounts.dtype)
        waves = torch.cat([phase.cos(), phase.sin()], dim=-1)
        ctx.save_for_backward(w, v, spans, amounts)
        return torch.matmul(waves, spans).unflatten(-1, generators.shape[-2:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        w, v, spans, amounts = ctx.saved_tensors
        size = v.shape[-1]
        with _no_autocast(grad):
            grad_generators = grad_amounts = None
            if ctx.needs_input_grad[1]:
                phase = amounts[..., None] * w[:, None].to(amounts.dtype)
                on_cos, on_sin = torch.matmul(grad.flatten(-2), spans.mT).split(size, dim=-1)
                grad_amounts = (w[:, None].to(amounts.dtype) * (on_sin * phase.cos() - on_cos * phase.sin())).sum(-1)
            if ctx.needs_input_grad[0]:
                # float64: differences of nearly equal frequencies lose eps / difference
                u = amounts.double()
                phase = u[..., None] * w[:, None]
                cos, sin = phase.cos(), phase.sin()
                waves = torch.cat([cos, sin, u[..., None] * cos, u[..., None] * sin], dim=-1)
                sums = torch.matmul(waves.mT, grad.flatten(-2).double()).unflatten(-1, (size, size))
                cos_sum, sin_sum, ucos_sum, usin_sum = sums.split(size, dim=1)
                own, other = _sandwich(torch.complex(cos_sum, sin_sum), v)
                slope, other_slope = _sandwich(torch.complex(ucos_sum, usin_sum), v)
                gap = w[:, :, None] - w[:, None, :]
                near = gap.abs() * u.abs().amax(-1)[:, None, None] < 1e-5
                quotient = (own - other) / (1j * torch.where(near, 1.0, gap))
                inner = torch.where(near, (slope + other_slope) / 2, quotient)
                full = torch.matmul(torch.matmul(v, inner), v.mH).real
                grad_generators = ((full - full.mT) / 2).to(grad.dtype)
        return grad_generators, grad_amounts


def _sandwich(sums: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``v_i^H S_i v_j`` and ``v_i^H S_j v_j`` for one matrix ``S_i`` per eigenvalue, ``(K, b, b, b)``."""
    right = torch.matmul(sums, v[:, None])  # (K, i, row, j)
    own = (right * v.conj().mT[..., None]).sum(2)
    other = torch.matmul(v.mH, right.diagonal(dim1=1, dim2=3))
    return own, other


def commuting_exponentials(generators: Tensor, amounts: Tensor, method: str = "auto") -> Tensor:
    """``exp(u G_j)`` for every token and block, where each block has one generator and each token an amount ``u`` of
    it.

    Args:
        generators: skew matrices; the derivative is taken within skew matrices.
        amounts: how far each token goes along each block.
        method: ``planes`` decomposes each generator once (first derivatives only); ``matrix_exp`` treats every token
            alone; ``auto`` takes closed forms for ``b = 3``, ``matrix_exp`` for compilers and export, else ``planes``.

    Shape:
        generators ``(heads or 1, m, b, b)``, amounts ``(B or 1, heads or 1, N, m)``; returns ``(B or 1, heads or 1, N,
        m, b, b)``.
    """
    if method not in METHODS:
        raise ValueError(f"method: expected one of {METHODS}, got {method!r}")
    if amounts.shape[-1] != generators.shape[-3]:
        raise ValueError(
            f"amounts: expected {generators.shape[-3]} blocks in the last dimension, got {tuple(amounts.shape)} for "
            f"generators {tuple(generators.shape)}"
        )
    dtype = torch.promote_types(torch.promote_types(generators.dtype, amounts.dtype), torch.float32)
    # the application multiplies rows by R^T = exp(-u G): that is what should lie contiguous in memory
    generators, back = generators.to(dtype), -amounts.to(dtype)
    if method == "auto":
        method = "rodrigues" if generators.shape[-1] == 3 else "matrix_exp" if _real_form_wanted() else "planes"
    if method == "rodrigues":
        return rodrigues(generators[:, None], back).mT
    if method == "matrix_exp":
        return matrix_exp(back[..., None, None] * generators[:, None]).mT
    heads = max(generators.shape[0], back.shape[1])
    batch, _, tokens, count = back.shape
    flat = back.permute(1, 3, 0, 2).expand(heads, -1, -1, -1).flatten(2).flatten(0, 1)  # (heads m, B N)
    with _no_autocast(flat):
        blocks = _PlaneExponentials.apply(generators.expand(heads, -1, -1, -1).flatten(0, 1), flat)
    blocks = blocks.unflatten(0, (heads, count)).unflatten(2, (batch, tokens))
    return blocks.permute(2, 0, 3, 1, 4, 5).contiguous().mT


def raster_exponentials(generators: Tensor, directions: Tensor, ticks: Sequence[Tensor]) -> Tensor:
    """``exp(sum_axis r_axis s_axis G)`` on a full raster as a product of one exponential per row, column, frame ...

    Exact because the generators of the axes commute: ``n_1 + n_2 + ...`` exponentials instead of ``n_1 n_2 ...``.

    Args:
        generators: skew matrices.
        directions: factor ``s`` of each axis on each block.
        ticks: coordinates of the raster lines along each axis.

    Shape:
        generators ``(heads, m, b, b)``, directions ``(A, heads or 1, m)``, ticks ``(n_axis,)`` each; returns
        ``(1, heads, n_1 n_2 ..., m, b, b)`` in row-major order.
    """
    product: Tensor | None = None
    for axis, tick in enumerate(ticks):
        amount = -tick[:, None] * directions[axis][:, None]  # (heads or 1, n, m)
        factor = matrix_exp(amount[..., None, None] * generators[:, None])
        if product is None:
            product = factor
            continue
        with _no_autocast(factor):
            product = torch.matmul(product[:, :, None], factor[:, None]).flatten(1, 2)
    if product is None:
        raise ValueError("ticks: expected at least one axis")
    return product[None].mT
