"""RegionalRoPE: reference grids scaled into boxes."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multimodal.reindex import regional_positions
from tests.golden.case import Case
from tests.golden.runners.sofa import tolerance

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    grids = [(int(h), int(w)) for h, w in case.input("grids_hw")]
    positions = regional_positions(grids, case.input("boxes_wh"), case.input("align"), float(case.option("time", 0.0)))
    return {"positions_thw": positions, "lengths": torch.tensor([h * w for h, w in grids])}
