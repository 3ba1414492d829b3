"""What every encoding promises, over the whole registry: an encoding added tomorrow is covered without a line here.

Each encoding is built small and with moved parameters, and is called through ``TinyTransformer``, which uses all hooks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpos import EncodingStack, Positions, create_encoding, list_encodings
from mmpos.encodings import encoding_class
from mmpos.encodings.base import overrides
from mmpos.testing import (
    TinyTransformer,
    assert_close,
    assert_relative,
    build,
    encodings_of,
    qkv,
    randomise,
    scores,
    seeded,
    tensors_of,
)

NAMES = list_encodings()
PREFIXES = (0, 1, 5)
# rows, columns: not square, odd, one row, and larger than the training grid
GRIDS = ((3, 5), (4, 3), (1, 4))
TRAIN = (4, 3, 2, 2, 2)

every = pytest.mark.parametrize("name", NAMES)


def facts(name: str) -> Any:
    return encoding_class(name).facts


def grid_of(stack: EncodingStack, sizes: tuple[int, ...] = (3, 5), **options: Any) -> Positions:
    """A raster in as many axes as the stack was built for."""
    axes = encodings_of(stack)[0].axes
    return Positions.grid(*(*sizes, 2, 2)[:axes], **options)


def model_of(name: str, *, depth: int = 2, num_prefix: int = 0, **options: Any) -> TinyTransformer:
    axes = min(max(2, facts(name).axes[0]), facts(name).axes[1])
    stack = build(name, depth=depth, train_grid=TRAIN[:axes], num_prefix=num_prefix, axes=axes, **options)
    return TinyTransformer(randomise(stack)).eval()


def placed(name: str, num_prefix: int = 0) -> tuple[TinyTransformer, Positions]:
    model = model_of(name, num_prefix=num_prefix)
    return model, grid_of(model.stack, num_prefix=num_prefix)


def skip_rasters_only(name: str, why: str) -> None:
    if facts(name).needs_grid:
        pytest.skip(f"works on complete rasters only, {why}")


# -- shapes, grids, prefixes, batches ---------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("num_prefix", PREFIXES)
def test_fused_equals_plain(name: str, num_prefix: int) -> None:
    model = model_of(name, num_prefix=num_prefix)
    for sizes in GRIDS:
        positions = grid_of(model.stack, sizes, num_prefix=num_prefix)
        x = model.tokens(positions, batch=2)
        out = model(x, positions)
        assert out.shape == x.shape
        assert torch.isfinite(out).all()
        assert_close(out, model(x, positions, plain=True), terms=4096)


@every
@pytest.mark.parametrize("num_prefix", PREFIXES)
def test_prefix_tokens_have_no_place(name: str, num_prefix: int) -> None:
    """Prefix tokens take part in attention, and what is done to placed tokens does not depend on how many there are."""
    model = model_of(name, num_prefix=num_prefix)
    bare = grid_of(model.stack)
    positions = bare.with_prefix(num_prefix)
    q, k, _ = qkv(2, model.heads, positions.num_tokens, model.head_dim)
    x = model.tokens(positions, batch=2)
    logits = scores(model.stack, positions, q, k, x=x)
    assert logits.shape[-2:] == (positions.num_tokens, positions.num_tokens)
    other = model_of(name, num_prefix=0)
    other.stack.load_state_dict(
        {
            key: value if value.shape == other.stack.state_dict()[key].shape else other.stack.state_dict()[key]
            for key, value in model.stack.state_dict().items()
            if key in other.stack.state_dict()
        },
        strict=False,
    )
    if all(a.shape == b.shape for a, b in zip(model.stack.parameters(), other.stack.parameters(), strict=False)):
        alone = scores(other.stack, bare, q[..., num_prefix:, :], k[..., num_prefix:, :], x=x[:, num_prefix:])
        assert_close(logits[..., num_prefix:, num_prefix:], alone.expand(2, -1, -1, -1), terms=1024)


@every
def test_batch_rows_may_differ_in_their_places(name: str) -> None:
    model, positions = placed(name, 1)
    if facts(name).needs_grid:
        pytest.skip("works on complete rasters only, where all samples share the places")
    order = torch.stack([torch.arange(positions.num_placed), torch.arange(positions.num_placed).flip(0)])
    both = positions.take(order)
    x = model.tokens(both)
    together = model(x, both)
    for row in range(2):
        alone = model(x[row : row + 1], positions.take(order[row : row + 1]))
        assert_close(together[row : row + 1], alone, terms=4096, what=f"sample {row}")


@every
def test_reordering_tokens_with_their_places_reorders_the_output(name: str) -> None:
    """A token is where its coordinates say, not where it stands in the sequence."""
    skip_rasters_only(name, "whose order is fixed")
    model, positions = placed(name, 1)
    x = model.tokens(positions)
    order = torch.randperm(positions.num_placed, generator=torch.Generator().manual_seed(1))
    shuffled = torch.cat([x[:, :1], x[:, 1:][:, order]], dim=1)
    expected = model(x, positions)
    expected = torch.cat([expected[:, :1], expected[:, 1:][:, order]], dim=1)
    assert_close(model(shuffled, positions.take(order)), expected, terms=4096)


# -- padding and subsets ----------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("num_prefix", PREFIXES)
def test_content_of_padding_does_not_matter(name: str, num_prefix: int) -> None:
    model, positions = placed(name, num_prefix)
    real = torch.ones(2, positions.num_placed, dtype=torch.bool)
    real[0, -4:] = False
    real[1, 2] = False
    positions = positions.with_mask(real)
    x = model.tokens(positions)
    changed = x.clone()
    changed[:, num_prefix:][~real] = 7 * seeded(int((~real).sum()), model.dim, seed=3)
    before, after = model(x, positions), model(changed, positions)
    keep = positions.token_mask()
    assert keep is not None
    assert_close(after[keep], before[keep], terms=4096)
    assert (after[~keep] - before[~keep]).abs().max() > 1e-3  # the probe did change the padding
    assert_close(before, model(x, positions, plain=True), terms=4096)


@every
def test_amount_of_padding_does_not_matter(name: str) -> None:
    skip_rasters_only(name, "which have no padding at the end")
    model = model_of(name, num_prefix=1)
    axes = encodings_of(model.stack)[0].axes
    sizes = [(2, 3, 2, 2)[:axes], (3, 2, 1, 2)[:axes]]
    short, long = Positions.grids(sizes, num_prefix=1), Positions.grids(sizes, num_prefix=1, length=40)
    x = model.tokens(long)
    out_long = model(x, long)
    out_short = model(x[:, : short.num_tokens], short)
    keep = short.token_mask()
    assert keep is not None
    assert_close(out_long[:, : short.num_tokens][keep], out_short[keep], terms=4096)
    # and each sample equals the same sample alone, without any padding
    for row, size in enumerate(sizes):
        alone = Positions.grid(*size, num_prefix=1)
        single = model(x[row : row + 1, : alone.num_tokens], alone)
        assert_close(out_long[row : row + 1, : alone.num_tokens], single, terms=4096, what=f"sample {row} alone")


@every
@pytest.mark.parametrize("num_prefix", PREFIXES)
def test_kept_tokens_see_what_they_saw_among_all(name: str, num_prefix: int) -> None:
    """A subset computed alone equals everything with the dropped columns masked; each sample has its own subset."""
    skip_rasters_only(name, "not on a subset of one")
    model, positions = placed(name, num_prefix)
    count = positions.num_placed
    generator = torch.Generator().manual_seed(4)
    keep = torch.stack([torch.randperm(count, generator=generator)[: count // 2] for _ in range(2)])
    x = model.tokens(positions, batch=2)
    rows = torch.cat([torch.arange(num_prefix).expand(2, -1), keep + num_prefix], dim=1)
    kept_x = x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
    mask = torch.zeros(2, count, dtype=torch.bool).scatter(1, keep, True)
    full = model(x, positions.with_mask(mask)).gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
    assert_close(model(kept_x, positions.take(keep)), full, terms=4096)


@every
def test_wrong_number_of_tokens_is_refused(name: str) -> None:
    model, positions = placed(name, 1)
    with pytest.raises(ValueError, match="expected"):
        model(model.tokens(positions)[:, :-1], positions)


# -- the facts are true -----------------------------------------------------------------------------------------------


@every
def test_facts_are_complete(name: str) -> None:
    stated = facts(name)
    assert stated.title
    assert stated.source
    assert set(stated.plugs_into) <= {"tokens", "qk", "qkvo", "bias", "conv"}
    assert stated.scope in ("model", "layer")
    assert 1 <= stated.axes[0] <= stated.axes[1]
    cls = encoding_class(name)
    where = {
        "tokens": overrides(cls, "add_to_tokens"),
        "conv": overrides(cls, "mix_tokens") or overrides(cls, "transform_output") or overrides(cls, "add_to_tokens"),
        "qk": overrides(cls, "transform_qkv") or overrides(cls, "attend"),
        "qkvo": overrides(cls, "transform_output") or overrides(cls, "attend"),
        "bias": overrides(cls, "logit_bias") or overrides(cls, "attend") or overrides(cls, "transform_qkv"),
    }
    for place in stated.plugs_into:
        assert where[place], f"{name} says that it acts on {place} and implements no hook there"


@pytest.mark.parametrize("name", [name for name in NAMES if facts(name).relative])
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_relative_encodings_do_not_see_a_common_shift(name: str, data: st.DataObject) -> None:
    model = model_of(name, depth=1, num_prefix=1).double()
    axes = encodings_of(model.stack)[0].axes
    number = st.floats(-20, 20, width=32) if facts(name).fractional else st.integers(-20, 20).map(float)
    shift = data.draw(st.tuples(*[number] * axes))
    assert_relative(model.stack, grid_of(model.stack, num_prefix=1, dtype=torch.float64), shift)


@every
def test_fractional_places(name: str) -> None:
    """Real coordinates are used as they are, or refused; never rounded in silence."""
    model = model_of(name, num_prefix=1)
    positions = grid_of(model.stack, num_prefix=1)
    # less than half a patch, so that a method which rounded coordinates would see no difference at all
    jitter = torch.rand(positions.coords.shape, generator=torch.Generator().manual_seed(6)) * 0.9 - 0.45
    moved = positions.with_coords((positions.coords + jitter).clamp_min(0))
    x = model.tokens(positions)
    if not facts(name).fractional:
        with pytest.raises(ValueError, match="integer|whole|fraction|grid|raster"):
            model(x, moved)
        return
    difference = (model(x, moved) - model(x, positions)).abs().max()
    assert torch.isfinite(difference)
    if name != "none":
        assert difference > 1e-4


@every
def test_learned_means_that_there_are_parameters(name: str) -> None:
    stack = model_of(name).stack
    assert any(p.requires_grad for p in stack.parameters()) == facts(name).learned


@every
def test_every_parameter_gets_a_gradient(name: str) -> None:
    """A parameter without one stops distributed training and decays unnoticed."""
    model = model_of(name, num_prefix=1)
    for parameter in model.stack.parameters():
        assert parameter.requires_grad
    positions = grid_of(model.stack, (4, 3), num_prefix=1)
    out = model(model.tokens(positions), positions)
    (out * seeded(*out.shape, seed=9)).sum().backward()
    missing = [key for key, p in model.stack.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert missing == []
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.stack.parameters())


@pytest.mark.parametrize("name", [name for name in NAMES if facts(name).learned])
def test_scope_by_gradient(name: str) -> None:
    """Per-layer parameters belong to their layer: a loss on the first layer leaves those of the second alone."""
    model = model_of(name)
    positions = grid_of(model.stack, (4, 3))
    out = model(model.tokens(positions), positions, layers=1)
    (out * seeded(*out.shape, seed=9)).sum().backward()
    with_gradient = {key.split(".")[1] for key, p in model.stack.named_parameters() if p.grad is not None}
    owned = {key for key, _ in model.stack.named_parameters() if key.startswith("layers.")}
    assert bool(owned) == (facts(name).scope == "layer")
    assert with_gradient == ({"0"} if facts(name).scope == "layer" else {name})


@every
def test_head_dim_rule(name: str) -> None:
    if facts(name).head_dim_rule:
        with pytest.raises(ValueError, match=r"head_dim|dim|num_heads"):
            create_encoding(name, 2 * 7, 2, axes=min(max(2, facts(name).axes[0]), facts(name).axes[1]))
    else:
        axes = min(max(2, facts(name).axes[0]), facts(name).axes[1])
        heads = encodings_of(build(name, train_grid=TRAIN[:axes]))[0].num_heads
        stack = create_encoding(name, heads * 12, heads, head_dim=7, train_grid=TRAIN[:axes], axes=axes)
        positions = grid_of(stack)
        q, k, _ = qkv(1, heads, positions.num_tokens, 7)
        assert torch.isfinite(scores(stack, positions, q, k)).all()


@every
def test_axes_range(name: str) -> None:
    low, high = facts(name).axes
    for axes in (low, high):
        stack = build(name, axes=axes, train_grid=TRAIN[:axes])
        positions = Positions.grid(*(3, 2, 2, 1, 1)[:axes])
        model = TinyTransformer(stack)
        assert torch.isfinite(model(model.tokens(positions), positions)).all()
        wrong = Positions.grid(*(3, 2, 2, 1, 1, 2)[: axes + 1])
        if name != "none":
            with pytest.raises(ValueError, match="ax[ie]s"):
                model(model.tokens(wrong), wrong)
    heads, head_dim = (encodings_of(stack)[0].num_heads, encodings_of(stack)[0].head_dim)
    for axes in (low - 1, high + 1):
        with pytest.raises(ValueError, match="axes"):
            create_encoding(name, heads * head_dim, heads, axes=axes)


# -- no surprises -----------------------------------------------------------------------------------------------------


@every
def test_deterministic_in_evaluation(name: str) -> None:
    model, positions = placed(name, 1)
    x = model.tokens(positions)
    first = model(x, positions)
    torch.manual_seed(123)
    assert torch.equal(first, model(x, positions))


@every
@pytest.mark.parametrize("training", [False, True])
def test_forward_assigns_nothing(name: str, training: bool) -> None:
    model, positions = placed(name, 1)
    model.train(training)

    def state() -> list[tuple[str, str, int]]:
        found = []
        for path, module in model.stack.named_modules():
            for holder in (module.__dict__, module._buffers, module._parameters):
                found += [(path, key, id(value)) for key, value in holder.items()]
        return found

    before = state()
    model(model.tokens(positions), positions)
    assert state() == before


@every
def test_inputs_are_not_modified(name: str) -> None:
    model, positions = placed(name, 1)
    x = model.tokens(positions)
    kept, coords = x.clone(), positions.coords.clone()
    model(x, positions)
    assert torch.equal(x, kept)
    assert torch.equal(positions.coords, coords)


# -- dtype and precision ----------------------------------------------------------------------------------------------


@every
def test_float32_parameters_survive_every_cast(name: str) -> None:
    casts = {
        ".bfloat16()": lambda m: m.bfloat16(),
        ".half()": lambda m: m.half(),
        ".to(dtype)": lambda m: m.to(torch.bfloat16),
        "of a parent": lambda m: torch.nn.Sequential(m).to(dtype=torch.bfloat16),
        "after backward": lambda m: m.bfloat16(),
    }
    for label, cast in casts.items():
        model, positions = placed(name)
        reference = copy.deepcopy(model.stack)
        if label == "after backward":
            model(model.tokens(positions), positions).sum().backward()
        cast(model)
        for ours, original in zip(encodings_of(model.stack), encodings_of(reference), strict=True):
            for key in ours.fp32_parameters:
                parameter = getattr(ours, key)
                if parameter is None:  # an option is off
                    continue
                assert torch.equal(parameter, getattr(original, key)), (label, key)
                assert parameter.grad is None or parameter.grad.dtype == torch.float32
    for ours in encodings_of(model_of(name).stack.double()):
        assert all(p.dtype == torch.float64 for p in ours.parameters())


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_stays_close(name: str, dtype: torch.dtype) -> None:
    """Cast model and tokens: outputs keep the dtype and differ from float32 by rounding of the tokens only."""
    model, positions = placed(name, 1)
    x = model.tokens(positions).to(dtype)
    low = copy.deepcopy(model).to(dtype)
    rounded = copy.deepcopy(low).float()  # same rounded weights, float32 arithmetic
    out = low(x, positions)
    assert out.dtype == dtype
    reference = rounded(x.float(), positions)
    error = (out.float() - reference).abs().max() / reference.abs().max()
    assert error < (0.04 if dtype == torch.bfloat16 else 0.006), f"relative error {error:.4f}"


@every
def test_autocast_does_not_reach_tables(name: str) -> None:
    """Everything prepared from positions is equal bit for bit inside CPU autocast."""
    model, positions = placed(name, 1)
    plain = list(tensors_of([state.prepared for state in model.stack.prepare(positions)]))
    with torch.autocast("cpu", torch.bfloat16):
        inside = list(tensors_of([state.prepared for state in model.stack.prepare(positions)]))
        x = model.tokens(positions)
        added = model.add(x, positions)
    assert len(plain) == len(inside)
    for a, b in zip(plain, inside, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert torch.equal(added, model.add(x, positions))


# -- construction, state ----------------------------------------------------------------------------------------------


@every
def test_meta_device_then_reset(name: str) -> None:
    model, positions = placed(name, 1)
    options: dict[str, Any] = {"depth": 2, "num_prefix": 1}
    first = encodings_of(model.stack)[0]
    options |= {"train_grid": first.train_grid, "axes": first.axes}
    normal = build(name, **options)
    with torch.device("meta"):
        empty = build(name, **options)
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*empty.parameters(), *empty.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    for stack in (normal, empty):
        torch.manual_seed(5)
        stack.reset_parameters()
        stack.init_non_persistent_buffers()
    assert normal.state_dict().keys() == empty.state_dict().keys()
    for key, value in normal.state_dict().items():
        assert torch.equal(value, empty.state_dict()[key]), key
    outputs = []
    for stack in (normal, empty):
        tiny = TinyTransformer(stack).eval()
        outputs.append(tiny(tiny.tokens(positions), positions))
    assert torch.equal(*outputs)


@every
def test_state_dict_round_trip(name: str) -> None:
    model, positions = placed(name, 1)
    other = model_of(name, num_prefix=1)
    randomise(other.stack, seed=77)
    x = model.tokens(positions)
    other.stack.load_state_dict(model.stack.state_dict())
    assert torch.equal(other(x, positions), model(x, positions))


@every
def test_nothing_derived_is_saved(name: str) -> None:
    """A saved table would tie the checkpoint to a grid; a few numbers that describe a table may be saved."""
    model, positions = placed(name, 1)
    before = {key: value.shape for key, value in model.stack.state_dict().items()}
    model(model.tokens(positions), positions)
    after = model.stack.state_dict()
    assert {key: value.shape for key, value in after.items()} == before
    parameters = {key for key, _ in model.stack.named_parameters()}
    # frozen random numbers cannot be derived again; an encoding declares them next to its float32 parameters
    drawn = {key for encoding in encodings_of(model.stack) for key in encoding.fp32_parameters}
    large = [key for key, value in after.items() if key not in parameters and value.numel() > 64]
    assert [key for key in large if key.rpartition(".")[2] not in drawn] == []


@every
def test_names_for_weight_decay_exist(name: str) -> None:
    stack = model_of(name).stack
    assert stack.no_weight_decay() <= {key for key, _ in stack.named_parameters()}


# -- resolution -------------------------------------------------------------------------------------------------------


@every
def test_resolution_rules(name: str) -> None:
    model = model_of(name)
    rules = facts(name).resolution_rules
    assert rules
    assert encodings_of(model.stack)[0].resolution == rules[0]
    train = encodings_of(model.stack)[0].train_grid
    assert train is not None
    larger = Positions.grid(*(size + 2 for size in train))
    x = model.tokens(larger)
    for rule in rules:
        model.stack.set_resolution(rule)
        assert {e.resolution for e in encodings_of(model.stack)} == {rule}
        out = model(x, larger)
        assert torch.isfinite(out).all(), rule
        assert_close(out, model(x, larger, plain=True), terms=4096, what=rule)
    with pytest.raises(ValueError, match="resolution.*" + rules[0]):
        model.stack.set_resolution("no_such_rule")
    with pytest.raises(ValueError, match="resolution"):
        build_with(name, resolution="no_such_rule")


def build_with(name: str, **options: Any) -> EncodingStack:
    first = encodings_of(model_of(name).stack)[0]
    return create_encoding(
        name, first.dim, first.num_heads, axes=first.axes, train_grid=first.train_grid, depth=2, **options
    )


@every
def test_unknown_option_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="no_such_option.*options are.*resolution"):
        build_with(name, no_such_option=1)


# -- negative controls ------------------------------------------------------------------------------------------------


def permuted_difference(model: TinyTransformer, positions: Positions) -> Tensor:
    """How far the output is from following a permutation of the placed tokens."""
    x = model.tokens(positions)
    order = torch.randperm(positions.num_placed, generator=torch.Generator().manual_seed(2))
    start = positions.num_prefix
    moved = torch.cat([x[:, :start], x[:, start:][:, order]], dim=1)
    out = model(x, positions)
    expected = torch.cat([out[:, :start], out[:, start:][:, order]], dim=1)
    return (model(moved, positions) - expected).abs().max()


@every
@pytest.mark.parametrize("num_prefix", [0, 1])
def test_only_none_is_blind_to_order(name: str, num_prefix: int) -> None:
    model, positions = placed(name, num_prefix)
    difference = float(permuted_difference(model, positions).detach())
    if name == "none":
        assert difference < 1e-5
    else:
        assert difference > 1e-3


@every
def test_rows_and_columns_are_told_apart(name: str) -> None:
    """Spreading the rows is not spreading the columns: a method that mixed them up would pass on square grids."""
    if name == "none" or facts(name).needs_grid:
        pytest.skip("reads no coordinates")
    model = model_of(name)
    positions = grid_of(model.stack)
    if positions.axes < 2:
        pytest.skip("has one axis")
    x = model.tokens(positions)
    factor = 0.5 if facts(name).fractional else 2.0
    outs = []
    for axis in (0, 1):
        coords = positions.coords.clone()
        coords[..., axis] *= factor
        try:
            outs.append(model(x, positions.with_coords(coords)))
        except ValueError as error:
            pytest.skip(f"refuses places outside of the grid: {error}")
    assert (outs[0] - outs[1]).abs().max() > 1e-4
