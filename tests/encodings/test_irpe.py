"""iRPE against its definition: every pair reads the table row of its offset."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos import Positions, attend, create_encoding
from mmpos.checkpoints import irpe_tables
from mmpos.encodings import _slices
from mmpos.functional.buckets import BUCKET_METHODS, largest_bucket, piecewise_index

HEADS, WIDTH = 2, 4
grids = st.tuples(st.integers(1, 5), st.integers(1, 6))


def make(num_prefix: int = 0, **options: object):
    torch.manual_seed(0)
    stack = create_encoding("irpe", HEADS * WIDTH, HEADS, num_prefix=num_prefix, **options).double()
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter)
    return stack, stack.layers[0]["irpe"]


def content(count: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return tuple(torch.randn(3, batch, HEADS, count, WIDTH, generator=generator, dtype=torch.float64))


def row(offset: tuple[float, float], method: str, ratio: float, table: int) -> int:
    """Row of one offset, in plain Python numbers."""
    largest = largest_bucket(ratio)
    g = lambda x: int(piecewise_index(torch.tensor(float(x)), ratio, 2 * ratio, 8 * ratio))  # noqa: E731
    y, x = offset
    if method == "euclidean":
        return g(round((y * y + x * x) ** 0.5)) + largest
    if method == "quantization":
        return g(y * y + x * x) + largest
    if method == "cross":
        return g(offset[table]) + largest
    return (g(y) + largest) * (2 * largest + 1) + g(x) + largest


def definition(encoding, positions: Positions, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formulas of the paper, one pair at a time."""
    prefix, count = positions.num_prefix, positions.num_tokens
    tables = encoding.axes if encoding.method == "cross" else 1
    out = []
    for sample in range(q.shape[0]):
        coords = positions.coords[sample % positions.coords.shape[0]].tolist()
        rows = torch.full((tables, count, count), encoding.buckets)
        for i, a in enumerate(coords):
            for j, b in enumerate(coords):
                for t in range(tables):
                    offset = (a[0] - b[0], a[1] - b[1])
                    rows[t, prefix + i, prefix + j] = row(offset, encoding.method, encoding.ratio, t)
        scale = WIDTH**-0.5
        logits = scale * q[sample] @ k[sample].mT
        values = torch.zeros(HEADS, count, count, WIDTH, dtype=q.dtype)
        for t in range(tables):
            if encoding.mode == "bias":
                if encoding.table_k is not None:
                    logits = logits + encoding.table_k[t][:, rows[t]]
                if encoding.table_q is not None:
                    logits = logits + encoding.table_q[t][:, rows[t].mT]
                continue
            if encoding.table_k is not None:
                logits = logits + torch.einsum(
                    "hid,hdij->hij", scale * q[sample], spread(encoding.table_k[t])[..., rows[t]]
                )
            if encoding.table_q is not None:
                picked = spread(encoding.table_q[t])[..., rows[t].mT]  # row of (key, query)
                logits = logits + torch.einsum("hjd,hdij->hij", scale * k[sample], picked)
            if encoding.table_v is not None:
                values = values + spread(encoding.table_v[t])[:, rows[t]]
        weights = logits.softmax(-1)
        out.append(weights @ v[sample] + torch.einsum("hij,hijd->hid", weights, values))
    return torch.stack(out)


def spread(table: Tensor) -> Tensor:
    return table.expand(HEADS, *table.shape[1:])


@pytest.mark.parametrize("method", BUCKET_METHODS)
@pytest.mark.parametrize(
    ("mode", "on"), [("contextual", "qkv"), ("contextual", "q"), ("contextual", "kv"), ("bias", "qk")]
)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    grid=grids,
    prefix=st.integers(0, 2),
    shared=st.booleans(),
    ratio=st.sampled_from([1.5, 1.9, 3.0, 20.0]),
    data=st.data(),
)
def test_every_path_is_the_definition(method, mode, on, grid, prefix, shared, ratio, data):
    stack, encoding = make(prefix, method=method, mode=mode, on=on, shared_heads=shared, ratio=ratio)
    positions = Positions.grid(*grid, num_prefix=prefix)
    count = positions.num_placed
    if data.draw(st.booleans(), label="subset"):
        keep = torch.stack(
            [torch.randperm(count, generator=torch.Generator().manual_seed(s))[: (count + 1) // 2] for s in (1, 2)]
        )
        positions = positions.take(keep)
    elif data.draw(st.booleans(), label="points"):
        positions = Positions.points(positions.coords + 0.3, num_prefix=prefix)
    q, k, v = content(positions.num_tokens)
    state = stack.prepare(positions)[0]
    expected = definition(encoding, positions, q, k, v)
    assert torch.allclose(attend(q, k, v, state), expected, atol=1e-10)  # with gradients: in one piece
    with torch.no_grad():
        assert torch.allclose(attend(q, k, v, state), expected, atol=1e-10)


@pytest.mark.parametrize("on", ["qkv", "qk", "k", "q"])
@pytest.mark.parametrize("method", ["product", "cross"])
@pytest.mark.parametrize("elements", [1, 60, 10**6])
def test_slices_of_any_size_agree(method, on, elements, monkeypatch):
    monkeypatch.setattr(_slices, "SLICE_ELEMENTS", elements)
    stack, encoding = make(1, method=method, on=on, shared_heads=False)
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [1] * 6, [0] * 6]).bool()
    places = [Positions.grid(2, 3, num_prefix=1, mask=mask)]
    places.append(
        Positions.grid(3, 3, num_prefix=1).take(torch.tensor([[0, 1, 4, 5, 7, 8], [1, 2, 3, 4, 6, 7]] * 2)[:3])
    )
    for positions in places:
        q, k, v = content(7, batch=3)
        state = stack.prepare(positions)[0]
        whole = attend(q, k, v, state, plain=True)
        pairs = torch.ones(7, 7, dtype=torch.bool).tril()
        added = torch.randn(3, 1, 7, 7, dtype=q.dtype)
        with torch.no_grad():
            sliced = encoding.logit_bias_slices(q, k, state.prepared[0])
            assert (sliced is None) == ("v" in on)
            assert sliced is None or (len(list(sliced)) == 1) == (elements == 10**6)
            assert torch.allclose(attend(q, k, v, state), whole, atol=1e-12)
            for extra in (pairs, added):
                masked = attend(q, k, v, state, mask=extra)
                assert torch.allclose(masked, attend(q, k, v, state, mask=extra, plain=True), atol=1e-12)
                assert (masked - whole).abs().max() > 1e-3


@pytest.mark.parametrize("others", [["alibi_2d"], ["swin_rpb", "rope_axial"], ["lepe"]])
def test_slices_go_with_other_encodings(others, monkeypatch):
    """Biases of other encodings, turned queries and changed outputs meet the terms of each slice."""
    monkeypatch.setattr(_slices, "SLICE_ELEMENTS", 1)
    torch.manual_seed(0)
    specs = [("irpe", {"on": "qk"}), *others]
    stack = create_encoding(specs, 8 * HEADS, HEADS, num_prefix=1, train_grid=(2, 3)).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        q, k, v = torch.randn(3, 2, HEADS, 7, 8, dtype=torch.float64).unbind(0)
        state = stack.prepare(Positions.grid(2, 3, num_prefix=1))[0]
        assert torch.allclose(attend(q, k, v, state), attend(q, k, v, state, plain=True), atol=1e-12)


def test_terms_with_gradients_and_under_tracing_come_in_one_piece():
    stack, encoding = make(1, on="k")
    q, k, v = content(7)
    prepared = stack.prepare(Positions.grid(2, 3, num_prefix=1))[0].prepared[0]
    assert encoding.logit_bias_slices(q, k, prepared) is None  # the table learns
    with torch.no_grad():
        assert encoding.logit_bias_slices(q, k, prepared) is not None
    bias, _ = make(1, on="k", mode="bias")
    with torch.no_grad():  # one bias for all samples is small as it is
        one = bias.layers[0]["irpe"]
        assert one.logit_bias_slices(q, k, bias.prepare(Positions.grid(2, 3, num_prefix=1))[0].prepared[0]) is None


def test_zero_tables_are_plain_attention():
    stack = create_encoding("irpe", 8, HEADS, num_prefix=1, on="qkv").double()
    q, k, v = content(7)
    state = stack.prepare(Positions.grid(2, 3, num_prefix=1))[0]
    assert torch.allclose(attend(q, k, v, state), attend(q, k, v), atol=1e-12)


@pytest.mark.parametrize("method", BUCKET_METHODS)
def test_shared_tables_are_tables_of_each_head_repeated(method):
    shared, one = make(1, method=method, on="qkv")
    each, other = make(1, method=method, on="qkv", shared_heads=False)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(getattr(one, name).expand_as(parameter))
    positions = Positions.grid(3, 4, num_prefix=1)
    q, k, v = content(13)
    expected = attend(q, k, v, shared.prepare(positions)[0])
    assert torch.allclose(attend(q, k, v, each.prepare(positions)[0]), expected, atol=1e-12)


@pytest.mark.parametrize("mode", ["contextual", "bias"])
def test_cross_is_the_product_of_an_outer_sum(mode):
    on = "qkv" if mode == "contextual" else "qk"
    _, cross = make(1, method="cross", mode=mode, on=on, ratio=2.0)
    product_stack, product = make(1, method="product", mode=mode, on=on, ratio=2.0)
    with torch.no_grad():
        for name, parameter in product.named_parameters():
            tables = getattr(cross, name)
            tables = tables.movedim(-2, -1) if name == "table_v" else tables  # rows last
            placed = (tables[0][..., :-1, None] + tables[1][..., None, :-1]).flatten(-2)
            joined = torch.cat([placed, tables.sum(0)[..., -1:]], -1)[None]
            parameter.copy_(joined.movedim(-1, -2) if name == "table_v" else joined)
    cross_stack, source = make(1, method="cross", mode=mode, on=on, ratio=2.0)
    source.load_state_dict(cross.state_dict())
    positions = Positions.grid(5, 3, num_prefix=1)
    q, k, v = content(16)
    expected = attend(q, k, v, product_stack.prepare(positions)[0])
    assert torch.allclose(attend(q, k, v, cross_stack.prepare(positions)[0]), expected, atol=1e-12)


def test_a_bias_without_log_buckets_is_the_bias_of_swin():
    grid = (4, 3)
    stack, encoding = make(0, method="product", mode="bias", ratio=4.0, shared_heads=False)
    swin = create_encoding("swin_rpb", HEADS * WIDTH, HEADS, train_grid=grid).double()
    side = 2 * largest_bucket(4.0) + 1
    centre = side // 2
    square = encoding.table_k[0].unflatten(-1, (side, side))
    table = square[:, centre - grid[0] + 1 : centre + grid[0], centre - grid[1] + 1 : centre + grid[1]]
    swin.layers[0]["swin_rpb"].load_state_dict({"table": table})
    positions = Positions.grid(*grid)
    q, k, v = content(12)
    expected = attend(q, k, v, swin.prepare(positions)[0])
    assert torch.allclose(attend(q, k, v, stack.prepare(positions)[0]), expected, atol=1e-12)


@pytest.mark.parametrize("method", ["product", "cross", "euclidean"])
def test_equal_value_rows_add_exactly_that_vector(method):
    stack, encoding = make(1, method=method, on="v")
    c = torch.randn(WIDTH, dtype=torch.float64)
    with torch.no_grad():
        encoding.table_v.copy_(c.expand_as(encoding.table_v) / encoding.table_v.shape[0])
    q, k, v = content(7)
    state = stack.prepare(Positions.grid(2, 3, num_prefix=1))[0]
    assert torch.allclose(attend(q, k, v, state), attend(q, k, v) + c, atol=1e-12)


@pytest.mark.parametrize("method", BUCKET_METHODS)
def test_gradients(method):
    stack, encoding = make(1, method=method, on="qkv", ratio=1.5)
    positions = Positions.grid(2, 2, num_prefix=1)
    q, k, v = (t[:1].requires_grad_() for t in content(5))

    def output(q, k, v, *tables):
        state = stack.prepare(positions)[0]
        return torch.func.functional_call(_Attend(encoding, state), dict(zip(names, tables, strict=True)), (q, k, v))

    names = [f"encoding.{name}" for name, _ in encoding.named_parameters()]
    assert torch.autograd.gradcheck(output, (q, k, v, *encoding.parameters()), atol=1e-6)


class _Attend(torch.nn.Module):
    def __init__(self, encoding, state):
        super().__init__()
        self.encoding, self.state = encoding, state

    def forward(self, q, k, v):
        return attend(q, k, v, self.state)


def test_another_number_of_prefix_tokens_is_not_a_stale_index():
    stack, encoding = make(2)
    q, k, v = content(14)
    for prefix in (1, 2, 1):
        positions = Positions.grid(3, 4, num_prefix=prefix)
        part = tuple(t[:, :, : 12 + prefix] for t in (q, k, v))
        assert torch.allclose(attend(*part, stack.prepare(positions)[0]), definition(encoding, positions, *part))


def test_a_long_grid_is_not_taken_for_a_square():
    stack, encoding = make(1, on="qkv")
    positions = Positions.grid(3, 7, num_prefix=1)
    q, k, v = content(22)
    assert torch.allclose(attend(q, k, v, stack.prepare(positions)[0]), definition(encoding, positions, q, k, v))


def test_rescaled_coordinates_meet_the_trained_buckets():
    stack, _ = make(0, train_grid=(3, 4), resolution="rescaled", ratio=3.0, mode="bias")
    fine = stack.prepare(Positions.grid(6, 8))[0]
    coarse = stack.prepare(Positions.grid(3, 4))[0]
    encoding = stack.layers[0]["irpe"]
    q = torch.zeros(1, HEADS, 1, WIDTH)
    bias = encoding.logit_bias(q, q, fine.prepared[0]).unflatten(-1, (6, 8)).unflatten(-3, (6, 8))
    expected = encoding.logit_bias(q, q, coarse.prepared[0]).unflatten(-1, (3, 4)).unflatten(-3, (3, 4))
    assert torch.equal(bias[:, :, ::2, ::2, ::2, ::2], expected)


def test_twelve_layers_share_one_small_index():
    """4096 + 1 tokens: the reference keeps 671 MB in each layer."""
    stack = create_encoding("irpe", 64, 1, depth=12, num_prefix=1, on="qkv")
    states = stack.prepare(Positions.grid(64, 64, num_prefix=1))
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for s in states for t in s.prepared[0].index
    }
    assert len(states) == 12
    assert 4097**2 <= sum(storages.values()) < 100e6
    assert len(storages) == 1
    assert not list(stack.buffers())


@pytest.mark.parametrize(("on", "mode"), [("k", "contextual"), ("qkv", "contextual"), ("qk", "bias")])
@pytest.mark.parametrize("method", ["product", "euclidean"])
def test_training_keeps_the_index_of_all_layers_once(method, on, mode):
    """Backward passes read the one small index; a wider copy in each layer would be 134 MB at 4096 + 1 tokens."""
    options = {"on": on, "mode": mode, "method": method, "ratio": 2.0}
    stack = create_encoding("irpe", HEADS * WIDTH, HEADS, depth=12, num_prefix=1, **options)
    positions = Positions.grid(9, 8, num_prefix=1)
    q, k, v = (x.float().requires_grad_() for x in content(73))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() and tensor.numel() >= 73**2:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    states = stack.prepare(positions)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = [attend(q, k, v, state) for state in states]
    assert sum(kept.values()) == 73**2
    sum(out.square().sum() for out in outputs).backward()
    assert all(parameter.grad is not None for parameter in stack.parameters())


@pytest.mark.parametrize("places", ["grid", "kept"])
@pytest.mark.parametrize("mode", ["contextual", "bias"])
@pytest.mark.parametrize("method", BUCKET_METHODS)
def test_gradients_are_those_of_finite_differences(method, mode, places):
    on = "qkv" if mode == "contextual" else "qk"
    stack, encoding = make(1, method=method, mode=mode, on=on, shared_heads=False)
    positions = Positions.grid(2, 2 if places == "grid" else 3, num_prefix=1)
    positions = positions if places == "grid" else positions.take(torch.tensor([0, 2, 3, 5]))
    q, k, v = (x[:1].requires_grad_() for x in content(5))
    names = [name for name, _ in encoding.named_parameters()]
    tables = tuple(parameter.detach().clone().requires_grad_() for parameter in encoding.parameters())
    for name in names:
        delattr(encoding, name)

    def run(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Tensor:
        for name, value in zip(names, tables, strict=True):
            setattr(encoding, name, value)
        return attend(q, k, v, stack.prepare(positions)[0])

    assert torch.autograd.gradcheck(run, (q, k, v, *tables), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (q, k, v, *tables), fast_mode=True)


@pytest.mark.parametrize("on", ["k", "qk", "qkv"])
@pytest.mark.parametrize("method", ["product", "cross"])
def test_training_in_slices_gives_the_same_gradients(method, on, monkeypatch):
    """Several samples at a time: slower caches would hold none of the logits of a large grid."""
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [1] * 6, [0] * 6]).bool()
    stack, _ = make(1, method=method, on=on, shared_heads=False)
    results = []
    for elements in (1, 150, 10**6):  # one sample, a few, all
        monkeypatch.setattr(_slices, "TRAINING_ELEMENTS", elements)
        stack.zero_grad()
        q, k, v = (x.requires_grad_() for x in content(7, batch=3))
        positions = Positions.grid(2, 3, num_prefix=1, mask=mask)
        out = attend(q, k, v, stack.prepare(positions)[0], mask=torch.ones(7, 7).tril().bool())
        out.square().sum().backward()
        results.append([out, q.grad, k.grad, v.grad, *(parameter.grad.clone() for parameter in stack.parameters())])
    for other in results[:2]:
        for found, wanted in zip(other, results[2], strict=True):
            assert torch.allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("on", ["k", "qkv"])
def test_a_query_that_may_attend_to_nothing_has_finite_gradients(on):
    stack, _ = make(on=on)
    mask = torch.zeros(6, 6, dtype=torch.float64)
    mask[2] = float("-inf")
    for barred in (mask, mask == 0):
        q, k, v = (x.requires_grad_() for x in content(6))
        out = attend(q, k, v, stack.prepare(Positions.grid(2, 3))[0], mask=barred)
        assert not bool(out[:, :, 2].any())
        out.square().sum().backward()
        assert all(bool(x.grad.isfinite().all()) for x in (q, k, v, *stack.parameters()))


def test_tables_load_from_the_names_of_the_reference():
    state = {
        f"blocks.3.attn.rpe_{letter}.lookup_table_weight": torch.randn(1, *shape)
        for letter, shape in {"q": (4, 50), "k": (4, 50), "v": (50, 4)}.items()
    }
    encoding = create_encoding("irpe", 8, 2, num_prefix=1, on="qkv").layers[0]["irpe"]
    encoding.load_state_dict(irpe_tables(state, "blocks.3.attn."))
    assert torch.equal(encoding.table_v[0], state["blocks.3.attn.rpe_v.lookup_table_weight"])
    with pytest.raises(ValueError, match="blocks.3.attn"):
        irpe_tables(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "manhattan"}, "method: expected one of"),
        ({"mode": "ctx"}, "mode: expected"),
        ({"mode": "bias", "on": "kv"}, "no meaning on v"),
        ({"on": ""}, "on: expected"),
        ({"on": "kk"}, "on: expected"),
        ({"ratio": 0}, "ratio: expected a positive"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        create_encoding("irpe", 8, 2, **options)


def test_prefix_tokens_need_their_row():
    with pytest.raises(ValueError, match="no row for prefix tokens"):
        create_encoding("irpe", 8, 2).prepare(Positions.grid(2, 3, num_prefix=1))


def test_a_static_bias_combines_with_tables_on_values():
    combined = create_encoding([("irpe", {"on": "qkv"}), ("alibi_2d", {})], HEADS * WIDTH, HEADS).double()
    torch.nn.init.normal_(combined.layers[0]["irpe"].table_v)
    q, k, v = content(6)
    state = combined.prepare(Positions.grid(2, 3))[0]
    with torch.no_grad():
        fast = attend(q, k, v, state)
    assert torch.allclose(fast, attend(q, k, v, state, plain=True), atol=1e-6)
    assert (fast - attend(q, k, v)).abs().max() > 1e-3


@pytest.mark.parametrize("method", BUCKET_METHODS)
@pytest.mark.parametrize(("mode", "on"), [("contextual", "qk"), ("contextual", "q"), ("bias", "qk")])
def test_score_mod_of_every_pair_is_the_term(method, mode, on):
    stack, encoding = make(1, method=method, mode=mode, on=on, shared_heads=False)
    keep = torch.tensor([[4, 0, 9, 7], [3, 2, 1, 11]])
    for positions in (Positions.grid(3, 4, num_prefix=1), Positions.grid(3, 4, num_prefix=1).take(keep)):
        count = positions.num_tokens
        q, k, v = content(count)
        state = stack.prepare(positions)[0]
        places = torch.meshgrid(*(torch.arange(n) for n in (2, HEADS, count, count)), indexing="ij")
        change = encoding.score_mod(q, k, state.prepared[0])
        logits = change(q @ k.mT * WIDTH**-0.5, *places)
        assert torch.allclose(logits.softmax(-1) @ v, attend(q, k, v, state), atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same():
    from torch.nn.attention.flex_attention import flex_attention

    stack, encoding = make(1, on="qk", shared_heads=False)
    q, k, v = content(13)
    state = stack.prepare(Positions.grid(3, 4, num_prefix=1))[0]
    with torch.no_grad():
        out = flex_attention(q, k, v, score_mod=encoding.score_mod(q, k, state.prepared[0]))
        assert torch.allclose(out, attend(q, k, v, state), atol=1e-10)


def test_flex_attention_has_no_place_for_tables_on_values():
    stack, encoding = make(0, on="v")
    q, k, _ = content(6)
    with pytest.raises(ValueError, match="no place for tables on values"):
        encoding.score_mod(q, k, stack.prepare(Positions.grid(2, 3))[0].prepared[0])


@pytest.mark.parametrize("mode", ["contextual", "bias"])
def test_tables_start_as_wide_as_asked_and_the_model_is_reset_to_it(mode):
    torch.manual_seed(0)
    stack = create_encoding("irpe", 96, 3, mode=mode, on="qk", shared_heads=False, init_std=4.0)
    for _ in range(2):
        values = torch.cat([parameter.detach().flatten() for parameter in stack.parameters()])
        assert values.abs().max() <= 8
        assert float(values.std()) == pytest.approx(4 * 0.88, rel=0.1)  # cut at two standard deviations
        stack.reset_parameters()
    with pytest.raises(ValueError, match="init_std: expected 0 or more, got -1"):
        create_encoding("irpe", 96, 3, init_std=-1)
