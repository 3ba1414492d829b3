"""LOOPE weights by the names of the paper's layers: ``conv1`` to ``conv5``, ``bn``, ``mlp``.

No weights were released.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["loope_layers"]


def loope_layers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of our ``loope`` (``context="dense"``) from the layers of the paper.

    Args:
        weights: ``conv<i>.weight`` and ``conv<i>.bias`` counted from 1, the four tensors of ``bn``, ``mlp.weight`` and
            ``mlp.bias``.
    """
    renamed = {}
    for key, value in weights.items():
        module, _, name = key.partition(".")
        if module.startswith("conv") and module[4:].isdigit():
            module = f"convs.{int(module[4:]) - 1}"
        elif module in ("bn", "mlp"):
            module = {"bn": "norm", "mlp": "mix"}[module]
        else:
            raise ValueError(f"weights: expected layers conv1 to conv5, bn and mlp, got {key!r}")
        renamed[f"{module}.{name}"] = value
    # the count of batches is state of torch, not of the paper
    renamed.setdefault("norm.num_batches_tracked", torch.tensor(0))
    return renamed
