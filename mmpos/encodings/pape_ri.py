"""PaPE-RI: the rotation-invariant PaPE, where every query only chooses how fast its attention falls with distance.

*Parabolic Position Encoding*, arXiv 2602.01418. Reference: DTU-PAS/parabolic-position-encoding, which states no
licence: nothing of it is here, only the formulas. ``s_ij = -a_i c^2 |x_i - x_j|^2`` with
``a_i = softplus(alpha . h_i)``. The factor ``c`` of a head is drawn once and saved with the weights but not trained in
the reference, so that some heads stay nearly blind to position; ``learned_scales=True`` trains it. The reference
appends ``2 A + 1`` columns; ``A + 1`` are enough, about the mean coordinate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.encodings._parabolic import ParabolicEncoding, Places
from mmpos.encodings.base import Facts
from mmpos.encodings.registry import register
from mmpos.positions import Positions


@register("pape_ri")
class PaPERI(ParabolicEncoding):
    """Rotation-invariant parabolic encoding.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        learned_scales: whether the factor ``c`` of each head trains.
        parabolic: arguments of :class:`~mmpos.encodings._parabolic.ParabolicEncoding`.

    Shape:
        ``curvature.weight`` is ``(h, D)``, ``scales`` is ``(h,)``.
    """

    facts = Facts(
        title="PaPE-RI",
        source="arXiv 2602.01418",
        plugs_into=("qk",),
        scope="layer",
        resolution_rules=("index", "rescaled", "normalised"),
        relative=True,
        learned=True,
    )

    scales: Tensor

    def __init__(self, dim: int, num_heads: int, *, learned_scales: bool = False, **parabolic: Any) -> None:
        super().__init__(dim, num_heads, **parabolic)
        self.curvature = nn.Linear(dim, num_heads, bias=False)
        if learned_scales:
            self.scales = nn.Parameter(torch.empty(num_heads))
        else:
            self.register_buffer("scales", torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scales, -1 / math.sqrt(self.axes), 1 / math.sqrt(self.axes))
        self.curvature.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """The factors; the map of the features decays as in the paper."""
        return {name for name, _ in self.named_parameters() if name == "scales"}

    def prepare(self, positions: Positions) -> Places:
        """Places of all tokens."""
        return self.places(positions, self.compute_dtype(positions.coords, self.scales))

    def transform_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Places, x: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append the columns whose product is the bias; values pass."""
        places, coords = prepared, prepared.coords
        x = self.check_input(x, q, places)
        rate = (
            F.softplus(self.curvature(x).to(coords.dtype)).mT[..., None]
            * self.scales.to(coords.dtype)[:, None, None] ** 2
        )
        square = (coords**2).sum(-1, keepdim=True)
        queries = torch.cat([rate * places.balance, 2 * rate * coords], dim=-1)
        keys = torch.cat([-square / places.balance, coords], dim=-1)
        constant = None if places.prefix is None else -(rate * square)[..., 0]
        return *self.append(q, k, queries, keys, constant, places), v
