"""``flex_attend`` against ``attend``: every encoding that adds something to logits, masks, padding, subsets."""

from __future__ import annotations

import pytest
import torch

from mmpos import Positions, attend, create_encoding
from mmpos.encodings import encoding_class, list_encodings
from mmpos.flex import flex_attend, score_mod
from mmpos.testing import qkv, seeded

HEADS, D, GRID = 4, 16, (2, 3)
BIASED = [name for name in list_encodings() if "bias" in encoding_class(name).facts.plugs_into]
OPTIONS = {"irpe": {"on": "qk"}}


def make(name: str):
    stack = create_encoding(name, HEADS * D, HEADS, 2, num_prefix=1, train_grid=GRID, **OPTIONS.get(name, {})).double()
    for number, parameter in enumerate(stack.parameters()):
        parameter.data = seeded(*parameter.shape, seed=number).to(parameter.dtype)
    return stack.eval()


def both(stack, positions, **options):
    q, k, v = (t.double() for t in qkv(2, HEADS, positions.num_tokens, D))
    state = stack.prepare(positions)[1]
    with torch.no_grad():
        return flex_attend(q, k, v, state, **options), attend(q, k, v, state, **options), attend(q, k, v)


@pytest.mark.parametrize("name", BIASED)
def test_every_bias_is_the_same(name):
    stack = make(name)
    for positions in (Positions.grid(*GRID, num_prefix=1), Positions.grid(3, 2, num_prefix=1)):
        flex, expected, plain = both(stack, positions)
        assert torch.allclose(flex, expected, atol=1e-10)
        assert (expected - plain).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["swin_rpb", "swin_cpb", "alibi_2d", "lookhere", "irpe"])
def test_masks_padding_and_subsets(name):
    stack = make(name)
    keep = torch.tensor([[4, 0, 3], [3, 2, 1]])
    subset = Positions.grid(*GRID, num_prefix=1).take(keep)
    flex, expected, _ = both(stack, subset)
    assert torch.allclose(flex, expected, atol=1e-10)
    real = torch.tensor([[True] * 6, [True, False, True, True, False, True]])
    padded = Positions.grid(*GRID, num_prefix=1, mask=real)
    allowed = torch.eye(7, dtype=torch.bool) | (seeded(7, 7, seed=5) > 0)
    allowed[4] = False  # a query that may attend to nothing
    for mask in (None, allowed, seeded(2, 1, 7, 7, seed=6).double(), real.new_ones(7, 1)):
        flex, expected, _ = both(stack, padded, mask=mask)
        assert torch.allclose(flex, expected, atol=1e-10)
    assert not torch.allclose(both(stack, padded, mask=allowed)[1], both(stack, padded)[1])


def test_what_turns_queries_and_what_changes_values_takes_part():
    positions = Positions.grid(*GRID, num_prefix=1)
    stack = create_encoding(["rope_mixed", "alibi_2d", "lepe"], HEADS * D, HEADS, 2).double()
    flex, expected, _ = both(stack, positions)
    assert torch.allclose(flex, expected, atol=1e-10)
    assert torch.allclose(*both(stack, positions, scale=0.5)[:2], atol=1e-10)
    none = create_encoding("none", HEADS * D, HEADS, 2)
    assert score_mod(*qkv(2, HEADS, 7, D)[:2], none.prepare(positions)[0]) is None


def test_tables_make_no_bias_of_all_pairs(monkeypatch):
    """What it is for: tables are read pair by pair."""
    for name in ("swin_rpb", "swin_cpb"):
        stack = make(name)
        state = stack.prepare(Positions.grid(*GRID, num_prefix=1))[0]
        monkeypatch.setattr(type(state.encodings[0]), "logit_bias", None)
        assert score_mod(*qkv(2, HEADS, 7, D)[:2], state) is not None


def test_a_compiled_kernel_is_used_as_given():
    seen = {}

    def kernel(q, k, v, *, score_mod, scale):
        seen.update(score_mod=score_mod, scale=scale)
        return v

    q, k, v = qkv(2, HEADS, 6, D)
    state = create_encoding("alibi_2d", HEADS * D, HEADS).prepare(Positions.grid(*GRID))[0]
    assert flex_attend(q, k, v, state, kernel=kernel) is v
    assert seen["scale"] == D**-0.5
    assert seen["score_mod"] is not None


def test_gradients_reach_the_table():
    stack = make("swin_rpb")
    q, k, v = (t.double() for t in qkv(1, HEADS, 7, D))
    table = stack.layers[0]["swin_rpb"].table
    gradients = []
    for function in (flex_attend, attend):
        table.grad = None
        function(q, k, v, stack.prepare(Positions.grid(*GRID, num_prefix=1))[0]).square().sum().backward()
        gradients.append(table.grad)
    assert torch.allclose(*gradients, atol=1e-10)
    assert gradients[0].abs().max() > 1e-4


def test_methods_that_need_the_weights_are_refused():
    stack = create_encoding("irpe", HEADS * D, HEADS, on="v")
    with pytest.raises(ValueError, match="irpe needs the attention weights themselves"):
        flex_attend(*qkv(1, HEADS, 6, D), stack.prepare(Positions.grid(*GRID))[0])
