"""Absolute position parameters of Hiera and SAM2."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["abs_win_tables"]


def abs_win_tables(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """State dict of ``abs_win`` from ``pos_embed`` and ``pos_embed_win`` (timm Hiera) or ``pos_embed_window`` (SAM2).

    Build the encoding with ``antialias=True`` for Hiera and ``antialias=False`` for SAM2.

    Shape:
        Reference tables are ``(1, D, height, width)``.
    """
    out = {}
    for name, own in (("pos_embed", "table"), ("pos_embed_win", "window"), ("pos_embed_window", "window")):
        value = state.get(prefix + name)
        if value is None:
            continue
        if value.dim() != 4 or value.shape[0] != 1:
            raise ValueError(f"{name}: expected (1, D, height, width), got {tuple(value.shape)}")
        out[own] = value[0].movedim(0, -1).contiguous()
    if "table" not in out:
        raise ValueError(f"state: expected {prefix}pos_embed, got {sorted(state)[:6]}; is the prefix right?")
    return out
