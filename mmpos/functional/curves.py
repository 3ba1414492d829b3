"""Orders in which a curve visits the cells of a grid: Gilbert, Hilbert and raster.

The Gilbert curve is a Hilbert curve for any rectangle (construction: jakubcerveny/gilbert, BSD-2-Clause; written anew
here). A block with a long side ``a`` and a short side ``b`` is cut in two along ``a`` when it is longer than 3 : 2,
else in three: up along half of ``b``, across the whole of ``a``, and back down. Halves are rounded to even lengths, and
an odd size costs at most one diagonal step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["CURVES", "curve_rank", "gilbert_cells", "hilbert_cell"]

CURVES = ("gilbert", "hilbert", "raster", "snake")

Vector = tuple[int, int]


def curve_rank(height: int, width: int, curve: str = "gilbert", device: torch.device | str | None = None) -> Tensor:
    """When each cell is visited.

    Args:
        height: rows.
        width: columns.
        curve: ``gilbert`` for any rectangle; ``hilbert`` for squares whose side is a power of two; ``raster`` row by
            row; ``snake`` row by row in alternating directions.
        device: where the result lives.

    Shape:
        Returns ``(height, width)`` int64.

    Example:
        >>> curve_rank(2, 3).tolist()
        [[0, 5, 4], [1, 2, 3]]
    """
    if height < 1 or width < 1:
        raise ValueError(f"height, width: expected at least 1, got {height} and {width}")
    return torch.tensor(_ranks(height, width, curve), dtype=torch.int64, device=device).reshape(height, width)


@lru_cache(maxsize=64)
def _ranks(height: int, width: int, curve: str) -> tuple[int, ...]:
    if curve == "raster":
        return tuple(range(height * width))
    if curve == "snake":
        return tuple(
            row * width + (column if row % 2 == 0 else width - 1 - column)
            for row in range(height)
            for column in range(width)
        )
    if curve == "gilbert":
        cells: Iterator[Vector] = gilbert_cells(height, width)
    elif curve == "hilbert":
        if height != width or height & (height - 1):
            raise ValueError(
                f"curve: 'hilbert' needs a square whose side is a power of two, got {height} x {width}; use "
                "curve='gilbert'"
            )
        cells = (hilbert_cell(step, height) for step in range(height * width))
    else:
        raise ValueError(f"curve: expected one of {CURVES}, got {curve!r}")
    ranks = [0] * (height * width)
    for step, (row, column) in enumerate(cells):
        ranks[row * width + column] = step
    return tuple(ranks)


def gilbert_cells(height: int, width: int) -> Iterator[Vector]:
    """Cells ``(row, column)`` along the Gilbert curve.

    It starts at (0, 0) and runs along the longer side, along the columns when both are equal.
    """
    if width >= height:
        return _block((0, 0), (0, width), (height, 0))
    return _block((0, 0), (height, 0), (0, width))


def _block(start: Vector, a: Vector, b: Vector) -> Iterator[Vector]:
    """Cells of the block spanned by ``a`` (the direction of travel) and ``b`` at the corner ``start``."""
    long, short = abs(a[0] + a[1]), abs(b[0] + b[1])
    along, across = _unit(a), _unit(b)
    if short == 1 or long == 1:  # a strip is filled straight
        step, count = (along, long) if short == 1 else (across, short)
        for i in range(count):
            yield start[0] + i * step[0], start[1] + i * step[1]
        return
    half_a, half_b = (a[0] // 2, a[1] // 2), (b[0] // 2, b[1] // 2)  # floor, for negative sides as well
    if 2 * long > 3 * short:
        if abs(half_a[0] + half_a[1]) % 2 and long > 2:
            half_a = _add(half_a, along)
        yield from _block(start, half_a, b)
        yield from _block(_add(start, half_a), _add(a, half_a, -1), b)
        return
    if abs(half_b[0] + half_b[1]) % 2 and short > 2:
        half_b = _add(half_b, across)
    yield from _block(start, half_b, half_a)
    yield from _block(_add(start, half_b), a, _add(b, half_b, -1))
    # back down: from the far end of a, one cell inside the block
    corner = _add(_add(start, _add(a, along, -1)), _add(half_b, across, -1))
    yield from _block(corner, _add((0, 0), half_b, -1), _add(half_a, a, -1))


def _unit(v: Vector) -> Vector:
    return (v[0] > 0) - (v[0] < 0), (v[1] > 0) - (v[1] < 0)


def _add(u: Vector, v: Vector, sign: int = 1) -> Vector:
    return u[0] + sign * v[0], u[1] + sign * v[1]


def hilbert_cell(step: int, side: int) -> Vector:
    """Cell ``(row, column)`` at a step of the Hilbert curve: from (0, 0) down to (1, 0), then (1, 1), (0, 1) for side
    2.

    In (x, y) that is (0, 0), (0, 1), (1, 1), (1, 0).
    """
    x = y = 0
    size = 1
    while size < side:
        right = 1 & (step // 2)
        up = 1 & (step ^ right)
        if up == 0:
            if right:
                x, y = size - 1 - x, size - 1 - y
            x, y = y, x
        x, y = x + size * right, y + size * up
        step //= 4
        size *= 2
    return y, x
