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


def test_the_first_component_wins_a_tie():
    assert polyphase_index(torch.ones(1, 1, 4, 6), 2).tolist() == [[0, 0]]


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
