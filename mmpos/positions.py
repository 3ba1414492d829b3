"""Where every token is: :class:`Positions`, the one value that travels next to the tokens.

Nothing in this package guesses a grid from a token count. A grid is converted to coordinates once, here, and from then
on every encoding reads coordinates, so pruning, packing, padding and fractional places need no special path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Positions"]


@dataclass(frozen=True, eq=False)
class Positions:
    """Coordinates of ``N`` placed tokens that follow ``num_prefix`` tokens without a place (CLS, registers).

    Args:
        coords: coordinates in patch units, axis order (row, col), (time, row, col) or (x, y, z); float32 or float64.
        num_prefix: number ``P`` of leading tokens that have no place.
        grid_size: sizes of the raster the tokens belong to, height before width; ``None`` for free points.
        kept: row-major raster index of each token when only some tokens of the raster are present, else ``None``.
        mask: ``True`` for real tokens, ``False`` for padding; ``None`` when every token is real.
        extent: size of the field along each axis, in patch units. Rules such as *rescaled* and *normalised* need it.
        train_grid: sizes of the grid the model was trained on, for rules that compare the two.
        moved: whether ``coords`` are no longer the raster indices (set by :meth:`with_coords`).

    Shape:
        coords ``(B or 1, N, A)``, kept ``(B or 1, N)``, mask ``(B, N)``, extent ``(B or 1, A)``.

    Example:
        >>> positions = Positions.grid(2, 3, num_prefix=1)
        >>> positions.coords[0, 4].tolist(), positions.num_tokens
        ([1.0, 1.0], 7)
    """

    coords: Tensor
    num_prefix: int = 0
    grid_size: tuple[int, ...] | None = None
    kept: Tensor | None = None
    mask: Tensor | None = None
    extent: Tensor | None = None
    train_grid: tuple[int, ...] | None = None
    moved: bool = False

    def __post_init__(self) -> None:
        if torch.jit.is_tracing():  # comparing traced sizes would be recorded as a warning for each check
            return
        if self.coords.dim() != 3:
            raise ValueError(
                f"coords: expected (B or 1, N, axes), got {tuple(self.coords.shape)}; "
                "add the batch dimension with coords[None] if all samples share their places"
            )
        if self.coords.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"coords: expected float32 or float64, got {self.coords.dtype}; call coords.float()")
        if self.num_prefix < 0:
            raise ValueError(f"num_prefix: expected 0 or more, got {self.num_prefix}")
        batch, count, axes = self.coords.shape
        if self.mask is not None:
            if self.mask.dtype != torch.bool:
                raise ValueError(f"mask: expected bool (True = real token), got {self.mask.dtype}; call mask.bool()")
            if self.mask.dim() != 2 or self.mask.shape[1] != count or (batch != 1 and self.mask.shape[0] != batch):
                raise ValueError(
                    f"mask: expected (B, N) = ({'B' if batch == 1 else batch}, {count}) over the placed tokens "
                    f"(prefix tokens are always real), got {tuple(self.mask.shape)}"
                )
        if self.extent is not None and (self.extent.dim() != 2 or self.extent.shape[1] != axes):
            raise ValueError(f"extent: expected (B or 1, {axes}), got {tuple(self.extent.shape)}")
        if self.grid_size is not None and len(self.grid_size) != axes:
            raise ValueError(f"grid_size: expected {axes} sizes, got {self.grid_size}")
        if self.train_grid is not None and len(self.train_grid) != axes:
            raise ValueError(f"train_grid: expected {axes} sizes, got {self.train_grid}")
        if self.kept is not None and (self.kept.dim() != 2 or self.kept.shape[1] != count):
            raise ValueError(f"kept: expected (B or 1, {count}), got {tuple(self.kept.shape)}")

    # -- construction ---------------------------------------------------------------------------------------------

    @classmethod
    def grid(
        cls,
        *sizes: int,
        num_prefix: int = 0,
        train_grid: Sequence[int] | None = None,
        mask: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Positions:
        """Every cell of a raster in row-major order (last axis fastest), for example ``Positions.grid(14, 14)``."""
        if not sizes:
            raise ValueError("sizes: expected at least one size, for example Positions.grid(14, 14)")
        for size in sizes:
            if isinstance(size, float) or (isinstance(size, int) and size < 1):
                raise ValueError(f"sizes: expected positive integers, got {sizes}; is the image smaller than a patch?")
        ticks = [torch.arange(size, device=device, dtype=dtype) for size in sizes]
        coords = torch.stack(torch.meshgrid(*ticks, indexing="ij"), dim=-1).reshape(1, -1, len(sizes))
        extent = torch.stack([torch.full((), size, device=device, dtype=dtype) for size in sizes])[None]
        return cls(
            coords,
            num_prefix=num_prefix,
            grid_size=tuple(sizes),
            mask=mask,
            extent=extent,
            train_grid=None if train_grid is None else tuple(train_grid),
        )

    @classmethod
    def points(
        cls,
        coords: Tensor,
        *,
        num_prefix: int = 0,
        mask: Tensor | None = None,
        extent: Tensor | Sequence[float] | None = None,
        train_grid: Sequence[int] | None = None,
    ) -> Positions:
        """Free points. ``coords`` is ``(N, A)`` or ``(B or 1, N, A)`` in any unit the model was trained with."""
        if coords.dim() == 2:
            coords = coords[None]
        if not coords.is_floating_point() or coords.dtype in (torch.float16, torch.bfloat16):
            coords = coords.float()
        if extent is not None and not isinstance(extent, Tensor):
            extent = torch.tensor([list(extent)], device=coords.device, dtype=coords.dtype)
        return cls(
            coords,
            num_prefix=num_prefix,
            mask=mask,
            extent=extent,
            train_grid=None if train_grid is None else tuple(train_grid),
        )

    @classmethod
    def grids(
        cls,
        sizes: Sequence[Sequence[int]],
        *,
        length: int | None = None,
        num_prefix: int = 0,
        train_grid: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> Positions:
        """One raster per sample, right-padded to ``length`` tokens (default: the largest raster) with a mask.

        Padding tokens are placed at the origin; the mask says that they are not real.
        """
        if not len(sizes) or len({len(size) for size in sizes}) != 1:
            raise ValueError(
                f"sizes: expected one (height, width) per sample, all with equally many axes, got {list(sizes)}"
            )
        rasters = [cls.grid(*size, device=device) for size in sizes]
        counts = [raster.coords.shape[1] for raster in rasters]
        length = max(counts) if length is None else length
        if length < max(counts):
            raise ValueError(f"length: expected at least {max(counts)} for sizes {list(sizes)}, got {length}")
        coords = torch.cat([F.pad(r.coords, (0, 0, 0, length - n)) for r, n in zip(rasters, counts, strict=True)])
        mask = torch.arange(length, device=device)[None] < torch.tensor(counts, device=device)[:, None]
        extent = torch.cat([raster.extent for raster in rasters if raster.extent is not None])
        return cls(
            coords,
            num_prefix=num_prefix,
            mask=mask,
            extent=extent,
            train_grid=None if train_grid is None else tuple(train_grid),
        )

    # -- facts ----------------------------------------------------------------------------------------------------

    @property
    def axes(self) -> int:
        """Number ``A`` of coordinate axes."""
        return self.coords.shape[-1]

    @property
    def num_placed(self) -> int:
        """Number ``N`` of tokens that have a place."""
        return self.coords.shape[1]

    @property
    def num_tokens(self) -> int:
        """Length ``P + N`` of the token sequence."""
        return self.num_prefix + self.coords.shape[1]

    @property
    def is_raster(self) -> bool:
        """Whether the placed tokens are a complete raster in row-major order."""
        return self.grid_size is not None and self.kept is None

    def sizes(self, needed_by: str) -> Tensor:
        """Field size along each axis, ``(B or 1, A)``; raises when it is not known."""
        if self.extent is None:
            raise ValueError(
                f"positions.extent: {needed_by} needs the size of the field along each axis, which free points do not "
                "have; give Positions.points(..., extent=(height, width))"
            )
        return self.extent

    def token_mask(self) -> Tensor | None:
        """Mask over all ``P + N`` tokens, ``(B, P + N)``, or ``None`` when every token is real."""
        return None if self.mask is None else F.pad(self.mask, (self.num_prefix, 0), value=True)

    def check_tokens(self, x: Tensor, what: str = "x") -> None:
        """Raise unless ``x`` is ``(..., P + N, channels)`` with a matching token count and batch."""
        if torch.jit.is_tracing():
            return
        if x.shape[-2] != self.num_tokens:
            raise ValueError(
                f"{what}: expected {self.num_tokens} tokens (num_prefix {self.num_prefix} + {self.num_placed} placed"
                f"{'' if self.grid_size is None else f', grid {tuple(self.grid_size)}'}), got shape {tuple(x.shape)}; "
                "pass the positions of exactly these tokens"
            )
        if self.coords.shape[0] not in (1, x.shape[0]):
            raise ValueError(f"{what}: batch {x.shape[0]} does not match positions of batch {self.coords.shape[0]}")
        if self.mask is not None and self.mask.shape[0] not in (1, x.shape[0]):
            raise ValueError(f"{what}: batch {x.shape[0]} does not match a padding mask of batch {self.mask.shape[0]}")

    # -- derived positions ----------------------------------------------------------------------------------------

    def take(self, keep: Tensor) -> Positions:
        """Positions of a subset of the placed tokens, in the order given.

        Args:
            keep: indices into the placed tokens, ``(K,)`` or ``(B, K)``, or one boolean mask ``(N,)``.
        """
        if keep.dtype == torch.bool:
            if keep.shape != (self.num_placed,):
                raise ValueError(
                    f"keep: a boolean mask must be ({self.num_placed},) so that every sample keeps equally many "
                    "tokens, "
                    f"got {tuple(keep.shape)}; give indices (B, K) for a choice per sample"
                )
            keep = keep.nonzero()[:, 0]
        if keep.dim() == 1:
            keep = keep[None]
        if keep.dim() != 2 or keep.is_floating_point():
            raise ValueError(f"keep: expected integer indices (K,) or (B, K), got {keep.dtype} {tuple(keep.shape)}")
        batch = max(keep.shape[0], self.coords.shape[0], 1 if self.mask is None else self.mask.shape[0])
        if keep.shape[0] not in (1, batch) or self.coords.shape[0] not in (1, batch):
            raise ValueError(f"keep: expected batch 1 or {batch}, got {tuple(keep.shape)}")
        keep = keep.long()
        coords = self.coords.expand(max(keep.shape[0], self.coords.shape[0]), -1, -1)
        coords = coords.gather(1, keep[..., None].expand(coords.shape[0], -1, self.axes))
        kept = self.kept
        if self.grid_size is not None:
            if kept is not None:  # a subset of a subset: indices refer to the tokens that are left
                rows = max(kept.shape[0], keep.shape[0])
                kept = kept.expand(rows, -1).gather(1, keep.expand(rows, -1))
            else:
                kept = keep
        mask = None if self.mask is None else self.mask.expand(batch, -1).gather(1, keep.expand(batch, -1))
        return replace(self, coords=coords, kept=kept, mask=mask)

    def with_mask(self, mask: Tensor | None) -> Positions:
        """The same places with another padding mask ``(B, N)``."""
        return replace(self, mask=mask)

    def with_prefix(self, num_prefix: int) -> Positions:
        """The same places behind another number of prefix tokens."""
        return replace(self, num_prefix=num_prefix)

    def with_coords(self, coords: Tensor) -> Positions:
        """Other coordinates for the same tokens (jitter, shifts); grid, subset and mask stay."""
        return replace(self, coords=coords, moved=True)

    def to(self, device: torch.device | str) -> Positions:
        """The same positions on another device."""
        move = lambda t: None if t is None else t.to(device)  # noqa: E731
        return replace(
            self, coords=self.coords.to(device), kept=move(self.kept), mask=move(self.mask), extent=move(self.extent)
        )
