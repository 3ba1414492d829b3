"""2D-TPE: orders and grid ids of tables, attention with router, caches, decoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.tables import OrderCache, OrderRouter, Table, plan_orders, routing_entropy, table_tokens
from mmpos.tables.router import mix_branches
from mmpos.tables.tpe_2d import branch_attention, rotate_branches
from tests.golden.case import Case, Unknown

__all__ = ["run", "tolerance"]


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    # the reference makes cosine and sine in float32, and its error adds up over cached steps
    if not reference.is_floating_point():
        return 0.0
    return 3e-5 if case.has_option("decode_steps") else 2e-5


def run(case: Case) -> dict[str, Tensor]:
    return positions(case) if case.has_option("samples") else attention(case)


def positions(case: Case) -> dict[str, Tensor]:
    rows, ids = [], []
    for i in range(case.option("samples")):
        counts = case.input(f"{i}.cell_token_counts").tolist()
        table = Table(counts, separators=True)
        if table.grid() != case.input(f"{i}.grid_token_counts").tolist():
            raise Unknown(f"in.{i}.grid_token_counts with other separators")
        rows.append([int(case.input(f"{i}.prefix_len")), table, int(case.input(f"{i}.suffix_len"))])
        ids.append(case.input(f"{i}.input_ids"))
    batch = table_tokens(rows)
    outputs = {
        "batch.attention_mask": batch.mask.long(),
        "batch.token_ids": torch.cat(tuple(batch.orders()), -1),
        "batch.position_ids": torch.cat(tuple(batch.grid_positions()), -1),
    }
    for i, row in enumerate(rows):
        one = table_tokens([row])
        x, y = one.grid_positions()
        outputs |= {
            f"{i}.row_order": one.row_order()[0],
            f"{i}.col_order": one.column_order()[0],
            f"{i}.cell_pos_x": x[0],
            f"{i}.cell_pos_y": y[0],
        }
        if case.wants(f"{i}.labels"):
            # the answer ends the sequence; its length depends on the tokenizer and is nowhere among the inputs
            answer = int((case.tensors[f"out.{i}.labels"] != -100).sum())
            outputs[f"{i}.labels"] = F.pad(ids[i][len(ids[i]) - answer :], (len(ids[i]) - answer, 0), value=-100)
    return outputs


def attention(case: Case) -> dict[str, Tensor]:
    heads, kv_heads, width = (case.option(name) for name in ("num_heads", "num_kv_heads", "head_dim"))
    if case.option("hidden_size") != heads * width:
        raise Unknown("config.hidden_size other than heads times head_dim")
    x = case.input("hidden_states")
    decoding = case.has_option("decode_steps")
    ids = case.input("token_ids_prefill" if decoding else "token_ids")
    count = case.option("orders")
    orders = ids.unflatten(1, (count, -1)).transpose(0, 1)
    mask = case.input("attention_mask").bool() if case.has("in.attention_mask") else None
    if mask is not None and mask.shape != ids.unflatten(1, (count, -1)).shape[::2]:
        raise Unknown(f"in.attention_mask of shape {tuple(mask.shape)}")
    plan = plan_orders(orders, width, base=case.option("rope_theta"), mask=mask, dtype=torch.float64)
    router = OrderRouter(width, count, hidden=case.option("router_hidden"), bias=case.option("router_bias")).to(x.dtype)
    params = case.params()
    router.load_state_dict({name: params.pop(name) for name in list(params) if name.startswith("gate_")})
    known = {f"{name}_proj.{kind}" for name in "qkvo" for kind in ("weight", "bias")}
    if params.keys() - known:
        raise Unknown(f"param.{sorted(params.keys() - known)[0]}")

    def project(h: Tensor, name: str, count: int) -> Tensor:
        out = F.linear(h, params[f"{name}_proj.weight"], params.get(f"{name}_proj.bias"))
        return out.unflatten(-1, (count, width)).transpose(1, 2)

    def finish(out: Tensor, weights: Tensor) -> Tensor:
        mixed = mix_branches(out, weights).transpose(1, 2).flatten(2)
        return F.linear(mixed, params["o_proj.weight"], params.get("o_proj.bias"))

    first = int(case.input("prefill_len")) if decoding else x.shape[1]
    if decoding and first + case.option("decode_steps") != x.shape[1]:
        raise Unknown("config.decode_steps that do not end the sequence")
    start = x[:, :first]
    q, k, v = (project(start, name, count) for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
    keys, weights = rotate_branches(k, plan), [router(start)]
    y = [finish(branch_attention(rotate_branches(q, plan), keys, v, plan), weights[0])]
    cache = OrderCache.prefill(keys, v, plan)
    for step in range(first, x.shape[1]):
        token = x[:, step : step + 1]
        q, k, v = (project(token, name, count) for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
        out, cache = cache.attend(q, k, v)
        weights.append(router(token))
        y.append(finish(out, weights[-1]))
    outputs = {
        "attn_output": torch.cat(y, 1),
        "routing_weights": torch.cat(weights, 1),
        "cache_k_row": cache.keys[0],
        "cache_k_col": cache.keys[-1],
        "cache_v": cache.values,
    }
    if case.wants("entropy"):
        slots = torch.arange(x.shape[1])
        bounds = (case.input(name)[:, None] for name in ("table_start", "table_end"))
        outputs["entropy"] = routing_entropy(
            outputs["routing_weights"], (slots >= next(bounds)) & (slots < next(bounds))
        )
    return outputs
