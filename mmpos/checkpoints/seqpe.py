"""SeqPE weights of ghrua/seqpe: the digit transformer and the projection of an attention layer.

The reference stores dense weights of its transformer as ``(in, out)`` and calls the collecting slot
``cls_token_embed``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["seqpe_encoder"]

_TOP = {
    "token_of_seqpe_embed.weight": "digit",
    "pos_of_seqpe_embed.weight": "slot",
    "dim_token_embed": "axis",
    "cls_token_embed": "collector",
    "layernorm.weight": "norm.weight",
    "layernorm.bias": "norm.bias",
    "out_proj.weight": "out.weight",
    "out_proj.bias": "out.bias",
}
_BLOCK = {
    "attn.c_attn": "qkv",
    "attn.c_proj": "proj",
    "layernorm_1": "norm1",
    "layernorm_2": "norm2",
    "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}


def seqpe_encoder(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our :class:`~mmpos.encodings.seqpe.DigitEncoder` from the ``SequentialPE`` of the reference."""
    out = {}
    for key, value in weights.items():
        if key in _TOP:
            name = _TOP[key]
            if name == "axis":
                value = value[:, 0]
            out[name] = value.flatten() if name == "collector" else value
            continue
        module, _, leaf = key.rpartition(".")
        parts = module.split(".", 2)
        if parts[0] != "transformers" or len(parts) < 3 or parts[2] not in _BLOCK:
            raise ValueError(
                f"weights: {key!r} is no weight of a SeqPE encoder; expected {sorted(_TOP)} and transformers.*"
            )
        dense = leaf == "weight" and value.dim() == 2
        out[f"blocks.{parts[1]}.{_BLOCK[parts[2]]}.{leaf}"] = value.mT if dense else value
    return out
