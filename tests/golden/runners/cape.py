"""CaPE in six and in four degrees of freedom."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multiview import Cameras, Cape4, Cape6, Geometry, attend_views, encode, look_at_pose
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-9 if reference.dtype == torch.float64 else 1e-4


def run(case: Case) -> dict[str, Tensor]:
    heads, width, tokens = case.option("heads"), case.option("head_dim"), case.option("tokens_per_view")
    outputs = {}
    if case.has("in.p_q"):
        pose, key_pose = case.input("p_q", torch.float64), case.input("p_kv", torch.float64)
        cape = Cape4(width, heads)
        delta = case.input("delta", torch.float64)
        both = [(pose, key_pose), (pose + delta, key_pose + delta)]
        geometries = [cape.prepare(p, tokens, key_p) for p, key_p in both]
        if case.has("in.w2c"):
            outputs["pose4"] = look_at_pose(Cameras(case.input("w2c", torch.float64)))
    else:
        views, keys = Cameras(case.input("P_q", torch.float64)), Cameras(case.input("P_kv", torch.float64))
        change = case.input("T_world", torch.float64)
        moved = (views.moved(change), keys.moved(change))
        geometries = [Cape6(width).prepare(*pair) for pair in ((views, keys), moved)]
    q, k, v = (case.input(name, torch.float64).unflatten(-1, (heads, width)).transpose(1, 2) for name in "qkv")
    here, there = (attend_views(q, k, v, geometry) for geometry in geometries)
    assert (here - there).abs().max() < 1e-9
    joined = {name: _joined(x, geometries[0], name) for name, x in (("q", q), ("k", k))}
    outputs |= {"o": here, "q_enc": joined["q"], "k_enc": joined["k"], "scores_all_heads": joined["q"] @ joined["k"].mT}
    return outputs


def _joined(x: Tensor, geometry: Geometry, name: str) -> Tensor:
    return encode(x, geometry.query if name == "q" else geometry.key).transpose(1, 2).flatten(2)
