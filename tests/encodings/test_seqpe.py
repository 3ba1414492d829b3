"""SeqPE: digits, the transformer over them, and the ways its vectors enter attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpos import Positions, attend, create_encoding
from mmpos.checkpoints import seqpe_encoder
from mmpos.encodings.seqpe import DigitEncoder
from mmpos.functional.digits import digit_count, from_digits, to_digits
from mmpos.testing import qkv, seeded

SMALL = {"width": 16, "heads": 2}


def build(dim: int = 16, heads: int = 2, depth: int = 1, **options: object):
    torch.manual_seed(0)
    stack = create_encoding("seqpe", dim, heads, depth, **{**SMALL, **options}).double().eval()
    with torch.no_grad():  # far from the tiny start, so that every part matters
        for parameter in stack.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return stack, stack.shared["seqpe"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9999), st.integers(0, 9999)), min_size=1, max_size=5))
def test_digits_are_those_of_the_written_number(points: list[tuple[int, int]]) -> None:
    coords = torch.tensor(points)
    digits, written = to_digits(coords, 4)
    for row, kept, point in zip(digits.tolist(), written.tolist(), points, strict=True):
        assert "".join(map(str, row)) == f"{point[0]:04d}{point[1]:04d}"
        assert "".join(str(d) for d, k in zip(row[:4], kept[:4], strict=True) if k) == str(point[0])
    assert torch.equal(from_digits(digits, 2), coords)


def test_digit_count() -> None:
    assert [digit_count(n) for n in (1, 10, 11, 100, 101)] == [1, 1, 2, 2, 3]
    with pytest.raises(ValueError, match="max_index"):
        digit_count(0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask_padding", [True, False])
def test_the_last_slot_alone_equals_the_whole_sequence(causal: bool, mask_padding: bool) -> None:
    torch.manual_seed(0)
    encoder = DigitEncoder(2, 3, 16, 5, heads=2, causal=causal, mask_padding=mask_padding, dropout=0.0).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    digits, written = to_digits(torch.tensor([[0, 12], [345, 6], [7, 890]]), 3)
    x = encoder.digit[digits] + encoder.slot + encoder.axis.repeat_interleave(3, 0)
    x = torch.cat([x, encoder.collector.expand(3, 1, -1)], 1)
    allowed = torch.ones(7, 7, dtype=torch.bool).tril() if causal else torch.ones(7, 7, dtype=torch.bool)
    allowed = allowed.expand(3, -1, -1)
    if mask_padding:
        allowed = allowed & F.pad(written, (0, 1), value=True)[:, None]
    for block in encoder.blocks:
        q, k, v = block.qkv(block.norm1(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        logits = (q @ k.mT / 8**0.5).masked_fill(~allowed[:, None], -1e30)  # finite: rows of padding are empty
        x = x + block.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + block.down(F.gelu(block.up(block.norm2(x)), approximate="tanh"))
    torch.testing.assert_close(encoder(digits, written), encoder.out(encoder.norm(x[:, -1])))


@pytest.mark.parametrize("causal", [True, False])
def test_every_digit_matters_even_when_causal(causal: bool) -> None:
    _, encoding = build(axes=2, max_index=1000, causal=causal)
    base = torch.tensor([[123, 456]])
    reference = encoding.vectors(base)
    for axis in range(2):
        for power in (1, 10, 100):
            other = base.clone()
            other[0, axis] += power
            assert (encoding.vectors(other) - reference).abs().max() > 1e-4


def test_hidden_padding_makes_the_leading_digits_irrelevant() -> None:
    _, encoding = build(axes=1, mask_padding=True)
    before = encoding.vectors(torch.tensor([[7]]))
    with torch.no_grad():
        encoding.encoder.slot[0] += 5.0  # the slot of the unwritten digit
    torch.testing.assert_close(encoding.vectors(torch.tensor([[7]])), before)
    assert (encoding.vectors(torch.tensor([[17]])) - encoding.vectors(torch.tensor([[7]]))).abs().max() > 1e-4


@pytest.mark.parametrize("apply", ["attn_mul", "attn_add", "attn_scalar", "rotary"])
@pytest.mark.parametrize("multi_head", [True, False])
@pytest.mark.parametrize("projection", ["layer", "none"])
@pytest.mark.parametrize("plain", [True, False])
def test_attention_is_the_formula(apply: str, multi_head: bool, projection: str, plain: bool) -> None:
    stack, encoding = build(depth=2, apply=apply, multi_head=multi_head, projection=projection, num_prefix=1)
    positions = Positions.grid(2, 3, num_prefix=1)
    q, k, v = qkv(2, 2, 7, 8, dtype=torch.float64)
    pe = torch.cat([encoding.prefix, encoding.vectors(positions.coords[0])])
    heads = 2 if multi_head else 1
    for layer, state in enumerate(stack.prepare(positions)):
        if apply == "rotary":
            sin, cos = pe.unflatten(-1, (heads, 8)).transpose(0, 1).chunk(2, -1)
            turned = [
                torch.stack([t[..., ::2] * cos - t[..., 1::2] * sin, t[..., 1::2] * cos + t[..., ::2] * sin], -1)
                for t in (q, k)
            ]
            logits = turned[0].flatten(-2) @ turned[1].flatten(-2).mT
        else:
            both = encoding.sides[layer](pe) if projection == "layer" else pe
            one, other = both.unflatten(-1, (2, heads, 8)).permute(1, 2, 0, 3)
            logits = {
                "attn_mul": (q * one) @ (k * other).mT,
                "attn_add": (q + one) @ (k + other).mT,
                "attn_scalar": q @ k.mT + one @ other.mT,
            }[apply]
        out = attend(q, k, v, state, plain=plain)
        torch.testing.assert_close(out, (logits / 8**0.5).softmax(-1) @ v)


def test_multiplying_by_one_is_no_encoding() -> None:
    stack, encoding = build()
    with torch.no_grad():
        encoding.sides[0].weight.zero_()
        encoding.sides[0].bias.fill_(1.0)
    q, k, v = qkv(1, 2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(attend(q, k, v, stack.prepare(Positions.grid(2, 3))[0]), attend(q, k, v))


def test_added_to_the_tokens() -> None:
    stack, encoding = build(apply="input_add", num_prefix=1)
    x = seeded(2, 7, 16, dtype=torch.float64)
    out = stack.add_to_tokens(x, Positions.grid(2, 3, num_prefix=1)) - x
    torch.testing.assert_close(out[0, 0], encoding.prefix[0])
    torch.testing.assert_close(out[1, 1:], encoding.vectors(Positions.grid(2, 3).coords[0]))
    assert all(prepared is None for prepared in stack.prepare(Positions.grid(2, 3, num_prefix=1))[0].prepared)


def test_places_shared_within_a_batch_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, encoding = build()
    counts = []
    original = encoding.encoder.forward
    monkeypatch.setattr(encoding.encoder, "forward", lambda d, w: counts.append(len(d)) or original(d, w))
    coords = torch.stack([Positions.grid(2, 3).coords[0], Positions.grid(3, 2).coords[0]])
    out = encoding.vectors(coords)
    assert counts == [8]
    torch.testing.assert_close(out[1], encoding.vectors(coords[1]))


def test_index_extends_and_interpolated_resizes() -> None:
    stack, encoding = build(apply="input_add", train_grid=(2, 3))
    big = Positions.grid(4, 6)
    extended = encoding.placed_vectors(big)[0]
    torch.testing.assert_close(extended, encoding.vectors(big.coords[0]))
    stack.set_resolution("interpolated")
    table = encoding.vectors(Positions.grid(2, 3).coords[0]).T.reshape(1, 16, 2, 3)
    expected = F.interpolate(table, size=(4, 6), mode="bicubic", align_corners=False)[0].flatten(1).T
    torch.testing.assert_close(encoding.placed_vectors(big)[0], expected)


def test_padding() -> None:
    stack, _ = build()
    positions = Positions.grids([(2, 3), (3, 4)])
    q, k, v = qkv(2, 2, 12, 8, dtype=torch.float64)
    out = attend(q, k, v, stack.prepare(positions)[0])
    alone = attend(*(t[:1, :, :6] for t in (q, k, v)), stack.prepare(Positions.grid(2, 3))[0])
    torch.testing.assert_close(out[:1, :, :6], alone)
    strange = positions.with_coords(torch.where(positions.mask[..., None], positions.coords, -7.5))
    torch.testing.assert_close(attend(q, k, v, stack.prepare(strange)[0])[:1, :, :6], alone)


def test_dropout_acts_in_training_only() -> None:
    _, encoding = build(dropout=0.5)
    coords = torch.tensor([[1, 2]])
    assert torch.equal(encoding.vectors(coords), encoding.vectors(coords))
    encoding.train()
    assert not torch.equal(encoding.vectors(coords), encoding.vectors(coords))


def test_reference_weights_are_transposed_and_checked() -> None:
    dense = torch.randn(4, 12)
    ours = seqpe_encoder({"transformers.1.attn.c_attn.weight": dense, "dim_token_embed": torch.zeros(2, 1, 4)})
    assert torch.equal(ours["blocks.1.qkv.weight"], dense.T)
    assert ours["axis"].shape == (2, 4)
    with pytest.raises(ValueError, match="wpe"):
        seqpe_encoder({"wpe.weight": dense})


def test_bad_input_says_what_to_change() -> None:
    for options, text in (
        ({"apply": "mul"}, "apply"),
        ({"projection": "once"}, "projection"),
        ({"heads": 3}, "heads"),
        ({"apply": "rotary", "dim": 6}, "head_dim"),
    ):
        with pytest.raises(ValueError, match=text):
            build(**options)
    stack, encoding = build()
    for wrong in ([[0.5, 1.0]], [[-1.0, 0.0]], [[100.0, 0.0]]):
        with pytest.raises(ValueError, match="max_index"):
            encoding.vectors(torch.tensor(wrong))
    with pytest.raises(ValueError, match="num_prefix=1"):
        stack.prepare(Positions.grid(2, 3, num_prefix=1))
