"""PaPE and PaPE-RI against the definition of the bias, with prefix tokens, padding and half precision."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos import Positions, attend, create_encoding
from mmpos.checkpoints import pape_layer, pape_layers
from mmpos.functional.parabolic import (
    centre_coordinates,
    key_columns,
    parabola_bias,
    quadratic_forms,
    query_columns,
    query_constant,
    reference_columns,
    reference_columns_invariant,
    split_columns,
)

HEADS, WIDTH, DIM = 2, 8, 16


def content(tokens: int, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, HEADS, tokens, WIDTH, generator=generator, dtype=dtype)
    return q, k, v, torch.randn(batch, tokens, DIM, generator=generator, dtype=dtype)


def build(name: str, axes: int = 2, **options: object):
    torch.manual_seed(1)
    stack = create_encoding(name, DIM, HEADS, axes=axes, **options).double()
    return stack, stack.layers[0][name]


def dense_bias(encoding, x: Tensor, coords: Tensor) -> Tensor:
    """The definition on given coordinates of all tokens, before the scale."""
    if encoding.name == "pape_ri":
        a = F.softplus(encoding.curvature(x)).mT
        distance = ((coords[:, :, None] - coords[:, None]) ** 2).sum(-1)
        return -a[..., None] * encoding.scales[:, None, None] ** 2 * distance[:, None]
    split = (-1, (HEADS, encoding.parabolas))
    a = F.softplus(encoding.curvature(x)).unflatten(*split).transpose(1, 2)
    b = encoding.slope(x).unflatten(*split).transpose(1, 2)
    return parabola_bias(coords, a, b, encoding.axes_map)


def expected(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    logits = (q @ k.mT + bias) * WIDTH**-0.5
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], -math.inf)
    return logits.softmax(-1) @ v


@pytest.mark.parametrize("name", ["pape", "pape_ri"])
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("columns", ["single", "split"])
@pytest.mark.parametrize("sizes", [(3, 5), (7,), (2, 3, 4), (2, 2, 3, 2)])
def test_attention_is_the_definition_inside_the_scale(
    name: str, plain: bool, columns: str, sizes: tuple[int, ...]
) -> None:
    stack, encoding = build(name, len(sizes), columns=columns)
    positions = Positions.grid(*sizes, dtype=torch.float64)
    q, k, v, x = content(positions.num_tokens)
    out = attend(q, k, v, stack.prepare(positions)[0], x=x, plain=plain)
    torch.testing.assert_close(out, expected(q, k, v, dense_bias(encoding, x, positions.coords)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["pape", "pape_ri"])
@pytest.mark.parametrize("mode", ["origin", "no_bias", "centre"])
def test_prefix_modes(name: str, mode: str) -> None:
    stack, encoding = build(name, prefix_mode=mode)
    positions = Positions.grid(3, 4, num_prefix=2, dtype=torch.float64)
    q, k, v, x = content(positions.num_tokens)
    front = positions.coords.mean(1, keepdim=True) if mode == "centre" else torch.full((1, 1, 2), -1.0).double()
    coords = torch.cat([front.expand(1, 2, 2), positions.coords], dim=1)
    bias = dense_bias(encoding, x, coords)
    if mode == "no_bias":
        bias[..., :2], bias[..., :2, :] = 0, 0
    out = attend(q, k, v, stack.prepare(positions)[0], x=x)
    torch.testing.assert_close(out, expected(q, k, v, bias), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["pape", "pape_ri"])
@pytest.mark.parametrize("mode", ["origin", "no_bias", "centre"])
@pytest.mark.parametrize("plain", [True, False])
def test_padding_changes_nothing(name: str, mode: str, plain: bool) -> None:
    stack, _ = build(name, prefix_mode=mode)
    q, k, v, x = content(1 + 3 * 4)
    alone = Positions.grid(3, 4, num_prefix=1, dtype=torch.float64)
    padded = Positions.points(
        F.pad(alone.coords, (0, 0, 0, 3), value=float("nan")).expand(2, -1, -1).clone(),
        num_prefix=1,
        mask=(torch.arange(15) < 12).expand(2, -1),
    )
    noise = torch.full((2, 3), 1e3).double()
    wide = [torch.cat([t, noise[:, None, :, None].expand(2, HEADS, 3, WIDTH)], dim=2) for t in (q, k, v)]
    x_wide = torch.cat([x, noise[..., None].expand(2, 3, DIM)], dim=1)
    out = attend(*wide, stack.prepare(padded)[0], x=x_wide, plain=plain)[:, :, :13]
    torch.testing.assert_close(out, attend(q, k, v, stack.prepare(alone)[0], x=x), rtol=1e-9, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3), st.sampled_from(["pape", "pape_ri"]))
def test_translation_invariance(shift: list[float], name: str) -> None:
    stack, _ = build(name, 3)
    points = torch.randn(1, 9, 3, generator=torch.Generator().manual_seed(2)).double()
    q, k, v, x = content(9, batch=1)
    here = attend(q, k, v, stack.prepare(Positions.points(points))[0], x=x)
    there = attend(q, k, v, stack.prepare(Positions.points(points + torch.tensor(shift).double()))[0], x=x)
    torch.testing.assert_close(here, there, rtol=1e-7, atol=1e-7)


def orthogonal(seed: int, reflect: bool) -> Tensor:
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).double())[0]
    return rotation if (torch.linalg.det(rotation) < 0) == reflect else rotation * torch.tensor([1.0, 1.0, -1.0])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_rotations_and_reflections(seed: int, reflect: bool) -> None:
    turn = orthogonal(seed, reflect)
    points = torch.randn(1, 9, 3, generator=torch.Generator().manual_seed(seed)).double() * 3
    q, k, v, x = content(9, batch=1, seed=seed)

    def run(stack, coords: Tensor) -> Tensor:
        return attend(q, k, v, stack.prepare(Positions.points(coords))[0], x=x)

    invariant, _ = build("pape_ri", 3)
    torch.testing.assert_close(run(invariant, points @ turn.T), run(invariant, points), rtol=1e-9, atol=1e-9)
    stack, encoding = build("pape", 3)
    before = run(stack, points)
    with torch.no_grad():
        encoding.axes_map.copy_(encoding.axes_map @ turn.T)
    torch.testing.assert_close(run(stack, points @ turn.T), before, rtol=1e-9, atol=1e-9)


def test_pape_itself_sees_rotations() -> None:
    stack, _ = build("pape", 3)
    points = torch.randn(1, 9, 3, generator=torch.Generator().manual_seed(0)).double() * 3
    q, k, v, x = content(9, batch=1)
    upright, turned = (stack.prepare(Positions.points(p))[0] for p in (points, points @ orthogonal(0, False).T))
    assert (attend(q, k, v, upright, x=x) - attend(q, k, v, turned, x=x)).abs().max() > 0.05


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 7), st.integers(0, 1000))
def test_minimal_columns_equal_the_naive_ones_up_to_a_constant_of_the_query(
    axes: int, parabolas: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 6, axes, generator=generator).double() * 5
    a = F.softplus(torch.randn(2, 3, 6, parabolas, generator=generator)).double()
    b = torch.randn(2, 3, 6, parabolas, generator=generator).double()
    w = torch.randn(3, parabolas, axes, generator=generator).double()
    truth = parabola_bias(x, a, b, w)
    queries, keys = reference_columns(x, a, b, w)
    torch.testing.assert_close(queries @ keys.mT, truth, rtol=1e-9, atol=1e-9)
    assert queries.shape[-1] == 3 * parabolas + 2
    forms, slope = quadratic_forms(a, w), torch.matmul(b, w)
    coords = centre_coordinates(x, None)[0][:, None]
    minimal = query_columns(forms, slope, coords, 4.0) @ key_columns(coords, 4.0).mT
    assert key_columns(coords).shape[-1] == axes * (axes + 3) // 2
    torch.testing.assert_close(minimal + query_constant(forms, slope, coords)[..., None], truth, rtol=1e-8, atol=1e-8)
    # the packed form is positive semi-definite
    full = torch.einsum("bhnm,hmu,hmv->bhnuv", a, w, w)
    probe = torch.randn(axes, generator=generator).double()
    value = (full @ probe) @ probe
    assert (value >= -1e-9).all()
    torch.testing.assert_close(-query_columns(forms, None, 0 * coords)[..., :-axes] @ key_columns(probe)[:-axes], value)


def test_without_slopes_attention_falls_with_distance_and_with_them_the_peak_moves() -> None:
    torch.manual_seed(3)
    a, w = torch.rand(1, 1, 1, 6).double() + 0.1, torch.randn(1, 6, 2).double()
    ray = torch.linspace(0, 5, 11, dtype=torch.float64)[:, None] * torch.tensor([0.6, -0.8]).double()
    bias = parabola_bias(ray[None], a.expand(1, 1, 11, 6), None, w)[0, 0, 0]
    assert bias[0] == 0
    assert (bias.diff() < 0).all()
    b = torch.randn(1, 1, 1, 6).double()
    form = torch.einsum("m,mu,mv->uv", a.flatten(), w[0], w[0])
    peak = 0.5 * torch.linalg.solve(form, w[0].T @ b.flatten())  # x_i - x_j of the favourite key

    def at(difference: Tensor) -> Tensor:
        pair = torch.stack([difference, torch.zeros(2).double()])[None]
        return parabola_bias(pair, a.expand(1, 1, 2, 6), b.expand(1, 1, 2, 6), w)[0, 0, 0, 1]

    assert peak.norm() > 1e-3
    for step in torch.eye(2).double() * 1e-2:
        assert at(peak) > at(peak + step)
        assert at(peak) > at(peak - step)


@pytest.mark.parametrize("name", ["pape", "pape_ri"])
def test_flat_parabolas_are_no_encoding(name: str) -> None:
    stack, encoding = build(name)
    with torch.no_grad():
        for parameter in (encoding.axes_map, encoding.slope.weight) if name == "pape" else (encoding.scales,):
            parameter.zero_()
    q, k, v, x = content(12)
    out = attend(q, k, v, stack.prepare(Positions.grid(3, 4))[0], x=x)
    torch.testing.assert_close(out, attend(q, k, v), rtol=1e-12, atol=1e-12)


def test_invariant_form_is_pape_with_equal_axes() -> None:
    invariant_stack, invariant = build("pape_ri", 3)
    stack, encoding = build("pape", 3, parabolas=3)
    with torch.no_grad():
        encoding.axes_map.copy_(torch.eye(3) * invariant.scales[:, None, None])
        encoding.curvature.weight.copy_(invariant.curvature.weight.repeat_interleave(3, 0))
        encoding.slope.weight.zero_()
    positions = Positions.grid(2, 3, 2, dtype=torch.float64)
    q, k, v, x = content(12)
    torch.testing.assert_close(
        attend(q, k, v, stack.prepare(positions)[0], x=x), attend(q, k, v, invariant_stack.prepare(positions)[0], x=x)
    )
    a = F.softplus(invariant.curvature(x)).mT
    queries, keys = reference_columns_invariant(positions.coords, a, invariant.scales)
    torch.testing.assert_close(queries @ keys.mT, dense_bias(invariant, x, positions.coords))


@pytest.mark.parametrize("name", ["pape", "pape_ri"])
def test_tokens_may_be_permuted_or_dropped_with_their_coordinates(name: str) -> None:
    stack, _ = build(name, prefix_mode="no_bias")
    positions = Positions.grid(3, 4, dtype=torch.float64)
    q, k, v, x = content(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    whole = attend(q, k, v, stack.prepare(positions)[0], x=x)
    moved = attend(*(t[:, :, order] for t in (q, k, v)), stack.prepare(positions.take(order))[0], x=x[:, order])
    torch.testing.assert_close(moved, whole[:, :, order])
    keep = order[:7]
    dropped = torch.ones(12, dtype=torch.bool).index_fill(0, keep, False)
    masked = attend(q, k, v, stack.prepare(positions)[0], x=x, mask=~dropped[None, None, None])
    pruned = attend(*(t[:, :, keep] for t in (q, k, v)), stack.prepare(positions.take(keep))[0], x=x[:, keep])
    torch.testing.assert_close(pruned, masked[:, :, keep])


@pytest.mark.parametrize("name", ["pape", "pape_ri"])
def test_resolution_rules_are_the_length_of_a_step(name: str) -> None:
    stack, encoding = build(name, train_grid=(2, 3))
    grid = Positions.grid(4, 9, num_prefix=1, dtype=torch.float64)
    q, k, v, x = content(37)
    for rule, step in (("index", (1, 1)), ("rescaled", (2 / 4, 3 / 9)), ("normalised", (1 / 4, 1 / 9))):
        stack.set_resolution(rule)
        coords = torch.cat([torch.full((1, 1, 2), -1.0), grid.coords], 1) * torch.tensor(step).double()
        out = attend(q, k, v, stack.prepare(grid)[0], x=x)
        torch.testing.assert_close(out, expected(q, k, v, dense_bias(encoding, x, coords)), rtol=1e-6, atol=1e-6)


def total_variation(p: Tensor, q: Tensor) -> float:
    return float(0.5 * (p.double() - q.double()).abs().sum(-1).mean())


@pytest.mark.parametrize(
    ("dtype", "single_limit", "split_limit"), [(torch.float16, 0.03, 2e-4), (torch.bfloat16, 0.25, 3e-3)]
)
def test_half_precision_on_a_large_grid(dtype: torch.dtype, single_limit: float, split_limit: float) -> None:
    torch.manual_seed(0)
    side = 64
    positions = Positions.grid(side, side)
    rows = torch.arange(0, side * side, 97)
    x = torch.randn(1, side * side, 128).to(dtype)
    empty = torch.zeros(
        1, 1, side * side, 64, dtype=dtype
    )  # no content, so that the error of the bias alone is measured
    errors = {}
    for columns in ("single", "auto"):
        stack = create_encoding("pape", 128, 1, head_dim=64, columns=columns)
        encoding = stack.layers[0]["pape"]
        with torch.no_grad():
            places, folded = encoding.prepare(positions)
            forms, slope = encoding.coefficients(x.float(), folded)
            queries = query_columns(forms, slope, places.coords, places.balance)
            keys = key_columns(places.coords, places.balance)
            truth = (queries[:, :, rows].double() @ keys.double().mT / 8).softmax(-1)
            q, k = encoding.append(empty, empty, queries, keys, None, places)
        assert q.dtype == dtype
        assert torch.isfinite(q).all()
        assert torch.isfinite(k).all()
        assert q.shape[-1] == (72 if columns == "single" else 80)
        errors[columns] = total_variation((q[:, :, rows].float() @ k.float().mT / 8).softmax(-1), truth)
    assert 0 < errors["auto"] < split_limit
    assert errors["auto"] < errors["single"] / 20
    assert errors["single"] < single_limit


@pytest.mark.parametrize("name", ["pape", "pape_ri"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_is_finite_and_near(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    positions = Positions.grid(9, 12, num_prefix=1)
    stack = create_encoding(name, DIM, HEADS, prefix_mode="no_bias")
    q, k, v, x = content(positions.num_tokens, dtype=torch.float32)
    full = attend(q, k, v, stack.prepare(positions)[0], x=x)
    stack.to(dtype)
    if name == "pape":
        assert stack.layers[0][name].axes_map.dtype == torch.float32
    half = attend(*(t.to(dtype) for t in (q, k, v)), stack.prepare(positions)[0], x=x.to(dtype))
    assert half.dtype == dtype
    assert (half.float() - full).abs().max() < (0.01 if dtype == torch.float16 else 0.1)


@pytest.mark.parametrize("name", ["pape", "pape_ri"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_coordinates_in_the_thousands_stay_finite(name: str, dtype: torch.dtype) -> None:
    stack, _ = build(name, 3)
    stack.float()
    points = torch.rand(1, 20, 3) * torch.tensor([40.0, 40.0, 2000.0])
    q, k, v, x = (t.to(dtype) for t in content(20, batch=1, dtype=torch.float32))
    out = attend(q, k, v, stack.to(dtype).prepare(Positions.points(points))[0], x=x)
    assert torch.isfinite(out).all()


def test_autocast_keeps_the_columns_accurate() -> None:
    stack, _ = build("pape", columns="split")
    stack.float()
    positions = Positions.grid(20, 30)
    q, k, v, x = content(600, batch=1, dtype=torch.float32)
    full = attend(q, k, v, stack.prepare(positions)[0], x=x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = stack.prepare(positions)[0]
        out = attend(*(t.bfloat16() for t in (q, k, v)), state, x=x)
    assert (out.float() - full).abs().max() < 0.1


@pytest.mark.parametrize("name", ["pape", "pape_ri"])
def test_gradients_reach_every_parameter(name: str) -> None:
    stack = create_encoding(name, DIM, HEADS, depth=2, **({"learned_scales": True} if name == "pape_ri" else {}))
    q, k, v, x = content(13, dtype=torch.float32)
    x.requires_grad_()
    for state in stack.prepare(Positions.grid(3, 4, num_prefix=1)):
        attend(q, k, v, state, x=x)[..., 0].square().sum().backward()
    for key, parameter in stack.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().max() > 0, key
    assert x.grad.abs().max() > 0


def test_split_columns_lose_only_the_product_of_the_low_parts() -> None:
    q, k = torch.randn(2, 50, 7, generator=torch.Generator().manual_seed(0)) * 30
    truth = q @ k.mT
    high = q.bfloat16().float() @ k.bfloat16().float().mT
    wide_q, wide_k = split_columns(q, k, torch.bfloat16)
    split = wide_q.float() @ wide_k.float().mT
    assert (split - truth).abs().max() < 0.01 * (high - truth).abs().max()


def test_initialisation_and_parameter_count() -> None:
    stack = create_encoding("pape", dim=768, num_heads=12)
    assert sum(p.numel() for p in stack.parameters()) == 2 * 12 * 50 + 2 * 768 * 12 * 50 == 922_800
    encoding = stack.layers[0]["pape"]
    assert encoding.axes_map.abs().max() <= 2**-0.5
    assert encoding.axes_map.abs().max() > 0.99 * 2**-0.5
    assert encoding.curvature.weight.abs().max() <= 768**-0.5
    assert stack.no_weight_decay() == {"layers.0.pape.axes_map"}
    invariant = create_encoding("pape_ri", dim=768, num_heads=12)
    assert sum(p.numel() for p in invariant.parameters()) == 768 * 12
    assert "layers.0.pape_ri.scales" in invariant.state_dict()


def test_reference_weights_round_trip_and_are_checked() -> None:
    position, fused = torch.randn(HEADS * 5, 2), torch.randn(2 * HEADS * 5, DIM)
    ours = pape_layer({"position.weight": position, "ab.weight": fused}, num_heads=HEADS, xy=True)
    torch.testing.assert_close(ours["axes_map"][1, 2], position[7].flip(0))
    torch.testing.assert_close(ours["slope.weight"], fused[10:])
    same = pape_layer({"position.weight": position, "ab.weight": fused}, num_heads=HEADS, xy=False)
    torch.testing.assert_close(same["axes_map"].flatten(0, 1), position)
    prefix = "encoder.layers.0.attention.position_encoder."
    model = {prefix + "position.weight": position, prefix + "ab.weight": fused, "head.weight": torch.zeros(1)}
    assert pape_layers(model, num_heads=HEADS)[0].keys() == ours.keys()
    with pytest.raises(ValueError, match="num_heads"):
        pape_layer({"position.weight": position, "ab.weight": fused}, num_heads=3, xy=True)
    with pytest.raises(ValueError, match="position_encoder"):
        pape_layers({"head.weight": torch.zeros(1)}, num_heads=HEADS)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"prefix_mode": "cls"}, "prefix_mode"), ({"columns": "wide"}, "columns"), ({"parabolas": 0}, "parabolas")],
)
def test_bad_options_say_what_to_change(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        create_encoding("pape", DIM, HEADS, **options)


def test_bad_calls_say_what_to_change() -> None:
    stack, _ = build("pape")
    q, k, v, x = content(12)
    state = stack.prepare(Positions.grid(3, 4))[0]
    with pytest.raises(ValueError, match="x=x"):
        attend(q, k, v, state)
    with pytest.raises(ValueError, match="positions of exactly these tokens"):
        attend(q[:, :, :5], k[:, :, :5], v[:, :, :5], state, x=x[:, :5])
    with pytest.raises(ValueError, match="axes"):
        stack.prepare(Positions.grid(2, 3, 2))
    stack.set_resolution("normalised")
    with pytest.raises(ValueError, match="extent"):
        stack.prepare(Positions.points(torch.zeros(3, 2)))
