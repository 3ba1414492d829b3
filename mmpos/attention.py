"""Attention with position encodings: the plain oracle and the fused path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.encodings._slices import join_slices
from mmpos.encodings.base import BiasSlice, PositionEncoding
from mmpos.encodings.registry import LayerState

__all__ = ["attend", "fused_attention", "plain_attention", "sliced_attention"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: LayerState | None = None,
    *,
    x: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    plain: bool = False,
) -> Tensor:
    """Softmax attention with every encoding of a layer applied.

    Args:
        q: queries, after any q/k norm, before scaling.
        k: keys.
        v: values.
        layer: state of this layer from ``EncodingStack.prepare``; ``None`` for plain attention.
        x: input of the attention layer, for methods that read it.
        mask: further mask, boolean (``True`` = may attend) or float (added), broadcastable to ``(B, heads, L, L)``.
        scale: factor on the logits; default ``d ** -0.5`` of the queries as given.
        dropout_p: attention dropout.
        plain: use the readable oracle instead of the fused kernels.

    Shape:
        q, k, v ``(B, heads, L, d)`` with ``L = P + N``, x ``(B, L, D)``; returns ``(B, heads, L, d)``.

    Example:
        >>> from mmpos import Positions, create_encoding
        >>> stack = create_encoding("rope_axial", dim=8, num_heads=2)
        >>> state = stack.prepare(Positions.grid(2, 3))[0]
        >>> attend(*torch.randn(3, 1, 2, 6, 4), state).shape
        torch.Size([1, 2, 6, 4])
    """
    if not torch.jit.is_tracing() and not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(
            f"q, k, v: expected (B, heads, L, d), got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; split the "
            "heads first"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if layer is None:
        mask = merge_masks(mask, None, q, k)
        return (plain_attention if plain else fused_attention)(q, k, v, bias=mask, scale=scale, dropout_p=dropout_p)
    values = v
    for encoding, prepared in zip(layer.encodings, layer.prepared, strict=True):
        q, k, v = encoding.transform_qkv(q, k, v, prepared, x)
    bias = merge_masks(mask, layer.mask, q, k)
    owner: tuple[PositionEncoding, object] | None = None
    slices: Iterator[BiasSlice] | None = None
    whole = plain or any(encoding.owns_attention for encoding in layer.encodings)
    for encoding, prepared in zip(layer.encodings, layer.prepared, strict=True):
        if not whole and slices is None:
            slices = encoding.logit_bias_slices(q, k, prepared)
            if slices is not None:
                continue
        term = encoding.logit_bias(q, k, prepared)
        if term is not None:
            bias = add_bias(bias, term.to(q.dtype))
        if encoding.owns_attention:
            owner = (encoding, prepared)
    if owner is not None:
        out = owner[0].attend(q, k, v, owner[1], bias=bias, scale=scale, dropout_p=dropout_p, plain=plain)
    elif slices is not None:
        out = sliced_attention(q, k, v, slices, bias=bias, scale=scale, dropout_p=dropout_p)
    else:
        out = (plain_attention if plain else fused_attention)(q, k, v, bias=bias, scale=scale, dropout_p=dropout_p)
    for encoding, prepared in zip(reversed(layer.encodings), reversed(layer.prepared), strict=True):
        out = encoding.transform_output(out, values, prepared)
    return out


def merge_masks(mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Join a caller's mask with the padding mask ``(B, 1, 1, L)``."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    if not torch.jit.is_tracing():
        full = (*q.shape[:-1], k.shape[-2])
        for what, given in (("mask", mask), ("positions.mask", padding)):
            if given is not None and not _broadcastable(given, full):
                raise ValueError(
                    f"{what}: expected a shape broadcastable to (B, heads, L, L) = {tuple(full)}, got "
                    f"{tuple(given.shape)}; a mask "
                    "of tokens (B, L) is mask[:, None, None]"
                )
    if padding is None or mask is None:
        return padding if mask is None else mask
    if mask.dtype == torch.bool:
        return mask & padding
    return mask.masked_fill(~padding, float("-inf"))


def _broadcastable(given: Tensor, full: tuple[int, ...]) -> bool:
    return given.dim() <= len(full) and all(
        size in (1, target) for size, target in zip(reversed(given.shape), reversed(full), strict=False)
    )


def add_bias(bias: Tensor | None, term: Tensor) -> Tensor:
    """Add a logit term to what has been gathered so far, a boolean mask or a float bias."""
    if bias is None:
        return term
    if bias.dtype == torch.bool:
        return term.masked_fill(~bias, float("-inf"))
    return bias + term


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """The definition: ``softmax(scale q k^T + bias) v``; a query that may attend to nothing gives zero, as in SDPA."""
    logits = torch.matmul(q * scale, k.transpose(-2, -1))
    if bias is not None:
        logits = logits.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else logits + bias
    if bias is None:
        weights = logits.softmax(dim=-1)
    else:
        empty = (logits == float("-inf")).all(-1, keepdim=True)
        weights = logits.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    return torch.matmul(F.dropout(weights, dropout_p), v)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """SDPA; extra query and key columns are matched by zero columns of ``v`` so that it stays on a fast kernel."""
    width = v.shape[-1]
    if q.shape[-1] != width:
        # SDPA falls back to its slow form when v is narrower than q, and prefers multiples of 8
        padded = -(-max(q.shape[-1], width) // 8) * 8
        q, k, v = (F.pad(t, (0, padded - t.shape[-1])) if t.shape[-1] < padded else t for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)
    return out if out.shape[-1] == width else out[..., :width]


def sliced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: Iterable[BiasSlice],
    *,
    bias: Tensor | None,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """SDPA for a few samples and heads at a time, each with its own part of a bias that would be large as a whole."""
    full = None if bias is None else bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    def found() -> Iterator[BiasSlice]:
        for b, h, term in slices:
            part = add_bias(None if full is None else full[b, h], term.to(q.dtype))
            yield b, h, fused_attention(q[b, h], k[b, h], v[b, h], bias=part, scale=scale, dropout_p=dropout_p)

    return join_slices(found(), q)
