"""HoPE (video): the diagonal layout with a time scale gamma, time pairs unrotated."""

from __future__ import annotations

from torch import Tensor

from tests.golden.case import Case
from tests.golden.runners._multimodal import tolerance
from tests.golden.runners.videorope import run_diagonal

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    return run_diagonal(case, "hope", float(case.option("gamma")))
