"""Tokens on their raster and back, for methods that convolve.

Kept tokens are scattered, missing and padded cells are zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmpos.positions import Positions

__all__ = ["Raster"]


@dataclass(frozen=True, eq=False)
class Raster:
    """Where each placed token sits on a raster.

    Args:
        sizes: raster, height before width.
        num_prefix: tokens in front without a place.
        cell: flat cell of each token ``(B or 1, N)``, ``None`` for a complete raster.
        mask: real tokens ``(B, N)``, ``None`` when all are.
    """

    sizes: tuple[int, ...]
    num_prefix: int
    cell: Tensor | None
    mask: Tensor | None

    @classmethod
    def of(cls, positions: Positions, needed_by: str) -> Raster:
        """The raster of positions.

        Of free points only when a field size is known and every place is a whole cell of it.
        """
        if positions.grid_size is not None and not positions.moved:
            return cls(positions.grid_size, positions.num_prefix, positions.kept, positions.mask)
        reason = "free points have none"
        if positions.extent is not None and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
            coords, extent = positions.coords, positions.extent[:, None]
            if bool(((coords == coords.round()) & (coords >= 0) & (coords < extent)).all()):
                # images of different size, each in the first corner of a common raster: the border is as far as before
                sizes = tuple(int(size) for size in positions.extent.amax(0).ceil())
                cell = torch.zeros_like(coords[..., 0], dtype=torch.long)
                for axis, size in enumerate(sizes):
                    cell = cell * size + coords[..., axis].long()
                return cls(sizes, positions.num_prefix, cell, positions.mask)
            reason = "these points are not whole cells of their field"
        raise ValueError(
            f"positions: {needed_by} convolves tokens on their grid and needs to know it; {reason}. Use "
            "Positions.grid(...) or "
            ".take(...) of it, or an encoding by coordinates"
        )

    def maps(self, x: Tensor) -> Tensor:
        """Placed tokens as maps. Shape: x ``(B, P + N, C)``; returns ``(B, C, *sizes)``."""
        x = x[:, self.num_prefix :]
        if self.mask is not None:
            x = x * self.mask[..., None].to(x.dtype)
        if self.cell is not None:
            cell = self.cell.expand(x.shape[0], -1)[..., None].expand_as(x)
            # added, not written: padding points at a cell of a real token
            x = x.new_zeros(x.shape[0], math.prod(self.sizes), x.shape[-1]).scatter_add(1, cell, x)
        return x.transpose(1, 2).unflatten(-1, self.sizes)

    def tokens(self, maps: Tensor) -> Tensor:
        """Values of maps at the placed tokens. Shape: ``(B, C, *sizes)`` -> ``(B, N, C)``."""
        x = maps.flatten(2).transpose(1, 2)
        if self.cell is None:
            return x
        return x.gather(1, self.cell.expand(x.shape[0], -1)[..., None].expand(-1, -1, x.shape[-1]))

    def present(self) -> Tensor | None:
        """Cells with a real token, ``(B or 1, *sizes)`` bool; ``None`` when every cell has one."""
        if self.cell is None:
            return None if self.mask is None else self.mask.unflatten(-1, self.sizes)
        real = torch.ones_like(self.cell, dtype=torch.bool) if self.mask is None else self.mask
        cell = self.cell.expand(real.shape[0], -1)
        count = torch.zeros(real.shape[0], math.prod(self.sizes), dtype=torch.long, device=cell.device)
        return (count.scatter_add(1, cell, real.long()) > 0).unflatten(-1, self.sizes)
