"""Polyphase anchoring: circular shifts move the anchored image by whole strides, and change no answer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos import Positions, attend, create_encoding
from mmpos.functional.polyphase import polyphase_anchor, polyphase_index
from mmpos.models.polyphase import PolyphaseAnchored

STRIDE, HEIGHT, WIDTH = 4, 8, 12


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_every_circular_shift_gives_the_same_image_up_to_strides(p):
    x = torch.randn(1, 3, HEIGHT, WIDTH)
    anchored, index = polyphase_anchor(x, STRIDE, p)
    assert torch.equal(anchored, x.roll((-int(index[0, 0]), -int(index[0, 1])), (2, 3)))
    assert polyphase_index(anchored, STRIDE, p).tolist() == [[0, 0]]
    multiples = {
        anchored.roll((i, j), (2, 3)).numpy().tobytes()
        for i in range(0, HEIGHT, STRIDE)
        for j in range(0, WIDTH, STRIDE)
    }
    for dy in range(HEIGHT):
        for dx in range(WIDTH):
            other, _ = polyphase_anchor(x.roll((dy, dx), (2, 3)), STRIDE, p)
            assert other.contiguous().numpy().tobytes() in multiples


@settings(max_examples=25, deadline=None)
@given(stride=st.integers(1, 4), rows=st.integers(1, 3), columns=st.integers(1, 3), seed=st.integers(0, 99))
def test_the_strongest_component_of_each_sample(stride, rows, columns, seed):
    x = torch.randn(3, 2, rows * stride, columns * stride, generator=torch.Generator().manual_seed(seed))
    for sample, (i, j) in enumerate(polyphase_index(x, stride).tolist()):
        norms = torch.stack([x[sample, :, a::stride, b::stride].norm() for a in range(stride) for b in range(stride)])
        assert torch.isclose(norms[i * stride + j], norms.max())


def test_a_repeated_pattern_has_no_other_start():
    assert polyphase_index(torch.ones(1, 1, 4, 6), 2).tolist() == [[0, 0]]
    stripes = torch.tensor([0.0, 1.0, 2.0, 3.0] * 2).expand(1, 1, 4, 8)
    assert polyphase_index(stripes, 4).tolist() == [[0, 3]]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    stride=st.integers(2, 3),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    seed=st.integers(0, 999),
    down=st.integers(0, 8),
    right=st.integers(0, 8),
)
def test_icons_with_ties_are_anchored_alike_wherever_they_begin(stride, rows, columns, seed, down, right):
    """Few grey levels, so that most images have equal components; the published rule loses some of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 2, (1, 2, rows * stride, columns * stride), generator=generator).float()
    one = polyphase_anchor(x, stride)[0][0]
    two = polyphase_anchor(x.roll((down, right), (2, 3)), stride)[0][0]
    steps = [range(0, size, stride) for size in one.shape[1:]]
    assert any(torch.equal(two, one.roll((a, b), (1, 2))) for a in steps[0] for b in steps[1])


def test_two_points_on_a_diagonal_show_what_the_first_component_loses():
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 1, 1] = x[0, 0, 2, 2] = 1
    same = {"picture": 0, "first": 0}
    for ties in same:
        one = polyphase_anchor(x, 2, ties=ties)[0][0]
        for down in range(4):
            for right in range(4):
                two = polyphase_anchor(x.roll((down, right), (2, 3)), 2, ties=ties)[0][0]
                same[ties] += any(torch.equal(two, one.roll((a, b), (1, 2))) for a in (0, 2) for b in (0, 2))
    assert same == {"picture": 16, "first": 8}
    with pytest.raises(ValueError, match="ties: expected one of picture, first"):
        polyphase_index(x, 2, ties="last")


def test_gradients_pass_to_the_pixels():
    x = torch.randn(2, 1, 4, 6, requires_grad=True)
    anchored, _ = polyphase_anchor(x, 2)
    anchored.square().sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach())


def test_wrong_sizes():
    with pytest.raises(ValueError, match="multiples of the stride 4"):
        polyphase_anchor(torch.zeros(1, 1, 6, 8), 4)
    with pytest.raises(ValueError, match="p: expected"):
        polyphase_anchor(torch.zeros(1, 1, 8, 8), 4, 0.0)


class TinyViT(torch.nn.Module):
    """Patches, two attention layers with CPE between them, mean pooling, seven classes."""

    def __init__(self, padding: str) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 16, STRIDE, STRIDE)
        self.stack = create_encoding("cpe", 16, 2, 2, padding=padding)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(2))
        self.head = torch.nn.Linear(16, 7)

    def forward(self, images):
        maps = self.patches(images)
        positions = Positions.grid(*maps.shape[-2:])
        x = maps.flatten(2).transpose(1, 2)
        for layer, (linear, state) in enumerate(zip(self.qkv, self.stack.prepare(positions), strict=True)):
            q, k, v = linear(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            x = x + attend(q, k, v, state).transpose(1, 2).flatten(2)
            x = self.stack.mix_tokens(layer, x, positions)
        return self.head(x.mean(1))


@pytest.mark.parametrize(
    ("padding", "anchored", "invariant"), [("circular", True, True), ("circular", False, False), ("zeros", True, False)]
)
def test_circular_shifts_never_change_the_answer_of_an_anchored_model(padding, anchored, invariant):
    torch.manual_seed(1)
    model = TinyViT(padding).double().eval()
    model = PolyphaseAnchored(model, STRIDE) if anchored else model
    images = torch.randn(8, 3, HEIGHT, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = model(images)
        worst = max(
            float((model(images.roll((dy, dx), (2, 3))) - expected).abs().max())
            for dy in range(STRIDE + 1)
            for dx in range(STRIDE + 1)
        )
    assert (worst < 1e-10) == invariant
