"""Position encodings for timm's vision transformers: :func:`attach`, :func:`detach`.

Supported are ``VisionTransformer``, ``VisionTransformerDistilled`` and ``Eva`` (EVA, EVA-02, DINOv3 and timm's
``vit_*_rope_*`` models). The encoding becomes the sub-module ``position_encoding`` of the model; the model keeps its
class, its parameters and its methods. Only this instance changes: its forward methods are bound to functions that carry
positions as an argument.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.adapters import _timm_forward
from mmpos.adapters._checks import build_stack, require
from mmpos.adapters._timm_attention import attention_forward, attention_modules
from mmpos.encodings import EncodingStack

__all__ = ["attach", "detach", "stack_of"]

logger = logging.getLogger("mmpos")

STACK = "position_encoding"
_RECORD = "_mmpos_attachment"
_MODES = ("remove", "keep", "adopt")


@dataclass
class _Attachment:
    """What :func:`detach` needs: what was set aside, and what was put on the instance."""

    mode: str
    grid: tuple[int, int]
    table: Tensor | None
    rope: nn.Module | None
    methods: tuple[str, ...]
    hook: Any = None


def attach(
    vit: Any,
    encoding: Any,
    *,
    pos_embed: str = "remove",
    train_grid: Sequence[int] | None = None,
    per_layer: bool | None = None,
    **options: Any,
) -> Any:
    """Give a timm model another position encoding, in place, and return it.

    Args:
        vit: a timm model; its ``forward``, ``forward_features``, ``forward_intermediates`` and ``forward_head`` then
            also take ``positions=`` (a padding mask, a subset of the patches, free points).
        encoding: a registry name, a pair ``(name, options)``, a list of these, or a ready :class:`EncodingStack`.
        pos_embed: what happens to the encoding the model came with. ``remove`` sets its table and its rotary encoding
            aside, so that the requested encoding and only it acts; ``keep`` leaves both acting next to it; ``adopt``
            hands the table to the encoding ``learned``, which starts from it and leaves the outputs of the model as
            they were.
        train_grid: patches of the training images, height before width; default the model's current grid.
        per_layer: whether each layer owns its parameters; default as the method says.
        options: options of a single encoding.

    Example:
        >>> import timm
        >>> vit = timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=2, dynamic_img_size=True)
        >>> attach(vit, "rope_mixed")(torch.randn(1, 3, 32, 64)).shape
        torch.Size([1, 3])
    """
    record, attentions = _inspect(vit, pos_embed)
    stack = build_stack(
        _adopting(vit, encoding) if pos_embed == "adopt" else encoding,
        dim=vit.embed_dim,
        num_heads=attentions[0].num_heads,
        head_dim=attentions[0].head_dim,
        depth=len(vit.blocks),
        num_prefix=vit.num_prefix_tokens,
        train_grid=record.grid if train_grid is None else train_grid,
        per_layer=per_layer,
        options=options,
        like=vit.patch_embed.proj.weight if hasattr(vit.patch_embed, "proj") else next(vit.parameters()),
    )
    if pos_embed == "adopt":
        _adopt(vit, stack, record.grid)
    if pos_embed in ("remove", "adopt"):
        vit.pos_embed = None
    if pos_embed == "remove" and record.rope is not None:
        vit.rope = None
    setattr(vit, STACK, stack.train(vit.training))
    for name in record.methods:
        setattr(vit, name, partial(_METHODS[name], vit))
    for attention in attentions:
        attention.forward = partial(attention_forward, attention)
    record.hook = vit.register_load_state_dict_pre_hook(_on_load)
    setattr(vit, _RECORD, record)
    return vit


def detach(vit: Any) -> Any:
    """Give the model back as it came: methods, parameters, state-dict keys and outputs.

    Training meanwhile changed the weights, not what was set aside. If the input size was changed, the table that was
    set aside is resized as the model itself would have done.
    """
    record: _Attachment = _record_of(vit)
    record.hook.remove()
    for block in vit.blocks:
        for attention in attention_modules(block):
            del attention.forward
    for name in record.methods:
        delattr(vit, name)
    delattr(vit, _RECORD)
    delattr(vit, STACK)
    like = vit.patch_embed.proj.weight if hasattr(vit.patch_embed, "proj") else next(vit.parameters())
    if record.table is not None and vit.pos_embed is None:
        record.table.data = record.table.data.to(device=like.device, dtype=like.dtype)
        vit.pos_embed = _at_current_grid(vit, record)
    if record.rope is not None and vit.rope is None:
        vit.rope = record.rope.to(device=like.device, dtype=like.dtype).train(vit.training)
        if tuple(vit.patch_embed.grid_size) != record.grid and hasattr(vit.rope, "update_feat_shape"):
            vit.rope.update_feat_shape(vit.patch_embed.grid_size)
    return vit


def stack_of(vit: Any) -> EncodingStack:
    """The encoding attached to a model."""
    _record_of(vit)
    return getattr(vit, STACK)


# -- attaching --------------------------------------------------------------------------------------------------------


def _inspect(model: Any, pos_embed: str) -> tuple[_Attachment, list[Any]]:
    """Check that a model can be attached to; returns the record to keep and its attention modules."""
    require("timm", "vit")
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    if pos_embed not in _MODES:
        raise ValueError(f"pos_embed: expected one of {_MODES}, got {pos_embed!r}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"vit: expected a timm model, got {type(model).__name__}")
    vit: Any = model  # a narrowed type would hide its attributes
    if hasattr(vit, _RECORD):
        raise ValueError(f"vit: {getattr(vit, STACK).title!r} is already attached; call detach(vit) first")
    known = (VisionTransformer, VisionTransformerDistilled, Eva)
    own_steps = [name for name in ("_pos_embed", "forward_features") if hasattr(type(vit), name)]
    same_steps = any(
        isinstance(vit, cls) and all(getattr(type(vit), n) is getattr(cls, n) for n in own_steps) for cls in known
    )
    if not same_steps:
        raise ValueError(
            f"vit: expected one of {', '.join(cls.__name__ for cls in known)}, got {type(vit).__name__}, "
            "whose forward pass this adapter "
            "does not know"
        )
    attentions = [attention for block in vit.blocks for attention in attention_modules(block)]
    rope = getattr(vit, "rope", None)
    grid = tuple(int(size) for size in vit.patch_embed.grid_size)
    return _Attachment(pos_embed, grid, vit.pos_embed, rope, tuple(_METHODS)), attentions  # type: ignore[arg-type]


def _adopting(vit: Any, encoding: Any) -> Any:
    """The requested encodings with ``learned`` told whether the table has rows for prefix tokens."""
    if isinstance(encoding, EncodingStack):
        return encoding
    single = isinstance(encoding, str) or (
        isinstance(encoding, tuple) and len(encoding) == 2 and isinstance(encoding[1], dict)
    )
    specs = [entry if isinstance(entry, tuple) else (entry, {}) for entry in ([encoding] if single else encoding)]
    rows = {"embed_prefix": not vit.no_embed_class}
    specs = [(name, {**rows, **given} if name == "learned" else given) for name, given in specs]
    return specs[0] if single else specs


def _adopt(vit: Any, stack: EncodingStack, grid: tuple[int, int]) -> None:
    """Hand the model's table to the encoding ``learned``."""
    learned: Any = dict(stack.shared.items()).get("learned")
    if learned is None or vit.pos_embed is None:
        missing = "an encoding 'learned'" if learned is None else "a model with a pos_embed of its own"
        raise ValueError(
            f"pos_embed: 'adopt' needs {missing} (asked for {stack.title!r}); use pos_embed='remove' or 'keep'"
        )
    table = vit.pos_embed.detach()[0]
    if learned.train_grid != grid or learned.table.shape != table.shape:
        raise ValueError(
            f"pos_embed: the table of the model is {tuple(table.shape)} on the grid {grid}, 'learned' was built for "
            f"{tuple(learned.table.shape)} on {learned.train_grid}; leave out train_grid"
        )
    with torch.no_grad():
        learned.table.copy_(table)
    learned.table.requires_grad_(vit.pos_embed.requires_grad)


def _at_current_grid(vit: Any, record: _Attachment) -> Tensor | None:
    """The table that was set aside; resized only when the model's grid changed meanwhile."""
    new = tuple(vit.patch_embed.grid_size)
    table = record.table
    if table is None or new == record.grid:
        return table
    from timm.layers import resample_abs_pos_embed

    rows = 0 if vit.no_embed_class else vit.num_prefix_tokens
    resized = resample_abs_pos_embed(table, new_size=list(new), old_size=list(record.grid), num_prefix_tokens=rows)
    return nn.Parameter(resized.detach(), requires_grad=table.requires_grad)


def _record_of(vit: Any) -> _Attachment:
    record = getattr(vit, _RECORD, None)
    if record is None:
        raise ValueError("vit: no position encoding is attached; call attach(vit, name) first")
    return record


# -- methods of the instance ------------------------------------------------------------------------------------------


def _no_weight_decay(vit: Any) -> set[str]:
    """Names that must not decay: those of the model and those of the encoding."""
    gone = [name for name in ("pos_embed", "rope") if getattr(vit, name, None) is None]
    own = {name for name in type(vit).no_weight_decay(vit) if name.partition(".")[0] not in gone}
    return own | {f"{STACK}.{name}" for name in getattr(vit, STACK).no_weight_decay()}


def _group_matcher(vit: Any, coarse: bool = False) -> dict[str, Any]:
    """Groups for layer-wise learning rates: what a layer owns goes with its block, the rest with the stem."""
    groups = dict(type(vit).group_matcher(vit, coarse=coarse))
    groups["stem"] = rf"{groups['stem']}|{STACK}\.shared"
    groups["blocks"] = [(rf"^{STACK}\.layers\.(\d+)", None), *groups["blocks"]]
    return groups


def _prune_intermediate_layers(vit: Any, *args: Any, **kwargs: Any) -> Any:
    """timm's pruning of late blocks, with the encodings of these blocks."""
    taken = type(vit).prune_intermediate_layers(vit, *args, **kwargs)
    stack: EncodingStack = getattr(vit, STACK)
    stack.layers = stack.layers[: len(vit.blocks)]
    return taken


_METHODS: dict[str, Callable[..., Any]] = {
    "forward": _timm_forward.forward,
    "forward_features": _timm_forward.forward_features,
    "forward_intermediates": _timm_forward.forward_intermediates,
    "forward_head": _timm_forward.forward_head,
    "no_weight_decay": _no_weight_decay,
    "group_matcher": _group_matcher,
    "prune_intermediate_layers": _prune_intermediate_layers,
}


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _on_load(vit: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let weights of the original model load: its table is dropped or adopted, the encoding keeps its values."""
    start = f"{prefix}{STACK}."
    current = getattr(vit, STACK).state_dict(prefix=start)
    if current and not any(key.startswith(start) for key in state):
        logger.warning(
            "%s*: not in the checkpoint, which is of a model without it; the encoding keeps its values", start
        )
        state.update(current)
        table = state.get(f"{prefix}pos_embed")
        if _record_of(vit).mode == "adopt" and table is not None:
            logger.warning("%spos_embed: adopted as %sshared.learned.table", prefix, start)
            state[f"{start}shared.learned.table"] = state.pop(f"{prefix}pos_embed")[0]
    unused = [name for name in ("pos_embed", "rope") if getattr(vit, name, None) is None]
    dropped = [key for key in state if key.startswith(prefix) and key[len(prefix) :].partition(".")[0] in unused]
    if dropped:
        logger.warning("%s: not used by the attached encoding and dropped from the checkpoint", ", ".join(dropped))
        for key in dropped:
            del state[key]
