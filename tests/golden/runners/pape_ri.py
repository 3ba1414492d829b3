"""PaPE-RI: the column builder of the released code, with a key mask where the case has one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.checkpoints import pape_ri_layer
from mmpos.functional.parabolic import reference_columns_invariant
from tests.golden.case import Case, Unknown
from tests.golden.runners.pape import attention_of, columns_of, pad_columns, tolerance

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    if case.option("num_parabolas", None) is not None:
        raise Unknown(f"config.num_parabolas={case.option('num_parabolas')}")
    scales = case.buffer("position_scales", torch.float64)
    weights = pape_ri_layer({**case.params(torch.float64), "position_scales": scales})
    stack, positions, _ = columns_of(case, "pape_ri", weights, {})
    encoding = stack.layers[0]["pape_ri"]
    hidden = case.input("hidden", torch.float64)
    a = F.softplus(encoding.curvature(hidden)).mT
    centred = encoding.prepare(positions).coords
    constant = -a * encoding.scales[:, None] ** 2 * (centred**2).sum(-1)
    outputs = attention_of(case, stack, positions, constant)
    queries, keys = reference_columns_invariant(case.input("positions").double(), a, encoding.scales)
    outputs["query_aug"] = pad_columns(case.input("query", torch.float64), queries)
    outputs["key_aug"] = pad_columns(case.input("key", torch.float64), keys)
    return outputs
