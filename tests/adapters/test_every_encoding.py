"""What must hold for every registered encoding on a timm ViT: it acts, only it acts, all ways of running agree."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

from mmpos import Positions
from mmpos.adapters.timm import attach, detach, stack_of
from mmpos.encodings import encoding_class
from mmpos.functional.rotary import Rotation
from mmpos.models import create_vit, initialise

from .models import (
    GRID,
    IMAGE,
    difference,
    flat_encodings,
    image,
    mean_vit,
    order_of,
    randomise,
    shuffle_patches,
    tiny_vit,
)

NAMES = flat_encodings()
ACTIVE = [name for name in NAMES if name != "none"]
FREE = [name for name in NAMES if not encoding_class(name).facts.needs_grid]
EXPORTABLE = [name for name in NAMES if encoding_class(name).facts.exportable]
COUNT = GRID[0] * GRID[1]


def attached(name: str, model=None):
    model = mean_vit() if model is None else model
    torch.manual_seed(5)
    vit = attach(model, name)
    randomise(stack_of(vit))
    return vit.eval()


@pytest.fixture(autouse=True)
def _one_thread_and_no_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- the requested encoding, and only it, acts ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_permuting_the_patches_changes_the_output_only_if_there_is_an_encoding(name):
    vit, x = attached(name), image()
    moved = difference(vit(shuffle_patches(x, order_of(COUNT))), vit(x))
    if name == "none":
        assert moved < 1e-5
    else:
        assert moved > 1e-3


@pytest.mark.parametrize("name", FREE)
def test_permuting_patches_together_with_their_positions_changes_nothing(name):
    vit, x, order = attached(name), image(), order_of(COUNT)
    expected = vit(x)
    assert difference(vit(x, positions=Positions.grid(*GRID).take(order)), expected) < 2e-5
    raster = Positions.grid(*GRID)
    points = Positions.points(raster.coords[:, order], extent=GRID)
    assert difference(vit(shuffle_patches(x, order), positions=points), expected) < 2e-5


@pytest.mark.parametrize("name", ACTIVE)
def test_a_table_of_the_model_is_out_of_the_way(name):
    """With the model's own table enlarged tenfold the output stays: nothing but the requested encoding acts."""
    plain, loud = tiny_vit(), tiny_vit()
    with torch.no_grad():
        loud.pos_embed.mul_(10).add_(1)
    x = image()
    assert difference(plain(x), loud(x)) > 1e-2
    assert torch.equal(attached(name, plain)(x), attached(name, loud)(x))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefix", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}])
def test_detach_gives_the_original_back(name, prefix):
    vit, x = tiny_vit(**prefix), image()
    before, keys, attributes = vit(x), list(vit.state_dict()), set(vars(vit))
    attach(vit, name)
    assert list(vit.state_dict()) != keys or name not in ("learned",)
    detach(vit)
    assert torch.equal(vit(x), before)
    assert list(vit.state_dict()) == keys
    assert set(vars(vit)) == attributes
    assert all("forward" not in vars(block.attn) for block in vit.blocks)


# -- masks, subsets, batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_padded_patches_do_not_matter(name):
    vit, x = attached(name, mean_vit()), image()
    mask = torch.rand(2, COUNT, generator=torch.Generator().manual_seed(2)) > 0.3
    positions = Positions.grid(*GRID, mask=mask)
    cells = mask.reshape(2, 1, *GRID).repeat_interleave(4, 2).repeat_interleave(4, 3)
    other = torch.where(cells, x, x + 5)
    assert difference(vit(x, positions=positions), vit(other, positions=positions)) < 1e-5
    assert difference(vit(x), vit(other)) > 1e-3


@pytest.mark.parametrize("name", FREE)
def test_a_subset_equals_masking_the_rest(name):
    vit, x = attached(name, mean_vit()), image()
    keep = torch.tensor([[7, 0, 3, 11], [2, 14, 9, 5]])
    mask = torch.zeros(2, COUNT, dtype=torch.bool).scatter_(1, keep, True)
    subset = vit(x, positions=Positions.grid(*GRID).take(keep))
    assert difference(subset, vit(x, positions=Positions.grid(*GRID, mask=mask))) < 2e-5
    alone = vit(x[1:], positions=Positions.grid(*GRID).take(keep[1:]))
    assert difference(subset[1:], alone) < 2e-5


@pytest.mark.parametrize("name", FREE)
def test_patch_dropout_takes_the_positions_along(name):
    vit, x = attached(name, mean_vit(patch_drop_rate=0.5)), image()
    vit.patch_drop.train()  # alone, because some encodings draw noise in training
    torch.manual_seed(4)
    dropped = vit(x)
    assert vit.forward_features(x).shape[1] == int(COUNT * 0.5)
    torch.manual_seed(4)
    keep = torch.randn(2, COUNT).argsort(dim=-1)[:, : int(COUNT * 0.5)]
    vit.eval()
    assert difference(dropped, vit(x, positions=Positions.grid(*GRID).take(keep))) < 2e-5


# -- every way of running agrees --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", NAMES)
def test_compile_without_graph_breaks(name):
    vit = attached(name, tiny_vit(reg_tokens=1))
    compiled = torch.compile(vit, fullgraph=True, backend="eager")
    for size in (IMAGE, (20, 8)):
        x = image(size=size)
        assert difference(compiled(x), vit(x)) < 2e-5


def _dynamic():
    height, width = (torch.export.Dim(axis, min=2, max=32) for axis in ("rows", "columns"))
    return ({2: 4 * height, 3: 4 * width},)


@pytest.mark.parametrize("name", EXPORTABLE)
def test_export_with_dynamic_height_and_width(name):
    vit = attached(name, tiny_vit())
    exported = torch.export.export(vit, (image(),), dynamic_shapes=_dynamic())
    for size in (IMAGE, (28, 16), (8, 36)):
        x = image(size=size)
        assert difference(exported.module()(x), vit(x)) < 2e-5


@pytest.mark.parametrize("name", EXPORTABLE)
def test_trace(name):
    vit, x = attached(name, tiny_vit()), image()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns about each size it sees, and that it is deprecated
        traced = torch.jit.trace(vit, x, check_trace=False)
    y = image(seed=8)
    assert difference(traced(y), vit(y)) < 2e-5


NO_OPERATOR = {
    "comrope_ap": "the matrix exponential",
    "comrope_ld": "the matrix exponential",
    "liere": "the matrix exponential",
    "string_cayley": "the solution of linear systems",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXPORTABLE if name not in NO_OPERATOR])
def test_onnx(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    vit = attached(name, tiny_vit())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        program = torch.onnx.export(vit, (image(),), dynamo=True, dynamic_shapes=_dynamic(), verbose=False)
        program.save(tmp_path / "vit.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "vit.onnx", providers=["CPUExecutionProvider"])
    for size in (IMAGE, (28, 16)):
        x = image(size=size)
        got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        assert difference(torch.from_numpy(got), vit(x)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NO_OPERATOR))
def test_onnx_has_no_operator_for_these(name):
    """The exporter says so; once it does not, the name moves to the test above."""
    vit, x = attached(name, tiny_vit()), image()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.onnx.OnnxExporterError, match="No ONNX function found"):
            torch.onnx.export(vit, (x,), dynamo=True, verbose=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rope_mixed", "rope_axial"])
def test_inductor(name):
    vit, x = attached(name, tiny_vit()), image()
    compiled = torch.compile(vit, fullgraph=True)
    assert difference(compiled(x), vit(x)) < 1e-4
    compiled(x).square().sum().backward()
    gradients = [p.grad.clone() for p in vit.parameters() if p.grad is not None]
    vit.zero_grad()
    vit(x).square().sum().backward()
    for a, b in zip(gradients, [p.grad for p in vit.parameters() if p.grad is not None], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


# -- dtypes -----------------------------------------------------------------------------------------------------------


def _rotations(vit):
    states = stack_of(vit).prepare(Positions.grid(*GRID, num_prefix=vit.num_prefix_tokens))
    tables = [p.real() for state in states for p in state.prepared if isinstance(p, Rotation)]
    return [t for pair in tables for t in pair]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cast", ["to", "bfloat16", "autocast"])
def test_bfloat16_keeps_angles_and_stays_near(name, cast):
    vit, x = attached(name, tiny_vit()), image()
    reference, tables = vit(x), _rotations(vit)
    if cast == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, after = vit(x), _rotations(vit)
    else:
        vit = vit.to(torch.bfloat16) if cast == "to" else vit.bfloat16()
        out, after = vit(x.bfloat16()), _rotations(vit)
        assert out.dtype == torch.bfloat16
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(after, tables, strict=True))
    assert difference(out.float(), reference) < 0.12 * difference(reference, torch.zeros(()))


# -- copies, building, training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_copies_are_independent(name):
    vit, x = attached(name, tiny_vit()), image()
    before = vit(x)
    for other in (copy.deepcopy(vit), pickle.loads(pickle.dumps(vit))):
        assert torch.equal(other(x), before)
        randomise(other)
        assert difference(other(x), before) > 1e-3
        assert torch.equal(vit(x), before)
        assert torch.equal(detach(other).state_dict()["blocks.0.attn.qkv.weight"], other.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("name", NAMES)
def test_meta_construction(name):
    make = {"encoding": name, "image_size": IMAGE, "embed_dim": 128, "num_heads": 4, "depth": 2}
    eager = create_vit(**make)
    with torch.device("meta"):
        empty = create_vit(**make)
    assert all(p.is_meta for p in empty.parameters())
    built = empty.to_empty(device="cpu")
    x, outputs = image(), []
    for vit in (eager, built, built):
        torch.manual_seed(7)
        initialise(vit)
        outputs.append(vit.eval()(x))
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert eager.state_dict().keys() == built.state_dict().keys()


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient_and_checkpointing_does_not_change_it(name):
    # averaged, because a class token alone reads only its own row of the last attention
    vit, x = attached(name, tiny_vit(global_pool="avg")).train(), image()
    gradients = []
    for checkpointing in (False, True):
        vit.set_grad_checkpointing(checkpointing)
        vit.zero_grad()
        torch.manual_seed(0)
        vit(x).square().sum().backward()
        missing = [key for key, p in vit.named_parameters() if p.grad is None and p.requires_grad]
        assert not missing
        gradients.append({key: p.grad.clone() for key, p in vit.named_parameters() if p.requires_grad})
    for key, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], value, rtol=1e-5, atol=1e-6, msg=key)
    idle = [k for k, v in gradients[0].items() if k.startswith("position_encoding") and float(v.abs().max()) == 0]
    assert not idle


@pytest.mark.parametrize("name", [name for name in NAMES if encoding_class(name).facts.scope == "layer"])
def test_layers_own_their_parameters(name):
    vit = attached(name, mean_vit())
    first = vit.forward_intermediates(image(), indices=[0], stop_early=True, intermediates_only=True)[0]
    first.square().sum().backward()
    layers = stack_of(vit).layers
    # a method that acts after the attention of a block may leave some parameters of its layer idle, never all
    assert any(p.grad is not None and float(p.grad.abs().max()) > 0 for p in layers[0].parameters())
    assert all(p.grad is None or float(p.grad.abs().max()) == 0 for p in layers[1].parameters())
    pointers = [{p.data_ptr() for p in layer.parameters()} for layer in layers]
    assert not pointers[0] & pointers[1]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_attached_models_load_strictly(name):
    vit, x = attached(name, tiny_vit()), image()
    other = attach(randomise(tiny_vit()), name).eval()
    assert difference(other(x), vit(x)) > 1e-3
    other.load_state_dict(vit.state_dict(), strict=True)
    assert torch.equal(other(x), vit(x))
    incomplete = {key: value for key, value in vit.state_dict().items() if key != "blocks.1.attn.qkv.weight"}
    with pytest.raises(RuntimeError, match="blocks.1.attn.qkv.weight"):
        other.load_state_dict(incomplete)
