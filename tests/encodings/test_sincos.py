"""The sine-cosine encoding as a module: default layout, resolution rules, prefix, subsets, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos import EncodingStack, Positions, create_encoding
from mmpos.functional.sincos import SINCOS_PRESETS, sincos

D = 16


def stack_of(dim: int = D, **options: Any) -> EncodingStack:
    return create_encoding("sincos", dim=dim, num_heads=2, **options)


def added(stack: EncodingStack, positions: Positions, batch: int = 1, dim: int = D) -> Tensor:
    return stack.add_to_tokens(torch.zeros(batch, positions.num_tokens, dim), positions)


def by_hand(row: Tensor, col: Tensor, dim: int = D, base: float = 10000.0) -> Tensor:
    """[sin row, cos row, sin column, cos column]."""
    freqs = base ** (-torch.arange(dim // 4) / (dim // 4))
    row, col = row[..., None] * freqs, col[..., None] * freqs
    return torch.cat([row.sin(), row.cos(), col.sin(), col.cos()], dim=-1)


def rows_and_columns(height: int, width: int) -> tuple[Tensor, Tensor]:
    row, col = torch.meshgrid(torch.arange(height).float(), torch.arange(width).float(), indexing="ij")
    return row.flatten(), col.flatten()


@pytest.mark.parametrize("num_prefix", [0, 1, 5])
@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_default_layout_and_zero_prefix(num_prefix: int, base: float) -> None:
    values = added(stack_of(base=base), Positions.grid(3, 5, num_prefix=num_prefix))[0]
    assert torch.equal(values[:num_prefix], torch.zeros(num_prefix, D))
    torch.testing.assert_close(values[num_prefix:], by_hand(*rows_and_columns(3, 5), base=base))


@pytest.mark.parametrize("preset", sorted(SINCOS_PRESETS))
def test_presets(preset: str) -> None:
    positions = Positions.grid(3, 5)
    expected = sincos(positions.coords, D, **SINCOS_PRESETS[preset])
    assert torch.equal(added(stack_of(preset=preset), positions), expected)


def test_switches_go_before_the_preset() -> None:
    positions = Positions.grid(3, 5)
    mae = added(stack_of(preset="mae"), positions)
    assert torch.equal(added(stack_of(axis_order="xy"), positions), mae)
    assert torch.equal(added(stack_of(preset="timm", layout="block", axis_order="xy"), positions), mae)
    assert not torch.allclose(mae, added(stack_of(), positions))
    uneven = added(stack_of(widths=[4, 12]), positions)
    torch.testing.assert_close(uneven, sincos(positions.coords, D, widths=[4, 12]))


def test_index_rule_keeps_the_spacing_and_runs_beyond() -> None:
    small = added(stack_of(), Positions.grid(3, 5))[0].unflatten(0, (3, 5))
    large = added(stack_of(), Positions.grid(6, 7))[0].unflatten(0, (6, 7))
    assert torch.equal(large[:3, :5], small)


@pytest.mark.parametrize("align", ["corner", "centre"])
def test_rescaled_rule_samples_the_same_field_more_finely(align: str) -> None:
    stack = stack_of(resolution="rescaled", train_grid=(3, 5), align=align)
    values = added(stack, Positions.grid(6, 15))[0]
    row, col = rows_and_columns(6, 15)
    shift = 0.0 if align == "corner" else 0.5
    expected = by_hand((row + shift) / 2 - shift, (col + shift) / 3 - shift)
    torch.testing.assert_close(values, expected, rtol=0, atol=2e-6)
    assert torch.equal(added(stack, Positions.grid(3, 5)), added(stack_of(), Positions.grid(3, 5)))


def test_interpolated_rule_resizes_the_table_of_the_training_grid() -> None:
    stack = stack_of(resolution="interpolated", train_grid=(3, 5), preset="mae")
    table = added(stack_of(preset="mae"), Positions.grid(3, 5))[0]
    image = table.unflatten(0, (3, 5)).movedim(-1, 0)[None]
    expected = F.interpolate(image, size=(4, 9), mode="bicubic", antialias=True)[0].movedim(0, -1).flatten(0, 1)
    torch.testing.assert_close(added(stack, Positions.grid(4, 9))[0], expected, rtol=0, atol=2e-6)
    assert torch.equal(added(stack, Positions.grid(3, 5))[0], table)


def test_the_rule_can_be_changed_later() -> None:
    stack = stack_of(train_grid=(3, 5))
    positions = Positions.grid(6, 10)
    default = added(stack, positions)
    stack.set_resolution("rescaled")
    assert not torch.allclose(added(stack, positions), default)
    stack.set_resolution("index")
    assert torch.equal(added(stack, positions), default)


def test_training_grid_may_come_with_the_positions() -> None:
    stack = stack_of(resolution="rescaled")
    given = added(stack_of(resolution="rescaled", train_grid=(3, 5)), Positions.grid(6, 10))
    assert torch.equal(added(stack, Positions.grid(6, 10, train_grid=(3, 5))), given)


@pytest.mark.parametrize("rule", ["index", "rescaled", "interpolated"])
def test_subsets_and_padded_batches(rule: str) -> None:
    stack = stack_of(resolution=rule, train_grid=(3, 5))
    positions = Positions.grid(4, 7, num_prefix=1)
    full = added(stack, positions)[0]
    keep = torch.tensor([[9, 2], [0, 27]])
    few = added(stack, positions.take(keep), batch=2)
    torch.testing.assert_close(few[:, 1:], full[1:][keep], rtol=0, atol=1e-6)
    sizes = [(4, 7), (2, 3)]
    padded = added(stack, Positions.grids(sizes, num_prefix=1), batch=2)
    for sample, (h, w) in zip(padded, sizes, strict=True):
        alone = added(stack, Positions.grid(h, w, num_prefix=1))[0]
        torch.testing.assert_close(sample[: 1 + h * w], alone, rtol=0, atol=3e-6)


def test_free_points_and_offset() -> None:
    coords = torch.rand(2, 7, 2) * 9
    values = added(stack_of(offset=1.0), Positions.points(coords), batch=2)
    torch.testing.assert_close(values, by_hand(coords[..., 0] + 1, coords[..., 1] + 1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("axes", [1, 3, 4])
def test_other_numbers_of_axes(axes: int) -> None:
    sizes = (3, 4, 2, 2)[:axes]
    values = added(stack_of(24, axes=axes), Positions.grid(*sizes), dim=24)[0]
    assert torch.equal(values, sincos(Positions.grid(*sizes).coords[0], 24))
    assert len({tuple(row.tolist()) for row in values}) == len(values)  # every place is told from every other


def test_values_are_computed_in_float32_and_rounded_once() -> None:
    positions = Positions.grid(40, 30)
    exact = added(stack_of(), positions)
    low = stack_of().to(torch.bfloat16).add_to_tokens(torch.zeros(1, 1200, D, dtype=torch.bfloat16), positions)
    assert torch.equal(low, exact.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(added(stack_of(), positions), exact)


def test_nothing_is_stored() -> None:
    assert not stack_of(train_grid=(3, 5)).state_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stack_of(18), "dim: .* multiple of 4 channels, got 18"),
        (lambda: stack_of(16, axes=3), "dim: .* multiple of 6 channels, got 16"),
        (lambda: stack_of(preset="vit"), "preset: expected one of .*'vit'"),
        (lambda: stack_of(mode="area"), "mode: .*'area'"),
        (lambda: stack_of(resolution="ntk"), "resolution: sincos supports"),
        (lambda: added(stack_of(resolution="rescaled"), Positions.grid(3, 5)), "train_grid: .*not known"),
        (lambda: added(stack_of(resolution="interpolated"), Positions.grid(3, 5)), "train_grid: .*not known"),
        (lambda: added(stack_of(layout="woven"), Positions.grid(3, 5)), "layout: .*'woven'"),
        (lambda: added(stack_of(), Positions.grid(3, 5, 2)), "positions: sincos was built for 2 axes"),
        (lambda: stack_of().add_to_tokens(torch.zeros(1, 14, D), Positions.grid(3, 5)), "x: expected 15 tokens"),
    ],
)
def test_errors_say_what_to_change(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


class Tokens(nn.Module):
    def __init__(self, stack: EncodingStack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        return self.stack.add_to_tokens(x.flatten(1, 2), Positions.grid(height, width))


@pytest.mark.parametrize("rule", ["index", "rescaled", "interpolated"])
def test_export_with_dynamic_height_and_width(rule: str) -> None:
    model = Tokens(stack_of(resolution=rule, train_grid=(3, 5))).eval()
    sizes = {1: torch.export.Dim("height", min=2, max=64), 2: torch.export.Dim("width", min=2, max=64)}
    exported = torch.export.export(model, (torch.randn(2, 3, 5, D),), dynamic_shapes=(sizes,)).module()
    for size in ((3, 5), (4, 9), (2, 2)):
        x = torch.randn(2, *size, D)
        torch.testing.assert_close(exported(x), model(x), rtol=0, atol=3e-6)
