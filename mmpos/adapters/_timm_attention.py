"""The attention of timm's blocks with position encodings, and how a layer's state gets there.

Every timm block hands ``attn_mask`` to its attention untouched. An attached model puts an :class:`AttentionInput`
there, so the state of the layer travels as an explicit argument: nothing is stored on a module between calls, and
checkpointing, compilation and export see ordinary data flow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.attention import attend
from mmpos.encodings import LayerState

__all__ = ["AttentionInput", "attention_forward", "attention_modules", "join_causal", "merge_heads"]


class AttentionInput(NamedTuple):
    """What travels in the place of ``attn_mask``: the state of the layer and the caller's own mask."""

    layer: LayerState
    mask: Tensor | None = None


def attention_modules(block: nn.Module) -> list[nn.Module]:
    """Attention modules of a timm block; raises for a block whose attention cannot be reached."""
    from timm.models import eva, vision_transformer

    known = (vision_transformer.Attention, eva.EvaAttention, eva.AttentionRope)
    blocks = (
        vision_transformer.Block,
        vision_transformer.ResPostBlock,
        vision_transformer.ParallelThingsBlock,
        eva.EvaBlock,
        eva.EvaBlockPostNorm,
    )
    found = [module for module in block.modules() if type(module) in known]
    strange = [
        type(module).__name__
        for name, module in block.named_modules()
        if name.rpartition(".")[2] == "attn" and type(module) not in known and not isinstance(module, nn.Sequential)
    ]
    if type(block) not in blocks or strange or not found:
        what = f"{type(block).__name__} with {strange[0]}" if strange else type(block).__name__
        raise ValueError(
            f"vit: blocks of class {what} compute their attention where an encoding cannot reach it; supported are "
            f"{', '.join(cls.__name__ for cls in blocks)} with {', '.join(cls.__name__ for cls in known)}. "
            "Build the model with block_fn=Block and attn_layer='attn'"
        )
    return found


def attention_forward(
    attn: Any,
    x: Tensor,
    rope: Tensor | None = None,
    attn_mask: AttentionInput | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Forward pass of a timm attention module inside an attached model. Shape: ``(B, P + N, D)`` in and out."""
    if not isinstance(attn_mask, AttentionInput):
        raise ValueError(
            "attn_mask: this block belongs to a model with an attached position encoding and was called "
            "without its positions; "
            "call forward, forward_features or forward_intermediates of the model, or detach the encoding first"
        )
    gate = getattr(attn, "gate", None)
    q, k, v = _project(attn, x)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        q, k = (_own_rope(attn, t, rope).to(v.dtype) for t in (q, k))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out = attend(
        q,
        k,
        v,
        attn_mask.layer,
        x=x,
        mask=join_causal(attn_mask.mask, is_causal, x),
        scale=attn.scale,
        dropout_p=attn.attn_drop.p if attn.training else 0.0,
        plain=not attn.fused_attn,
    )
    out = merge_heads(out)
    if hasattr(attn, "norm"):
        out = attn.norm(out)
    if gate is not None:
        out = out * gate(x).sigmoid()
    return attn.proj_drop(attn.proj(out))


def merge_heads(out: Tensor) -> Tensor:
    """Heads side by side. Shape: ``(B, heads, L, d)`` to ``(B, L, heads d)``."""
    out = out.transpose(1, 2)
    if torch.compiler.is_exporting():
        # the fused kernel returns a layout that needs no copy here, and an exported graph would rely on it, but a
        # decomposition of attention (ONNX) returns another one
        out = out.clone(memory_format=torch.contiguous_format)
    return out.flatten(2)


def join_causal(mask: Tensor | None, is_causal: bool, x: Tensor) -> Tensor | None:
    """A caller's mask, further limited to earlier tokens when causal. Shape: x ``(B, L, D)``."""
    if not is_causal:
        return mask
    length = x.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, float("-inf"))


def _project(attn: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``(B, heads, L, d)`` from any of timm's projection forms."""
    split = lambda t: t.unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)  # noqa: E731
    if attn.qkv is None:
        return split(attn.q_proj(x)), split(attn.k_proj(x)), split(attn.v_proj(x))
    if getattr(attn, "q_bias", None) is None:
        qkv = attn.qkv(x)
    else:  # EVA: keys have no bias
        bias = torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
        qkv = attn.qkv(x) + bias if attn.qkv_bias_separate else F.linear(x, attn.qkv.weight, bias)
    q, k, v = qkv.chunk(3, dim=-1)
    return split(q), split(k), split(v)


def _own_rope(attn: Any, x: Tensor, rope: Tensor) -> Tensor:
    """The rotary encoding the model came with, for attachments that keep it."""
    from timm.layers import apply_rot_embed_cat

    prefix = attn.num_prefix_tokens
    turned = apply_rot_embed_cat(x[:, :, prefix:], rope, half=getattr(attn, "rotate_half", False))
    return torch.cat([x[:, :, :prefix], turned], dim=2)
