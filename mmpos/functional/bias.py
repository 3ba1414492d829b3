"""Static attention biases: offsets, distances, slopes, fields of view, and tables over offsets.

``i`` is the query, ``j`` the key, an offset is query minus key. Everything returned is added to logits that are
already scaled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "DISTANCES",
    "VIEWS",
    "alibi_slopes",
    "distances",
    "lengths",
    "geometric_matrix",
    "kerple",
    "log_coordinates",
    "log_ratio",
    "offset_grid",
    "offset_index",
    "pad_prefix",
    "pair_offsets",
    "raw_log_coordinates",
    "view_mask",
]

DISTANCES = ("euclidean", "manhattan", "chebyshev")


def pair_offsets(coords: Tensor) -> Tensor:
    """Query minus key for all pairs. Shape: coords ``(B or 1, N, A)``; returns ``(B or 1, N, N, A)``."""
    return coords[:, :, None] - coords[:, None, :]


def lengths(offsets: Tensor, kind: str = "euclidean") -> Tensor:
    """Lengths of offsets. Shape: ``(..., A)`` to ``(...)``."""
    if kind not in DISTANCES:
        raise ValueError(f"distance: expected one of {DISTANCES}, got {kind!r}")
    size = offsets.abs()
    if kind == "euclidean":
        return size.square().sum(-1).sqrt()
    return size.amax(-1) if kind == "chebyshev" else size.sum(-1)


def distances(coords: Tensor, kind: str = "euclidean") -> Tensor:
    """Distances of all pairs in the unit of the coordinates.

    Shape:
        coords ``(B or 1, N, A)``; returns ``(B or 1, N, N)``.

    Example:
        >>> distances(torch.tensor([[[0.0, 0.0], [3.0, 4.0]]]))[0, 0].tolist()
        [0.0, 5.0]
    """
    if kind not in DISTANCES:
        raise ValueError(f"distance: expected one of {DISTANCES}, got {kind!r}")
    total: Tensor | None = None
    for column in coords.unbind(-1):
        offset = column[:, :, None] - column[:, None, :]
        if kind == "chebyshev":
            total = offset.abs() if total is None else torch.maximum(total, offset.abs())
        else:
            term = offset * offset if kind == "euclidean" else offset.abs()
            total = term if total is None else total + term
    if total is None:
        raise ValueError(f"coords: expected at least one axis, got {tuple(coords.shape)}")
    return total.sqrt() if kind == "euclidean" else total


def pad_prefix(bias: Tensor, num_prefix: int, value: float = 0.0) -> Tensor:
    """A constant in the rows and columns of prefix tokens. Shape: ``(..., N, N)`` -> ``(..., P + N, P + N)``."""
    return F.pad(bias, (num_prefix, 0, num_prefix, 0), value=value) if num_prefix else bias


# -- tables over offsets ----------------------------------------------------------------------------------------------


def offset_index(offsets: Tensor, sizes: Sequence[int], *, clamp: bool = False) -> Tensor:
    """Flat row of an offset table for whole-number offsets.

    Args:
        offsets: query minus key.
        sizes: sizes of the raster that the table covers; an axis has ``2 n - 1`` rows.
        clamp: whether offsets beyond the table read its edge.

    Shape:
        offsets ``(.., A)``; returns ``(..)`` int64.
    """
    index: Tensor | None = None
    for axis, size in enumerate(sizes):
        along = offsets[..., axis].round().long() + (size - 1)
        along = along.clamp(0, 2 * size - 2) if clamp else along
        index = along if index is None else index * (2 * size - 1) + along
    assert index is not None
    return index


# -- ALiBi and functions of a distance --------------------------------------------------------------------------------


def alibi_slopes(num_heads: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """Slopes ``2 ** (-8 h / H)`` for a power of two; else those of the next lower power, then every second of twice.

    Example:
        >>> alibi_slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]
    """
    if num_heads < 1:
        raise ValueError(f"num_heads: expected at least 1, got {num_heads}")
    lower = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * head / lower) for head in range(1, lower + 1)]
    slopes += [2.0 ** (-8.0 * head / (2 * lower)) for head in range(1, 2 * lower + 1, 2)][: num_heads - lower]
    return torch.tensor(slopes, dtype=dtype, device=device)


def kerple(distance: Tensor, amount: Tensor, rate: Tensor, kind: str) -> Tensor:
    """``-p ln(1 + a d)`` (``log``) or ``-a d ** p`` (``power``), with ``p = amount`` and ``a = rate`` per head.

    Shape:
        distance ``(B or 1, N, N)``, amount and rate ``(heads,)``; returns ``(B or 1, heads, N, N)``.
    """
    d, p, a = distance[:, None], amount[:, None, None], rate[:, None, None]
    if kind == "log":
        return -p * torch.log1p(a * d)
    if kind == "power":
        return -a * d**p
    raise ValueError(f"kind: expected 'log' or 'power', got {kind!r}")


def log_ratio(distance: Tensor, reach: Tensor, c: Tensor, eps: float = 1e-6) -> Tensor:
    """Progressive interpolation of FIRE: ``psi(d) / (psi(reach) + eps)`` with ``psi(z) = ln(1 + |c| z)``, in [0, 1].

    Shape:
        distance ``(B or 1, N, N)``, reach ``(B or 1, N)``; returns the shape of distance.
    """
    strength = c.abs()
    return torch.log1p(strength * distance) / (torch.log1p(strength * reach) + eps)[..., None]


# -- fields of view ---------------------------------------------------------------------------------------------------

_HALVES = ("up", "down", "left", "right")
_TRIANGLES = ("tri_up", "tri_down", "tri_left", "tri_right")
#: the four fields of view of each set; a field is an intersection of half planes and triangles
VIEWS: dict[str, tuple[tuple[str, ...], ...]] = {
    "halves": tuple((name,) for name in _HALVES),
    "corners": (("up", "left"), ("up", "right"), ("down", "left"), ("down", "right")),
    "triangles": tuple((name,) for name in _TRIANGLES),
    "eighths1": (("tri_up", "left"), ("tri_down", "left"), ("tri_left", "up"), ("tri_right", "up")),
    "eighths2": (("tri_up", "right"), ("tri_down", "right"), ("tri_left", "down"), ("tri_right", "down")),
}


def view_mask(offsets: Tensor, view: Sequence[str]) -> Tensor:
    """Which keys a query sees in a field of view; borders are included, and a query always sees itself.

    Shape:
        offsets ``(B or 1, N, N, 2)``, (row, col), query minus key; returns ``(B or 1, N, N)`` bool.
    """
    y, x = -offsets[..., 0], -offsets[..., 1]  # from the query to the key
    tests = {
        "up": y <= 0,
        "down": y >= 0,
        "left": x <= 0,
        "right": x >= 0,
        "tri_up": -y >= x.abs(),
        "tri_down": y >= x.abs(),
        "tri_left": -x >= y.abs(),
        "tri_right": x >= y.abs(),
    }
    seen = torch.ones_like(y, dtype=torch.bool)
    for part in view:
        seen = seen & tests[part]
    return seen


def geometric_places(count: int, target: int) -> list[float]:
    """Places of offsets at ``+-(1 + q + q^2 + ..)``, with ``q`` such that the last one meets a target offset.

    ``q`` is found by bisection in [1.01, 1.5] and stays at the border when no value there meets the target (BEiT).

    Args:
        count: offsets of the source axis, odd.
        target: offsets of the target axis, odd.
    """
    low, high = 1.01, 1.5
    steps = count // 2
    q = (low + high) / 2
    while high - low > 1e-6:
        q = (low + high) / 2  # the last middle is the answer, as in the references
        reached = (1 - q**steps) / (1 - q)  # 1 + q + .. + q^(steps - 1)
        if reached > target // 2:
            high = q
        else:
            low = q
    places, place = [], 0.0
    for step in range(steps):
        place += q**step
        places.append(place)
    return [-p for p in reversed(places)] + [0.0] + places


def geometric_matrix(source: int, target: int) -> Tensor:
    """Weights ``(target, source)`` that read a table axis of offsets linearly at whole target offsets, float64.

    Offsets 0 and +-1 are preserved exactly; targets beyond the last source place read the edge.

    Args:
        source: offsets of the source axis, odd.
        target: offsets of the target axis, odd.
    """
    if source % 2 == 0 or target % 2 == 0:
        raise ValueError(f"source, target: expected odd numbers of offsets 2 n - 1, got {source} and {target}")
    if source == 1:
        return torch.ones(target, 1, dtype=torch.float64)
    places = torch.tensor(geometric_places(source, target), dtype=torch.float64)
    half = target // 2
    wanted = torch.arange(-half, half + 1, dtype=torch.float64).clamp(places[0], places[-1])
    left = (torch.searchsorted(places, wanted, right=True) - 1).clamp(0, source - 2)
    share = ((wanted - places[left]) / (places[left + 1] - places[left]))[:, None]
    eye = torch.eye(source, dtype=torch.float64)
    return (1 - share) * eye[left] + share * eye[left + 1]


def log_coordinates(offsets: Tensor, reference: Sequence[float] | Tensor) -> Tensor:
    """Log-spaced coordinates of SwinV2: ``z = 8 offset / (w_ref - 1)``, then ``sign(z) log2(1 + |z|) / 3``.

    A reference window of 1 has no scale; its offsets are left unscaled instead of dividing by zero.

    Shape:
        offsets ``(.., A)``, reference ``(A,)``; returns the shape of offsets.
    """
    window = torch.as_tensor(reference, dtype=offsets.dtype, device=offsets.device)
    z = offsets / (window - 1).clamp_min(1) * 8
    return z.sign() * torch.log2(1 + z.abs()) / math.log2(8)


def raw_log_coordinates(offsets: Tensor) -> Tensor:
    """Log coordinates of the raw offset, ``sign(x) ln(1 + |x|)`` (timm's ``cr`` mode)."""
    return offsets.sign() * torch.log(1 + offsets.abs())


def offset_grid(
    sizes: Sequence[int], *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """All offsets of a raster, most negative first. Shape: returns ``(2 n_1 - 1, .., 2 n_A - 1, A)``."""
    ticks = [torch.arange(-(size - 1), size, device=device, dtype=dtype) for size in sizes]
    return torch.stack(torch.meshgrid(*ticks, indexing="ij"), dim=-1)
