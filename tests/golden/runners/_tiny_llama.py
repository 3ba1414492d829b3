"""A tiny decoder with the weights of a case, written out: ids and pattern per layer go in explicitly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.functional.rotary import rotate
from mmpos.multimodal import rotary_table, scheme


def tiny_llama(
    params: Mapping[str, Tensor],
    x: Tensor,
    ids: Sequence[Tensor],
    allowed: Sequence[Tensor],
    heads: int,
    theta: float = 1e4,
) -> Tensor:
    """Last hidden state. Shape: x ``(B, L, D)``, ids per layer ``(1, B, L)``, allowed per layer ``(B, 1, L, L)``."""
    width = x.shape[-1] // heads
    allocation = scheme("raster").allocate(width // 2)
    for layer in range(len(ids)):
        weight = {k.removeprefix(f"layers.{layer}."): v for k, v in params.items() if k.startswith(f"layers.{layer}.")}
        table = rotary_table(ids[layer], allocation, theta)
        h = _norm(x, weight["input_layernorm.weight"])
        q, k, v = (
            F.linear(h, weight[f"self_attn.{n}_proj.weight"]).unflatten(-1, (-1, width)).transpose(1, 2) for n in "qkv"
        )
        out = F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v, attn_mask=allowed[layer])
        x = x + F.linear(out.transpose(1, 2).flatten(2), weight["self_attn.o_proj.weight"])
        h = _norm(x, weight["post_attention_layernorm.weight"])
        gate, up = F.linear(h, weight["mlp.gate_proj.weight"]), F.linear(h, weight["mlp.up_proj.weight"])
        x = x + F.linear(F.silu(gate) * up, weight["mlp.down_proj.weight"])
    return _norm(x, params["norm.weight"])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps=1e-6)


def pack_bits(allowed: Tensor) -> Tensor:
    """Boolean patterns packed along keys, most significant bit first, as ``numpy.packbits``."""
    length = allowed.shape[-1]
    padded = F.pad(allowed, (0, -length % 8)).unflatten(-1, (-1, 8)).to(torch.uint8)
    return (padded << torch.arange(7, -1, -1, dtype=torch.uint8)).sum(-1).to(torch.uint8)
