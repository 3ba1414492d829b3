"""Fuzzy table: reads between cells, its noise, and grids of other sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos import Positions, create_encoding

GRID = (4, 6)


def build(**options: object):
    torch.manual_seed(0)
    stack = create_encoding("fuzzy", 8, 2, train_grid=GRID, std=1.0, **options).double()
    return stack, stack.shared["fuzzy"]


def noise(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) - 0.5


def test_evaluation_on_the_training_grid_is_the_table() -> None:
    stack, encoding = build(num_prefix=1)
    stack.eval()
    out = stack.add_to_tokens(torch.zeros(2, 25, 8).double(), Positions.grid(*GRID, num_prefix=1))
    assert torch.equal(out[:, 1:], encoding.table.flatten(0, 1).expand(2, -1, -1))
    torch.testing.assert_close(out[:, :1], encoding.prefix.expand(2, -1, -1))


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding", ["border", "zeros"])
@pytest.mark.parametrize("grid", [GRID, (7, 5), (3, 9)])
def test_equals_grid_sample(align_corners: bool, padding: str, grid: tuple[int, int]) -> None:
    stack, encoding = build(align_corners=align_corners, padding=padding)
    positions = Positions.grid(*grid, dtype=torch.float64)
    offsets = noise(3, positions.num_tokens, 2)
    ours = encoding.embed(positions, offsets)
    at = positions.coords + offsets
    size = torch.tensor(grid).double()
    places = 2 * at / (size - 1) - 1 if align_corners else 2 * (at + 0.5) / size - 1
    expected = F.grid_sample(
        encoding.table.permute(2, 0, 1).expand(3, -1, -1, -1), places.flip(-1)[:, :, None], mode="bilinear",
        padding_mode=padding, align_corners=align_corners,
    )[..., 0].mT  # fmt: skip
    torch.testing.assert_close(ours, expected)


def test_noise_is_uniform_seeded_and_of_its_own_for_each_sample() -> None:
    stack, encoding = build()
    positions = Positions.grid(30, 40)
    encoding.generator = torch.Generator().manual_seed(5)
    first = encoding.offsets(positions, 4)
    encoding.generator.manual_seed(5)
    assert torch.equal(encoding.offsets(positions, 4), first)
    assert first.shape == (4, 1200, 2)
    assert first.abs().max() <= 0.5
    assert first.abs().max() > 0.499
    assert first.mean().abs() < 0.01
    assert first.var().item() == pytest.approx(1 / 12, rel=0.03)
    assert not torch.equal(first[0], first[1])
    encoding.per_sample = False
    assert encoding.offsets(positions, 4).shape[0] == 1


def test_training_jitters_and_zero_offsets_are_evaluation() -> None:
    stack, encoding = build()
    positions, x = Positions.grid(*GRID), torch.zeros(2, 24, 8).double()
    jittered = stack.add_to_tokens(x, positions)
    assert not torch.allclose(jittered[0], jittered[1])
    still = encoding.add_to_tokens(x, positions, torch.zeros(1, 24, 2))
    stack.eval()
    assert torch.equal(stack.add_to_tokens(x, positions), still)
    assert torch.equal(build(jitter=0.0)[0].train().add_to_tokens(x, positions), still)


def test_the_expectation_is_a_blurred_table() -> None:
    _, encoding = build()
    # mean of a bilinear read over one cell: weights 1/8, 3/4, 1/8 along each axis, the border repeated
    table = encoding.table.permute(2, 0, 1)[None]
    kernel = torch.tensor([1 / 8, 3 / 4, 1 / 8]).double()
    blurred = F.conv2d(
        F.pad(table, (1, 1, 1, 1), mode="replicate").transpose(0, 1), (kernel[:, None] * kernel)[None, None]
    )[:, 0].permute(1, 2, 0)
    ticks = (torch.arange(40).double() + 0.5) / 40 - 0.5
    grid = torch.stack(torch.meshgrid(ticks, ticks, indexing="ij"), -1).reshape(-1, 1, 2).expand(-1, 24, -1)
    mean = encoding.embed(Positions.grid(*GRID, dtype=torch.float64), grid).mean(0)
    torch.testing.assert_close(mean, blurred.flatten(0, 1), rtol=0, atol=1e-3)


def test_the_gradient_reaches_the_four_neighbours() -> None:
    _, encoding = build()
    offsets = torch.zeros(1, 24, 2).double()
    offsets[0, 8] = torch.tensor([0.25, -0.3])  # cell (1, 2)
    (encoding.embed(Positions.grid(*GRID), offsets)[0, 8].sum()).backward()
    touched = encoding.table.grad[..., 0]
    expected = torch.zeros(GRID).double()
    expected[1, 2], expected[1, 1], expected[2, 2], expected[2, 1] = 0.75 * 0.7, 0.75 * 0.3, 0.25 * 0.7, 0.25 * 0.3
    torch.testing.assert_close(touched, expected, rtol=1e-6, atol=1e-9)


def test_pruned_and_padded_tokens_keep_their_vectors() -> None:
    stack, encoding = build()
    stack.eval()
    keep = torch.tensor([5, 0, 17])
    whole = encoding.embed(Positions.grid(5, 7))
    torch.testing.assert_close(encoding.embed(Positions.grid(5, 7).take(keep)), whole[:, keep])
    mixed = encoding.embed(Positions.grids([(5, 7), (2, 3)]))
    torch.testing.assert_close(mixed[0], whole[0].to(mixed.dtype))
    torch.testing.assert_close(mixed[1, :6], encoding.embed(Positions.grid(2, 3))[0])


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="train_grid"):
        create_encoding("fuzzy", 8, 2)
    for options, text in (({"padding": "wrap"}, "padding"), ({"jitter": -1.0}, "jitter")):
        with pytest.raises(ValueError, match=text):
            build(**options)
    with pytest.raises(ValueError, match="extent"):
        build()[1].embed(Positions.points(torch.zeros(3, 2)))
