"""Folding a constant basis into the projections of queries and keys.

Queries and keys share the basis, so the logits do not notice whether it is applied to the activations or, once and for
all, to the rows of ``W_q`` and ``W_k``. What is left is RoPE-Mixed with other frequencies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmpos.encodings.base import PositionEncoding

__all__ = ["FoldableEncoding", "fold_basis_"]


@torch.no_grad()
def fold_basis_(rows: Tensor, basis: Tensor) -> Tensor:
    """Multiply the rows of a query or key projection, or its bias, by the basis of each head, in place.

    Shape:
        rows ``(heads d, D)`` or ``(heads d,)``, basis ``(heads or 1, d, d)``.

    Example:
        >>> fold_basis_(torch.eye(2), torch.tensor([[[0.0, -1.0], [1.0, 0.0]]])).tolist()
        [[0.0, -1.0], [1.0, 0.0]]
    """
    size = basis.shape[-1]
    if rows.dim() not in (1, 2) or rows.shape[0] % size or basis.shape[0] not in (1, rows.shape[0] // size):
        raise ValueError(
            f"rows: expected (heads * {size}, D) or (heads * {size},) for a basis {tuple(basis.shape)}, "
            f"got {tuple(rows.shape)}"
        )
    wide = torch.promote_types(rows.dtype, torch.float64)
    per_head = rows.to(wide).reshape(-1, size, rows[0].numel())
    return rows.copy_(torch.matmul(basis.to(wide), per_head).reshape(rows.shape))


class FoldableEncoding(PositionEncoding):
    """Base of encodings that are a rotary table in a constant basis; :meth:`fold_` moves the basis into the weights."""

    def rotary_form(self) -> tuple[Tensor, Tensor]:
        """Frequencies ``(A, heads or 1, m)`` and basis ``(heads or 1, d, d)`` of the equal rotary encoding,
        detached.
        """
        raise NotImplementedError

    @property
    def folded_freqs(self) -> Tensor | None:
        """Frequencies stored by :meth:`fold_`, ``None`` before. They are part of the state dict."""
        return self._parameters.get("folded_freqs")

    @torch.no_grad()
    def fold_(self, q: nn.Linear, k: nn.Linear | None = None) -> None:
        """Move the basis into the projections of queries and keys, for evaluation at the cost of RoPE-Mixed.

        The parameters of the encoding are frozen; the stored frequencies replace them. Logits stay the same up to
        rounding, queries and keys themselves do not. Not valid when something between projection and rotation depends
        on the channel: q/k norm with weights per channel or with a mean, or a further rotary encoding before this one.

        Args:
            q: projection of the queries, or one fused layer whose output is (q, k, ...) one after the other.
            k: projection of the keys; ``None`` when ``q`` is fused.
        """
        if self.folded_freqs is not None:
            raise ValueError(f"fold_: {self.name} is folded already; fold each layer once")
        width = self.num_heads * self.head_dim
        needed = width if k is not None else 2 * width
        for name, layer in (("q", q), ("k", k)):
            if layer is not None and (layer.out_features < needed or (k is not None and layer.out_features != width)):
                raise ValueError(
                    f"{name}: expected {'' if k is not None else 'at least '}{needed} output features for "
                    f"{self.num_heads} heads of {self.head_dim} channels, got {layer.out_features}; "
                    f"give {'separate projections as q and k' if k is None else 'a fused layer as q alone'}"
                )
        freqs, basis = self.rotary_form()
        for layer, start in ((q, 0), (q, width)) if k is None else ((q, 0), (k, 0)):
            fold_basis_(layer.weight[start : start + width], basis)
            if layer.bias is not None:
                fold_basis_(layer.bias[start : start + width], basis)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self._store(freqs.clone())

    def _store(self, freqs: Tensor) -> None:
        # an entry that does not exist before folding, read through the property of the same name
        self._parameters["folded_freqs"] = nn.Parameter(freqs, requires_grad=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        stored = state_dict.get(f"{prefix}folded_freqs")
        if stored is not None and self.folded_freqs is None:  # weights saved after folding
            self._store(torch.empty_like(stored, device=next(self.parameters()).device))
        super()._load_from_state_dict(state_dict, prefix, *rest)
