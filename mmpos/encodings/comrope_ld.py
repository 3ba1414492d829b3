"""ComRoPE-LD: linearly dependent angle matrices, one matrix per block times one factor per axis.

Yu et al., CVPR 2025, arXiv 2506.03737; see :mod:`mmpos.encodings._comrope`. The released code shares the factors across
heads, the parameter count of the paper has them per head (``per_head=True``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmpos.encodings._comrope import ComRopeEncoding
from mmpos.encodings.base import Facts, wide_dtype
from mmpos.encodings.registry import register


@register("comrope_ld")
class ComRopeLD(ComRopeEncoding):
    """Each block turns by ``exp(u G)`` with ``u = sum_axis s_axis r_axis``.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        per_head: whether each head owns its factors.
        comrope: arguments of :class:`~mmpos.encodings._comrope.ComRopeEncoding`.

    Shape:
        ``generators (heads, m, b, b)``, ``scales (A, heads or 1, m)``.

    Example:
        >>> from mmpos import create_encoding
        >>> create_encoding("comrope_ld", dim=32, num_heads=2, block_size=4).layers[0]["comrope_ld"].scales.shape
        torch.Size([2, 1, 4])
    """

    facts = Facts(
        title="ComRoPE-LD",
        source="Yu et al. 2025, arXiv 2506.03737",
        plugs_into=("qk",),
        scope="layer",
        resolution_rules=("rescaled", "index"),
        head_dim_rule="a multiple of block_size (8)",
        relative=True,
        learned=True,
    )
    fp32_parameters = ("generators", "scales", "folded_freqs")

    def __init__(self, dim: int, num_heads: int, *, per_head: bool = False, **comrope: Any) -> None:
        super().__init__(dim, num_heads, **comrope)
        heads = num_heads if per_head else 1
        self.scales = nn.Parameter(torch.empty(self.axes, heads, self.num_blocks, dtype=wide_dtype()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal matrices and standard normal factors."""
        super().reset_parameters()
        self.scales.normal_()

    def directions(self) -> Tensor:
        return self.scales
