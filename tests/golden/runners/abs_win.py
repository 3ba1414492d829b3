"""Absolute win: timm Hiera and Hugging Face SAM2."""

from __future__ import annotations

from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import abs_win_tables
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 2e-5


def run(case: Case) -> dict[str, Tensor]:
    grid, dim = tuple(case.option("grid")), case.option("dim")
    case.expect("interpolation", "bicubic")
    case.expect("align_corners", False)
    stack = create_encoding(
        "abs_win",
        dim,
        1,
        train_grid=case.option("global_size"),
        window=case.option("window"),
        antialias=case.option("antialias"),
    )
    encoding = stack.shared["abs_win"]
    encoding.load_state_dict(abs_win_tables(case.params()))
    values = encoding.values(Positions.grid(*grid))
    return {"pos": values if case.outputs()["pos"].dim() == 3 else values.unflatten(1, grid)}
