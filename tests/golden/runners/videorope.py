"""VideoRoPE; ``axis_map_peer`` is the known defect of a re-implementation (shifted by one pair), rebuilt here to
name it.
"""

from __future__ import annotations

from torch import Tensor

from mmpos.multimodal import scheme
from tests.golden.case import Case
from tests.golden.runners._multimodal import id_outputs, pairs_of, read_ids, rotary_outputs, tolerance

__all__ = ["run", "run_diagonal", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    return run_diagonal(case, "videorope", float(case.option("scale_factor", 2.0)))


def run_diagonal(case: Case, name: str, scale: float) -> dict[str, Tensor]:
    chosen = scheme(name, block_options={"scale": scale})
    layout = read_ids(case, chosen)
    sections = tuple(case.option("mrope_section"))
    allocation = chosen.allocate(pairs_of(case), sections=sections)
    outputs = id_outputs(case, {"position_ids": layout})
    # both references read the delta off row t alone
    time = layout.position_ids()[:1]
    outputs["rope_deltas"] = time[0].masked_fill(~layout.mask, -1).amax(1, keepdim=True) + 1 - layout.mask.shape[1]
    outputs |= rotary_outputs(case, layout.position_ids(), layout.mask, allocation)
    if case.wants("axis_map_peer"):
        shifted = allocation.axis.roll(1)
        shifted[0] = 0
        shifted[2 * sections[1] :] = 0
        outputs["axis_map_peer"] = shifted
    return outputs
