"""LookHere: the bias of every layer, and what it hides."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    # the reference rounds to bfloat16: half a unit in the last place of 8 bits, at the largest value
    return 2.0**-8 * float(reference.abs().max()) if name == "bias" else 0.0


def run(case: Case) -> dict[str, Tensor]:
    heads, depth = case.option("heads"), case.option("depth", 1)
    case.expect("num_prefix", 1)
    stack = create_encoding(
        "lookhere",
        8 * heads,
        heads,
        depth,
        num_prefix=1,
        directions=case.option("head_directions"),
        global_slope=case.option("global_slope"),
        layer_slopes=tuple(case.option("layer_slopes")),
        distance=case.expect("distance", "euclidean", "sqrt", "square") or "euclidean",
    )
    encoding = stack.shared["lookhere"]
    q = torch.zeros(1, heads, 1, 1)
    states = stack.prepare(Positions.grid(*case.option("grid"), num_prefix=1))
    bias = torch.cat([encoding.logit_bias(q, q, state.prepared[0]) for state in states])
    hidden = bias < -1e20
    rounded = bias.masked_fill(hidden, 0.0).to(torch.bfloat16).float()
    return {"bias": rounded, "masked": hidden.to(torch.uint8)}
