"""MP3: no places at all; every token asks, a random few answer, and a linear head says where each token is.

Zhai et al., *Position Prediction as an Effective Pretraining Strategy*, ICML 2022, arXiv 2207.07611. No code was used.
The share of context tokens and whether tokens of the context count in the loss are options; the defaults, a quarter and
all tokens, are not stated for images.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmpos.objectives._common import Trunk, random_subset
from mmpos.objectives.droppos import position_loss
from mmpos.positions import Positions

__all__ = ["MP3", "MP3Output", "context_mask"]


def context_mask(
    positions: Positions,
    batch: int,
    share: float,
    *,
    context: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Which keys may be attended: prefix tokens and a random share of the placed ones.

    Args:
        positions: where the tokens are; padding is never context.
        batch: number of samples ``B``.
        share: share of placed tokens in the context, at least one token.
        context: indices to use instead of random ones.
        generator: source of randomness.

    Shape:
        context ``(B, C)``; returns the mask of keys ``(B, 1, 1, P + N)`` and that of placed tokens ``(B, N)``, both
        bool.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share: expected a share above 0 and up to 1, got {share}")
    device, count = positions.coords.device, positions.num_placed
    if context is None:
        mask = None if positions.mask is None else positions.mask.expand(batch, -1)
        fewest = count if mask is None else int(mask.sum(1).min())
        context = random_subset(
            batch, count, max(1, round(share * fewest)), mask=mask, device=device, generator=generator
        )
    chosen = torch.zeros(batch, count, dtype=torch.bool, device=device).scatter_(1, context, True)
    keys = torch.cat([chosen.new_ones(batch, positions.num_prefix), chosen], dim=1)
    return keys[:, None, None], chosen


class MP3Output(NamedTuple):
    """Logits ``(B, N, L)``, loss, and which tokens were context ``(B, N)``."""

    logits: Tensor
    loss: Tensor
    context: Tensor


class MP3(nn.Module):
    """Position prediction around an encoder without position encoding.

    Args:
        dim: width ``D`` of the encoder.
        grid: sizes of the grid; one class for each cell.
        share: share of tokens in the context.
        loss_on: ``all`` tokens or those outside the context (``masked``).
    """

    def __init__(self, dim: int, grid: tuple[int, ...], *, share: float = 0.25, loss_on: str = "all") -> None:
        super().__init__()
        if loss_on not in ("all", "masked"):
            raise ValueError(f"loss_on: expected 'all' or 'masked', got {loss_on!r}")
        if not 0 < share <= 1:
            raise ValueError(f"share: expected a share above 0 and up to 1, got {share}")
        self.grid = tuple(grid)
        self.share = share
        self.loss_on = loss_on
        count = 1
        for size in self.grid:
            count *= size
        self.head = nn.Linear(dim, count)

    def forward(
        self,
        trunk: Trunk,
        tokens: Tensor,
        positions: Positions,
        *,
        context: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> MP3Output:
        """Encode with the context as the only keys, and classify every placed token.

        The token hook of the trunk's stack is not called: a model that was given its places has nothing to predict.
        Attention hooks are part of the trunk, so it should hold the encoding ``none``.

        Shape:
            tokens ``(B, P + N, D)``, context ``(B, C)`` indices of placed tokens.
        """
        if positions.grid_size is None or tuple(positions.grid_size) != self.grid:
            raise ValueError(f"positions: expected tokens of the grid {self.grid}, got {positions.grid_size}")
        keys, chosen = context_mask(positions, tokens.shape[0], self.share, context=context, generator=generator)
        logits = self.head(trunk(tokens, positions, keys)[:, positions.num_prefix :])
        cells = (
            torch.arange(positions.num_placed, device=tokens.device)[None] if positions.kept is None else positions.kept
        )
        counted = torch.ones_like(chosen) if self.loss_on == "all" else ~chosen
        if positions.mask is not None:
            counted = counted & positions.mask
        return MP3Output(logits, position_loss(logits, cells.expand(len(logits), -1), counted), chosen)
