"""FlexPredict (StoP): masked tokens are asked for at places that are not quite certain.

Bar et al., *Stochastic positional embeddings improve masked image modeling*, ICML 2024, arXiv 2308.00566 (first
*Predicting masked tokens in stochastic locations*). Code was not available. A query of the predictor is ``A n + psi``
with ``n ~ N(0, sigma I)``: covariance ``sigma A A^T``, ``A`` learned. ``A`` also projects the context features, so that
it cannot shrink to nothing.

What is predicted follows I-JEPA (Assran et al. 2023, arXiv 2301.08243): features that a slow copy of the encoder gives
to the tokens of a few blocks, from the tokens of a large block without these. Block sizes are shared by a batch, and
contexts are cut to the smallest of a batch, so that a batch is one tensor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.functional.sincos import sincos
from mmpos.objectives._common import PlainDecoder, Trunk, gather_tokens, random_subset
from mmpos.positions import Positions

__all__ = ["FlexPredict", "FlexPredictOutput", "StochasticPositions", "predicted_blocks"]


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


def predicted_blocks(
    grid: tuple[int, ...],
    batch: int,
    *,
    blocks: int = 4,
    share: tuple[float, float] = (0.15, 0.2),
    aspect: tuple[float, float] = (0.75, 1.5),
    context: tuple[float, float] = (0.85, 1.0),
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Which tokens are seen and which are to be predicted.

    Args:
        grid: sizes of the grid, height before width; blocks of videos reach over all frames.
        batch: number of samples.
        blocks: number of blocks to predict; they may overlap.
        share: smallest and largest part of a frame in such a block.
        aspect: smallest and largest height over width.
        context: smallest and largest part of a frame in the (square) block that is seen, before the others are cut out.
        device: where the result lives.
        generator: source of randomness.

    Shape:
        Returns the indices of the context ``(batch, C)`` and those of the blocks ``(batch, blocks, T)``.

    Example:
        >>> seen, asked = predicted_blocks((4, 6), 2, blocks=3)
        >>> asked.shape[:2], bool((seen[0] == asked[0].reshape(-1, 1)).any())
        (torch.Size([2, 3]), False)
    """
    for name, (low, high) in (("share", share), ("context", context)):
        if not 0 < low <= high <= 1:
            raise ValueError(f"{name}: expected two parts of a frame, 0 < smallest <= largest <= 1, got {low}, {high}")
    if not 0 < aspect[0] <= aspect[1]:
        raise ValueError(f"aspect: expected 0 < smallest <= largest, got {tuple(aspect)}")
    if blocks < 1:
        raise ValueError(f"blocks: expected at least 1, got {blocks}")
    *frames, height, width = (1, *grid) if len(grid) == 1 else grid

    def size(part: tuple[float, float], ratio: tuple[float, float]) -> tuple[int, int]:
        a, b = torch.rand(2, device=device, generator=generator).tolist()
        area = (part[0] + a * (part[1] - part[0])) * height * width
        stretch = math.exp(math.log(ratio[0]) + b * math.log(ratio[1] / ratio[0]))
        rows, columns = round((area * stretch) ** 0.5), round((area / stretch) ** 0.5)
        return min(max(rows, 1), height), min(max(columns, 1), width)

    def place(sizes: tuple[int, int], count: int) -> Tensor:
        """Cells of ``count`` blocks of a sample. Shape: ``(batch, count, frames * rows * columns)``."""
        rows, columns = sizes

        def corner(room: int) -> Tensor:
            return torch.randint(room + 1, (batch, count, 1, 1), device=device, generator=generator)

        row = corner(height - rows) + torch.arange(rows, device=device)[:, None]
        column = corner(width - columns) + torch.arange(columns, device=device)
        cells = (row * width + column).flatten(2)
        starts = torch.arange(math.prod(frames), device=device) * (height * width)
        return (starts[:, None] + cells[:, :, None]).flatten(2)

    targets = place(size(share, aspect), blocks)
    whole = torch.zeros(batch, math.prod(grid), dtype=torch.bool, device=device)
    rest = ~whole.scatter(1, targets.flatten(1), True)
    inside = rest & whole.scatter(1, place(size(context, (1.0, 1.0)), 1).flatten(1), True)
    seen = torch.where(inside.any(1, keepdim=True), inside, rest)
    # on a tiny grid the blocks can cover everything: then only the first one is kept out of the context
    spare = ~whole.scatter(1, targets[:, 0], True)
    seen = torch.where(seen.any(1, keepdim=True), seen, spare)
    fewest = int(seen.sum(1).min())
    if fewest == 0:
        raise ValueError(
            f"share: a block of up to {share[1]} of the frame covers the whole grid of {tuple(grid)} cells; predict "
            "smaller blocks"
        )
    chosen = random_subset(batch, seen.shape[1], fewest, mask=seen, device=device, generator=generator)
    return chosen.sort(1)[0], targets


class FlexPredictOutput(NamedTuple):
    """Predictions and wanted features ``(B, K, T, D)``, features of all cells ``(B, L, D)``, cells ``(B, K, T)``."""

    predicted: Tensor
    wanted: Tensor
    features: Tensor
    cells: Tensor

    @property
    def loss(self) -> Tensor:
        """Smooth L1 distance of predictions and wanted features."""
        return F.smooth_l1_loss(self.predicted, self.wanted)

    @property
    def accuracy(self) -> Tensor:
        """Share of predictions that resemble the features of their own cell more than those of any other cell."""
        near = torch.einsum("bktd,bld->bktl", F.normalize(self.predicted, dim=-1), F.normalize(self.features, dim=-1))
        return (near.argmax(-1) == self.cells).to(near.dtype).mean()


class FlexPredict(nn.Module):
    """The objective around any encoder and a slow copy of it.

    Args:
        dim: width ``D`` of the encoder.
        grid: sizes of the grid.
        sigma: variance of the noise on the places that are asked for.
        width: width of the predictor; a multiple of its heads and of twice the axes.
        depth: blocks of the predictor.
        heads: attention heads of the predictor.
        blocks: as for :func:`predicted_blocks`, like the next three.
        share: part of a frame in a block.
        aspect: height over width of a block.
        context: part of a frame in the context.
    """

    psi: Tensor

    def __init__(
        self,
        dim: int,
        grid: tuple[int, ...],
        *,
        sigma: float = 0.25,
        width: int = 384,
        depth: int = 6,
        heads: int = 12,
        blocks: int = 4,
        share: tuple[float, float] = (0.15, 0.2),
        aspect: tuple[float, float] = (0.75, 1.5),
        context: tuple[float, float] = (0.85, 1.0),
    ) -> None:
        super().__init__()
        self.grid = tuple(grid)
        self.places = StochasticPositions(dim, width, sigma=sigma)
        self.query = nn.Parameter(torch.zeros(width))
        nn.init.trunc_normal_(self.query, std=0.02)
        self.predictor = PlainDecoder(width, width, dim, depth=depth, heads=heads, embed=False)
        self.blocks = blocks
        self.share, self.aspect, self.context = tuple(share), tuple(aspect), tuple(context)
        self.register_buffer("psi", sincos(Positions.grid(*self.grid).coords[0], width), persistent=False)

    def forward(
        self,
        trunk: Trunk,
        teacher: Trunk,
        tokens: Tensor,
        wanted_of: Tensor,
        positions: Positions,
        *,
        image: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> FlexPredictOutput:
        """Encode the context, ask for the blocks.

        Args:
            trunk: the encoder.
            teacher: its slow copy; gets no gradient.
            tokens: prefix and patch embeddings of the encoder, without places.
            wanted_of: those of the slow copy.
            positions: a complete raster over ``grid``.
            image: for encodings that read it.
            generator: source of randomness.

        Shape:
            tokens and wanted_of ``(B, P + L, D)``.
        """
        if positions.grid_size is None or tuple(positions.grid_size) != self.grid or not positions.is_raster:
            raise ValueError(
                f"positions: expected the complete grid {self.grid}, got {positions.grid_size}; create FlexPredict "
                "with the grid of the model"
            )
        batch, start, device = tokens.shape[0], positions.num_prefix, tokens.device
        seen, asked = predicted_blocks(
            self.grid,
            batch,
            blocks=self.blocks,
            share=(self.share[0], self.share[1]),
            aspect=(self.aspect[0], self.aspect[1]),
            context=(self.context[0], self.context[1]),
            device=device,
            generator=generator,
        )
        with torch.no_grad():
            all_placed = teacher.stack.add_to_tokens(wanted_of, positions, image=image)
            features = teacher(all_placed, positions)[:, start:]
            features = F.layer_norm(features, features.shape[-1:])
        placed = trunk.stack.add_to_tokens(tokens, positions, image=image)
        sequence = torch.cat([placed[:, :start], gather_tokens(placed[:, start:], seen)], dim=1)
        context = self.places.context(trunk(sequence, positions.take(seen))[:, start:]) + self.psi[seen]
        queries = self.query + self.places.queries(self.psi[asked].flatten(1, 2), generator=generator)
        # each block is asked for alone: blocks overlap, and one must not answer for another
        count = asked.shape[1]
        both = torch.cat([context.repeat_interleave(count, 0), queries.unflatten(1, asked.shape[1:]).flatten(0, 1)], 1)
        predicted = self.predictor(both)[:, seen.shape[1] :].unflatten(0, (batch, count))
        wanted = gather_tokens(features, asked.flatten(1)).unflatten(1, asked.shape[1:])
        return FlexPredictOutput(predicted, wanted, features, asked)
