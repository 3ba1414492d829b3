"""VRoPE: four mirrored sums, one per rotary pair in turn; segments are stored directly."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multimodal import Image, Text, Video, scheme
from tests.golden.case import Case, Unknown
from tests.golden.runners._multimodal import pairs_of, rotary_outputs, tolerance

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    case.expect("half_time_dim", 0)
    order = case.option("order", "code")
    segments = []
    for kind, first, rows, cols in case.input("segments").tolist():
        if kind in (0, 3):
            segments.append(Text(first, shared=kind == 3))
        elif kind == 1:
            segments.append(Image(rows, cols) if first == 1 else Video(first, rows, cols))
        elif kind == 2:
            segments.append(Video(first, rows, cols))
        else:
            raise Unknown(f"segment kind {kind}")
    chosen = scheme("vrope", block_options={"order": order})
    layout = chosen.layout([segments])
    ids = layout.position_ids()
    allocation = chosen.allocate(pairs_of(case))
    channel = ids[:, 0].T[:, allocation.axis]
    outputs = {
        "four_positions": ids[:, 0],
        "channel_positions": channel,
        "current_index": layout.cursor[0, 0],
        "next_text_position": layout.next_ids()[0, 0],
    }
    return outputs | rotary_outputs(case, ids, torch.ones_like(layout.mask), allocation)
