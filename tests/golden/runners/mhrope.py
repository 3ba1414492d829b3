"""MHRoPE: key/value heads divided among the axes, grouped queries, left-over heads unrotated."""

from __future__ import annotations

from torch import Tensor

from mmpos.multimodal import scheme
from tests.golden.case import Case
from tests.golden.runners._multimodal import id_outputs, pairs_of, read_ids, rotary_outputs, tolerance
from tests.golden.runners.mrope import _deltas

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    case.describe("num_heads")
    reset = case.option("spatial_reset", True)
    chosen = scheme("mhrope") if reset else scheme("mhrope", reset=False, cursor="spatial")
    layout = read_ids(case, chosen)
    allocation = chosen.allocate(
        pairs_of(case), kv_heads=case.option("num_key_value_heads"), head_sections=tuple(case.option("head_section"))
    )
    outputs = id_outputs(case, {"position_ids": layout})
    outputs["rope_deltas"] = _deltas(layout, padded=True)
    return outputs | rotary_outputs(case, layout.position_ids(), layout.mask, allocation)
