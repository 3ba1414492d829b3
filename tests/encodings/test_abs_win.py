"""Absolute win: a resized global table plus a tiled window table."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmpos import Positions, create_encoding
from mmpos.checkpoints import abs_win_tables

DIM = 6


def make(train_grid: tuple[int, int] = (3, 5), **options: object):
    torch.manual_seed(0)
    stack = create_encoding("abs_win", DIM, 2, train_grid=train_grid, **{"window": (2, 3), "init_std": 1.0, **options})
    return stack, stack.shared["abs_win"]


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("grid", [(6, 9), (2, 3), (4, 6)])
def test_sum_of_the_resized_and_the_tiled_table(grid, antialias):
    _, encoding = make(antialias=antialias)
    table = encoding.table.detach().movedim(-1, 0)[None]
    resized = F.interpolate(table, grid, mode="bicubic", align_corners=False, antialias=antialias)
    tiled = encoding.window.detach().movedim(-1, 0)[None].tile(1, 1, grid[0] // 2, grid[1] // 3)
    expected = (resized + tiled).flatten(2).transpose(1, 2)
    assert torch.allclose(encoding.values(Positions.grid(*grid)), expected, atol=2e-5)


def test_a_window_apart_only_the_global_table_differs():
    _, encoding = make()
    values = encoding.values(Positions.grid(6, 9)).detach()[0].view(6, 9, DIM)
    without = make(window=None)[1]
    without.load_state_dict({"table": encoding.table})
    plain = without.values(Positions.grid(6, 9)).detach()[0].view(6, 9, DIM)
    assert torch.allclose(values[2:] - values[:-2], plain[2:] - plain[:-2], atol=1e-5)
    with torch.no_grad():
        encoding.table.fill_(0.5)
    values = encoding.values(Positions.grid(6, 9)).detach()[0].view(6, 9, DIM)
    assert torch.allclose(values[:, 3:], values[:, :-3], atol=1e-6)


def test_the_training_grid_is_not_resized_and_overhang_is_cropped():
    _, encoding = make()
    values = encoding.values(Positions.grid(3, 5)).detach()[0].view(3, 5, DIM)  # not a multiple of the window
    tiled = encoding.window.detach().tile(2, 2, 1)[:3, :5]
    assert torch.equal(values, encoding.table.detach() + tiled)


def test_tiling_the_pretrained_table():
    _, encoding = make(window=None, resolution="tile")
    values = encoding.values(Positions.grid(7, 8)).detach()[0].view(7, 8, DIM)
    assert torch.equal(values, encoding.table.detach().tile(3, 2, 1)[:7, :8])


def test_prefix_tokens_get_nothing_and_kept_tokens_their_own():
    stack, encoding = make()
    positions = Positions.grid(4, 6, num_prefix=2)
    x = torch.randn(2, 26, DIM)
    out = stack.add_to_tokens(x, positions)
    assert torch.equal(out[:, :2], x[:, :2])
    keep = torch.tensor([[3, 20, 7], [1, 0, 23]])
    part = stack.add_to_tokens(torch.zeros(2, 5, DIM), positions.take(keep))
    values = encoding.values(positions)[0]
    assert torch.allclose(part[:, 2:], values[keep], atol=1e-6)


def test_tables_load_from_hiera_and_sam2():
    for name in ("pos_embed_win", "pos_embed_window"):
        state = {"pos_embed": torch.randn(1, DIM, 3, 5), name: torch.randn(1, DIM, 2, 3)}
        _, encoding = make()
        encoding.load_state_dict(abs_win_tables(state))
        assert torch.equal(encoding.window[1, 2], state[name][0, :, 1, 2])
    with pytest.raises(ValueError, match="expected pos_embed"):
        abs_win_tables({})
    with pytest.raises(ValueError, match=r"expected \(1, D, height, width\)"):
        abs_win_tables({"pos_embed": torch.zeros(1, 15, DIM)})


def test_errors():
    with pytest.raises(ValueError, match="train_grid: abs_win"):
        create_encoding("abs_win", DIM, 2)
    with pytest.raises(ValueError, match="window: expected 2 positive sizes"):
        make(window=(8,))
    stack, _ = make()
    with pytest.raises(ValueError, match="whole coordinates only"):
        stack.add_to_tokens(torch.zeros(1, 4, DIM), Positions.points(torch.rand(4, 2), extent=(2, 2)))
