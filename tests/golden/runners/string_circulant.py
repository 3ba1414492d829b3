"""Circulant-STRING, numbers derived from the paper."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import string_circulant_layer
from mmpos.functional.string import circulant_generators
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-9 if reference.dtype == torch.float64 else 2e-5


def run(case: Case) -> dict[str, Tensor]:
    heads, head_dim, axes = case.option("num_heads"), case.option("head_dim"), case.option("num_axes")
    num_prefix = case.option("num_prefix", 0)
    c = case.param("c")
    stack = create_encoding(
        "string_circulant",
        heads * head_dim,
        heads,
        head_dim=head_dim,
        axes=axes,
        num_prefix=num_prefix,
        block_size=case.option("block_size", head_dim),
    ).to(c.dtype)
    encoding = stack.layers[0]["string_circulant"]
    encoding.load_state_dict(string_circulant_layer(c))
    rotation = stack.prepare(Positions.points(case.input("pos"), num_prefix=num_prefix))[0].prepared[0]
    q, k, _ = encoding.transform_qkv(case.input("q"), case.input("k"), case.input("k"), rotation)
    basis = encoding.orthogonal()
    # ours stay in the Fourier basis, which scores do not see; the case stores them back in the basis of the channels
    return {"L": circulant_generators(c), "q": q @ basis, "k": k @ basis, "scores": q @ k.mT}
