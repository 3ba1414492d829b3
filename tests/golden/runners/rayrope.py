"""RayRoPE: attention, known depths, other rays and codes, and a layer with its depth head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.multiview import Cameras, RayRope
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    if name.startswith("y"):
        return 1e-6  # the norms of the reference run in float32
    return 1e-9 if reference.dtype == torch.float64 else 1e-4


def run(case: Case) -> dict[str, Tensor]:
    size = (case.option("image_height"), case.option("image_width"))
    grid = (case.option("patches_y"), case.option("patches_x"))
    options = {
        "rays": case.option("num_rays_per_patch", 3),
        "kind": case.option("pos_enc_type", "d_pj+0_3d"),
        "depth_code": case.option("denc_type", "d"),
        "base": case.option("freq_base", 3.0),
        "values": case.option("apply_vo", True),
    }
    width = case.option("head_dim")
    if case.has_option("embed_dim"):
        return _layer(case, width, size, grid, options)
    known = case.option("depth_type", "predict_dsig")
    if known not in ("predict_dsig", "known+predict_dsig"):
        raise Unknown(f"config.depth_type={known!r}")
    cross = case.has("in.w2c_q")

    def cameras(suffix: str) -> Cameras:
        return Cameras(case.input(f"w2c{suffix}", torch.float64), case.input(f"K{suffix}", torch.float64), size)

    views = cameras("_q" if cross else "")
    predicted = case.input("predicted_d_q" if cross else "predicted_d", torch.float64)
    keys = (
        {"key_cameras": cameras("_kv"), "key_predicted": case.input("predicted_d_kv", torch.float64)} if cross else {}
    )
    depths = None
    outputs: dict[str, Tensor] = {}
    if known.startswith("known"):
        rope = RayRope(width, **options)
        depths = rope.known_depths(case.input("context_depths", torch.float64)[..., 0], grid, corner_depths=True)
        near, far = rope.interval(predicted[:, depths.shape[1] :])
        both = [torch.cat([depths, end], 1) for end in (near, far)]
        outputs["ray_depths"] = torch.stack([end.unflatten(1, (views.num_views, -1)) for end in both])[..., None]
    q, k, v = (case.input(name, torch.float64) for name in "qkv")
    change = case.input("T_world", torch.float64)
    for name, shortcut in (("o", 0.01), ("o_exact_expectation", 0.0)):
        rope = RayRope(width, shortcut=shortcut, **options)
        geometry = rope.prepare(views, grid, predicted, depths=depths, **keys)
        outputs[name] = rope.attend(q, k, v, geometry)
        moved = {**keys, "key_cameras": keys["key_cameras"].moved(change)} if cross else {}
        there = rope.prepare(views.moved(change), grid, predicted, depths=depths, **moved)
        assert (rope.attend(q, k, v, there) - outputs[name]).abs().max() < 1e-6
        if shortcut:
            outputs |= {"cos_q": geometry.query_cos, "sin_q": geometry.query_sin}
            outputs |= {"cos_kv": geometry.key_cos, "sin_kv": geometry.key_sin}
    return outputs


def _layer(case: Case, width: int, size: tuple[int, int], grid: tuple[int, int], options: dict) -> dict[str, Tensor]:
    case.describe("embed_dim", "qk_norm_kind")
    case.expect("predict_d", "predict_dsig")
    case.expect("bias", False)
    case.expect("qk_norm", True)
    heads, x = case.option("num_heads"), case.input("x", torch.float64)
    params = case.params(torch.float64)
    views, change = (
        Cameras(case.input("w2c", torch.float64), case.input("K", torch.float64), size),
        case.input("T_world", torch.float64),
    )
    projected = F.linear(x, params["in_proj_weight"]).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (heads, width)).transpose(1, 2) for part in projected)
    q, k = (F.rms_norm(t, (width,), params[f"{n}_norm.weight"], 1e-5) for t, n in ((q, "q"), (k, "k")))
    outputs: dict[str, Tensor] = {}
    for name, shortcut in (("y", 0.01), ("y_exact_expectation", 0.0)):
        rope = RayRope(width, x.shape[-1], shortcut=shortcut, **options).double()
        rope.depth.load_state_dict({"weight": params["d_proj_weight"], "bias": params["d_proj_bias"]})
        rope.requires_grad_(False)
        outputs["predicted_d"] = rope.predict(x)
        out = [
            rope.attend(q, k, v, rope.prepare(cameras, grid, outputs["predicted_d"]))
            for cameras in (views, views.moved(change))
        ]
        assert (out[0] - out[1]).abs().max() < 1e-6
        outputs[name] = F.linear(out[0].transpose(1, 2).flatten(2), params["out_proj.weight"])
    return outputs
