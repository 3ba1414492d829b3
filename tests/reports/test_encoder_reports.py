"""Field reports about encoders: numerics, resizing, loading. Named after the repository and number of the report."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmpos import Positions, attend, create_encoding, list_encodings
from mmpos.functional.resample import resample_table
from mmpos.functional.rotary import rotate, rotation_from_angles, to_half_layout
from mmpos.testing import TinyTransformer, assert_close, build, qkv, scores, seeded
from tests.reports.test_dtype_reports import grid_for


def test_pytorch_image_models_2541_diffusers_10877_height_and_width_swapped() -> None:
    """Square inputs hide an exchange of rows and columns completely."""
    positions = Positions.grid(2, 3)
    token = 1 * 3 + 2
    assert positions.coords[0, token].tolist() == [1, 2]
    for order, first, second in (("xy", 2.0, 1.0), ("ij", 1.0, 2.0)):
        rotation = create_encoding("rope_axial", 8, 1, axis_order=order).prepare(positions)[0].prepared[0]
        assert_close(rotation.sin[0, 0, token, [0, 2]], torch.tensor([first, second]).sin())
    # the same through a learned table and sine-cosine features: a 2 x 3 table is not read as 3 x 2
    learned = create_encoding("learned", 4, 1, train_grid=(2, 3))
    table = learned.shared["learned"].table
    added = learned.add_to_tokens(torch.zeros(1, 6, 4), positions)
    assert torch.equal(added[0], table)
    swapped = Positions.grid(3, 2)
    assert not torch.allclose(learned.add_to_tokens(torch.zeros(1, 6, 4), swapped)[0], table)


def test_pytorch_image_models_2692_the_wrong_pairing_of_channels() -> None:
    """Also pytorch#149534, rotary-embedding-torch#47, croco#3: a checkpoint of one layout ran in the other."""
    quarter = torch.tensor([[torch.pi / 2, 0.0]])[None, None]
    q = torch.tensor([1.0, 0, 0, 0])[None, None, None]
    results = {layout: rotate(q, rotation_from_angles(quarter, layout=layout)) for layout in ("interleaved", "half")}
    assert results["interleaved"].flatten().round().tolist() == [0, 1, 0, 0]
    assert results["half"].flatten().round().tolist() == [0, 0, 1, 0]
    with pytest.raises(ValueError, match="layout.*'interleaved', 'half'"):
        create_encoding("rope_axial", 8, 1, layout="neox")
    q, k, _ = qkv(1, 1, 6, 8)
    one, other = (create_encoding("rope_axial", 8, 1, layout=layout) for layout in ("interleaved", "half"))
    positions = Positions.grid(2, 3)
    converted = scores(other, positions, to_half_layout(q), to_half_layout(k))
    assert_close(converted, scores(one, positions, q, k), terms=64)


@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
def test_pytorch_image_models_2549_patch_dropout(name: str) -> None:
    """The table still had all 16 positions while 8 tokens were left; each sample keeps its own 8."""
    stack = create_encoding(name, 32, 2)
    positions = Positions.grid(4, 4)
    keep = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:8] for i in range(2)])
    q, k, _ = qkv(2, 2, 16, 16)
    index = keep[:, None, :, None].expand(-1, 2, -1, 16)
    few = scores(stack, positions.take(keep), q.gather(2, index), k.gather(2, index))
    full = scores(stack, positions, q, k)
    for row in range(2):
        assert_close(few[row], full[row][:, keep[row]][:, :, keep[row]], terms=64)


def test_pytorch_image_models_2155_heads_not_split() -> None:
    state = create_encoding("rope_axial", 32, 2).prepare(Positions.grid(2, 3))[0]
    x = torch.zeros(2, 6, 32)
    with pytest.raises(ValueError, match=r"\(B, heads, L, d\), got \(2, 6, 32\)"):
        attend(x, x, x, state)
    with pytest.raises(ValueError, match=r"\(2, 6, 32\)"):
        rotate(x, state.prepared[0])


def test_rotary_embedding_torch_45_odd_head_dim() -> None:
    for name in ("rope_axial", "rope_mixed"):
        with pytest.raises(ValueError, match="head_dim.*got 9"):
            create_encoding(name, 18, 2)
        with pytest.raises(ValueError, match="head_dim.*got 9"):
            create_encoding(name, 18, 2, axes=1)


def test_multidim_positional_encoding_42_3_channels_that_do_not_divide() -> None:
    """A 2-D sine encoding for 5 channels returned 8 of 10 channels without an error."""
    with pytest.raises(ValueError, match=r"5"):
        create_encoding("sincos", 5, 1)
    stack = create_encoding("sincos", 8, 1)
    assert stack.add_to_tokens(torch.zeros(1, 6, 8), Positions.grid(2, 3)).shape == (1, 6, 8)
    with pytest.raises(ValueError, match=r"(?s)8.*10|10.*8"):
        stack.add_to_tokens(torch.zeros(1, 6, 10), Positions.grid(2, 3))
    with pytest.raises(ValueError, match=r"(?s)8.*10|10.*8"):
        create_encoding("learned", 8, 1, train_grid=(2, 3)).add_to_tokens(torch.zeros(1, 6, 10), Positions.grid(2, 3))


@pytest.mark.parametrize("size", [39, 43, 78, 86, 115, 123])
def test_dino_8_dinov2_333_378_scale_factor_rounding(size: int) -> None:
    """A computed scale factor gave a grid one short at exactly these sizes."""
    table = seeded(37 * 37, 2)
    assert resample_table(table, (37, 37), (size, size + 1)).shape == (size * (size + 1), 2)
    expected = nn.functional.interpolate(
        table.T.reshape(1, 2, 37, 37), size=(size, size + 1), mode="bicubic", antialias=True
    )
    assert_close(resample_table(table, (37, 37), (size, size + 1)), expected.flatten(2)[0].T, terms=64)


@pytest.mark.parametrize("num_prefix", [0, 1, 5])
def test_pytorch_image_models_2737_2317_2190_same_token_count_other_grid(num_prefix: int) -> None:
    """A 2 x 8 table was left as it is for a 4 x 4 grid, because both have 16 tokens."""
    stack = create_encoding("learned", 4, 1, train_grid=(2, 8), num_prefix=num_prefix)
    table = stack.shared["learned"].table.detach()
    for sizes in ((4, 4), (3, 5)):
        positions = Positions.grid(*sizes, num_prefix=num_prefix)
        added = stack.add_to_tokens(torch.zeros(1, positions.num_tokens, 4), positions)[0]
        assert torch.equal(added[:num_prefix], table[:num_prefix])
        source = table[num_prefix:].T.reshape(1, 4, 2, 8)
        expected = nn.functional.interpolate(source, size=sizes, mode="bicubic", antialias=True).flatten(2)[0].T
        assert_close(added[num_prefix:], expected, terms=64)
        assert not torch.allclose(added[num_prefix:][:15], table[num_prefix:][:15], atol=1e-3)


def test_pytorch_image_models_1794_1365_open_clip_783_985_resize_on_loading(caplog: pytest.LogCaptureFixture) -> None:
    """Saved at 4 x 4 with one prefix row, loaded at 6 x 4 with none: every way of loading resizes and says so."""
    saved = create_encoding("learned", 4, 1, train_grid=(4, 4), num_prefix=1).state_dict()
    expected = resample_table(saved["shared.learned.table"][1:], (4, 4), (6, 4))
    caplog.set_level("INFO")
    for strict in (True, False):
        target = create_encoding("learned", 4, 1, train_grid=(6, 4), num_prefix=0)
        target.load_state_dict(dict(saved), strict=strict)
        assert_close(target.shared["learned"].table, expected, terms=16)
    outer = nn.ModuleDict({"encoding": create_encoding("learned", 4, 1, train_grid=(6, 4), num_prefix=0)})
    outer.load_state_dict({f"encoding.{key}": value for key, value in saved.items()})
    assert_close(outer["encoding"].shared["learned"].table, expected, terms=16)
    assert "4x4 -> 6x4" in caplog.text
    assert "prefix 1 -> 0" in caplog.text


def test_pytorch_image_models_2543_2542_750_which_interpolation() -> None:
    """Bicubic or bilinear, with or without antialiasing, is a stated choice, and each is the one it says."""
    table = seeded(16 * 16, 3)
    seen: list[Tensor] = []
    for mode in ("bicubic", "bilinear"):
        for antialias in (False, True):
            ours = resample_table(table, (16, 16), (10, 24), mode=mode, antialias=antialias)
            theirs = nn.functional.interpolate(
                table.T.reshape(1, 3, 16, 16), size=(10, 24), mode=mode, antialias=antialias
            )
            assert_close(ours, theirs.flatten(2)[0].T, terms=64)
            assert all((ours - other).abs().max() > 0.05 for other in seen)
            seen.append(ours)
    with pytest.raises(ValueError, match="mode"):
        create_encoding("learned", 4, 1, train_grid=(2, 3), mode="nearest")


@pytest.fixture
def one_process_group() -> object:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield None
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("one_process_group")
def test_rotary_embedding_torch_37_unused_parameters_and_deit_39_weight_decay_behind_wrappers() -> None:
    """Two steps without a search for unused parameters, and names without decay behind the wrapper."""
    for name in list_encodings():
        axes = len(grid_for(name))
        model = TinyTransformer(build(name, depth=2, axes=axes, train_grid=grid_for(name), num_prefix=1))
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
        positions = Positions.grid(*(3, 4, 2, 2)[:axes], num_prefix=1)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        before = {key: value.clone() for key, value in model.stack.state_dict().items()}
        for step in range(2):  # the second forward raises when the first left a parameter without gradient
            optimizer.zero_grad()
            out = wrapped(model.tokens(positions, batch=2, seed=step), positions)
            (out * seeded(*out.shape, seed=9)).sum().backward()
            optimizer.step()
        for key, parameter in model.stack.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, (name, key)
                assert not torch.equal(parameter, before[key]) or parameter.grad.abs().max() < 1e-7, (name, key)
        names = {key for key, _ in wrapped.named_parameters()}
        assert {f"module.stack.{key}" for key in model.stack.no_weight_decay()} <= names
