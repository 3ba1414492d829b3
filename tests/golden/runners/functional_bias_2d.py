"""Functional bias: KERPLE and FIRE of the patch distance."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-10


def run(case: Case) -> dict[str, Tensor]:
    heads, prefix = case.option("heads"), case.option("prefix", 0)
    kind = case.expect("kind", "kerple_log", "kerple_power", "fire")
    distance = case.expect("distance", "euclidean", "manhattan", "chebyshev") or "euclidean"
    case.expect("eps", 1e-6)
    params = case.params(torch.float64)
    options = {"threshold": 1.0, "hidden": params["fc1.weight"].shape[0]} if kind == "fire" else {}
    stack = create_encoding("functional_bias", 8 * heads, heads, kind=kind, distance=distance, **options).double()
    encoding = stack.shared["functional_bias"]
    own = {name: value[None] if name in ("a", "p") else value for name, value in params.items()}
    encoding.load_state_dict(own)
    grid = (case.option("height"), case.option("width"))
    return {"bias": encoding.prepare(Positions.grid(*grid, num_prefix=prefix, dtype=torch.float64))[0]}
