"""Models with windows: Swin blocks, CSWin stripes, CvT attention, and the attention for detection code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mmpos import Positions, create_encoding
from mmpos.functional.windows import fit_window, join_windows, shift_mask, split_windows
from mmpos.models.cswin import CSWin, CSWinBlock, StripeAttention
from mmpos.models.cvt import ConvProjection, CvtAttention
from mmpos.models.multihead import MultiheadAttention
from mmpos.models.swin import SwinBlock

DIM = 8


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return module.double().eval()


def tokens(count: int, dim: int = DIM, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, dim, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


# -- windows ----------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(window=st.tuples(st.integers(1, 4), st.integers(1, 4)), repeats=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_windows_are_cut_and_joined(window, repeats):
    grid = (window[0] * repeats[0], window[1] * repeats[1])
    x = torch.randn(2, *grid, 3)
    windows = split_windows(x, window)
    assert torch.equal(windows[0].view(*window, 3), x[0, : window[0], : window[1]])
    assert torch.equal(windows[-1].view(*window, 3), x[1, -window[0] :, -window[1] :])
    assert torch.equal(join_windows(windows, window, grid), x)


def test_a_grid_that_windows_do_not_divide():
    with pytest.raises(ValueError, match="5 x 4 is not a multiple of windows of 2 x 2"):
        split_windows(torch.zeros(1, 5, 4, 1), (2, 2))


@settings(max_examples=20, deadline=None)
@given(data=st.data(), window=st.tuples(st.integers(2, 3), st.integers(2, 4)))
def test_the_shift_mask_lets_pass_what_was_in_one_window_of_the_shifted_image(data, window):
    shift = tuple(data.draw(st.integers(0, size - 1)) for size in window)
    grid = (2 * window[0], 3 * window[1])
    mask = shift_mask(grid, window, shift)
    # cells that stay neighbours keep their distance under the roll: the roll wrapped neither or both of them
    cells = torch.stack(torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij"), -1)
    rolled = split_windows(cells.roll([-s for s in shift], (0, 1))[None], window)
    plain = split_windows(cells[None], window)
    wrapped = rolled - plain - torch.tensor(shift)  # 0 or minus the grid
    together = (wrapped[:, :, None] == wrapped[:, None]).all(-1)
    assert torch.equal(mask == 0, together)
    assert set(mask.unique().tolist()) <= {0.0, -100.0}


def test_windows_of_grids_that_are_too_small():
    assert fit_window((8, 8), (4, 4), (2, 2)) == ((4, 4), (2, 2))
    assert fit_window((4, 9), (4, 4), (2, 2)) == ((4, 4), (0, 0))
    assert fit_window((3, 9), (4, 4), (2, 2)) == ((3, 3), (0, 0))
    assert fit_window((4, 9), (4, 4), (2, 2), "per_axis") == ((4, 4), (0, 2))
    with pytest.raises(ValueError, match="rule: expected"):
        fit_window((4, 9), (4, 4), (2, 2), "both")


# -- Swin -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_tokens_of_other_windows_do_not_matter(version):
    grid, window = (4, 6), (2, 3)
    x = tokens(24).view(2, *grid, DIM)
    other = x.clone()
    other[:, 2:] = other[:, 2:].flip(-1)  # not a constant: a norm would remove it
    for shift, reached in (((0, 0), 2), ((1, 1), 1)):  # rows of the first half that see nothing of the second
        block = randomise(SwinBlock(DIM, 2, window, shift, version=version))
        change = (block(x.flatten(1, 2), grid) - block(other.flatten(1, 2), grid)).abs().amax((0, 2)).view(grid)
        assert bool((change[:reached] < 1e-12).all())
        assert bool((change[reached:] > 1e-6).all())


def test_any_bias_may_take_the_place_of_the_table():
    block = randomise(SwinBlock(DIM, 2, (2, 3), encoding=create_encoding("alibi_2d", DIM, 2)))
    assert block(tokens(24), (4, 6)).shape == (2, 24, DIM)
    with pytest.raises(ValueError, match="expected 24 tokens"):
        block(tokens(23), (4, 6))
    with pytest.raises(ValueError, match="shift: expected"):
        SwinBlock(DIM, 2, (2, 3), (2, 0))


# -- CSWin ------------------------------------------------------------------------------------------------------------


def stripes(stripe: tuple[int | None, int | None], dim: int = DIM, **options: object) -> StripeAttention:
    return randomise(StripeAttention(dim, 2, stripe, **options))


def qkv(grid: tuple[int, int]) -> Tensor:
    return torch.stack([tokens(grid[0] * grid[1]) * (1 + i) for i in range(3)])


def test_a_stripe_as_wide_as_the_grid_is_global_attention():
    x = qkv((3, 5))
    assert torch.allclose(stripes((None, 5))(x, (3, 5)), stripes((None, None))(x, (3, 5)), atol=1e-12)


def test_horizontal_stripes_are_vertical_ones_of_the_transposed_image():
    horizontal, vertical = stripes((2, None)), stripes((None, 2))
    lepe = vertical.encoding.layers[0]["lepe"]
    with torch.no_grad():
        lepe.weight.copy_(lepe.weight.mT.clone())
    x = qkv((4, 6))
    turned = x.unflatten(2, (4, 6)).transpose(2, 3).flatten(2, 3)
    expected = vertical(turned, (6, 4)).unflatten(1, (6, 4)).transpose(1, 2).flatten(1, 2)
    assert torch.allclose(horizontal(x, (4, 6)), expected, atol=1e-12)


def test_without_a_filter_it_is_attention_in_windows():
    branch = stripes((None, 2))
    with torch.no_grad():
        for parameter in branch.parameters():
            parameter.zero_()
    x = qkv((3, 4))
    out = branch(x, (3, 4)).view(2, 3, 4, DIM)
    for left in (0, 2):
        q, k, v = x.view(3, 2, 3, 4, 2, DIM // 2)[:, :, :, left : left + 2].flatten(2, 3).transpose(2, 3)
        part = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 3, 2, DIM)
        assert torch.allclose(out[:, :, left : left + 2], part, atol=1e-12)


@pytest.mark.parametrize("grid", [(3, 5), (4, 7), (1, 3)])
def test_padding_of_stripes_is_masked_unless_asked_for(grid):
    masked, attending = stripes((None, 2)), stripes((None, 2), padded_keys="attend")
    x = qkv(grid)
    out = masked(x, grid)
    assert (out - attending(x, grid)).abs().max() > 1e-4
    # an odd column stands alone in its stripe: the padded cell must not be seen
    alone = stripes((None, None))(x.unflatten(2, grid)[:, :, :, -1:].flatten(2, 3), (grid[0], 1))
    assert torch.allclose(out.unflatten(1, grid)[:, :, -1], alone, atol=1e-12)
    with pytest.raises(ValueError, match="padded_keys"):
        StripeAttention(DIM, 2, (None, 2), padded_keys="ignore")


def test_blocks_and_the_classifier_take_any_grid():
    block = randomise(CSWinBlock(DIM, 4, 2))
    assert block(tokens(15), (3, 5)).shape == (2, 15, DIM)
    with pytest.raises(ValueError, match="half of the heads"):
        CSWinBlock(9, 3, 2)
    torch.manual_seed(0)
    model = CSWin(7, in_chans=1, dim=8, depths=(1, 1), heads=(2, 4), splits=(2, None))
    for size in ((12, 20), (9, 14)):
        model(torch.randn(2, 1, *size)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())
    with pytest.raises(ValueError, match="equally many stages"):
        CSWin(7, depths=(1, 1), heads=(2,), splits=(1, None))


# -- CvT --------------------------------------------------------------------------------------------------------------


def test_folded_normalisation_is_convolution_then_normalisation():
    projection = ConvProjection(DIM, stride=2)
    with torch.no_grad():
        projection.bn.running_mean.normal_()
        projection.bn.running_var.uniform_(0.5, 2)
        projection.bn.weight.normal_()
        projection.bn.bias.normal_()
    maps = torch.randn(2, DIM, 5, 6)
    projection.eval()
    assert torch.allclose(projection(maps), projection.bn(projection.conv(maps)), atol=1e-5)
    projection.train()
    other = nn.BatchNorm2d(DIM)
    other.load_state_dict(projection.bn.state_dict())
    assert torch.allclose(projection(maps), other(projection.conv(maps)), atol=1e-5)
    assert torch.allclose(projection.bn.running_mean, other.running_mean, atol=1e-6)


@pytest.mark.parametrize("stride", [1, 2])
def test_keys_follow_the_stride_and_queries_the_tokens(stride):
    layer = randomise(CvtAttention(DIM, 2, stride_kv=stride))
    positions = Positions.grid(3, 5, num_prefix=1)
    x = tokens(16)
    q, k, v, present = layer.projections(x, positions)
    assert present is None
    assert q.shape[1] == 16
    assert k.shape == v.shape == (2, 1 + -(-3 // stride) * -(-5 // stride), DIM)
    assert torch.equal(k[:, 0], x[:, 0])
    heads = [
        f(t).unflatten(-1, (2, -1)).transpose(1, 2) for f, t in zip((layer.q, layer.k, layer.v), (q, k, v), strict=True)
    ]
    logits = heads[0] @ heads[1].mT * DIM**-0.5  # the full width
    expected = layer.proj((logits.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2))
    assert torch.allclose(layer(x, positions), expected, atol=1e-12)


def test_missing_tokens_are_no_keys():
    layer = randomise(CvtAttention(DIM, 2, stride_kv=1, scale="head_dim"))
    mask = torch.rand(2, 15, generator=torch.Generator().manual_seed(0)) > 0.4
    positions = Positions.grid(3, 5, num_prefix=1, mask=mask)
    x = tokens(16)
    changed = x.clone()
    changed[:, 1:][~mask] += 3
    keep = positions.token_mask()
    assert torch.allclose(layer(x, positions)[keep], layer(changed, positions)[keep], atol=1e-12)
    kept = torch.tensor([[1, 4, 9]])
    part = layer(x[:, [0, 2, 5, 10]], Positions.grid(3, 5, num_prefix=1).take(kept))
    only = torch.zeros(2, 15, dtype=torch.bool).index_fill(1, kept[0], True)
    full = layer(x, Positions.grid(3, 5, num_prefix=1, mask=only))
    assert torch.allclose(part, full[:, [0, 2, 5, 10]], atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("grid", [(3, 5), (4, 6), (1, 4)])
def test_means_of_windows_serve_as_keys_and_values(grid, stride):
    layer = randomise(CvtAttention(DIM, 2, stride_kv=stride, method="avg"))
    assert not [name for name, _ in layer.named_parameters() if "conv" in name]
    height, width = grid
    positions = Positions.grid(height, width, num_prefix=1)
    x = tokens(1 + height * width)
    q, k, v, present = layer.projections(x, positions)
    assert present is None
    assert torch.equal(q, x)
    assert torch.equal(k, v)
    # by hand: a window begins one before each step; it counts border cells on both sides, but none further out
    cells = x[:, 1:].unflatten(1, grid)
    means = []
    for top in range(-1, height if stride == 2 else height - 1, stride):
        for left in range(-1, width if stride == 2 else width - 1, stride):
            rows, columns = range(top, min(top + 3, height + 1)), range(left, min(left + 3, width + 1))
            inside = [cells[:, r, c] for r in rows for c in columns if 0 <= r < height and 0 <= c < width]
            if inside:
                means.append(torch.stack(inside).sum(0) / (len(rows) * len(columns)))
    assert torch.allclose(k, torch.stack([x[:, 0], *means], 1), atol=1e-12)
    assert layer(x, positions).shape == x.shape


def test_a_mean_exists_where_its_window_holds_a_token():
    layer = randomise(CvtAttention(DIM, 2, stride_kv=2, method="avg"))
    kept = torch.tensor([[0, 1, 7]])
    x = tokens(3)
    part = layer(x, Positions.grid(4, 6).take(kept))
    full = torch.zeros(2, 24, DIM, dtype=torch.float64)
    full[:, kept[0]] = x
    only = torch.zeros(2, 24, dtype=torch.bool).index_fill(1, kept[0], True)
    assert torch.allclose(
        part, layer(full + (~only)[..., None], Positions.grid(4, 6, mask=only))[:, kept[0]], atol=1e-12
    )
    present = layer.projections(x, Positions.grid(4, 6).take(kept))[3]
    assert present.view(3, 4).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_options_of_the_projection():
    with pytest.raises(ValueError, match="method: expected one of"):
        CvtAttention(DIM, 2, method="max")
    with pytest.raises(ValueError, match="stride_q: method='avg' leaves queries where they are, got 2"):
        CvtAttention(DIM, 2, method="avg", stride_q=2)


# -- attention for detection code -------------------------------------------------------------------------------------


def pair(batch_first: bool, encoding=None) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    plain = randomise(nn.MultiheadAttention(DIM, 2, batch_first=batch_first))
    ours = MultiheadAttention(DIM, 2, encoding, batch_first=batch_first).double().eval()
    missing, unexpected = ours.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("encoding.") for name in missing)
    return plain, ours


def inputs(batch_first: bool) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(*((3, 6) if batch_first else (6, 3)), DIM, dtype=torch.float64) for _ in range(3))


MASKS = {
    "none": {},
    "padding": {"key_padding_mask": torch.tensor([[0, 0, 0, 0, 1, 1], [0] * 6, [0, 1, 0, 1, 0, 0]]).bool()},
    "float padding": {"key_padding_mask": torch.tensor([[0.0, -1.0, 0.5, 0.0, 0.0, 2.0]] * 3).double()},
    "pairs": {"attn_mask": torch.ones(6, 6).triu(1).bool()},
    "float pairs of each head": {"attn_mask": torch.linspace(-2, 2, 6 * 36).view(6, 6, 6).double()},
    "both": {
        "key_padding_mask": torch.tensor([[0, 0, 0, 0, 1, 1], [0] * 6, [0, 1, 0, 1, 0, 0]]).bool(),
        "attn_mask": torch.ones(6, 6).triu(2).bool(),
    },
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("with_tables", [False, True])
def test_without_an_encoding_or_with_zero_tables_it_is_the_module_of_torch(batch_first, masks, with_tables):
    stack = create_encoding("irpe", DIM, 2, on="qkv") if with_tables else None
    plain, ours = pair(batch_first, stack)
    x = inputs(batch_first)
    places = {"positions": Positions.grid(2, 3)} if with_tables else {}
    for average in (True, False):
        expected = plain(*x, **masks, average_attn_weights=average)
        got = ours(*x, **masks, average_attn_weights=average, **places)
        assert torch.allclose(got[0], expected[0], atol=1e-10)
        assert torch.allclose(got[1], expected[1], atol=1e-10)
    assert ours(*x, **masks, need_weights=False, **places)[1] is None


def test_weights_and_output_belong_together():
    stack = create_encoding("irpe", DIM, 2, on="qk", ratio=1.5).double()
    for parameter in stack.parameters():
        nn.init.normal_(parameter)
    plain, ours = pair(True, stack)
    x = inputs(True)[:1] * 3
    out, weights = ours(*x, positions=Positions.grid(2, 3), average_attn_weights=False)
    assert (weights - plain(*x, average_attn_weights=False)[1]).abs().max() > 1e-2
    value = (
        F.linear(x[2], plain.in_proj_weight[2 * DIM :], plain.in_proj_bias[2 * DIM :])
        .unflatten(-1, (2, -1))
        .transpose(1, 2)
    )
    assert torch.allclose(out, plain.out_proj((weights @ value).transpose(1, 2).flatten(2)), atol=1e-10)


def test_a_layer_of_a_larger_stack_and_errors():
    stack = create_encoding("irpe", DIM, 2, 3).double()
    positions = Positions.grid(2, 3)
    _, ours = pair(True)
    x = inputs(True)
    nn.init.normal_(stack.layers[1]["irpe"].table_k)
    states = stack.prepare(positions)
    first, second = (ours(*x, layer=state, need_weights=False)[0] for state in states[:2])
    assert (first - second).abs().max() > 1e-3
    with pytest.raises(ValueError, match="owns an encoding and needs the places"):
        pair(True, create_encoding("irpe", DIM, 2))[1](*x)
    with pytest.raises(ValueError, match="depth 1"):
        MultiheadAttention(DIM, 2, stack)
    with pytest.raises(ValueError, match="add_zero_attn"):
        MultiheadAttention(DIM, 2, add_zero_attn=True)
    with pytest.raises(ValueError, match="key_padding_mask: expected"):
        ours(*x, key_padding_mask=torch.zeros(2, 6).bool())
    with pytest.raises(ValueError, match="expected 8 tokens"):
        pair(True, create_encoding("irpe", DIM, 2))[1](*x, positions=Positions.grid(2, 4))


# -- CSWin as a model of recipes --------------------------------------------------------------------------------------


def test_cswin_by_configuration_with_and_without_lepe():
    from mmpos.config import compose
    from mmpos.data import create_data
    from mmpos.training.build import build_model, check_config, describe
    from mmpos.training.optim import no_weight_decay_names

    data = create_data("fake", image_size=28, in_chans=1)
    config = compose(["model=cswin_micro", "encoding=lepe", "data=fake", "data.image_size=28"])
    check_config(config)
    model = build_model(config, data)
    total = sum(p.numel() for p in model.parameters())
    lepe = sum(p.numel() for name, p in model.named_parameters() if ".encoding." in name)
    assert 600_000 < total < 800_000
    # ten numbers a channel: 36 in the first block, twice 72 and 144 after it
    assert lepe == 10 * (36 + 2 * 72 + 2 * 144)
    assert f"{total:,} parameters, {lepe:,} of them positions" in describe(config, data, model)
    spared = no_weight_decay_names(model)
    assert {name for name, _ in model.named_parameters() if ".encoding." in name} <= spared
    for size in ((28, 28), (42, 30), (9, 13)):
        assert model(torch.zeros(2, 1, *size)).shape == (2, 4)
    bare = build_model(compose(["model=cswin_micro", "encoding=none", "data=fake"]), data)
    assert sum(p.numel() for p in bare.parameters()) == total - lepe


def test_cswin_takes_no_other_encoding_and_no_other_data():
    from mmpos.config import compose
    from mmpos.data import create_data
    from mmpos.training.build import build_model

    data = create_data("fake")
    with pytest.raises(ValueError, match="the stripes of CSWin take one of lepe, none, got 'rope_mixed'"):
        build_model(compose(["model=cswin_micro", "encoding=rope_mixed", "data=fake"]), data)
    with pytest.raises(ValueError, match="'cswin_micro' takes lepe or none"):
        build_model(compose(["model=cswin_micro", "encoding=learned_rope_mixed", "data=fake"]), data)
    data.evaluation = "points"
    with pytest.raises(ValueError, match="'cswin_micro' reads images, and fake holds none"):
        build_model(compose(["model=cswin_micro", "encoding=lepe", "data=fake"]), data)


def test_cswin_is_evaluated_at_other_sizes_and_shifts(tmp_path):
    pytest.importorskip("matplotlib")
    from mmpos.data import create_data
    from mmpos.evaluation import run_resolution, run_shift

    data = create_data("fake", image_size=12, in_chans=1, test_count=8)
    model = CSWin(4, in_chans=1, dim=8, depths=(1, 1), heads=(2, 2), splits=(1, None))
    result = run_resolution(model, data, [12, 18], encoding_name="lepe", output_dir=tmp_path / "a", progress=False)
    assert result.rules == ["own"]
    assert {row.size for row in result.rows if row.metric == "accuracy"} == {12, 18}
    shifted = run_shift(model, data, encoding_name="lepe", output_dir=tmp_path / "b", progress=False)
    assert shifted.shifts == [1, 2]


def test_inside_an_encoder_layer_of_torch_positions_are_not_lost():
    """In evaluation torch would read the projections itself and leave the encoding out."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    layer.self_attn = MultiheadAttention(16, 2, create_encoding("irpe", 16, 2, init_std=1.0), batch_first=True)
    x, positions = torch.randn(2, 6, 16), Positions.grid(2, 3)
    for training in (True, False):
        layer.train(training)
        with torch.no_grad(), pytest.raises(ValueError, match="positions: this layer owns an encoding"):
            layer(x)
    attention = layer.self_attn.eval()
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    hinted = attention(x, x, x, attn_mask=causal, is_causal=True, positions=positions)[0]
    assert torch.equal(hinted, attention(x, x, x, attn_mask=causal, positions=positions)[0])
    with pytest.raises(ValueError, match="is_causal is a hint"):
        attention(x, x, x, is_causal=True, positions=positions)
    with pytest.raises(ValueError, match="expected one batched shape"):
        attention(x, x[:, :4], x[:, :4], positions=positions)
    with pytest.raises(ValueError, match="expected one batched shape"):
        attention(x[0], x[0], x[0], positions=positions)
