"""RoPE-Axial: rope-vit functions and module, timm's ``RotaryEmbeddingCat``."""

from __future__ import annotations

from torch import Tensor

from mmpos import Positions, create_encoding
from tests.golden.case import Case, Unknown
from tests.golden.runners._attention import attention_outputs
from tests.golden.runners._timm import BAND_OPTIONS, GRID_OPTIONS, timm_coordinates


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 2e-4 if name.startswith("grad.") else 2e-5 if name in ("y", "scores") else 1e-5


def run(case: Case) -> dict[str, Tensor]:
    attention = case.has("in.x")
    grid = (case.option("grid_h"), case.option("grid_w"))
    if case.has("in.grid_hw") and case.grid() != grid:
        raise Unknown("in.grid_hw other than grid_h, grid_w")
    num_prefix = case.option("num_prefix", 0)
    dim = case.option("dim")
    case.expect("rope_mixed", False)
    case.expect("coords", "integer index from 0")
    half = case.expect("rotate_half", True, False)
    layout = case.expect("layout", "interleaved", "half") or ("half" if half else "interleaved")
    if half is not None and half != (layout == "half"):
        raise Unknown("rotate_half that contradicts layout")
    heads = case.option("num_heads", case.tensors["in.q"].shape[1] if case.has("in.q") else 1)
    head_dim = case.option("head_dim", dim // heads) if attention else case.option("head_dim", dim)
    positions = Positions.grid(*grid, num_prefix=num_prefix)
    if case.has_option("grid_indexing") or case.has_option("in_pixels"):
        options = {"axis_order": case.expect("grid_indexing", "xy", "ij") or "ij"}
        given = {key: case.option(key) for key in BAND_OPTIONS | GRID_OPTIONS if case.has_option(key)}
        if given.get("in_pixels", True):
            linear = bool(given.get("linear_bands", False))
            options |= {"bands": "pixel_linear" if linear else "pixel", "max_resolution": given.get("max_res", 224)}
        else:
            options["theta"] = float(given.get("temperature", 10000.0))
        plain = {key: value for key, value in given.items() if key != "ref_feat_shape" or value is not None}
        if given.get("grid_type") is not None or ("ref_feat_shape" in plain and given.get("in_pixels", True)):
            # combinations that no coordinate rule of ours names: give the coordinates themselves
            positions = Positions.points(timm_coordinates(positions, given), num_prefix=num_prefix)
        elif given.get("in_pixels", True):
            options["coordinates"] = "endpoints"
        else:
            options["offset"] = float(given.get("grid_offset", 0.0))
            if plain.get("ref_feat_shape") is not None:
                options |= {"resolution": "rescaled", "train_grid": tuple(plain["ref_feat_shape"])}
    else:
        options = {"axis_order": case.expect("axis_order", "xy", "ij") or "xy", "theta": float(case.option("theta"))}
    options |= {"layout": layout, "head_dim": head_dim}
    stack = create_encoding("rope_axial", head_dim * heads, heads, num_prefix=num_prefix, **options)
    encoding = stack.shared["rope_axial"]
    state = stack.prepare(positions)[0]
    if attention:
        case.expect("qkv_bias", True, False)
        return attention_outputs(case, state, heads, {})
    cos, sin = (table[0, 0, num_prefix:] for table in state.prepared[0].real())
    if case.wants("cos") and case.outputs()["cos"].shape[-1] == head_dim:  # timm stores the table once per channel
        cos, sin = (t.repeat_interleave(2, -1) if layout == "interleaved" else t.repeat(1, 2) for t in (cos, sin))
    frequencies = encoding.frequencies(positions.coords.device)
    outputs = {"cos": cos, "sin": sin, "bands": frequencies, "inv_freq": frequencies}
    if case.has("in.q"):
        q, k, _ = encoding.transform_qkv(case.input("q"), case.input("k"), case.input("k"), state.prepared[0])
        outputs |= {"q": q, "k": k, "scores": q @ k.mT}
    return outputs
