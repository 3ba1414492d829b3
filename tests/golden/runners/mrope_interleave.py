"""Interleaved M-RoPE (Qwen3-VL), with and without spatial reset, saturated (I-MRoPE) and partial (Qwen3.5)."""

from __future__ import annotations

from torch import Tensor

from mmpos.multimodal import scheme
from tests.golden.case import Case
from tests.golden.runners._multimodal import everywhere, id_outputs, pairs_of, read_ids, rotary_outputs, tolerance
from tests.golden.runners.mrope import _deltas

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    pairs = pairs_of(case)
    if case.has_option("mrope_section"):
        allocation = scheme("mrope_interleave").allocate(pairs, sections=tuple(case.option("mrope_section")))
    else:
        allocation = scheme("imrope").allocate(pairs)
    if case.has("in.position_ids"):
        ids = case.input("position_ids")
        double = case.outputs()["cos"].dtype.is_floating_point and case.outputs()["cos"].element_size() == 8
        if double:
            import torch

            exponent = torch.arange(pairs, dtype=torch.float64) / pairs
            ladder = 1.0 / float(case.option("rope_theta")) ** exponent
            return _double_tables(ids, allocation, ladder)
        return rotary_outputs(case, ids, everywhere(case), allocation)
    layout = read_ids(case, scheme("mrope_interleave"))
    outputs = id_outputs(case, {"position_ids": layout})
    outputs["rope_deltas"] = _deltas(layout, padded=True)
    outputs["rope_deltas_hf5"] = _deltas(layout, padded=False)
    outputs |= rotary_outputs(case, layout.position_ids(), layout.mask, allocation)
    if case.wants("reset.position_ids"):
        reset = read_ids(case, scheme("mrope_interleave_reset"))
        outputs |= id_outputs(case, {"reset.position_ids": reset})
        outputs["reset.rope_deltas"] = _deltas(reset, padded=True)
        outputs |= rotary_outputs(case, reset.position_ids(), reset.mask, allocation, prefix="reset.")
    return outputs


def _double_tables(ids: Tensor, allocation: object, ladder: Tensor) -> dict[str, Tensor]:
    from mmpos.multimodal import channel_tables, rotary_angles

    angles = rotary_angles(ids.double(), allocation, 1.0, ladder)  # type: ignore[arg-type]
    cos, sin = channel_tables(angles[:, 0])
    return {"cos": cos, "sin": sin, "inv_freq": ladder, "axis_map": allocation.axis}  # type: ignore[attr-defined]
