"""Rotary encoding of videos, volumes and points: how the axes share the channels of a head.

``axial``: each axis owns a slice of channels with a ladder of its own (OctGPT, arXiv 2504.09975, octree-nn/octgpt,
no licence; Flux and VisionLLaMA slices; LaVie, Apache-2.0, rotates one slice by the frame and passes the rest;
V-JEPA2). ``chunked``, ``interleaved``, ``videorope``: one ladder whose frequencies are dealt out to the axes
(Qwen2-VL and Qwen3-VL, Apache-2.0; VideoRoPE, arXiv 2502.05173). Nothing of the code without a licence is here.
Equal coordinates on all axes make a shared ladder 1-D RoPE, which separate ladders are not. Learned directions in
three axes are ``rope_mixed`` with ``axes=3``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmpos.encodings._rotary import ROTARY_RULES, RotaryEncoding
from mmpos.encodings.base import Facts
from mmpos.encodings.registry import register
from mmpos.functional.rope_3d import SHARED_SPLITS, pair_axes, tiled_blocks
from mmpos.functional.rotary import Rotation, inverse_frequencies, pixel_frequencies, rotate, transform_blocks
from mmpos.positions import Positions


@register("rope_3d")
class Rope3d(RotaryEncoding):
    """Rotary encoding with fixed frequencies and any split of the channels over 1 to 4 axes.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        split: ``axial`` (own ladders), ``chunked``, ``interleaved`` or ``videorope`` (one ladder for all axes).
        sections: for ``axial`` channels of each axis in coordinate order, even and at most ``head_dim`` together,
            the rest is not rotated; default equal slices. For a shared ladder frequencies of each axis; default an
            eighth for the first axis (``chunked``), a quarter (``videorope``) or equal shares (``interleaved``), the
            others equal.
        theta: base of the ladders; default 100 for ``axial`` and 10000 for a shared ladder.
        bands: ``language`` ladder of ``theta``, or ``pixel`` / ``pixel_linear`` ladders for coordinates on [-1, 1].
        max_resolution: resolution of the pixel ladders.
        vjepa2_compat: run released V-JEPA2 weights: interleaved channels with tiled angles (``theta=10000``). Not a
            rotation: norms change and scores depend on absolute places.
        layout: ``interleaved`` or ``half``; default interleaved for ``axial``, half for a shared ladder.
        rotary: arguments of :class:`~mmpos.encodings._rotary.RotaryEncoding`. ``resolution="rescaled"`` stretches
            each axis onto its own training size, frames included; ``index`` lets longer videos run on.

    Example:
        >>> from mmpos import Positions, create_encoding
        >>> stack = create_encoding("rope_3d", dim=40, num_heads=2, axes=3, sections=(4, 8, 8))
        >>> stack.prepare(Positions.grid(2, 2, 3))[0].prepared[0].cos.shape
        torch.Size([1, 1, 12, 10])
    """

    facts = Facts(
        title="RoPE-3D",
        source="OctGPT 2504.09975, VideoRoPE 2502.05173, Qwen2-VL 2409.12191",
        plugs_into=("qk",),
        resolution_rules=ROTARY_RULES,
        head_dim_rule="even",
        relative=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        split: str = "axial",
        sections: Sequence[int] | None = None,
        theta: float | None = None,
        bands: str = "language",
        max_resolution: float = 224.0,
        vjepa2_compat: bool = False,
        layout: str | None = None,
        **rotary: Any,
    ) -> None:
        if split not in ("axial", *SHARED_SPLITS):
            raise ValueError(f"split: expected one of {('axial', *SHARED_SPLITS)}, got {split!r}")
        shared = split != "axial"
        super().__init__(dim, num_heads, layout=layout or ("half" if shared else "interleaved"), **rotary)
        if theta is not None and not theta > 0:
            raise ValueError(f"theta: expected a positive base, got {theta}")
        if bands not in ("language", "pixel", "pixel_linear"):
            raise ValueError(f"bands: expected 'language', 'pixel' or 'pixel_linear', got {bands!r}")
        if vjepa2_compat and (shared or self.layout != "interleaved"):
            raise ValueError(
                f"vjepa2_compat: needs split='axial' and interleaved channels, got {split!r} and {self.layout!r}"
            )
        self.split = split
        self.theta = (10000.0 if shared else 100.0) if theta is None else theta
        self.bands = bands
        self.max_resolution = max_resolution
        self.vjepa2_compat = vjepa2_compat
        self.sections = self._default_sections() if sections is None else tuple(int(count) for count in sections)
        self._check_sections()

    def _default_sections(self) -> tuple[int, ...]:
        if self.split == "axial":
            return (2 * (self.head_dim // self.axes // 2),) * self.axes
        pairs, others = self.head_dim // 2, self.axes - 1
        if not others:
            return (pairs,)
        first = {"chunked": pairs // 8, "videorope": pairs // 4, "interleaved": -(-pairs // self.axes)}[self.split]
        rest = pairs - first
        return (first, *(rest // others + (axis < rest % others) for axis in range(others)))

    def _check_sections(self) -> None:
        if len(self.sections) != self.axes:
            raise ValueError(f"sections: expected one number for each of {self.axes} axes, got {self.sections}")
        if self.split == "axial":
            odd = any(count < 0 or count % 2 for count in self.sections)
            if odd or not 0 < sum(self.sections) <= self.head_dim:
                raise ValueError(
                    f"sections: expected even numbers of channels that add up to at most head_dim {self.head_dim}, "
                    f"got {self.sections}"
                )
        else:
            pair_axes(self.split, self.sections, self.head_dim // 2)

    def ladder(self, axis: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Frequencies an axis may use: its own ladder, or the whole shared one. Shape: ``(m,)``."""
        count = self.sections[axis] // 2 if self.split == "axial" else self.head_dim // 2
        if self.bands == "language":
            return inverse_frequencies(max(count, 1), self.theta, device=device, dtype=dtype)[:count]
        linear = self.bands == "pixel_linear"
        return pixel_frequencies(count, self.max_resolution, linear=linear, device=device, dtype=dtype)

    def owners(self) -> list[int]:
        """Axis of each rotated pair, in channel order."""
        if self.split == "axial":
            return [axis for axis, channels in enumerate(self.sections) for _ in range(channels // 2)]
        return pair_axes(self.split, self.sections, self.head_dim // 2)

    def angles(self, positions: Positions) -> tuple[Tensor, Tensor | None]:
        coords = self.coordinate_values(positions)
        owners = self.owners()
        angles: list[Tensor] = []
        amplitudes: list[Tensor] = []
        for axis in range(self.axes):
            ladder = self.ladder(axis, coords.device, coords.dtype)
            pairs = [pair for pair, owner in enumerate(owners) if owner == axis]
            if not pairs:
                continue
            freqs, amplitude = self.scaled(ladder, positions, axis, 2 * len(ladder), self.theta)
            if self.split != "axial":
                freqs = freqs[..., pairs]
            if freqs.dim() == 1:
                freqs = freqs[None]
            angles.append(coords[..., axis, None] * freqs[:, None])
            if amplitude is not None:
                amplitudes.append(amplitude[:, None, None].expand(-1, 1, len(pairs)))
        # the pairs were gathered axis by axis: back to channel order
        order = sorted(range(len(owners)), key=lambda pair: owners[pair])
        back = sorted(range(len(owners)), key=order.__getitem__)
        joined = torch.cat(angles, dim=-1)[..., back][:, None]
        return joined, torch.cat(amplitudes, dim=-1)[..., back][:, None] if amplitudes else None

    def prepare(self, positions: Positions) -> Any:
        """The finished table, or for ``vjepa2_compat`` 2 x 2 blocks and the number of prefix tokens."""
        if not self.vjepa2_compat:
            return super().prepare(positions)
        self.check_axes(positions)
        angles, amplitude = self.angles(positions)
        blocks = tiled_blocks(angles, self.sections)
        if amplitude is not None:
            blocks = blocks * amplitude[..., None, None]
        return blocks, positions.num_prefix

    def transform_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, x: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries and keys; values pass."""
        if isinstance(prepared, Rotation):
            return rotate(q, prepared), rotate(k, prepared), v
        return transform_blocks(q, *prepared), transform_blocks(k, *prepared), v

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, split={self.split!r}, sections={self.sections}"
