"""Field reports about dtype, autocast and buffers. Named after the repository and the number of the report."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mmpos import Positions, create_encoding, list_encodings
from mmpos.encodings import encoding_class
from mmpos.functional.resample import resample_table
from mmpos.functional.rotary import rotate
from mmpos.testing import TinyTransformer, build, encodings_of, seeded, tensors_of

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda module: module.to(torch.bfloat16),
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "parent": lambda module: nn.Sequential(nn.Linear(2, 2), module).to(torch.bfloat16),
}


def grid_for(name: str) -> tuple[int, ...]:
    """A training grid in two axes, or in as many as the encoding has."""
    low, high = encoding_class(name).facts.axes
    return (4, 3, 2, 2)[: min(max(2, low), high)]


@pytest.mark.parametrize("cast", list(CASTS))
@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
def test_gpt_neox_1003_transformers_25681_internlm_237_tables_in_half_precision(name: str, cast: str) -> None:
    """Frequencies or positions became 16-bit before their product was taken: cosines off by up to 2."""
    options = {"init": "axial"} if name == "rope_mixed" else {}
    stack = create_encoding(name, 32, 1, axes=1, theta=10000.0, **options)
    CASTS[cast](stack)
    rotation = stack.prepare(Positions.grid(2048))[0].prepared[0]
    exact = torch.arange(2048, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    assert float(exact[1857, 1]) == pytest.approx(1044.2678, abs=1e-4)
    assert rotation.cos.dtype == torch.float32
    assert (rotation.cos[0, 0].double() - exact.cos()).abs().max() < 4e-4
    q = seeded(1, 1, 2048, 32, dtype=torch.bfloat16)
    rounding = 2**-8 * 4  # one step of bfloat16 at the largest value
    assert (rotate(q, rotation).float() - rotate(q.float(), rotation)).abs().max() < rounding


@pytest.mark.parametrize("name", ["rope_axial", "rope_mixed"])
def test_diffusers_13920_autocast_reaches_the_angles(name: str) -> None:
    """From position 65536 on, bfloat16 holds one number for 16 neighbours: every image token had the same place."""
    positions = Positions.points(65536 + torch.arange(16.0)[:, None])
    assert len(set(positions.coords.bfloat16().flatten().tolist())) == 1
    stack = create_encoding(name, 32, 2, axes=1)
    expected = stack.prepare(positions)[0].prepared[0]
    with torch.autocast("cpu", torch.bfloat16):
        rotation = stack.prepare(positions)[0].prepared[0]
        rotated = rotate(seeded(1, 2, 16, 16), rotation)
    assert torch.equal(rotation.cos, expected.cos)
    assert torch.equal(rotation.sin, expected.sin)
    assert len({tuple(row) for row in rotation.cos[0, 0].tolist()}) == 16
    assert torch.equal(rotated, rotate(seeded(1, 2, 16, 16), expected))


@pytest.mark.parametrize("name", list_encodings())
def test_pytorch_97562_sam2_186_coremltools_2003_complex_tables(name: str) -> None:
    """A complex buffer loses its imaginary part in one spelling of a cast and keeps it in another."""
    sizes = grid_for(name)
    axes = len(sizes)
    stack = build(name, axes=axes, train_grid=sizes)
    assert not any(tensor.is_complex() for tensor in (*stack.state_dict().values(), *stack.buffers()))
    positions = Positions.grid(*sizes)
    assert not any(tensor.is_complex() for tensor in tensors_of([s.prepared for s in stack.prepare(positions)]))
    first, second = copy.deepcopy(stack), copy.deepcopy(stack)
    outputs = []
    for module in (first.to(torch.bfloat16), second.bfloat16()):
        model = TinyTransformer(module).to(torch.bfloat16).eval()
        outputs.append(model(model.tokens(positions).bfloat16(), positions))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", list_encodings())
def test_transformers_48892_45902_unsloth_4112_buffers_come_back_as_garbage(name: str) -> None:
    """A derived table that is not saved is random memory after construction on the meta device."""
    for encoding in encodings_of(build(name, train_grid=grid_for(name))):
        for key, buffer in encoding.named_buffers():
            owner, _, leaf = key.rpartition(".")
            module = encoding.get_submodule(owner)
            assert leaf not in module._non_persistent_buffers_set, (
                f"{key} {tuple(buffer.shape)} is derived and not saved"
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pytorch_image_models_2543_antialias_in_half_precision(dtype: torch.dtype) -> None:
    """Antialiased interpolation does not exist for half precision on CPU: resize in float32, cast at the end."""
    table = seeded(24, 8)
    out = resample_table(table.to(dtype), (4, 6), (3, 2), antialias=True)
    assert out.dtype == dtype
    exact = resample_table(table.to(dtype).float(), (4, 6), (3, 2), antialias=True)
    assert (out.float() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert math.isfinite(float(out.float().sum()))


def test_pytorch_image_models_2794_rotation_keeps_the_dtype() -> None:
    """A float32 table promoted bfloat16 queries to float32."""
    rotation = create_encoding("rope_axial", 32, 2).prepare(Positions.grid(2, 3))[0].prepared[0]
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        q: Tensor = seeded(1, 2, 6, 16, dtype=dtype)
        assert rotate(q, rotation).dtype == dtype
