"""What the two parabolic encodings share: coordinates with prefix tokens, and how columns reach queries and keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmpos.coordinates import scale_to_train
from mmpos.encodings.base import PositionEncoding
from mmpos.functional.parabolic import centre_coordinates, power_of_two_near, split_columns, widen
from mmpos.positions import Positions

PREFIX_MODES = ("origin", "no_bias", "centre")
COLUMN_MODES = ("auto", "single", "split")


class Places(NamedTuple):
    """Centred coordinates of all ``P + N`` tokens, which of them are prefix, and the balance of query and key columns.

    Shape:
        coords ``(B or 1, 1, P + N, A)``, prefix ``(P + N,)`` of 0 and 1 or ``None`` when no column is needed, balance
        ``(B or 1, 1, 1, 1)``.
    """

    coords: Tensor
    prefix: Tensor | None
    balance: Tensor


class ParabolicEncoding(PositionEncoding):
    """Base of PaPE and PaPE-RI.

    Args:
        dim: model width ``D``; the coefficients are read from the block input.
        num_heads: attention heads ``h``.
        prefix_mode: where tokens without a place are: ``origin`` at ``prefix_at`` on every axis (the released code),
            ``no_bias`` nowhere, so that no logit with them gets a bias, or ``centre`` at the mean of the placed tokens.
        prefix_at: coordinate of prefix tokens under ``origin``. Patches count from 0 here and from 1 in the released
            code, which puts CLS at 0, hence -1; its event data count from 0 and need 0.
        columns: ``single`` appends the columns in the dtype of the queries, ``split`` as high and low parts (three for
            one), ``auto`` splits only in half precision.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        prefix_mode: str = "origin",
        prefix_at: float = -1.0,
        columns: str = "auto",
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if prefix_mode not in PREFIX_MODES:
            raise ValueError(f"prefix_mode: expected one of {PREFIX_MODES}, got {prefix_mode!r}")
        if columns not in COLUMN_MODES:
            raise ValueError(f"columns: expected one of {COLUMN_MODES}, got {columns!r}")
        self.prefix_mode = prefix_mode
        self.prefix_at = prefix_at
        self.columns = columns

    def places(self, positions: Positions, dtype: torch.dtype) -> Places:
        """Coordinates under the resolution rule, prefix tokens in front, about the mean of the placed tokens."""
        self.check_axes(positions)
        coords = positions.coords.to(dtype)
        # a shift cancels, so that a rule is nothing but the length of a step
        step: Tensor | None = None
        if self.resolution == "rescaled":
            step = 1 / scale_to_train(positions, self.training_grid(positions))[:, None].to(dtype)
        elif self.resolution == "normalised":
            step = 1 / positions.sizes("resolution='normalised'")[:, None].to(dtype)
        coords = coords if step is None else coords * step
        centred, mean = centre_coordinates(coords, positions.mask)
        prefix = None
        if positions.num_prefix:
            front = torch.zeros_like(centred[:, :1])
            if self.prefix_mode == "origin":
                origin = torch.full_like(coords[:1, :1], self.prefix_at)
                front = (origin if step is None else origin * step) - mean
            elif self.prefix_mode == "no_bias":
                prefix = (torch.arange(positions.num_tokens, device=coords.device) < positions.num_prefix).to(dtype)
            centred = torch.cat([front.expand(centred.shape[0], positions.num_prefix, -1), centred], dim=1)
        return Places(centred[:, None], prefix, power_of_two_near(centred)[:, None])

    def compute_dtype(self, *tensors: Tensor) -> torch.dtype:
        """float64 when any input is, else float32."""
        return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32

    def check_input(self, x: Tensor | None, q: Tensor, places: Places) -> Tensor:
        """The block input, which both methods need; raises with the reason when it is missing or of another length."""
        if x is None:
            raise ValueError(
                f"x: {self.name} reads its coefficients from the input of the attention layer; call attend(q, k, v, "
                "state, x=x)"
            )
        if not torch.jit.is_tracing() and (places.coords.shape[2] != q.shape[2] or x.shape[-2] != q.shape[2]):
            raise ValueError(
                f"x: expected (B, {q.shape[2]}, {self.dim}) for queries {tuple(q.shape)} and positions of "
                f"{places.coords.shape[2]} tokens, "
                f"got {tuple(x.shape)}; prepare the positions of exactly these tokens"
            )
        return x

    def append(
        self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, constant: Tensor | None, places: Places
    ) -> tuple[Tensor, Tensor]:
        """Columns onto queries and keys; ``constant`` is what the columns of a query leave out (for ``no_bias``)."""
        if places.prefix is not None and constant is not None:
            placed = (1 - places.prefix)[:, None]
            queries = torch.cat([queries, -constant[..., None]], dim=-1) * placed
            keys = torch.cat([keys * placed, places.prefix[:, None].expand(*keys.shape[:-1], 1)], dim=-1)
        half = q.dtype in (torch.float16, torch.bfloat16)
        if self.columns == "split" or (self.columns == "auto" and half):
            queries, keys = split_columns(queries, keys, q.dtype)
        return widen(q, queries), widen(k, keys)
