"""GTA: attention between views, a whole layer, and images alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.multiview import Cameras, Gta, attend_views, encode, gta_image, spherical_matrices
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-9 if reference.dtype == torch.float64 else 1e-4


def run(case: Case) -> dict[str, Tensor]:
    if case.has_option("grid"):
        return _image(case)
    if case.has_option("dim"):
        return _layer(case)
    case.describe("heads", "head_dim", "so2_nfreqs", "so3_max_degree")
    case.expect("euclid", False)
    gta = _module(case, float(case.input("trans_coeff", torch.float64)))
    change = case.input("T_world", torch.float64) if case.has("in.T_world") else None
    keys, key_coords = Cameras(case.input("w2c_kv", torch.float64)), case.input("coord_kv", torch.float64)
    q, k, v = (case.input(name, torch.float64) for name in "qkv")
    outputs = {}
    views, coords = keys, key_coords
    if case.has("in.w2c_q"):
        views, coords = Cameras(case.input("w2c_q", torch.float64)), case.input("coord_q", torch.float64)
    geometry = gta.prepare(views, key_cameras=keys, coords=coords, key_coords=key_coords)
    outputs["o"] = attend_views(q, k, v, geometry)
    scores = encode(q, geometry.query) @ encode(k, geometry.key).mT * q.shape[-1] ** -0.5
    outputs["attn"] = scores.softmax(-1)
    if change is not None:
        moved = gta.prepare(views.moved(change), key_cameras=keys.moved(change), coords=coords, key_coords=key_coords)
        assert (attend_views(q, k, v, moved) - outputs["o"]).abs().max() < 1e-9
    outputs["D1_kv"], outputs["D2_kv"] = spherical_matrices(keys.c2w[..., :3, :3])
    return outputs


def _module(case: Case, trans_coeff: float) -> Gta:
    gta = Gta(
        case.option("f_dims"),
        max_freq=case.option("max_freq", 1),
        shared_freqs=case.option("shared_freqs", False),
        values=case.option("v_transform", True),
    ).double()
    torch.nn.init.constant_(gta.trans_coeff, trans_coeff)
    return gta.requires_grad_(False)


def _image(case: Case) -> dict[str, Tensor]:
    geometry = gta_image(
        case.option("grid"), case.option("head_dim"), base=case.option("base"), values=case.option("v_transform")
    )
    q, k, v = (case.input(name, torch.float64) for name in "qkv")
    return {"o": attend_views(q, k, v, geometry), "q_enc": encode(q, geometry.query)}


def _layer(case: Case) -> dict[str, Tensor]:
    case.describe("dim", "so2_nfreqs")
    params = case.params(torch.float64)
    assert ("to_qkv.bias" in params) == case.option("qkv_bias")
    gta = _module(case, float(params["trans_coeff"]))
    heads, width = case.option("heads"), case.option("head_dim")
    q, k, v = (
        part.unflatten(-1, (heads, width)).transpose(1, 2)
        for part in F.linear(case.input("x", torch.float64), params["to_qkv.weight"], params.get("to_qkv.bias")).chunk(
            3, -1
        )
    )
    out = attend_views(
        q, k, v, gta.prepare(Cameras(case.input("w2c", torch.float64)), coords=case.input("coord", torch.float64))
    )
    joined = out.transpose(1, 2).flatten(2)
    return {"y": F.linear(joined, params["to_out.0.weight"], params["to_out.0.bias"])}
