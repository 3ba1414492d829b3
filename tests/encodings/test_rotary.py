"""RoPE-Axial, RoPE-Mixed and the rotation kernels: equivalences, invariances, precision, other implementations."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos import Positions, attend, create_encoding
from mmpos.encodings.rope_mixed import RopeMixed
from mmpos.functional.rope_scaling import SCALINGS, RopeScaling, integer_wavelengths, scale_frequencies
from mmpos.functional.rotary import (
    Rotation,
    inverse_frequencies,
    rotate,
    rotate_,
    rotate_plain,
    rotation_from_angles,
    to_half_layout,
    to_interleaved_layout,
    transform_blocks,
)
from mmpos.testing import assert_close, assert_norm_preserved, assert_relative, qkv, scores, seeded

DIM, HEADS, D = 48, 2, 24
GRID = (3, 5)


def table(
    name: str = "rope_axial", *, num_prefix: int = 1, dtype: torch.dtype = torch.float32, **options: object
) -> Rotation:
    stack = create_encoding(name, DIM, HEADS, **options)
    return stack.prepare(Positions.grid(*GRID, num_prefix=num_prefix, dtype=dtype))[0].prepared[0]


def mixed_like_axial(**options: object) -> tuple[object, object]:
    pair = {"theta": 100.0, **options}
    return (
        create_encoding("rope_mixed", DIM, HEADS, init="axial", **pair),
        create_encoding("rope_axial", DIM, HEADS, **pair),
    )


# -- equivalences -----------------------------------------------------------------------------------------------------


def test_mixed_at_angle_zero_is_axial() -> None:
    mixed, axial = mixed_like_axial()
    positions = Positions.grid(*GRID, num_prefix=1)
    a, b = (stack.prepare(positions)[0].prepared[0] for stack in (mixed, axial))
    assert_close(a.cos, b.cos.expand_as(a.cos), terms=4)
    assert_close(a.sin, b.sin.expand_as(a.sin), terms=4)


@pytest.mark.parametrize("axes", [1, 3])
def test_mixed_with_axial_start_is_axial_in_other_dimensions(axes: int) -> None:
    sizes = (3, 2, 4)[-axes:]
    mixed = create_encoding("rope_mixed", DIM, HEADS, axes=axes, init="axial", theta=100.0)
    axial = create_encoding("rope_axial", DIM, HEADS, axes=axes, theta=100.0)
    a, b = (stack.prepare(Positions.grid(*sizes))[0].prepared[0] for stack in (mixed, axial))
    assert_close(a.sin, b.sin.expand_as(a.sin), terms=4)


@pytest.mark.parametrize("resolution", ["rescaled", "linear", "ntk", "yarn"])
@pytest.mark.parametrize("larger", [(6, 10), (9, 5), (3, 11)], ids=str)
def test_scalings_of_mixed_at_angle_zero_are_those_of_axial(resolution: str, larger: tuple[int, int]) -> None:
    """Also when the two axes grow differently: the amplitude of a pair is that of the axis it reads."""
    mixed, axial = mixed_like_axial(train_grid=GRID, resolution=resolution)
    positions = Positions.grid(*larger, num_prefix=1)
    a, b = (stack.prepare(positions)[0].prepared[0] for stack in (mixed, axial))
    assert_close(a.cos, b.cos.expand_as(a.cos), terms=64)
    assert_close(a.sin, b.sin.expand_as(a.sin), terms=64)
    assert torch.equal(a.cos[:, :, 0], torch.ones_like(a.cos[:, :, 0]))  # prefix tokens are not scaled either


def test_amplitude_of_a_frequency_of_length_zero_is_one_axis_free() -> None:
    stack = create_encoding("rope_mixed", DIM, HEADS, train_grid=GRID, resolution="yarn")
    with torch.no_grad():
        stack.layers[0]["rope_mixed"].freqs[:, :, 3] = 0
    prepared = stack.prepare(Positions.grid(6, 10))[0].prepared[0]
    assert torch.equal(prepared.cos[..., 3], torch.ones_like(prepared.cos[..., 3]))


def test_interleaved_is_half_with_permuted_weights() -> None:
    x = seeded(2, 16, DIM)
    w_q, w_k, w_v = seeded(3, DIM, DIM, seed=1).unbind(0)
    positions = Positions.grid(*GRID, num_prefix=1)
    interleaved, half = (create_encoding("rope_axial", DIM, HEADS, layout=layout) for layout in ("interleaved", "half"))

    def heads(weight: Tensor) -> Tensor:
        return (x @ weight.mT).unflatten(-1, (HEADS, D)).transpose(1, 2)

    def to_half(weight: Tensor) -> Tensor:
        return to_half_layout(weight.unflatten(0, (HEADS, D)), dim=1).flatten(0, 1)

    expected = attend(heads(w_q), heads(w_k), heads(w_v), interleaved.prepare(positions)[0])
    out = attend(heads(to_half(w_q)), heads(to_half(w_k)), heads(w_v), half.prepare(positions)[0])
    assert_close(out, expected, terms=256)
    wrong = attend(heads(w_q), heads(w_k), heads(w_v), half.prepare(positions)[0])
    assert (wrong - expected).abs().max() > 0.01  # the two layouts are not interchangeable


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_layout_permutations_are_inverse_on_any_dimension(dim: int) -> None:
    x = seeded(6, 8, 10)
    half = to_half_layout(x, dim)
    assert not torch.equal(half, x)
    assert torch.equal(half.select(dim, 1), x.select(dim, 2))
    assert torch.equal(to_interleaved_layout(half, dim), x)


def test_pairs_of_the_two_layouts() -> None:
    quarter = torch.tensor([[math.pi / 2, 0.0]])[None, None]
    q = torch.tensor([1.0, 0, 0, 0])[None, None, None]
    for layout, expected in (("interleaved", [0.0, 1, 0, 0]), ("half", [0.0, 0, 1, 0])):
        rotated = rotate(q, rotation_from_angles(quarter, layout=layout))
        torch.testing.assert_close(rotated.flatten(), torch.tensor(expected))


@pytest.mark.parametrize("order", ["xy", "ij"])
def test_equals_timm_axial_on_a_rectangle(order: str) -> None:
    timm = pytest.importorskip("timm.layers.pos_embed_sincos")
    theirs = timm.RotaryEmbeddingCat(
        D, in_pixels=False, temperature=100.0, feat_shape=None, ref_feat_shape=None, grid_indexing=order
    )
    embedding = theirs.get_embed(shape=list(GRID))
    q = seeded(2, HEADS, GRID[0] * GRID[1], D)
    expected = timm.apply_rot_embed_cat(q, embedding)
    assert_close(rotate(q, table(num_prefix=0, axis_order=order)), expected, terms=16)
    other = {"xy": "ij", "ij": "xy"}[order]
    assert (rotate(q, table(num_prefix=0, axis_order=other)) - expected).abs().max() > 0.1


def test_equals_timm_mixed_on_a_rectangle() -> None:
    timm = pytest.importorskip("timm.layers.pos_embed_sincos")
    from mmpos.checkpoints import rope_mixed_freqs

    depth = 2
    theirs = timm.RotaryEmbeddingMixed(
        DIM, depth=depth, num_heads=HEADS, temperature=10.0, feat_shape=None, grid_indexing="xy"
    )
    embeddings = theirs.get_embed(shape=list(GRID))
    stack = create_encoding("rope_mixed", DIM, HEADS, depth)
    q = seeded(2, HEADS, GRID[0] * GRID[1], D)
    with torch.no_grad():
        for layer, freqs in enumerate(rope_mixed_freqs(theirs.freqs, depth=depth, num_heads=HEADS)):
            stack.layers[layer]["rope_mixed"].freqs.copy_(freqs)
    for layer, state in enumerate(stack.prepare(Positions.grid(*GRID))):
        assert_close(rotate(q, state.prepared[0]), timm.apply_rot_embed_cat(q, embeddings[layer]), terms=64)


# -- geometry ---------------------------------------------------------------------------------------------------------


def test_moving_along_x_leaves_the_pairs_of_y() -> None:
    stack = create_encoding("rope_axial", DIM, HEADS)
    positions = Positions.grid(*GRID)
    moved = positions.with_coords(positions.coords + torch.tensor([0.0, 1.75]))
    a, b = (stack.prepare(p)[0].prepared[0] for p in (positions, moved))
    x_pairs, y_pairs = slice(0, D // 4), slice(D // 4, D // 2)
    assert torch.equal(a.sin[..., y_pairs], b.sin[..., y_pairs])
    assert (a.sin[..., x_pairs] - b.sin[..., x_pairs]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    shift=st.tuples(st.floats(-50, 50), st.floats(-50, 50)),
    points=st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=2, max_size=6),
)
def test_translation_of_real_points(name: str, shift: tuple[float, float], points: list[tuple[float, float]]) -> None:
    torch.manual_seed(0)
    stack = create_encoding(name, DIM, HEADS).double()
    assert_relative(stack, Positions.points(torch.tensor(points, dtype=torch.float64), num_prefix=1), shift)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_lengths_of_pairs_and_prefix_stay(layout: str) -> None:
    q = seeded(2, HEADS, 16, D)
    rotated = rotate(q, table(layout=layout))
    assert_norm_preserved(q, rotated, layout=layout)
    assert torch.equal(rotated[:, :, 0], q[:, :, 0])
    assert (rotated[:, :, 2:] - q[:, :, 2:]).abs().amax(dim=(0, 1, 3)).min() > 0.1


def test_turning_the_grid_is_turning_the_frequencies() -> None:
    """Rotating the image by 90 degrees equals rotating all frequency vectors of RoPE-Mixed."""
    stack = create_encoding("rope_mixed", DIM, HEADS)
    turned = create_encoding("rope_mixed", DIM, HEADS)
    freqs = stack.layers[0]["rope_mixed"].freqs
    with torch.no_grad():
        turned.layers[0]["rope_mixed"].freqs.copy_(torch.stack([-freqs[1], freqs[0]]))
    positions = Positions.grid(*GRID)
    rows, cols = positions.coords.unbind(-1)
    q, k, _ = qkv(1, HEADS, 15, D)
    ninety = positions.with_coords(torch.stack([cols, -rows], dim=-1))  # (row, col) -> (col, -row)
    assert_close(scores(stack, ninety, q, k), scores(turned, positions, q, k), terms=256)
    assert (scores(stack, ninety, q, k) - scores(stack, positions, q, k)).abs().max() > 0.1


def test_rotating_one_side_by_the_difference_is_enough() -> None:
    angles = seeded(1, 1, 2, D // 2, dtype=torch.float64)
    q, k, _ = qkv(1, 1, 1, D, dtype=torch.float64)
    at = [rotation_from_angles(angles[:, :, i : i + 1]) for i in (0, 1)]
    both = (rotate(q, at[0]) * rotate(k, at[1])).sum()
    only_k = (q * rotate(k, rotation_from_angles(angles[:, :, 1:] - angles[:, :, :1]))).sum()
    only_q = (rotate(q, rotation_from_angles(angles[:, :, :1] - angles[:, :, 1:])) * k).sum()
    torch.testing.assert_close(both, only_k)
    torch.testing.assert_close(both, only_q)


def test_paper_formula_alternates_the_axes() -> None:
    blocked, alternating = (table(num_prefix=0, allocation=a) for a in ("blocked", "alternating"))
    order = torch.arange(D // 2).unflatten(0, (2, -1)).mT.flatten()
    assert torch.equal(alternating.cos, blocked.cos[..., order])
    assert not torch.equal(alternating.cos, blocked.cos)


def test_random_start_points_along_one_frame_per_head() -> None:
    freqs = create_encoding("rope_mixed", DIM, HEADS).layers[0]["rope_mixed"].freqs.detach()
    first, second = freqs[..., : D // 4], freqs[..., D // 4 :]
    assert_close((first * second).sum(0), torch.zeros(HEADS, D // 4))
    ladder = inverse_frequencies(D // 4, 10.0)
    assert_close(first.norm(dim=0), ladder.expand(HEADS, -1))
    directions = torch.atan2(first[0], first[1])
    assert_close(directions, directions[:, :1].expand_as(directions), terms=64)
    assert (directions[0] - directions[1]).abs().max() > 1e-3


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fast_path_equals_plain(layout: str, dtype: torch.dtype) -> None:
    rotation = table(layout=layout)
    q = seeded(2, HEADS, 16, D, dtype=dtype)
    out = rotate(q, rotation)
    assert out.dtype == dtype
    # fused multiply-adds may round once less than the plain form
    assert_close(out, rotate_plain(q, rotation), terms=1)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotate_keeps_the_dtype_when_the_table_is_wider(layout: str) -> None:
    rotation = table(layout=layout, dtype=torch.float64)
    assert rotation.cos.dtype == torch.float64
    for dtype in (torch.float32, torch.bfloat16):
        assert rotate(seeded(1, HEADS, 16, D, dtype=dtype), rotation).dtype == dtype


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotate_takes_any_memory_layout(layout: str) -> None:
    rotation = table(layout=layout)
    q = seeded(2, HEADS, 16, D)
    expected = rotate(q, rotation)
    odd = torch.zeros(2, HEADS, 16, D + 1)
    odd[..., 1:] = q
    views = {
        "transposed channels": q.mT.contiguous().mT,
        "odd stride and offset": odd[..., 1:],
        "heads last": q.transpose(1, 2).contiguous().transpose(1, 2),
        "fused qkv": torch.stack([q, q, q]).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)[1],
    }
    for label, view in views.items():
        assert torch.equal(view, q)
        assert_close(rotate(view, rotation), expected, terms=1, what=label)
    broadcast = q[:1].expand(2, -1, -1, -1)
    assert_close(rotate(broadcast, rotation), expected[:1].expand(2, -1, -1, -1), terms=1)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("extra", [1, 4])
def test_channels_beyond_the_table_pass(layout: str, extra: int) -> None:
    rotation = table(layout=layout)
    q = seeded(2, HEADS, 16, D + extra)
    out = rotate(q, rotation)
    assert torch.equal(out[..., D:], q[..., D:])
    assert_close(out[..., :D], rotate(q[..., :D].contiguous(), rotation), terms=1)


def test_rotate_in_place() -> None:
    rotation = table()
    q = seeded(2, HEADS, 16, D)
    expected = rotate(q, rotation)
    assert rotate_(q, rotation) is q
    assert torch.equal(q, expected)
    for bad, match in (
        (torch.zeros(2, HEADS, 16, D, dtype=torch.bfloat16), "float32"),
        (torch.zeros(2, HEADS, D, 16).mT, "contiguous"),
    ):
        with pytest.raises(ValueError, match=match):
            rotate_(bad, rotation)
    with pytest.raises(ValueError, match="interleaved"):
        rotate_(q, table(layout="half"))


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((2, HEADS, 15, D), "tokens 16"),
        ((2, 16, DIM), "heads"),
        ((2, HEADS, 16, D - 2), "channels"),
        ((1, HEADS, 16, D), "batch 2"),
        ((2, HEADS + 1, 16, D), "2 heads"),
    ],
)
def test_wrong_shapes_are_named(shape: tuple[int, ...], match: str) -> None:
    rotation = rotation_from_angles(torch.zeros(2, HEADS, 15, D // 2), num_prefix=1)
    with pytest.raises(ValueError, match=match):
        rotate(torch.zeros(shape), rotation)


def test_half_precision_angles_are_refused() -> None:
    with pytest.raises(ValueError, match="float32 or float64"):
        rotation_from_angles(torch.zeros(1, 1, 3, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_constant_basis_under_autocast(layout: str) -> None:
    """Queries behind a q/k norm are float32 inside autocast; the basis must not take them to half precision."""
    basis = torch.linalg.qr(seeded(HEADS, D, D))[0]
    rotation = rotation_from_angles(seeded(1, 1, 6, D // 2), layout=layout, basis=basis)
    q = seeded(2, HEADS, 6, D)
    expected = rotate(q, rotation)
    assert_close(expected, rotate_plain(q @ basis.mT, rotation), terms=D)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotate(q, rotation), expected)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_blocks(size: int) -> None:
    count, tokens = 3, 4
    blocks = torch.linalg.qr(seeded(1, HEADS, tokens, count, size, size))[0]
    x = seeded(2, HEADS, tokens + 1, count * size + 2)
    expected = x.clone()
    for token in range(tokens):
        for block in range(count):
            part = slice(block * size, (block + 1) * size)
            for head in range(HEADS):
                expected[:, head, token + 1, part] = x[:, head, token + 1, part] @ blocks[0, head, token, block].mT
    assert_close(transform_blocks(x, blocks, num_prefix=1), expected, terms=size)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(transform_blocks(x, blocks, num_prefix=1), expected, terms=size)
    with pytest.raises(ValueError, match="num_prefix"):
        transform_blocks(x, blocks, num_prefix=0)
    with pytest.raises(ValueError, match="heads"):
        transform_blocks(x, blocks.repeat(1, 3, 1, 1, 1, 1), num_prefix=1)


@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_gradients(name: str, layout: str) -> None:
    stack = create_encoding(name, 16, 2, layout=layout).double()
    positions = Positions.grid(2, 3, num_prefix=1, dtype=torch.float64)
    parameters = list(stack.parameters())

    def output(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return attend(q, k, v, stack.prepare(positions)[0])

    inputs = [t.requires_grad_() for t in qkv(1, 2, 7, 8, dtype=torch.float64)]
    assert torch.autograd.gradcheck(output, (*inputs, *parameters))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("resolution", ["index", "rescaled", "yarn"])
def test_traced_real_form_equals_eager(name: str, layout: str, resolution: str) -> None:
    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = create_encoding(name, DIM, HEADS, layout=layout, train_grid=GRID, resolution=resolution)

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            rotation = self.stack.prepare(Positions.grid(6, 4, num_prefix=1))[0].prepared[0]
            return rotate(q, rotation) @ rotate(k, rotation).mT

    model = Scores().eval()
    traced = torch.jit.trace(model, qkv(2, HEADS, 25, D)[:2], check_trace=False)
    assert "complex" not in str(traced.graph)
    q, k, _ = qkv(2, HEADS, 25, D, seed=5)
    assert_close(traced(q, k), model(q, k), terms=D)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("table_outside", [False, True])
def test_compiled_equals_eager(name: str, layout: str, table_outside: bool) -> None:
    """One graph without a break and without complex numbers (Inductor warns of those, and warnings are errors)."""
    stack = create_encoding(name, DIM, HEADS, layout=layout)
    positions = Positions.grid(*GRID, num_prefix=1)
    with torch.no_grad():
        made = stack.prepare(positions)[0] if table_outside else None

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, stack.prepare(positions)[0] if made is None else made)

        inputs = qkv(2, HEADS, 16, D)
        torch._dynamo.reset()
        assert_close(torch.compile(forward, fullgraph=True)(*inputs), forward(*inputs), terms=256)


@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_exported_graph_has_nothing_complex_and_takes_other_sizes(name: str, layout: str) -> None:
    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = create_encoding(name, DIM, HEADS, layout=layout)

        def forward(self, image: Tensor) -> Tensor:  # (B, heads, d, H, W) of queries
            height, width = image.shape[-2:]
            rotation = self.stack.prepare(Positions.grid(height, width))[0].prepared[0]
            return rotate(image.flatten(-2).mT, rotation)

    model = Scores().eval()
    height, width = torch.export.Dim("height", min=2, max=64), torch.export.Dim("width", min=2, max=64)
    exported = torch.export.export(model, (seeded(1, HEADS, D, 3, 5),), dynamic_shapes=({3: height, 4: width},))
    values = [node.meta.get("val") for node in exported.graph.nodes]
    assert not any(isinstance(value, Tensor) and value.is_complex() for value in values)
    for sizes in ((3, 5), (7, 2), (4, 9)):
        x = seeded(1, HEADS, D, *sizes, seed=1)
        assert_close(exported.module()(x), model(x), terms=4, what=str(sizes))


# -- scalings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCALINGS)
def test_scale_one_is_the_identity(kind: str) -> None:
    freqs = inverse_frequencies(8, 100.0)
    scaling = RopeScaling(kind, beta_fast=4.0)
    out, amplitude = scale_frequencies(freqs, scaling, dim=16, base=100.0, train_length=14, scale=1.0)
    expected = integer_wavelengths(freqs) if kind.startswith("resonance") else freqs
    assert_close(out, expected, terms=4)
    assert float(amplitude) == 1.0


def test_ntk_keeps_the_fastest_and_stretches_the_slowest() -> None:
    freqs = inverse_frequencies(8, 100.0)
    out, _ = scale_frequencies(freqs, RopeScaling("ntk"), dim=16, base=100.0, train_length=14, scale=3.0)
    assert_close(out[0], freqs[0])
    assert_close(out[-1], freqs[-1] / 3.0, terms=16)
    assert (out.diff() < 0).all()


def test_yarn_lies_between_interpolation_and_nothing() -> None:
    freqs = inverse_frequencies(16, 100.0)
    scaling = RopeScaling("yarn", beta_fast=4.0)
    out, amplitude = scale_frequencies(freqs, scaling, dim=32, base=100.0, train_length=28, scale=2.5)
    assert ((out >= freqs / 2.5 - 1e-7) & (out <= freqs + 1e-7)).all()
    assert_close(out[0], freqs[0])
    assert_close(out[-1], freqs[-1] / 2.5)
    assert float(amplitude) == pytest.approx(0.1 * math.log(2.5) + 1)


def test_linear_is_scaled_coordinates() -> None:
    stack = create_encoding("rope_axial", DIM, HEADS, train_grid=GRID, resolution="linear")
    linear = stack.prepare(Positions.grid(6, 10))[0].prepared[0]
    stack.set_resolution("rescaled")
    assert_close(linear.sin, stack.prepare(Positions.grid(6, 10))[0].prepared[0].sin, terms=16)


def test_resonance_repeats_after_whole_wavelengths() -> None:
    freqs = integer_wavelengths(inverse_frequencies(8, 100.0, dtype=torch.float64))
    wavelengths = 2 * math.pi / freqs
    assert_close(wavelengths, wavelengths.round(), terms=16)
    steps = torch.arange(7, dtype=torch.float64)[:, None]
    assert_close(((steps + wavelengths.round()) * freqs).sin(), (steps * freqs).sin(), terms=4096)


def test_resonance_needs_no_training_grid() -> None:
    stack = create_encoding("rope_axial", DIM, HEADS, resolution="resonance")
    resonant = stack.prepare(Positions.grid(*GRID))[0].prepared[0]
    assert (resonant.sin - table(num_prefix=0).sin).abs().max() > 0.05


def test_resonance_yarn_has_the_amplitude_of_yarn() -> None:
    for rule in ("yarn", "resonance_yarn"):
        stack = create_encoding("rope_axial", DIM, HEADS, train_grid=GRID, resolution=rule)
        rotation = stack.prepare(Positions.grid(6, 5, num_prefix=1))[0].prepared[0]
        radius = torch.hypot(rotation.cos, rotation.sin)
        x_pairs, y_pairs = radius[:, :, 1:, : D // 4], radius[:, :, 1:, D // 4 :]
        assert_close(x_pairs, torch.ones_like(x_pairs), what=rule)  # the columns did not grow
        assert_close(y_pairs, torch.full_like(y_pairs, 0.1 * math.log(2) + 1), what=rule)
        assert_close(radius[:, :, 0], torch.ones_like(radius[:, :, 0]), what=rule)


def test_samples_of_a_batch_scale_on_their_own() -> None:
    stack = create_encoding("rope_axial", DIM, HEADS, train_grid=GRID, resolution="ntk")
    both = stack.prepare(Positions.grids([(6, 10), (3, 7)]))[0].prepared[0]
    for row, sizes in enumerate([(6, 10), (3, 7)]):
        alone = stack.prepare(Positions.grid(*sizes))[0].prepared[0]
        count = sizes[0] * sizes[1]
        assert_close(both.sin[row : row + 1, :, :count], alone.sin, terms=16)


def test_scalings_refuse_what_they_do_not_mean() -> None:
    stack = create_encoding("rope_axial", DIM, HEADS, coordinates="normalised", train_grid=GRID)
    for rule in ("ntk", "yarn", "linear", "rescaled", "resonance"):
        stack.set_resolution(rule)
        with pytest.raises(ValueError, match="index"):
            stack.prepare(Positions.grid(6, 10))
    with pytest.raises(ValueError, match="train_grid"):
        create_encoding("rope_axial", DIM, HEADS, resolution="ntk").prepare(Positions.grid(6, 10))
    with pytest.raises(ValueError, match="base"):
        scale_frequencies(torch.ones(4), RopeScaling("ntk"), dim=8, base=1.0, train_length=4, scale=2.0)
    with pytest.raises(ValueError, match="beta_fast > beta_slow"):
        RopeScaling("yarn", beta_fast=1.0, beta_slow=4.0)
    with pytest.raises(ValueError, match="more than 2 rotary channels"):
        create_encoding("rope_axial", 8, 2, train_grid=GRID, resolution="ntk").prepare(Positions.grid(6, 10))


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("layout", "adjacent"),
        ("coordinates", "pixels"),
        ("align", "corners"),
        ("axis_order", "yx"),
        ("allocation", "mixed"),
        ("bands", "audio"),
        ("theta", 0.0),
    ],
)
def test_bad_options_are_refused_when_the_encoding_is_built(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        create_encoding("rope_axial", DIM, HEADS, **{option: value})


@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
@pytest.mark.parametrize("head_dim", [9, 10, 7])
def test_head_dim_that_does_not_divide(name: str, head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 4 for 2 axes, got {head_dim}"):
        create_encoding(name, head_dim * 2, 2)


def test_shared_frequencies_and_fixed_frequencies() -> None:
    shared = create_encoding("rope_mixed", DIM, HEADS, per_head=False)
    assert shared.layers[0]["rope_mixed"].freqs.shape == (2, 1, D // 2)
    fixed = create_encoding("rope_mixed", DIM, HEADS, learned=False)
    assert not fixed.layers[0]["rope_mixed"].freqs.requires_grad


def test_frequencies_are_float32_even_when_the_default_dtype_is_not() -> None:
    torch.set_default_dtype(torch.bfloat16)
    assert RopeMixed(DIM, HEADS).freqs.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    assert RopeMixed(DIM, HEADS).freqs.dtype == torch.float64


@pytest.mark.parametrize("heads_in_table", [1, 3])
def test_views_of_a_fused_qkv_rotate_like_copies_of_them(heads_in_table: int) -> None:
    qkv = torch.randn(2, 7, 3, 3, 8, requires_grad=True)
    q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    table = rotation_from_angles(torch.randn(1, heads_in_table, 7, 4))
    weight = torch.randn(2, 3, 7, 8)
    torch.testing.assert_close(rotate(q, table), rotate(q.contiguous(), table))
    (ours,) = torch.autograd.grad((rotate(q, table) * rotate(k, table) * weight).sum(), qkv)
    (plain,) = torch.autograd.grad((rotate_plain(q, table) * rotate_plain(k, table) * weight).sum(), qkv)
    torch.testing.assert_close(ours, plain)
