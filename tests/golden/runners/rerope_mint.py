"""ReRoPE of MinT: events of any length on equal stretches of ids."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multimodal import channel_tables
from mmpos.multimodal.reindex import event_positions
from tests.golden.case import Case
from tests.golden.runners.sofa import tolerance

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    frames, text, event = event_positions(
        case.input("frame_times"), case.input("event_spans"), float(case.option("rescale_length"))
    )
    pairs = case.option("head_dim") // 2
    ladder = 1.0 / float(case.option("rope_theta")) ** (torch.arange(pairs, dtype=torch.float64) / pairs)
    cos_frames, sin_frames = channel_tables(frames[:, None] * ladder)
    cos_text, sin_text = channel_tables(text[:, None] * ladder)
    return {
        "frame_positions": frames,
        "event_text_positions": text,
        "event_index": event,
        "inv_freq": ladder,
        "cos_frames": cos_frames,
        "sin_frames": sin_frames,
        "cos_text": cos_text,
        "sin_text": sin_text,
        "ones_bias": ((frames[:, None] - text)[..., None] * ladder).cos().sum(-1),
    }
