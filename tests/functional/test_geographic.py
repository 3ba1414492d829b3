"""Spherical harmonics and the Equal Earth projection."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmpos.functional.geographic import equal_earth, spherical_harmonics


def quadrature(degree: int) -> tuple[Tensor, Tensor]:
    """Places and weights that integrate products of harmonics below ``degree`` exactly."""
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(degree)
    lon = torch.arange(2 * degree).double() / (2 * degree) * 360 - 180
    lat = torch.rad2deg(torch.from_numpy(nodes).asin())
    grid = torch.stack(torch.meshgrid(lon, lat, indexing="ij"), -1).reshape(-1, 2)
    weight = torch.from_numpy(weights).expand(2 * degree, -1).reshape(-1) * (2 * math.pi / (2 * degree))
    return grid, weight


@pytest.mark.parametrize("degree", [1, 4, 12, 40])
def test_harmonics_are_orthonormal(degree: int) -> None:
    places, weight = quadrature(degree)
    values = spherical_harmonics(places, degree)
    torch.testing.assert_close(values.T @ (values * weight[:, None]), torch.eye(degree**2).double(), rtol=0, atol=1e-10)


def test_lowest_orders_by_hand() -> None:
    lonlat = torch.tensor([[12.5, 55.7], [-122.4, 37.8]]).double()
    phi, theta = (torch.deg2rad(lonlat) + torch.tensor([math.pi, math.pi / 2])).unbind(-1)
    k = math.sqrt(3 / (4 * math.pi))
    expected = [
        torch.full((2,), math.sqrt(1 / (4 * math.pi))).double(),
        -k * theta.sin() * phi.sin(),
        k * theta.cos(),
        -k * theta.sin() * phi.cos(),
    ]
    torch.testing.assert_close(spherical_harmonics(lonlat, 2), torch.stack(expected, -1), rtol=1e-6, atol=1e-7)


def test_sum_rule_holds_everywhere_and_at_high_degree() -> None:
    lonlat = torch.tensor([[0.0, 90.0], [77.0, -90.0], [180.0, 0.0], [33.3, 12.1]]).double()
    values = spherical_harmonics(lonlat, 60)
    for order in (0, 7, 59):
        part = values[:, order**2 : (order + 1) ** 2]
        torch.testing.assert_close((part**2).sum(-1), torch.full((4,), (2 * order + 1) / (4 * math.pi)).double())


def test_no_seam_and_one_value_at_a_pole() -> None:
    east, west = (spherical_harmonics(torch.tensor([[lon, 20.0]]).double(), 10) for lon in (180.0, -180.0))
    torch.testing.assert_close(east, west, rtol=0, atol=1e-12)
    poles = spherical_harmonics(torch.tensor([[lon, 90.0] for lon in (0.0, 45.0, 170.0)]).double(), 10)
    torch.testing.assert_close(poles, poles[:1].expand(3, -1), rtol=0, atol=1e-12)


def test_float32_input_is_computed_in_double() -> None:
    lonlat = torch.tensor([[12.5, 55.75], [-122.5, 37.75]])
    assert torch.equal(spherical_harmonics(lonlat, 30), spherical_harmonics(lonlat.double(), 30).float())


def test_equal_earth_keeps_areas() -> None:
    places = torch.tensor([[lat, lon] for lat in (-60.0, -10.0, 0.0, 35.0, 80.0) for lon in (-170.0, 20.0)]).double()
    jacobian = torch.stack([torch.autograd.functional.jacobian(equal_earth, p) for p in places])
    density = torch.linalg.det(jacobian).abs() / torch.deg2rad(places[:, 0]).cos()
    torch.testing.assert_close(density, density[:1].expand_as(density))
    corner = equal_earth(torch.tensor([90.0, 180.0]).double())
    assert corner.abs().max() < 1
    torch.testing.assert_close(equal_earth(-places), -equal_earth(places))


@pytest.mark.parametrize("function", [lambda x: spherical_harmonics(x, 3), equal_earth])
def test_bad_input(function) -> None:
    with pytest.raises(ValueError, match="degrees"):
        function(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="degree"):
        spherical_harmonics(torch.zeros(4, 2), 0)
