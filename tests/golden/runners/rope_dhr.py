"""RoPE-DHR (CoMemo): tile tokens take the id of the thumbnail cell they cover.

The released code in both its readings.
"""

from __future__ import annotations

from torch import Tensor

from mmpos.multimodal import Text, Tiles, scheme
from tests.golden.case import Case
from tests.golden.runners._multimodal import tolerance

__all__ = ["run", "tolerance"]

VISUAL = 92546


def run(case: Case) -> dict[str, Tensor]:
    side = case.option("tokens_per_side")
    aspect = case.input("aspect").tolist()
    assert aspect == case.option("aspect", aspect)
    visual = (case.input("input_ids") == VISUAL).tolist()
    segments: list = []
    position, images = 0, iter(aspect)
    while position < len(visual):
        if visual[position]:
            across, down = next(images)
            tiles = Tiles(down, across, side)
            segments.append(tiles)
            position += (across * down + (1 if across * down > 1 else 0)) * side * side
        else:
            end = position
            while end < len(visual) and not visual[end]:
                end += 1
            segments.append(Text(end - position))
            position = end
    options = {
        "position_ids_integer": {},
        "position_ids_row_major": {"rounding": "linspace"},
        "position_ids_reference": {"rounding": "linspace", "order": "column"},
    }
    layouts = {name: scheme("rope_dhr", block_options=given).layout([segments]) for name, given in options.items()}
    outputs = {name: layout.position_ids()[0, 0] for name, layout in layouts.items()}
    return outputs | {"next_decode_id": layouts["position_ids_integer"].next_ids()[0, 0]}
