"""FlexPredict (StoP): masked tokens are asked for at places that are not quite certain.

Bar et al., *Stochastic positional embeddings improve masked image modeling*, ICML 2024, arXiv 2308.00566 (first
*Predicting masked tokens in stochastic locations*). Code was not available. A query of the predictor is ``A n + psi``
with ``n ~ N(0, sigma I)``: covariance ``sigma A A^T``, ``A`` learned. ``A`` also projects the context features, so that
it cannot shrink to nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["StochasticPositions"]


class StochasticPositions(nn.Module):
    """Context projection and noisy position queries that share one matrix.

    Args:
        dim: width of the context features, which is also that of the noise.
        out_dim: width of the predictor and of the position vectors; default ``dim``.
        sigma: variance of the noise; 0 is the deterministic model.
        bias: whether the context projection has a bias.

    Shape:
        ``weight`` (``A``) is ``(out_dim, dim)``.

    Example:
        >>> stop = StochasticPositions(8, 6, sigma=0.0)
        >>> psi = torch.ones(2, 3, 6)
        >>> bool((stop.queries(psi) == psi).all())
        True
    """

    def __init__(self, dim: int, out_dim: int | None = None, *, sigma: float = 0.25, bias: bool = True) -> None:
        super().__init__()
        if sigma < 0:
            raise ValueError(f"sigma: expected a variance of 0 or more, got {sigma}")
        self.sigma = sigma
        self.project = nn.Linear(dim, dim if out_dim is None else out_dim, bias=bias)

    @property
    def weight(self) -> Tensor:
        """The shared matrix ``A``."""
        return self.project.weight

    def context(self, features: Tensor) -> Tensor:
        """Context features for the predictor. Shape: ``(..., dim)`` to ``(..., out_dim)``."""
        return self.project(features)

    def queries(
        self,
        psi: Tensor,
        noise: Tensor | None = None,
        *,
        masked: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Position vectors with noise, in training; without it in evaluation.

        Args:
            psi: position vectors.
            noise: unit normal numbers to use instead of new ones; used in evaluation as well.
            masked: which tokens are to be predicted; only they get noise. All by default.
            generator: source of randomness.

        Shape:
            psi ``(B, M, out_dim)``, noise ``(B, M, dim)``, masked ``(B, M)`` bool; returns ``(B, M, out_dim)``.
        """
        if noise is None:
            if not self.training or self.sigma == 0:
                return psi
            shape = (*psi.shape[:-1], self.weight.shape[1])
            noise = torch.randn(shape, device=psi.device, dtype=psi.dtype, generator=generator)
        if noise.shape[-1] != self.weight.shape[1]:
            raise ValueError(f"noise: expected (..., {self.weight.shape[1]}), got {tuple(noise.shape)}")
        moved = self.sigma**0.5 * torch.matmul(noise, self.weight.mT.to(noise.dtype))
        return psi + (moved if masked is None else moved * masked[..., None])
