"""Frequency scalings: one axis (Hugging Face, jquesnelle/yarn, resonance_rope), composed on 2-D grids, UltraFlux."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.encodings import encoding_class
from mmpos.functional.rope_scaling import RopeScaling, scale_frequencies
from mmpos.functional.rotary import axial_angles, inverse_frequencies, rotate, rotation_from_angles
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-5 * max(1.0, float(reference.abs().max())) if name.endswith("wavelengths") else 1e-5


def run(case: Case) -> dict[str, Tensor]:
    if case.has("in.ids"):
        return _ultraflux(case)
    if case.has("in.q"):
        return _axial_2d(case)
    return _one_axis(case)


def _one_axis(case: Case) -> dict[str, Tensor]:
    dim, base = case.option("dim"), float(case.option("base"))
    length, scale = case.option("train_len"), float(case.option("scale"))
    test_length = case.option("test_len")
    listed = {(float(fast), float(slow)) for fast, slow in case.option("betas", [])}
    freqs = case.input("base_inv_freq")
    if not torch.allclose(freqs, inverse_frequencies(dim // 2, base), rtol=1e-5, atol=0):
        raise Unknown("in.base_inv_freq that is not the ladder of base and dim")
    outputs: dict[str, Tensor] = {}
    for output in case.outputs():
        name = output.rpartition(".")[0]
        if f"{name}.inv_freq" in outputs:
            continue
        scaling = _parse(name, output, listed)
        scaled, amplitude = scale_frequencies(freqs, scaling, dim=dim, base=base, train_length=length, scale=scale)
        places = torch.arange(test_length, dtype=scaled.dtype)[:, None]
        wavelengths = 2 * math.pi / scaled
        if scaling.kind.startswith("resonance"):
            # whole wavelengths: the table repeats itself, and small angles have no rounding error
            wavelengths = wavelengths.round()
            places = places % wavelengths
        angles = places * scaled
        outputs |= {
            f"{name}.inv_freq": scaled,
            f"{name}.attention_factor": amplitude,
            f"{name}.wavelengths": wavelengths,
            f"{name}.cos": angles.cos() * amplitude,
            f"{name}.sin": angles.sin() * amplitude,
        }
    return outputs


def _parse(name: str, output: str, listed: set[tuple[float, float]]) -> RopeScaling:
    plain = ("linear", "ntk", "dynamic_ntk", "ntk_by_parts", "resonance", "resonance_linear", "resonance_ntk")
    if name in plain:
        return RopeScaling(name)
    match = re.fullmatch(r"((?:resonance_)?yarn)_([\d.]+)_([\d.]+?)(_notrunc)?", name)
    if match is None:
        raise Unknown(f"out.{output}")
    fast, slow = float(match[2]), float(match[3])
    if listed and (fast, slow) not in listed:
        raise Unknown(f"out.{output} with betas that config.betas does not list")
    return RopeScaling(match[1], beta_fast=fast, beta_slow=slow, truncate=match[4] is None)


def _axial_2d(case: Case) -> dict[str, Tensor]:
    kind = case.option("kind")
    dim, base = case.option("dim"), float(case.option("base"))
    train, grid = tuple(case.option("train_grid_hw")), tuple(case.option("grid_hw"))
    if case.grid("train_grid_hw") != train or case.grid() != grid:
        raise Unknown("in.grid_hw or in.train_grid_hw other than in the configuration")
    num_prefix = case.option("num_prefix", 0)
    case.describe("num_heads")
    betas = {"beta_fast": float(case.option("beta_fast", 32)), "beta_slow": float(case.option("beta_slow", 1))}
    layout = case.expect("layout", "interleaved", "half") or "interleaved"
    order = case.expect("axis_order", "xy", "ij") or "xy"
    case.expect("scale", "max(1, n_axis/L_axis) per axis")
    try:
        scaling = RopeScaling(kind, **betas, truncate=bool(case.option("truncate", True)))
    except ValueError as error:
        raise Unknown(f"config.kind={kind!r}") from error
    freqs = inverse_frequencies(dim // 4, base)
    per_axis = [
        scale_frequencies(freqs, scaling, dim=dim // 2, base=base, train_length=length, scale=size / length)
        for size, length in zip(grid, train, strict=True)
    ]
    (inv_y, factor_y), (inv_x, factor_x) = per_axis
    q, k = case.input("q"), case.input("k")
    positions = Positions.grid(*grid, num_prefix=num_prefix)
    angles = axial_angles(positions.coords, torch.stack([inv_y, inv_x]), order)
    factors = torch.stack([factor_y, factor_x])[:, None].expand(-1, dim // 4)
    amplitude = axial_angles(torch.ones(1, 1, 2), factors, order)
    rotation = rotation_from_angles(angles, num_prefix=num_prefix, layout=layout, amplitude=amplitude)
    outputs = {
        "inv_freq_x": inv_x,
        "inv_freq_y": inv_y,
        "attention_factor_xy": torch.stack([factor_x, factor_y]),
        "q": rotate(q, rotation),
        "k": rotate(k, rotation),
    }
    if kind in encoding_class("rope_axial").facts.resolution_rules and scaling.truncate:
        heads = q.shape[1]
        options = {"theta": base, "layout": layout, "axis_order": order, "resolution": kind, "train_grid": train}
        stack = create_encoding("rope_axial", dim * heads, heads, num_prefix=num_prefix, **options, **betas)
        state = stack.prepare(positions)[0]
        turned = stack.shared["rope_axial"].transform_qkv(q, k, k, state.prepared[0])
        outputs |= {"q": turned[0], "k": turned[1]}
    return outputs


def _ultraflux(case: Case) -> dict[str, Tensor]:
    ids = case.input("ids", torch.float64)
    widths = case.option("axes_dim")
    base = float(case.option("theta"))
    train = case.option("train_grid_hw")
    case.expect("method", "yarn")
    case.expect("axis_order", "thw")
    case.expect("layout", "interleaved")
    case.describe("grid_hw", "num_text")  # the ids hold them
    constants = {"betas": tuple(case.option("beta", (1.25, 0.75))), "gammas": tuple(case.option("gamma", (16.0, 2.0)))}
    snapped = bool(case.option("resonance"))
    scaling = RopeScaling("ultraflux" if snapped else "ntk_by_parts", **constants)
    cos, sin = [], []
    for axis, width in enumerate(widths):
        freqs = inverse_frequencies(width // 2, base, dtype=torch.float64)
        amplitude: Tensor | float = 1.0
        span = float(ids[:, axis].max() - ids[:, axis].min() + 1)
        if axis > 0 and span > train[axis - 1]:  # time has no training window
            length = train[axis - 1]
            freqs, amplitude = scale_frequencies(
                freqs, scaling, dim=width, base=base, train_length=length, scale=span / length
            )
            if not snapped:
                amplitude = 0.1 * math.log(span / length) + 1
        angles = (ids[:, axis, None] * freqs).repeat_interleave(2, -1)
        cos.append(angles.cos() * amplitude)
        sin.append(angles.sin() * amplitude)
    return {"cos": torch.cat(cos, -1).float(), "sin": torch.cat(sin, -1).float()}
