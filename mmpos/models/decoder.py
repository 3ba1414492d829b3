"""The language model of a small vision-language model: the Llama of transformers, placed by a scheme."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.adapters._attachment import require
from mmpos.adapters._hf_calls import cache_name
from mmpos.adapters._hf_rotary import IDS, SchemeRotary, by_head_forward, pick_variant, rotate_projection
from mmpos.functional.sincos import sincos
from mmpos.multimodal import PositionLayout, Scheme

__all__ = ["Decoder"]


class Decoder(nn.Module):
    """A Llama of transformers whose rotary tables and attention pattern come from a scheme.

    Args:
        config: arguments of ``transformers.LlamaConfig``.
        scheme: how tokens are placed.
        theta: base of the rotary ladder.
        sections: rotary pairs of each axis (heads of each axis for ``mhrope``); default those of the scheme.
    """

    def __init__(
        self, config: Mapping[str, Any], scheme: Scheme, *, theta: float, sections: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        transformers = require("transformers", "vlm")
        if not theta > 1:
            raise ValueError(f"theta: expected a base above 1, got {theta}")
        settings = transformers.LlamaConfig(**{"attn_implementation": "sdpa", "tie_word_embeddings": True, **config})
        self.scheme = scheme
        self.model = transformers.LlamaModel(settings)
        self.head_dim = int(settings.head_dim)
        self.layers = int(settings.num_hidden_layers)
        allocation = self._allocation(scheme, int(settings.num_key_value_heads), sections)
        ladder = allocation.inverse_frequencies(theta)
        self.model.rotary_emb = SchemeRotary(allocation, ladder, 1.0, "half")
        variants, of_layer = scheme.variants(self.layers)
        for number, layer in enumerate(self.model.layers):
            attention: Any = layer.self_attn
            if len(variants) > 1 and of_layer is not None:
                hook = pick_variant(of_layer[number], len(variants))
                attention.register_forward_pre_hook(hook, with_kwargs=True)
            if self.model.rotary_emb.by_head:
                attention.forward = partial(by_head_forward, attention.forward, "half", False)
                for part in (attention.q_proj, attention.k_proj):
                    part.register_forward_hook(rotate_projection(self.head_dim))

    def _allocation(self, scheme: Scheme, heads: int, sections: Sequence[int] | None) -> Any:
        pairs = self.head_dim // 2
        if scheme.allocation == "by_head":
            dealt = tuple(sections) if sections is not None else tuple(_share(heads))
            return scheme.allocate(pairs, kv_heads=heads, head_sections=dealt)
        return scheme.allocate(pairs, **({} if sections is None else {"sections": tuple(sections)}))

    @torch.no_grad()
    def initialise(self, ordered: Sequence[tuple[int, int]] = (), base: float = 100.0) -> None:
        """Keys start as queries, and words with an order as turned sines of their place; see :func:`create_vlm`."""
        for layer in self.model.layers:
            query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
            groups = len(query) // len(key)  # of several queries that share a key, the first
            of_heads = query.unflatten(0, (-1, groups, self.head_dim))[:, 0]
            key.copy_(of_heads.flatten(0, 1))
        width = self.embedding.embedding_dim
        size = float(self.model.config.initializer_range) * math.sqrt(2.0)
        for first, count in ordered:
            table = sincos(torch.arange(count, dtype=torch.float32)[:, None], width, base)
            turn = torch.linalg.qr(torch.randn(width, width))[0]  # a basis of its own for each order
            self.embedding.weight[first : first + count] = table @ turn * size

    @property
    def embedding(self) -> nn.Embedding:
        """Embeddings of words, which also make the logits."""
        return self.model.embed_tokens

    def forward(self, x: Tensor, layout: PositionLayout, allowed: Tensor, cache: Any = None) -> Tensor:
        """Hidden states.

        Args:
            x: embeddings of the new tokens.
            layout: places of the new tokens.
            allowed: which tokens each may attend to; one pattern for all layers, or one for each variant.
            cache: a transformers cache that is read and extended, or ``None``.

        Shape:
            x ``(B, L, D)``, allowed bool ``(B or 1, 1 or V, L, past + L)``; returns ``(B, L, D)``.
        """
        ids = layout.ids
        if ids.shape[2] != len(x):
            ids = ids.expand(-1, -1, len(x), -1)
        plain = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        given = {} if cache is None else {cache_name(self.model): cache, "use_cache": True}
        token = IDS.set(ids)
        try:
            out = self.model(
                inputs_embeds=x, attention_mask=allowed, position_ids=plain, **({"use_cache": False} | given)
            )
        finally:
            IDS.reset(token)
        return out.last_hidden_state


def _share(heads: int) -> list[int]:
    """Heads for t, h and w, as equal as can be; h and w equal."""
    spatial = -(-heads // 3) if heads > 2 else 1
    return [max(heads - 2 * spatial, 0), spatial, spatial]
