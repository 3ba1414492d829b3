"""Fuzzy encoding: the table at given offsets, and at none."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-6 * max(1.0, float(reference.abs().max()))


def run(case: Case) -> dict[str, Tensor]:
    table, grid, dim = tuple(case.option("table")), tuple(case.option("grid")), case.option("dim")
    options = {"align_corners": bool(case.option("align_corners", False))}
    if case.has_option("padding_mode"):
        options["padding"] = case.expect("padding_mode", "border", "zeros")
    stack = create_encoding("fuzzy", dim, 1, train_grid=table, **options).double()
    encoding = stack.shared["fuzzy"]
    encoding.load_state_dict({"table": case.param("table", torch.float64)})
    positions = Positions.grid(*grid, dtype=torch.float64)
    offsets = case.input("offsets", torch.float64)
    if offsets.shape[1:] != positions.coords.shape[1:]:
        raise Unknown(f"offsets of shape {tuple(offsets.shape)} for a grid {grid}")
    zeros = torch.zeros(offsets.shape[0], positions.num_tokens, dim, dtype=torch.float64)
    stack.eval()
    return {
        "train": encoding.add_to_tokens(zeros, positions, offsets),
        "eval": stack.add_to_tokens(zeros[:1], positions)[0],
    }
