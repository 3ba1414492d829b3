"""1-D raster ids of LLaVA and InternVL style decoders."""

from __future__ import annotations

from torch import Tensor

from mmpos.multimodal import scheme
from tests.golden.case import Case
from tests.golden.runners._multimodal import id_outputs, pairs_of, read_ids, rotary_outputs, tolerance

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    case.expect("layout", "half-split (rotate_half)")
    raster = scheme("raster")
    layout = read_ids(case, raster)
    outputs = id_outputs(case, {"position_ids": layout, "position_ids_3axis": layout})
    return outputs | rotary_outputs(case, layout.position_ids(), layout.mask, raster.allocate(pairs_of(case)))
