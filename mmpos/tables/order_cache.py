"""The cache of 2D-TPE (arXiv 2409.19700): keys for each order, values once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.functional.rotary import Rotation, rotate
from mmpos.tables.orders import OrderPlan, order_table

__all__ = ["OrderCache", "repeat_heads"]


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Key or value heads for grouped queries. Shape: ``(.., kv_heads, N, d)`` to ``(.., heads, N, d)``."""
    groups, rest = divmod(heads, x.shape[-3])
    if rest:
        raise ValueError(f"k, v: expected a number of heads that divides {heads}, got {x.shape[-3]}; change kv_heads")
    return x if groups == 1 else x.repeat_interleave(groups, -3)


@dataclass(frozen=True, eq=False)
class OrderCache:
    """Rotated keys of each order and one set of values: ``(J + 1) / 2`` times the usual cache.

    Shape:
        keys ``(J, B, kv_heads, N, d)``, values ``(B, kv_heads, N, d)``, following ``(J, B)``: position of the next
        token; mask ``(B, N)`` or ``None``; freqs ``(d/2,)``.
    """

    keys: Tensor
    values: Tensor
    following: Tensor
    freqs: Tensor
    mask: Tensor | None = None

    @classmethod
    def prefill(cls, keys: Tensor, values: Tensor, plan: OrderPlan) -> OrderCache:
        """The cache after a text with all its tables; a table cannot be cut into chunks, because the column branch
        reads it to its end.
        """
        last = plan.orders if plan.mask is None else plan.orders.masked_fill(~plan.mask, torch.iinfo(torch.long).min)
        return cls(keys, values, last.amax(-1) + 1, plan.freqs, plan.mask)

    def plan_next(self, count: int) -> Rotation:
        """Rotary table of the next ``count`` tokens in all orders; a padded sample goes on from its own length."""
        orders = self.following[..., None] + torch.arange(count, device=self.following.device)
        return order_table(orders, self.freqs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, OrderCache]:
        """Attention of new tokens, which come after everything in every order, so that nothing is sorted.

        Shape:
            q ``(B, heads, T, d)``, k, v ``(B, kv_heads, T, d)``, not rotated; returns ``(J, B, heads, T, d)`` and the
            longer cache.
        """
        count, batch, _, cached, _ = self.keys.shape
        new = q.shape[-2]
        table = self.plan_next(new)
        q, k = (rotate(t.expand(count, *t.shape).flatten(0, 1), table) for t in (q, k))
        keys = torch.cat([self.keys, k.unflatten(0, (count, batch))], 3)
        values = torch.cat([self.values, v], 2)
        mask = None if self.mask is None else F.pad(self.mask, (0, new), value=True)
        visible = None
        if new > 1 or mask is not None:
            visible = torch.ones(new, cached + new, dtype=torch.bool, device=q.device).tril(cached)
            if mask is not None:
                visible = (visible & mask[:, None, None, :]).repeat(count, 1, 1, 1)
        heads = q.shape[1]
        every = repeat_heads(values, heads).expand(count, batch, heads, cached + new, v.shape[-1]).flatten(0, 1)
        out = F.scaled_dot_product_attention(q, repeat_heads(keys, heads).flatten(0, 1), every, attn_mask=visible)
        cache = OrderCache(keys, values, self.following + new, self.freqs, mask)
        return out.unflatten(0, (count, batch)), cache
