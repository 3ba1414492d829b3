"""Places on the globe: spherical harmonics, the Equal Earth projection.

Sources: Russwurm et al., *Geographic Location Encoding with Spherical Harmonics and Sinusoidal Representation
Networks*, arXiv 2310.06743; Savric, Patterson, Jenny, *The Equal Earth map projection* (2018), as used by GeoCLIP,
arXiv 2309.16020.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["equal_earth", "spherical_harmonics"]


def spherical_harmonics(lonlat: Tensor, degree: int) -> Tensor:
    """Real orthonormal spherical harmonics of all orders ``l < degree``, ``m = -l..l``.

    The angles are ``phi = lon + 180`` and, from the south pole, ``theta = lat + 90`` degrees. They are computed by
    recursion in float64: in float32 the recursion loses its digits at high degree.

    Args:
        lonlat: longitude and latitude in degrees, longitude first.
        degree: number ``L`` of orders.

    Shape:
        lonlat ``(..., 2)``; returns ``(..., L ** 2)`` in the dtype of ``lonlat``.

    Example:
        >>> spherical_harmonics(torch.tensor([[12.5, 55.7]]), 3).shape
        torch.Size([1, 9])
    """
    if lonlat.shape[-1] != 2:
        raise ValueError(f"lonlat: expected (..., 2) = (longitude, latitude) in degrees, got {tuple(lonlat.shape)}")
    if degree < 1:
        raise ValueError(f"degree: expected at least 1, got {degree}")
    wide = torch.deg2rad(lonlat.double())
    phi, theta = wide[..., 0] + math.pi, wide[..., 1] + math.pi / 2
    legendre = _normalised_legendre(theta.cos(), theta.sin().clamp_min(0), degree)
    out = []
    for order in range(degree):
        negative = [math.sqrt(2) * legendre[order, m] * (m * phi).sin() for m in range(order, 0, -1)]
        positive = [math.sqrt(2) * legendre[order, m] * (m * phi).cos() for m in range(1, order + 1)]
        out += [*negative, legendre[order, 0], *positive]
    return torch.stack(out, dim=-1).to(lonlat.dtype)


def _normalised_legendre(x: Tensor, sine: Tensor, degree: int) -> dict[tuple[int, int], Tensor]:
    """Associated Legendre functions times ``sqrt((2l+1)/4pi (l-m)!/(l+m)!)``, with the Condon-Shortley sign.

    The normalisation rides along in the recursion, so nothing overflows at high degree.
    """
    table: dict[tuple[int, int], Tensor] = {}
    diagonal = torch.full_like(x, math.sqrt(1 / (4 * math.pi)))
    for m in range(degree):
        if m:
            diagonal = -math.sqrt((2 * m + 1) / (2 * m)) * sine * diagonal
        table[m, m] = diagonal
        if m + 1 < degree:
            table[m + 1, m] = math.sqrt(2 * m + 3) * x * diagonal
        for order in range(m + 2, degree):
            a = math.sqrt((4 * order**2 - 1) / (order**2 - m**2))
            b = math.sqrt(((order - 1) ** 2 - m**2) / (4 * (order - 1) ** 2 - 1))
            table[order, m] = a * (x * table[order - 1, m] - b * table[order - 2, m])
    return table


# polynomial of the projection, and the factor by which GeoCLIP brings degrees to about [-1, 1]
_A = (1.340264, -0.081106, 0.000893, 0.003796)
_GEOCLIP_SCALE = 66.50336 / 180


def equal_earth(latlon: Tensor) -> Tensor:
    """Equal Earth projection with the scale of GeoCLIP.

    Args:
        latlon: latitude and longitude in degrees, latitude first (the other way round than
            :func:`spherical_harmonics`).

    Shape:
        latlon ``(..., 2)``; returns ``(x, y)`` ``(..., 2)``. Not continuous across +-180 degrees.
    """
    if latlon.shape[-1] != 2:
        raise ValueError(f"latlon: expected (..., 2) = (latitude, longitude) in degrees, got {tuple(latlon.shape)}")
    latitude, longitude = torch.deg2rad(latlon).unbind(-1)
    theta = (math.sqrt(3) / 2 * latitude.sin()).asin()
    t2 = theta**2
    t6 = t2**3
    slope = 9 * _A[3] * t2 * t6 + 7 * _A[2] * t6 + 3 * _A[1] * t2 + _A[0]
    x = 2 * math.sqrt(3) * longitude * theta.cos() / (3 * slope)
    y = theta * (_A[3] * t2 * t6 + _A[2] * t6 + _A[1] * t2 + _A[0])
    return torch.stack([x, y], dim=-1) * _GEOCLIP_SCALE
