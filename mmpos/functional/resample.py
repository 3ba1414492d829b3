"""The only interpolation of the project: tables of values on a grid, read at another grid or at single places.

Resampling is linear and separable, ``new = R_row E R_col^T``, so everything here is one question: how much does each
source cell contribute to a place along one axis? :func:`axis_weights` answers it from the kernel formula. Rows of a
matrix for a whole grid, rows for the few tokens that were kept, rows for a batch of images of different sizes and rows
for continuous places are the same rows.

Conventions are those of ``torch.nn.functional.interpolate(align_corners=False)`` and, for continuous places,
``grid_sample(align_corners=False, padding_mode="border")``. Three facts that surprise: with ``antialias`` the cubic
kernel is another one (a = -0.5 against -0.75), so the two differ even when enlarging; linear kernels agree when
enlarging; and the antialiased kernel of torch itself returns the first row everywhere when the height changes and
the new width is 1, which this form does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "MODES",
    "add_axis_tables",
    "axis_weights",
    "fit_table",
    "interpolation_matrix",
    "read_table",
    "resample_grid",
    "resample_table",
]

MODES = (
    "bicubic",
    "bilinear",
    "linear",
)  # linear and bilinear are the same kernel, named as torch names it for 1-D and 2-D


def axis_weights(
    places: Tensor,
    size: Tensor | float,
    source: int,
    mode: str = "bicubic",
    antialias: bool = True,
    offset: float = 0.0,
) -> Tensor:
    """Contribution of each of ``source`` cells of an axis to places on the same axis divided into ``size`` cells.

    Args:
        places: cell indices of the new axis, real numbers allowed; beyond the border the border value is repeated.
        size: cells of the new axis, broadcastable against ``places``.
        source: cells of the table along the axis.
        mode: ``bicubic`` or ``bilinear``.
        antialias: widen the kernel when the new axis is coarser.
        offset: 0.1 reproduces the DINO models, which asked for ``size + 0.1`` cells to escape a rounding error.

    Shape:
        places ``(...)``; returns ``(..., source)`` with rows that sum to 1.

    Example:
        >>> axis_weights(torch.tensor([0.0, 1.0, 2.0, 3.0]), 4, 2, mode="bilinear").tolist()
        [[1.0, 0.0], [0.75, 0.25], [0.25, 0.75], [0.0, 1.0]]
    """
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
    cubic = mode == "bicubic"
    if not isinstance(size, Tensor):
        size = torch.full((), size, dtype=places.dtype, device=places.device)  # as_tensor would fix a symbolic size
    ratio = source / (size.to(places.dtype) + offset)
    centre = (places + 0.5) * ratio
    cells = torch.arange(-2, source + 2, dtype=places.dtype, device=places.device)
    if antialias:
        # only cells inside the table take part and the rest is renormalised, instead of repeating the border
        stretch = ratio.clamp_min(1.0)
        distance = (cells[2:-2] + 0.5 - centre.clamp(0.0, float(source))[..., None]) / stretch[..., None]
        weights = _cubic(distance.abs(), -0.5) if cubic else (1 - distance.abs()).clamp_min(0.0)
        return weights / weights.sum(-1, keepdim=True)
    place = centre - 0.5
    # one cell beyond the border every tap already reads the border
    place = place.clamp(-1.0, float(source)) if cubic else place.clamp(0.0, float(source - 1))
    distance = (cells - place[..., None]).abs()
    weights = _cubic(distance, -0.75) if cubic else (1 - distance).clamp_min(0.0)
    border = (cells[:, None].clamp(0, source - 1) == cells[2:-2]).to(weights.dtype)  # which cell a tap reads
    # written as a sum because autocast would run the product of two matrices in half precision
    return (weights[..., None] * border).sum(-2)


def _cubic(x: Tensor, a: float) -> Tensor:
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (x - 1) * (x - 2).square()  # factored: multiplied out it loses digits to cancellation
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def interpolation_matrix(
    source: int,
    size: int,
    mode: str = "bicubic",
    antialias: bool = True,
    *,
    offset: float = 0.0,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The matrix ``R`` that takes ``source`` cells to ``size`` cells; ``size`` may be symbolic.

    Matrices are kept between calls in eager mode. They never require a gradient, and they are ordinary tensors even
    when they were first needed under inference mode.

    Shape:
        Returns ``(size, source)``.

    Example:
        >>> interpolation_matrix(3, 3).equal(torch.eye(3))
        True
    """
    device = torch.device("cpu") if device is None else device
    # a matrix made while compiling, tracing or under a dispatch mode (fake tensors) must not outlive it
    special = torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0
    if special or not isinstance(size, int):
        return _matrix(source, size, mode, antialias, offset, device, dtype)
    return _kept_matrix(source, size, mode, bool(antialias), float(offset), device, dtype)


def _matrix(
    source: int, size: int, mode: str, antialias: bool, offset: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    places = torch.arange(size, dtype=dtype, device=device)
    return axis_weights(places, size, source, mode, antialias, offset)


@lru_cache(maxsize=256)
def _kept_matrix(
    source: int, size: int, mode: str, antialias: bool, offset: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        exact = _matrix(source, size, mode, antialias, offset, torch.device("cpu"), torch.float64)
        return exact.to(device=device, dtype=dtype)


def same_sizes(left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether sizes are known to be equal; ``False`` for symbolic sizes, which must not be fixed by asking."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return len(left) == len(right) and all(statically_known_true(a == b) for a, b in zip(left, right, strict=True))
    if not all(isinstance(size, int) for size in (*left, *right)):
        return False
    return tuple(left) == tuple(right)


def _full_precision(device: torch.device) -> AbstractContextManager[Any]:
    # meta tensors compute nothing, and autocast does not know their device
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def resample_grid(
    values: Tensor,
    new_size: Sequence[int],
    mode: str = "bicubic",
    antialias: bool = True,
    *,
    grid: Sequence[int] | None = None,
    offset: float = 0.0,
    keep_aspect: bool = False,
) -> Tensor:
    """Values on a grid with any number of axes, on another grid. Exact identity when the sizes agree.

    Args:
        values: the table; float32 or float64 arithmetic, result in the dtype of the table.
        new_size: new sizes, height before width; they may be symbolic.
        mode: ``bicubic`` or ``bilinear``.
        antialias: widen the kernel along axes that become coarser.
        grid: sizes of the table, when they should be numbers although the shape is traced.
        offset: see :func:`axis_weights`.
        keep_aspect: enlarge to a square (cube) of the largest new size and keep its first corner (NaFlex), so that a
            wide image reads the top rows of the table instead of a squeezed table.

    Shape:
        values ``(*grid, D)``; returns ``(*new_size, D)``.
    """
    grid = tuple(values.shape[:-1] if grid is None else grid)
    if len(new_size) != len(grid):
        raise ValueError(
            f"new_size: expected {len(grid)} sizes for a table on the grid {tuple(grid)}, got {tuple(new_size)}"
        )
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
    full: Sequence[int] = new_size
    if keep_aspect:
        largest: Any = new_size[0]
        for size in new_size[1:]:
            largest = torch.sym_max(largest, size)
        full = [largest] * len(grid)
    if not offset and same_sizes(grid, new_size) and same_sizes(full, new_size):
        return values
    dtype = values.dtype if values.dtype == torch.float64 else torch.float32
    out = values.to(dtype)
    with _full_precision(values.device):
        for axis, (size, whole) in enumerate(zip(new_size, full, strict=True)):
            matrix = interpolation_matrix(
                grid[axis], whole, mode, antialias, offset=offset, device=values.device, dtype=dtype
            )
            out = torch.tensordot(matrix[:size], out, dims=([1], [axis])).movedim(0, axis)
    return out.to(values.dtype)


def resample_table(
    table: Tensor,
    old_size: Sequence[int],
    new_size: Sequence[int],
    mode: str = "bicubic",
    antialias: bool = True,
    *,
    num_prefix: int = 0,
    offset: float = 0.0,
) -> Tensor:
    """A flat table, rows of prefix tokens first, for another grid. Prefix rows are copied.

    Shape:
        table ``(..., P + prod(old_size), D)``; returns ``(..., P + prod(new_size), D)``.

    Example:
        >>> resample_table(torch.ones(1, 1 + 2 * 3, 4), (2, 3), (4, 5), num_prefix=1).shape
        torch.Size([1, 21, 4])
    """
    check_table(table, old_size, num_prefix)
    prefix, rows = table[..., :num_prefix, :], table[..., num_prefix:, :]
    lead = rows.shape[:-2]
    # leading dimensions ride along as channels
    grid = rows.reshape(-1, *old_size, rows.shape[-1]).movedim(0, -2)
    out = resample_grid(grid.flatten(-2), new_size, mode, antialias, offset=offset)
    out = out.unflatten(-1, grid.shape[-2:]).movedim(-2, 0).flatten(1, -2)
    return torch.cat([prefix, out.reshape(*lead, *out.shape[1:])], dim=-2)


def check_table(table: Tensor, grid: Sequence[int], num_prefix: int) -> None:
    """Raise unless a flat table has the rows that a grid and a number of prefix tokens ask for."""
    expected = num_prefix + math.prod(grid)
    if table.shape[-2] != expected:
        raise ValueError(
            f"table: expected {expected} rows ({num_prefix} prefix + grid {tuple(grid)}), got {tuple(table.shape)}; "
            "give the grid (height, width) the table was saved at and how many prefix rows it has"
        )


def fit_table(
    table: Tensor,
    old_size: Sequence[int],
    new_size: Sequence[int],
    mode: str = "bicubic",
    antialias: bool = True,
    *,
    num_prefix: int = 0,
) -> tuple[Tensor, str]:
    """A saved table for a model with another grid or other prefix rows, and a line that says what was done.

    The number of prefix rows of the saved table follows from its grid. Surplus rows are dropped from the end; missing
    rows are zero, which is what a model without them added.

    Shape:
        table ``(P_old + prod(old_size), D)``; returns ``(num_prefix + prod(new_size), D)``.
    """
    old_size, new_size = tuple(int(size) for size in old_size), tuple(int(size) for size in new_size)
    old_prefix = table.shape[-2] - math.prod(old_size)
    if old_prefix < 0:
        check_table(table, old_size, 0)
    if old_size == new_size and old_prefix == num_prefix:
        return table, ""
    out = resample_table(table, old_size, new_size, mode, antialias, num_prefix=old_prefix)
    prefix = out[..., : min(old_prefix, num_prefix), :]
    missing = out.new_zeros(*out.shape[:-2], max(num_prefix - old_prefix, 0), out.shape[-1])
    sizes = " -> ".join("x".join(map(str, size)) for size in (old_size, new_size))
    line = f"resized table {sizes}, prefix {old_prefix} -> {num_prefix}"
    return torch.cat([prefix, missing, out[..., old_prefix:, :]], dim=-2), line


def read_table(
    values: Tensor,
    coords: Tensor,
    extent: Tensor,
    mode: str = "bicubic",
    antialias: bool = True,
    *,
    grid: Sequence[int] | None = None,
    keep_aspect: bool = False,
) -> Tensor:
    """Values of a grid at single places, each sample with its own field size.

    At whole coordinates this is the row of the resampled grid; in between it is its smooth continuation, and with
    ``antialias=False`` the same as ``grid_sample`` with border padding.

    Args:
        values: the table.
        coords: places in cells of the new field.
        extent: size of the new field along each axis.
        mode: ``bicubic`` or ``bilinear``.
        antialias: widen the kernel along axes that are coarser than the table.
        grid: see :func:`resample_grid`.
        keep_aspect: see :func:`resample_grid`.

    Shape:
        values ``(*grid, D)``, coords ``(B or 1, N, A)``, extent ``(B or 1, A)``; returns ``(B or 1, N, D)``.
    """
    grid = tuple(values.shape[:-1] if grid is None else grid)
    if coords.shape[-1] != len(grid):
        raise ValueError(
            f"coords: expected {len(grid)} axes for a table on the grid {tuple(grid)}, got {tuple(coords.shape)}"
        )
    if keep_aspect:
        extent = extent.amax(-1, keepdim=True).expand_as(extent)
    weights = _token_weights(coords, extent, grid, mode, antialias)
    dtype = torch.promote_types(values.dtype, torch.float32)
    with _full_precision(values.device):
        return torch.matmul(weights.to(dtype), values.to(dtype).flatten(0, -2)).to(values.dtype)


def _token_weights(coords: Tensor, extent: Tensor, grid: Sequence[int], mode: str, antialias: bool) -> Tensor:
    weights: Tensor | None = None
    for axis, source in enumerate(grid):
        along = axis_weights(coords[..., axis], extent[:, None, axis], source, mode, antialias)
        weights = along if weights is None else (weights[..., None] * along[..., None, :]).flatten(-2)
    assert weights is not None
    return weights


def add_axis_tables(
    tables: Sequence[Tensor],
    coords: Tensor,
    extent: Tensor,
    mode: str = "linear",
    antialias: bool = False,
    *,
    keep_aspect: bool = False,
) -> Tensor:
    """Factorised table, one vector per index of each axis, summed: ``e = e_row + e_column``.

    Shape:
        tables one ``(n_axis, D)`` each, coords ``(B or 1, N, A)``, extent ``(B or 1, A)``; returns ``(B or 1, N,
        D)``.
    """
    if len(tables) != coords.shape[-1]:
        raise ValueError(f"tables: expected one for each of {coords.shape[-1]} axes, got {len(tables)}")
    if keep_aspect:
        extent = extent.amax(-1, keepdim=True).expand_as(extent)
    parts = [
        read_table(table, coords[..., axis : axis + 1], extent[:, axis : axis + 1], mode, antialias)
        for axis, table in enumerate(tables)
    ]
    return torch.stack(parts).sum(0)
