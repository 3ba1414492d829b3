"""LieRE: tables, rotated queries and a whole attention layer of StanfordMIMI/LieRE."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos import Positions, attend, create_encoding
from mmpos.checkpoints import liere_layers
from mmpos.functional.rotary import Rotation, rotate, transform_blocks
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    if reference.dtype == torch.float64:
        return 1e-9
    # scores are sums of products of rotated vectors, each of which carries the error of the table
    return 2e-4 if name.startswith("grad.") else 1e-4 if name in ("y", "scores") else 5e-5


def run(case: Case) -> dict[str, Tensor]:
    heads, head_dim, size = case.option("num_heads"), case.option("head_dim"), case.option("generator_dim")
    axes, num_prefix = case.option("num_axes"), case.option("num_prefix", 0)
    per_head = case.expect("per_head", True, False)
    per_head = True if per_head is None else per_head
    case.expect("per_layer", True, False)
    case.expect("phase_type", "naver")
    blocks = head_dim // size
    if case.has_option("blocks_per_head"):
        case.expect("blocks_per_head", blocks)
    if case.has_option("unrotated_channels"):
        case.expect("unrotated_channels", head_dim - blocks * size)
    raw = case.param("generator_raw_params")
    if raw.shape[1] != 1:
        raise Unknown(f"generator_raw_params of {raw.shape[1]} layers")
    image, train, patch = (case.option(key) for key in ("image_size", "train_image_size", "patch_size"))
    if case.has("in.image_size"):
        stored = [int(n) for n in case.input("image_size")]
        if stored != list(image):
            raise Unknown(f"in.image_size {stored} beside config.image_size {image}")
    grid = tuple(n // p for n, p in zip(image, patch, strict=True))
    train_grid = tuple(n // p for n, p in zip(train, patch, strict=True))
    options = {"head_dim": head_dim, "axes": axes, "train_grid": train_grid, "num_prefix": num_prefix}
    stack = create_encoding("liere", heads * head_dim, heads, generator_dim=size, per_head=per_head, **options)
    stack = stack.to(raw.dtype)
    encoding = stack.layers[0]["liere"]
    encoding.load_state_dict(liere_layers(raw, num_heads=heads if per_head else 1)[0])
    positions = Positions.grid(*grid, num_prefix=num_prefix, dtype=raw.dtype)
    if case.has("in.pos"):
        pos = case.input("pos")
        if float((encoding.coordinate_values(positions)[0] - pos).abs().max()) > 1e-6:
            raise Unknown("in.pos is not the linspace of the grid")
    state = stack.prepare(positions)[0]
    if case.has("in.x"):
        return _attention(case, encoding, state, heads)
    table, prefix = state.prepared[0]
    q, k, _ = encoding.transform_qkv(case.input("q"), case.input("k"), case.input("k"), state.prepared[0])
    return {"q": q, "k": k, "scores": q @ k.mT, "R_blocks": _blocks(table, prefix, blocks, size, positions.num_tokens)}


def _blocks(table: Rotation | Tensor, prefix: int, blocks: int, size: int, tokens: int) -> Tensor:
    """The matrices that act, read off by transforming unit vectors. Shape: ``(P + N, heads or 1, m, g, g)``."""
    heads = table.cos.shape[1] if isinstance(table, Rotation) else table.shape[1]
    dtype = table.cos.dtype if isinstance(table, Rotation) else table.dtype
    units = torch.eye(size, dtype=dtype).repeat(1, blocks)[:, None, None].expand(-1, heads, tokens, -1)
    columns = rotate(units, table) if isinstance(table, Rotation) else transform_blocks(units, table, prefix)
    return columns.unflatten(-1, (blocks, size)).permute(2, 1, 3, 4, 0)


def _attention(case: Case, encoding: torch.nn.Module, state: object, heads: int) -> dict[str, Tensor]:
    x = case.input("x")
    weight = case.param("to_qkv.weight").clone().requires_grad_()
    bias = case.param("to_qkv.bias") if case.has("param.to_qkv.bias") else None
    q, k, v = F.linear(x, weight, bias).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    y = attend(q, k, v, state, x=x).transpose(1, 2).flatten(2)
    for name in ("to_out", "to_out.0", "proj"):
        if case.has(f"param.{name}.weight"):
            y = F.linear(
                y, case.param(f"{name}.weight"), case.param(f"{name}.bias") if case.has(f"param.{name}.bias") else None
            )
    outputs = {"y": y}
    if case.has("in.loss_weight"):
        (y * case.input("loss_weight")).sum().backward()
        outputs["grad.to_qkv.weight"] = weight.grad
        grad = encoding.generators.grad.flatten(1, 2)  # (A, heads * m, triangle)
        size = encoding.generator_dim
        row, column = torch.triu_indices(size, size, 1)
        full = grad.new_zeros(*grad.shape[:-1], size, size)
        full[..., row, column] = grad
        outputs["grad.generator_raw_params"] = full[:, None]
    return outputs
