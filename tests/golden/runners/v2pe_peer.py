"""V2PE with a fixed span per visual block."""

from __future__ import annotations

from torch import Tensor

from mmpos.multimodal import scheme
from tests.golden.case import Case
from tests.golden.runners._multimodal import id_outputs, pairs_of, read_ids, rotary_outputs, tolerance
from tests.golden.runners.mrope import _deltas

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    chosen = scheme("v2pe_span", block_options={"span": float(case.option("visual_stride", 16.0))})
    layout = read_ids(case, chosen)
    outputs = id_outputs(case, {"position_ids": layout})
    outputs["rope_deltas"] = _deltas(layout, padded=True)
    return outputs | rotary_outputs(case, layout.position_ids(), layout.mask, chosen.allocate(pairs_of(case)))
