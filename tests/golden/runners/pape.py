"""PaPE: the column builder of the released code, and its encoder end to end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos import Positions, attend, create_encoding
from mmpos.attention import plain_attention
from mmpos.checkpoints import pape_layer, pape_layers
from mmpos.functional.parabolic import query_constant, reference_columns
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    if reference.dtype == torch.float32:  # large outputs are stored in float32
        return 2e-6 * max(1.0, float(reference.abs().max()))
    return 1e-6 * max(1.0, float(reference.abs().max()))


def places(case: Case) -> tuple[Positions, Tensor | None, bool]:
    """Positions in our axis order, the key mask over placed tokens, and whether the axes were (x, y).

    The coordinates are taken as they stand. A first token at the origin is read as a prefix token, which
    ``prefix_at=0`` puts there.
    """
    coords = case.input("positions").double()
    xy = coords.shape[-1] == 2
    if xy:
        coords = coords.flip(-1)
    prefix = int(not coords[:, 0].any())
    mask = case.input("key_mask") if case.has("in.key_mask") else None
    if mask is not None and not mask[:, :prefix].all():
        raise Unknown("a prefix token that is masked")
    return (
        Positions.points(coords[:, prefix:], num_prefix=prefix, mask=None if mask is None else mask[:, prefix:]),
        mask,
        xy,
    )


def columns_of(case: Case, name: str, weights: dict[str, Tensor], options: dict[str, int]) -> tuple:
    """The encoding with the weights of a case, its positions, and queries and keys with our columns."""
    positions, mask, xy = places(case)
    dim, heads, head_dim = case.option("dim"), case.option("num_heads"), case.option("head_dim")
    if case.option("num_positions") != positions.axes:
        raise Unknown(f"config.num_positions={case.option('num_positions')} for coordinates with {positions.axes} axes")
    stack = create_encoding(
        name,
        dim,
        heads,
        head_dim=head_dim,
        axes=positions.axes,
        num_prefix=positions.num_prefix,
        prefix_at=0.0,
        **options,
    ).double()
    stack.layers[0][name].load_state_dict(weights)
    if abs(case.option("scale") - head_dim**-0.5) > 1e-12:
        raise Unknown(f"config.scale={case.option('scale')}")
    case.describe("batch")
    return stack, positions, mask


def attention_of(case: Case, stack, positions: Positions, constant: Tensor) -> dict[str, Tensor]:
    """What every case stores: bias before scaling, attention and its output, from our columns."""
    q, k, v = (case.input(name, torch.float64) for name in ("query", "key", "value"))
    hidden = case.input("hidden", torch.float64)
    state = stack.prepare(positions)[0]
    wide_q, wide_k, _ = state.encodings[0].transform_qkv(q, k, v, state.prepared[0], hidden)
    bias = wide_q[..., q.shape[-1] :] @ wide_k[..., k.shape[-1] :].mT + constant[..., None]
    identity = torch.eye(q.shape[-2], dtype=q.dtype).expand(*v.shape[:2], -1, -1)
    logit_mask = state.mask
    attention = plain_attention(wide_q, wide_k, identity, bias=logit_mask, scale=q.shape[-1] ** -0.5)
    fused = attend(q, k, v, state, x=hidden)
    plain = attend(q, k, v, state, x=hidden, plain=True)
    torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-9)
    return {"bias_unscaled": bias, "attn": attention, "attn_out": fused}


def pad_columns(q: Tensor, columns: Tensor) -> Tensor:
    """The reference layout: the columns behind the head, zeros up to a multiple of 8."""
    wide = torch.cat([q, columns.expand(*q.shape[:-1], -1)], dim=-1)
    return F.pad(wide, (0, -wide.shape[-1] % 8))


def run(case: Case) -> dict[str, Tensor]:
    if case.has("in.x"):
        return _encoder(case)
    positions, _, xy = places(case)
    heads = case.option("num_heads")
    weights = pape_layer(case.params(torch.float64), num_heads=heads, xy=xy)
    options = {"parabolas": case.option("num_parabolas")}
    stack, positions, _ = columns_of(case, "pape", weights, options)
    encoding = stack.layers[0]["pape"]
    prepared, folded = encoding.prepare(positions)
    hidden = case.input("hidden", torch.float64)
    forms, slope = encoding.coefficients(hidden, folded)
    outputs = attention_of(case, stack, positions, query_constant(forms, slope, prepared.coords))
    # the naive layout on raw coordinates, from the same parameters
    raw = case.input("positions").double()
    raw = raw.flip(-1) if xy else raw
    per_head = (-1, (heads, options["parabolas"]))
    a = F.softplus(encoding.curvature(hidden)).unflatten(*per_head).transpose(1, 2)
    b = encoding.slope(hidden).unflatten(*per_head).transpose(1, 2)
    queries, keys = reference_columns(raw, a, b, encoding.axes_map)
    outputs["query_aug"] = pad_columns(case.input("query", torch.float64), queries)
    outputs["key_aug"] = pad_columns(case.input("key", torch.float64), keys)
    return outputs


def _encoder(case: Case) -> dict[str, Tensor]:
    """A pre-norm encoder whose coefficients read the normalised input of each layer."""
    case.expect("act", "gelu (erf)")
    case.expect("norm_pre", "LayerNorm before block 1")
    case.expect("norm_post", "LayerNorm after the last block")
    dim, heads, head_dim, depth = (case.option(k) for k in ("dim", "num_heads", "head_dim", "num_layers"))
    eps = case.option("layernorm_eps")
    params = case.params(torch.float64)
    case.describe("mlp_hidden")
    positions, _, xy = places(case)
    options = {"axes": positions.axes, "num_prefix": positions.num_prefix, "prefix_at": 0.0}
    options["parabolas"] = case.option("num_parabolas")
    stack = create_encoding("pape", dim, heads, depth, head_dim=head_dim, **options).double()
    for layer, weights in zip(stack.layers, pape_layers(params, num_heads=heads, xy=xy), strict=True):
        layer["pape"].load_state_dict(weights)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (dim,), params[f"{name}.weight"], params[f"{name}.bias"], eps)

    def dense(x: Tensor, name: str) -> Tensor:
        return F.linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))

    x = norm(case.input("x", torch.float64), "norm_pre")
    for i, state in enumerate(stack.prepare(positions)):
        h = norm(x, f"layers.{i}.norm1")
        qkv = dense(h, f"layers.{i}.attention.qkv_proj").unflatten(-1, (3, heads, head_dim)).permute(2, 0, 3, 1, 4)
        out = attend(*qkv.unbind(0), state, x=h).transpose(1, 2).flatten(2)
        x = x + dense(out, f"layers.{i}.attention.out_proj")
        h = F.gelu(dense(norm(x, f"layers.{i}.norm2"), f"layers.{i}.ffn.fc1"))
        x = x + dense(h, f"layers.{i}.ffn.fc2")
    return {"y": norm(x, "norm_post")}
