"""Rotary encodings of videos and points: who owns which channels, shared ladders, and V-JEPA2 as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos import EncodingStack, Positions, create_encoding
from mmpos.functional.rope_3d import octgpt_frames, pair_axes
from mmpos.functional.rotary import directed_frequencies
from mmpos.testing import assert_close, assert_relative, encodings_of, qkv, scores, seeded

SHARED = ("chunked", "interleaved", "videorope")


def make(head_dim: int = 24, axes: int = 3, **options: Any) -> EncodingStack:
    return create_encoding("rope_3d", 2 * head_dim, 2, axes=axes, **options)


def turned(stack: EncodingStack, positions: Positions, q: torch.Tensor) -> torch.Tensor:
    encoding = encodings_of(stack)[0]
    return encoding.transform_qkv(q, q, q, stack.prepare(positions)[0].prepared[0])[0]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    split=st.sampled_from(("axial", *SHARED)), axes=st.integers(2, 4), head_dim=st.sampled_from([16, 24, 30]),
    shift=st.lists(st.floats(-9, 9), min_size=4, max_size=4), seed=st.integers(0, 99),
)  # fmt: skip
def test_relative_for_real_coordinates(split: str, axes: int, head_dim: int, shift: list[float], seed: int) -> None:
    stack = make(head_dim, axes, split=split)
    points = Positions.points(seeded(2, 5, axes, seed=seed, dtype=torch.float64) * 5, num_prefix=1)
    assert_relative(stack, points, shift[:axes])


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_equal_slices_are_axial(axes: int) -> None:
    positions = Positions.grid(*(3, 4, 2)[:axes], num_prefix=1)
    axial = create_encoding("rope_axial", 48, 2, axes=axes, axis_order="ij", theta=100.0)
    q, k, _ = qkv(2, 2, positions.num_tokens, 24)
    assert_close(scores(make(axes=axes), positions, q, k), scores(axial, positions, q, k))


def test_slices_move_with_their_axes() -> None:
    order, sections = (2, 0, 1), (4, 8, 10)
    points = seeded(1, 7, 3)
    q = seeded(1, 2, 7, 24, seed=1)
    ours = turned(make(sections=sections), Positions.points(points), q)
    parts = q[..., :22].split(sections, dim=-1)
    moved = torch.cat([*(parts[axis] for axis in order), q[..., 22:]], dim=-1)
    stack = make(sections=tuple(sections[axis] for axis in order))
    theirs = turned(stack, Positions.points(points[..., list(order)]), moved)
    expected = ours[..., :22].split(sections, dim=-1)
    assert_close(theirs[..., :22], torch.cat([expected[axis] for axis in order], dim=-1))
    assert torch.equal(ours[..., 22:], q[..., 22:]), "leftover channels pass"


def test_one_axis_moves_its_own_channels_only() -> None:
    coords = seeded(1, 6, 3)
    q = seeded(1, 2, 6, 24, seed=1)
    later = coords + torch.tensor([3.0, 0.0, 0.0])
    for split, owned in (
        ("axial", torch.arange(8)),
        ("chunked", torch.cat([torch.arange(1), torch.arange(1) + 12])),
        ("videorope", torch.cat([torch.arange(9, 12), torch.arange(9, 12) + 12])),
        ("interleaved", torch.cat([torch.arange(0, 12, 3), torch.arange(0, 12, 3) + 12])),
    ):
        difference = turned(make(split=split), Positions.points(coords), q) - turned(
            make(split=split), Positions.points(later), q
        )
        changed = (difference.abs().amax((0, 1, 2)) > 0).nonzero()[:, 0]
        assert changed.tolist() == owned.tolist(), split


@pytest.mark.parametrize("split", SHARED)
def test_equal_ids_make_a_shared_ladder_one_dimensional(split: str) -> None:
    ids = torch.arange(6.0)[:, None].expand(-1, 3)
    q, k, _ = qkv(1, 2, 6, 24)
    line = make(axes=1, split="chunked")
    assert_close(
        scores(make(split=split), Positions.points(ids), q, k), scores(line, Positions.points(ids[:, :1]), q, k)
    )
    separate = make(split="axial", theta=10000.0, layout="half")
    other = scores(separate, Positions.points(ids), q, k)
    assert (other - scores(line, Positions.points(ids[:, :1]), q, k)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("split", "sections", "expected"),
    [
        ("chunked", (2, 3, 3), [0, 0, 1, 1, 1, 2, 2, 2]),
        ("interleaved", (4, 2, 2), [0, 1, 2, 0, 1, 2, 0, 0]),
        ("interleaved", (2, 3, 3), [0, 1, 2, 0, 1, 2, 0, 1]),
        ("videorope", (2, 3, 3), [1, 2, 1, 2, 1, 2, 0, 0]),
        ("videorope", (4, 4), [1, 1, 1, 1, 0, 0, 0, 0]),
    ],
)
def test_pair_axes(split: str, sections: tuple[int, ...], expected: list[int]) -> None:
    assert pair_axes(split, sections, 8) == expected


def test_temporal_only() -> None:
    """LaVie: the first channels turn with the frame, rows and columns and the other channels do not matter."""
    stack = make(head_dim=40, sections=(32, 0, 0), theta=10000.0)
    video, frames = Positions.grid(4, 1, 2), Positions.grid(4)
    q = seeded(1, 2, 8, 40)
    alone = turned(make(head_dim=40, axes=1, sections=(32,), theta=10000.0), frames, q[:, :, ::2])
    assert_close(turned(stack, video, q)[:, :, ::2], alone)
    assert torch.equal(turned(stack, video, q)[..., 32:], q[..., 32:])


def test_frames_are_rescaled_on_their_own_axis() -> None:
    stack = make(train_grid=(4, 3, 5))
    train, long = Positions.grid(4, 3, 5), Positions.grid(8, 3, 5)
    index = stack.prepare(long)[0].prepared[0].cos
    assert torch.equal(index[..., :60, :], stack.prepare(train)[0].prepared[0].cos), "index runs on"
    stack.set_resolution("rescaled")
    rescaled = stack.prepare(long)[0].prepared[0].cos.unflatten(2, (8, 3, 5))
    trained = stack.prepare(train)[0].prepared[0].cos.unflatten(2, (4, 3, 5))
    assert torch.allclose(rescaled[:, :, ::2], trained, atol=1e-6)


@pytest.mark.parametrize("split", ["axial", *SHARED])
@pytest.mark.parametrize("rule", ["linear", "ntk", "yarn"])
def test_scalings_act_on_each_axis_with_its_own_length(split: str, rule: str) -> None:
    stack = make(48, split=split, train_grid=(16, 3, 5), resolution=rule)
    encoding = encodings_of(stack)[0]
    plain = make(48, split=split)
    small = Positions.grid(16, 3, 5)
    assert torch.allclose(
        stack.prepare(small)[0].prepared[0].cos, plain.prepare(small)[0].prepared[0].cos, atol=1e-6
    ), "the training size is left alone"
    long = Positions.grid(32, 3, 5)
    ours, amplitude = encoding.angles(long)
    theirs = encodings_of(plain)[0].angles(long)[0]
    changed = ((ours - theirs).abs().amax((0, 1, 2)) > 1e-6).nonzero()[:, 0].tolist()
    time = [pair for pair, owner in enumerate(encoding.owners()) if owner == 0]
    assert changed
    assert set(changed) <= set(time), "rows and columns have their training size"
    if rule == "yarn":
        factors = amplitude.expand_as(ours).amax((0, 1, 2))
        assert set((factors > 1.0).nonzero()[:, 0].tolist()) == set(time)


def test_vjepa2_is_not_a_rotation() -> None:
    """The negative control: released weights need it, norms and differences do not survive it."""
    compat = make(head_dim=20, vjepa2_compat=True, theta=10000.0)
    assert encodings_of(compat)[0].sections == (6, 6, 6)
    positions = Positions.grid(4, 3, 5, num_prefix=1)
    q, k, _ = qkv(1, 2, 61, 20)
    ratio = turned(compat, positions, q).norm(dim=-1) / q.norm(dim=-1)
    assert (ratio - 1).abs().max() > 0.05
    with pytest.raises(AssertionError, match="after a shift"):
        assert_relative(compat, positions, (1.0, 0.0, 0.0))
    assert torch.equal(turned(compat, positions, q)[..., 18:], q[..., 18:])
    assert torch.equal(turned(compat, positions, q)[:, :, 0], q[:, :, 0])
    fixed = make(head_dim=20, theta=10000.0)
    assert_close(turned(fixed, positions, q).norm(dim=-1), q.norm(dim=-1))
    assert_relative(fixed, positions, (1.0, 0.0, 0.0))


def test_octgpt_frame_and_ours() -> None:
    azimuth, polar = torch.tensor([0.3, 2.0]), torch.tensor([0.4, 1.1])
    frame = octgpt_frames(azimuth, polar)
    product = frame @ frame.mT
    assert torch.allclose(product[:, 0, 1], polar.cos() ** 2), "the first two directions are not orthogonal"
    assert torch.allclose(product.diagonal(dim1=1, dim2=2), torch.ones(2, 3))
    assert octgpt_frames(torch.zeros(1), torch.zeros(1))[0, :, 1].abs().max() < 1e-6, "the y axis gets nothing"
    torch.manual_seed(1)
    ours = encodings_of(create_encoding("rope_mixed", 48, 2, axes=3, theta=100.0))[0].freqs.detach()
    directions = ours.unflatten(-1, (3, 4))[..., 0].permute(1, 2, 0)  # heads, directions, axes
    assert torch.allclose(directions @ directions.mT, torch.eye(3).expand(2, -1, -1), atol=1e-6)
    torch.manual_seed(1)
    theirs = encodings_of(create_encoding("rope_mixed", 48, 2, axes=3, theta=100.0, init="octgpt"))[0].freqs
    torch.manual_seed(1)
    draw = torch.rand(2, 2) * torch.tensor([2 * torch.pi, torch.pi / 2])
    assert torch.equal(theirs, directed_frequencies(octgpt_frames(*draw.unbind(1)), 12, 100.0))


@pytest.mark.parametrize(
    ("split", "axes"), [(s, a) for s in ("axial", *SHARED) for a in (1, 2, 3, 4) if (s, a) != ("videorope", 1)]
)
@pytest.mark.parametrize("head_dim", [8, 14, 64])
def test_default_sections_fit(split: str, axes: int, head_dim: int) -> None:
    encoding = encodings_of(make(head_dim, axes, split=split))[0]
    owners = encoding.owners()
    assert len(owners) == (sum(encoding.sections) // 2 if split == "axial" else head_dim // 2)
    assert set(owners) <= set(range(axes))
    if head_dim == 64:
        assert set(owners) == set(range(axes)), "every axis is read"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "x"}, "split: expected one of"),
        ({"sections": (8, 8)}, "one number for each of 3 axes"),
        ({"sections": (8, 8, 10)}, "at most head_dim 24"),
        ({"sections": (7, 8, 8)}, "even numbers"),
        ({"split": "chunked", "sections": (4, 4, 5)}, "add up to 12"),
        ({"split": "chunked", "vjepa2_compat": True}, "vjepa2_compat"),
        ({"bands": "x"}, "bands"),
        ({"theta": -1.0}, "theta"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
