"""Rotary encodings of videos and points: OctGPT, rotary-embedding-torch, LaVie, VLM decoders, V-JEPA2."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.encodings.base import PositionEncoding
from mmpos.functional.rope_3d import octgpt_frames
from mmpos.functional.rotary import Rotation, directed_frequencies
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-9 if reference.dtype == torch.float64 else 2e-5 if name == "scores" else 1e-5


def run(case: Case) -> dict[str, Tensor]:
    mode = case.option("mode")
    modes = {
        "axial_separate": _axial,
        "mixed": _mixed,
        "temporal_partial": _temporal,
        "shared_chunked": _shared,
        "shared_interleaved": _shared,
        "shared_videorope": _shared,
        "vjepa2_compat": _vjepa2,
    }
    if mode not in modes:
        raise Unknown(f"config.mode={mode!r}")
    return modes[mode](case)


def _encoding(case: Case, head_dim: int, heads: int, axes: int, **options: Any) -> PositionEncoding:
    layout = case.expect("layout", "interleaved", "half")
    options |= {} if layout is None else {"layout": layout}
    stack = create_encoding("rope_3d", head_dim * heads, heads, head_dim=head_dim, axes=axes, **options)
    return stack.shared["rope_3d"]


def _apply(case: Case, encoding: PositionEncoding, prepared: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rotated q and k with the leading dimensions they came with, their scores, and the tables as stored."""
    for name in ("q", "k"):
        if case.has(f"in.{name}"):
            x = case.input(name)
            four = x if x.dim() == 4 else x[None] if x.dim() == 3 else x[None, None]
            outputs[name] = encoding.transform_qkv(four, four, four, prepared)[0].reshape(x.shape)
    if "q" in outputs and "k" in outputs:
        outputs["scores"] = outputs["q"] @ outputs["k"].mT
    if isinstance(prepared, Rotation):
        for name, table in (("cos", prepared.cos), ("sin", prepared.sin)):
            if case.wants(name):
                outputs[name] = _as_stored(table, case.outputs()[name], prepared.layout)
    return outputs


def _as_stored(table: Tensor, reference: Tensor, layout: str) -> Tensor:
    """Drop dimensions of size one that the case does not keep; repeat per channel when the case does."""
    if reference.shape[-1] == 2 * table.shape[-1]:
        table = table.repeat(1, 1, 1, 2) if layout == "half" else table.repeat_interleave(2, -1)
    for dim in (1, 0):
        if table.dim() > reference.dim() and table.shape[dim] == 1:
            table = table.squeeze(dim)
    return table


def _axial(case: Case) -> dict[str, Tensor]:
    if case.has_option("per_axis_dim"):
        return _lucidrains(case)
    axes = case.option("num_axes", 3)
    head_dim = case.option("dim", None) or case.option("head_dim")
    sections = case.option("section_channels", None) or case.option("axes_dim", None)
    case.expect("axis_order", "xyz", "thw", "zyx", "dhw", "hw", "xy")  # sections and in.pos name the axes in one order
    encoding = _encoding(
        case, head_dim, case.option("num_heads", 1), axes, sections=sections, theta=float(case.option("theta"))
    )
    pos = case.input("pos")
    prepared = encoding.prepare(Positions.points(pos))
    return _apply(case, encoding, prepared, {"inv_freq": encoding.ladder(0)})


def _lucidrains(case: Case) -> dict[str, Tensor]:
    width, axes, grid = case.option("per_axis_dim"), case.option("num_axes"), case.option("grid")
    kind = case.expect("freqs_for", "lang", "pixel") or "lang"
    x = case.input("x")
    options: dict[str, Any] = {"sections": (width,) * axes, "theta": float(case.option("theta", 10000.0))}
    if kind == "pixel":
        options |= {"bands": "pixel_linear", "coordinates": "endpoints", "max_resolution": case.option("max_freq", 10)}
    case.describe("max_freq")
    encoding = _encoding(case, x.shape[-1], 1, axes, **options)
    positions = Positions.grid(*grid)
    prepared = encoding.prepare(positions)
    tokens = x.flatten(1, -2)[:, None]
    turned = encoding.transform_qkv(tokens, tokens, tokens, prepared)[0]
    angles = encoding.angles(positions)[0][0, 0].repeat_interleave(2, -1)
    return {"x": turned[:, 0].reshape(x.shape), "freqs": angles.unflatten(0, tuple(grid))}


def _temporal(case: Case) -> dict[str, Tensor]:
    encoding = _encoding(
        case,
        case.option("head_dim"),
        case.option("num_heads"),
        1,
        sections=(case.option("rotary_dim"),),
        theta=float(case.option("theta", 10000.0)),
    )
    prepared = encoding.prepare(Positions.grid(case.option("frames")))
    return _apply(case, encoding, prepared, {"inv_freq": encoding.ladder(0)})


def _shared(case: Case) -> dict[str, Tensor]:
    case.expect("axis_order", "thw")
    encoding = _encoding(
        case,
        case.option("dim", None) or case.option("head_dim"),
        case.option("num_heads", 1),
        3,
        split=case.option("mode").removeprefix("shared_"),
        sections=case.option("mrope_section"),
        theta=float(case.option("theta")),
    )
    ids = case.input("pos_thw").movedim(0, -1)
    prepared = encoding.prepare(Positions.points(ids))
    return _apply(case, encoding, prepared, {"inv_freq": encoding.ladder(0)})


def _mixed(case: Case) -> dict[str, Tensor]:
    heads, dim, axes = case.option("num_heads"), case.option("dim"), case.option("num_axes", 3)
    theta = float(case.option("theta"))
    layout = case.expect("layout", "interleaved") or "interleaved"
    case.expect("axis_order", "xyz")
    stack = create_encoding(
        "rope_mixed", dim * heads, heads, head_dim=dim, axes=axes, theta=theta, layout=layout, init="octgpt"
    )
    encoding = stack.layers[0]["rope_mixed"]
    encoding.load_state_dict({"freqs": case.param("freqs")})
    prepared = encoding.prepare(Positions.points(case.input("pos")))
    outputs: dict[str, Tensor] = {}
    if case.has("in.init_phi_theta"):
        azimuth, polar = case.input("init_phi_theta").unbind(-1)
        outputs["init_freqs"] = directed_frequencies(octgpt_frames(azimuth, polar), dim // 2, theta)
    return _apply(case, encoding, prepared, outputs)


def _vjepa2(case: Case) -> dict[str, Tensor]:
    head_dim, frames, grid = (
        case.option("dim", None) or case.option("head_dim"),
        case.option("frames"),
        case.option("grid"),
    )
    encoding = _encoding(
        case,
        head_dim,
        case.option("num_heads"),
        3,
        vjepa2_compat=True,
        sections=case.option("axis_dims"),
        theta=float(case.option("theta")),
    )
    sizes = (frames, *grid) if isinstance(grid, list) else (frames, grid, grid)
    positions = Positions.grid(*sizes)
    ids = case.input("pos_thw").reshape(3, -1).T
    if not torch.equal(positions.coords[0], ids.to(positions.coords.dtype)):
        if ids.shape != positions.coords[0].shape:
            raise Unknown(f"pos_thw {tuple(ids.shape)} beside grid {sizes}")
        positions = Positions.points(ids)
    assert math.prod(sizes) == positions.num_tokens
    return _apply(case, encoding, encoding.prepare(positions), {})
