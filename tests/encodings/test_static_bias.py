"""Swin RPB, SwinV2 CPB, ALiBi-2D, LookHere, KERPLE and FIRE, decomposed RPE: values, symmetries, resolution rules."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos import Positions, attend, create_encoding
from mmpos.checkpoints import decomposed_tables, swin_bias_table, swin_cpb_network
from mmpos.encodings import _slices
from mmpos.encodings.lookhere import HIDDEN, head_layout
from mmpos.encodings.swin_rpb import resize_offset_table
from mmpos.functional.bias import VIEWS, alibi_slopes, geometric_matrix, log_coordinates, pair_offsets, view_mask

HEADS, WIDTH = 4, 6
grids = st.tuples(st.integers(1, 5), st.integers(1, 5))
STATIC = ("swin_rpb", "swin_cpb", "alibi_2d", "lookhere", "functional_bias")


def make(name: str, grid: tuple[int, int] | None = (3, 5), num_prefix: int = 0, heads: int = HEADS, **options: object):
    torch.manual_seed(0)
    stack = create_encoding(name, heads * WIDTH, heads, train_grid=grid, num_prefix=num_prefix, **options).double()
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return stack, stack.encodings_of(0)[0]


def bias_of(stack, positions: Positions) -> Tensor:
    """The whole static bias ``(B or 1, heads, L, L)``."""
    state = stack.prepare(positions)[0]
    q = torch.zeros(1, state.encodings[0].num_heads, 1, WIDTH, dtype=torch.float64)
    return state.encodings[0].logit_bias(q, q, state.prepared[0]).detach()


def translated(bias: Tensor, grid: tuple[int, int]) -> bool:
    view = bias.unflatten(-1, grid).unflatten(-3, grid)
    down = torch.allclose(view[:, :, 1:, :, 1:], view[:, :, :-1, :, :-1], atol=1e-6)
    return down and torch.allclose(view[:, :, :, 1:, :, 1:], view[:, :, :, :-1, :, :-1], atol=1e-6)


# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in STATIC if name != "functional_bias"])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(grid=grids)
def test_the_bias_depends_on_the_offset_only(name, grid):
    stack, _ = make(name)
    bias = bias_of(stack, Positions.grid(*grid, dtype=torch.float64))
    assert translated(bias, grid)
    if min(grid) > 2:
        assert bias.std() > 1e-3


@pytest.mark.parametrize("name", STATIC)
def test_attention_is_softmax_of_logits_plus_bias(name):
    stack, _ = make(name, num_prefix=2)
    positions = Positions.grid(4, 3, num_prefix=2, dtype=torch.float64)
    q, k, v = torch.randn(3, 2, HEADS, 14, WIDTH, dtype=torch.float64)
    bias = bias_of(stack, positions)
    expected = (q @ k.mT * WIDTH**-0.5 + bias).softmax(-1) @ v
    assert torch.allclose(attend(q, k, v, stack.prepare(positions)[0]), expected, atol=1e-10)
    if name != "swin_rpb":  # which has values of its own for prefix tokens
        assert bool((bias[:, :, :2] == 0).all())
        assert bool((bias[:, :, :, :2] == 0).all())


@pytest.mark.parametrize("name", STATIC)
def test_kept_tokens_read_the_bias_of_their_places(name):
    stack, _ = make(name, num_prefix=1)
    positions = Positions.grid(4, 3, num_prefix=1, dtype=torch.float64)
    keep = torch.tensor([[5, 0, 11, 7], [3, 2, 1, 10]])
    whole, part = bias_of(stack, positions), bias_of(stack, positions.take(keep))
    for sample in range(2):
        rows = torch.cat([torch.zeros(1, dtype=torch.long), keep[sample] + 1])
        expected = whole[0][:, rows][:, :, rows]
        if name == "functional_bias":  # FIRE measures against the furthest token that is present
            assert torch.equal(part[sample] == 0, expected == 0)
            continue
        assert torch.allclose(part[sample], expected, atol=1e-12)


# -- Swin -------------------------------------------------------------------------------------------------------------


def test_three_values_for_prefix_tokens_whatever_their_number():
    stack, encoding = make("swin_rpb", num_prefix=2)
    bias = bias_of(stack, Positions.grid(3, 5, num_prefix=2))[0]
    to_placed, to_prefix, within = encoding.prefix_table.detach().unbind(1)
    assert bool((bias[:, :2, 2:] == to_placed[:, None, None]).all())
    assert bool((bias[:, 2:, :2] == to_prefix[:, None, None]).all())
    assert bool((bias[:, :2, :2] == within[:, None, None]).all())
    assert torch.equal(bias_of(stack, Positions.grid(3, 5))[0], bias[:, 2:, 2:])


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3), (6, 4), (3, 9)])
def test_bicubic_rules_are_those_of_torch(antialias, sizes):
    table = torch.randn(HEADS, 5, 9)
    rule = "bicubic_antialias" if antialias else "bicubic"
    wanted = (2 * sizes[0] - 1, 2 * sizes[1] - 1)
    expected = F.interpolate(table[None], wanted, mode="bicubic", align_corners=False, antialias=antialias)[0]
    assert torch.allclose(resize_offset_table(table, sizes, rule), expected, atol=2e-5)


@settings(max_examples=20, deadline=None)
@given(source=st.integers(2, 9), target=st.integers(2, 14))
def test_the_geometric_rule_keeps_near_offsets_and_reads_a_line_as_it_is_curved(source, target):
    matrix = geometric_matrix(2 * source - 1, 2 * target - 1)
    assert torch.allclose(matrix.sum(1), torch.ones(2 * target - 1, dtype=torch.float64))
    values = torch.randn(2 * source - 1, dtype=torch.float64)
    out = matrix @ values
    for offset in (-1, 0, 1):  # exact at any resolution
        assert math.isclose(out[target - 1 + offset], values[source - 1 + offset], abs_tol=1e-9)
    assert torch.allclose(matrix, matrix.flip(0, 1))


def test_a_window_of_the_same_size_keeps_its_table():
    table = torch.randn(2, 27, 13)
    assert torch.equal(resize_offset_table(table, (14, 7), "geometric"), table)
    assert not torch.equal(resize_offset_table(table, (14, 8), "geometric")[:, :, 1:-1], table)


@pytest.mark.filterwarnings("ignore::UserWarning")  # timm indexes with lists
@pytest.mark.parametrize(("source", "target"), [(14, 28), (14, 20), (7, 12)])
def test_geometric_places_are_those_of_timm(source, target):
    layers = pytest.importorskip("timm.layers")
    table = torch.randn(2, 2 * source - 1, 2 * source - 1, generator=torch.Generator().manual_seed(0))
    wanted = layers.resize_rel_pos_bias_table(table.flatten(1).T.clone(), (target, target), ((2 * target - 1) ** 2, 2))
    found = resize_offset_table(table, (target, target), "geometric").flatten(1).T
    torch.testing.assert_close(found, wanted.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("distance", ["euclidean", "manhattan", "chebyshev", "per_axis"])
@pytest.mark.parametrize("resolution", ["index", "rescaled"])
def test_fire_reaches_to_the_corners_of_the_grid_whichever_tokens_are_there(distance, resolution):
    options = {"distance": distance, "resolution": resolution, "threshold": 0.5}
    stack, encoding = make("functional_bias", (4, 4), 1, **options)
    whole = Positions.grid(6, 7, num_prefix=1)
    kept = torch.tensor([0, 1, 8, 9, 30])
    expected = bias_of(stack, whole)[..., torch.cat([torch.tensor([0]), kept + 1]), :]
    expected = expected[..., torch.cat([torch.tensor([0]), kept + 1])]
    assert torch.allclose(bias_of(stack, whole.take(kept)), expected, atol=1e-10)
    sizes = [(2, 3), (4, 5)]
    together = bias_of(stack, Positions.grids(sizes, num_prefix=1))
    for number, size in enumerate(sizes):
        count = 1 + size[0] * size[1]
        alone = bias_of(stack, Positions.grid(*size, num_prefix=1))[0]
        assert torch.allclose(together[number, :, :count, :count], alone, atol=1e-10)
    # by hand: the furthest corner of a 6 x 7 grid from its second token
    if distance == "euclidean" and resolution == "index":
        (map_,) = encoding.distance_maps(whole)
        assert float(encoding._reaches([map_], whole)[0][0, 1].detach()) == pytest.approx((5**2 + 5**2) ** 0.5)


def test_schedules_over_layers_hold_for_encodings_of_each_layer():
    for per_layer in (False, True):
        stack = create_encoding("lookhere", 8 * HEADS, HEADS, depth=3, per_layer=per_layer)
        biases = [state.prepared[0] for state in stack.prepare(Positions.grid(3, 3))]
        q = torch.zeros(1, HEADS, 9, 8)
        far = [float(stack.encodings_of(n)[0].logit_bias(q, q, b)[0, :, 8, 0].max()) for n, b in enumerate(biases)]
        assert len(set(far)) == 3


def test_growing_far_saturates_the_geometric_rule():
    matrix = geometric_matrix(13, 79)
    assert bool((matrix[-5:, -1] == 1).all())  # the edge repeats


@pytest.mark.parametrize("rule", ["bicubic", "bicubic_antialias", "geometric"])
@pytest.mark.parametrize("grid", [(6, 7), (2, 4), (1, 9)])
def test_a_resized_table_serves_another_grid(rule, grid):
    stack, encoding = make("swin_rpb", resolution=rule)
    bias = bias_of(stack, Positions.grid(*grid))
    other = create_encoding("swin_rpb", HEADS * WIDTH, HEADS, train_grid=grid).double()
    other.layers[0]["swin_rpb"].load_state_dict({"table": resize_offset_table(encoding.table.detach(), grid, rule)})
    assert torch.equal(bias, bias_of(other, Positions.grid(*grid)))
    assert translated(bias, grid)


def test_the_offset_rule_keeps_values_and_repeats_the_edge():
    stack, encoding = make("swin_rpb", resolution="offset")
    bias = bias_of(stack, Positions.grid(3, 8))[0].unflatten(-1, (3, 8)).unflatten(-3, (3, 8))
    table = encoding.table.detach()
    assert torch.equal(bias[:, 2, 4, 1, 1], table[:, 3, 7])
    assert torch.equal(bias[:, 0, 7, 0, 0], table[:, 2, 8])
    assert torch.equal(bias[:, 0, 5, 0, 0], table[:, 2, 8])
    sizes = Positions.grids([(2, 3), (3, 5)])
    packed = bias_of(stack, sizes)
    assert torch.equal(packed[0, :, :6, :6], bias_of(stack, Positions.grid(2, 3))[0])
    with pytest.raises(ValueError, match="use resolution='offset'"):
        make("swin_rpb")[0].prepare(sizes)


def test_swin_tables_and_errors():
    table = torch.randn(5 * 9 + 3, HEADS)
    state = swin_bias_table(table, (3, 5))
    assert torch.equal(state["table"][:, 1, 2], table[9 + 2])
    assert torch.equal(state["prefix_table"][:, 0], table[-3])
    with pytest.raises(ValueError, match="give the window"):
        swin_bias_table(table, (5, 5))
    with pytest.raises(ValueError, match="train_grid: swin_rpb"):
        create_encoding("swin_rpb", 8, 2)
    with pytest.raises(ValueError, match="no values for prefix tokens"):
        make("swin_rpb")[0].prepare(Positions.grid(3, 5, num_prefix=1))


# -- SwinV2 -----------------------------------------------------------------------------------------------------------


def test_log_coordinates_reach_one_at_the_edge_and_survive_a_window_of_one():
    edge = log_coordinates(torch.tensor([[6.0, -4.0]]), (7, 5))
    assert torch.allclose(edge, torch.tensor([[math.log2(9) / 3, -math.log2(9) / 3]]))
    assert torch.isfinite(log_coordinates(torch.zeros(1, 2), (1, 5))).all()


def test_the_bias_stays_between_0_and_16_and_prefers_the_reference_window():
    stack, encoding = make("swin_cpb", num_prefix=1)
    bias = bias_of(stack, Positions.grid(6, 8, num_prefix=1))
    assert 0 < float(bias[:, :, 1:, 1:].min()) < float(bias.max()) < 16
    small = bias_of(stack, Positions.grid(3, 5, num_prefix=1))
    assert torch.allclose(bias[0, :, 1, 1:6], small[0, :, 1, 1:6])  # an offset means the same in every grid
    encoding.set_resolution("normalised")
    assert not torch.allclose(bias_of(stack, Positions.grid(6, 8, num_prefix=1))[0, :, 1, 1:6], small[0, :, 1, 1:6])


def test_free_points_are_evaluated_where_they_are():
    stack, encoding = make("swin_cpb")
    coords = torch.rand(2, 5, 2, dtype=torch.float64) * 4
    bias = bias_of(stack, Positions.points(coords))
    direct = encoding.network(log_coordinates(pair_offsets(coords), (3, 5))).movedim(-1, 1)
    assert torch.allclose(bias, direct, atol=1e-12)
    repeated = Positions.points(Positions.grid(3, 4).coords.double())
    assert torch.allclose(
        bias_of(stack, repeated), bias_of(stack, Positions.grid(3, 4, dtype=torch.float64)), atol=1e-12
    )


def test_cosine_attention():
    stack, encoding = make("swin_cpb", cosine=True)
    q, k, v = torch.randn(3, 2, HEADS, 15, WIDTH, dtype=torch.float64)
    positions = Positions.grid(3, 5, dtype=torch.float64)
    with torch.no_grad():
        encoding.logit_scale[0] = 9.0  # above ln 100
    scale = encoding.logit_scale.detach().clamp(max=math.log(100.0)).exp()
    assert scale[0] == pytest.approx(100.0)
    logits = F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1) * scale + bias_of(stack, positions)
    assert torch.allclose(attend(q, k, v, stack.prepare(positions)[0]), logits.softmax(-1) @ v, atol=1e-10)


def test_a_network_from_another_place():
    with pytest.raises(ValueError, match="cpb_mlp or mlp"):
        swin_cpb_network({"attn.cpb_mlp.0.weight": torch.zeros(4, 2)})


# -- decomposed -------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None, derandomize=True)
@given(grid=grids, prefix=st.integers(0, 2), kept=st.booleans())
def test_decomposed_terms_pair_by_pair(grid, prefix, kept):
    stack, encoding = make("decomposed_rpe", grid, prefix)
    positions = Positions.grid(*grid, num_prefix=prefix)
    positions = positions.take(torch.arange(positions.num_placed).flip(0)[::2]) if kept else positions
    state = stack.prepare(positions)[0]
    q = torch.randn(2, HEADS, positions.num_tokens, WIDTH, dtype=torch.float64)
    bias = encoding.logit_bias(q, q, state.prepared[0])
    expected = torch.zeros_like(bias)
    places = [[int(x) for x in place] for place in positions.coords[0].tolist()]
    for i, (ri, ci) in enumerate(places):
        for j, (rj, cj) in enumerate(places):
            vector = encoding.tables[0][ri - rj + grid[0] - 1] + encoding.tables[1][ci - cj + grid[1] - 1]
            expected[:, :, prefix + i, prefix + j] = q[:, :, prefix + i] @ vector  # the query is not scaled
    assert torch.allclose(bias, expected, atol=1e-10)


@pytest.mark.parametrize("elements", [1, 100, 10**6])
def test_decomposed_terms_in_slices(elements, monkeypatch):
    monkeypatch.setattr(_slices, "SLICE_ELEMENTS", elements)
    stack, encoding = make("decomposed_rpe", (3, 4), 1)
    subsets = torch.tensor([[0, 1, 4, 5, 11], [2, 3, 6, 7, 8], [0, 5, 6, 9, 10]])
    for positions in (Positions.grid(3, 4, num_prefix=1), Positions.grid(3, 4, num_prefix=1).take(subsets)):
        q, k, v = torch.randn(3, 3, HEADS, positions.num_tokens, WIDTH, dtype=torch.float64).unbind(0)
        state = stack.prepare(positions)[0]
        assert encoding.logit_bias_slices(q, k, state.prepared[0]) is None  # the tables learn
        whole = encoding.logit_bias(q, k, state.prepared[0])
        with torch.no_grad():
            state = stack.prepare(positions)[0]
            sliced = list(encoding.logit_bias_slices(q, k, state.prepared[0]))
            assert (len(sliced) == 1) == (elements == 10**6)
            found = torch.full_like(whole, torch.nan)
            for b, h, term in sliced:
                found[b, h] = term
            torch.testing.assert_close(found, whole)
            assert torch.allclose(attend(q, k, v, state), attend(q, k, v, state, plain=True), atol=1e-12)


def test_decomposed_tables_are_resized_linearly():
    stack, encoding = make("decomposed_rpe", (3, 5))
    other, target = make("decomposed_rpe", (6, 4))
    with torch.no_grad():
        for table, size, destination in zip(encoding.tables, (6, 4), target.tables, strict=True):
            resized = F.interpolate(table.T[None], 2 * size - 1, mode="linear", align_corners=False)[0].T
            destination.copy_(resized)
    positions = Positions.grid(6, 4)
    q = torch.randn(1, HEADS, 24, WIDTH, dtype=torch.float64)
    expected = target.logit_bias(q, q, other.prepare(positions)[0].prepared[0])
    assert torch.allclose(encoding.logit_bias(q, q, stack.prepare(positions)[0].prepared[0]), expected, atol=1e-10)
    state = decomposed_tables({"attn.rel_pos_h": torch.zeros(5, 2), "attn.rel_pos_w": torch.zeros(9, 2)}, "attn.")
    assert state["tables.1"].shape == (9, 2)


# -- ALiBi ------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 33))
def test_slopes(count):
    slopes = alibi_slopes(count, dtype=torch.float64)
    assert len(set(slopes.tolist())) == count
    lower = 2 ** (count.bit_length() - 1)
    assert torch.allclose(slopes[:lower].log2(), -8 * torch.arange(1, lower + 1).double() / lower)
    assert set(slopes[lower:].tolist()) <= set(alibi_slopes(2 * lower, dtype=torch.float64)[::2].tolist())


def test_alibi_is_minus_slope_times_distance():
    stack, _ = make("alibi_2d", num_prefix=1)
    bias = bias_of(stack, Positions.grid(3, 5, num_prefix=1, dtype=torch.float64))
    slopes = alibi_slopes(HEADS, dtype=torch.float64)
    assert torch.allclose(bias[0, :, 1, 1 + 5 * 2 + 3], -slopes * 13**0.5)
    assert torch.equal(bias, bias.mT)
    corner, _ = make("alibi_2d", num_prefix=1, prefix="corner")
    at_corner = bias_of(corner, Positions.grid(3, 5, num_prefix=1, dtype=torch.float64))
    assert torch.allclose(at_corner[0, :, 0, 1], -slopes * 2**0.5)
    assert torch.allclose(at_corner[..., 1:, 1:], bias[..., 1:, 1:])


def test_squared_distance_is_three_more_columns():
    """An identity the fused path may use one day; distance itself has no such form."""
    coords = Positions.grid(3, 4, dtype=torch.float64).coords[0]
    m = 0.37
    ones = torch.ones(len(coords), 1, dtype=torch.float64)
    square = (coords**2).sum(-1, keepdim=True)
    left = torch.cat([2 * m * coords, ones], 1)
    right = torch.cat([coords, -m * square], 1)
    assert torch.allclose(left @ right.T - m * square, -m * torch.cdist(coords, coords) ** 2, atol=1e-12)


@pytest.mark.parametrize("name", ["alibi_2d", "lookhere", "functional_bias"])
def test_rescaled_distances_are_those_of_the_training_grid(name):
    stack, _ = make(name, resolution="rescaled")
    fine = bias_of(stack, Positions.grid(6, 10, dtype=torch.float64)).unflatten(-1, (6, 10)).unflatten(-3, (6, 10))
    coarse = bias_of(stack, Positions.grid(3, 5, dtype=torch.float64)).unflatten(-1, (3, 5)).unflatten(-3, (3, 5))
    if name == "functional_bias":  # FIRE also sees that the field ends half a patch later
        assert not torch.equal(fine[:, :, ::2, ::2, ::2, ::2], coarse)
        return
    assert torch.allclose(fine[:, :, ::2, ::2, ::2, ::2], coarse, atol=1e-12)


# -- LookHere ---------------------------------------------------------------------------------------------------------


def seen(view: tuple[str, ...], grid: tuple[int, int]) -> Tensor:
    return view_mask(pair_offsets(Positions.grid(*grid).coords), view)[0].view(*grid, *grid)


@settings(max_examples=20, deadline=None)
@given(grid=grids)
def test_opposite_views_cover_the_grid_and_meet_on_the_line_of_the_query(grid):
    rows = torch.arange(grid[0])
    columns = torch.arange(grid[1])
    both = seen(("up",), grid) & seen(("down",), grid)
    assert bool((seen(("up",), grid) | seen(("down",), grid)).all())
    assert torch.equal(both, (rows[:, None, None, None] == rows[None, None, :, None]).expand_as(both))
    both = seen(("left",), grid) & seen(("right",), grid)
    assert torch.equal(both, (columns[None, :, None, None] == columns[None, None, None, :]).expand_as(both))
    for views in VIEWS.values():
        for view in views:
            assert bool(seen(view, grid).flatten(2).flatten(0, 1).diagonal().all())


@pytest.mark.parametrize(("view", "mirrored"), [("left", "right"), ("tri_left", "tri_right"), ("up", "up")])
def test_flipping_the_image_swaps_left_and_right(view, mirrored):
    assert torch.equal(seen((view,), (3, 4)).flip(1, 3), seen((mirrored,), (3, 4)))


def test_up_means_smaller_rows():
    view = seen(("up", "left"), (3, 4))[1, 2]
    assert view.tolist() == [[True, True, True, False]] * 2 + [[False] * 4]


@pytest.mark.parametrize(
    ("heads", "directions", "slopes"),
    [
        (12, "corners-none", [1 / 2] * 4 + [1 / 4] * 4 + [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
        (12, "corners-triangles-none", [1 / 2] * 8 + [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
        (16, "halves-corners-none", [1 / 2] * 4 + [1 / 4] * 4 + [1 / 2] * 4 + [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
        (6, "halves-none", [1 / 2] * 4 + [1 / 4, 1 / 16]),
        (8, "halves-none", [1 / 2] * 4 + [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
        (4, "halves-none", [1 / 2] * 4),
        (3, "halves", [1 / 2] * 3),
        (8, "none", [1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 64, 1 / 64, 1 / 256, 1 / 256]),
    ],
)
def test_head_layouts(heads, directions, slopes):
    assert [slope for _, slope in head_layout(heads, directions)] == slopes


@settings(max_examples=40, deadline=None)
@given(heads=st.integers(1, 40), name=st.sampled_from(sorted(VIEWS)))
def test_any_number_of_heads_has_a_layout(heads, name):
    layout = head_layout(heads, f"{name}-none")
    assert len(layout) == heads
    assert layout[0][0] == VIEWS[name][0]


def test_layers_share_one_base():
    stack = create_encoding("lookhere", 24, 4, depth=3, layer_slopes=(1.5, 0.5), global_slope=2.0)
    states = stack.prepare(Positions.grid(3, 4))
    assert [state.prepared[0].slope for state in states] == [1.5, 1.0, 0.5]
    assert len({state.prepared[0].penalty.data_ptr() for state in states}) == 1
    q = torch.zeros(1, 4, 1, 6)
    first, _, last = (stack.shared["lookhere"].logit_bias(q, q, state.prepared[0]) for state in states)
    visible = last > -HIDDEN / 10
    assert torch.allclose(first[visible], 3 * last[visible])
    assert not bool(visible.all())


def test_hidden_keys_get_no_weight_and_no_row_is_empty():
    stack = create_encoding("lookhere", 24, 4).eval()
    q, k, v = torch.randn(3, 1, 4, 12, 6)
    moved = v.clone()
    moved[:, :, 6:] += 100  # rows below the first half
    positions = Positions.grid(4, 3)
    state = stack.prepare(positions)[0]
    change = (attend(q, k, moved, state) - attend(q, k, v, state)).abs().amax(-1)[0]
    assert bool((change[:2, :6] == 0).all())  # the two heads that look up
    assert bool((change[2:, :6] > 0).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": "sideways"}, "expected sets of"),
        ({"directions": "none-halves"}, "only at the end"),
        ({"directions": "halves-corners"}, "at least 8 heads"),
        ({"distance": "manhattan"}, "distance: expected"),
        ({"layer_slopes": (1.5, 0.0)}, "positive"),
    ],
)
def test_lookhere_errors(options, message):
    with pytest.raises(ValueError, match=message):
        create_encoding("lookhere", 24, 4, **options)


# -- KERPLE and FIRE --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kerple_log", "kerple_power"])
@pytest.mark.parametrize("distance", ["euclidean", "manhattan", "chebyshev"])
def test_kerple_is_symmetric_zero_at_itself_and_falls_with_distance(kind, distance):
    stack, _ = make("functional_bias", kind=kind, distance=distance)
    bias = bias_of(stack, Positions.grid(3, 5, dtype=torch.float64))
    assert torch.allclose(bias, bias.mT)
    assert bool((bias.diagonal(dim1=-2, dim2=-1) == 0).all())
    assert bool((bias[0, :, 0, :5].diff() < 0).all())


def test_kerple_with_power_one_is_alibi():
    stack, encoding = make("functional_bias", kind="kerple_power")
    alibi, _ = make("alibi_2d")
    with torch.no_grad():
        encoding.p.fill_(1.0)
        encoding.a.copy_(alibi_slopes(HEADS)[None])
    positions = Positions.grid(3, 4, dtype=torch.float64)
    clamped = torch.where(alibi_slopes(HEADS).double() < 1e-2, 1e-2 / alibi_slopes(HEADS).double(), 1.0)
    assert torch.allclose(bias_of(stack, positions), bias_of(alibi, positions) * clamped[:, None, None], atol=1e-12)


def test_fire_reads_a_share_of_the_reach():
    stack, encoding = make("functional_bias", kind="fire", grid=(3, 4))
    assert create_encoding("functional_bias", 8, 2, train_grid=(4, 5)).shared["functional_bias"].threshold == 5
    with torch.no_grad():
        encoding.threshold.fill_(0.0)
    positions = Positions.grid(5, 6, dtype=torch.float64)
    bias = bias_of(stack, positions)
    assert not torch.allclose(bias, bias.mT)
    share = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
    ends = encoding.fc2(torch.relu(encoding.fc1(share)))
    assert torch.allclose(bias[0, :, 0, 0], ends[0])  # itself
    assert torch.allclose(bias[0, :, 0, -1], ends[-1], atol=1e-5)  # the furthest token, at any resolution


def test_per_axis_functions_tell_left_from_right():
    for kind in ("kerple_log", "fire"):
        stack, _ = make("functional_bias", kind=kind, distance="per_axis")
        with torch.no_grad():
            for parameter in stack.parameters():
                parameter.abs_().add_(torch.rand_like(parameter))  # above the lower bound of KERPLE
        bias = bias_of(stack, Positions.grid(3, 3, dtype=torch.float64))
        assert (bias[0, :, 4, 3] - bias[0, :, 4, 5]).abs().min() > 1e-4


def test_a_learned_value_for_prefix_tokens():
    stack, encoding = make("functional_bias", num_prefix=1, prefix_value=True)
    bias = bias_of(stack, Positions.grid(2, 2, num_prefix=1, dtype=torch.float64))
    value = encoding.prefix_value.detach()
    assert torch.equal(bias[0, :, 0], value[:, None].expand(-1, 5))
    assert torch.equal(bias[0, :, :, 0], value[:, None].expand(-1, 5))
    assert not torch.allclose(bias[0, :, 1, 1], value)


def test_functional_errors():
    with pytest.raises(ValueError, match="diagonal of the training grid"):
        create_encoding("functional_bias", 8, 2)
    with pytest.raises(ValueError, match="kind: expected one of"):
        create_encoding("functional_bias", 8, 2, kind="log")
    with pytest.raises(ValueError, match="distance: expected one of"):
        create_encoding("functional_bias", 8, 2, kind="kerple_log", distance="cosine")
