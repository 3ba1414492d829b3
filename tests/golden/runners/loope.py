"""LOOPE: visiting orders of curves, and the whole method with given weights."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import loope_layers
from mmpos.functional.curves import curve_rank
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 0.0 if not reference.is_floating_point() else 1e-6 * max(1.0, float(reference.abs().max()))


def run(case: Case) -> dict[str, Tensor]:
    if case.has("in.image"):
        return _forward(case)
    call = case.expect("call", "gilbert2d(width=w, height=h)")
    if call is None and "Hilbert" not in case.spec.get("source", ""):
        raise Unknown(f"source {case.spec.get('source')!r}")
    curve = "hilbert" if call is None else "gilbert"
    ranks = {}
    for name in case.outputs():
        match = re.fullmatch(r"rank_(\d+)x(\d+)", name)
        if match:
            ranks[name] = curve_rank(int(match[1]), int(match[2]), curve)
    return ranks


def _forward(case: Case) -> dict[str, Tensor]:
    patch, grid, channels = case.option("patch"), tuple(case.option("grid")), case.option("channels")
    kernels, strides, padding = case.option("kernels"), case.option("strides"), case.option("padding")
    later = set(kernels[1:])
    if kernels[0] != patch or strides != [patch] + [1] * len(kernels[1:]) or len(later) != 1:
        raise Unknown(f"config.kernels={kernels}, strides={strides}")
    kernel = later.pop()
    if padding != [0] + [kernel // 2] * len(kernels[1:]) or channels[0] != 5 or channels[-1] != 1:
        raise Unknown(f"config.padding={padding}, channels={channels}")
    case.expect("bn", "eval mode, eps 1e-5, 1 channel")
    options = {"kernel": kernel, "widths": channels[1:-1], "patch_size": patch, "base": case.option("base")}
    options |= {"act": case.expect("activation", "relu", "gelu", "silu", "tanh") or "relu"}
    options |= {"coord_scale": case.option("coord_scale", 1.0), "position_scale": case.option("position_scale", 1.0)}
    stack = create_encoding("loope", case.option("dim"), 1, train_grid=grid, **options).double().eval()
    encoding = stack.shared["loope"]
    encoding.load_state_dict(loope_layers(case.params(torch.float64)))
    positions = Positions.grid(*grid, dtype=torch.float64)
    if case.has("in.gilbert_rank"):
        torch.testing.assert_close(encoding.ranks(positions).long().reshape(grid), case.input("gilbert_rank"))
    image = case.input("image", torch.float64)
    shift = encoding.bias(positions, image)
    zeros = torch.zeros(image.shape[0], positions.num_tokens, encoding.dim, dtype=torch.float64)
    return {
        "context_bias": shift,
        "position": encoding.ranks(positions) + shift,
        "pos_embed": stack.add_to_tokens(zeros, positions, image=image),
    }
