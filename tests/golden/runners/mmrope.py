"""MM-RoPE: pairs in proportion 2:3:3, as pairs (peer) and as the channel groups of the Lumos-1 code."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multimodal import channel_tables, rotary_angles, scheme
from tests.golden.case import Case
from tests.golden.runners._multimodal import id_outputs, pairs_of, read_ids, rotary_outputs, tolerance
from tests.golden.runners.mrope import _deltas

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    case.describe("mrope_section")
    if case.has("in.vision_flag"):
        allocation = scheme("mmrope").allocate(pairs_of(case), layout="channels")
        vision = case.input("vision_flag").bool()
        text = case.input("text_position_ids")
        ids = torch.where(vision, case.input("position_ids"), text)
        base = float(case.option("rope_theta"))
        cos, sin = channel_tables(rotary_angles(ids, allocation, base)[:, 0])
        return {"axis_map": allocation.axis, "cos": cos, "sin": sin, "inv_freq": allocation.inverse_frequencies(base)}
    scale = tuple(float(s) for s in case.option("position_scale", (1.0, 1.0, 1.0)))
    chosen = scheme("mmrope", block_options={"scale": scale})
    layout = read_ids(case, chosen)
    outputs = id_outputs(case, {"position_ids": layout})
    outputs["rope_deltas"] = _deltas(layout, padded=True)
    return outputs | rotary_outputs(case, layout.position_ids(), layout.mask, chosen.allocate(pairs_of(case)))
