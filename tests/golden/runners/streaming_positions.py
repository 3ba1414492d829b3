"""Streaming ids: the 1-D rules of the paper, the code's restarts and masks, and its interleaved loop."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multimodal import Text, Video, scheme
from mmpos.multimodal.streaming import stream_ids, streaming_pattern
from tests.golden.case import Case, Unknown
from tests.golden.runners._multimodal import tolerance

__all__ = ["run", "tolerance"]

VIDEO, IM_START, ASSISTANT = 151656, 151644, 77091
HEADER = 3  # <|im_start|> assistant newline


def run(case: Case) -> dict[str, Tensor]:
    if case.has("in.answer_lengths"):
        return _paper(case)
    ids = case.input("input_ids")[0]
    merge = case.option("spatial_merge_size")
    if len(case.input("video_grid_thw")) != 1:
        raise Unknown("more than one video")
    frames, rows, cols = (int(n) for n in case.input("video_grid_thw")[0])
    rows, cols = rows // merge, cols // merge
    first = int((ids == VIDEO).nonzero()[0])
    if case.has("in.frame_answer_tokens"):
        return _interleaved(case, ids, first, frames, rows, cols)
    seconds = float(case.input("second_per_grid_ts")[0])
    rate = float(case.option("tokens_per_second"))
    visual = frames * rows * cols
    video = Video(frames, rows, cols, times=[frame * seconds for frame in range(frames)])
    chosen = scheme("mrope_time", block_options={"tokens_per_second": rate})
    start = int(((ids[:-1] == IM_START) & (ids[1:] == ASSISTANT)).nonzero()[0])
    answer = len(ids) - start
    whole = chosen.layout([[Text(first), video, Text(len(ids) - first - visual)]]).position_ids()
    outputs = {"origin.position_ids": whole}
    for name, restart in (("group", 0), ("gap", int(case.option("gap")))):
        count = (restart + torch.arange(answer)).expand(3, 1, -1)
        outputs[f"{name}.position_ids"] = torch.cat([whole[..., :start], count], dim=-1)
    for name in ("origin", "group", "gap"):
        largest = outputs[f"{name}.position_ids"].amax()
        outputs[f"{name}.rope_deltas"] = (largest + 1 - len(ids))[None, None]
    per_frame = int(case.input("tokens_per_frame"))
    schedule = case.input("token_len_schedule").tolist()
    size = case.option("answer_group_size")
    spoken = answer - HEADER
    train = [size] * (frames - 1)
    train.append(spoken - sum(train))
    suffix = start - first - visual
    # the evaluation builder divides video *and* suffix by the frame size, so a long suffix counts as further frames
    counted = (visual + suffix) // per_frame
    common = (first, per_frame, frames, suffix, HEADER)
    outputs["mask_train_visible"] = streaming_pattern(*common, train)[None]
    outputs["mask_eval_visible"] = streaming_pattern(*common, schedule, suffix_round=counted - 1)[None]
    return outputs


def _interleaved(case: Case, ids: Tensor, first: int, frames: int, rows: int, cols: int) -> dict[str, Tensor]:
    """Frame k stands at absolute time k, two ids a second, with the answer of the round before it."""
    said = int(case.input("frame_answer_tokens"))
    total = case.tensors["out.position_ids"].shape[-1]
    header = [IM_START, ASSISTANT, 198]
    suffix = [int(i) for i in ids[first + frames * rows * cols : -HEADER]]
    segments: list = [Text(first)]
    sequence, calls = [int(i) for i in ids[:first]], []
    dummy = 9000
    for frame in range(frames):
        segments.append(Video(1, rows, cols, times=[float(frame)]))
        sequence += [VIDEO] * (rows * cols)
        text = []
        if frame == 0:
            text += header
        if frame == frames - 1:
            text += suffix
        sequence += text
        calls.append(len(sequence))
        words = said if frame < frames - 1 else total - len(sequence)
        spoken = list(range(dummy, dummy + words))
        dummy += words
        sequence += spoken
        segments.append(Text(len(text) + words))
    rule = scheme("mrope_time", block_options={"tokens_per_second": 2.0, "origin": "clock"})
    layout = rule.layout([segments])
    return {
        "position_ids": layout.position_ids(),
        "sequence_ids": torch.tensor([sequence]),
        "call_lengths": torch.tensor(calls),
    }


def _paper(case: Case) -> dict[str, Tensor]:
    prefix = int(case.input("prefix_length"))
    video, answer = case.input("video_lengths").tolist(), case.input("answer_lengths").tolist()
    gap = int(case.option("gap"))
    outputs: dict[str, Tensor] = {}
    for short, rule in (
        ("sequential", "sequential"),
        ("ospe", "overlapped"),
        ("gdpe", "group_decoupled"),
        ("gipe", "gap_isolated"),
    ):
        ids = stream_ids(rule, prefix, video, answer, gap=gap)
        outputs |= {f"{short}.video_pos": ids.video, f"{short}.answer_pos": ids.answer}
    return outputs | {
        "video_round": ids.video_round,
        "answer_round": ids.answer_round,
        "answer_sees_video": ids.answer_sees_video(),
    }
