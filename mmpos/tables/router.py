"""The router of 2D-TPE (arXiv 2409.19700): how much of each order a token and head takes, and the loss that makes it
choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["OrderRouter", "RoutingEntropy", "mix_branches", "routing_entropy"]


class OrderRouter(nn.Module):
    """Weights of the orders for each token and head, shared by all heads of a layer: a gated unit on the slice of the
    layer's input that has the channel range of the head.

    Args:
        head_dim: channels of a head, width of a slice.
        num_orders: orders ``J``.
        hidden: width of the gated unit, default ``4 head_dim``. The reference uses the gates without defining them.
        bias: whether the three maps have biases.

    Shape:
        x ``(B, N, heads * head_dim)``, the normed input of the layer; returns ``(B, N, heads, J)``, softmax in at least
        float32, in the dtype of ``x``.

    Source: arXiv 2409.19700
    """

    def __init__(self, head_dim: int, num_orders: int = 2, *, hidden: int | None = None, bias: bool = True) -> None:
        super().__init__()
        hidden = 4 * head_dim if hidden is None else hidden
        self.head_dim, self.num_orders = head_dim, num_orders
        self.gate_1 = nn.Linear(head_dim, hidden, bias=bias)
        self.gate_2 = nn.Linear(head_dim, hidden, bias=bias)
        self.gate_3 = nn.Linear(hidden, num_orders, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal 0.02 and zero biases, as Hugging Face models start."""
        for gate in (self.gate_1, self.gate_2, self.gate_3):
            nn.init.normal_(gate.weight, std=0.02)
            if gate.bias is not None:
                nn.init.zeros_(gate.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Weights over orders."""
        if x.shape[-1] % self.head_dim:
            raise ValueError(f"x: expected a multiple of head_dim={self.head_dim} channels, got {tuple(x.shape)}")
        slices = x.unflatten(-1, (-1, self.head_dim))
        logits = self.gate_3(F.silu(self.gate_1(slices)) * self.gate_2(slices))
        return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(x.dtype)


def mix_branches(out: Tensor, weights: Tensor | None) -> Tensor:
    """Sum of the branches by their weights; one branch needs none.

    Shape:
        out ``(J, B, heads, N, d)``, weights ``(B, N, heads, J)``; returns ``(B, heads, N, d)``.
    """
    if out.shape[0] == 1:
        return out[0]
    if weights is None or weights.shape[-1] != out.shape[0]:
        given = None if weights is None else tuple(weights.shape)
        raise ValueError(f"weights: expected (B, N, heads, {out.shape[0]}), got {given}; set num_orders of the router")
    parts = weights.permute(3, 0, 2, 1)[..., None] * out
    return parts.sum(0)


def routing_entropy(weights: Tensor, in_table: Tensor, eps: float = 1e-10) -> Tensor:
    """Mean entropy of the weights over tokens of tables and heads, then over samples; minimised, so that every token
    and head commits to an order.

    Args:
        weights: output of :class:`OrderRouter`.
        in_table: tokens that count. The reference finds them by marker tokens, and by token 0 when there is no marker.
        eps: floor inside the logarithm.

    Shape:
        weights ``(B, N, heads, J)``, in_table ``(B, N)``; returns a scalar between 0 and ``log J``, the mean over the
        samples that have a table, 0 without any.

    Source: arXiv 2409.19700, the auxiliary loss.
    """
    if in_table.shape != weights.shape[:2]:
        raise ValueError(f"in_table: expected (B, N) = {tuple(weights.shape[:2])}, got {tuple(in_table.shape)}")
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    entropy = -(weights * weights.clamp_min(eps).log()).sum(-1).mean(-1)  # (B, N)
    counts = in_table.sum(1)
    mean = (entropy * in_table).sum(1) / counts.clamp_min(1)
    return mean.sum() / (counts > 0).sum().clamp_min(1)


@dataclass(eq=False)
class RoutingEntropy:
    """Collects the entropy of every router of a model while it runs; no forward signature changes.

    Example:
        >>> router = OrderRouter(8)
        >>> with RoutingEntropy.of(router, torch.ones(1, 3, dtype=torch.bool)) as entropy:
        ...     _ = router(torch.zeros(1, 3, 16))
        >>> round(float(entropy.loss().detach()), 4)
        0.6931
    """

    in_table: Tensor
    layers: list[Tensor] = field(default_factory=list)

    @classmethod
    @contextmanager
    def of(cls, model: nn.Module, in_table: Tensor) -> Iterator[RoutingEntropy]:
        """Watch the routers inside ``model`` for tokens ``in_table (B, N)``; other lengths (decoding) do not count."""
        found = cls(in_table)

        def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if output.shape[:2] == in_table.shape:
                found.layers.append(routing_entropy(output, in_table))

        hooks = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, OrderRouter)]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def loss(self) -> Tensor:
        """Mean over the layers that ran, 0 when none did (no table). Weight 1 in the paper; 0 is 0 here, where the
        reference reads it as 1.
        """
        if not self.layers:
            return torch.zeros((), device=self.in_table.device)
        return torch.stack(self.layers).mean()
