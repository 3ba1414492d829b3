"""Learnable Fourier features: features and vectors of the PyTorch port."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import fourier_layers
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-6 * max(1.0, float(reference.abs().max()))


def run(case: Case) -> dict[str, Tensor]:
    case.expect("activation", "gelu (erf)")
    x = case.input("x", torch.float64)  # (N, G, M)
    groups, size = case.option("groups"), case.option("coord_dim")
    if x.shape[-2:] != (groups, size):
        raise Unknown(f"x of shape {tuple(x.shape)} for {groups} groups of {size}")
    options = {"features": case.option("fourier_dim"), "hidden": case.option("hidden_dim"), "groups": groups}
    options["gamma"] = case.option("gamma", 1.0)  # only the start of training depends on it
    dim = case.option("dim")
    weights = fourier_layers(case.params(torch.float64))
    if groups * size > 4:
        return _pieces(weights, x, dim, options)
    stack = create_encoding("fourier", dim, 1, axes=groups * size, coordinates="raw", **options).double()
    encoding = stack.shared["fourier"]
    encoding.load_state_dict(weights)
    positions = Positions.points(x.flatten(-2))
    pe = stack.add_to_tokens(torch.zeros(1, x.shape[0], dim, dtype=torch.float64), positions)[0]
    return {"fourier": encoding.fourier(x.flatten(-2)), "pe": pe}


def _pieces(weights: dict[str, Tensor], x: Tensor, dim: int, options: dict) -> dict[str, Tensor]:
    """Positions have four axes at most; more coordinates go in one group at a time, which are independent."""
    groups = options["groups"]
    stack = create_encoding("fourier", dim // groups, 1, axes=x.shape[-1], **{**options, "groups": 1}).double()
    encoding = stack.shared["fourier"]
    encoding.load_state_dict(weights)
    return {"fourier": encoding.fourier(x)[..., 0, :], "pe": encoding.encode(x).flatten(-2)}
