"""DINOv3 RoPE: coordinates about the centre, periods, augmentation with given draws, and timm as a peer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos import Positions, create_encoding
from mmpos.checkpoints import dinov3_options
from mmpos.functional.augment import CoordinateDraws, augment_coordinates, draw_augmentation
from mmpos.testing import assert_close, assert_relative, qkv, scores, seeded


def make(head_dim: int = 16, axes: int = 2, **options: Any) -> Any:
    return create_encoding("rope_dinov3", 2 * head_dim, 2, axes=axes, **options).shared["rope_dinov3"]


def angles(encoding: Any, *sizes: int) -> torch.Tensor:
    return encoding.angles(Positions.grid(*sizes))[0][0, 0].unflatten(0, sizes)


@pytest.mark.parametrize("sizes", [(3, 5), (4, 2)])
def test_mirror_images_have_opposite_angles(sizes: tuple[int, int]) -> None:
    table = angles(make(), *sizes)
    assert torch.allclose(table, -table.flip(0, 1), atol=1e-5)
    rows, columns = table[..., :4], table[..., 4:]
    assert torch.equal(rows, rows[:, :1].expand_as(rows)), "row ladder first"
    assert torch.equal(columns, columns[:1].expand_as(columns))
    assert (table[0] <= 0).any(), "the first coordinate is negative"


def test_twice_the_grid_halves_the_steps() -> None:
    encoding = make()
    fine = encoding.coordinate_values(Positions.grid(6, 10))[0].unflatten(0, (3, 2, 5, 2)).mean((1, 3))
    assert torch.allclose(fine.flatten(0, 1), encoding.coordinate_values(Positions.grid(3, 5))[0], atol=1e-6)


def test_denominators_agree_on_squares_and_keep_the_aspect_ratio() -> None:
    square = [angles(make(normalize=kind), 4, 4) for kind in ("separate", "max", "min")]
    assert torch.equal(square[0], square[1])
    assert torch.equal(square[0], square[2])
    wide = {
        kind: make(normalize=kind).coordinate_values(Positions.grid(2, 8))[0] for kind in ("separate", "max", "min")
    }
    assert wide["separate"].amax(0).tolist() == [0.5, 0.875]
    assert wide["max"].amax(0).tolist() == [-0.625, 0.875]
    assert wide["min"].amax(0).tolist() == [0.5, 6.5]


def test_spacing_of_training_about_the_centre() -> None:
    encoding = make(resolution="index", train_grid=(3, 5))
    train = Positions.grid(3, 5)
    assert torch.allclose(encoding.coordinate_values(train), make().coordinate_values(train), atol=1e-6)
    coords = encoding.coordinate_values(Positions.grid(6, 7))[0].view(6, 7, 2)
    assert torch.allclose(coords[1:, 0, 0] - coords[:-1, 0, 0], torch.tensor(2 / 3))
    assert torch.allclose(coords[0, 1:, 1] - coords[0, :-1, 1], torch.tensor(2 / 5))
    assert coords.mean((0, 1)).abs().max() < 1e-6


def test_scores_are_those_of_axial_with_other_frequencies() -> None:
    """On one grid: half layout, frequency ``2 pi 2 / (n period)``, and a constant that scores do not see."""
    encoding = make(normalize="max")
    periods = encoding.periods()
    positions = Positions.grid(5, 5)
    q, k, v = qkv(2, 2, 25, 16)
    turned = encoding.transform_qkv(q, k, v, encoding.prepare(positions))
    speed = 4 * math.pi / (5 * periods)
    pairs = torch.cat([positions.coords[..., :1] * speed, positions.coords[..., 1:] * speed], dim=-1)[:, None]

    def halves(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * pairs.cos() - b * pairs.sin(), b * pairs.cos() + a * pairs.sin()], -1)

    assert_close(turned[0] @ turned[1].mT, halves(q) @ halves(k).mT, terms=256)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(axes=st.integers(1, 4), shift=st.floats(-5, 5), seed=st.integers(0, 99))
def test_relative_on_real_points_in_any_number_of_axes(axes: int, shift: float, seed: int) -> None:
    stack = create_encoding("rope_dinov3", 48, 2, head_dim=24, axes=axes, coordinates="index")
    points = Positions.points(seeded(1, 6, axes, seed=seed, dtype=torch.float64), num_prefix=1)
    assert_relative(stack, points, (shift,) * axes)


# -- augmentation -----------------------------------------------------------------------------------------------------


def test_off_by_default_and_in_evaluation() -> None:
    positions = Positions.grid(3, 5)
    plain = make().train().prepare(positions).cos
    assert torch.equal(plain, make().eval().prepare(positions).cos)
    moved = make(shift=0.3, jitter=1.4, rescale=2.0)
    assert torch.equal(plain, moved.eval().prepare(positions).cos)
    first = moved.train().prepare(positions).cos
    assert not torch.equal(first, moved.prepare(positions).cos)
    assert not torch.equal(first, plain)


def test_a_generator_repeats_the_step() -> None:
    encoding = make(rescale=2.0).train()
    tables = []
    for _ in range(2):
        encoding.generator = torch.Generator().manual_seed(4)
        tables.append(encoding.prepare(Positions.grid(3, 5)).cos)
    assert torch.equal(*tables)


def test_draws_stay_in_their_ranges_and_are_applied_in_order() -> None:
    draws = [draw_augmentation(2, shift=0.3, jitter=1.4, rescale=2.0) for _ in range(200)]
    for name, low, high in (("shift", -0.3, 0.3), ("jitter", 1 / 1.4, 1.4), ("rescale", 0.5, 2.0)):
        values = torch.stack([getattr(draw, name) for draw in draws])
        assert values.shape == (200, 1 if name == "rescale" else 2)
        assert low <= float(values.min()) < low + 0.1 * (high - low)
        assert high - 0.1 * (high - low) < float(values.max()) <= high
    given_draws = CoordinateDraws(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]), torch.tensor([0.5]))
    assert torch.equal(augment_coordinates(torch.ones(1, 2), given_draws), torch.tensor([[2.0, 4.5]]))
    assert torch.equal(augment_coordinates(torch.ones(1, 2), given_draws, 1.0), torch.tensor([[2.0, 4.0]]))
    encoding = make()
    table = encoding.prepare(Positions.grid(3, 5), given_draws)
    coords = (encoding.coordinate_values(Positions.grid(3, 5)) + torch.tensor([1.0, 2.0])) * torch.tensor([1.0, 1.5])
    assert torch.allclose(table.cos, encoding.turn(coords).cos(), atol=1e-5)


def test_factors_act_about_the_centre_of_patch_indices() -> None:
    draws = CoordinateDraws(rescale=torch.tensor([2.0]))
    positions = Positions.grid(3, 5)
    expected = {
        True: (positions.coords - torch.tensor([1.0, 2.0])) * 2 + torch.tensor([1.0, 2.0]),
        False: positions.coords * 2,
    }
    for centre, coords in expected.items():
        encoding = make(coordinates="index", centre=centre)
        assert torch.allclose(encoding.prepare(positions, draws).sin, encoding.turn(coords).sin(), atol=1e-5)


TIMM = [
    {},
    {"temperature": 50.0},
    {"temperature": None, "min_period": 0.5, "max_period": 90.0},
    {"normalize_coords": "max"},
    {"normalize_coords": "min", "rotate_half": False, "grid_indexing": "xy"},
    {"shift_coords": 0.3, "jitter_coords": 1.4, "rescale_coords": 2.0},
]


@pytest.mark.parametrize("options", TIMM)
def test_timm(options: dict[str, Any]) -> None:
    layers = pytest.importorskip("timm.layers")
    theirs = layers.RotaryEmbeddingDinoV3(16, feat_shape=None, **{"rotate_half": True} | options).train()
    names = {
        "temperature": "base",
        "min_period": "min_period",
        "max_period": "max_period",
        "normalize_coords": "normalize",
        "shift_coords": "shift",
        "jitter_coords": "jitter",
        "rescale_coords": "rescale",
    }
    ours = make(
        **{names[key]: value for key, value in options.items() if key in names},
        layout="half" if options.get("rotate_half", True) else "interleaved",
        axis_order=options.get("grid_indexing", "ij"),
    ).train()
    torch.manual_seed(7)
    sin, cos = theirs.get_embed((3, 5)).chunk(2, -1)
    torch.manual_seed(7)  # the same draws in the same order
    table = ours.prepare(Positions.grid(3, 5))
    repeat = (lambda t: t.repeat(1, 2)) if table.layout == "half" else (lambda t: t.repeat_interleave(2, -1))
    assert (repeat(table.cos[0, 0]) - cos).abs().max() < 1e-5
    assert (repeat(table.sin[0, 0]) - sin).abs().max() < 1e-5


# -- periods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("options", [{"base": 100.0}, {"base": 37.5}, {"min_period": 0.5, "max_period": 96.0}])
def test_options_from_stored_periods(options: dict[str, float], rounded: bool) -> None:
    periods = make(head_dim=64, **options).periods()
    stored = periods.bfloat16() if rounded else periods
    for weights in (stored, {"backbone.rope_embed.periods": stored, "cls_token": torch.zeros(1)}):
        found = dinov3_options(weights)
        assert found.pop("period_dtype", "float32") == ("bfloat16" if rounded else "float32")
        assert found.keys() == options.keys()
        again = make(head_dim=64, **found, period_dtype="bfloat16" if rounded else "float32").periods()
        assert (again / stored.float() - 1).abs().max() < (1e-2 if rounded else 1e-5)
    if options == {"base": 100.0} and rounded:
        assert torch.equal(again, stored.float())


def test_rounded_periods_move_the_table_as_measured() -> None:
    """Rounding the periods of a 14 x 14 grid at 64 channels moves the sines by up to 0.0057."""
    exact, rounded = (
        make(head_dim=64, period_dtype=kind).prepare(Positions.grid(14, 14)).sin for kind in ("float32", "bfloat16")
    )
    assert float((exact - rounded).abs().max()) == pytest.approx(0.0057, abs=2e-4)


def test_periods_that_are_no_ladder() -> None:
    with pytest.raises(ValueError, match="neither"):
        dinov3_options(torch.tensor([1.0, 2.0, 9.0, 10.0]))
    with pytest.raises(ValueError, match="one key"):
        dinov3_options({"weight": torch.zeros(2)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": 100.0, "min_period": 1.0, "max_period": 2.0}, "base alone or both"),
        ({"min_period": 1.0}, "base alone or both"),
        ({"jitter": 0.5}, "jitter: expected a factor of at least 1"),
        ({"shift": -1.0}, "shift: expected a positive"),
        ({"normalize": "x"}, "normalize"),
        ({"axis_order": "yx"}, "axis_order"),
        ({"period_dtype": "float16"}, "period_dtype"),
        ({"head_dim": 18}, "multiple of 4"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_scores_of_shared_module_are_finite_with_prefix() -> None:
    stack = create_encoding("rope_dinov3", 32, 2)
    q, k, _ = qkv(1, 2, 20, 16)
    logits = scores(stack, Positions.grid(3, 5, num_prefix=5), q, k)
    assert_close(logits[..., :5, :5], (q @ k.mT * 0.25)[..., :5, :5])
