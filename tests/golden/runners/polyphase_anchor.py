"""Polyphase anchoring of images."""

from __future__ import annotations

from torch import Tensor

from mmpos.functional.polyphase import polyphase_anchor
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 0.0


def run(case: Case) -> dict[str, Tensor]:
    case.describe("H", "W")
    p = case.option("p", 2)
    x, index = polyphase_anchor(case.input("x"), case.option("stride"), float(p), ties="first")
    return {"x": x, "index": index}
