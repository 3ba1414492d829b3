"""Answers of a vision-language model to the questions of a batch, and which of them are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpos.data.vlm import VlmBatch, box_overlap

__all__ = ["IOU", "box_of", "greedy_answers", "overlaps", "right_answers"]

#: overlap from which a box counts as found (REC accuracy)
IOU = 0.5
BOX_WORDS = 4


@torch.no_grad()
def greedy_answers(model: Any, batch: VlmBatch) -> Tensor:
    """Token numbers of a batch with the most likely tokens in place of the answers.

    All questions are answered at once: each branch is a sequence of its own behind the images, so a pass gives the next
    token of every answer. The images are seen once.

    Shape:
        ``(B, L)``.
    """
    tokens = batch.tokens.clone()
    layout = model.layout([batch.segments])
    visual = model.see(batch.pixels)
    for question in batch.questions:  # nothing of the right answer is left
        tokens[:, question.answer : question.answer + question.length + 1] = 0
    for step in range(max(question.length for question in batch.questions) + 1):
        asked = [question.answer + step for question in batch.questions if step <= question.length]
        logits = model(tokens, batch.pixels, layout, branch=batch.branch, visual=visual)
        tokens[:, asked] = model.choose(logits[:, [slot - 1 for slot in asked]])
    return tokens


def box_of(batch: VlmBatch, tokens: Tensor, number: int) -> Tensor:
    """Boxes in pixels that the words in place of an answer give; a word that is no place counts as 0.

    Shape: tokens ``(B, L)``; returns ``(B, 4)`` float64.
    """
    if batch.places is None:
        raise ValueError("batch: it has no words for places; only batches with batch.places hold boxes")
    start = batch.questions[number].answer
    return batch.places.pixels(tokens[:, start : start + BOX_WORDS])


def overlaps(batch: VlmBatch, tokens: Tensor, number: int) -> Tensor | None:
    """Overlap of answered and right boxes, ``None`` where the answer to a question is no box. Shape: ``(B,)``."""
    question = batch.questions[number]
    if batch.places is None or question.length != BOX_WORDS:
        return None
    wanted = batch.tokens[:, question.answer : question.answer + BOX_WORDS]
    if not bool(batch.places.holds(wanted).all()):
        return None
    return box_overlap(box_of(batch, tokens, number), batch.boxes[:, number].double())


def right_answers(batch: VlmBatch, tokens: Tensor) -> Tensor:
    """Whether each answer is right: boxes from an overlap of :data:`IOU`, everything else word for word.

    Args:
        batch: the batch; ``batch.places`` says which words are places.
        tokens: what :func:`greedy_answers` gave.

    Shape:
        ``(B, questions)`` booleans.
    """
    out = []
    for number, question in enumerate(batch.questions):
        overlap = overlaps(batch, tokens, number)
        span = slice(question.answer, question.answer + question.length + 1)  # a right answer also ends
        same = (tokens[:, span] == batch.tokens[:, span]).all(-1)
        out.append(same if overlap is None else overlap >= IOU)
    return torch.stack(out, dim=-1)
