"""Interleaved frame encoding (LVChat) and the shared ids of MouSi."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multimodal import Image, Text, scheme
from mmpos.multimodal.interleave import interleave_frames
from tests.golden.case import Case
from tests.golden.runners._tiny_llama import pack_bits, tiny_llama
from tests.golden.runners.cca import tolerance

__all__ = ["run", "tolerance"]


def run(case: Case) -> dict[str, Tensor]:
    if case.has_option("grids"):
        images = [Image(*grid) for grid in case.option("grids")]
        segments = [Text(case.option("prefix")), *images, Text(case.option("suffix"))]
        names = {"original": "raster", "share_by_col": "share_by_column"}
        names |= {name: name for name in ("share_all", "share_by_row")}
        return {f"ids_{key}": scheme(name).layout([segments]).position_ids()[0, 0] for key, name in names.items()}
    frames, groups = case.option("frames_per_group"), case.option("groups")
    question = case.option("question")
    layout = interleave_frames(
        frames,
        groups,
        tokens_per_frame=case.option("tokens_per_clip") / case.option("frames_per_clip"),
        prefix=case.option("prefix"),
        suffix=case.option("suffix"),
        question=question,
    )
    outputs = {
        "frame_index": layout.frame_index,
        "group_id": layout.group,
        "position_ids": layout.position_ids,
        "next_decode_id": torch.tensor([layout.next_id]),
        "allowed": pack_bits(layout.allowed),
    }
    if case.wants("question_hidden"):
        params = case.params()
        layers = len({name.split(".")[1] for name in params if name.startswith("layers.")})
        hidden = tiny_llama(
            params,
            case.input("inputs_embeds")[None],
            [layout.position_ids[None, None]] * layers,
            [layout.allowed[None, None]] * layers,
            case.option("heads", 2),
        )
        outputs["question_hidden"] = hidden[0, -question:]
    return outputs
