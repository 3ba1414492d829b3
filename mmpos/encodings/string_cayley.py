"""Cayley-STRING: rotary encoding with learned frequencies in a learned orthonormal basis.

Schenck et al., *Learning the RoPEs: Better 2D and 3D Position Encodings with STRING*, ICML 2025, arXiv 2502.02562;
no official code. ``q' = RoPE(r) P q`` with ``P = (I - S)(I + S)^-1``. The outer ``P^T`` of the group element cancels
between queries and keys. The paper says nothing about tokens without a place: here they are multiplied by ``P`` too,
as position zero; without it their scores against placed tokens would change with ``P``. The paper gives no
initialisation either: ``S = 0`` starts as RoPE-Mixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmpos.encodings._string import StringEncoding
from mmpos.encodings.base import Facts, wide_dtype
from mmpos.encodings.registry import register
from mmpos.functional.rotary import axial_frames, directed_frequencies, random_frames
from mmpos.functional.skew import skew_from_upper
from mmpos.functional.string import cayley


@register("string_cayley")
class StringCayley(StringEncoding):
    """Cayley-STRING for any number of real coordinates.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        theta: base of the ladder of initial magnitudes; 10 as in RoPE-Mixed, the paper's ViTs are said to use 100.
        per_head: whether each head owns its basis and frequencies.
        init: ``random`` draws one frame of directions per head as RoPE-Mixed does; ``axial`` starts as RoPE-Axial.
        rotary: arguments of :class:`~mmpos.encodings._rotary.RotaryEncoding`.

    Shape:
        ``freqs (A, heads or 1, d/2)``, ``skew (heads or 1, d (d - 1) / 2)``, the strict upper triangle of ``S``.

    Example:
        >>> from mmpos import create_encoding
        >>> create_encoding("string_cayley", dim=16, num_heads=2).layers[0]["string_cayley"].skew.shape
        torch.Size([2, 28])
    """

    facts = Facts(
        title="Cayley-STRING",
        source="Schenck et al. 2025, arXiv 2502.02562",
        plugs_into=("qk",),
        scope="layer",
        resolution_rules=("index", "rescaled", "linear"),
        head_dim_rule="even",
        relative=True,
        learned=True,
    )
    fp32_parameters = ("freqs", "skew", "folded_freqs")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        theta: float = 10.0,
        per_head: bool = True,
        init: str = "random",
        **rotary: Any,
    ) -> None:
        super().__init__(dim, num_heads, **rotary)
        if init not in ("random", "axial"):
            raise ValueError(f"init: expected 'random' or 'axial', got {init!r}")
        if not theta > 0:
            raise ValueError(f"theta: expected a positive base, got {theta}")
        self.theta = theta
        self.init = init
        heads = num_heads if per_head else 1
        self.freqs = nn.Parameter(torch.empty(self.axes, heads, self.head_dim // 2, dtype=wide_dtype()))
        self.skew = nn.Parameter(torch.empty(heads, self.head_dim * (self.head_dim - 1) // 2, dtype=wide_dtype()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The start of RoPE-Mixed in the basis of the channels."""
        frames = random_frames if self.init == "random" else axial_frames
        frame = frames(self.freqs.shape[1], self.axes, device=self.freqs.device)
        self.freqs.copy_(directed_frequencies(frame, self.head_dim // 2, self.theta))
        self.skew.zero_()

    def orthogonal(self) -> Tensor:
        """The basis ``P`` of each head. Shape: ``(heads or 1, d, d)``."""
        return cayley(skew_from_upper(self.skew, self.head_dim))

    def frequencies(self) -> Tensor:
        return self.freqs
