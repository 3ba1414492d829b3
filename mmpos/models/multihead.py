"""``torch.nn.MultiheadAttention`` with a position encoding inside, for detection code.

Parameters have the names and shapes of the torch module, so DETR checkpoints load; the tables of the encoding come
on top.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.attention import add_bias, attend
from mmpos.encodings.irpe import Irpe
from mmpos.encodings.registry import EncodingStack, LayerState
from mmpos.positions import Positions

__all__ = ["MultiheadAttention"]


class MultiheadAttention(nn.MultiheadAttention):
    """Self-attention that may replace ``nn.MultiheadAttention``, as in the encoder of DETR.

    Args:
        embed_dim: width ``D``.
        num_heads: heads ``h``.
        encoding: a stack of depth 1 that this layer owns, or ``None`` when each call brings the layer state of a
            larger stack.
        torch_arguments: ``dropout``, ``bias``, ``batch_first``, ``device``, ``dtype`` of ``nn.MultiheadAttention``.

    Example:
        >>> from mmpos import create_encoding
        >>> layer = MultiheadAttention(32, 4, create_encoding("irpe", 32, 4, ratio=2.0), batch_first=True)
        >>> x = torch.randn(2, 6, 32)
        >>> layer(x, x, x, positions=Positions.grid(2, 3))[0].shape
        torch.Size([2, 6, 32])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, encoding: EncodingStack | None = None, **torch_arguments: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **torch_arguments)
        if self.in_proj_weight is None or self.bias_k is not None or self.add_zero_attn:
            raise ValueError(
                "torch_arguments: kdim, vdim, add_bias_kv and add_zero_attn are not supported with positions; "
                "leave them out"
            )
        if encoding is not None and encoding.depth != 1:
            raise ValueError(
                f"encoding: a layer owns a stack of depth 1, got depth {encoding.depth}; pass layer= in each call"
            )
        self.encoding = encoding
        # torch's encoder layer would otherwise read the projections itself in evaluation, and see no positions
        self._qkv_same_embed_dim = False

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        positions: Positions | None = None,
        layer: LayerState | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention``; ``True`` in a mask means *ignore*, weights are those before tables on values.

        Args:
            query: queries.
            key: keys, as many as queries.
            value: values.
            key_padding_mask: keys to ignore, bool, or float to add.
            need_weights: whether to return attention weights.
            attn_mask: pairs to ignore, bool, or float to add.
            average_attn_weights: whether weights are averaged over heads.
            is_causal: a hint of torch that ``attn_mask`` is causal; the mask itself decides.
            positions: places of the tokens, for the encoding this layer owns.
            layer: prepared state of this layer of a larger stack.

        Shape:
            query, key, value ``(L, B, D)`` or, with ``batch_first``, ``(B, L, D)``; key_padding_mask ``(B, L)``;
            attn_mask ``(L, L)`` or ``(B h, L, L)``.
        """
        if layer is None and self.encoding is not None:
            if positions is None:
                raise ValueError(
                    "positions: this layer owns an encoding and needs the places of its tokens, "
                    "for example Positions.grid(h, w)"
                )
            layer = self.encoding.prepare(positions)[0]
        if query.dim() != 3 or query.shape != key.shape or query.shape != value.shape:
            raise ValueError(
                "query, key, value: expected one batched shape, (B, L, D) or (L, B, D), since positions are those of "
                f"one sequence; got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            )
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask: is_causal is a hint about it; give the causal mask too")
        if not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        if positions is not None:
            positions.check_tokens(query, "query")
        batch, length, width = query.shape
        weights, biases = (
            self.in_proj_weight.chunk(3),
            (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3),
        )
        q, k, v = (
            F.linear(t, weight, bias).view(batch, -1, self.num_heads, width // self.num_heads).transpose(1, 2)
            for t, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        mask = self._mask(key_padding_mask, attn_mask, q)
        dropout = self.dropout if self.training else 0.0
        out = attend(q, k, v, layer, x=query, mask=mask, dropout_p=dropout)
        out = self.out_proj(out.transpose(1, 2).reshape(batch, length, width))
        shown = None
        if need_weights:
            shown = self._weights(q, k, v, layer, query, mask)
            shown = shown.mean(1) if average_attn_weights else shown
        return (out if self.batch_first else out.transpose(0, 1)), shown

    def _mask(self, padding: Tensor | None, pairs: Tensor | None, q: Tensor) -> Tensor | None:
        """Both masks as one, in the convention of :func:`mmpos.attend` (``True`` = may attend)."""
        total: Tensor | None = None
        for given in (padding, pairs):
            if given is None:
                continue
            if given is padding:
                if given.shape != (q.shape[0], q.shape[2]):
                    raise ValueError(
                        f"key_padding_mask: expected (B, L) = ({q.shape[0]}, {q.shape[2]}), got {tuple(given.shape)}"
                    )
                given = given[:, None, None]
            elif given.dim() == 3:
                given = given.view(q.shape[0], self.num_heads, *given.shape[1:])
            if not given.is_floating_point():
                given = ~given.bool()
            if total is None:
                total = given
            elif total.dtype == torch.bool and given.dtype == torch.bool:
                total = total & given
            else:
                mask, term = (total, given) if total.dtype == torch.bool else (given, total)
                total = add_bias(mask, term)
        return total

    def _weights(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerState | None, x: Tensor, mask: Tensor | None
    ) -> Tensor:
        logits_scale = q.shape[-1] ** -0.5
        terms: list[Tensor | None] = []
        if layer is not None:
            for encoding, prepared in zip(layer.encodings, layer.prepared, strict=True):
                q, k, v = encoding.transform_qkv(q, k, v, prepared, x)
            if layer.mask is not None:
                terms.append(torch.zeros_like(layer.mask, dtype=q.dtype).masked_fill(~layer.mask, float("-inf")))
            for encoding, prepared in zip(layer.encodings, layer.prepared, strict=True):
                if isinstance(encoding, Irpe):
                    terms.append(encoding.terms(q, k, prepared))
                elif encoding.owns_attention:
                    raise ValueError(
                        f"need_weights: {encoding.name} does not expose attention weights; pass need_weights=False"
                    )
                else:
                    terms.append(encoding.logit_bias(q, k, prepared))
        logits = torch.matmul(q * logits_scale, k.mT)
        for term in terms:
            logits = logits if term is None else logits + term
        if mask is not None:
            logits = add_bias(mask, logits)
        return logits.softmax(-1)
