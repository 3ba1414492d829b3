"""Position encodings for timm's vision transformers: :func:`attach`, :func:`detach`.

Supported are ``VisionTransformer``, ``VisionTransformerDistilled`` and ``Eva`` (EVA, EVA-02, DINOv3 and timm's
``vit_*_rope_*`` models). The encoding becomes the sub-module ``position_encoding`` of the model; the model keeps its
class, its parameters and its methods. Only this instance changes: its forward methods are bound to functions that carry
positions as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from mmpos.adapters import _timm_forward
from mmpos.adapters._attachment import (
    STACK,
    Attachment,
    build_stack,
    check_free,
    record_of,
    require,
    with_model_facts,
)
from mmpos.adapters._timm_attention import attention_forward, attention_modules
from mmpos.encodings import EncodingStack

__all__ = ["attach", "detach", "stack_of"]


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
        train_grid: patches of the training images, height before width (of videos frames first); default the model's
            current grid. The encoding gets as many axes as the patch embedding has.
        per_layer: whether each layer owns its parameters; default as the method says.
        options: options of a single encoding.

    Example:
        >>> import timm, torch
        >>> vit = timm.create_model("vit_tiny_patch16_224", num_classes=3, depth=2, dynamic_img_size=True)
        >>> attach(vit, "rope_mixed")(torch.randn(1, 3, 32, 64)).shape
        torch.Size([1, 3])
    """
    check_free(vit, pos_embed)
    attentions = _attentions(vit)
    grid = tuple(int(size) for size in vit.patch_embed.grid_size)
    own = {name: getattr(vit, name) for name in ("pos_embed", "rope") if hasattr(vit, name)}
    facts = {"patch_size": tuple(vit.patch_embed.patch_size), "channels": vit.in_chans}
    if pos_embed == "adopt":
        facts["embed_prefix"] = not vit.no_embed_class
    stack = build_stack(
        with_model_facts(encoding, facts),
        dim=vit.embed_dim,
        num_heads=attentions[0].num_heads,
        head_dim=attentions[0].head_dim,
        depth=len(vit.blocks),
        num_prefix=vit.num_prefix_tokens,
        train_grid=grid if train_grid is None else train_grid,
        per_layer=per_layer,
        options=options,
        like=_like(vit),
        axes=len(grid),
    )
    record = Attachment(pos_embed, grid, own, "pos_embed", layers=attentions)
    record.bind(vit, stack, _METHODS, attention_forward)
    return vit


def detach(vit: Any) -> Any:
    """Give the model back as it came: methods, parameters, state-dict keys and outputs.

    Training meanwhile changed the weights, not what was set aside. If the input size was changed, what was set aside is
    resized as the model itself would have done.
    """
    record = record_of(vit)
    was_set_aside = {name for name, value in record.own.items() if value is not None and getattr(vit, name) is None}
    record.release(vit, _like(vit))
    grid = tuple(vit.patch_embed.grid_size)
    if grid != record.grid:
        if "pos_embed" in was_set_aside:
            vit.pos_embed = _resized(vit, record)
        if "rope" in was_set_aside and hasattr(vit.rope, "update_feat_shape"):
            vit.rope.update_feat_shape(vit.patch_embed.grid_size)
    return vit


def stack_of(vit: Any) -> EncodingStack:
    """The encoding attached to a model."""
    record_of(vit)
    return getattr(vit, STACK)


def _attentions(vit: Any) -> list[Any]:
    """Attention modules of a supported model; anything else is refused."""
    require("timm", "vit")
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    known = (VisionTransformer, VisionTransformerDistilled, Eva)
    kind = type(vit)
    steps = ("_pos_embed", "forward_features", "forward")
    if not any(isinstance(vit, cls) and all(getattr(kind, n) is getattr(cls, n) for n in steps) for cls in known):
        raise ValueError(
            f"vit: expected one of {', '.join(cls.__name__ for cls in known)}, got {kind.__name__}, whose forward pass "
            "this adapter does not know"
        )
    return [attention for block in vit.blocks for attention in attention_modules(block)]


def _like(vit: Any) -> Tensor:
    """A parameter that tells the device and dtype of the model."""
    return next(parameter for parameter in vit.patch_embed.parameters() if parameter.is_floating_point())


def _resized(vit: Any, record: Attachment) -> nn.Parameter:
    from timm.layers import resample_abs_pos_embed

    rows = 0 if vit.no_embed_class else vit.num_prefix_tokens
    table = resample_abs_pos_embed(
        vit.pos_embed, new_size=list(vit.patch_embed.grid_size), old_size=list(record.grid), num_prefix_tokens=rows
    )
    return nn.Parameter(table.detach(), requires_grad=vit.pos_embed.requires_grad)


# -- methods of the instance ------------------------------------------------------------------------------------------


def _no_weight_decay(vit: Any) -> set[str]:
    """Names that must not decay: those of the model and those of the encoding."""
    gone = [name for name in record_of(vit).own if getattr(vit, name) is None]
    own = {name for name in type(vit).no_weight_decay(vit) if name.partition(".")[0] not in gone}
    return own | {f"{STACK}.{name}" for name in stack_of(vit).no_weight_decay()}


def _group_matcher(vit: Any, coarse: bool = False) -> dict[str, Any]:
    """Groups for layer-wise learning rates: what a layer owns goes with its block, the rest with the stem."""
    groups = dict(type(vit).group_matcher(vit, coarse=coarse))
    groups["stem"] = rf"{groups['stem']}|{STACK}\.shared"
    groups["blocks"] = [(rf"^{STACK}\.layers\.(\d+)", None), *groups["blocks"]]
    return groups


def _prune_intermediate_layers(vit: Any, *args: Any, **kwargs: Any) -> Any:
    """timm's pruning of late blocks, with the encodings of these blocks."""
    taken = type(vit).prune_intermediate_layers(vit, *args, **kwargs)
    stack = stack_of(vit)
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
