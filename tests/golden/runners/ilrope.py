"""IL-RoPE: local rows and columns under a growing shift.

Text on (n, n, n) as the peer has it or on (n, 0, 0) as the papers do.
"""

from __future__ import annotations

from torch import Tensor

from mmpos.multimodal import scheme
from tests.golden.case import Case
from tests.golden.runners._multimodal import id_outputs, pairs_of, read_ids, rotary_outputs, tolerance
from tests.golden.runners.mrope import _deltas

__all__ = ["run", "run_shifted", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    return run_shifted(case, "interleaved")


def run_shifted(case: Case, allocation: str) -> dict[str, Tensor]:
    everywhere = scheme("omnirope")
    layout = read_ids(case, everywhere)
    paper = read_ids(case, scheme("omnirope", text="first"))
    outputs = id_outputs(case, {"position_ids": layout, "position_ids_paper_text_zero": paper})
    outputs["rope_deltas"] = _deltas(layout, padded=True)
    chosen = scheme("omnirope", allocation=allocation)
    pairs = chosen.allocate(pairs_of(case), sections=tuple(case.option("mrope_section")))
    return outputs | rotary_outputs(case, layout.position_ids(), layout.mask, pairs)
