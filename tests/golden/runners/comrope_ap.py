"""ComRoPE-AP of Longin-Yu/ComRoPE."""

from __future__ import annotations

from torch import Tensor

from tests.golden.case import Case
from tests.golden.runners import _comrope
from tests.golden.runners._comrope import tolerance as tolerance


def run(case: Case) -> dict[str, Tensor]:
    return _comrope.run(case, "comrope_ap")
