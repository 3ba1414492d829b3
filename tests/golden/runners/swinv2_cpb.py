"""SwinV2 continuous position bias: official windows, timm's ``RelPosMlp``, and a block of SwinV2."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos import Positions, create_encoding
from mmpos.checkpoints import swin_cpb_network
from mmpos.functional.bias import offset_grid
from tests.golden.case import Case
from tests.golden.runners.swin_rpb import block


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-5  # the reference builds its coordinates in float32


def run(case: Case) -> dict[str, Tensor]:
    if case.has("in.x"):
        return block(case, version=2)
    heads, prefix = case.option("heads"), case.option("prefix_tokens", 0)
    mode = case.expect("mode", "swin", "cr") or "swin"
    pretrained = case.option("pretrained_window", [0, 0])
    pretrained = [pretrained, pretrained] if isinstance(pretrained, int) else pretrained
    many = case.has_option("windows")
    windows = case.option("windows") if many else [case.option("window")]
    outputs: dict[str, Tensor] = {}
    for window in windows:
        rule = "re-evaluated" if any(pretrained) else "normalised"
        stack = create_encoding(
            "swin_cpb",
            8 * heads,
            heads,
            mode=mode,
            hidden=case.option("hidden"),
            num_prefix=prefix,
            train_grid=pretrained if any(pretrained) else window,
            resolution=rule,
        )
        encoding = stack.layers[0]["swin_cpb"]
        encoding.load_state_dict(swin_cpb_network(case.params()))
        encoding.double().eval()
        positions = Positions.grid(*window, num_prefix=prefix)
        state = stack.prepare(positions)[0]
        q = torch.zeros(1, heads, 1, 1)
        bias = encoding.logit_bias(q, q, state.prepared[0])
        coords = encoding.coordinates(offset_grid(window), positions)
        ending = f".{window[0]}x{window[1]}" if many else ""
        outputs[f"bias{ending}"] = bias[0] if many else bias
        outputs[f"coords{ending}"] = coords
    return outputs
