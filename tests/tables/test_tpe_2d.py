"""2D-TPE: branches, router, cache, entropy."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.functional.rotary import inverse_frequencies, rotate, rotation_from_angles
from mmpos.tables import (
    OrderRouter,
    RoutingEntropy,
    Table,
    TableTokens,
    Tpe2dAttention,
    branch_attention,
    mix_branches,
    order_mask,
    order_mask_mod,
    plan_orders,
    rotate_branches,
    routing_entropy,
    table_tokens,
)
from mmpos.tables.orders import OrderPlan
from mmpos.testing import assert_close, qkv, seeded

ROWS = [
    [3, Table([[1, 4], [2, 1], [1, 2]], separators=True), 4],
    [1, Table([[2, 1, 1]]), 2, Table([[1], [3]]), 1],
    [5],
]


def batch(rows: list = ROWS) -> tuple[TableTokens, OrderPlan]:
    tokens = table_tokens(rows)
    return tokens, plan_orders(tokens.orders(), 8, mask=tokens.mask, dtype=torch.float64)


def layer(seed: int = 0, **options: int) -> Tpe2dAttention:
    torch.manual_seed(seed)
    module = Tpe2dAttention(32, 4, num_kv_heads=2, **options).double()
    for parameter in module.router.parameters():
        torch.nn.init.normal_(parameter, std=0.8)
    return module


def causal(module: Tpe2dAttention, x: Tensor, position: Tensor | None = None) -> Tensor:
    """Plain causal rotary attention, written out."""
    length = x.shape[1]
    position = torch.arange(length) if position is None else position
    freqs = inverse_frequencies(4, 10000.0, dtype=torch.float64)
    table = rotation_from_angles((position[:, None].double() * freqs)[None, None], layout="half")
    q, k, v = (proj(x).unflatten(-1, (-1, 8)).transpose(1, 2) for proj in (module.q_proj, module.k_proj, module.v_proj))
    q, k, v = rotate(q, table), rotate(k, table).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return module.o_proj(out.transpose(1, 2).flatten(2))


def test_sorted_form_is_the_mask_form() -> None:
    tokens, plan = batch()
    module = layer()
    x = seeded(3, tokens.mask.shape[1], 32, dtype=torch.float64)
    fast, plain = module(x, plan), module(x, plan, plain=True)
    assert_close(fast, plain)
    assert float(fast[~tokens.mask].detach().abs().max()) == 0


def test_gradients_of_both_forms_agree() -> None:
    tokens, plan = batch()
    x = seeded(3, tokens.mask.shape[1], 32, dtype=torch.float64)
    grads = []
    for plain in (False, True):
        leaf = x.clone().requires_grad_()
        layer()(leaf, plan, plain=plain).square().sum().backward()
        grads.append(leaf.grad)
    assert_close(grads[0], grads[1], terms=1024)


def test_without_a_table_it_is_causal_rotary_attention() -> None:
    x = seeded(1, 7, 32, dtype=torch.float64)
    for seed in (0, 1):
        module = layer(seed)
        same = torch.arange(7).expand(2, 1, 7)
        plan = plan_orders(same, 8, dtype=torch.float64)
        assert plan.orders.shape[0] == 1  # nothing is computed twice
        assert_close(module(x, plan), causal(module, x))
    # a sample without a table in a batch that has one takes the long way to the same result
    tokens, plan = batch()
    x = seeded(3, tokens.mask.shape[1], 32, dtype=torch.float64)
    assert_close(module(x, plan)[2, :5], causal(module, x[2:, :5])[0])


@pytest.mark.parametrize("order", [0, 1])
def test_a_router_forced_to_one_order_reads_in_that_order(order: int) -> None:
    tokens, plan = batch(ROWS[:1])
    module = layer()
    with torch.no_grad():
        module.router.gate_3.weight.zero_()
        module.router.gate_3.bias.copy_(torch.tensor([1e4, -1e4])[[order, 1 - order]])
    x = seeded(1, tokens.mask.shape[1], 32, dtype=torch.float64)
    visit = tokens.orders()[order, 0].argsort()
    expected = torch.empty_like(x)
    expected[:, visit] = causal(module, x[:, visit])
    assert_close(module(x, plan), expected)


def test_padding_changes_nothing() -> None:
    tokens, plan = batch()
    module = layer()
    x = seeded(3, tokens.mask.shape[1], 32, dtype=torch.float64)
    whole = module(x, plan)
    for sample, row in enumerate(ROWS):
        count = int(tokens.mask[sample].sum())
        _, alone = batch([row])
        assert_close(module(x[sample : sample + 1, :count], alone)[0], whole[sample, :count])


def test_shift_of_all_positions_changes_nothing() -> None:
    tokens, plan = batch()
    moved = plan_orders(tokens.orders() + 1000, 8, mask=tokens.mask, dtype=torch.float64)
    x = seeded(3, tokens.mask.shape[1], 32, dtype=torch.float64)
    module = layer()
    assert_close(module(x, moved), module(x, plan), terms=2**16)


def test_decoding_is_one_shot() -> None:
    tokens, plan = batch()
    module = layer()
    steps, counts = 4, tokens.mask.sum(1)
    x = seeded(3, tokens.mask.shape[1], 32, dtype=torch.float64)
    new = seeded(3, steps, 32, seed=1, dtype=torch.float64)
    out, cache = module.prefill(x, plan)
    assert_close(out, module(x, plan))
    assert cache.keys.shape[0] * cache.keys[0].numel() + cache.values.numel() == 3 * cache.values.numel()
    first, cache = module.decode(new[:, :1], cache)
    second, cache = module.decode(new[:, 1:3], cache)  # several at once
    third, cache = module.decode(new[:, 3:], cache)
    got = torch.cat([first, second, third], 1)
    assert torch.equal(cache.following, (counts + steps).expand(2, 3))
    for sample, row in enumerate(ROWS):
        whole = torch.cat([x[sample, : counts[sample]], new[sample]])[None]
        _, longer = batch([[*row, steps]])
        assert_close(got[sample], module(whole, longer)[0, -steps:])


def test_what_a_token_can_see() -> None:
    tokens, plan = batch([[2, Table([[1, 1, 1], [1, 1, 1]]), 2]])
    module = layer()
    x = seeded(1, 10, 32, dtype=torch.float64)
    before = module(x, plan)
    slot = 5  # second row, first column: place 5 by rows and 3 by columns
    changed = x.clone()
    changed[0, slot] += 1
    seen = (module(changed, plan) - before).abs().amax(-1)[0] > 1e-9
    rows, columns = tokens.orders()[:, 0]
    assert torch.equal(seen, (rows >= rows[slot]) | (columns >= columns[slot]))
    assert seen.tolist() == [False, False, False, True, True, True, True, True, True, True]


def test_order_mask_and_mask_mod_agree() -> None:
    orders = table_tokens([[1, Table([[1, 2], [1, 1]]), 1]]).orders()
    dense = order_mask(orders)
    length = orders.shape[-1]
    q, k = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    for order in (0, 1):
        assert torch.equal(order_mask_mod(orders[order])(torch.zeros_like(q), q, q, k), dense[order, 0, 0])


def test_router_sizes_and_slices() -> None:
    assert sum(p.numel() for p in OrderRouter(64).parameters()) == 33_794
    assert sum(p.numel() for p in OrderRouter(128).parameters()) == 133_122
    router = OrderRouter(8, hidden=6, bias=False).double()
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    x = seeded(2, 5, 24, dtype=torch.float64)
    weights = router(x)
    assert weights.shape == (2, 5, 3, 2)
    assert_close(weights.sum(-1), torch.ones(2, 5, 3, dtype=torch.float64))
    assert_close(weights[:, :, 1:2], router(x[..., 8:16]))  # heads share the gates
    assert OrderRouter(8).bfloat16()(torch.zeros(1, 2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_entropy_limits_and_regions() -> None:
    inside = torch.tensor([[True, True, False], [False, False, False]])
    even = torch.full((2, 3, 4, 2), 0.5, dtype=torch.float64)
    assert float(routing_entropy(even, inside)) == pytest.approx(math.log(2))
    sure = torch.tensor([1.0, 0.0]).expand(2, 3, 4, 2)
    assert float(routing_entropy(sure, inside)) == 0
    mixed = even.clone()
    mixed[0, 1] = torch.tensor([1.0, 0.0], dtype=torch.float64)
    mixed[:, 2] = torch.tensor([0.9, 0.1], dtype=torch.float64)  # outside
    assert float(routing_entropy(mixed, inside)) == pytest.approx(math.log(2) / 2)
    assert float(routing_entropy(even, torch.zeros_like(inside))) == 0


def test_entropy_is_collected_and_trains_the_router_only() -> None:
    tokens, plan = batch()
    model = torch.nn.ModuleList([layer(0), layer(1)])
    x = seeded(3, tokens.mask.shape[1], 32, dtype=torch.float64)
    with RoutingEntropy.of(model, tokens.in_table) as entropy:
        h = model[1](model[0](x, plan).detach(), plan)
    loss = entropy.loss()
    assert len(entropy.layers) == 2
    assert 0 < float(loss.detach()) < math.log(2)
    loss.backward()
    assert all(p.grad is not None for p in model[1].router.parameters())
    assert model[1].q_proj.weight.grad is None
    model[1](h, plan)
    assert len(entropy.layers) == 2  # the hooks are gone
    with RoutingEntropy.of(model, torch.zeros(1, 4, dtype=torch.bool)) as nothing:
        model[0](x[:1, :4], plan_orders(torch.arange(4).expand(2, 1, 4), 8, dtype=torch.float64))
    assert float(nothing.loss()) == 0


def test_own_frequencies_apply_to_both_orders() -> None:
    tokens, plan = batch(ROWS[:1])
    half = plan_orders(tokens.orders(), 8, freqs=plan.freqs / 2, dtype=torch.float64)
    double = plan_orders(tokens.orders() * 2, 8, freqs=plan.freqs / 2, dtype=torch.float64)
    q, k, v = qkv(1, 4, tokens.mask.shape[1], 8, dtype=torch.float64)
    outs = [branch_attention(rotate_branches(q, p), rotate_branches(k, p), v, p) for p in (plan, half, double)]
    assert_close(outs[2], outs[0])
    assert float((outs[1] - outs[0]).abs().amax((1, 2, 3, 4)).min()) > 1e-3


def test_errors_name_the_argument() -> None:
    orders = torch.arange(4).expand(2, 1, 4)
    with pytest.raises(ValueError, match="orders: expected integers"):
        plan_orders(orders.float(), 8)
    with pytest.raises(ValueError, match="orders: expected distinct"):
        plan_orders(torch.zeros(2, 1, 4, dtype=torch.long), 8)
    with pytest.raises(ValueError, match="mask: expected padding after"):
        plan_orders(orders, 8, mask=torch.tensor([[False, True, True, True]]))
    with pytest.raises(ValueError, match=r"mask: expected \(B, N\)"):
        plan_orders(orders, 8, mask=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="head_dim"):
        plan_orders(orders, 7)
    with pytest.raises(ValueError, match="freqs"):
        plan_orders(orders, 8, freqs=torch.ones(3))
    with pytest.raises(ValueError, match="num_kv_heads"):
        Tpe2dAttention(32, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="dim: expected 4 heads"):
        Tpe2dAttention(36, 4)
    with pytest.raises(ValueError, match="head_dim=8"):
        OrderRouter(8)(torch.zeros(1, 2, 12))
    with pytest.raises(ValueError, match="weights: expected"):
        mix_branches(torch.zeros(2, 1, 1, 3, 4), None)
    with pytest.raises(ValueError, match="in_table"):
        routing_entropy(torch.ones(1, 3, 2, 2), torch.ones(1, 4, dtype=torch.bool))
    q = torch.zeros(1, 1, 2, 5, 8)
    with pytest.raises(ValueError, match="make the plan"):
        branch_attention(q, q, q[0], plan_orders(orders, 8))


def test_half_precision_stays_near_the_exact_result() -> None:
    tokens, plan = batch()
    module = layer()
    x = seeded(3, tokens.mask.shape[1], 32, dtype=torch.float64)
    exact = module(x, plan)
    half = module.bfloat16()(x.bfloat16(), plan_orders(tokens.orders(), 8, mask=tokens.mask))
    assert half.dtype == torch.bfloat16
    assert float((half.double() - exact).detach().abs().max()) < 0.05
