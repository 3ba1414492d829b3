"""PRoPE between views."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multiview import Cameras, Prope, attend_views, encode
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-9 if reference.dtype == torch.float64 else 1e-4


def run(case: Case) -> dict[str, Tensor]:
    size = (case.option("image_height"), case.option("image_width"))
    grid = (case.option("patches_y"), case.option("patches_x"))
    prope = Prope(case.option("head_dim"), base=case.option("freq_base"), scale=case.option("freq_scale"))

    def cameras(suffix: str) -> Cameras:
        K = case.input(f"K{suffix}", torch.float64) if case.has(f"in.K{suffix}") else None  # noqa: N806
        return Cameras(case.input(f"w2c{suffix}", torch.float64), K, None if K is None else size)

    views = cameras("")
    keys = cameras("_kv") if case.has("in.w2c_kv") else views
    q, k, v = (case.input(name, torch.float64) for name in "qkv")
    geometry = prope.prepare(views, grid, keys)
    out = attend_views(q, k, v, geometry)
    if case.has("in.T_world"):
        change = case.input("T_world", torch.float64)
        moved = prope.prepare(views.moved(change), grid, keys.moved(change))
        assert (attend_views(q, k, v, moved) - out).abs().max() < 1e-9
    return {"o": out, "q_enc": encode(q, geometry.query), "k_enc": encode(k, geometry.key)}
