"""``attend``: masks, biases, extra columns, the oracle against the fused path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmpos import EncodingStack, Facts, LayerState, PositionEncoding, Positions, attend, create_encoding
from mmpos.attention import fused_attention, plain_attention
from mmpos.testing import assert_close, qkv, seeded

HEADS, D, GRID = 2, 8, (2, 3)
TOKENS = 6


class Bias(PositionEncoding):
    """A float bias that is different for every head and pair."""

    facts = Facts(title="bias", source="test", plugs_into=("bias",))
    name = "bias"

    def logit_bias(self, q: Tensor, k: Tensor, prepared: Any) -> Tensor:
        return seeded(1, self.num_heads, q.shape[-2], q.shape[-2], seed=8).to(q.dtype)


class Columns(PositionEncoding):
    """Five more columns on queries and keys; the scale stays that of the head."""

    facts = Facts(title="columns", source="test", plugs_into=("qk",))
    name = "columns"

    def transform_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, x: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        more = seeded(2, *q.shape[:-1], 5, seed=9).to(q.dtype)
        return torch.cat([q, more[0]], -1), torch.cat([k, more[1]], -1), v


class Doubles(PositionEncoding):
    """Doubles the values on the way in and halves the output on the way out."""

    facts = Facts(title="doubles", source="test", plugs_into=("qkvo",))
    name = "doubles"

    def transform_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, x: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, 2 * v

    def transform_output(self, out: Tensor, v: Tensor, prepared: Any) -> Tensor:
        return out / 2


class Owner(PositionEncoding):
    """Replaces the attention by an average of the values."""

    facts = Facts(title="owner", source="test", plugs_into=("qkvo",))
    name = "owner"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, **options: Any) -> Tensor:
        return v.mean(-2, keepdim=True).expand_as(v)


def state_of(*classes: type[PositionEncoding], mask: Tensor | None = None, num_prefix: int = 0) -> LayerState:
    shared = {cls.name: cls(HEADS * D, HEADS) for cls in classes}
    stack = EncodingStack(list(shared), shared, [{}])
    return stack.prepare(Positions.grid(*GRID, mask=mask, num_prefix=num_prefix))[0]


def real_tokens() -> Tensor:
    return torch.tensor([[True] * 4 + [False] * 2, [True] * 6])


MASKS = {
    "none": None,
    "bool LL": torch.ones(TOKENS, TOKENS).tril().bool(),
    "bool per sample": seeded(2, 1, TOKENS, TOKENS, seed=3) > -1,
    "float": seeded(TOKENS, TOKENS, seed=4),
    "float per head": seeded(1, HEADS, TOKENS, TOKENS, seed=5).double(),
}


@pytest.mark.parametrize("classes", [(), (Bias,), (Columns,), (Bias, Columns), (Doubles, Bias)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mask", list(MASKS))
def test_masks_and_biases_add_up(classes: tuple[type[PositionEncoding], ...], padded: bool, mask: str) -> None:
    """Against the formula written out: logits of the wider vectors, plus bias, minus infinity where masked."""
    given = MASKS[mask]
    if given is not None and given.dtype == torch.bool:
        given = given | torch.eye(TOKENS).bool()
    q, k, v = qkv(2, HEADS, TOKENS, D)
    state = state_of(*classes, mask=real_tokens() if padded else None)
    logits = q @ k.mT
    if Columns in classes:
        more = seeded(2, 2, HEADS, TOKENS, 5, seed=9)
        logits = logits + more[0] @ more[1].mT
    logits = logits * D**-0.5
    if Bias in classes:
        logits = logits + seeded(1, HEADS, TOKENS, TOKENS, seed=8)
    if given is not None:
        logits = logits.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else logits + given.float()
    if padded:
        logits = logits.masked_fill(~real_tokens()[:, None, None], -torch.inf)
    expected = logits.softmax(-1).nan_to_num() @ v
    for plain in (False, True):
        assert_close(attend(q, k, v, state, mask=given, plain=plain), expected, terms=256, what=f"plain={plain}")


@pytest.mark.parametrize("plain", [False, True])
def test_a_query_that_may_attend_to_nothing_gives_zero(plain: bool) -> None:
    """A sample of padding only must not turn into NaN, nor make gradients NaN."""
    mask = torch.tensor([[True] * 6, [False] * 6])
    q, k, v = (t.requires_grad_() for t in qkv(2, HEADS, TOKENS, D))
    out = attend(q, k, v, state_of(Bias, mask=mask), plain=plain)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    out.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v) if t.grad is not None)


def test_values_and_output_are_transformed() -> None:
    q, k, v = qkv(2, HEADS, TOKENS, D)
    assert_close(attend(q, k, v, state_of(Doubles)), attend(q, k, v), terms=64)


def test_the_owner_of_the_attention_is_asked() -> None:
    q, k, v = qkv(2, HEADS, TOKENS, D)
    assert_close(attend(q, k, v, state_of(Bias, Owner)), v.mean(-2, keepdim=True).expand_as(v))


def test_two_owners_are_refused() -> None:
    class Second(Owner):
        name = "second"

    with pytest.raises(ValueError, match="owner and second each replace the whole attention"):
        state_of(Owner, Second)


def test_scale_is_an_argument() -> None:
    q, k, v = qkv(1, HEADS, TOKENS, D)
    for plain in (False, True):
        assert_close(attend(q, k, v, scale=0.7, plain=plain), (0.7 * q @ k.mT).softmax(-1) @ v, terms=64)


def test_more_channels_in_queries_than_in_values() -> None:
    q, k, _ = qkv(1, HEADS, TOKENS, 13)
    v = seeded(1, HEADS, TOKENS, 5)
    bias = seeded(1, 1, TOKENS, TOKENS)
    fused, plain = (f(q, k, v, bias=bias, scale=0.3) for f in (fused_attention, plain_attention))
    assert fused.shape == v.shape
    assert_close(fused, plain, terms=64)


def test_dropout_drops_and_keeps_the_mean() -> None:
    q, k, _ = qkv(1, 1, 64, D)
    ones = torch.ones(1, 1, 64, D)
    for plain in (False, True):
        out = attend(q, k, ones, dropout_p=0.5, plain=plain)
        assert out.std() > 0.01
        assert abs(float(out.mean()) - 1) < 0.1
        assert torch.equal(attend(q, k, ones, dropout_p=0.0, plain=plain).round(decimals=4), ones)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float_masks_and_biases_take_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    q, k, v = qkv(2, HEADS, TOKENS, D, dtype=dtype)
    for state in (None, state_of(Bias, mask=real_tokens())):
        out = attend(q, k, v, state, mask=seeded(TOKENS, TOKENS))
        assert out.dtype == dtype
        reference = attend(q.float(), k.float(), v.float(), state, mask=seeded(TOKENS, TOKENS))
        assert (out.float() - reference).abs().max() < 0.05


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((2, TOKENS), "mask.*None, None"),
        ((TOKENS, TOKENS + 1), "mask"),
        ((3, 1, TOKENS, TOKENS), "mask"),
        ((5, 5), "mask"),
    ],
)
@pytest.mark.parametrize("with_state", [False, True])
def test_masks_of_the_wrong_shape(shape: tuple[int, ...], match: str, with_state: bool) -> None:
    q, k, v = qkv(2, HEADS, TOKENS, D)
    with pytest.raises(ValueError, match=match):
        attend(q, k, v, state_of(Bias) if with_state else None, mask=torch.ones(shape).bool())


def test_padding_of_another_batch_is_named() -> None:
    q, k, v = qkv(1, HEADS, TOKENS, D)
    with pytest.raises(ValueError, match=r"positions.mask.*\(1, 2, 6, 6\), got \(2, 1, 1, 6\)"):
        attend(q, k, v, state_of(Bias, mask=real_tokens()))


def test_heads_must_be_split() -> None:
    x = seeded(2, TOKENS, HEADS * D)
    with pytest.raises(ValueError, match="split the heads"):
        attend(x, x, x)


def test_gradients_of_a_learned_bias_under_a_padding_mask() -> None:
    table = seeded(HEADS, TOKENS, TOKENS).double().requires_grad_()

    class Learned(Bias):
        def logit_bias(self, q: Tensor, k: Tensor, prepared: Any) -> Tensor:
            return table[None]

    state = state_of(Learned, mask=real_tokens())
    inputs = [t.requires_grad_() for t in qkv(2, HEADS, TOKENS, D, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda q, k, v, _: attend(q, k, v, state), (*inputs, table))


def test_several_encodings_act_together() -> None:
    positions = Positions.grid(*GRID, num_prefix=1)
    both = create_encoding(["rope_mixed", ("rope_axial", {"theta": 50.0})], HEADS * D, HEADS)
    q, k, v = qkv(1, HEADS, 7, D)
    state = both.prepare(positions)[0]
    mixed, axial = state.encodings
    first = [mixed.transform_qkv(q, k, v, state.prepared[0])[i] for i in (0, 1)]
    q2, k2, _ = axial.transform_qkv(*first, v, state.prepared[1])
    assert_close(attend(q, k, v, state), attend(q2, k2, v), terms=64)
