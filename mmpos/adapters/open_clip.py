"""Position encodings for the image tower of open_clip models: :func:`attach`, :func:`detach`.

Both kinds of tower: open_clip's own ``VisionTransformer`` and towers with a timm trunk (``TimmModel``), which go to
:mod:`mmpos.adapters.timm`. The text tower is not touched. Only the instance changes, as with timm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmpos.adapters import timm as timm_adapter
from mmpos.adapters._attachment import (
    STACK,
    Attachment,
    build_stack,
    check_free,
    record_of,
    require,
    with_model_facts,
)
from mmpos.adapters._timm_attention import AttentionInput, merge_heads
from mmpos.adapters._timm_forward import check_image, positions_of
from mmpos.attention import attend
from mmpos.encodings import EncodingStack
from mmpos.functional.resample import resample_table
from mmpos.positions import Positions

__all__ = ["attach", "detach", "stack_of"]

_PREFIX = 1  # a class token is always there


def attach(
    model: Any,
    encoding: Any,
    *,
    pos_embed: str = "remove",
    train_grid: Sequence[int] | None = None,
    per_layer: bool | None = None,
    **options: Any,
) -> Any:
    """Give the image tower of an open_clip model another position encoding, in place, and return the model.

    Args:
        model: an open_clip model, or its ``visual`` tower. A native tower then takes images of any size in patches and
            ``positions=``.
        encoding: a registry name, a pair ``(name, options)``, a list of these, or a ready :class:`EncodingStack`.
        pos_embed: ``remove``, ``keep`` or ``adopt`` the table of the tower, see :func:`mmpos.adapters.timm.attach`.
        train_grid: patches of the training images, height before width; default the tower's grid.
        per_layer: whether each layer owns its parameters; default as the method says.
        options: options of a single encoding.
    """
    tower = _tower(model)
    given: dict[str, Any] = {"pos_embed": pos_embed, "train_grid": train_grid, "per_layer": per_layer, **options}
    if hasattr(tower, "trunk"):
        timm_adapter.attach(tower.trunk, encoding, **given)
        return model
    check_free(tower, pos_embed)
    owners, layer = _attention_owners(tower)
    grid = (int(tower.grid_size[0]), int(tower.grid_size[1]))
    attention = tower.transformer.resblocks[0].attn
    stack = build_stack(
        with_model_facts(encoding, {"patch_size": tuple(tower.patch_size)}),
        dim=tower.transformer.width,
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        depth=len(tower.transformer.resblocks),
        num_prefix=_PREFIX,
        train_grid=grid if train_grid is None else train_grid,
        per_layer=per_layer,
        options=options,
        like=tower.conv1.weight,
    )
    own = {"positional_embedding": tower.positional_embedding}
    method = "attention" if layer is _block_attention else "forward"
    record = Attachment(pos_embed, grid, own, "positional_embedding", layers=owners, layer_method=method)
    record.bind(tower, stack, _METHODS, layer)
    return model


def detach(model: Any) -> Any:
    """Give the model back as it came: methods, parameters, state-dict keys and outputs."""
    tower = _tower(model)
    if hasattr(tower, "trunk"):
        timm_adapter.detach(tower.trunk)
    else:
        record_of(tower).release(tower, tower.conv1.weight)
    return model


def stack_of(model: Any) -> EncodingStack:
    """The encoding attached to the image tower."""
    tower = _tower(model)
    if hasattr(tower, "trunk"):
        return timm_adapter.stack_of(tower.trunk)
    record_of(tower)
    return getattr(tower, STACK)


def _tower(model: Any) -> Any:
    require("open_clip", "vit")
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer

    tower = getattr(model, "visual", model)
    if not isinstance(tower, (TimmModel, VisionTransformer)):
        raise ValueError(
            "model: expected an open_clip model with a VisionTransformer or timm image tower, got "
            f"{type(tower).__name__}"
        )
    return tower


def _attention_owners(tower: Any) -> tuple[list[nn.Module], Callable[..., Tensor]]:
    """Modules whose attention is bound to the instance, and the function for them."""
    from open_clip.transformer import Attention, CustomResidualAttentionBlock, ResidualAttentionBlock

    blocks = list(tower.transformer.resblocks)
    if all(type(b) is ResidualAttentionBlock and type(b.attn) is nn.MultiheadAttention for b in blocks):
        return blocks, _block_attention
    if all(type(b) is CustomResidualAttentionBlock and type(b.attn) is Attention for b in blocks):
        if any(b.attn.logit_scale is not None for b in blocks):
            raise ValueError("model: towers with scaled cosine attention are not supported; build it without it")
        return [b.attn for b in blocks], _custom_attention
    raise ValueError(
        f"model: blocks of class {type(blocks[0]).__name__} compute their attention where an encoding cannot reach it; "
        f"supported are {ResidualAttentionBlock.__name__} and {CustomResidualAttentionBlock.__name__}"
    )


# -- attention --------------------------------------------------------------------------------------------------------


def _block_attention(
    block: Any,
    q_x: Tensor,
    k_x: Tensor | None = None,
    v_x: Tensor | None = None,
    attn_mask: AttentionInput | None = None,
) -> Tensor:
    """Self-attention of a ``ResidualAttentionBlock``, whose attention is an ``nn.MultiheadAttention``."""
    attn = block.attn
    out = _attend(attn, q_x, attn_mask, attn.dropout if block.training else 0.0)
    return attn.out_proj(merge_heads(out))


def _custom_attention(attn: Any, x: Tensor, attn_mask: AttentionInput | None = None) -> Tensor:
    """The attention of a ``CustomResidualAttentionBlock``."""
    out = _attend(attn, x, attn_mask, attn.attn_drop.p if attn.training else 0.0, attn.ln_q, attn.ln_k)
    if attn.head_scale is not None:
        out = out * attn.head_scale
    return attn.out_drop(attn.out_proj(attn.ln_inner(merge_heads(out))))


def _attend(
    attn: Any, x: Tensor, inputs: AttentionInput | None, dropout_p: float, norm_q: Any = None, norm_k: Any = None
) -> Tensor:
    """Heads ``(B, heads, L, d)`` of tokens ``(B, L, D)``."""
    if not isinstance(inputs, AttentionInput):
        raise ValueError(
            "attn_mask: this block belongs to a tower with an attached position encoding and was called without its "
            "positions; call the tower or the model, or detach the encoding first"
        )
    qkv = F.linear(x, attn.in_proj_weight, attn.in_proj_bias)
    q, k, v = (t.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
    if norm_q is not None:
        q, k = norm_q(q), norm_k(k)
    return attend(q, k, v, inputs.layer, x=x, mask=inputs.mask, dropout_p=dropout_p)


# -- methods of the instance ------------------------------------------------------------------------------------------


def _forward(tower: Any, x: Tensor, positions: Positions | None = None) -> Any:
    """Image features, with positions."""
    tokens, positions, _, _ = _encode(tower, x, positions)
    pooled, tokens = _pool(tower, tokens, positions)
    if tower.proj is not None:
        pooled = pooled @ tower.proj
    return (pooled, tokens) if tower.output_tokens else pooled


def _forward_intermediates(
    tower: Any,
    x: Tensor,
    indices: int | Sequence[int] | None = None,
    stop_early: bool = False,
    normalize_intermediates: bool = False,
    intermediates_only: bool = False,
    output_fmt: str = "NCHW",
    output_extra_tokens: bool = False,
    positions: Positions | None = None,
) -> dict[str, Any]:
    """Outputs of chosen blocks, with the arguments and return form of open_clip's method, and positions."""
    if output_fmt not in ("NCHW", "NLC"):
        raise ValueError(f"output_fmt: expected 'NCHW' or 'NLC', got {output_fmt!r}")
    from open_clip.transformer import feature_take_indices

    wanted = indices if indices is None or isinstance(indices, int) else list(indices)
    take, last = feature_take_indices(len(tower.transformer.resblocks), wanted)
    count = last + 1 if stop_early else None
    tokens, positions, grid, outputs = _encode(tower, x, positions, take, count)
    if normalize_intermediates:
        outputs = [tower.ln_post(y) for y in outputs]
    placed = [y[:, _PREFIX:] for y in outputs]
    if output_fmt == "NCHW":
        if not positions.is_raster and placed[0].shape[1] != grid[0] * grid[1]:
            raise ValueError(f"output_fmt: 'NCHW' needs every patch of the {tuple(grid)} grid; use 'NLC'")
        placed = [y.transpose(1, 2).unflatten(-1, grid).contiguous() for y in placed]
    result: dict[str, Any] = {"image_intermediates": placed}
    if output_extra_tokens:
        result["image_intermediates_prefix"] = [y[:, :_PREFIX] for y in outputs]
    if not intermediates_only:
        pooled, _ = _pool(tower, tokens, positions)
        result["image_features"] = pooled if tower.proj is None else pooled @ tower.proj
    return result


def _encode(
    tower: Any,
    x: Tensor,
    positions: Positions | None,
    take: Sequence[int] = (),
    count: int | None = None,
) -> tuple[Tensor, Positions, tuple[int, int], list[Tensor]]:
    """Tokens after the last block, their positions, the grid, and the outputs of the blocks in ``take``."""
    stack: EncodingStack = getattr(tower, STACK)
    check_image(x, tower.patch_size)
    image = tower.conv1(x)
    grid = (image.shape[-2], image.shape[-1])
    patches = image.flatten(2).transpose(1, 2)
    positions = positions_of(grid, _PREFIX, positions, patches.device)
    prefix = tower.class_embedding.to(patches.dtype).expand(patches.shape[0], 1, -1)
    if tower.positional_embedding is not None:
        table = resample_table(tower.positional_embedding, tower.grid_size, grid, num_prefix=_PREFIX).to(patches.dtype)
        prefix, patches = prefix + table[:_PREFIX], patches + table[_PREFIX:]
    if positions.kept is not None:
        chosen = positions.kept.expand(patches.shape[0], -1)[..., None]
        patches = patches.gather(1, chosen.expand(-1, -1, patches.shape[-1]))
    tokens = stack.add_to_tokens(torch.cat([prefix, patches], dim=1), positions, image=x)
    tokens, positions = _drop_patches(tower, tokens, positions)
    tokens = tower.ln_pre(tokens)
    outputs = []
    blocks = zip(tower.transformer.resblocks, stack.prepare(positions), strict=False)
    for index, (block, state) in enumerate(blocks):
        if index == count:
            break
        # attention is ours and everything else in a block is per token, so batch-first serves both layouts
        tokens = _run_block(tower, block, tokens, AttentionInput(state))
        tokens = stack.mix_tokens(index, tokens, positions)
        if index in take:
            outputs.append(tokens)
    return tokens, positions, grid, outputs


def _run_block(tower: Any, block: Any, tokens: Tensor, inputs: AttentionInput) -> Tensor:
    def call(x: Tensor) -> Tensor:
        return block(x, attn_mask=inputs)

    if tower.transformer.grad_checkpointing:
        return checkpoint(call, tokens, use_reentrant=False)
    return call(tokens)


def _drop_patches(tower: Any, tokens: Tensor, positions: Positions) -> tuple[Tensor, Positions]:
    """Patch dropout that tells which patches stayed; draws as open_clip does."""
    probability = getattr(tower.patch_dropout, "prob", 0.0)
    if probability == 0.0 or not tower.patch_dropout.training:
        return tokens, positions
    batch, placed = tokens.shape[0], tokens.shape[1] - _PREFIX
    count = max(1, int(placed * (1 - probability)))
    keep = torch.randn(batch, placed).topk(count, dim=-1).indices.to(tokens.device)
    chosen = tokens[:, _PREFIX:].gather(1, keep[..., None].expand(-1, -1, tokens.shape[-1]))
    return torch.cat([tokens[:, :_PREFIX], chosen], dim=1), positions.take(keep)


def _pool(tower: Any, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
    """open_clip's pooling; padded tokens are not averaged."""
    by_class_token = tower.attn_pool is None and tower.pool_type != "avg"
    if positions.mask is None or by_class_token:
        return tower._pool(x)
    if tower.attn_pool is not None:
        raise ValueError(
            "positions.mask: attentional pooling cannot leave out padded tokens; use pool_type 'tok' or 'avg'"
        )
    if not tower.final_ln_after_pool:
        x = tower.ln_post(x)
    tokens, mask = x[:, _PREFIX:], positions.mask[..., None]
    pooled = tokens.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp_min(1).to(x.dtype)
    return (tower.ln_post(pooled) if tower.final_ln_after_pool else pooled), tokens


def _no_weight_decay(tower: Any) -> set[str]:
    """Names that must not decay: those of the tower and those of the encoding."""
    own = {name for name in type(tower).no_weight_decay(tower) if getattr(tower, name) is not None}
    return own | {f"{STACK}.{name}" for name in getattr(tower, STACK).no_weight_decay()}


def _lock(tower: Any, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
    """open_clip's freezing; the encoding belongs to the stem, next to the table it replaced."""
    own = tower.positional_embedding
    if own is None:  # open_clip lists the table among the groups and cannot take None
        tower.positional_embedding = nn.Parameter(tower.conv1.weight.new_empty(0))
    type(tower).lock(tower, unlocked_groups=unlocked_groups, freeze_bn_stats=freeze_bn_stats)
    stem_is_open = tower.positional_embedding.requires_grad
    tower.positional_embedding = own
    getattr(tower, STACK).requires_grad_(stem_is_open)


_METHODS: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "forward_intermediates": _forward_intermediates,
    "no_weight_decay": _no_weight_decay,
    "lock": _lock,
}
