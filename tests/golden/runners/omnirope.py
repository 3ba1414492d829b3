"""OmniRoPE: the peer's decoder form, and OmniGen2's own layout of captions, reference images and target."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multimodal import Image, Text, rotary_angles, scheme
from tests.golden.case import Case
from tests.golden.runners._multimodal import on_real_tokens, tolerance
from tests.golden.runners.ilrope import run_shifted

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    if not case.has_option("axes_dim"):
        return run_shifted(case, "chunked")
    patch = case.option("patch_size")
    rows = []
    references, targets = case.input("ref_image_sizes").tolist(), case.input("image_sizes").tolist()
    for length, refs, target in zip(case.input("caption_lengths").tolist(), references, targets, strict=True):
        images = [Image(h // patch, w // patch) for h, w in [*refs, target] if h > 0]
        rows.append([Text(length), *images])
    axes_dim = tuple(case.option("axes_dim"))
    chosen = scheme("omnirope", allocation="separate", allocation_options={"axes_dim": axes_dim})
    layout = chosen.layout(rows)
    ids = layout.position_ids()
    angles = rotary_angles(ids, chosen.allocate(sum(axes_dim) // 2), float(case.option("theta")))[:, 0]
    outputs = {"position_ids": ids, "cos": angles.cos(), "sin": angles.sin()}
    assert layout.mask.dtype == torch.bool
    return {name: on_real_tokens(case, name, value, layout.mask) for name, value in outputs.items()}
