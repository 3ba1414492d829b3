"""Shared by the runners of decoder schemes.

Ids from token types and grids, tables, rotated queries and keys, logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmpos.functional.rotary import rotate, rotation_from_angles
from mmpos.multimodal import Allocation, PositionLayout, Scheme, channel_tables, rotary_angles
from tests.golden.case import Case


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    if not reference.is_floating_point():
        return 0.0
    last = name.rsplit(".", 1)[-1]
    if last == "logits":
        return 5e-5
    if last.startswith(("position_ids", "rope_deltas")):
        return 2e-5  # rings are float32 in the references
    return 2e-5


def read_ids(case: Case, scheme: Scheme, **grids: Any) -> PositionLayout:
    """Build the layout of a case that stores types, grids and a mask."""
    case.describe("temporal_stride")
    if case.has_option("temporal_stride") and case.option("temporal_stride") != 1.0:
        scheme_options = {**scheme.block_options, "time_stride": case.option("temporal_stride")}
        scheme = Scheme(**{**scheme.__dict__, "block_options": scheme_options})
    case.input("input_ids")
    return scheme.layout_from_types(
        case.input("mm_token_type_ids"),
        image_grids=case.input("image_grid_thw") if case.has("in.image_grid_thw") else None,
        video_grids=case.input("video_grid_thw") if case.has("in.video_grid_thw") else None,
        mask=case.input("attention_mask"),
        merge_size=case.option("spatial_merge_size", 2),
        split_frames=grids.pop("split_frames", bool(case.option("split_video_frames", scheme.split_frames))),
        **grids,
    )


def on_real_tokens(case: Case, name: str, ours: Tensor, mask: Tensor) -> Tensor:
    """Ours where tokens are real; the stored values on padding, which the references leave undefined."""
    reference = case.tensors[f"out.{name}"]
    if ours.shape != reference.shape:
        return ours
    if name.rsplit(".", 1)[-1] == "logits":
        keep = (mask[:, :, None] & mask[:, None, :])[:, None]
    elif ours.dim() == 4:  # (B, heads, L, D)
        keep = mask[:, None, :, None]
    elif name.rsplit(".", 1)[-1] in ("cos", "sin"):
        keep = mask[:, :, None]
    else:
        keep = mask
    return torch.where(keep, ours.to(reference.dtype), reference)


def rotary_outputs(
    case: Case,
    ids: Tensor,
    mask: Tensor,
    allocation: Allocation,
    *,
    prefix: str = "",
    layout: str = "half",
    theta_key: str = "rope_theta",
    inverse_frequencies: Tensor | None = None,
) -> dict[str, Tensor]:
    """Every rotary output a case may store, for ids ``(A, B, L)``."""
    base = float(case.option(theta_key, 10000.0))
    ids = ids.float() if ids.dtype != torch.float64 or inverse_frequencies is None else ids
    angles = rotary_angles(ids.float(), allocation, base, inverse_frequencies)
    per_head = angles.shape[1] > 1 or allocation.axis.dim() == 2
    cos, sin = channel_tables(angles, layout)
    if not per_head:
        cos, sin = cos[:, 0], sin[:, 0]
    ladder = allocation.inverse_frequencies(base) if inverse_frequencies is None else inverse_frequencies
    outputs = {f"{prefix}cos": cos, f"{prefix}sin": sin, f"{prefix}inv_freq": ladder}
    if allocation.axis.dim() == 1:
        outputs["axis_map"] = allocation.axis
    if case.has("in.q"):
        q, k = case.input("q"), case.input("k")
        groups = q.shape[1] // k.shape[1]
        angles_q = angles.repeat_interleave(groups, dim=1) if per_head else angles
        q_rot = rotate(q, rotation_from_angles(angles_q, layout=layout))
        k_rot = rotate(k, rotation_from_angles(angles, layout=layout))
        logits = q_rot @ k_rot.repeat_interleave(groups, dim=1).mT * q.shape[-1] ** -0.5
        outputs |= {f"{prefix}q_rot": q_rot, f"{prefix}k_rot": k_rot, f"{prefix}logits": logits}
    return {
        name: on_real_tokens(case, name, value, mask)
        if case.wants(name) and name.rsplit(".", 1)[-1] not in ("inv_freq", "axis_map")
        else value
        for name, value in outputs.items()
    }


def id_outputs(case: Case, layouts: Mapping[str, PositionLayout], axes: int = 3) -> dict[str, Tensor]:
    """Position ids by output name; a layout with one axis is repeated when the case stores more."""
    outputs = {}
    for name, layout in layouts.items():
        if not case.wants(name):
            continue
        ids = layout.position_ids()
        reference = case.tensors[f"out.{name}"]
        if reference.dim() == 2:
            ids = ids[0]
        elif ids.shape[0] == 1:
            ids = ids.expand(reference.shape[0], -1, -1)
        outputs[name] = on_real_tokens(case, name, ids, layout.mask)
    return outputs


def pairs_of(case: Case) -> int:
    """Rotary pairs of a head, after partial rotary."""
    return int(case.option("head_dim") * case.option("partial_rotary_factor", 1.0)) // 2


def everywhere(case: Case) -> Tensor:
    """A mask of ones for cases that store ids directly."""
    return torch.ones(case.tensors["in.position_ids"].shape[-2:], dtype=torch.bool)
