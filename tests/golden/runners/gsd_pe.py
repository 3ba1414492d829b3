"""Scale-MAE ground distance, SatMAE spectral groups and time stamps."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.encodings.gsd import timestamp_positions
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    if not case.has("in.gsd"):
        return 1e-6
    # the reference works in float32, where a phase of gsd * position radians is rounded
    phase = float(case.tensors["in.gsd"].abs().max()) * max(_sizes(case.config.get("grid", 1)))
    return 1e-6 + 1.2e-7 * phase


def _sizes(grid: int | list[int]) -> tuple[int, int]:
    return (grid, grid) if isinstance(grid, int) else (int(grid[0]), int(grid[1]))


def run(case: Case) -> dict[str, Tensor]:
    dim, grid = case.option("dim"), _sizes(case.option("grid"))
    if case.has("in.gsd"):
        prefix = int(bool(case.option("cls_token")))
        base, reference = float(case.option("base", 10000)), float(case.option("reference_gsd", 1.0))
        encoding = create_encoding("gsd", dim, 1, base=base, reference=reference).shared["gsd"]
        # stored relative to the reference distance already
        gsd = case.input("gsd") * reference
        if case.expect("absolute_scale", True, False):
            gsd = torch.full_like(gsd, reference)
        zeros = torch.zeros(len(gsd), prefix + grid[0] * grid[1], dim)
        return {"pe": encoding.add_to_tokens(zeros, Positions.grid(*grid, num_prefix=prefix), gsd)}
    base = float(case.option("base", 10000))
    if case.has("in.timestamps"):
        time_dim = case.option("time_dim")
        options = {"axes": 5, "extra_dims": (time_dim // 3,) * 3}
        positions = timestamp_positions(case.input("timestamps").double(), *grid)
    else:
        options = {"axes": 3, "extra_dims": (case.option("channel_dim"),)}
        positions = Positions.grid(case.option("groups"), *grid, dtype=torch.float64)
    stack = create_encoding("gsd", dim, 1, base=base, **options)
    zeros = torch.zeros(positions.coords.shape[0], positions.num_tokens, dim, dtype=torch.float64)
    return {"pe": stack.add_to_tokens(zeros, positions)}
