"""ALiBi-2D: CROMA, the coordinate form of PAPE, slopes."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, attend, create_encoding
from mmpos.functional.bias import alibi_slopes
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    # the attention of the reference is float64 around a float32 bias
    return 2e-5 if reference.dtype == torch.float32 or name == "attention" else 1e-10


def run(case: Case) -> dict[str, Tensor]:
    heads = case.option("heads")
    if any(name.startswith("slopes.heads") for name in case.outputs()):
        return {f"slopes.heads{count}": alibi_slopes(count, dtype=torch.float64) for count in heads}
    if case.has("in.positions"):
        points = case.input("positions")
        case.describe("height", "width", "head_dim")
        stack = create_encoding("alibi_2d", 8 * heads, heads, axes=points.shape[-1])
        state = stack.prepare(Positions.points(points))[0]
        if case.has("in.q"):
            q, k, v = (case.input(name, torch.float64) for name in "qkv")
            return {"attention": attend(q, k, v, state)}
        return {"bias": state.prepared[0]}
    if not isinstance(heads, list):
        stack = create_encoding("alibi_2d", 8 * heads, heads)
        return {"bias": stack.prepare(Positions.grid(case.option("height"), case.option("width")))[0].prepared[0]}
    positions = Positions.grid(case.option("height"), case.option("width"))
    stacks = {count: create_encoding("alibi_2d", 8 * count, count) for count in heads}
    return {f"bias.heads{count}": stack.prepare(positions)[0].prepared[0] for count, stack in stacks.items()}
