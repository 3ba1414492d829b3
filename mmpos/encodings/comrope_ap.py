"""ComRoPE-AP: axis-partitioned angle matrices, every block belongs to one axis.

Yu et al., CVPR 2025, arXiv 2506.03737; see :mod:`mmpos.encodings._comrope`. Blocks are dealt out to the axes in turn,
as in the released code; with ``block_size=2`` this is RoPE-Axial with learned frequencies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpos.encodings._comrope import ComRopeEncoding
from mmpos.encodings.base import Facts
from mmpos.encodings.registry import register


@register("comrope_ap")
class ComRopeAP(ComRopeEncoding):
    """Block ``j`` turns by ``exp(r_axis G_j)`` with ``axis = j mod A``.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``; ``head_dim / A`` must be a multiple of ``block_size``.
        comrope: arguments of :class:`~mmpos.encodings._comrope.ComRopeEncoding`.

    Shape:
        ``generators (heads, m, b, b)``.

    Example:
        >>> from mmpos import create_encoding
        >>> create_encoding("comrope_ap", dim=32, num_heads=2, block_size=4).layers[0]["comrope_ap"].generators.shape
        torch.Size([2, 4, 4, 4])
    """

    facts = Facts(
        title="ComRoPE-AP",
        source="Yu et al. 2025, arXiv 2506.03737",
        plugs_into=("qk",),
        scope="layer",
        resolution_rules=("rescaled", "index"),
        head_dim_rule="a multiple of block_size (8) x axes",
        relative=True,
        learned=True,
    )

    def __init__(self, dim: int, num_heads: int, **comrope: Any) -> None:
        super().__init__(dim, num_heads, **comrope)
        if self.num_blocks % self.axes:
            raise ValueError(
                f"block_size: comrope_ap deals blocks out to {self.axes} axes and needs head_dim to be a multiple of "
                f"{self.axes} x block_size {self.block_size}, got head_dim {self.head_dim}; "
                "change block_size or use comrope_ld"
            )
        self.reset_parameters()

    def directions(self) -> Tensor:
        axis = torch.arange(self.axes, device=self.generators.device)
        owner = torch.arange(self.num_blocks, device=self.generators.device) % self.axes
        return (axis[:, None, None] == owner).to(self.generators.dtype)
