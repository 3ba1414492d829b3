"""DINOv3 rotary encoding: the original, timm's and Hugging Face's words for it."""

from __future__ import annotations

from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.functional.augment import CoordinateDraws
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 3e-2 if case.config.get("dtype") in ("torch.bfloat16", "bf16") else 1e-5


def run(case: Case) -> dict[str, Tensor]:
    head_dim = case.option("head_dim", None) or case.option("dim")
    heads = case.option("num_heads", 1)
    num_prefix = case.option("num_prefix", 0)
    grid = (case.option("grid_h"), case.option("grid_w"))
    if case.has("in.grid_hw") and case.grid() != grid:
        raise Unknown(f"in.grid_hw {case.grid()} beside grid {grid}")
    dtype = case.expect("dtype", "torch.float32", "torch.bfloat16", "fp32", "bf16")
    half = case.expect("rotate_half", True, False)
    layout = case.expect("layout", "half", "interleaved") or ("interleaved" if half is False else "half")
    order = (
        case.expect("axis_order", "yx", "xy")
        or {"ij": "yx", "xy": "xy", None: "yx"}[case.expect("grid_indexing", "ij", "xy")]
    )
    options = {
        "layout": layout,
        "axis_order": {"yx": "ij", "xy": "xy"}[order],
        "normalize": case.expect("normalize_coords", "separate", "max", "min") or "separate",
        "offset": float(case.option("grid_offset", 0.0)),
        "period_dtype": "bfloat16" if dtype in ("torch.bfloat16", "bf16") else "float32",
    }
    for ours, theirs in (("min_period", "min_period"), ("max_period", "max_period")):
        if case.option(theirs, None) is not None:
            options[ours] = float(case.option(theirs))
    # "base" in the original, "temperature" in timm (where periods win over it), "rope_theta" in the Hugging Face port
    base = [case.option(key) for key in ("base", "temperature", "rope_theta") if case.option(key, None) is not None]
    if base and ("min_period" not in options or case.config.get("temperature") is None):
        options["base"] = float(base[0])
    for ours, theirs in (("shift", "shift_coords"), ("jitter", "jitter_coords"), ("rescale", "rescale_coords")):
        for name in (theirs, f"pos_embed_{ours}"):
            if case.option(name, None) is not None:
                options[ours] = float(case.option(name))
    encoding = create_encoding("rope_dinov3", head_dim * heads, heads, head_dim=head_dim, **options).shared[
        "rope_dinov3"
    ]
    training = case.expect("training", True, False)
    draws = [case.input(name) if case.has(f"in.{name}") else None for name in ("shift", "jitter", "rescale")]
    encoding.train(bool(training))
    asked = [encoding.augmentation[name] is not None for name in ("shift", "jitter", "rescale")]
    if training and asked != [draw is not None for draw in draws]:
        raise Unknown("augmentation options and stored draws differ")
    rotation = encoding.prepare(
        Positions.grid(*grid, num_prefix=num_prefix), CoordinateDraws(*draws) if training and any(asked) else None
    )
    outputs = {"periods": encoding.periods()}
    for name, table in (("cos", rotation.cos), ("sin", rotation.sin)):
        placed = table[0, 0, num_prefix:]
        outputs[name] = placed.repeat(1, 2) if layout == "half" else placed.repeat_interleave(2, -1)
    for name in ("q", "k"):
        if case.has(f"in.{name}"):
            x = case.input(name)
            outputs[name] = encoding.transform_qkv(x, x, x, rotation)[0]
    if "q" in outputs and "k" in outputs:
        outputs["scores"] = outputs["q"].float() @ outputs["k"].float().mT
    return outputs
