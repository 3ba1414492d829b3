"""M-RoPE of Qwen2-VL and Qwen2.5-VL under both cursor rules; the relatives ERNIE-4.5-VL and GLM-4.1V."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multimodal import scheme
from tests.golden.case import Case, Unknown
from tests.golden.runners._multimodal import id_outputs, pairs_of, read_ids, rotary_outputs, tolerance

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    source = str(case.spec.get("source", ""))
    ernie, glm = "ernie4_5" in source, "glm4v" in source
    grids: dict = {}
    if ernie:
        grids["temporal_merge_size"] = 2
    if glm:
        grids["split_frames"] = True
    timed = case.has("in.second_per_grid_ts")
    if timed:
        grids["seconds_per_frame"] = case.input("second_per_grid_ts")
        options = {"tokens_per_second": float(case.option("tokens_per_second"))}
        chosen = scheme("mrope_time", block_options=options)
        truncated = scheme("mrope_time", block_options={**options, "truncate_seconds": True})
    else:
        chosen = truncated = scheme("mrope")
    hf5 = scheme(chosen.name, block_options=chosen.block_options, cursor="spatial")
    layouts = {
        "position_ids": read_ids(case, hf5 if ernie or glm else chosen, **grids),
        "position_ids_hf5": read_ids(case, hf5, **grids),
        "position_ids_hf457_truncated": read_ids(case, truncated, **grids),
    }
    layout = layouts["position_ids"]
    outputs = id_outputs(case, layouts)
    # older libraries measure the delta from the largest id and the padded length, transformers 5 from the valid length
    outputs["rope_deltas"] = _deltas(layout, padded=True)
    outputs["rope_deltas_hf5"] = _deltas(layouts["position_ids_hf5"], padded=False)
    sections = tuple(case.option("mrope_section"))
    pairs = pairs_of(case)
    if ernie:
        rows, cols, time = sections
        allocation = scheme("videorope").allocate(pairs, sections=(time, rows, cols))
    else:
        allocation = chosen.allocate(pairs, sections=sections)
    rotary = rotary_outputs(
        case, layout.position_ids(), layout.mask, allocation, layout="interleaved" if ernie or glm else "half"
    )
    if ernie:  # stored as [pairs of h, pairs of w, pairs of t]
        ladder, axis = rotary["inv_freq"], allocation.axis
        rotary["inv_freq"] = torch.cat([ladder[axis == which] for which in (1, 2, 0)])
    if not case.wants("position_ids"):
        raise Unknown("a case without position ids")
    return outputs | rotary


def _deltas(layout: object, padded: bool) -> Tensor:
    ids = layout.position_ids()  # type: ignore[attr-defined]
    mask = layout.mask  # type: ignore[attr-defined]
    largest = torch.where(mask, ids.amax(0), -1).amax(1, keepdim=True)
    return largest + 1 - (mask.shape[1] if padded else mask.sum(1, keepdim=True))
