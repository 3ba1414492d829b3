"""Ids for answering while a video is still coming in: two counters, one for the video and one for the answer (arXiv
2601.06843).

Rounds alternate: some video tokens arrive, some answer tokens are spoken. An answer may see the prompt, the video up
to its round and all earlier answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["STREAM_RULES", "StreamIds", "stream_ids", "streaming_pattern"]

STREAM_RULES = ("sequential", "overlapped", "group_decoupled", "gap_isolated")


@dataclass(frozen=True, eq=False)
class StreamIds:
    """Ids and rounds of the two streams, each in the order of its rounds.

    Shape:
        video, video_round ``(video tokens,)``; answer, answer_round ``(answer tokens,)``; next_video, next_answer:
        where each stream goes on.
    """

    video: Tensor
    answer: Tensor
    video_round: Tensor
    answer_round: Tensor
    next_video: int
    next_answer: int

    def answer_sees_video(self) -> Tensor:
        """Which video tokens an answer token may see, ``(answer tokens, video tokens)``."""
        return self.video_round[None, :] <= self.answer_round[:, None]


def stream_ids(
    rule: str, prefix: int, video_lengths: Sequence[int], answer_lengths: Sequence[int], *, gap: int = 10000
) -> StreamIds:
    """1-D ids of both streams after a prompt on ``0 .. prefix - 1``.

    Args:
        rule: ``sequential`` numbers everything in order of arrival; ``overlapped`` (OSPE) starts an answer and the
            next video round on the same id; ``group_decoupled`` (GDPE) lets the video go on by itself and counts
            answers from 0; ``gap_isolated`` (GIPE) counts answers from ``gap``.
        prefix: prompt tokens.
        video_lengths: video tokens of each round.
        answer_lengths: answer tokens of each round.
        gap: first answer id of ``gap_isolated``.
    """
    if rule not in STREAM_RULES:
        raise ValueError(f"rule: expected one of {STREAM_RULES}, got {rule!r}")
    if len(video_lengths) != len(answer_lengths):
        raise ValueError(
            f"video_lengths, answer_lengths: expected equally many rounds, got {len(video_lengths)}, "
            f"{len(answer_lengths)}"
        )
    if not video_lengths:
        raise ValueError("video_lengths, answer_lengths: expected at least one round, got none")
    video, answer = [], []
    video_cursor, answer_cursor = prefix, {"group_decoupled": 0, "gap_isolated": gap}.get(rule, prefix)
    for frames, words in zip(video_lengths, answer_lengths, strict=True):
        if rule == "sequential":
            video_cursor = answer_cursor
        video.append(torch.arange(frames) + video_cursor)
        video_cursor += frames
        if rule in ("sequential", "overlapped"):
            # overlapped: both streams have ended by E, and both go on from E + 1
            answer_cursor = max(answer_cursor, video_cursor)
            video_cursor = max(video_cursor, answer_cursor)
        answer.append(torch.arange(words) + answer_cursor)
        answer_cursor += words
    rounds = torch.arange(len(video_lengths))
    return StreamIds(
        video=torch.cat(video),
        answer=torch.cat(answer),
        video_round=rounds.repeat_interleave(torch.tensor(list(video_lengths))),
        answer_round=rounds.repeat_interleave(torch.tensor(list(answer_lengths))),
        next_video=max(video_cursor, answer_cursor) if rule == "sequential" else video_cursor,
        next_answer=answer_cursor,
    )


def streaming_pattern(
    prompt: int,
    tokens_per_frame: int,
    frames: int,
    suffix: int,
    header: int,
    answer_lengths: Sequence[int],
    *,
    suffix_round: int | None = None,
) -> Tensor:
    """Which slots see which in a sequence stored as [prompt, video, suffix, answer header, answer], one answer chunk
    per frame.

    What an answer slot sees is decided by the round of the token it *predicts*: the last token of chunk ``g`` already
    sees frame ``g + 1``. Everything before the answer is causal.

    Args:
        prompt: tokens before the first frame.
        tokens_per_frame: visual tokens per frame.
        frames: number of frames.
        suffix: tokens between the video and the answer header.
        header: tokens of the answer header, which belong to round 0.
        answer_lengths: tokens of each answer chunk.
        suffix_round: round from which the suffix is visible; default with the last frame.

    Shape:
        Returns ``(L, L)`` booleans, queries in rows.
    """
    if not answer_lengths:
        raise ValueError("answer_lengths: expected the tokens of at least one answer chunk, got none")
    video = tokens_per_frame * frames
    answer = sum(answer_lengths)
    start = prompt + video + suffix  # first slot of the header
    length = start + header + answer
    shown_from = torch.zeros(length, dtype=torch.long)
    shown_from[prompt : prompt + video] = torch.arange(frames).repeat_interleave(tokens_per_frame)
    shown_from[prompt + video : start] = frames - 1 if suffix_round is None else suffix_round
    rounds = torch.arange(len(answer_lengths)).repeat_interleave(torch.tensor(list(answer_lengths)))
    predicted = torch.zeros(length, dtype=torch.long)
    if answer:
        predicted[start + header : length - 1] = rounds[1:]
        predicted[-1] = rounds[-1]
    slot = torch.arange(length)
    causal = slot[None, :] <= slot[:, None]
    is_answer = slot >= start
    open_to = shown_from[None, :] <= predicted[:, None]
    return torch.where(is_answer[:, None] & (slot < start)[None, :], open_to, causal)
