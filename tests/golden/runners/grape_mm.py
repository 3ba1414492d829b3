"""GRAPE: canonical ladders with a warp, and learned planes per axis, mixed, and mixed inside blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.functional.rotary import inverse_frequencies
from mmpos.multimodal import scheme
from mmpos.multimodal.grape import Grape, warp_ladder
from tests.golden.case import Case
from tests.golden.runners._multimodal import id_outputs, pairs_of, read_ids, rotary_outputs, tolerance

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    mode = case.expect("grape_mode", "canonical", "axis", "mixed", "block_mixed")
    if mode != "canonical":
        return _learned(case, mode)
    kind = case.expect("frequency_allocation", "interleaved", "chunked")
    sections = tuple(case.option("mrope_section"))
    pairs = pairs_of(case)
    if kind == "interleaved":
        allocation = scheme("imrope").allocate(pairs)
    else:
        allocation = scheme("mrope").allocate(pairs, sections=sections)
    layout = read_ids(case, scheme("mrope"), split_frames=True)
    base = float(case.option("rope_theta"))
    ladder = allocation.inverse_frequencies(base)
    warped = warp_ladder(ladder, float(case.option("log_freq_scale", 1.0)))
    outputs = id_outputs(case, {"position_ids": layout})
    outputs |= rotary_outputs(case, layout.position_ids(), layout.mask, allocation, inverse_frequencies=warped)
    return outputs | {"inv_freq": ladder}


def _learned(case: Case, mode: str) -> dict[str, Tensor]:
    width = case.option("head_dim")
    base = float(case.option("rope_theta"))
    if mode == "axis":
        a = torch.stack([case.param(f"{axis}_grape.a") for axis in "thw"])
        b = torch.stack([case.param(f"{axis}_grape.b") for axis in "thw"])
        module = Grape(width, mode, base=base, planes=a.shape[1])
        state = {"a": a, "b": b}
    else:
        a, b, mixture = (case.param(name) for name in ("a", "b", "axis_weight"))
        if mode == "mixed":
            a, b, mixture = a[None], b[None], mixture[None]
        block = case.option("block_size", 16)
        per_block = case.option("planes_per_block", None)
        assert per_block in (None, a.shape[1])
        module = Grape(width, mode, base=base, planes=a.shape[1], block_size=block, planes_per_block=a.shape[1])
        state = {"a": a, "b": b, "mixture": mixture}
    case.describe("num_planes")
    module.load_state_dict(state)
    ids, q, k = case.input("position_ids"), case.input("q"), case.input("k")
    q_rot, k_rot = module(q, ids), module(k, ids)
    logits = q_rot @ k_rot.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT * width**-0.5
    return {"q_rot": q_rot, "k_rot": k_rot, "logits": logits, "inv_freq": inverse_frequencies(width // 2, base)}
