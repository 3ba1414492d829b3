"""RoPE-Mixed: rope-vit functions and module, timm's ``RotaryEmbeddingMixed``."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import rope_mixed_freqs
from mmpos.encodings.rope_mixed import mixed_init_2d
from tests.golden.case import Case, Unknown
from tests.golden.runners._attention import attention_outputs


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 2e-4 if name.startswith("grad.") else 2e-5 if name in ("y", "scores") else 1e-5


def run(case: Case) -> dict[str, Tensor]:
    case.expect("layout", "interleaved")
    # which row of the frequencies belongs to the column: the first (rope-vit) or the second
    order = case.expect("axis_order", "xy", "ij") or case.expect("grid_indexing", "xy", "ij") or "xy"
    if case.expect("grid_indexing", "xy", "ij") not in (None, order):
        raise Unknown("grid_indexing that contradicts axis_order")
    case.expect("rope_mixed", True)
    heads = case.option("num_heads")
    depth = case.option("depth", 1)
    num_prefix = case.option("num_prefix", 0)
    theta = float(case.option("theta", 10.0))
    attention = case.has("in.x")
    dim = case.option("dim")
    head_dim = case.option("head_dim", dim // heads) if attention else dim
    case.describe("head_dim", "shapes", "seq_len")
    case.expect("qkv_bias", True, False)
    stack = create_encoding("rope_mixed", head_dim * heads, heads, depth, head_dim=head_dim, theta=theta)
    freqs = rope_mixed_freqs(case.param("freqs"), depth=depth, num_heads=heads)
    freqs = [value.flip(0) for value in freqs] if order == "ij" else freqs
    for layer, value in zip(stack.layers, freqs, strict=True):
        layer["rope_mixed"].load_state_dict({"freqs": value})
    if case.has("in.grids_hw"):  # several images of different size in one padded batch
        sizes = [(int(h), int(w)) for h, w in case.input("grids_hw")]
        return _padded_batch(case, stack, sizes)
    grid = case.grid() if case.has("in.grid_hw") else (case.option("grid_h"), case.option("grid_w"))
    if (case.option("grid_h", grid[0]), case.option("grid_w", grid[1])) != grid:
        raise Unknown("in.grid_hw other than grid_h, grid_w")
    states = stack.prepare(Positions.grid(*grid, num_prefix=num_prefix))
    if attention:
        leaf = stack.layers[0]["rope_mixed"].freqs
        outputs = attention_outputs(case, states[0], heads, {"freqs": leaf})
        if "grad.freqs" in outputs:  # back to (x, y) order, heads joined
            grad = outputs["grad.freqs"]
            outputs["grad.freqs"] = (grad.flip(0) if order == "xy" else grad).reshape(case.param("freqs").shape)
        return outputs
    tables = [state.prepared[0].real() for state in states]
    cos, sin = (torch.cat([table[i][:, :, num_prefix:] for table in tables]) for i in range(2))
    outputs = {"cos": cos, "sin": sin}
    if case.wants("cos") and depth == 1 and case.outputs()["cos"].dim() == 3:
        outputs = {name: value[0] for name, value in outputs.items()}
    if case.has("in.init_angles"):
        outputs["init_freqs"] = mixed_init_2d(case.input("init_angles"), head_dim, theta).flip(0)
    if case.has("in.q"):
        q, k, _ = stack.layers[0]["rope_mixed"].transform_qkv(
            case.input("q"), case.input("k"), case.input("k"), states[0].prepared[0]
        )
        outputs |= {"q": q, "k": k, "scores": q @ k.mT}
    return outputs


def _padded_batch(case: Case, stack: torch.nn.Module, sizes: list[tuple[int, int]]) -> dict[str, Tensor]:
    """timm writes zeros into the padded rows of both tables; ours are unrotated, so they are multiplied by the mask."""
    q = case.input("q")
    positions = Positions.grids(sizes, length=q.shape[-2])
    mask = positions.mask[:, None, None, :, None].float()
    rotated, cos, sin = [], [], []
    for layer, state in enumerate(stack.prepare(positions)):
        encoding = stack.layers[layer]["rope_mixed"]
        q_heads = q if q.dim() == 4 else q[:, None]
        rotated.append(encoding.transform_qkv(q_heads, q_heads, q_heads, state.prepared[0])[0])
        table = state.prepared[0].real()
        cos.append(table[0].repeat_interleave(2, -1))
        sin.append(table[1].repeat_interleave(2, -1))
    return {
        "cos": torch.stack(cos, 1) * mask,
        "sin": torch.stack(sin, 1) * mask,
        "q_per_layer": torch.stack(rotated) * mask[None, :, 0],
    }
