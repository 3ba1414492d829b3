"""Position ids of texts that carry layout tokens: a box is a token, and takes no position of its own.

LayTokenLLM (arXiv 2503.18434); built from the description, no code read. LayTextLLM and DocLayLLM (arXiv 2408.15045)
interleave boxes too but count them, which is ``arange``.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["layout_token_ids"]


def layout_token_ids(segment: Tensor, is_layout: Tensor, mask: Tensor | None = None) -> Tensor:
    """Running count over text tokens; a layout token has the id of the first text token of its segment.

    Args:
        segment: number of the text segment of each token, 0 or more; one number stands in one piece.
        is_layout: layout tokens, before, after or inside the text of their segment. In a segment without text they
            take the id that the next text token gets.
        mask: real tokens; padding, on either side, gets 0 and does not count.

    Shape:
        segment, is_layout, mask ``(B, N)``; returns ``(B, N)`` int64.

    Raises:
        ValueError: for shapes that differ or negative segments.

    Source: arXiv 2503.18434.

    Example:
        >>> segment = torch.tensor([[0, 0, 0, 1, 1]])
        >>> layout_token_ids(segment, torch.tensor([[1, 0, 0, 1, 0]]).bool()).tolist()
        [[0, 0, 1, 2, 2]]
    """
    real = torch.ones_like(is_layout, dtype=torch.bool) if mask is None else mask.bool()
    if segment.dim() != 2 or not segment.shape == is_layout.shape == real.shape:
        raise ValueError(
            f"segment, is_layout, mask: expected equal (B, N), got {tuple(segment.shape)}, {tuple(is_layout.shape)}, "
            f"{tuple(real.shape)}; batch them alike"
        )
    if segment.numel() == 0:
        return segment.long()
    segment = segment.long().masked_fill(~real, 0)
    if int(segment.min()) < 0:
        raise ValueError(f"segment: expected 0 or more, got {int(segment.min())}; give text between segments its own")
    text = real & ~is_layout.bool()
    ids = text.long().cumsum(1) - text.long()  # text tokens before this one
    numbers = int(segment.max()) + 1
    # the count before the first token of a segment is the id of its first text token, wherever the box stands
    start = ids.new_full((len(ids), numbers), ids.shape[1]).scatter_reduce(
        1, segment, ids.masked_fill(~real, ids.shape[1]), "amin"
    )
    return torch.where(text, ids, start.gather(1, segment)).masked_fill(~real, 0)
