"""RoPE-Axial: each pair of channels turns with one image axis, with fixed frequencies.

Heo, Park, Han, Yun, *Rotary Position Embedding for Vision Transformer*, ECCV 2024, arXiv 2403.13298. Reference:
naver-ai/rope-vit (rotary files under the Llama 2 licence; nothing of them is here). The paper's formula alternates the
axes pair by pair, the released code and all checkpoints put the pairs of an axis side by side; the default follows the
checkpoints, ``allocation="alternating"`` the formula. The reference decides by token count whether the grid changed;
here the grid is explicit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpos.encodings._rotary import ROTARY_RULES, RotaryEncoding
from mmpos.encodings.base import Facts
from mmpos.encodings.registry import register
from mmpos.functional.rotary import axial_angles, inverse_frequencies, pixel_frequencies
from mmpos.positions import Positions


@register("rope_axial")
class RopeAxial(RotaryEncoding):
    """Axial rotary encoding for any number of axes.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``; ``head_dim`` must be a multiple of twice the axes.
        theta: base of the ladder; 100 for ViTs (rope-vit, timm ports), 50 for Swin, 10000 for EVA-02.
        axis_order: which axis owns the first pairs, ``xy`` column first (rope-vit) or ``ij`` row first (EVA-02,
            DINOv3).
        allocation: ``blocked`` (released code) or ``alternating`` (formula of the paper).
        bands: ``language`` ladder of ``theta``, or timm's ``pixel`` / ``pixel_linear`` ladders for coordinates on [-1,
            1].
        max_resolution: resolution of the pixel ladders.
        rotary: arguments of :class:`~mmpos.encodings._rotary.RotaryEncoding`.
    """

    facts = Facts(
        title="RoPE-Axial",
        source="Heo et al. 2024, arXiv 2403.13298",
        plugs_into=("qk",),
        resolution_rules=(*ROTARY_RULES, "resonance", "resonance_yarn"),
        head_dim_rule="a multiple of 2 x axes",
        relative=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        theta: float = 100.0,
        axis_order: str = "xy",
        allocation: str = "blocked",
        bands: str = "language",
        max_resolution: float = 224.0,
        **rotary: Any,
    ) -> None:
        super().__init__(dim, num_heads, **rotary)
        if bands not in ("language", "pixel", "pixel_linear"):
            raise ValueError(f"bands: expected 'language', 'pixel' or 'pixel_linear', got {bands!r}")
        if axis_order not in ("xy", "ij"):
            raise ValueError(f"axis_order: expected 'xy' (column first) or 'ij' (row first), got {axis_order!r}")
        if allocation not in ("blocked", "alternating"):
            raise ValueError(f"allocation: expected 'blocked' or 'alternating', got {allocation!r}")
        if not theta > 0:
            raise ValueError(f"theta: expected a positive base, got {theta}")
        self.theta = theta
        self.axis_order = axis_order
        self.allocation = allocation
        self.bands = bands
        self.max_resolution = max_resolution

    def check_head_dim(self) -> None:
        if self.head_dim % (2 * self.axes):
            raise ValueError(
                f"head_dim: {self.name} needs a multiple of {2 * self.axes} for {self.axes} axes, got {self.head_dim} "
                f"(dim {self.dim}, "
                f"num_heads {self.num_heads}); change dim or num_heads"
            )

    def frequencies(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Ladder of one axis, radians per unit. Shape: ``(d / (2 A),)``."""
        count = self.head_dim // (2 * self.axes)
        if self.bands == "language":
            return inverse_frequencies(count, self.theta, device=device, dtype=dtype)
        return pixel_frequencies(
            count, self.max_resolution, linear=self.bands == "pixel_linear", device=device, dtype=dtype
        )

    def angles(self, positions: Positions) -> tuple[Tensor, Tensor | None]:
        coords = self.coordinate_values(positions)
        ladder = self.frequencies(coords.device, coords.dtype)
        if self.resolution in ("index", "rescaled"):
            return axial_angles(coords, ladder.expand(self.axes, -1), self.axis_order, self.allocation), None
        per_axis = [
            self.scaled(ladder, positions, axis, self.head_dim // self.axes, self.theta) for axis in range(self.axes)
        ]
        freqs = torch.stack([freqs for freqs, _ in per_axis], dim=1)
        angles = axial_angles(coords, freqs, self.axis_order, self.allocation)
        if per_axis[0][1] is None:
            return angles, None
        # the amplitude of an axis multiplies the pairs of that axis: deal it out exactly as the angles are dealt out
        factors = torch.stack([amplitude for _, amplitude in per_axis if amplitude is not None], dim=1)[..., None]
        ones = torch.ones_like(coords[:, :1])
        return angles, axial_angles(
            ones, factors.expand(-1, -1, self.head_dim // (2 * self.axes)), self.axis_order, self.allocation
        )
