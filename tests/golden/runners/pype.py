"""PyPE: concentric ids whose levels shrink with depth."""

from __future__ import annotations

from torch import Tensor

from tests.golden.case import Case
from tests.golden.runners.cca import run_rings, tolerance

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    return run_rings(case, "pype", {"jump": case.option("jump")})
