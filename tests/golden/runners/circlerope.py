"""Circle-RoPE: rings at right angles to (1, 1, 1); the layers that AGE leaves on M-RoPE; one ring per frame."""

from __future__ import annotations

from torch import Tensor

from mmpos.multimodal import scheme
from tests.golden.case import Case
from tests.golden.runners._multimodal import id_outputs, pairs_of, read_ids, rotary_outputs, tolerance

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    given = dict(case.option("circle_rope", {}))
    for key in ("radius", "alpha", "move_to_origin", "method"):
        if case.has_option(key):
            given[key] = case.option(key)
    known = {"radius", "alpha", "move_to_origin", "method", "dff_rate"}
    if set(given) - known or given.get("method", "circle") != "circle":
        from tests.golden.case import Unknown

        raise Unknown(f"circle options {given}")
    options = {
        "radius": given["radius"],
        "alpha": float(given["alpha"]),
        "centred": bool(given.get("move_to_origin", True)),
        "projected": float(given.get("dff_rate", 0.0)),
    }
    chosen = scheme("circlerope", block_options=options)
    layout = read_ids(case, chosen)
    plain = read_ids(case, scheme("mrope"))
    outputs = id_outputs(case, {"position_ids": layout, "position_ids_mrope_layers": plain})
    ids = layout.position_ids()
    outputs["rope_deltas"] = (
        ids.amax(0).masked_fill(~layout.mask, -1e9).amax(1, keepdim=True) + 1 - layout.mask.shape[1]
    )
    allocation = chosen.allocate(pairs_of(case), sections=tuple(case.option("mrope_section")))
    return outputs | rotary_outputs(case, ids, layout.mask, allocation)
