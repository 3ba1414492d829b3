"""2D-TPE: attention in several reading orders of a table, mixed by a router for each token and head.

Li, Guan, Wu, Yu, Yan, *2D-TPE*, WWW 2025, arXiv 2409.19700. Reference JinaLeejnl/2D-TPE at 9f5afb9 (no licence file,
nothing of it is here): the published file does not run, because the router it calls is never defined; its sizes below
are those of a public derivative. Where we differ, each place says so.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.functional.rotary import rotate
from mmpos.tables.order_cache import OrderCache, repeat_heads
from mmpos.tables.orders import OrderPlan, order_mask
from mmpos.tables.router import OrderRouter, mix_branches

__all__ = ["Tpe2dAttention", "branch_attention", "rotate_branches"]


def rotate_branches(x: Tensor, plan: OrderPlan) -> Tensor:
    """Queries or keys at the positions of every order. Shape: ``(B, heads, N, d)`` to ``(J, B, heads, N, d)``."""
    count = plan.orders.shape[0]
    stacked = x.expand(count, *x.shape).flatten(0, 1)
    return rotate(stacked, plan.rotation).unflatten(0, (count, -1))


def branch_attention(q: Tensor, k: Tensor, v: Tensor, plan: OrderPlan, *, plain: bool = False) -> Tensor:
    """Attention that is causal in each order; later tokens of the text may be seen in the column branch.

    Sorted by its order every branch is plain causal attention, so all of them are one call of a fused kernel with
    ``J B`` rows and no mask. The reference makes two calls, casts float32 to float16 and needs flash-attn.

    Args:
        q: rotated queries of each branch.
        k: rotated keys of each branch; heads divide those of ``q``.
        v: values, the same in all branches.
        plan: see :func:`plan_orders`.
        plain: the definition with a mask, the oracle of the fast form.

    Shape:
        q ``(J, B, heads, N, d)``, k ``(J, B, kv_heads, N, d)``, v ``(B, kv_heads, N, d)``; returns the shape of ``q``.
        Rows of padding are zero.

    Source: arXiv 2409.19700
    """
    count, batch, heads, length, _ = q.shape
    if v.shape[-2] != length or (count, batch, length) != tuple(plan.orders.shape):
        raise ValueError(
            f"q, v: expected (J, B, .., N, ..) = {tuple(plan.orders.shape)}, got q "
            f"{tuple(q.shape)} and v "
            f"{tuple(v.shape)}; make the plan from the orders of this batch"
        )
    k, v = repeat_heads(k, heads), repeat_heads(v, heads).expand(count, batch, heads, length, v.shape[-1])
    if plain:
        visible = order_mask(plan.orders, plan.mask)
        logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
        out = logits.softmax(-1) @ v
    else:
        sort = plan.visit[:, :, None, :, None]
        q, k, v = (t.gather(3, sort.expand(t.shape)).flatten(0, 1) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).unflatten(0, (count, batch))
        out = out.gather(3, plan.rank[:, :, None, :, None].expand(out.shape))
    return out if plan.mask is None else out.masked_fill(~plan.mask[:, None, :, None], 0.0)


class Tpe2dAttention(nn.Module):
    """The attention layer of a decoder with 2D-TPE, projections included.

    Args:
        dim: width of the model, ``num_heads`` times an even head width.
        num_heads: query heads.
        num_kv_heads: key and value heads, default ``num_heads``.
        num_orders: orders ``J`` the router knows; a plan with a single order skips it.
        router_hidden: see :class:`OrderRouter`.
        router_bias: see :class:`OrderRouter`.

    Shape:
        x ``(B, N, dim)``, the normed hidden states; returns the same.

    Example:
        >>> import torch
        >>> from mmpos.tables import Table, plan_orders, table_tokens
        >>> tokens = table_tokens([[2, Table([[1, 3], [1, 1]], separators=True), 4]])
        >>> plan = plan_orders(tokens.orders(), head_dim=8)
        >>> Tpe2dAttention(32, 4, num_kv_heads=2)(torch.randn(1, 28, 32), plan).shape
        torch.Size([1, 28, 32])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        num_orders: int = 2,
        router_hidden: int | None = None,
        router_bias: bool = True,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if dim % num_heads or dim // num_heads % 2:
            raise ValueError(f"dim: expected {num_heads} heads of even width, got {dim}; change dim or num_heads")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads={num_heads}, got {num_kv_heads}")
        self.head_dim = dim // num_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.router = OrderRouter(self.head_dim, num_orders, hidden=router_hidden, bias=router_bias)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def _finish(self, out: Tensor, x: Tensor) -> Tensor:
        mixed = mix_branches(out, self.router(x) if out.shape[0] > 1 else None)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, plan: OrderPlan, *, plain: bool = False) -> Tensor:
        """The whole sequence at once; ``plain`` is the oracle with a mask."""
        q, k, v = self._heads(x)
        return self._finish(
            branch_attention(rotate_branches(q, plan), rotate_branches(k, plan), v, plan, plain=plain), x
        )

    def prefill(self, x: Tensor, plan: OrderPlan) -> tuple[Tensor, OrderCache]:
        """Like ``forward``, with the cache to go on from."""
        q, k, v = self._heads(x)
        keys = rotate_branches(k, plan)
        out = self._finish(branch_attention(rotate_branches(q, plan), keys, v, plan), x)
        return out, OrderCache.prefill(keys, v, plan)

    def decode(self, x: Tensor, cache: OrderCache) -> tuple[Tensor, OrderCache]:
        """New tokens ``(B, T, dim)`` after everything that is cached."""
        out, cache = cache.attend(*self._heads(x))
        return self._finish(out, x), cache
