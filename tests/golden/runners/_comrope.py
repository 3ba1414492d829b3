"""ComRoPE: position builder, blocks and rotated queries, whole attention layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos import EncodingStack, Positions, attend, create_encoding
from mmpos.checkpoints import comrope_layer
from mmpos.encodings._comrope import ComRopeNoise
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    if reference.dtype == torch.float64:
        return 1e-9
    if name.startswith("grad."):
        # float32 references are off by up to 5e-6 of their largest gradient (measured against float64; ours by 1e-6)
        return max(2e-4, 1e-5 * float(reference.abs().max()))
    return 1e-4 if name in ("y", "scores", "R_blocks", "q", "k") else 1e-5


def build(case: Case, name: str, **options: Any) -> EncodingStack:
    """Module of a case, with its parameters."""
    kind = case.expect("kind", name.removeprefix("comrope_"))
    if kind is None:
        raise Unknown("config without kind")
    heads = case.option("num_heads")
    head_dim = case.option("head_dim")
    axes = case.option("num_axes")
    dim = case.option("dim", heads * head_dim)
    stack = create_encoding(
        name, dim, heads, head_dim=head_dim, axes=axes, block_size=case.option("block_size"), **options
    )
    stack.layers[0][name].load_state_dict(comrope_layer({key: case.param(key) for key in _names(case)}))
    return stack


def _names(case: Case) -> list[str]:
    return [key for key in ("freqs", "multiplier") if case.has(f"param.{key}")]


def run(case: Case, name: str) -> dict[str, Tensor]:
    if case.has_option("grid"):
        return _positions(case, name)
    dtype = {None: None, "torch.float64": torch.float64, "torch.float32": torch.float32}[
        case.expect("dtype", "torch.float64", "torch.float32")
    ]
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype or previous)
    try:
        stack = build(case, name, coordinates="index")
        return _attention(case, name, stack) if case.has("in.x") else _rotation(case, name, stack)
    finally:
        torch.set_default_dtype(previous)


def _rotation(case: Case, name: str, stack: EncodingStack) -> dict[str, Tensor]:
    encoding = stack.layers[0][name]
    positions = Positions.points(case.input("pos"))
    q, k = case.input("q"), case.input("k")
    blocks = encoding.blocks(positions.coords)
    state = stack.prepare(positions)[0]  # gradients on: blocks
    turned_q, turned_k, _ = encoding.transform_qkv(q, k, k, state.prepared[0])
    with torch.no_grad():  # the eigenbasis: other queries and keys, the same scores
        turned = encoding.transform_qkv(q, k, k, stack.prepare(positions)[0].prepared[0])
    skew = (encoding.directions()[..., None, None] * encoding.skew()).transpose(0, 1)
    return {
        "A": skew,
        "R_blocks": blocks.transpose(1, 2),
        "q": turned_q,
        "k": turned_k,
        "scores": turned[0] @ turned[1].mT,
    }


def _attention(case: Case, name: str, stack: EncodingStack) -> dict[str, Tensor]:
    encoding = stack.layers[0][name]
    state = stack.prepare(Positions.points(case.input("pos")))[0]
    x = case.input("x")
    heads = encoding.num_heads
    weights = {
        f"{part}.{kind}": case.param(f"{part}.{kind}").clone().requires_grad_()
        for part in ("q_proj", "k_proj", "v_proj", "out_proj")
        for kind in ("weight", "bias")
        if kind == "weight" or case.has(f"param.{part}.bias")
    }

    def project(part: str, tokens: Tensor) -> Tensor:
        return F.linear(tokens, weights[f"{part}.weight"], weights.get(f"{part}.bias"))

    q, k, v = (project(part, x).unflatten(-1, (heads, -1)).transpose(1, 2) for part in ("q_proj", "k_proj", "v_proj"))
    y = project("out_proj", attend(q, k, v, state, x=x).transpose(1, 2).flatten(2))
    outputs = {"y": y}
    if case.has("in.loss_weight"):
        (y * case.input("loss_weight")).sum().backward()
        outputs |= {f"grad.{key}": value.grad for key, value in weights.items() if value.grad is not None}
        outputs["grad.freqs"] = encoding.generators.grad[:, None]
        if name == "comrope_ld":
            outputs["grad.multiplier"] = encoding.scales.grad.transpose(0, 1)[..., None, None]
    return outputs


def _positions(case: Case, name: str) -> dict[str, Tensor]:
    axes, size, frames = case.option("num_axes"), case.option("grid"), case.option("num_frames", None)
    sizes = list(size) if isinstance(size, list) else [size, size]
    if axes == 3 and len(sizes) == 2:
        if frames is None:
            raise Unknown("config num_axes=3 without num_frames")
        sizes = [frames, *sizes]
    if len(sizes) != axes:
        raise Unknown(f"config.grid={size!r} with num_axes={axes}")
    prefix = 1 if case.expect("prepend_cls", True, False) in (None, True) else 0
    block = case.option("block_size", 2)
    stack = create_encoding(
        name,
        2 * axes * block,
        2,
        axes=axes,
        block_size=block,
        prefix_position=float(case.option("cls_position", 0.5)),
        coordinates="unit" if case.expect("axis_scale", True, False) in (None, True) else "index",
        perturbation=float(case.option("perturbation_intensity", 0.0)),
        shift=float(case.option("offset_intensity", 0.0)),
        frame_norm="spatial",
    )
    encoding = stack.layers[0][name]
    positions = Positions.grid(*sizes, num_prefix=prefix)
    patches = case.input("perturb_noise") if case.has("in.perturb_noise") else None
    shift = case.input("offset_noise") if case.has("in.offset_noise") else None
    outputs = {"pos_clean": encoding.token_coordinates(positions)[0]}
    outputs["pos_noisy"] = encoding.token_coordinates(positions, ComRopeNoise(patches, shift))[0]
    return outputs
