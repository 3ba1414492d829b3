"""RoPE-Axial: rope-vit functions and module, timm's ``RotaryEmbeddingCat``."""

from __future__ import annotations

from torch import Tensor

from mmpos import Positions, create_encoding
from tests.golden.case import Case
from tests.golden.runners._attention import attention_outputs


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 2e-4 if name.startswith("grad.") else 2e-5 if name in ("y", "scores") else 1e-5


def run(case: Case) -> dict[str, Tensor]:
    attention = case.has("in.x")
    grid = (case.option("grid_h"), case.option("grid_w"))
    if case.has("in.grid_hw"):
        assert case.grid() == grid
    num_prefix = case.option("num_prefix", 0)
    dim = case.option("dim")
    case.expect("rope_mixed", False)
    case.expect("coords", "integer index from 0")
    half = case.expect("rotate_half", True, False)
    layout = case.expect("layout", "interleaved", "half") or ("half" if half else "interleaved")
    pixels = bool(case.option("in_pixels", False))
    # timm words: grid_indexing; rope-vit words: axis_order
    order = case.expect("grid_indexing", "xy", "ij") or case.expect("axis_order", "xy", "ij") or "ij"
    options = {"layout": layout, "axis_order": order, "offset": float(case.option("grid_offset", 0.0))}
    if pixels:
        linear = case.option("linear_bands", False)
        options |= {"coordinates": "endpoints", "bands": "pixel_linear" if linear else "pixel"}
        options |= {"max_resolution": case.option("max_res", 224)}
        case.describe("temperature")
    else:
        options["theta"] = float(case.option("temperature", None) or case.option("theta"))
        case.describe("max_res", "linear_bands")
    train_grid = case.option("ref_feat_shape", None)
    if train_grid is not None:
        options["resolution"] = "rescaled"
    if not attention:
        case.describe("num_heads")
    heads = case.option("num_heads", case.tensors["in.q"].shape[1] if case.has("in.q") else 1)
    head_dim = case.option("head_dim", dim // heads) if attention else dim
    stack = create_encoding(
        "rope_axial", head_dim * heads, heads, head_dim=head_dim, train_grid=train_grid, num_prefix=num_prefix, **options
    )
    encoding = stack.shared["rope_axial"]
    positions = Positions.grid(*grid, num_prefix=num_prefix, train_grid=train_grid)
    state = stack.prepare(positions)[0]
    if attention:
        case.expect("qkv_bias", True, False)
        return attention_outputs(case, state, heads, {})
    cos, sin = (table[0, 0, num_prefix:] for table in state.prepared[0].real())
    if case.outputs()["cos"].shape[-1] == dim:  # timm stores the table once per channel
        cos, sin = (
            t.repeat_interleave(2, -1) if layout == "interleaved" else t.repeat(1, 2) for t in (cos, sin)
        )
    q, k, _ = encoding.transform_qkv(case.input("q"), case.input("k"), case.input("k"), state.prepared[0])
    frequencies = encoding.frequencies(q.device)
    return {"cos": cos, "sin": sin, "q": q, "k": k, "scores": q @ k.mT, "bands": frequencies, "inv_freq": frequencies}
