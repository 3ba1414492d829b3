"""Cameras, PRoPE, GTA, CaPE, RayRoPE and ray maps: frames of the world, identities, limits, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos.multiview import (
    Cameras,
    Cape4,
    Cape6,
    Gta,
    Prope,
    RayRope,
    attend_views,
    camera_rays,
    encode,
    frame_change_error,
    gta_image,
    look_at_pose,
    patchify,
    plucker_map,
    random_rigid,
    ray_distance,
    raymap,
    spherical_matrices,
    to_plucker,
)
from mmpos.multiview.cameras import invert_rigid
from mmpos.multiview.rayrope import mean_rotation

GRID = (2, 3)
SIZE = (16, 24)


def cameras(views: int = 2, batch: int = 2, seed: int = 0, *, intrinsics: bool = True, **options: Any) -> Cameras:
    generator = torch.Generator().manual_seed(seed)
    w2c = torch.cat(
        [random_rigid(batch, distance=0.6, generator=generator, dtype=torch.float64) for _ in range(views)], 1
    )
    if not intrinsics:
        return Cameras(w2c)
    K = torch.zeros(batch, views, 3, 3, dtype=torch.float64)  # noqa: N806
    K[..., 0, 0] = 20 + 5 * torch.rand(batch, views, generator=generator)
    K[..., 1, 1] = 18 + 5 * torch.rand(batch, views, generator=generator)
    K[..., 0, 2], K[..., 1, 2], K[..., 2, 2] = 11.0, 9.0, 1.0
    return Cameras(w2c, K, SIZE)


def content(tokens: int, width: int, batch: int = 2, heads: int = 2, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(3, batch, heads, tokens, width, generator=generator, dtype=torch.float64))


def attention_of(name: str, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Cameras to the attention of one layer."""
    if name == "rayrope":
        rope = RayRope(24)
        predicted = torch.randn(2, q.shape[2], 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        return lambda c: rope.attend(q, k, v, rope.prepare(c, GRID, predicted))
    if name == "prope":
        return lambda c: attend_views(q, k, v, Prope(24).prepare(c, GRID))
    if name == "prope without intrinsics":
        return lambda c: attend_views(q, k, v, Prope(24).prepare(Cameras(c.w2c), GRID))
    if name == "gta":
        gta = Gta({"triv": 1, "se3": 8, "so3": 8, "so2": 4, "t2": 3}, trans_coeff=0.7).double()
        return lambda c: attend_views(q, k, v, gta.prepare(c, GRID))
    return lambda c: attend_views(q, k, v, Cape6(24).prepare(c))


@pytest.mark.parametrize("name", ["rayrope", "prope", "prope without intrinsics", "gta", "cape"])
def test_the_frame_of_the_world_does_not_matter_and_poses_do(name: str) -> None:
    views = cameras()
    function = attention_of(name, *content(12, 24))
    assert frame_change_error(function, views, distance=3.0) < 1e-9
    if name == "rayrope":
        return  # all that poses do to it is below
    moved = Cameras(views.w2c @ random_rigid(2, dtype=torch.float64) @ views.w2c[:, :1], views.K, views.size)
    other = Cameras(torch.cat([views.w2c[:, :1], moved.w2c[:, 1:]], 1), views.K, views.size)
    with torch.no_grad():
        assert (function(views) - function(other)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["rayrope", "prope", "gta", "cape"])
def test_views_in_another_order_give_tokens_in_that_order(name: str) -> None:
    views, order = cameras(3), [2, 0, 1]
    q, k, v = content(18, 24)
    shuffle = lambda x: x.unflatten(2, (3, 6))[:, :, order].flatten(2, 3)  # noqa: E731
    here = attention_of(name, q, k, v)
    with torch.no_grad():
        if name == "rayrope":
            rope = RayRope(24)
            predicted = torch.randn(2, 18, 2, dtype=torch.float64)
            one = rope.attend(q, k, v, rope.prepare(views, GRID, predicted))
            turned = predicted.unflatten(1, (3, 6))[:, order].flatten(1, 2)
            geometry = rope.prepare(views.views(order), GRID, turned)
            two = rope.attend(*(shuffle(x) for x in (q, k, v)), geometry)
        else:
            one, two = here(views), attention_of(name, *(shuffle(x) for x in (q, k, v)))(views.views(order))
    torch.testing.assert_close(two, shuffle(one), atol=1e-10, rtol=0)


def test_identical_cameras_leave_what_images_alone_would_do() -> None:
    same = cameras(1).views([0, 0])
    q, k, v = content(12, 16)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(attend_views(q, k, v, Cape6(16).prepare(same)), plain)
    only_se3 = Gta({"se3": 16}).double()
    torch.testing.assert_close(attend_views(q, k, v, only_se3.prepare(same)).detach(), plain)
    # PRoPE without intrinsics is GTA with whole translations, up to its rotary half
    views = Cameras(cameras().w2c)
    prope, gta = Prope(16).prepare(views, GRID), Gta({"se3": 8}, trans_coeff=1.0).double().prepare(views)
    for side in ("query", "key", "output"):
        first = encode(q, getattr(prope, side))[..., :8]
        torch.testing.assert_close(first, encode(q[..., :8], getattr(gta, side)).detach())


def test_a_resized_image_is_the_same_camera() -> None:
    views = cameras()
    q, k, v = content(12, 24)
    larger = views.resized(40, 96)
    for name in ("prope", "rayrope"):
        function = attention_of(name, q, k, v)
        torch.testing.assert_close(function(larger), function(views), atol=1e-10, rtol=0)
    torch.testing.assert_close(larger.projection @ larger.unprojection, torch.eye(4).double().expand(2, 2, 4, 4))
    part = views.cropped(4, 6, 8, 12)
    point = torch.tensor([0.1, -0.2, 2.0], dtype=torch.float64)
    assert views.K is not None
    assert part.K is not None
    here, there = ((K @ point)[..., :2] / point[2] for K in (views.K, part.K))
    torch.testing.assert_close(here - there, torch.tensor([6.0, 4.0], dtype=torch.float64).expand(2, 2, 2))


def test_normalised_cameras_have_the_frame_and_the_scale_they_should() -> None:
    views = cameras(3)
    first = views.normalized()
    torch.testing.assert_close(first.w2c[:, 0], torch.eye(4).double().expand(2, 4, 4))
    torch.testing.assert_close((first.centres[:, 1]).norm(dim=-1), torch.ones(2).double())
    for mode in ("mean_centre", "max_radius"):
        found = views.normalized(mode)
        torch.testing.assert_close(found.centres.mean(1), torch.zeros(2, 3).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.centres.norm(dim=-1).amax(1), torch.full((2,), 0.5).double())
    relative = lambda c: c.w2c[:, 1, :3, :3] @ c.w2c[:, 0, :3, :3].mT  # noqa: E731
    torch.testing.assert_close(relative(found), relative(views))
    flipped = Cameras.from_opengl(views.c2w @ torch.diag(torch.tensor([1.0, -1, -1, 1]).double()))
    torch.testing.assert_close(flipped.w2c, views.w2c)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999))
def test_spherical_matrices_are_a_representation(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (random_rigid(1, generator=generator, dtype=torch.float64)[0, 0, :3, :3] for _ in range(2))
    for both, one, two in zip(spherical_matrices(a @ b), spherical_matrices(a), spherical_matrices(b), strict=True):
        torch.testing.assert_close(both, one @ two)
        torch.testing.assert_close(one @ one.mT, torch.eye(len(one)).double())


def test_image_positions_turn_values_too_and_leave_norms() -> None:
    q, k, v = content(6, 8)
    geometry = gta_image(GRID, 8)
    torch.testing.assert_close(encode(q, geometry.query).norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(encode(encode(v, geometry.value), geometry.output), v)
    plain = gta_image(GRID, 8, values=False)
    assert (attend_views(q, k, v, geometry) - attend_views(q, k, v, plain)).abs().max() > 1e-2


def test_prefix_tokens_stand_in_the_first_view() -> None:
    views = cameras()
    q, k, v = content(13, 16)
    run = lambda c: attend_views(q, k, v, Prope(16).prepare(c, GRID, num_prefix=1))  # noqa: E731
    assert frame_change_error(run, views, distance=2.0) < 1e-9
    geometry = Prope(16).prepare(views, GRID, num_prefix=1)
    seen = torch.einsum("bij,bhni->bhnj", views.projection[:, 0], q[:, :, 0, :8].unflatten(-1, (2, 4)))  # P^T q
    torch.testing.assert_close(encode(q, geometry.query)[:, :, 0], torch.cat([seen.flatten(-2), q[:, :, 0, 8:]], -1))
    without = encode(q[:, :, 1:], Prope(16).prepare(views, GRID).query)
    torch.testing.assert_close(encode(q, geometry.query)[:, :, 1:], without)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(low=st.floats(-20, 20), width=st.floats(-30, 30))
def test_mean_rotations_are_integrals(low: float, width: float) -> None:
    steps = torch.linspace(0, 1, 4001, dtype=torch.float64) * width + low
    ends = torch.tensor([low, low + width], dtype=torch.float64)
    cos, sin = mean_rotation(ends[0], ends[1])
    assert abs(float(cos) - float(torch.trapezoid(steps.cos(), dx=1 / 4000))) < 1e-4
    assert abs(float(sin) - float(torch.trapezoid(steps.sin(), dx=1 / 4000))) < 1e-4
    assert float(cos**2 + sin**2) <= 1 + 1e-12


def test_known_and_predicted_depths_agree_and_uncertain_ones_are_damped() -> None:
    views, rope = cameras(), RayRope(96)
    depth = torch.full((2, 2, *SIZE), 2.5, dtype=torch.float64)
    known = rope.known_depths(depth, GRID)
    sure = torch.tensor([2.5, 0.0]).double().log().nan_to_num(neginf=0.0).expand(2, 12, 2)
    one, two = rope.prepare(views, GRID, depths=known), rope.prepare(views, GRID, sure)
    torch.testing.assert_close(one.key_cos, two.key_cos)
    torch.testing.assert_close(two.key_cos**2 + two.key_sin**2, torch.ones_like(two.key_cos))
    vague = rope.prepare(views, GRID, torch.tensor([0.9, 2.0]).double().expand(2, 12, 2))
    assert float((vague.key_cos**2 + vague.key_sin**2).max()) <= 1 + 1e-12
    assert float((vague.key_cos**2 + vague.key_sin**2).min()) < 0.7
    # some views known, the others predicted
    mixed = rope.prepare(views, GRID, sure, depths=known[:, :6])
    torch.testing.assert_close(mixed.key_cos, two.key_cos)
    ramp = torch.arange(16 * 24, dtype=torch.float64).view(1, 1, 16, 24) / 10 + 0.1
    corners = RayRope(24).known_depths(ramp, GRID)[
        0, 4
    ]  # the patch in row 1, column 1: pixels (8, 8), (8, 16), (15, 8)
    assert [round(float(x) * 10 - 1) for x in corners] == [8 * 24 + 8, 8 * 24 + 16, 15 * 24 + 8]


@pytest.mark.parametrize(
    ("width", "options"),
    [(48, {}), (36, {"kind": "0_pj+inf_pj+d_pj", "rays": 1}), (36, {"depth_code": "inv_d", "rays": 2})],
)
def test_folded_views_are_one_attention_for_each_query_view(width: int, options: dict) -> None:
    views, rope = cameras(3), RayRope(width, **options)
    q, k, v = content(18, rope.head_dim)
    predicted = torch.randn(2, 18, 2, dtype=torch.float64)
    geometry = rope.prepare(views, GRID, predicted)
    mask = torch.rand(2, 1, 18, 18) > 0.2
    out = rope.attend(q, k, v, geometry, mask=mask)
    torch.testing.assert_close(rope.attend(q, k, v, geometry, mask=mask, chunk=2), out)
    half = rope.head_dim // 2

    def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos + sign * b * sin, b * cos - sign * a * sin], -1)

    for view in range(3):
        own = slice(6 * view, 6 * view + 6)
        cos, sin = geometry.query_cos[:, None, own], geometry.query_sin[:, None, own]
        seen = [turn(x, geometry.key_cos[:, None, view], geometry.key_sin[:, None, view], 1) for x in (k, v)]
        logits = turn(q[:, :, own], cos, sin, 1) @ seen[0].mT * rope.head_dim**-0.5
        weights = logits.masked_fill(~mask[:, :, own], float("-inf")).softmax(-1)
        torch.testing.assert_close(out[:, :, own], turn(weights @ seen[1], cos, sin, -1))


def test_the_depth_layer_learns() -> None:
    views, rope = cameras(), RayRope(24, embed_dim=8)
    x = torch.randn(2, 12, 8)
    near, far = rope.interval(rope.predict(x))
    assert near.detach().unique().tolist() == pytest.approx([0.0498], abs=1e-3)
    assert far.detach().unique().tolist() == pytest.approx([20.09], abs=1e-2)
    q, k, v = (t.float() for t in content(12, 24))
    views = Cameras(views.w2c.float(), views.K.float(), SIZE)
    with torch.no_grad():
        rope.depth.bias.copy_(torch.tensor([0.5, 0.3]))
    rope.attend(q, k, v, rope.prepare(views, GRID, rope.predict(x))).square().sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for p in rope.parameters())


def test_poses_of_four_degrees() -> None:
    looks = Cameras(invert_rigid(torch.eye(4).double().expand(1, 3, 4, 4).clone()))
    c2w = looks.c2w.clone()
    c2w[0, :, :3, 3] = torch.tensor([[0.0, 0, 1.5], [2.2, 0, 0], [0, -5, 0]], dtype=torch.float64)
    pose = look_at_pose(Cameras(invert_rigid(c2w)))[0]
    pi = torch.pi
    expected = torch.tensor([[0, 0, 0, 0], [pi / 2, 0, pi, 0], [pi / 2, -pi / 2, pi, 0]], dtype=torch.float64)
    torch.testing.assert_close(pose, expected, atol=1e-9, rtol=0)
    q, k, v = content(6, 4)
    cape = Cape4(4, 2)
    angles = torch.randn(2, 2, 4, dtype=torch.float64)
    here = attend_views(q, k, v, cape.prepare(angles, 3))
    shifted = attend_views(q, k, v, cape.prepare(angles + torch.tensor([0.3, -1, 0.2, 0]), 3))
    torch.testing.assert_close(here, shifted)
    torch.testing.assert_close(encode(q, cape.prepare(angles, 3).query).norm(dim=-1), q.norm(dim=-1))


def test_maps_of_rays() -> None:
    views = cameras()
    rays, lines = raymap(views), plucker_map(views)
    assert rays.shape == (2, 2, *SIZE, 6)
    torch.testing.assert_close(lines[..., :3].norm(dim=-1), torch.ones(2, 2, *SIZE).double())
    assert (lines[..., :3] * lines[..., 3:]).sum(-1).abs().max() < 1e-12
    slid = torch.cat([rays[..., :3] + 1.7 * rays[..., 3:], rays[..., 3:]], -1)
    torch.testing.assert_close(to_plucker(slid), lines)
    # a pixel's ray meets that pixel
    point = rays[..., :3] + 3.0 * rays[..., 3:]
    local = torch.einsum("bvij,bvhwj->bvhwi", views.w2c[..., :3, :3], point) + views.w2c[..., None, None, :3, 3]
    assert views.K is not None
    pixel = torch.einsum("bvij,bvhwj->bvhwi", views.K, local)
    pixel = pixel[..., :2] / pixel[..., 2:]
    torch.testing.assert_close(pixel[0, 1, 5, 7], torch.tensor([7.5, 5.5]).double())
    change = random_rigid(2, dtype=torch.float64)
    torch.testing.assert_close(camera_rays(views.moved(change)), camera_rays(views))
    assert (plucker_map(views.moved(change)) - lines).abs().max() > 1e-2
    few = [line.flatten(1, 3)[:, ::97] for line in (lines, plucker_map(views.moved(change)))]
    torch.testing.assert_close(ray_distance(few[1], few[1]), ray_distance(few[0], few[0]), atol=1e-5, rtol=0)
    one = to_plucker(torch.tensor([[0.0, 0, 0, 1, 0, 0]]))
    two = to_plucker(torch.tensor([[0.0, 3, 0, 0, 0, 2], [5, 0, 2, 1, 0, 0]]))
    torch.testing.assert_close(ray_distance(one, two), torch.tensor([[3.0, 2.0]]), atol=1e-5, rtol=0)
    cut = patchify(rays, 8)
    assert cut.shape == (2, 2, 6, 384)
    torch.testing.assert_close(cut[0, 0, 1].view(8, 8, 6), rays[0, 0, :8, 8:16])


def test_wrong_input_is_named() -> None:
    eye = torch.eye(4).expand(1, 2, 4, 4)
    K = torch.eye(3).expand(1, 2, 3, 3)  # noqa: N806
    for make, message in (
        (lambda: Cameras(torch.eye(4)), r"w2c: expected \(B, V, 4, 4\)"),
        (lambda: Cameras(eye.bfloat16()), "geometry needs float32 or float64"),
        (lambda: Cameras(eye, K), "size: intrinsics are in pixels"),
        (lambda: Cameras(eye, K[:, :1], (4, 4)), r"K: expected \(B, V, 3, 3\)"),
        (lambda: Cameras(eye).normalized_K, "needs intrinsics"),
        (lambda: Cameras(eye).resized(3, 3), "these cameras have none"),
        (lambda: Cameras(eye).normalized("first"), "mode: expected one of"),
        (lambda: Cameras(eye[:, :1]).normalized(), "needs two views"),
        (lambda: Prope(12), "multiple of 8"),
        (lambda: Prope(16).prepare(Cameras(eye, K, (4, 4)), (1, 1), Cameras(eye)), "intrinsics on both sides"),
        (lambda: Gta({"se4": 4}), "parts: expected triv, se3"),
        (lambda: Gta({"so2": 6}), "so2 needs a multiple of 4"),
        (lambda: Gta({"so2": 4}).prepare(Cameras(eye)), "give one of the two"),
        (lambda: Gta({"so2": 4}).prepare(Cameras(eye), coords=torch.zeros(1, 5, 2)), "for 2 views"),
        (lambda: gta_image((2, 2), 6), "multiple of 4"),
        (lambda: Cape6(6), "multiple of 4"),
        (lambda: Cape4(3, 2), "pairs of channels"),
        (lambda: Cape4(4, 2).prepare(torch.zeros(2, 3), 1), r"pose: expected \(B, V, 4\)"),
        (lambda: RayRope(20), "needs a multiple of 24 channels, got 20"),
        (lambda: RayRope(24, rays=4), "1, 2 or 3 rays"),
        (lambda: RayRope(24, kind="d_pj+d_3d"), "different points"),
        (lambda: RayRope(24, depth_code="log"), "depth_code: expected one of"),
        (lambda: RayRope(24).predict(torch.zeros(1, 2, 3)), "has no depth layer"),
        (lambda: RayRope(24).prepare(Cameras(eye, K, (4, 4)), (1, 1)), "2 of 2 tokens have no known depth"),
        (lambda: RayRope(24).known_depths(torch.ones(1, 1, 2, 2), (4, 4)), "at most 2 x 2 patches"),
        (lambda: raymap(Cameras(eye, K, (4, 6)), 4), "divisor of 4 and 6"),
        (lambda: patchify(torch.zeros(5, 4, 2), 2), "divisor of 5 and 4"),
        (lambda: attend_views(*torch.zeros(3, 1, 4, 8), Prope(8).prepare(Cameras(eye), (1, 2))), "split the heads"),
        (lambda: attend_views(*torch.zeros(3, 1, 1, 4, 8), Prope(16).prepare(Cameras(eye), (1, 2))), "heads of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
