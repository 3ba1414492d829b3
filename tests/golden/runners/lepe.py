"""LePE attention of CSWin: stripes, padded stripes of the dense-prediction code, and a whole block."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions
from mmpos.checkpoints import cswin_block, lepe_weights
from mmpos.encodings._raster import Raster
from mmpos.functional.grid_conv import depthwise
from mmpos.functional.windows import split_windows
from mmpos.models.cswin import CSWinBlock, StripeAttention
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-10 if reference.dtype == torch.float64 else 2e-5


def run(case: Case) -> dict[str, Tensor]:
    if case.has_option("mlp_ratio"):
        return _block(case)
    heads, dim, split = case.option("heads"), case.option("dim"), case.option("split")
    case.expect("scale", "head_dim**-0.5")
    index = case.expect("idx", -1, 0, 1)
    qkv = case.input("qkv", torch.float64)
    if case.has_option("resolution"):
        resolution = case.option("resolution")
        grid = (resolution, resolution) if isinstance(resolution, int) else tuple(resolution)
    else:  # maps (B, 3, C, h, w)
        grid = (case.option("height"), case.option("width"))
        qkv = qkv.transpose(0, 1).flatten(-2).transpose(-1, -2)
    stripe = {-1: (None, None), 0: (None, split), 1: (split, None)}[index]
    attention = StripeAttention(dim, heads, stripe, padded_keys="attend").double()
    weights = lepe_weights(case.params(torch.float64))
    attention.encoding.layers[0]["lepe"].load_state_dict(weights)
    out = {"x": attention(qkv, grid)}
    if case.wants("v_windows") or case.wants("lepe_windows"):
        window = (stripe[0] or grid[0], stripe[1] or grid[1])
        cut = split_windows(qkv[2].unflatten(1, grid), window)
        raster = Raster.of(Positions.grid(*window), "lepe")
        term = raster.tokens(depthwise(raster.maps(cut), weights["weight"], weights["bias"]))
        names = {"v_windows": cut, "lepe_windows": term}
        out |= {name: t.unflatten(-1, (heads, -1)).transpose(1, 2) for name, t in names.items()}
    return out


def _block(case: Case) -> dict[str, Tensor]:
    dim, heads, split = case.option("dim"), case.option("heads"), case.option("split")
    resolution = case.option("resolution")
    grid = (resolution, resolution) if isinstance(resolution, int) else tuple(resolution)
    case.expect("act", "gelu(exact)")
    case.expect("ln_eps", 1e-5)
    alone = case.option("last_stage", False) or resolution == split
    model = CSWinBlock(dim, heads, None if alone else split, mlp_ratio=case.option("mlp_ratio"), padded_keys="attend")
    model.load_state_dict(cswin_block(case.params()))
    return {"x": model.double()(case.input("x", torch.float64), grid)}
