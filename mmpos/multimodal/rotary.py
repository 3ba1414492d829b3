"""Rotary tables of decoders from position ids: one gather by axis, one multiplication, float32 throughout."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.functional.rotary import Rotation, rotate_plain, rotation_from_angles
from mmpos.multimodal.allocation import Allocation

__all__ = ["channel_tables", "rotary_angles", "rotary_table", "rotate_grouped"]


def rotary_angles(
    ids: Tensor, allocation: Allocation, base: float, inverse_frequencies: Tensor | None = None
) -> Tensor:
    """Angles of every rotary pair.

    Args:
        ids: position ids, integers or float32/float64; half precision is refused because it merges neighbouring ids.
        allocation: which axis each pair (of each key/value head) reads.
        base: base of the ladder.
        inverse_frequencies: a ladder to use instead, for example a scaled one.

    Shape:
        ids ``(A, B, L)``; returns ``(B, 1 or kv heads, L, pairs)``, float32 (float64 for a float64 ladder).
    """
    if ids.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"ids: expected integers or float32/float64, got {ids.dtype}; position ids must not be cast with the model"
        )
    if ids.dim() != 3:
        raise ValueError(f"ids: expected (axes, B, L), got {tuple(ids.shape)}")
    axis = allocation.axis  # what it holds is looked at where it is, so that a GPU is not waited for
    if int(axis.max()) >= ids.shape[0]:
        raise ValueError(f"ids: the allocation reads axis {int(axis.max())}, but ids have {ids.shape[0]} axes")
    ladder = allocation.inverse_frequencies(base, ids.device) if inverse_frequencies is None else inverse_frequencies
    real = ids.to(ladder.dtype)
    if axis.dim() == 1:
        axis = axis[None]
    one_axis = ids.shape[0] == 1 or bool((axis == axis[:, :1]).all())
    unturned = bool((axis < 0).any())
    axis = axis.to(ids.device)
    if one_axis:
        # one axis per head (1-D RoPE, MHRoPE): no gather over pairs
        picked = real[axis[:, 0].clamp_min(0)].movedim(0, 1)[..., None]  # (B, heads, L, 1)
        angles = picked * ladder
    else:
        picked = real.movedim(0, -1)[:, None]  # (B, 1, L, A)
        index = axis.clamp_min(0)[None, :, None, :].expand(picked.shape[0], -1, picked.shape[2], -1)
        angles = picked.expand(-1, axis.shape[0], -1, -1).gather(-1, index) * ladder
    if unturned:
        angles = angles * (axis >= 0)[None, :, None, :]
    return angles


def rotary_table(
    ids: Tensor,
    allocation: Allocation,
    base: float,
    *,
    layout: str = "half",
    inverse_frequencies: Tensor | None = None,
) -> Rotation:
    """A table for :func:`mmpos.functional.rotary.rotate`.

    Partial rotary (GLM-4.1V, arXiv 2507.01006): an allocation with fewer pairs than the head holds leaves the other
    channels alone.
    """
    return rotation_from_angles(rotary_angles(ids, allocation, base, inverse_frequencies), layout=layout)


def rotate_grouped(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate query heads by the tables of the key/value heads they share, without repeating the tables.

    Head ``j`` of ``H`` follows key/value head ``j // (H / kv heads)``. Also right for keys.

    Shape:
        ``(B, heads, L, d)`` in and out, with a table of ``(B or 1, kv heads, L, pairs)``.
    """
    held = rotation.cos.shape[1]
    if x.dim() != 4 or x.shape[1] % held:
        raise ValueError(
            f"x: expected (B, heads, L, d) with a multiple of {held} heads, the key/value heads of the table, got "
            f"{tuple(x.shape)}"
        )
    table = Rotation(rotation.layout, rotation.cos[:, :, None], rotation.sin[:, :, None])
    return rotate_plain(x.unflatten(1, (held, -1)), table).flatten(1, 2)


def channel_tables(angles: Tensor, layout: str = "half") -> tuple[Tensor, Tensor]:
    """Cosine and sine expanded to channels, as model code stores them.

    Shape: ``(..., pairs)`` to two of ``(..., 2 pairs)``.
    """
    if layout == "half":
        angles = torch.cat([angles, angles], dim=-1)
    elif layout == "interleaved":
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        raise ValueError(f"layout: expected 'half' or 'interleaved', got {layout!r}")
    return angles.cos(), angles.sin()
