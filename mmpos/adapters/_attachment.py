"""What the adapters share: the record of an attachment, building its stack, and loading checkpoints into it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.encodings import EncodingStack, create_encoding, encoding_options

__all__ = ["MODES", "STACK", "Attachment", "adopt_table", "build_stack", "record_of", "require", "with_model_facts"]

logger = logging.getLogger("mmpos")

#: name of the sub-module that holds the encodings
STACK = "position_encoding"
MODES = ("remove", "keep", "adopt")
_RECORD = "_mmpos_attachment"


@dataclass
class Attachment:
    """What it takes to undo an attachment: what was set aside, and what was put on the instance.

    Args:
        mode: ``remove``, ``keep`` or ``adopt``.
        grid: patches of the model's table when it was attached, height before width (of a video, frames first).
        own: the model's own encodings, table and rotary module, by attribute name; they are not parameters meanwhile.
        table_name: which of them is the table.
        methods: attributes put on the model.
        layers: modules whose attribute ``layer_method`` was put on them.
        layer_method: name of that attribute.
    """

    mode: str
    grid: tuple[int, ...]
    own: dict[str, Any]
    table_name: str
    methods: tuple[str, ...] = ()
    layers: list[nn.Module] = field(default_factory=list)
    layer_method: str = "forward"
    hook: Any = None

    def bind(self, model: Any, stack: EncodingStack, methods: Mapping[str, Callable[..., Any]], layer: Any) -> None:
        """Set the own encodings aside, register the stack and bind the functions to this one instance."""
        if self.mode == "adopt":
            adopt_table(stack, self.own[self.table_name], self.grid)
            setattr(model, self.table_name, None)
        elif self.mode == "remove":
            for name in self.own:
                setattr(model, name, None)
        setattr(model, STACK, stack.train(model.training))
        self.methods = tuple(methods)
        for name, function in methods.items():  # partial objects, because they survive deepcopy and pickle
            setattr(model, name, partial(function, model))
        for module in self.layers:
            setattr(module, self.layer_method, partial(layer, module))
        self.hook = model.register_load_state_dict_pre_hook(_on_load)
        setattr(model, _RECORD, self)

    def release(self, model: Any, like: Tensor) -> None:
        """Undo :meth:`bind`; what was set aside follows the device and dtype of ``like``."""
        self.hook.remove()
        for module in self.layers:
            if self.layer_method in vars(module):
                delattr(module, self.layer_method)
        for name in (*self.methods, _RECORD, STACK):
            delattr(model, name)
        for name, value in self.own.items():
            if value is None or getattr(model, name) is not None:
                continue
            if isinstance(value, nn.Module):
                value = value.to(device=like.device, dtype=like.dtype).train(model.training)
            else:  # the same parameter object, so that an optimizer that knows it keeps knowing it
                value.data = value.data.to(device=like.device, dtype=like.dtype)
            setattr(model, name, value)


def record_of(model: Any) -> Attachment:
    """The attachment of a model; raises when there is none."""
    record = getattr(model, _RECORD, None)
    if record is None:
        raise ValueError("model: no position encoding is attached; call attach(model, name) first")
    return record


def check_free(model: Any, pos_embed: str) -> None:
    """Raise unless a model can be attached to."""
    if pos_embed not in MODES:
        raise ValueError(f"pos_embed: expected one of {MODES}, got {pos_embed!r}")
    if hasattr(model, _RECORD):
        raise ValueError(f"model: {getattr(model, STACK).title!r} is already attached; call detach(model) first")


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package; a missing one names the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is needed here and not installed: pip install "mmpos[{extra}]"') from error


# -- the stack --------------------------------------------------------------------------------------------------------


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
    like: Tensor,
    axes: int = 2,
) -> EncodingStack:
    """A stack for a model of these sizes, placed and cast as ``like``; a ready stack is checked against them."""
    if isinstance(encoding, EncodingStack):
        if options or per_layer is not None:
            raise ValueError(
                f"options: {sorted(options) or ['per_layer']} cannot be given with a ready stack; give them to "
                "create_encoding"
            )
        stack = encoding
        facts = {"axes": axes, "dim": dim, "num_heads": num_heads, "head_dim": head_dim, "num_prefix": num_prefix}
        _check_stack(stack, depth=depth, **facts)
    else:
        with torch.device(like.device):
            stack = create_encoding(
                encoding,
                dim,
                num_heads,
                depth,
                head_dim=head_dim,
                axes=axes,
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
                    f"encoding: {encoding.name} was built for {name}={getattr(encoding, name)}, the model has {name}="
                    f"{value}; give {name}={value} to create_encoding"
                )


def with_model_facts(encoding: Any, facts: Mapping[str, Any]) -> Any:
    """The requested encodings with what the model knows (patch size, channels) where they ask and nothing was given."""
    if isinstance(encoding, EncodingStack):
        return encoding
    pair = isinstance(encoding, tuple) and len(encoding) == 2 and isinstance(encoding[1], Mapping)
    single = isinstance(encoding, str) or pair
    specs = []
    for entry in [encoding] if single else encoding:
        name, given = (entry, {}) if isinstance(entry, str) else entry
        known = encoding_options(name)
        specs.append((name, {**{key: value for key, value in facts.items() if key in known}, **given}))
    return specs[0] if single else specs


def adopt_table(stack: EncodingStack, own: Tensor | None, grid: tuple[int, ...]) -> None:
    """Hand a model's table ``(1, rows, D)`` or ``(rows, D)`` to the encoding ``learned``."""
    learned: Any = dict(stack.shared.items()).get("learned")
    if learned is None or own is None:
        missing = "an encoding 'learned'" if learned is None else "a model with a table of its own"
        raise ValueError(
            f"pos_embed: 'adopt' needs {missing} (asked for {stack.title!r}); use pos_embed='remove' or 'keep'"
        )
    table = own.detach().flatten(0, -2)
    if learned.train_grid != grid or learned.table.shape != table.shape:
        raise ValueError(
            f"pos_embed: the table of the model is {tuple(table.shape)} on the grid {grid}, 'learned' was built for "
            f"{tuple(learned.table.shape)} on {learned.train_grid}; leave out train_grid and embed_prefix"
        )
    with torch.no_grad():
        learned.table.copy_(table)
    learned.table.requires_grad_(own.requires_grad)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _on_load(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let weights of the original model load: its table is dropped or adopted, the encoding keeps its values."""
    record = record_of(model)
    start = f"{prefix}{STACK}."
    current = getattr(model, STACK).state_dict(prefix=start)
    if current and not any(key.startswith(start) for key in state):
        logger.warning(
            "%s*: not in the checkpoint, which is of a model without it; the encoding keeps its values", start
        )
        state.update(current)
        table = f"{prefix}{record.table_name}"
        if record.mode == "adopt" and table in state:
            logger.warning("%s: adopted as %sshared.learned.table", table, start)
            state[f"{start}shared.learned.table"] = state.pop(table).flatten(0, -2)
    unused = [name for name in record.own if getattr(model, name, None) is None]
    dropped = [key for key in state if key.startswith(prefix) and key[len(prefix) :].partition(".")[0] in unused]
    if dropped:
        logger.warning("%s: not used by the attached encoding and dropped from the checkpoint", ", ".join(dropped))
        for key in dropped:
            del state[key]
