"""iRPE: bucket tables, single terms, DeiT attention and DETR attention of microsoft/Cream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos import Positions, attend, create_encoding
from mmpos.checkpoints import irpe_tables
from mmpos.functional.buckets import bucket_index, compact, num_buckets, piecewise_index
from mmpos.models.multihead import MultiheadAttention
from tests.golden.case import Case, Unknown

METHODS = {"euc": "euclidean", "quant": "quantization", "cross": "cross", "product": "product"}


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-10 if reference.dtype == torch.float64 else 2e-5 if reference.is_floating_point() else 0.0


def run(case: Case) -> dict[str, Tensor]:
    if case.has_option("tables") or case.has("in.offsets"):
        return _buckets(case)
    heads, on = case.option("heads"), case.option("rpe_on")
    head_dim = case.option("head_dim", None) or case.option("dim") // heads
    grid = (case.option("height"), case.option("width"))
    skip = case.option("skip")
    case.expect("scale", "head_dim**-0.5")
    stack = create_encoding(
        "irpe",
        heads * head_dim,
        heads,
        num_prefix=skip,
        method=METHODS[case.expect("method", *METHODS)],
        mode={"ctx": "contextual", "bias": "bias"}[case.expect("mode", "ctx", "bias")],
        on=on,
        shared_heads=case.option("shared_head"),
        ratio=case.option("ratio"),
    ).double()
    encoding = stack.layers[0]["irpe"]
    params = case.params(torch.float64)
    unknown = [name for name in params if not name.startswith(("rpe_", "qkv.", "proj.", "in_proj", "out_proj."))]
    if unknown:
        raise Unknown(f"param.{unknown[0]}")
    encoding.load_state_dict(irpe_tables(params))
    if encoding.rows != case.option("num_buckets", encoding.rows):
        raise ValueError(f"{encoding.rows} rows, expected {case.option('num_buckets')}")
    positions = Positions.grid(*grid, num_prefix=skip)
    state = stack.prepare(positions)[0]
    if case.has("in.src"):
        return _detr(case, stack, positions, params)
    if case.has("in.x"):
        return _deit(case, state, heads, params)
    return _terms(case, encoding, state)


def _buckets(case: Case) -> dict[str, Tensor]:
    case.expect("alpha", "1*ratio")
    case.expect("beta", "2*ratio")
    case.expect("gamma", "8*ratio")
    out: dict[str, Tensor] = {}
    for table in case.option("tables", []):
        unknown = set(table) - {"key", "method", "ratio", "h", "w", "skip", "num_buckets"}
        if unknown:
            raise Unknown(f"config.tables.{unknown.pop()}")
        method, ratio, skip = table["method"], table["ratio"], table["skip"]
        coords = Positions.grid(table["h"], table["w"]).coords
        offsets = [c[..., :, None] - c[..., None, :] for c in coords.unbind(-1)]
        which = 1 if method == "cols" else 0
        name = {"rows": "cross", "cols": "cross"}.get(method) or METHODS.get(method)
        if name is None:
            raise Unknown(f"config.tables.method={method!r}")
        rows = num_buckets(name, ratio)
        if rows + (skip > 0) != table["num_buckets"]:
            raise ValueError(f"{rows} buckets for {table}")
        index = compact(bucket_index(offsets, name, ratio)[which], rows, skip)
        out[table["key"].removeprefix("out.")] = index[0]
    for name in case.outputs():
        if name.startswith("piecewise.ratio"):
            ratio = float(name.removeprefix("piecewise.ratio"))
            out[name] = piecewise_index(case.input("offsets"), ratio, 2 * ratio, 8 * ratio)
    return out


def _terms(case: Case, encoding: torch.nn.Module, state: object) -> dict[str, Tensor]:
    case.describe("batch")
    q, k, v = (case.input(name, torch.float64) for name in "qkv")
    prepared = state.prepared[0]
    out = {"attention": attend(q, k, v, state)}
    if not torch.allclose(out["attention"], attend(q, k, v, state, plain=True), atol=1e-12):
        raise ValueError("the fast path differs from the plain one")
    tables = {"k": encoding.table_k, "q": encoding.table_q}
    for letter in "kq":
        if tables[letter] is None:
            continue
        encoding.table_k, encoding.table_q = (tables[letter] if letter == other else None for other in "kq")
        out[f"on_{letter}"] = encoding.terms(q, k, prepared)
    encoding.table_k, encoding.table_q = tables["k"], tables["q"]
    if case.has("in.attn_probs"):  # the share of values: what these weights add to weights @ v
        weights = case.input("attn_probs", torch.float64)
        encoding.table_k = encoding.table_q = None
        # logits whose softmax is exactly these weights
        zero = torch.zeros_like(q)
        both = encoding.attend(
            zero, zero, torch.zeros_like(v), prepared, bias=weights.log(), scale=1.0, dropout_p=0.0, plain=False
        )
        out["on_v"] = both
    return out


def _deit(case: Case, state: object, heads: int, params: dict[str, Tensor]) -> dict[str, Tensor]:
    case.expect("qkv_bias", True, False)
    x = case.input("x", torch.float64)
    qkv = F.linear(x, params["qkv.weight"], params.get("qkv.bias")).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    out = attend(*qkv.unbind(0), state, x=x).transpose(1, 2).flatten(2)
    return {"x": F.linear(out, params["proj.weight"], params.get("proj.bias"))}


def _detr(case: Case, stack: torch.nn.Module, positions: Positions, params: dict[str, Tensor]) -> dict[str, Tensor]:
    src = case.input("src", torch.float64)
    attention = MultiheadAttention(src.shape[-1], case.option("heads"), stack).double()
    own = {name: value for name, value in params.items() if name.startswith(("in_proj", "out_proj"))}
    missing, unexpected = attention.load_state_dict(own, strict=False)
    if unexpected or any(not name.startswith("encoding.") for name in missing):
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    # the sum was made before the cast to float64
    query = (case.input("src") + case.input("pos")).double() if case.has("in.pos") else src
    padding = case.input("key_padding_mask") if case.has("in.key_padding_mask") else None
    y, weights = attention(query, query, src, key_padding_mask=padding, positions=positions)
    return {"x": y, "attn_weights_headmean": weights}
