"""RoPE-Mixed: each pair of channels turns along its own learned direction, per head and per layer.

Heo, Park, Han, Yun, *Rotary Position Embedding for Vision Transformer*, ECCV 2024, arXiv 2403.13298. Reference:
naver-ai/rope-vit (rotary files under the Llama 2 licence; nothing of them is here). Beyond the reference: any number of
axes, frequencies that stay float32 under every cast, scalings for learned frequencies through the length of each
frequency vector.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.encodings._rotary import ROTARY_RULES, RotaryEncoding
from mmpos.encodings.base import Facts, wide_dtype
from mmpos.encodings.registry import register
from mmpos.functional.rope_3d import octgpt_frames
from mmpos.functional.rotary import axial_frames, directed_frequencies, mixed_angles, random_frames
from mmpos.positions import Positions


@register("rope_mixed")
class RopeMixed(RotaryEncoding):
    """Mixed rotary encoding, ``angle = row f_row + column f_column`` with learned frequency vectors.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``; ``head_dim`` must be a multiple of twice the axes.
        theta: base of the ladder of initial magnitudes, 10 in the paper.
        per_head: whether each head owns its frequencies.
        init: ``random`` draws one frame of directions per head (the paper); ``axial`` starts as RoPE-Axial;
            ``octgpt`` is the frame of OctGPT (3 axes, not orthogonal, ``theta=100`` there).
        learned: whether the frequencies train.
        rotary: arguments of :class:`~mmpos.encodings._rotary.RotaryEncoding`.

    Shape:
        ``freqs`` is ``(A, heads or 1, d/2)``, axis order of the coordinates (row, col), radians per patch.
    """

    facts = Facts(
        title="RoPE-Mixed",
        source="Heo et al. 2024, arXiv 2403.13298",
        plugs_into=("qk",),
        scope="layer",
        resolution_rules=ROTARY_RULES,
        head_dim_rule="a multiple of 2 x axes",
        relative=True,
        learned=True,
    )
    fp32_parameters = ("freqs",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        theta: float = 10.0,
        per_head: bool = True,
        init: str = "random",
        learned: bool = True,
        **rotary: Any,
    ) -> None:
        super().__init__(dim, num_heads, **rotary)
        if init not in ("random", "axial", "octgpt") or (init == "octgpt" and self.axes != 3):
            raise ValueError(f"init: expected 'random', 'axial' or, with 3 axes, 'octgpt', got {init!r}")
        if not theta > 0:
            raise ValueError(f"theta: expected a positive base, got {theta}")
        self.theta = theta
        self.init = init
        heads = num_heads if per_head else 1
        self.freqs = nn.Parameter(
            torch.empty(self.axes, heads, self.head_dim // 2, dtype=wide_dtype()), requires_grad=learned
        )
        self.reset_parameters()

    def check_head_dim(self) -> None:
        if self.head_dim % (2 * self.axes):
            raise ValueError(
                f"head_dim: {self.name} needs a multiple of {2 * self.axes} for {self.axes} axes, got {self.head_dim} "
                f"(dim {self.dim}, "
                f"num_heads {self.num_heads}); change dim or num_heads"
            )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Magnitudes on the ladder; directions from a random orthonormal frame per head."""
        heads = self.freqs.shape[1]
        device = self.freqs.device
        if self.init == "octgpt":
            draw = torch.rand(heads, 2, device=device)
            frame = octgpt_frames(draw[:, 0] * 2 * math.pi, draw[:, 1] * math.pi / 2)
        else:
            frames = random_frames if self.init == "random" else axial_frames
            frame = frames(heads, self.axes, device=device)
        self.freqs.copy_(directed_frequencies(frame, self.head_dim // 2, self.theta))

    def angles(self, positions: Positions) -> tuple[Tensor, Tensor | None]:
        coords = self.coordinate_values(positions)
        freqs = self.freqs.to(self.compute_dtype(positions, self.freqs))
        if self.resolution in ("index", "rescaled"):
            return mixed_angles(coords, freqs), None
        # each axis has its own scale; the ladder place of a pair is that of its whole frequency vector
        length = freqs.norm(dim=0).clamp_min(1e-12)
        pairs = self.head_dim // self.axes
        scaled = [self.scaled(length, positions, axis, pairs, self.theta) for axis in range(self.axes)]
        freqs = torch.stack([freqs[axis] * factor / length for axis, (factor, _) in enumerate(scaled)], dim=1)
        amplitudes = [amplitude for _, amplitude in scaled if amplitude is not None]
        if not amplitudes:
            return mixed_angles(coords, freqs), None
        # a pair reads all axes at once: their amplitudes count as much as the axes do in its direction
        weight = (self.freqs.to(length.dtype) / length).square()
        weight = weight / weight.sum(0).clamp_min(1e-12)
        excess = torch.stack(
            [w * (factor[:, None, None] - 1) for w, factor in zip(weight.unbind(0), amplitudes, strict=True)]
        )
        return mixed_angles(coords, freqs), 1 + excess.sum(0)[:, :, None]


def mixed_init_2d(turn: Tensor, head_dim: int, theta: float) -> Tensor:
    """The initialisation of the paper from one angle per head, in the axis order (row, col).

    Half of the pairs point along ``(cos a, sin a)`` in (x, y), the other half at right angles to it.

    Shape:
        turn ``(heads,)`` radians; returns ``(2, heads, d/2)``.
    """
    direction = torch.stack([turn, turn + math.pi / 2])  # (2 groups, heads)
    frame = torch.stack([direction.sin(), direction.cos()], dim=-1)  # (groups, heads, (row, col))
    return directed_frequencies(frame.transpose(0, 1), head_dim // 2, theta)
