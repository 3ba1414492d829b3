"""Helpers for tests of position encodings: inputs, a tiny transformer, scores, tolerances, properties.

They raise ``AssertionError`` with the measured and the allowed error and need no test framework.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.attention import attend
from mmpos.encodings.base import PositionEncoding
from mmpos.encodings.registry import EncodingStack, create_encoding, encoding_class
from mmpos.positions import Positions

__all__ = [
    "TinyTransformer",
    "assert_close",
    "assert_norm_preserved",
    "assert_relative",
    "build",
    "encodings_of",
    "image_for",
    "qkv",
    "randomise",
    "scores",
    "seeded",
    "tensors_of",
    "tolerance",
]


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unit normal numbers that depend on the shape and the seed only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(
    batch: int, heads: int, tokens: int, head_dim: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each ``(B, heads, L, d)``."""
    q, k, v = seeded(3, batch, heads, tokens, head_dim, seed=seed, dtype=dtype).unbind(0)
    return q, k, v


def tolerance(reference: Tensor, *, terms: int = 1, dtype: torch.dtype | None = None, slack: float = 8.0) -> float:
    """Absolute error that rounding alone explains.

    Args:
        reference: exact values; their largest magnitude sets the unit.
        terms: how many rounded numbers are summed in one value (rounding errors add up like a random walk).
        dtype: dtype the numbers were computed in; default that of ``reference``.
        slack: factor on the expected error.
    """
    eps = torch.finfo(reference.dtype if dtype is None else dtype).eps
    size = max(float(reference.detach().abs().max()), 1.0) if reference.numel() else 1.0
    return slack * eps * size * math.sqrt(max(terms, 1))


def assert_close(
    actual: Tensor, expected: Tensor, *, terms: int = 64, dtype: torch.dtype | None = None, what: str = "output"
) -> None:
    """Raise unless two tensors agree up to rounding, see :func:`tolerance`; NaN never agrees."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not actual.numel():
        return
    limit = tolerance(expected, terms=terms, dtype=dtype or actual.dtype)
    error = float((actual.detach().double() - expected.detach().double()).abs().max())
    if not error <= limit:
        raise AssertionError(f"{what}: largest error {error:.3e}, allowed {limit:.3e}")


def build(
    name: str, *, depth: int = 1, axes: int | None = None, train_grid: Sequence[int] | None = None, **options: Any
) -> EncodingStack:
    """A small stack of an encoding, with the first width and number of heads that the encoding accepts."""
    low, high = encoding_class(name).facts.axes
    if axes is None:
        axes = min(max(2, low), high)
    problem: ValueError | None = None
    for heads, head_dim in ((2, 24), (4, 24), (3, 24), (8, 24), (2, 16), (4, 32), (8, 16), (12, 24), (2, 8), (2, 64)):
        try:
            return create_encoding(name, heads * head_dim, heads, depth, axes=axes, train_grid=train_grid, **options)
        except ValueError as error:
            problem = error
    raise AssertionError(f"{name}: none of the usual widths and numbers of heads is accepted: {problem}")


def encodings_of(stack: EncodingStack) -> list[PositionEncoding]:
    """Every encoding module of a stack: the model-wide ones and those of all layers."""
    return [module for module in stack.modules() if isinstance(module, PositionEncoding)]


def image_for(stack: EncodingStack, positions: Positions, batch: int, *, seed: int = 0) -> Tensor | None:
    """A random picture of the size that an encoding which reads the image expects, ``None`` when no encoding does."""
    for encoding in stack.encodings_of(0):
        if encoding.needs_image and positions.grid_size is not None:
            pixels: Any = encoding.patch_size
            size = [cells * side for cells, side in zip(positions.grid_size, pixels, strict=False)]
            return seeded(batch, 3, *size, seed=seed)
    return None


@torch.no_grad()
def randomise(stack: EncodingStack, scale: float = 0.3, seed: int = 0) -> EncodingStack:
    """Move every parameter away from its initial value, as training would; tables that start at zero become visible.

    Weights of dense layers and convolutions move by ``scale`` over the square root of their inputs, which keeps the
    size of what they compute; a deep encoder would amplify rounding without bound otherwise.
    """
    inputs = {
        id(module.weight): module.weight[0].numel()
        for module in stack.modules()
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    }
    for index, parameter in enumerate(stack.parameters()):
        move = scale / inputs.get(id(parameter), 1) ** 0.5
        parameter.add_(seeded(*parameter.shape, seed=seed + index, dtype=parameter.dtype), alpha=move)
    return stack


def scores(
    stack: EncodingStack, positions: Positions, q: Tensor, k: Tensor, *, x: Tensor | None = None, layer: int = 0
) -> Tensor:
    """Attention logits of a layer before masks and softmax.

    Shape:
        q, k ``(B, heads, P + N, d)``, x ``(B, P + N, D)``; returns ``(B, heads, P + N, P + N)``.
    """
    state = stack.prepare(positions)[layer]
    scale = q.shape[-1] ** -0.5
    v = torch.zeros_like(q)
    if x is None:  # for methods that read the input of the attention layer
        x = seeded(q.shape[0], q.shape[-2], state.encodings[0].dim, seed=99, dtype=q.dtype)
    for encoding, prepared in zip(state.encodings, state.prepared, strict=True):
        q, k, v = encoding.transform_qkv(q, k, v, prepared, x)
    logits = torch.matmul(q, k.mT) * scale
    for encoding, prepared in zip(state.encodings, state.prepared, strict=True):
        term = encoding.logit_bias(q, k, prepared)
        if term is not None:
            logits = logits + term
    return logits


class TinyTransformer(nn.Module):
    """Pre-norm attention blocks around a stack: every hook of the protocol is called as a real model calls it.

    Example:
        >>> stack = build("rope_axial", depth=2)
        >>> model = TinyTransformer(stack)
        >>> positions = Positions.grid(2, 3, num_prefix=1)
        >>> model(model.tokens(positions), positions).shape
        torch.Size([1, 7, 48])
    """

    def __init__(self, stack: EncodingStack, *, seed: int = 0) -> None:
        super().__init__()
        first = stack.encodings_of(0)[0]
        self.stack = stack
        self.dim, self.heads, self.head_dim = first.dim, first.num_heads, first.head_dim
        inner = self.heads * self.head_dim
        self.qkv = nn.ParameterList(
            seeded(3 * inner, self.dim, seed=seed + 2 * layer) * self.dim**-0.5 for layer in range(stack.depth)
        )
        self.proj = nn.ParameterList(
            seeded(self.dim, inner, seed=seed + 2 * layer + 1) * inner**-0.5 for layer in range(stack.depth)
        )

    def tokens(self, positions: Positions, *, batch: int | None = None, seed: int = 0) -> Tensor:
        """Random input for these positions. Shape: ``(B, P + N, D)``."""
        sizes = [positions.coords.shape[0], 1 if positions.mask is None else positions.mask.shape[0]]
        return seeded(max(sizes) if batch is None else batch, positions.num_tokens, self.dim, seed=seed)

    def add(self, x: Tensor, positions: Positions) -> Tensor:
        """Token hook of the stack, with a picture for encodings that read one."""
        return self.stack.add_to_tokens(x, positions, image=image_for(self.stack, positions, x.shape[0]))

    def forward(self, x: Tensor, positions: Positions, *, plain: bool = False, layers: int | None = None) -> Tensor:
        x = self.add(x, positions)
        states = self.stack.prepare(positions)
        for layer in range(self.stack.depth if layers is None else layers):
            h = F.layer_norm(x, (self.dim,))
            q, k, v = F.linear(h, self.qkv[layer]).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            out = attend(q, k, v, states[layer], x=h, plain=plain)
            x = x + F.linear(out.transpose(1, 2).flatten(2), self.proj[layer])
            x = self.stack.mix_tokens(layer, x, positions)
        return x


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors inside a prepared value: dataclasses, mappings, sequences."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_of(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_of(entry)


# -- properties -------------------------------------------------------------------------------------------------------


def assert_relative(
    stack: EncodingStack, positions: Positions, shift: Sequence[float], *, seed: int = 0, layer: int = 0
) -> None:
    """Raise unless moving every token by ``shift`` leaves all logits between placed tokens as they are."""
    first = stack.encodings_of(layer)[0]
    dtype = positions.coords.dtype
    batch = positions.coords.shape[0]
    q, k, _ = qkv(batch, first.num_heads, positions.num_tokens, first.head_dim, seed=seed, dtype=dtype)
    moved = positions.with_coords(positions.coords + torch.tensor(list(shift), dtype=dtype))
    start = positions.num_prefix
    before, after = (scores(stack, p, q, k, layer=layer)[..., start:, start:] for p in (positions, moved))
    assert_close(
        after, before, terms=64 * first.head_dim, what=f"logits of {stack.title} after a shift by {tuple(shift)}"
    )


def assert_norm_preserved(x: Tensor, y: Tensor, *, group: int = 2, layout: str = "interleaved") -> None:
    """Raise unless every group of channels kept its length; layout ``half`` groups channels ``d / group`` apart."""
    axis = -1 if layout == "interleaved" else -2
    shape = (-1, group) if layout == "interleaved" else (group, -1)
    lengths = [t.unflatten(-1, shape).norm(dim=axis) for t in (x, y)]
    assert_close(lengths[1], lengths[0], terms=group, what="length of channel groups")
