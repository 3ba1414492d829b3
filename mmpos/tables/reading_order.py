"""ROPE, reading-order codes of neighbours (no relation to rotary embeddings).

Lee et al., ACL 2021, arXiv 2106.10786; no code was published. Each target numbers its neighbours from 0 in the reading
order of the page, so text elsewhere changes nothing. The paper joins the codes to the messages of a graph network; for
transformers :class:`ReadingOrderBias` is our reading. Whether a target counts itself is not said: give or omit the
diagonal of the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmpos.functional.sincos import sincos

__all__ = ["ReadingOrderBias", "code_sinusoid", "nearest_neighbours", "reading_order_codes", "signed_codes"]


def reading_order_codes(neighbours: Tensor, rank: Tensor) -> Tensor:
    """Number of neighbours of the target that are read before this one; -1 where there is no edge.

    Args:
        neighbours: ``[i, j]`` whether word j is a neighbour of target i.
        rank: place of each word in the reading order, distinct; only the order counts.

    Shape:
        neighbours ``(.., N, N)`` bool, rank ``(.., N)``; returns ``(.., N, N)`` int64.

    Raises:
        ValueError: for shapes that do not fit or ranks that repeat.

    Source: arXiv 2106.10786

    Example:
        >>> neighbours = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]]).bool()
        >>> reading_order_codes(neighbours, torch.tensor([5, 9, 2])).tolist()
        [[1, 2, 0], [-1, 1, 0], [-1, -1, 0]]
    """
    if neighbours.shape[-1] != neighbours.shape[-2] or neighbours.shape[:-1] != rank.shape:
        raise ValueError(
            f"neighbours, rank: expected (.., N, N) and (.., N), got {tuple(neighbours.shape)} and "
            f"{tuple(rank.shape)}; batch both alike"
        )
    order = rank.argsort(-1)
    if bool((rank.gather(-1, order).diff(dim=-1) == 0).any()):
        raise ValueError("rank: expected distinct places in the reading order, some repeat; break ties first")
    edges = neighbours.bool()
    columns = order[..., None, :].expand(edges.shape)
    before = edges.gather(-1, columns).long().cumsum(-1) - 1
    return before.gather(-1, columns.argsort(-1)).masked_fill(~edges, -1)


def signed_codes(codes: Tensor) -> Tensor:
    """Code less the target's own code, negative for what is read before the target; 0 where there is no edge.

    Shape:
        ``(.., N, N)`` in and out.

    Raises:
        ValueError: if a target with neighbours is not among them, so that it has no code.
    """
    own = codes.diagonal(dim1=-2, dim2=-1)[..., None]
    if bool(((own < 0) & (codes >= 0)).any()):
        raise ValueError("codes: expected every target among its own neighbours, got one without; set the diagonal")
    return (codes - own).masked_fill(codes < 0, 0)


def code_sinusoid(codes: Tensor, dim: int, base: float = 10000.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sine and cosine of codes, interleaved, at ``base ** (-2m / dim)``; zero where there is no edge.

    Shape:
        codes ``(.., N, N)``; returns ``(.., N, N, dim)``.
    """
    waves = sincos(codes[..., None].to(dtype), dim, base, layout="interleaved")
    return waves.masked_fill((codes < 0)[..., None], 0.0)


def nearest_neighbours(centres: Tensor, count: int) -> Tensor:
    """The graph of the ``count`` nearest words and the word itself; a stand-in for the paper's beta-skeleton.

    Shape:
        centres ``(.., N, 2)``; returns ``(.., N, N)`` bool.
    """
    words = centres.shape[-2]
    if not 0 <= count < words:
        raise ValueError(f"count: expected 0 to {words - 1} neighbours for {words} words, got {count}")
    distance = torch.cdist(centres.double(), centres.double())
    distance.diagonal(dim1=-2, dim2=-1).fill_(-1.0)  # a word stands before others at its own place
    nearest = distance.argsort(dim=-1, stable=True)[..., : count + 1]
    return torch.zeros_like(distance, dtype=torch.bool).scatter_(-1, nearest, True)


class ReadingOrderBias(nn.Module):
    """A learned logit for each head and signed code, clamped to ``-reach .. reach``; pairs without an edge have an
    entry of their own.

    Args:
        num_heads: heads.
        reach: largest code with an entry of its own.

    Shape:
        codes ``(.., N, N)`` from :func:`reading_order_codes`; returns ``(.., heads, N, N)``. ``table (heads, 2 reach +
        2)``, the last for no edge.
    """

    def __init__(self, num_heads: int, reach: int = 8) -> None:
        super().__init__()
        if reach < 0:
            raise ValueError(f"reach: expected 0 or more, got {reach}")
        self.reach = reach
        self.table = nn.Parameter(torch.zeros(num_heads, 2 * reach + 2))

    def forward(self, codes: Tensor) -> Tensor:
        """The bias, to be added to the logits."""
        index = signed_codes(codes).clamp(-self.reach, self.reach) + self.reach
        index = index.masked_fill(codes < 0, 2 * self.reach + 1)
        return self.table[:, index].movedim(0, -3)
