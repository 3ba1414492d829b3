"""What ComRoPE-LD and ComRoPE-AP share: commuting angle matrices, coordinates on [0, 1], training noise.

Yu et al., *ComRoPE: Scalable and Robust Rotary Position Embedding Parameterized by Trainable Commuting Angle Matrices*,
CVPR 2025, arXiv 2506.03737. Reference: Longin-Yu/ComRoPE, without a licence; nothing of it is here. Differences:
matrices are applied block by block, never as ``d x d``; non-square grids, 1 to 4 axes; the frame index of a video is
divided by the number of frames (the reference divides it by the spatial size, ``frame_norm="spatial"``); with gradients
off the method is a rotary table in a constant basis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.coordinates import COORDINATE_RULES, apply_rule, rescaled
from mmpos.encodings._fold import FoldableEncoding
from mmpos.encodings.base import wide_dtype
from mmpos.functional.augment import perturb_patches
from mmpos.functional.rotary import (
    Rotation,
    _real_form_wanted,
    mixed_angles,
    rotate,
    rotation_from_angles,
    transform_blocks,
)
from mmpos.functional.skew import METHODS, commuting_exponentials, raster_exponentials, rotation_planes
from mmpos.positions import Positions


@dataclass(frozen=True, eq=False)
class ComRopeNoise:
    """Standard normal draws of one training step, the same for all layers; ``None`` leaves a part out.

    Shape:
        patches ``(N, A)`` or ``(B, N, A)``, shift ``(A,)``.
    """

    patches: Tensor | None = None
    shift: Tensor | None = None


class ComRopeEncoding(FoldableEncoding):
    """Base of the two variants; a subclass says how far each axis drives each block.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        block_size: size ``b`` of the blocks; 2 is rotary with free frequencies, the paper goes up to 8.
        init_std: standard deviation of the matrices ``P``; 0 starts at the identity, for pretrained models.
        prefix_position: place of CLS and registers, which ComRoPE rotates too, on every axis; ``None`` leaves them
            alone.
        coordinates: ``unit`` is ``(i + 0.5) / n``; any rule of :mod:`mmpos.coordinates` may be used instead.
        perturbation: strength of the noise that moves each patch during training; the paper uses 0 and 1.
        perturbed_axes: number of trailing axes the noise moves; a time axis stays.
        shift: standard deviation of the offset common to all tokens, prefix included, during training, in coordinate
            units.
        frame_norm: ``own`` divides every axis by its own size, ``spatial`` all by the size of the last axis, as the
            reference does.
        exponential: how blocks are computed, see :func:`~mmpos.functional.skew.commuting_exponentials`.
        resolution: ``rescaled`` keeps the extent [0, 1] (the paper), ``index`` the spacing of the training grid;
            default ``rescaled`` for ``unit`` coordinates and ``index`` for others.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.

    Shape:
        ``generators`` is ``P (heads, m, b, b)``; only ``G = P - P^T`` acts.
    """

    fp32_parameters: ClassVar[tuple[str, ...]] = ("generators", "folded_freqs")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        block_size: int = 8,
        init_std: float = 1.0,
        prefix_position: float | None = 0.5,
        coordinates: str = "unit",
        perturbation: float = 0.0,
        perturbed_axes: int = 2,
        shift: float = 0.0,
        frame_norm: str = "own",
        exponential: str = "auto",
        resolution: str | None = None,
        **common: Any,
    ) -> None:
        if coordinates not in COORDINATE_RULES:
            raise ValueError(f"coordinates: expected one of {sorted(COORDINATE_RULES)}, got {coordinates!r}")
        default = "rescaled" if coordinates == "unit" else "index"
        super().__init__(dim, num_heads, resolution=resolution or default, **common)
        if block_size < 2 or self.head_dim % block_size:
            raise ValueError(
                f"block_size: expected a divisor of head_dim {self.head_dim} of at least 2, got "
                f"{block_size}; change block_size or head_dim"
            )
        if frame_norm not in ("own", "spatial"):
            raise ValueError(f"frame_norm: expected 'own' or 'spatial', got {frame_norm!r}")
        if exponential not in METHODS:
            raise ValueError(f"exponential: expected one of {METHODS}, got {exponential!r}")
        for name, value in (("init_std", init_std), ("perturbation", perturbation), ("shift", shift)):
            if not value >= 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")
        self.block_size = block_size
        self.num_blocks = self.head_dim // block_size
        self.init_std = init_std
        self.prefix_position = prefix_position
        self.coordinates = coordinates
        self.perturbation = perturbation
        self.perturbed_axes = perturbed_axes
        self.shift = shift
        self.frame_norm = frame_norm
        self.exponential = exponential
        #: source of the training noise; ``None`` is the global one
        self.generator: torch.Generator | None = None
        self.generators = nn.Parameter(
            torch.empty(num_heads, self.num_blocks, block_size, block_size, dtype=wide_dtype())
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal matrices."""
        self.generators.normal_().mul_(self.init_std)

    def directions(self) -> Tensor:
        """How far each axis drives each block. Shape: ``(A, heads or 1, m)``."""
        raise NotImplementedError

    def skew(self) -> Tensor:
        """Angle matrices ``G = P - P^T``. Shape: ``(heads, m, b, b)``."""
        return self.generators - self.generators.mT

    # -- coordinates ----------------------------------------------------------------------------------------------

    def draw(self, positions: Positions) -> ComRopeNoise | None:
        """Noise of one training step for these positions, ``None`` when none is asked for."""
        if not (self.perturbation or self.shift):
            return None
        coords = positions.coords

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=coords.device, dtype=coords.dtype, generator=self.generator)

        shift = normal(self.axes) if self.shift else None
        return ComRopeNoise(normal(*coords.shape) if self.perturbation else None, shift)

    def token_coordinates(self, positions: Positions, noise: ComRopeNoise | None = None) -> Tensor:
        """Coordinates of all ``P + N`` tokens. Shape: ``(B or 1, P + N, A)``."""
        if noise is not None and noise.patches is not None:
            moved = perturb_patches(positions.coords, noise.patches, self.perturbation, self.perturbed_axes)
            positions = positions.with_coords(moved)
        if self.coordinates == "unit":
            coords = self._unit(positions)
        elif self.resolution == "rescaled":
            if self.coordinates != "index":
                raise ValueError(
                    f"resolution: 'rescaled' stretches patch indices; coordinates={self.coordinates!r} fixes the "
                    "extent already, use resolution='index'"
                )
            coords = rescaled(positions, train_grid=self.training_grid(positions))
        else:
            coords = apply_rule(self.coordinates, positions)
        shift = None if noise is None or noise.shift is None else noise.shift.to(coords) * self.shift
        if shift is not None:
            coords = coords + shift
        if not positions.num_prefix:
            return coords
        if self.prefix_position is None:  # the identity: position zero
            return F.pad(coords, (0, 0, positions.num_prefix, 0))
        prefix = coords.new_full((1, positions.num_prefix, self.axes), self.prefix_position)
        prefix = prefix if shift is None else prefix + shift
        return torch.cat([prefix.expand(coords.shape[0], -1, -1), coords], dim=1)

    def _unit(self, positions: Positions) -> Tensor:
        sizes = positions.sizes("coordinates on [0, 1]")[:, None]
        divisor = sizes
        if self.resolution == "index":  # spacing of the training grid about the middle of the field
            train = self.training_grid(positions)
            divisor = torch.tensor(train, device=sizes.device, dtype=sizes.dtype).expand_as(sizes)
        if self.frame_norm == "spatial":
            divisor = divisor[..., -1:].expand_as(divisor)
        if self.resolution == "index":
            return (positions.coords + 0.5 - sizes / 2) / divisor + 0.5
        return (positions.coords + 0.5) / divisor

    # -- tables ---------------------------------------------------------------------------------------------------

    def prepare_shared(self, positions: Positions) -> Tensor:
        """Coordinates, with the noise of this step when training: one draw for all layers."""
        self.check_axes(positions)
        return self.token_coordinates(positions, self.draw(positions) if self.training else None)

    def prepare(self, positions: Positions, coords: Tensor | None = None) -> Rotation | Tensor:
        """Blocks ``(B or 1, heads, P + N, m, b, b)`` where gradients are wanted, else a rotary table in a constant
        basis.
        """
        self.check_axes(positions)
        coords = self.prepare_shared(positions) if coords is None else coords
        if self.folded_freqs is not None:
            return rotation_from_angles(mixed_angles(coords, self.folded_freqs))
        if self.block_size == 2:
            return rotation_from_angles(mixed_angles(coords, self.directions() * self.skew()[..., 1, 0]))
        wanted = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
        if wanted or _real_form_wanted() or self.exponential == "matrix_exp":
            return self.blocks(coords, self._raster(positions, coords))
        freqs, basis = self.rotary_form()
        return rotation_from_angles(mixed_angles(coords, freqs), basis=basis)

    def blocks(self, coords: Tensor, ticks: list[Tensor] | None = None) -> Tensor:
        """Group elements of the given coordinates. Shape: ``(B or 1, P + N, A)`` to ``(B or 1, heads, P + N, m, b,
        b)``.

        Args:
            coords: coordinates of all tokens.
            ticks: lines of the raster formed by the last tokens, if they form one: an exponential per line is enough
                then.
        """
        generators, directions = self.skew(), self.directions()
        if ticks is not None:
            raster = raster_exponentials(generators, directions, ticks)
            rest = coords[:, : coords.shape[1] - raster.shape[2]]
            if rest.shape[1] == 0:
                return raster
            amounts = mixed_angles(rest[:, :1], directions)  # prefix tokens share one place
            first = commuting_exponentials(generators, amounts, "matrix_exp")
            return torch.cat([first.expand(-1, -1, rest.shape[1], -1, -1, -1), raster], dim=2)
        return commuting_exponentials(generators, mixed_angles(coords, directions), self.exponential)

    def _raster(self, positions: Positions, coords: Tensor) -> list[Tensor] | None:
        """Coordinates of the raster lines, when tokens lie on a full raster and exponentials are taken one by one."""
        by_token = self.exponential == "planes" or (self.exponential == "auto" and not _real_form_wanted())
        moved = self.training and self.perturbation > 0
        grid = positions.grid_size
        if by_token or self.block_size == 3 or moved or grid is None or not positions.is_raster or coords.shape[0] != 1:
            return None
        raster = coords[0, positions.num_prefix :].unflatten(0, grid)
        return [
            raster[(0,) * axis + (slice(None),) + (0,) * (self.axes - axis - 1) + (axis,)] for axis in range(self.axes)
        ]

    def transform_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Rotation | Tensor, x: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries and keys, prefix tokens included; values pass."""
        if isinstance(prepared, Tensor):
            return transform_blocks(q, prepared), transform_blocks(k, prepared), v
        return rotate(q, prepared), rotate(k, prepared), v

    @torch.no_grad()
    def rotary_form(self) -> tuple[Tensor, Tensor]:
        """Eigenplanes of the angle matrices: frequencies ``(A, heads, m)`` and basis ``(heads, d, d)``."""
        size, count = self.block_size, self.num_blocks
        planes, rows = rotation_planes(self.skew())  # (heads, m, b // 2), (heads, m, b, b)
        freqs = (self.directions()[..., None] * planes).flatten(-2)
        basis = rows.new_zeros(self.num_heads, count, size, count, size)
        basis.diagonal(dim1=1, dim2=3).copy_(rows.permute(0, 2, 3, 1))
        basis = basis.flatten(3).flatten(1, 2)
        turning = 2 * (size // 2)
        if turning < size:  # the fixed direction of each odd block goes behind all pairs
            row = torch.arange(self.head_dim, device=basis.device).view(count, size)
            basis = basis[:, torch.cat([row[:, :turning].flatten(), row[:, turning]])]
            freqs = F.pad(freqs, (0, self.head_dim // 2 - freqs.shape[-1]))
        return freqs, basis

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, block_size={self.block_size}"
