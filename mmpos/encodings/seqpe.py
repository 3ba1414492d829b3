"""SeqPE: a small transformer reads the digits of the coordinates and writes the position vector.

Li et al., *SeqPE: Transformer with Sequential Position Encoding*, arXiv 2506.13277. Reference: ghrua/seqpe,
``image_seqpe`` (MIT). A coordinate is written with ``K`` decimal digits, axes one after the other, and a slot at the
end collects the result; larger grids only use larger digits, up to ``10 ** K``. Beyond the reference: any number of
axes, vectors of prefix tokens, and places that repeat within a batch are encoded once. Its two losses, which make the
vectors ordered and extrapolate, are in :mod:`mmpos.objectives.seqpe`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.encodings._table import add_to_placed, table_at
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.digits import digit_count, to_digits
from mmpos.positions import Positions

__all__ = ["DigitEncoder", "SeqPE"]

APPLY = ("attn_mul", "attn_add", "attn_scalar", "rotary", "input_add")


class DigitBlock(nn.Module):
    """Pre-norm transformer block with tanh GELU, four times as wide inside."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(dim, eps=1e-5)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-5)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None, last_only: bool) -> Tensor:
        """``last_only`` computes the last slot alone, the only one that is read after the last block."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if last_only:
            x, q = x[:, -1:], q[:, :, -1:]
            mask = None if mask is None else mask[..., -1:, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.proj(out), self.dropout, self.training)
        inner = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + F.dropout(inner, self.dropout, self.training)


class DigitEncoder(nn.Module):
    """Digit sequences to vectors.

    Args:
        axes: coordinate axes ``A``.
        digits: digits ``K`` of each axis.
        width: width ``E`` of the transformer.
        out_dim: width of the vectors.
        layers: transformer blocks.
        heads: attention heads; default ``E / 64``, at least 1.
        causal: whether a digit sees only earlier ones; the collecting slot is last and sees all.
        mask_padding: whether the zeros on the left are hidden.
        last_norm: whether a layer norm stands before the output.
        temperature: divides the output.
        dropout: on the residual branches.

    Shape:
        digits ``(M, A K)`` int64, written ``(M, A K)`` bool; returns ``(M, out_dim)``.
    """

    def __init__(
        self,
        axes: int,
        digits: int,
        width: int,
        out_dim: int,
        *,
        layers: int = 2,
        heads: int | None = None,
        causal: bool = True,
        mask_padding: bool = False,
        last_norm: bool = True,
        temperature: float = 1.0,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        heads = max(width // 64, 1) if heads is None else heads
        if width % heads:
            raise ValueError(f"width: expected a multiple of heads {heads}, got {width}")
        self.causal = causal
        self.mask_padding = mask_padding
        self.temperature = temperature
        self.digit = nn.Parameter(torch.empty(10, width))
        self.slot = nn.Parameter(torch.empty(axes * digits, width))
        self.axis = nn.Parameter(torch.empty(axes, width)) if axes > 1 else None
        self.collector = nn.Parameter(torch.empty(width))
        self.blocks = nn.ModuleList(DigitBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-5) if last_norm else None
        self.out = nn.Linear(width, out_dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Truncated normal of standard deviation 0.02, biases zero."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        for table in (self.digit, self.slot, self.axis, self.collector):
            if table is not None:
                nn.init.trunc_normal_(table, std=0.02)

    def forward(self, digits: Tensor, written: Tensor) -> Tensor:
        x = self.digit[digits] + self.slot
        if self.axis is not None:
            x = x + self.axis.repeat_interleave(digits.shape[-1] // self.axis.shape[0], 0)
        x = torch.cat([x, self.collector.expand(x.shape[0], 1, -1)], dim=1)
        mask = self.mask(written)
        for i, block in enumerate(self.blocks):
            x = block(x, mask, i == len(self.blocks) - 1)
        x = x[:, -1]
        return self.out(x if self.norm is None else self.norm(x)) / self.temperature

    def mask(self, written: Tensor) -> Tensor | None:
        """Which slot sees which; every slot sees itself, so that no row is empty."""
        length = written.shape[-1] + 1
        own = torch.eye(length, dtype=torch.bool, device=written.device)
        mask: Tensor | None = None
        if self.causal:
            mask = torch.ones_like(own).tril()
        if self.mask_padding:
            seen = F.pad(written, (0, 1), value=True)[:, None, None]
            mask = (seen if mask is None else seen & mask) | own
        return mask


@register("seqpe")
class SeqPE(PositionEncoding):
    """Position vectors written by a transformer over digits, one encoder for the model.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        apply: ``attn_mul`` multiplies queries and keys by vectors, ``attn_add`` adds them, ``attn_scalar`` adds the
            product of the vectors to that of queries and keys, ``rotary`` takes the vector as sine and cosine halves of
            a rotation (not normalised, as released), ``input_add`` adds it to the tokens.
        projection: ``layer`` maps the vector to its two sides in each layer, ``none`` takes them from the encoder
            directly.
        multi_head: whether each head has vectors of its own; only ``input_add`` does not read it.
        max_index: number of positions of an axis that can be written, 100 for two digits.
        width: width ``E`` of the digit transformer.
        layers: its blocks.
        heads: its attention heads; default ``E / 64``.
        causal: whether its attention is causal.
        mask_padding: whether zeros on the left are hidden from it.
        last_norm: whether a layer norm stands before its output.
        temperature: divides its output.
        dropout: on its residual branches.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.

    Example:
        >>> from mmpos import create_encoding
        >>> seqpe = create_encoding("seqpe", dim=16, num_heads=2, width=16).eval().shared["seqpe"]
        >>> seqpe.vectors(torch.tensor([[0, 7], [12, 99]])).shape
        torch.Size([2, 16])
    """

    facts = Facts(
        title="SeqPE",
        source="Li et al. 2025, arXiv 2506.13277",
        plugs_into=("tokens", "qk"),
        fractional=False,
        resolution_rules=("index", "interpolated"),
        learned=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        apply: str = "attn_mul",
        projection: str = "layer",
        multi_head: bool = True,
        max_index: int = 100,
        width: int = 384,
        layers: int = 2,
        heads: int | None = None,
        causal: bool = True,
        mask_padding: bool = False,
        last_norm: bool = True,
        temperature: float = 1.0,
        dropout: float = 0.1,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if apply not in APPLY:
            raise ValueError(f"apply: expected one of {APPLY}, got {apply!r}")
        if projection not in ("layer", "none"):
            raise ValueError(f"projection: expected 'layer' or 'none', got {projection!r}")
        if apply == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"head_dim: apply='rotary' turns pairs of channels and needs an even number, got {self.head_dim}"
            )
        self.apply_as = apply
        self.pe_heads = num_heads if multi_head else 1
        self.digits = digit_count(max_index)
        self.max_index = max_index
        side = self.pe_heads * self.head_dim
        self.projected = apply.startswith("attn") and projection == "layer"
        self.out_dim = dim if apply == "input_add" else side if self.projected or apply == "rotary" else 2 * side
        self.encoder = DigitEncoder(
            self.axes,
            self.digits,
            width,
            self.out_dim,
            layers=layers,
            heads=heads,
            causal=causal,
            mask_padding=mask_padding,
            last_norm=last_norm,
            temperature=temperature,
            dropout=dropout,
        )
        self.prefix = nn.Parameter(torch.empty(self.num_prefix, self.out_dim)) if self.num_prefix else None
        self.sides = nn.ModuleList()
        self.check_depth(1)
        self.reset_parameters()

    def check_depth(self, depth: int) -> None:
        """Give each of ``depth`` layers a projection of its own."""
        while self.projected and len(self.sides) < depth:
            self.sides.append(nn.Linear(self.out_dim, 2 * self.out_dim, device=self.encoder.out.weight.device))
            self._reset_side(self.sides[-1])

    @staticmethod
    @torch.no_grad()
    def _reset_side(side: nn.Module) -> None:
        assert isinstance(side, nn.Linear)
        nn.init.trunc_normal_(side.weight, std=0.02)
        nn.init.zeros_(side.bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.encoder.reset_parameters()
        for side in self.sides:
            self._reset_side(side)
        if self.prefix is not None:
            nn.init.trunc_normal_(self.prefix, std=0.02)

    # -- vectors --------------------------------------------------------------------------------------------------

    def vectors(self, coords: Tensor) -> Tensor:
        """Vectors of whole coordinates. Shape: ``(..., A)`` to ``(..., out_dim)``."""
        self.check_coordinates(coords)
        flat = coords.long().flatten(0, -2)
        inverse = None
        if coords.dim() > 2 and coords.shape[0] > 1 and not torch.compiler.is_compiling():
            flat, inverse = torch.unique(flat, dim=0, return_inverse=True)
        with torch.autocast(coords.device.type, enabled=False):
            out = self.encoder(*to_digits(flat, self.digits))
        return (out if inverse is None else out[inverse]).unflatten(0, coords.shape[:-1])

    def check_coordinates(self, coords: Tensor) -> None:
        """Raise unless all coordinates are whole numbers that ``K`` digits can write."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or not coords.numel():
            return
        low, high = float(coords.min()), float(coords.max())
        if (
            low < 0
            or high > 10**self.digits - 1
            or (coords.is_floating_point() and bool((coords != coords.round()).any()))
        ):
            raise ValueError(
                f"positions: seqpe writes whole coordinates from 0 to {10**self.digits - 1} with {self.digits} digits, "
                f"got values from {low:g} "
                f"to {high:g}; use patch indices, or a larger max_index from the start of training"
            )

    def placed_vectors(self, positions: Positions) -> Tensor:
        """Vectors of the placed tokens under the resolution rule. Shape: ``(B or 1, N, out_dim)``."""
        self.check_axes(positions)
        if self.resolution == "interpolated":
            train = self.training_grid(positions)
            table = self.vectors(Positions.grid(*train, device=positions.coords.device).coords[0]).unflatten(0, train)
            return table_at(table, train, positions, "bicubic", False, self.name)
        coords = positions.coords
        if positions.mask is not None:  # what stands in padding need not be a coordinate
            coords = torch.where(positions.mask[..., None], coords, 0.0)
        return self.vectors(coords)

    # -- hooks ----------------------------------------------------------------------------------------------------

    def add_to_tokens(self, x: Tensor, positions: Positions) -> Tensor:
        """``input_add``: add the vectors; the other forms act in attention."""
        if self.apply_as != "input_add":
            return x
        self.check_prefix(positions)
        return add_to_placed(x, self.placed_vectors(positions), positions, self.prefix)

    def check_prefix(self, positions: Positions) -> None:
        """Raise unless there is one vector for each prefix token."""
        if positions.num_prefix != self.num_prefix:
            raise ValueError(
                f"positions.num_prefix: seqpe has vectors for {self.num_prefix} prefix tokens, got "
                f"{positions.num_prefix}; create it with "
                f"num_prefix={positions.num_prefix}"
            )

    def prepare(self, positions: Positions) -> Tensor | None:
        """Vectors of all tokens, prefix first. Shape: ``(B or 1, P + N, out_dim)``."""
        if self.apply_as == "input_add":
            return None
        self.check_prefix(positions)
        vectors = self.placed_vectors(positions)
        if self.prefix is not None:
            vectors = torch.cat([self.prefix.to(vectors.dtype).expand(vectors.shape[0], -1, -1), vectors], dim=1)
        return vectors

    def at_layer(self, prepared: Tensor | None, layer: int, depth: int) -> tuple[Tensor, Tensor] | None:
        """The two sides of a layer, ``(B or 1, h or 1, P + N, d)`` each: of queries and keys, or sine and cosine."""
        if prepared is None:
            return None
        if self.apply_as == "rotary":
            vectors = prepared.unflatten(-1, (self.pe_heads, self.head_dim)).transpose(1, 2)
            sin, cos = vectors.chunk(2, dim=-1)
            return sin, cos
        with torch.autocast(prepared.device.type, enabled=False):
            both = self.sides[layer](prepared) if self.projected else prepared
        query, key = both.unflatten(-1, (2, self.pe_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return query, key

    def transform_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: tuple[Tensor, Tensor] | None, x: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Bring the vectors into queries and keys."""
        if prepared is None:
            return q, k, v
        one, other = (side.to(q.dtype) for side in prepared)
        action: Callable[[Tensor, Tensor], Tensor]
        if self.apply_as == "rotary":
            return _turn(q, one, other), _turn(k, one, other), v
        if self.apply_as == "attn_scalar":  # as further columns the product is scaled with the logits
            action = lambda t, side: torch.cat([t, side.expand_as(t)], dim=-1)  # noqa: E731
        else:
            action = torch.mul if self.apply_as == "attn_mul" else torch.add
        return action(q, one), action(k, other), v


def _turn(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Interleaved pairs turned by sine and cosine that need not lie on the circle."""
    u, w = x[..., ::2], x[..., 1::2]
    return torch.stack([u * cos - w * sin, w * cos + u * sin], dim=-1).flatten(-2)
