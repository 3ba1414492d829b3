"""CPE and LePE: convolutions of tokens on their grid; prefix tokens, padding, subsets, images of several sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos import Positions, attend, create_encoding
from mmpos.checkpoints import cpe_weights, lepe_weights
from mmpos.encodings._raster import Raster
from mmpos.encodings.cpe import peg
from mmpos.functional.grid_conv import depthwise

DIM, HEADS = 8, 2
grids = st.tuples(st.integers(1, 5), st.integers(1, 6))


def make(name: str, depth: int = 1, **options: object):
    torch.manual_seed(0)
    stack = create_encoding(name, DIM, HEADS, depth, **options).double()
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter)
    return stack, stack.encodings_of(0)[0]


def tokens(count: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, DIM, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def convolved(x: Tensor, grid: tuple[int, int], weight: Tensor, bias: Tensor) -> Tensor:
    """Zero-padded convolution of ``(B, N, D)``, as torch does it."""
    maps = x.transpose(1, 2).reshape(len(x), -1, *grid)
    return (
        F.conv2d(maps, weight, bias, padding=weight.shape[-1] // 2, groups=weight.shape[0]).flatten(2).transpose(1, 2)
    )


# -- CPE --------------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(grid=grids, prefix=st.integers(0, 5), kernel=st.sampled_from([1, 3, 5]))
def test_placed_tokens_are_convolved_and_prefix_tokens_pass(grid, prefix, kernel):
    stack, encoding = make("cpe", kernel=kernel)
    positions = Positions.grid(*grid, num_prefix=prefix)
    x = tokens(positions.num_tokens)
    out = stack.mix_tokens(0, x, positions)
    expected = x[:, prefix:] + convolved(x[:, prefix:], grid, encoding.weights[0], encoding.biases[0])
    assert torch.allclose(out[:, prefix:], expected, atol=1e-12)
    assert torch.equal(out[:, :prefix], x[:, :prefix])


def test_a_zero_kernel_is_the_identity():
    stack = create_encoding("cpe", DIM, HEADS, init="zero").double()
    x = tokens(7)
    assert torch.equal(stack.mix_tokens(0, x, Positions.grid(2, 3, num_prefix=1)), x)


def test_a_tap_beside_the_centre_shifts_the_grid_and_fills_with_zeros():
    weight = torch.zeros(1, 1, 3, 3)
    weight[..., 1, 2] = 1.0
    maps = torch.arange(1.0, 7.0).view(1, 1, 2, 3)
    assert depthwise(maps, weight)[0, 0].tolist() == [[2, 3, 0], [5, 6, 0]]
    assert depthwise(maps, weight, padding="circular")[0, 0].tolist() == [[2, 3, 1], [5, 6, 4]]
    assert depthwise(maps, weight, identity=True)[0, 0].tolist() == [[3, 5, 3], [9, 11, 6]]


@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_only_circular_padding_is_equivariant_to_circular_shifts(padding):
    stack, _ = make("cpe", padding=padding)
    positions = Positions.grid(4, 5)
    x = tokens(20)
    roll = lambda t: t.unflatten(1, (4, 5)).roll((1, 2), (1, 2)).flatten(1, 2)  # noqa: E731
    same = torch.allclose(stack.mix_tokens(0, roll(x), positions), roll(stack.mix_tokens(0, x, positions)), atol=1e-12)
    assert same == (padding == "circular")


@settings(max_examples=15, deadline=None)
@given(grid=grids, stride=st.integers(2, 3), prefix=st.integers(0, 1))
def test_a_stride_shrinks_the_grid_and_adds_nothing(grid, stride, prefix):
    positions = Positions.grid(*grid, num_prefix=prefix)
    weight, bias = torch.randn(DIM, 1, 3, 3, dtype=torch.float64), torch.randn(DIM, dtype=torch.float64)
    x = tokens(positions.num_tokens)
    out = peg(x, weight, bias, Raster.of(positions, "peg"), stride=stride)
    maps = x[:, prefix:].transpose(1, 2).reshape(2, DIM, *grid)
    expected = F.conv2d(maps, weight, bias, stride=stride, padding=1, groups=DIM)
    assert expected.shape[2:] == tuple(-(-size // stride) for size in grid)
    assert torch.allclose(out[:, prefix:], expected.flatten(2).transpose(1, 2), atol=1e-12)


def test_placements_have_their_own_weights():
    stack, encoding = make("cpe", depth=3, placement=(-1, 0, 2))
    positions = Positions.grid(2, 3)
    x = tokens(6)
    for place, out in zip(
        (0, 1, 2),
        (stack.add_to_tokens(x, positions), *(stack.mix_tokens(i, x, positions) for i in (0, 2))),
        strict=True,
    ):
        expected = x + convolved(x, (2, 3), encoding.weights[place], encoding.biases[place])
        assert torch.allclose(out, expected, atol=1e-12)
    assert torch.equal(stack.mix_tokens(1, x, positions), x)
    with pytest.raises(ValueError, match="has no block 5"):
        create_encoding("cpe", DIM, HEADS, 3, placement=(0, 5))
    for wrong in ((), (-2,), (1, 1)):
        with pytest.raises(ValueError, match="placement: expected"):
            create_encoding("cpe", DIM, HEADS, 3, placement=wrong)


def test_weights_load_from_twins():
    states = [{"proj.0.weight": torch.randn(DIM, 1, 3, 3), "proj.0.bias": torch.randn(DIM)} for _ in range(2)]
    stack = create_encoding("cpe", DIM, HEADS, 2, placement=(0, 1))
    stack.shared["cpe"].load_state_dict(cpe_weights(states))
    assert torch.equal(stack.shared["cpe"].weights[1], states[1]["proj.0.weight"])
    with pytest.raises(ValueError, match="proj.0"):
        cpe_weights([{}])


# -- LePE -------------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(grid=grids, prefix=st.integers(0, 2))
def test_lepe_adds_the_convolved_values(grid, prefix):
    stack, encoding = make("lepe")
    positions = Positions.grid(*grid, num_prefix=prefix)
    q, k, v = torch.randn(3, 2, HEADS, positions.num_tokens, DIM // HEADS, dtype=torch.float64)
    joined = v[:, :, prefix:].transpose(1, 2).flatten(2)
    term = convolved(joined, grid, encoding.weight, encoding.bias).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    expected = attend(q, k, v)
    expected = torch.cat([expected[:, :, :prefix], expected[:, :, prefix:] + term], 2)
    assert torch.allclose(attend(q, k, v, stack.prepare(positions)[0]), expected, atol=1e-12)


def test_lepe_convolves_values_as_they_were_before_any_rotation():
    stack = create_encoding(["rope_axial", "lepe"], DIM, HEADS, head_dim=4).double()
    q, k, v = torch.randn(3, 1, HEADS, 6, 4, dtype=torch.float64)
    positions = Positions.grid(2, 3)
    alone, _ = make("lepe")
    alone.layers[0]["lepe"].load_state_dict(stack.layers[0]["lepe"].state_dict())
    zero = torch.zeros_like(q)
    rotated = create_encoding("rope_axial", DIM, HEADS, head_dim=4).double()
    expected = attend(q, k, v, rotated.prepare(positions)[0])
    expected = expected + attend(zero, zero, v, alone.prepare(positions)[0]) - attend(zero, zero, v)
    assert torch.allclose(attend(q, k, v, stack.prepare(positions)[0]), expected, atol=1e-10)


def test_lepe_weights_and_zero_start():
    stack = create_encoding("lepe", DIM, HEADS, init="zero").double()
    q, k, v = torch.randn(3, 1, HEADS, 6, 4, dtype=torch.float64)
    assert torch.allclose(attend(q, k, v, stack.prepare(Positions.grid(2, 3))[0]), attend(q, k, v), atol=1e-12)
    assert set(lepe_weights({"get_v.weight": torch.zeros(1), "get_v.bias": torch.zeros(1)})) == {"weight", "bias"}
    with pytest.raises(ValueError, match="get_v"):
        lepe_weights({})


# -- both, when tokens are missing ------------------------------------------------------------------------------------


def run(name: str, stack, x: Tensor, positions: Positions) -> Tensor:
    if name == "cpe":
        return stack.mix_tokens(0, x, positions)
    heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    zero = torch.zeros_like(heads)
    state = stack.prepare(positions)[0]
    return state.encodings[0].transform_output(zero, heads, state.prepared[0]).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", ["cpe", "lepe"])
def test_kept_tokens_go_back_to_their_cells_and_the_rest_is_zero(name):
    stack, _ = make(name)
    positions = Positions.grid(3, 4, num_prefix=1)
    keep = torch.tensor([[7, 0, 5, 11], [3, 2, 8, 9]])
    x = tokens(13)
    rows = torch.cat([torch.zeros(2, 1, dtype=torch.long), keep + 1], 1)[..., None].expand(-1, -1, DIM)
    sparse = torch.zeros_like(x).scatter(1, rows, x.gather(1, rows))
    expected = run(name, stack, sparse, positions).gather(1, rows)
    part = run(name, stack, x.gather(1, rows), positions.take(keep))
    assert torch.allclose(part[:, 1:], expected[:, 1:], atol=1e-12)


@pytest.mark.parametrize("name", ["cpe", "lepe"])
def test_padding_is_zero_before_the_convolution(name):
    stack, _ = make(name)
    mask = torch.tensor([[True, True, False, True, False, True]] * 2)
    positions = Positions.grid(2, 3, mask=mask)
    x = tokens(6)
    clean = x * mask[..., None]
    out = run(name, stack, x, positions)
    assert torch.allclose(out[mask], run(name, stack, clean, Positions.grid(2, 3))[mask], atol=1e-12)
    if name == "cpe":
        assert torch.equal(out[~mask], x[~mask])


@pytest.mark.parametrize("name", ["cpe", "lepe"])
def test_images_of_several_sizes_are_convolved_each_alone(name):
    stack, _ = make(name)
    sizes = [(2, 3), (4, 2), (1, 5)]
    positions = Positions.grids(sizes, num_prefix=1, length=10)
    x = tokens(11, batch=3)
    out = run(name, stack, x, positions)
    for row, (height, width) in enumerate(sizes):
        count = 1 + height * width
        alone = run(name, stack, x[row : row + 1, :count], Positions.grid(height, width, num_prefix=1))
        assert torch.allclose(out[row : row + 1, 1:count], alone[:, 1:], atol=1e-12)


@pytest.mark.parametrize("name", ["cpe", "lepe"])
def test_places_without_a_grid_are_refused(name):
    stack, _ = make(name)
    x = tokens(3)
    for positions in (
        Positions.points(torch.rand(3, 2)),
        Positions.points(torch.rand(3, 2), extent=(4, 4)),
        Positions.grid(1, 3).with_coords(torch.rand(1, 3, 2)),
    ):
        with pytest.raises(ValueError, match="convolves tokens on their grid"):
            run(name, stack, x, positions)


@pytest.mark.parametrize("axes", [1, 3])
def test_other_numbers_of_axes(axes):
    stack, encoding = make("cpe", axes=axes)
    sizes = (4, 3, 2)[:axes]
    positions = Positions.grid(*sizes)
    x = tokens(positions.num_placed)
    maps = x.transpose(1, 2).reshape(2, DIM, *sizes)
    conv = {1: F.conv1d, 3: F.conv3d}[axes]
    expected = maps + conv(maps, encoding.weights[0], encoding.biases[0], padding=1, groups=DIM)
    assert torch.allclose(stack.mix_tokens(0, x, positions), expected.flatten(2).transpose(1, 2), atol=1e-12)


def test_bad_kernels():
    with pytest.raises(ValueError, match="kernel: expected an odd size"):
        create_encoding("cpe", DIM, HEADS, kernel=2)
    with pytest.raises(ValueError, match="kernel: expected an odd size"):
        create_encoding("lepe", DIM, HEADS, kernel=4)
    with pytest.raises(ValueError, match="padding: expected"):
        create_encoding("cpe", DIM, HEADS, padding="reflect")
    with pytest.raises(ValueError, match="odd k"):
        depthwise(torch.zeros(1, 2, 3, 3), torch.zeros(2, 1, 2, 2))
    with pytest.raises(ValueError, match="stride 1"):
        depthwise(torch.zeros(1, 2, 3, 3), torch.zeros(2, 1, 3, 3), identity=True, stride=2)


def test_circular_padding_needs_one_grid():
    stack = create_encoding("cpe", 8, 1, padding="circular", per_layer=False)
    with pytest.raises(ValueError, match="wraps around the border of one grid"):
        stack.mix_tokens(0, torch.randn(2, 20, 8), Positions.grids([(2, 3), (4, 5)]))
