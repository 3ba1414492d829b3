"""Attention of CvT with convolutional projection, evaluation mode."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions
from mmpos.checkpoints import cvt_attention
from mmpos.models.cvt import CvtAttention
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-10 if reference.dtype == torch.float64 else 2e-5


def run(case: Case) -> dict[str, Tensor]:
    kernel = case.option("kernel")
    if case.option("padding", kernel // 2) != kernel // 2:
        raise Unknown(f"config.padding={case.option('padding')}")
    method = case.expect("method", "dw_bn", "avg") or "dw_bn"
    scale = case.option("scale")
    if not (scale.startswith("dim**-0.5") or scale.startswith("head_dim**-0.5")):
        raise Unknown(f"config.scale={scale!r}")
    case.expect("bn_eps", 1e-5)
    prefix = int(case.option("with_cls_token"))
    params = case.params()
    model = CvtAttention(
        case.option("dim"),
        case.option("heads"),
        kernel=kernel,
        stride_q=case.option("stride_q"),
        stride_kv=case.option("stride_kv"),
        method=method,
        qkv_bias="proj_q.bias" in params,
        scale=scale.partition("**")[0],
    )
    missing, unexpected = model.load_state_dict(cvt_attention(params), strict=False)
    if unexpected or any(not name.endswith("num_batches_tracked") for name in missing):
        raise Unknown(f"param: missing {missing}, unexpected {unexpected}")
    model = model.double().eval()
    positions = Positions.grid(case.option("height"), case.option("width"), num_prefix=prefix)
    x = case.input("x", torch.float64)
    q, k, v, _ = model.projections(x, positions)
    return {"q_conv": q, "k_conv": k, "v_conv": v, "x": model(x, positions)}
