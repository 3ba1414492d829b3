"""DINOv3's rotary encoding: axial, on coordinates in [-1, 1] about the image centre, with random coordinates in
training.

Simeoni et al., *DINOv3*, 2025, arXiv 2508.10104. Reference: facebookresearch/dinov3 (DINOv3 licence; nothing of it
is here) and timm (Apache-2.0). Differences: augmentation is off unless asked for (the Hugging Face port turns it on
in every ``.train()``), periods are computed in float32 (released configurations partly round them to bfloat16:
``period_dtype``), factors may act about the image centre when coordinates are not centred, and a rule that keeps the
spacing of the training grid exists beside the one that keeps the extent.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmpos.coordinates import _denominator, apply_rule, normalised, rescaled
from mmpos.encodings._rotary import RotaryEncoding
from mmpos.encodings.base import Facts
from mmpos.encodings.registry import register
from mmpos.functional.augment import CoordinateDraws, augment_coordinates, draw_augmentation
from mmpos.functional.rotary import Rotation, axial_angles, rotation_from_angles
from mmpos.positions import Positions


@register("rope_dinov3")
class RopeDinov3(RotaryEncoding):
    """Axial rotary encoding with periods in units of half the image.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``; ``head_dim`` must be a multiple of twice the axes.
        base: base of the periods ``base ** (2 j / (d/2))``; 100 unless periods are given.
        min_period: shortest period, with ``max_period`` instead of ``base``.
        max_period: longest period, included.
        normalize: ``separate`` divides each axis by its own size, ``max`` and ``min`` by the largest or smallest,
            keeping the aspect ratio.
        axis_order: ``ij`` puts the pairs of the first axis first, ``xy`` those of the last.
        shift: training only: shift of each axis from ``U(-shift, shift)``.
        jitter: training only: factor of each axis, log-uniform on ``[1/jitter, jitter]``.
        rescale: training only: factor of all axes; 2 in the released recipe, with the others off.
        centre: whether factors act about the middle of the field when ``coordinates`` is not centred on it; timm's
            do not.
        period_dtype: ``bfloat16`` rounds the periods as some released checkpoints do.
        coordinates: ``normalised`` as in the paper; any rule of :mod:`mmpos.coordinates`.
        resolution: ``rescaled`` keeps the extent (the paper), ``index`` the spacing of the training grid about the
            centre; default ``rescaled`` for ``normalised`` coordinates and ``index`` for others.
        rotary: arguments of :class:`~mmpos.encodings._rotary.RotaryEncoding`.

    Example:
        >>> from mmpos import create_encoding
        >>> create_encoding("rope_dinov3", dim=32, num_heads=2).shared["rope_dinov3"].periods().tolist()[0]
        1.0
    """

    facts = Facts(
        title="DINOv3 RoPE",
        source="Simeoni et al. 2025, arXiv 2508.10104",
        plugs_into=("qk",),
        resolution_rules=("rescaled", "index"),
        head_dim_rule="a multiple of 2 x axes",
        relative=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        base: float | None = None,
        min_period: float | None = None,
        max_period: float | None = None,
        normalize: str = "separate",
        axis_order: str = "ij",
        shift: float | None = None,
        jitter: float | None = None,
        rescale: float | None = None,
        centre: bool = True,
        period_dtype: str = "float32",
        layout: str = "half",
        coordinates: str = "normalised",
        resolution: str | None = None,
        **rotary: Any,
    ) -> None:
        default = "rescaled" if coordinates == "normalised" else "index"
        super().__init__(
            dim, num_heads, layout=layout, coordinates=coordinates, resolution=resolution or default, **rotary
        )
        ends = (min_period, max_period)
        if (base is not None and ends != (None, None)) or (min_period is None) != (max_period is None):
            raise ValueError(
                f"base, min_period, max_period: expected base alone or both periods alone, got base {base}, "
                f"min_period {min_period}, max_period {max_period}"
            )
        for name, value in (("base", base), ("min_period", min_period), ("max_period", max_period), ("shift", shift)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: expected a positive number or None, got {value}")
        for name, value in (("jitter", jitter), ("rescale", rescale)):
            if value is not None and not value >= 1:
                raise ValueError(f"{name}: expected a factor of at least 1 or None, got {value}")
        if normalize not in ("separate", "max", "min"):
            raise ValueError(f"normalize: expected 'separate', 'max' or 'min', got {normalize!r}")
        if axis_order not in ("xy", "ij"):
            raise ValueError(f"axis_order: expected 'xy' (column first) or 'ij' (row first), got {axis_order!r}")
        if period_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"period_dtype: expected 'float32' or 'bfloat16', got {period_dtype!r}")
        self.base = 100.0 if base is None and min_period is None else base
        self.min_period = min_period
        self.max_period = max_period
        self.normalize = normalize
        self.axis_order = axis_order
        self.augmentation = {"shift": shift, "jitter": jitter, "rescale": rescale}
        self.centre = centre
        self.period_dtype = period_dtype
        #: source of the training draws; ``None`` is the global one
        self.generator: torch.Generator | None = None

    def check_head_dim(self) -> None:
        if self.head_dim % (2 * self.axes):
            raise ValueError(
                f"head_dim: {self.name} needs a multiple of {2 * self.axes} for {self.axes} axes, got {self.head_dim} "
                f"(dim {self.dim}, num_heads {self.num_heads}); change dim or num_heads"
            )

    def periods(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Periods of one axis, in units of the coordinates. Shape: ``(d / (2 A),)``."""
        count = self.head_dim // (2 * self.axes)
        if self.base is not None:
            periods = self.base ** (torch.arange(count, device=device, dtype=dtype) / count)
        else:
            assert self.min_period is not None
            assert self.max_period is not None
            exponents = torch.linspace(0, 1, count, device=device, dtype=dtype)
            ratio = self.max_period / self.min_period
            periods = ratio**exponents / ratio * self.max_period
        return periods.bfloat16().to(dtype) if self.period_dtype == "bfloat16" else periods

    def coordinate_values(self, positions: Positions) -> Tensor:
        """Coordinates without augmentation. Shape: ``(B or 1, N, A)``."""
        if self.coordinates == "normalised":
            if self.resolution == "rescaled":
                return normalised(positions, self.offset, self.normalize)
            sizes = positions.sizes("normalised coordinates")
            train = torch.tensor([self.training_grid(positions)], device=sizes.device, dtype=sizes.dtype)
            divisor = _denominator(replace(positions, extent=train), self.normalize)
            # the middle of the field stays zero, neighbours stay as far apart as in training
            return (2 * (positions.coords + self.offset + 0.5) - sizes[:, None]) / divisor
        if self.resolution == "rescaled":
            if self.coordinates != "index":
                raise ValueError(
                    f"resolution: 'rescaled' stretches patch indices; coordinates={self.coordinates!r} fixes the "
                    "extent already, use resolution='index'"
                )
            return rescaled(positions, self.offset, self.training_grid(positions), self.align)
        return apply_rule(self.coordinates, positions, self.offset)

    def draw(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> CoordinateDraws | None:
        """Draws of one training step, ``None`` when no augmentation is asked for."""
        if all(value is None for value in self.augmentation.values()):
            return None
        return draw_augmentation(self.axes, **self.augmentation, generator=self.generator, device=device, dtype=dtype)

    def prepare(self, positions: Positions, draws: CoordinateDraws | None = None) -> Rotation:
        """The finished table; ``draws`` replaces the random draws of training."""
        self.check_axes(positions)
        coords = self.coordinate_values(positions)
        if draws is None and self.training:
            draws = self.draw(coords.device, coords.dtype)
        if draws is not None:
            centre: Tensor | float = 0.0
            if self.centre and self.coordinates != "normalised":
                # the value of the rule at the middle of the field
                middle = (positions.sizes("augmentation about the centre") - 1)[:, None] / 2
                centre = self.coordinate_values(positions.with_coords(middle))
            coords = augment_coordinates(coords, draws, centre)
        return rotation_from_angles(self.turn(coords), num_prefix=positions.num_prefix, layout=self.layout)

    def turn(self, coords: Tensor) -> Tensor:
        """Angles ``2 pi c / period``. Shape: ``(B or 1, N, A)`` to ``(B or 1, 1, N, d/2)``."""
        periods = self.periods(coords.device, coords.dtype).expand(self.axes, -1)
        return axial_angles(2 * math.pi * coords, 1 / periods, self.axis_order)

    def angles(self, positions: Positions) -> tuple[Tensor, Tensor | None]:
        """Angles without augmentation."""
        return self.turn(self.coordinate_values(positions)), None
