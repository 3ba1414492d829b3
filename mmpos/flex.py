"""Attention through ``torch.nn.attention.flex_attention``: terms are computed where a score is, and no bias is held.

Opt-in. :func:`mmpos.attend` hands the fused kernel a bias of each pair and head; here a compiled kernel reads a table
of offsets by an index that all heads share (Swin, SwinV2, iRPE), and every other bias pair by pair. It is meant for
GPUs and long sequences; on a CPU :func:`mmpos.attend` is faster and computes the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mmpos.attention import merge_masks
from mmpos.encodings.base import ScoreMod, score_of_pairs
from mmpos.encodings.registry import LayerState

__all__ = ["flex_attend", "score_mod"]


def score_mod(q: Tensor, k: Tensor, layer: LayerState, *, mask: Tensor | None = None) -> ScoreMod | None:
    """All terms and masks of a layer as one ``score_mod``; ``None`` where there are none.

    Args:
        q: queries after ``transform_qkv`` of the encodings.
        k: keys after it.
        layer: state of this layer from ``EncodingStack.prepare``.
        mask: further mask, as :func:`mmpos.attend` takes it.

    Shape:
        q, k ``(B, heads, L, d)``.
    """
    changes: list[ScoreMod] = []
    for encoding, prepared in zip(layer.encodings, layer.prepared, strict=True):
        if encoding.owns_attention:
            raise ValueError(
                f"layer: {encoding.name} needs the attention weights themselves, for which flex_attention has no "
                "place; use mmpos.attend"
            )
        change = encoding.score_mod(q, k, prepared)
        changes += [] if change is None else [change]
    joined = merge_masks(mask, layer.mask, q, k)
    if joined is not None:
        changes.append(score_of_pairs(joined.expand(*joined.shape[:-2], q.shape[-2], k.shape[-2])))
    if not changes:
        return None

    def change_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for change in changes:
            score = change(score, b, h, i, j)
        return score

    return change_score


def flex_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: LayerState,
    *,
    x: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """What :func:`mmpos.attend` computes, without dropout, by ``flex_attention``.

    Args:
        q: queries, after any q/k norm, before scaling.
        k: keys.
        v: values.
        layer: state of this layer from ``EncodingStack.prepare``.
        x: input of the attention layer, for methods that read it.
        mask: further mask, boolean (``True`` = may attend) or float (added).
        scale: factor on the logits; default ``d ** -0.5`` of the queries as given.
        kernel: ``torch.compile(flex_attention)``, made once by the caller. By default torch's eager form, which is
            there to check against: it is slow and holds all logits.

    Shape:
        q, k, v ``(B, heads, L, d)``, x ``(B, L, D)``; returns ``(B, heads, L, d)``.

    Example:
        >>> import torch
        >>> from mmpos import Positions, create_encoding
        >>> state = create_encoding("alibi_2d", dim=32, num_heads=2).prepare(Positions.grid(2, 3))[0]
        >>> flex_attend(*torch.randn(3, 1, 2, 6, 16), state).shape
        torch.Size([1, 2, 6, 16])
    """
    from torch.nn.attention.flex_attention import flex_attention

    scale = q.shape[-1] ** -0.5 if scale is None else scale
    values = v
    for encoding, prepared in zip(layer.encodings, layer.prepared, strict=True):
        q, k, v = encoding.transform_qkv(q, k, v, prepared, x)
    change = score_mod(q, k, layer, mask=mask)
    if kernel is not None:
        out = kernel(q, k, v, score_mod=change, scale=scale)
    else:
        with warnings.catch_warnings():
            # torch advises to compile, but the eager form was asked for; and it looks at gradients of captured tensors
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            out = flex_attention(q, k, v, score_mod=change, scale=scale)
    assert isinstance(out, Tensor)
    for encoding, prepared in zip(reversed(layer.encodings), reversed(layer.prepared), strict=True):
        out = encoding.transform_output(out, values, prepared)
    return out
