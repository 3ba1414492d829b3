"""V2PE: fractional ids inside images, one stride for all or one drawn per image; the rotation in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.functional.rotary import rotate, rotation_from_angles
from mmpos.multimodal import Image, Text, channel_tables, rotary_angles, scheme
from tests.golden.case import Case
from tests.golden.runners._multimodal import tolerance

__all__ = ["run", "tolerance"]

VISUAL = 1003


def run(case: Case) -> dict[str, Tensor]:
    if case.has("in.q"):
        return _rotation(case)
    case.expect("version", "v2pe_fix", "v2pe_rnd", "default")
    ids = case.input("input_ids")
    mask = torch.ones_like(ids, dtype=torch.bool)
    if case.has("in.attention_mask"):
        mask = case.input("attention_mask").bool()
    per_tile = case.option("tokens_per_tile")
    tiles = case.input("num_tiles").tolist()
    if case.option("delta", None) is not None:
        steps = [float(case.option("delta"))] * len(tiles)
        assert steps[0] == case.option("stride") / per_tile if case.option("stride", None) is not None else True
    elif case.has("in.delta_per_image"):
        steps = case.input("delta_per_image").tolist()
        strides = case.input("strides_per_image").double()
        assert torch.equal(strides / per_tile, torch.tensor(steps, dtype=torch.float64))
    else:
        steps = [1.0] * len(tiles)
    case.describe("delta", "stride")
    segments: list = []
    images = iter(zip(tiles, steps, strict=True))
    visual = (ids == VISUAL).tolist()
    real = int(mask.sum())
    position = 0
    while position < real:
        end = position
        while end < real and visual[end] == visual[position]:
            end += 1
        if visual[position]:
            count, step = next(images)
            assert count * per_tile == end - position
            segments.append(Image(count, per_tile, step=step))
        else:
            segments.append(Text(end - position))
        position = end
    layout = scheme("v2pe").layout([segments], length=len(ids))
    ours = layout.position_ids()[0, 0].float()
    # the reference leaves 1 on right padding and decodes from the last slot, padded or not
    ours = torch.where(mask, ours, torch.ones_like(ours))
    following = layout.next_ids(4)[0].float()
    if real < len(ids):
        following = (ours[-1] + torch.arange(1, 5))[None]
    return {"position_ids": ours, "decode_position_ids": following}


def _rotation(case: Case) -> dict[str, Tensor]:
    allocation = scheme("v2pe").allocate(case.option("dim") // 2)
    angles = rotary_angles(case.input("position_ids")[None], allocation, float(case.option("base")))
    cos, sin = channel_tables(angles[0, 0])
    table = rotation_from_angles(angles, layout="half")
    return {"cos": cos, "sin": sin, "q": rotate(case.input("q"), table), "k": rotate(case.input("k"), table)}
