"""What the adapters share: building a stack for a model, and the optional import."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from mmpos.encodings import EncodingStack, create_encoding

__all__ = ["build_stack", "require"]


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package; a missing one names the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is needed here and not installed: pip install "mmpos[{extra}]"') from error


def build_stack(
    encoding: Any,
    *,
    dim: int,
    num_heads: int,
    head_dim: int,
    depth: int,
    num_prefix: int,
    train_grid: Sequence[int] | None,
    per_layer: bool | None,
    options: dict[str, Any],
    like: torch.Tensor,
) -> EncodingStack:
    """A stack for a model of these sizes, placed and cast as ``like``; a ready stack is checked against them."""
    if isinstance(encoding, EncodingStack):
        if options or per_layer is not None:
            raise ValueError(
                f"options: {sorted(options) or ['per_layer']} cannot be given with a ready stack; give them "
                "to create_encoding"
            )
        stack = encoding
        _check_stack(stack, dim=dim, num_heads=num_heads, head_dim=head_dim, depth=depth)
    else:
        with torch.device(like.device):
            stack = create_encoding(
                encoding,
                dim,
                num_heads,
                depth,
                head_dim=head_dim,
                axes=2,
                num_prefix=num_prefix,
                train_grid=train_grid,
                per_layer=per_layer,
                **options,
            )
    return stack.to(device=like.device, dtype=like.dtype)


def _check_stack(stack: EncodingStack, *, depth: int, **expected: int) -> None:
    if stack.depth != depth:
        raise ValueError(f"encoding: the model has {depth} blocks, the stack was built for depth {stack.depth}")
    for encoding in stack.encodings_of(0):
        for name, value in expected.items():
            if getattr(encoding, name) != value:
                raise ValueError(
                    f"encoding: {encoding.name} was built for {name} {getattr(encoding, name)}, the model "
                    f"has {name} {value}"
                )


def device_and_dtype_of(module: nn.Module) -> torch.Tensor:
    """A parameter that tells device and dtype."""
    return next(p for p in module.parameters() if p.is_floating_point())
