"""Learned tables: identity, other grids, subsets, mixed batches, loading, export."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos import EncodingStack, Positions, create_encoding
from mmpos.checkpoints import learned_table
from mmpos.encodings.learned import Learned

D = 8


def stack_of(train_grid: tuple[int, ...] = (4, 6), num_prefix: int = 0, **options: Any) -> EncodingStack:
    return create_encoding("learned", dim=D, num_heads=2, train_grid=train_grid, num_prefix=num_prefix, **options)


def encoding_of(stack: EncodingStack) -> Learned:
    encoding = stack.shared["learned"]
    assert isinstance(encoding, Learned)
    return encoding


def added(stack: EncodingStack, positions: Positions, batch: int = 1) -> Tensor:
    """What the encoding adds to each token."""
    return stack.add_to_tokens(torch.zeros(batch, positions.num_tokens, D), positions)


def torch_resized(table: Tensor, size: tuple[int, int], mode: str = "bicubic", antialias: bool = True) -> Tensor:
    image = table.detach().movedim(-1, 0)[None]
    return F.interpolate(image, size=size, mode=mode, antialias=antialias)[0].movedim(0, -1).flatten(0, 1)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prefix", [0, 1, 5])
def test_the_table_itself_at_the_training_grid_bit_for_bit(num_prefix: int) -> None:
    stack = stack_of(num_prefix=num_prefix)
    x = torch.randn(2, num_prefix + 24, D)
    out = stack.add_to_tokens(x, Positions.grid(4, 6, num_prefix=num_prefix))
    assert torch.equal(out, x + encoding_of(stack).table)


@pytest.mark.parametrize("size", [(9, 3), (4, 7), (2, 2), (6, 4), (2, 12)])
@pytest.mark.parametrize(("mode", "antialias"), [("bicubic", True), ("bicubic", False), ("bilinear", True)])
def test_other_grids_are_resized_as_torch_resizes(size: tuple[int, int], mode: str, antialias: bool) -> None:
    stack = stack_of(num_prefix=2, mode=mode, antialias=antialias, std=1.0)
    rows = added(stack, Positions.grid(*size, num_prefix=2))[0]
    assert torch.equal(rows[:2], encoding_of(stack).table[:2])
    expected = torch_resized(encoding_of(stack).values(), size, mode, antialias)
    torch.testing.assert_close(rows[2:], expected, rtol=0, atol=3e-6)


def test_prefix_tokens_without_rows_are_left_alone() -> None:
    stack = stack_of(num_prefix=3, embed_prefix=False)
    assert encoding_of(stack).table.shape == (24, D)
    x = torch.randn(2, 3 + 24, D)
    for prefix in (3, 1):
        out = stack.add_to_tokens(x[:, 3 - prefix :], Positions.grid(4, 6, num_prefix=prefix))
        assert torch.equal(out[:, :prefix], x[:, 3 - prefix : 3])
        assert torch.equal(out[:, prefix:], x[:, 3:] + encoding_of(stack).table)


@pytest.mark.parametrize("size", [(4, 6), (5, 3)])
def test_subsets_get_the_rows_of_their_cells(size: tuple[int, int]) -> None:
    stack = stack_of(num_prefix=1)
    positions = Positions.grid(*size, num_prefix=1)
    full = added(stack, positions)[0]
    keep = torch.tensor([[7, 2, 5], [0, 11, 2]])
    few = added(stack, positions.take(keep), batch=2)
    for sample, cells in zip(few, keep, strict=True):
        assert torch.equal(sample[1:], full[1:][cells])
        assert torch.equal(sample[0], full[0])
    twice = positions.take(torch.tensor([3, 1, 8])).take(torch.tensor([2, 0]))
    assert torch.equal(added(stack, twice)[0, 1:], full[1:][[8, 3]])


def test_a_padded_batch_of_different_sizes_equals_each_alone() -> None:
    stack = stack_of(num_prefix=1, std=1.0)
    sizes = [(5, 3), (4, 6), (2, 7)]
    rows = added(stack, Positions.grids(sizes, num_prefix=1), batch=3)
    for sample, (h, w) in zip(rows, sizes, strict=True):
        alone = added(stack, Positions.grid(h, w, num_prefix=1))[0]
        torch.testing.assert_close(sample[: 1 + h * w], alone, rtol=0, atol=3e-6)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_free_points_read_between_the_cells(mode: str) -> None:
    stack = stack_of(mode=mode, antialias=False, std=1.0)
    coords, extent = torch.rand(2, 9, 2) * 5 - 0.5, (5.0, 4.0)
    grid = ((2 * coords + 1) / torch.tensor(extent) - 1).flip(-1)[:, None]
    image = encoding_of(stack).values().detach().movedim(-1, 0)[None].expand(2, -1, -1, -1)
    expected = F.grid_sample(image, grid, mode=mode, padding_mode="border", align_corners=False)[:, :, 0].mT
    ours = added(stack, Positions.points(coords, extent=extent), batch=2)
    torch.testing.assert_close(ours, expected, rtol=0, atol=3e-6)


def test_moved_coordinates_are_read_where_they_are() -> None:
    stack = stack_of(antialias=False, std=1.0)
    positions = Positions.grid(4, 6)
    same = added(stack, positions.with_coords(positions.coords + 0.0))
    torch.testing.assert_close(same, added(stack, positions), rtol=0, atol=1e-6)
    shifted = added(stack, positions.with_coords(positions.coords + torch.tensor([1.0, 0.0])))[0].unflatten(0, (4, 6))
    original = added(stack, positions)[0].unflatten(0, (4, 6))
    torch.testing.assert_close(shifted[:3], original[1:], rtol=0, atol=1e-6)
    torch.testing.assert_close(shifted[3], original[3], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("train", "size"), [((5,), (9,)), ((2, 3, 4), (3, 3, 2)), ((2, 3, 2, 2), (2, 4, 2, 1))])
def test_one_three_and_four_axes(train: tuple[int, ...], size: tuple[int, ...]) -> None:
    stack = stack_of(train, mode="linear", antialias=False)
    encoding = encoding_of(stack)
    assert torch.equal(added(stack, Positions.grid(*train))[0], encoding.table)
    table = encoding.values().detach()
    if len(train) == 3:
        image = table.movedim(-1, 0)[None]
        expected = F.interpolate(image, size=size, mode="trilinear")[0].movedim(0, -1).flatten(0, 2)
        torch.testing.assert_close(added(stack, Positions.grid(*size))[0], expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        encoding.table.fill_(2.0)
    rows = added(stack, Positions.grid(*size))
    torch.testing.assert_close(rows, torch.full((1, math.prod(size), D), 2.0))


def test_only_the_rows_that_are_used_get_a_gradient() -> None:
    stack = stack_of(num_prefix=1)
    positions = Positions.grid(4, 6, num_prefix=1).take(torch.tensor([3, 3, 20]))
    added(stack, positions).sum().backward()
    grad = encoding_of(stack).table.grad[:, 0]
    assert grad.nonzero().flatten().tolist() == [0, 4, 21]
    assert grad[4] == 2
    resized = stack_of(num_prefix=1)
    added(resized, Positions.grid(7, 5, num_prefix=1)).sum().backward()
    torch.testing.assert_close(encoding_of(resized).table.grad[1:].sum(), torch.tensor(7.0 * 5 * D))


def test_result_has_the_dtype_of_the_tokens_and_is_rounded_once() -> None:
    stack = stack_of(std=1.0)
    positions = Positions.grid(7, 5)
    exact = added(stack, positions)
    low = stack.add_to_tokens(torch.zeros(1, 35, D, dtype=torch.bfloat16), positions)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, exact.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(added(stack, positions), exact)


def test_initialisation_and_weight_decay() -> None:
    wide = create_encoding("learned", dim=64, num_heads=2, train_grid=(20, 30), std=0.5)
    assert float(wide.shared["learned"].table.detach().std()) == pytest.approx(0.5, rel=0.02)
    assert wide.no_weight_decay() == {"shared.learned.table"}
    assert [name for name, _ in wide.named_parameters()] == ["shared.learned.table"]


def test_meta_construction() -> None:
    with torch.device("meta"):
        stack = stack_of(num_prefix=1)
    stack.to_empty(device="cpu")
    stack.reset_parameters()
    assert encoding_of(stack).table_grid.tolist() == [4, 6]
    assert 0 < float(encoding_of(stack).table.detach().std()) < 0.1
    stack_of((6, 6), num_prefix=1).load_state_dict(stack.state_dict())


# -- loading ----------------------------------------------------------------------------------------------------------


def test_a_table_of_another_grid_is_resized_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    source, target = stack_of((4, 4), num_prefix=1), stack_of((6, 4))
    state = source.state_dict()
    with caplog.at_level(logging.INFO):
        target.load_state_dict(state)
    assert [record.message for record in caplog.records] == ["shared.learned: resized table 4x4 -> 6x4, prefix 1 -> 0"]
    expected = torch_resized(encoding_of(source).values(), (6, 4))
    torch.testing.assert_close(encoding_of(target).table.detach(), expected, rtol=0, atol=1e-6)
    assert encoding_of(target).table_grid.tolist() == [6, 4]
    assert state["shared.learned.table"].shape == (17, D)  # the caller's dict is not changed
    assert state["shared.learned.table_grid"].tolist() == [4, 4]


def test_equal_row_counts_of_different_grids_are_told_apart() -> None:
    source, target = stack_of((2, 8)), stack_of((4, 4))
    target.load_state_dict(source.state_dict())
    expected = torch_resized(encoding_of(source).values(), (4, 4))
    torch.testing.assert_close(encoding_of(target).table.detach(), expected, rtol=0, atol=1e-6)


def test_the_same_grid_loads_bit_for_bit_and_silently(caplog: pytest.LogCaptureFixture) -> None:
    source, target = stack_of(num_prefix=1), stack_of(num_prefix=1)
    with caplog.at_level(logging.INFO):
        target.load_state_dict(source.state_dict())
        target.load_state_dict(source.state_dict(), assign=True)
    assert not caplog.records
    assert torch.equal(encoding_of(target).table, encoding_of(source).table)


def test_loading_inside_a_larger_model_and_strictly() -> None:
    source, target = nn.Sequential(stack_of((4, 4)), nn.Linear(2, 2)), nn.Sequential(stack_of((5, 3)), nn.Linear(2, 2))
    assert not any(target.load_state_dict(source.state_dict()))
    with pytest.raises(RuntimeError, match="Missing key.*learned.table"):
        stack_of().load_state_dict({})


def test_weights_of_other_codes_without_a_grid() -> None:
    stack, table = stack_of((4, 4), num_prefix=1), torch.randn(17, D)
    stack.load_state_dict({"shared.learned.table": table})  # as many rows: the same grid
    assert torch.equal(encoding_of(stack).table, table)
    assert encoding_of(stack).table_grid.tolist() == [4, 4]
    with pytest.raises(RuntimeError, match=r"table_grid, the grid it was saved at, is missing; use .*learned_table"):
        stack_of((6, 4)).load_state_dict({"shared.learned.table": table})
    state = {"shared.learned.table": table, "shared.learned.table_grid": torch.tensor([9, 9])}
    with pytest.raises(RuntimeError, match=r"table: expected 81 rows .*grid \(9, 9\)"):
        stack_of((6, 4)).load_state_dict(state)


@pytest.mark.parametrize("shape", ["flat", "batched", "grid", "batched grid"])
def test_every_stored_form_of_a_reference_table(shape: str) -> None:
    prefix = 1 if "grid" not in shape else 0
    rows = torch.randn(prefix + 10, D)
    stored = {
        "flat": rows,
        "batched": rows[None],
        "grid": rows.unflatten(0, (2, 5)) if not prefix else rows,
        "batched grid": rows.unflatten(0, (2, 5))[None] if not prefix else rows,
    }[shape]
    state = learned_table(stored, None if "grid" in shape else (2, 5), prefix)
    assert torch.equal(state["table"], rows)
    assert state["table_grid"].tolist() == [2, 5]
    target = stack_of((4, 4), num_prefix=prefix)
    target.load_state_dict({f"shared.learned.{key}": value for key, value in state.items()})
    expected = torch_resized(rows[prefix:].unflatten(0, (2, 5)), (4, 4))
    torch.testing.assert_close(encoding_of(target).table[prefix:].detach(), expected, rtol=0, atol=2e-6)


def test_square_reference_tables_and_their_errors() -> None:
    assert learned_table(torch.zeros(1, 17, D), None, 1)["table_grid"].tolist() == [4, 4]
    with pytest.raises(ValueError, match="grid: 17 rows with 0 prefix rows are no square table"):
        learned_table(torch.zeros(1, 17, D))
    with pytest.raises(ValueError, match=r"table: expected 13 rows \(1 prefix \+ grid \(3, 4\)\)"):
        learned_table(torch.zeros(1, 17, D), (3, 4), 1)
    with pytest.raises(ValueError, match="table: expected"):
        learned_table(torch.zeros(1, 2, 5, D), (5, 2))


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: create_encoding("learned", dim=D, num_heads=2), r"train_grid: learned .*train_grid=\(height, width\)"),
        (lambda: stack_of(mode="area"), "mode: .*'area'"),
        (lambda: stack_of(resolution="index"), "resolution: learned supports"),
        (lambda: stack_of(colour=1), "learned has no option 'colour'"),
        (lambda: added(stack_of(num_prefix=1), Positions.grid(4, 6)), "num_prefix: .* rows for 1 prefix tokens, got 0"),
        (lambda: added(stack_of(), Positions.grid(4, 6, 1)), "positions: learned was built for 2 axes"),
        (lambda: added(stack_of(), Positions.points(torch.ones(3, 2))), "extent: learned needs the size of the field"),
        (lambda: stack_of().add_to_tokens(torch.zeros(1, 23, D), Positions.grid(4, 6)), "x: expected 24 tokens"),
        (lambda: stack_of(per_layer=True), "per_layer: learned acts on the tokens"),
    ],
)
def test_errors_say_what_to_change(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# -- compilation and export -------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """An image-shaped input, so that height and width can be symbolic."""

    def __init__(self, stack: EncodingStack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, dim = x.shape
        tokens = torch.cat([x.new_zeros(batch, 1, dim), x.flatten(1, 2)], dim=1)
        return self.stack.add_to_tokens(tokens, Positions.grid(height, width, num_prefix=1))


def check_sizes(candidate: Any, model: nn.Module) -> None:
    for size in ((4, 6), (5, 9), (2, 3), (6, 4)):
        x = torch.randn(2, *size, D)
        torch.testing.assert_close(candidate(x), model(x), rtol=0, atol=3e-6)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_export_with_dynamic_height_and_width(mode: str) -> None:
    model = Tokens(stack_of(num_prefix=1, std=1.0, mode=mode)).eval()
    sizes = {1: torch.export.Dim("height", min=2, max=64), 2: torch.export.Dim("width", min=2, max=64)}
    exported = torch.export.export(model, (torch.randn(2, 4, 6, D),), dynamic_shapes=(sizes,)).module()
    check_sizes(exported, model)


def test_compile_makes_one_graph_for_all_sizes() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = Tokens(stack_of(num_prefix=1, std=1.0)).eval()
    counter = CompileCounterWithBackend("eager")
    check_sizes(torch.compile(model, fullgraph=True, dynamic=True, backend=counter), model)
    assert counter.frame_count == 1
