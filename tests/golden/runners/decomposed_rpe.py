"""Decomposed relative positions of Hugging Face ViTDet."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import decomposed_tables
from mmpos.encodings.decomposed_rpe import decomposed_bias
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-10 if reference.dtype == torch.float64 else 2e-5


def run(case: Case) -> dict[str, Tensor]:
    q_grid, k_grid = tuple(case.option("q_grid")), tuple(case.option("k_grid"))
    head_dim = case.option("head_dim")
    q = case.input("q", torch.float64)[:, None]  # batch and heads are one axis there
    state = decomposed_tables(case.params(torch.float64))
    tables = [state["tables.0"], state["tables.1"]]
    bias = decomposed_bias(q, tables, q_grid, k_grid)
    if q_grid == k_grid and all(len(table) % 2 for table in tables):  # the encoding covers what a model has
        train = tuple((len(table) + 1) // 2 for table in tables)
        stack = create_encoding("decomposed_rpe", head_dim, 1, train_grid=train).double()
        encoding = stack.layers[0]["decomposed_rpe"]
        encoding.load_state_dict(state)
        own = encoding.logit_bias(q, q, stack.prepare(Positions.grid(*q_grid))[0].prepared[0])
        if not torch.equal(own, bias):
            raise ValueError("the encoding and the function differ")
    return {"logit_bias": bias[:, 0]}
