"""ComRoPE angle matrices of Longin-Yu/ComRoPE.

The reference stores ``freqs (heads, 1, m, b, b)`` in every attention layer, and for LD ``multiplier (1, A, m, 1, 1)``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

__all__ = ["comrope_layer", "comrope_layers"]


def comrope_layer(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of one ``comrope_ld`` or ``comrope_ap`` from ``freqs`` and, for LD, ``multiplier``.

    Shape:
        ``freqs (heads, 1, m, b, b)``, ``multiplier (1, A, m, 1, 1)``.
    """
    freqs = state.get("freqs")
    if freqs is None or freqs.dim() != 5 or freqs.shape[1] != 1 or freqs.shape[-1] != freqs.shape[-2]:
        got = sorted(state) if freqs is None else tuple(freqs.shape)
        raise ValueError(f"freqs: expected (heads, 1, blocks, b, b) of a ComRoPE attention layer, got {got}")
    out = {"generators": freqs[:, 0]}
    if "multiplier" in state:
        multiplier = state["multiplier"]
        if multiplier.dim() != 5 or multiplier.shape[2] != freqs.shape[2]:
            raise ValueError(
                f"multiplier: expected (1, axes, {freqs.shape[2]}, 1, 1) beside freqs, got {tuple(multiplier.shape)}"
            )
        out["scales"] = multiplier[:, :, :, 0, 0].transpose(0, 1)  # (A, heads or 1, m)
    return out


def comrope_layers(state_dict: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """One state dict per layer from the weights of a whole reference model, in the order of its layers."""
    found: dict[int, dict[str, Tensor]] = {}
    for key, value in state_dict.items():
        match = re.search(r"\.(\d+)\.(?:[A-Za-z_]+\.)*(freqs|multiplier)$", key)
        if match:
            found.setdefault(int(match[1]), {})[match[2]] = value
    if sorted(found) != list(range(len(found))) or not found:
        raise ValueError(f"state_dict: expected freqs in layers 0, 1, ..., found layers {sorted(found)}")
    return [comrope_layer(found[layer]) for layer in range(len(found))]
