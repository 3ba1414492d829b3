"""iRPE tables of microsoft/Cream (DeiT-with-iRPE, DETR-with-iRPE, Mini-DeiT).

An attention module there holds ``rpe_q``, ``rpe_k``, ``rpe_v``, each with ``lookup_table_weight`` (contextual) or
``lookup_table_bias``; the cross method holds two of them, ``rp_rows`` and ``rp_cols``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["irpe_tables"]


def irpe_tables(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """State dict of one ``irpe`` encoding from the state dict of a reference attention module.

    Args:
        state: state dict of the reference; other entries are ignored.
        prefix: where the attention module is, for example ``blocks.0.attn.``.
    """
    tables: dict[str, Tensor] = {}
    for letter in "qkv":
        for kind in ("weight", "bias"):
            leaf = f"lookup_table_{kind}"
            name = f"{prefix}rpe_{letter}."
            if name + leaf in state:
                tables[f"table_{letter}"] = state[name + leaf][None]
            elif f"{name}rp_rows.{leaf}" in state:
                tables[f"table_{letter}"] = torch.stack(
                    [state[f"{name}rp_rows.{leaf}"], state[f"{name}rp_cols.{leaf}"]]
                )
    if not tables:
        near = sorted({key.rsplit("rpe_", 1)[0] for key in state if "rpe_" in key})
        raise ValueError(
            f"state: no iRPE table under {prefix!r}; "
            + (
                f"attention modules with tables are {near[:4]}"
                if near
                else "the state dict holds no rpe_q, rpe_k or rpe_v"
            )
        )
    return tables
