"""Concentric causal attention.

Ids, pattern, decode ids and hidden states of a tiny decoder; batches of different places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.multimodal import Image, Text, scheme
from tests.golden.case import Case
from tests.golden.runners._tiny_llama import pack_bits, tiny_llama

__all__ = ["run", "run_rings", "tolerance"]


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 2e-5 if reference.is_floating_point() else 0.0


def run(case: Case) -> dict[str, Tensor]:
    return run_rings(case, "cca", {})


def run_rings(case: Case, name: str, layer_options: dict) -> dict[str, Tensor]:
    rows, cols = case.option("grid")
    layers = case.option("layers", 1)
    if case.has("in.img_pos"):
        starts = case.input("img_pos").tolist()
    else:
        starts = [case.option("img_pos")]
        assert case.option("prefix", starts[0]) == starts[0]
    if case.has_option("suffix"):
        lengths = [start + rows * cols + case.option("suffix") for start in starts]
    else:
        lengths = [case.tensors["out.position_ids"].shape[-1]] * len(starts)
    segments = [
        [Text(start), Image(rows, cols), Text(length - start - rows * cols)]
        for start, length in zip(starts, lengths, strict=True)
    ]
    layout = scheme(name, layer_options=layer_options).layout(segments, num_layers=layers)
    batched = len(starts) > 1
    per_layer = [layout.position_ids(layer)[0] for layer in range(layers)]
    allowed = [layout.dense_mask(layer) for layer in range(layers)]
    ids, patterns = torch.stack(per_layer), torch.stack([pattern[:, 0] for pattern in allowed])
    levels = torch.tensor([len(layer_ids[0][layout.kind[0] == 1].unique()) for layer_ids in per_layer])
    if case.has_option("levels"):
        assert int(levels[0]) == case.option("levels")
    stored = case.tensors["out.position_ids"].shape[0]
    outputs = {
        "position_ids": ids[0] if batched else ids[:stored, 0],
        "levels": levels,
    }
    if case.wants("allowed"):
        bits = pack_bits(patterns[0] if batched else patterns[: case.tensors["out.allowed"].shape[0], 0])
        outputs["allowed"] = bits
    if case.wants("decode_ids_correct"):
        following = torch.stack([layout.next_ids(3, layer)[0, 0] for layer in range(layers)])
        outputs["decode_ids_correct"] = following[: case.tensors["out.decode_ids_correct"].shape[0]]
        # the reference reads the length of layer 0's cache after updating it: one too many in the layers above
        late = torch.zeros(layers, 1, dtype=torch.long)
        late[1:] = 1 if name == "pype" else 0
        outputs["decode_ids_reference"] = (following + late)[: case.tensors["out.decode_ids_reference"].shape[0]]
    if case.wants("hidden"):
        x = case.input("inputs_embeds")
        hidden = tiny_llama(
            case.params(),
            x if batched else x[None],
            [layer[None] for layer in per_layer],
            allowed,
            case.option("heads"),
        )
        outputs["hidden"] = hidden if batched else hidden[0]
    case.describe("heads")
    return outputs
