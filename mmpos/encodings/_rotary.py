"""What the rotary encodings share: from coordinates and a resolution rule to one finished table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmpos.coordinates import COORDINATE_RULES, apply_rule, rescaled, scale_to_train
from mmpos.encodings.base import PositionEncoding
from mmpos.functional.rope_scaling import RopeScaling, scale_frequencies
from mmpos.functional.rotary import LAYOUTS, Rotation, rotate, rotation_from_angles
from mmpos.positions import Positions

ROTARY_RULES = ("index", "rescaled", "linear", "ntk", "yarn")


class RotaryEncoding(PositionEncoding):
    """Base of encodings that rotate queries and keys by angles.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        layout: ``interleaved`` pairs (2j, 2j+1) or ``half`` pairs (j, j + d/2).
        coordinates: coordinate rule, see :mod:`mmpos.coordinates`.
        offset: added to the patch index before anything else, in patches.
        align: how ``resolution="rescaled"`` stretches, ``corner`` or ``centre``.
        beta_fast: YaRN constant; ``None`` is ``max(2, L / (2 pi))``, which suits grids (the language default is 32).
        beta_slow: YaRN constant.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        layout: str = "interleaved",
        coordinates: str = "index",
        offset: float = 0.0,
        align: str = "corner",
        beta_fast: float | None = None,
        beta_slow: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
        if coordinates not in COORDINATE_RULES:
            raise ValueError(f"coordinates: expected one of {sorted(COORDINATE_RULES)}, got {coordinates!r}")
        if align not in ("corner", "centre"):
            raise ValueError(f"align: expected 'corner' or 'centre', got {align!r}")
        self.layout = layout
        self.coordinates = coordinates
        self.offset = offset
        self.align = align
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.check_head_dim()

    def check_head_dim(self) -> None:
        """Raise unless the head dimension can be cut into the pairs the method needs."""
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim: {self.name} rotates pairs of channels and needs an even head_dim, got {self.head_dim}"
            )

    def angles(self, positions: Positions) -> tuple[Tensor, Tensor | None]:
        """Angles ``(B or 1, heads or 1, N, d/2)`` and the amplitude that multiplies the table, or ``None``."""
        raise NotImplementedError

    def basis(self) -> Tensor | None:
        """Constant basis of queries and keys ``(heads or 1, d, d)``, or ``None``."""
        return None

    def prepare(self, positions: Positions) -> Rotation:
        """The finished table over prefix and placed tokens."""
        self.check_axes(positions)
        angles, amplitude = self.angles(positions)
        return rotation_from_angles(
            angles, num_prefix=positions.num_prefix, layout=self.layout, amplitude=amplitude, basis=self.basis()
        )

    def transform_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Rotation, x: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries and keys; values pass."""
        return rotate(q, prepared), rotate(k, prepared), v

    def coordinate_values(self, positions: Positions) -> Tensor:
        """Coordinates under the coordinate rule and the resolution rule. Shape: ``(B or 1, N, A)``."""
        if self.resolution == "rescaled":
            if self.coordinates != "index":
                raise ValueError(
                    f"resolution: 'rescaled' stretches patch indices; coordinates={self.coordinates!r} already fixes "
                    "the extent, use "
                    "resolution='index'"
                )
            return rescaled(positions, self.offset, self.training_grid(positions), self.align)
        return apply_rule(self.coordinates, positions, self.offset)

    def scaled(
        self, freqs: Tensor, positions: Positions, axis: int, dim: int, base: float
    ) -> tuple[Tensor, Tensor | None]:
        """Frequencies of one axis under the resolution rule, and the amplitude of the axis ``(B or 1,)`` or ``None``.

        Shape:
            freqs ``(..., m)``; returns the same, with a leading batch dimension when a scaling applies.
        """
        if self.resolution in ("index", "rescaled"):
            return freqs, None
        if self.coordinates != "index":
            raise ValueError(
                f"resolution: {self.resolution!r} scales frequencies of patch indices and means nothing for "
                f"coordinates={self.coordinates!r}; use resolution='index'"
            )
        if self.resolution == "resonance":  # whole wavelengths do not depend on any size
            return scale_frequencies(freqs, RopeScaling("resonance"), dim=dim, base=base, train_length=1, scale=1.0)[0][
                None
            ], None
        train = self.training_grid(positions)
        scale = scale_to_train(positions, train)[:, axis]
        length = train[axis]
        beta_fast = max(2.0 * self.beta_slow, length / 6.283185307179586) if self.beta_fast is None else self.beta_fast
        scaling = RopeScaling(self.resolution, beta_fast=beta_fast, beta_slow=self.beta_slow)
        shaped = scale.to(freqs.dtype).reshape(-1, *[1] * freqs.dim())
        out, amplitude = scale_frequencies(freqs, scaling, dim=dim, base=base, train_length=length, scale=shaped)
        return out, amplitude.reshape(-1) if self.resolution.endswith("yarn") else None

    def compute_dtype(self, positions: Positions, *parameters: Tensor) -> torch.dtype:
        """float32, or float64 when coordinates or parameters are."""
        dtypes = {positions.coords.dtype, *(p.dtype for p in parameters)}
        return torch.float64 if torch.float64 in dtypes else torch.float32
