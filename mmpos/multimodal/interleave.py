"""Interleaved frame encoding (LVChat, arXiv 2402.12079): a video longer than those of training, as groups that share
their ids.

Group ``g`` of ``G`` holds frames ``g, g + G, g + 2G, ...`` and is encoded behind the same prefix from id 0, so all
groups stand on the same ids; groups do not see each other, the question sees everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["InterleavedFrames", "interleave_frames"]


@dataclass(frozen=True, eq=False)
class InterleavedFrames:
    """Single-pass form, stored in the order [video 0 .. video G-2, prefix, video G-1, suffix, question].

    Shape:
        frame_index ``(G, frames per group)``, position_ids and group ``(L,)`` (-1 prefix, -2 question; the suffix
        belongs to the last group), allowed ``(L, L)`` with queries in rows, next_id scalar.
    """

    frame_index: Tensor
    position_ids: Tensor
    group: Tensor
    allowed: Tensor
    next_id: int


def interleave_frames(
    frames_per_group: int, groups: int, *, tokens_per_frame: float, prefix: int, suffix: int = 0, question: int = 0
) -> InterleavedFrames:
    """Ids and pattern of interleaved groups.

    Args:
        frames_per_group: frames of each group, as many as training has seen.
        groups: number of groups, ``ceil(frames / frames_per_group)``.
        tokens_per_frame: visual tokens per frame; a fraction when several frames share a clip, with a whole number
            per group.
        prefix: prompt tokens before the video.
        suffix: tokens that close the video.
        question: tokens after it.
    """
    if min(frames_per_group, groups) < 1 or min(prefix, suffix, question) < 0:
        raise ValueError(
            f"frames_per_group, groups: expected at least 1, and no negative lengths, got {frames_per_group}, "
            f"{groups}, prefix {prefix}, "
            f"suffix {suffix}, question {question}"
        )
    visual = round(frames_per_group * tokens_per_frame)
    if abs(visual - frames_per_group * tokens_per_frame) > 1e-6:
        raise ValueError(
            f"tokens_per_frame: {frames_per_group} frames of {tokens_per_frame} tokens are not a whole number"
        )
    frame_index = torch.arange(groups)[:, None] + groups * torch.arange(frames_per_group)
    early = torch.arange(groups - 1).repeat_interleave(visual)
    group = torch.cat(
        [early, torch.full((prefix,), -1), torch.full((visual + suffix,), groups - 1), torch.full((question,), -2)]
    )
    tail = torch.arange(prefix + visual + suffix + question)
    ids = torch.cat([(prefix + torch.arange(visual)).repeat(groups - 1), tail])
    slot = torch.arange(len(group))
    causal = slot[None, :] <= slot[:, None]
    q, k = group[:, None], group[None, :]
    is_prefix, is_question = q == -1, q == -2
    allowed = torch.where(is_question, causal, (k == q) & causal)
    allowed = allowed | (~is_prefix & ~is_question & (k == -1))
    return InterleavedFrames(frame_index, ids, group, allowed, int(ids.max()) + 1)
