"""Cayley-STRING, numbers derived from the paper."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import string_cayley_layer
from mmpos.functional.rotary import rotate
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-9 if reference.dtype == torch.float64 else 2e-5


def run(case: Case) -> dict[str, Tensor]:
    heads, head_dim, axes = case.option("num_heads"), case.option("head_dim"), case.option("num_axes")
    num_prefix = case.option("num_prefix", 0)
    layout = case.expect("layout", "interleaved", "half") or "interleaved"
    skew, freqs = case.param("S"), case.param("freqs")
    stack = create_encoding(
        "string_cayley", heads * head_dim, heads, head_dim=head_dim, axes=axes, num_prefix=num_prefix, layout=layout
    ).to(skew.dtype)
    encoding = stack.layers[0]["string_cayley"]
    encoding.load_state_dict(string_cayley_layer(skew, freqs))
    rotation = stack.prepare(Positions.points(case.input("pos"), num_prefix=num_prefix))[0].prepared[0]
    q, k, _ = encoding.transform_qkv(case.input("q"), case.input("k"), case.input("k"), rotation)
    basis = encoding.orthogonal()
    # columns of RoPE(r) P, one unit vector after the other, then the outer P^T
    tokens = rotation.cos.shape[-2]
    units = torch.eye(head_dim, dtype=skew.dtype)[:, None, None].expand(-1, heads, tokens, -1)
    columns = rotate(units, rotation).permute(1, 2, 3, 0)[None, :, num_prefix:]
    return {"P": basis, "q": q, "k": k, "scores": q @ k.mT, "R_full": basis.mT[None, :, None] @ columns}
