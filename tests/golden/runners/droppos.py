"""DropPos: soft labels of both kinds, loss and accuracy."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.objectives import position_accuracy, position_loss, smoothing_targets
from tests.golden.case import Case, Unknown


def tolerance(name: str, reference: Tensor, case: Case) -> float:
    return 1e-6 * max(1.0, float(reference.abs().max()))


def run(case: Case) -> dict[str, Tensor]:
    grid, sigma = tuple(case.option("grid")), float(case.option("sigma"))
    logits, cells = case.input("logits", torch.float64), case.input("ids_keep")
    counted = case.input("pos_dropped").double()
    attentive = case.option("attentive", False)
    if attentive != case.has("in.attn"):
        raise Unknown(f"config.attentive={attentive} with{'' if case.has('in.attn') else 'out'} in.attn")
    if attentive:
        counted = counted * case.input("attn", torch.float64)
    quirk = smoothing_targets(grid, sigma, reference_quirk=True, dtype=torch.float64)
    rows = smoothing_targets(grid, sigma, dtype=torch.float64)
    return {
        "smooth_reference": quirk.float(),
        "smooth_row_normalised": rows,
        "loss_reference": position_loss(logits, cells, counted, quirk),
        "loss_row_normalised": position_loss(logits, cells, counted, rows),
        "accuracy": position_accuracy(logits, cells, counted),
    }
