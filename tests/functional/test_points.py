"""Centres, neighbours and local geometry: what they are, and what no motion changes."""

from __future__ import annotations

import math

import pytest
import torch

from mmpos.functional.points import (
    LOCAL_WIDTHS,
    farthest_points,
    gather_points,
    local_geometry,
    nearest_points,
    random_rotations,
    rotations_about_z,
)


def clouds(batch: int = 3, points: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, points, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(points: torch.Tensor, seed: int = 1) -> torch.Tensor:
    uniforms = torch.rand(len(points), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return points @ random_rotations(uniforms).mT


def test_every_centre_is_the_farthest_from_those_before_it() -> None:
    points = clouds()
    chosen = farthest_points(points, 12)
    assert chosen.shape == (3, 12)
    for cloud, order in zip(points, chosen.tolist(), strict=True):
        assert len(set(order)) == 12
        away = (cloud - cloud.mean(0)).norm(dim=-1)
        assert order[0] == int(away.argmax())
        for place in range(1, 12):
            gaps = torch.cdist(cloud, cloud[order[:place]]).amin(1)
            assert float(gaps[order[place]]) == pytest.approx(float(gaps.max()))


def test_centres_and_neighbours_follow_a_moved_cloud() -> None:
    points = clouds()
    moved = turned(points) + torch.tensor([3.0, -5.0, 2.0], dtype=torch.float64)
    chosen = farthest_points(points, 9)
    assert torch.equal(chosen, farthest_points(moved, 9))
    near = nearest_points(points, gather_points(points, chosen), 5)
    assert torch.equal(near, nearest_points(moved, gather_points(moved, chosen), 5))
    assert torch.equal(near[..., 0], chosen)  # a centre is its own nearest
    exact = torch.cdist(gather_points(points, chosen), points).topk(5, largest=False).indices
    assert torch.equal(near, exact)


def test_padding_is_neither_centre_nor_neighbour() -> None:
    points = clouds(points=20)
    filled = torch.cat([points, torch.full((3, 7, 3), 100.0, dtype=torch.float64)], dim=1)
    mask = torch.arange(27) < 20
    mask = mask.expand(3, -1)
    chosen = farthest_points(filled, 8, mask)
    assert torch.equal(chosen, farthest_points(points, 8))
    centres = gather_points(points, chosen)
    assert torch.equal(nearest_points(filled, centres, 20, mask), nearest_points(points, centres, 20))
    assert int(farthest_points(filled, 25, mask).max()) < 20  # more centres than points: some are repeated


@pytest.mark.parametrize("kind", sorted(LOCAL_WIDTHS))
def test_local_geometry_does_not_depend_on_where_the_cloud_is(kind: str) -> None:
    points = clouds()
    groups, centres = points.unflatten(1, (4, 10)), points[:, ::10]
    found = local_geometry(groups, centres, None, kind)
    assert found.shape == (3, 4, 10, LOCAL_WIDTHS[kind])
    shift = torch.tensor([10.0, -3.0, 4.0], dtype=torch.float64)
    assert torch.allclose(found, local_geometry(groups + shift, centres + shift, None, kind), atol=1e-12)


def test_distances_do_not_depend_on_how_it_is_turned_or_mirrored_and_offsets_do() -> None:
    points = clouds()
    mirror = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    for other in (turned(points), points * mirror):
        for kind, same in (("distances", True), ("relative", False)):
            before = local_geometry(points.unflatten(1, (4, 10)), points[:, ::10], None, kind)
            after = local_geometry(other.unflatten(1, (4, 10)), other[:, ::10], None, kind)
            assert torch.allclose(before, after, atol=1e-12) == same
            if not same:
                assert (before - after).abs().max() > 0.5


def test_distances_by_hand() -> None:
    group = torch.tensor([[[[0.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]]])
    found = local_geometry(group, group[:, :, 0], None, "distances")[0, 0]
    mean = math.hypot(1.0, 4 / 3)
    # from the centre, the mean, the farthest (0, 4, 0) and the one farthest from that (3, 0, 0)
    expected = torch.tensor(
        [
            [0.0, mean, 4.0, 3.0, mean, 5.0],
            [3.0, math.hypot(2.0, 4 / 3), 5.0, 0.0, mean, 5.0],
            [4.0, math.hypot(1.0, 8 / 3), 0.0, 5.0, mean, 5.0],
        ]
    )
    assert torch.allclose(found, expected, atol=1e-6)


def test_neighbours_that_are_not_there_do_not_count() -> None:
    points = clouds(batch=2, points=6)
    centres = points[:, :1]
    real = torch.tensor([True, True, True, True, False, False]).expand(2, 1, -1)
    for kind in LOCAL_WIDTHS:
        padded = local_geometry(points[:, None], centres, real, kind)[:, :, :4]
        assert torch.allclose(padded, local_geometry(points[:, None, :4], centres, None, kind))


def test_gradient_is_finite_where_distances_are_zero() -> None:
    points = torch.zeros(1, 2, 3, 3, requires_grad=True)
    local_geometry(points, points[:, :, 0], None, "distances").sum().backward()
    assert points.grad is not None
    assert bool(points.grad.isfinite().all())


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="local: expected one of"):
        local_geometry(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 3), None, "angles")


def test_rotations() -> None:
    uniforms = torch.rand(4000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turns = random_rotations(uniforms)
    assert torch.allclose(turns @ turns.mT, torch.eye(3, dtype=torch.float64).expand(4000, -1, -1), atol=1e-12)
    assert torch.allclose(torch.linalg.det(turns), torch.ones(4000, dtype=torch.float64))
    # uniform: entries have mean 0 and variance 1/3, as those of a point on the sphere
    assert turns.mean(0).abs().max() < 0.05
    assert (turns.square().mean(0) - 1 / 3).abs().max() < 0.03
    # the angle of a uniform rotation has mean pi/2 + 2/pi
    angle = ((turns.diagonal(dim1=1, dim2=2).sum(-1) - 1) / 2).clamp(-1, 1).acos()
    assert float(angle.mean()) == pytest.approx(math.pi / 2 + 2 / math.pi, abs=0.03)
    about = rotations_about_z(torch.tensor([0.0, 0.25]))
    assert torch.allclose(about[0], torch.eye(3))
    assert torch.allclose(about[1] @ torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0.0, 1.0, 5.0]), atol=1e-6)
