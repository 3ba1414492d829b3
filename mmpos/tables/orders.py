"""Several reading orders of one sequence: an order gives rotary positions and a mask.

The orders of 2D-TPE (arXiv 2409.19700), see :mod:`mmpos.tables.tpe_2d`; nothing here asks where they come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmpos.functional.rotary import Rotation, inverse_frequencies, rotation_from_angles

__all__ = ["OrderPlan", "order_mask", "order_mask_mod", "order_table", "plan_orders"]


@dataclass(frozen=True, eq=False)
class OrderPlan:
    """What all layers share: made once for a batch, where the reference sorts again in every layer.

    Shape:
        orders, visit, rank ``(J, B, N)``: positions of each order, slot of the r-th token of an order, and place of a
        slot in it; mask ``(B, N)`` of real tokens or ``None``; rotation over ``J B`` rows. ``J`` is 1 when all orders
        are the same.
    """

    orders: Tensor
    visit: Tensor
    rank: Tensor
    rotation: Rotation
    freqs: Tensor
    mask: Tensor | None = None


def plan_orders(
    orders: Tensor,
    head_dim: int,
    *,
    base: float = 10000.0,
    freqs: Tensor | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> OrderPlan:
    """Sort every order once and make its rotary table.

    Args:
        orders: position of each token in each order; distinct within an order, any offset. The reference needs
            permutations of ``0 .. N - 1`` and mixes tokens up in silence when an offset is added.
        head_dim: channels of a head; pairs are (j, j + d/2), as in Llama.
        base: base of the rotary ladder.
        freqs: angular frequencies instead of the ladder, for a scaled context; all orders get them.
        mask: ``True`` for real tokens. Padding must come last, in every order.
        dtype: dtype of the angles.

    Shape:
        orders ``(J, B, N)``, freqs ``(d/2,)``, mask ``(B, N)``.

    Raises:
        ValueError: for shapes that do not fit, positions that repeat, or padding before real tokens.

    Source: arXiv 2409.19700
    """
    if orders.dim() != 3 or orders.is_floating_point():
        raise ValueError(f"orders: expected integers (J, B, N), got {orders.dtype} {tuple(orders.shape)}; stack them")
    if head_dim % 2:
        raise ValueError(f"head_dim: expected an even number of channels, got {head_dim}; rotations turn pairs")
    if bool((orders == orders[:1]).all()):
        orders = orders[:1]  # the router cannot matter, so neither it nor a second branch is computed
    visit = orders.argsort(-1)
    if bool((orders.gather(-1, visit).diff(dim=-1) == 0).any()):
        raise ValueError("orders: expected distinct positions in each order, some repeat; number padding on as well")
    if mask is not None:
        if mask.shape != orders.shape[1:]:
            raise ValueError(f"mask: expected (B, N) = {tuple(orders.shape[1:])}, got {tuple(mask.shape)}")
        mask = mask.bool()
        sorted_mask = mask.expand(orders.shape).gather(-1, visit)
        if bool((sorted_mask[..., 1:] & ~sorted_mask[..., :-1]).any()):
            raise ValueError("mask: expected padding after all real tokens in every order; pad on the right")
        mask = None if bool(mask.all()) else mask
    freqs = inverse_frequencies(head_dim // 2, base, device=orders.device, dtype=dtype) if freqs is None else freqs
    if freqs.shape != (head_dim // 2,):
        raise ValueError(f"freqs: expected ({head_dim // 2},), one for each pair of channels, got {tuple(freqs.shape)}")
    freqs = freqs.to(dtype)
    return OrderPlan(orders, visit, visit.argsort(-1), order_table(orders, freqs), freqs, mask)


def order_table(orders: Tensor, freqs: Tensor) -> Rotation:
    """The rotary table of all orders, stacked on the batch axis. Shape: orders ``(J, B, N)``, freqs ``(d/2,)``."""
    angles = orders.flatten(0, 1)[:, None, :, None].to(freqs.dtype) * freqs
    return rotation_from_angles(angles, layout="half")


def order_mask(orders: Tensor, mask: Tensor | None = None) -> Tensor:
    """Who sees whom: key n is seen from query m when it does not come later in the order and is real.

    Shape:
        orders ``(J, B, N)``, mask ``(B, N)``; returns ``(J, B, 1, N, N)``, queries in rows.

    Example:
        >>> order_mask(torch.tensor([[[0, 2, 1]]]))[0, 0, 0].long().tolist()
        [[1, 0, 0], [1, 1, 1], [1, 0, 1]]
    """
    visible = orders[..., None, :] <= orders[..., :, None]
    if mask is not None:
        visible = visible & mask[:, None, :]
    return visible[:, :, None]


def order_mask_mod(order: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The same pattern of one order ``(B, N)`` for FlexAttention."""
    return lambda b, h, q, k: order[b, k] <= order[b, q]
