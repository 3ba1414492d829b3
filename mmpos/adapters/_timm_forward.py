"""Forward passes of an attached timm model: timm's own steps with positions as a visible argument.

Works for ``VisionTransformer``, ``VisionTransformerDistilled`` and ``Eva``. The functions take the model first and are
bound to one instance by :func:`mmpos.adapters.timm.attach`; no class and no module is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmpos.adapters._timm_attention import AttentionInput, join_causal
from mmpos.encodings import EncodingStack
from mmpos.positions import Positions

__all__ = ["forward", "forward_features", "forward_head", "forward_intermediates"]

OnBlock = Callable[[int, Tensor], None]


def forward(
    vit: Any,
    x: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    positions: Positions | None = None,
) -> Tensor:
    """Logits of images; ``positions`` replaces the raster of the image (padding mask, subset of the patches, free
    points).

    Shape:
        x ``(B, channels, height, width)``, of videos ``(B, channels, frames, height, width)``; returns
        ``(B, num_classes)``.
    """
    tokens, positions, _ = _encode(vit, x, attn_mask, is_causal, positions)
    return forward_head(vit, vit.norm(tokens), positions=positions)


def forward_features(
    vit: Any,
    x: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    positions: Positions | None = None,
) -> Tensor:
    """Token features after the last block and the final norm. Shape: returns ``(B, P + N, D)``."""
    return vit.norm(_encode(vit, x, attn_mask, is_causal, positions)[0])


def forward_head(vit: Any, x: Tensor, pre_logits: bool = False, positions: Positions | None = None) -> Tensor:
    """Pooling and classifier. Give the positions when they have a padding mask: padded tokens are then not pooled."""
    pools_patches = vit.attn_pool is not None or vit.global_pool not in ("", "token")
    if positions is None or positions.mask is None or not pools_patches:
        return type(vit).forward_head(vit, x, pre_logits=pre_logits)
    x = vit.head_drop(vit.fc_norm(_masked_pool(vit, x, positions)))
    return x if pre_logits else vit.head(x)


def forward_intermediates(
    vit: Any,
    x: Tensor,
    indices: int | Sequence[int] | None = None,
    return_prefix_tokens: bool = False,
    norm: bool = False,
    stop_early: bool = False,
    output_fmt: str = "NCHW",
    intermediates_only: bool = False,
    output_dict: bool = False,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    positions: Positions | None = None,
) -> Any:
    """Outputs of chosen blocks, with the arguments and return forms of timm's method, and positions."""
    from timm.models._features import feature_take_indices

    if output_fmt not in ("NCHW", "NLC"):
        raise ValueError(f"output_fmt: expected 'NCHW' or 'NLC', got {output_fmt!r}")
    wanted = indices if indices is None or isinstance(indices, int) else list(indices)
    take, last = feature_take_indices(len(vit.blocks), wanted)
    kept: list[Tensor] = []

    def on_block(index: int, tokens: Tensor) -> None:
        if index in take:
            kept.append(vit.norm(tokens) if norm else tokens)

    count = last + 1 if stop_early else len(vit.blocks)
    tokens, positions, grid = _encode(vit, x, attn_mask, is_causal, positions, on_block, count)
    prefix = vit.num_prefix_tokens
    prefixes = [y[:, :prefix] for y in kept] if prefix else None
    outputs: list[Any] = [y[:, prefix:] for y in kept]
    if output_fmt == "NCHW":
        if not positions.is_raster and outputs[0].shape[1] != math.prod(grid):
            raise ValueError(
                f"output_fmt: 'NCHW' needs every patch of the {tuple(grid)} grid, got {positions.num_placed} "
                "tokens; use 'NLC'"
            )
        outputs = [y.transpose(1, 2).unflatten(-1, grid).contiguous() for y in outputs]
    if output_dict:
        result: dict[str, Any] = {"image_intermediates": outputs}
        if prefixes is not None and return_prefix_tokens:
            result["image_intermediates_prefix"] = prefixes
        if not intermediates_only:
            result["image_features"] = vit.norm(tokens)
        return result
    if return_prefix_tokens and prefixes is not None:
        outputs = list(zip(outputs, prefixes, strict=True))
    return outputs if intermediates_only else (vit.norm(tokens), outputs)


# -- the steps --------------------------------------------------------------------------------------------------------


def _encode(
    vit: Any,
    x: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    positions: Positions | None,
    on_block: OnBlock | None = None,
    count: int | None = None,
) -> tuple[Tensor, Positions, tuple[int, ...]]:
    """Everything up to the last block. Returns tokens before the final norm, their positions and the grid."""
    stack: EncodingStack = vit.position_encoding
    patches, grid = _patches(vit, x)
    positions = positions_of(grid, vit.num_prefix_tokens, positions, patches.device)
    tokens = _add_prefix_and_table(vit, patches, grid, positions)
    tokens = vit.pos_drop(stack.add_to_tokens(tokens, positions, image=x))
    tokens, positions = _drop_patches(vit, tokens, positions)
    tokens = vit.norm_pre(tokens)
    ropes = _own_rope_tables(vit, grid, positions)
    mask = join_causal(attn_mask, is_causal, tokens)
    for index, (block, state) in enumerate(zip(vit.blocks, stack.prepare(positions), strict=False)):
        if index == count:
            break
        tokens = _run_block(vit, block, tokens, AttentionInput(state, mask), None if ropes is None else ropes[index])
        tokens = stack.mix_tokens(index, tokens, positions)
        if on_block is not None:
            on_block(index, tokens)
    return tokens, positions, grid


def _run_block(vit: Any, block: Any, tokens: Tensor, inputs: AttentionInput, rope: Tensor | None) -> Tensor:
    def call(x: Tensor) -> Tensor:
        return block(x, attn_mask=inputs) if rope is None else block(x, rope=rope, attn_mask=inputs)

    # non-reentrant: tables with gradients reach the block through the closure
    return checkpoint(call, tokens, use_reentrant=False) if vit.grad_checkpointing else call(tokens)


def _patches(vit: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Patch embeddings ``(B, N, D)`` and the grid they form, ``(H, W)`` or of videos ``(T, H, W)``."""
    embed = vit.patch_embed
    fixed = embed.img_size if embed.strict_img_size else None
    check_image(x, embed.patch_size, fixed=fixed, pads=embed.dynamic_img_pad)
    patches = embed(x)
    if patches.dim() > 3:  # dynamic size: (B, *grid, D)
        return patches.flatten(1, -2), tuple(patches.shape[1:-1])
    return patches, tuple(embed.grid_size)


def check_image(
    x: Tensor, patch_size: tuple[int, ...], *, fixed: tuple[int, int] | None = None, pads: bool = False
) -> None:
    """Raise unless an image is made of whole patches and has the size of a model that takes only one.

    A patch of three sizes is a tubelet, and ``x`` are videos.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return
    if len(patch_size) == 3:
        check_video(x, (patch_size[0], patch_size[1], patch_size[2]))
        return
    height, width = x.shape[-2:]
    patch_h, patch_w = patch_size
    if height < patch_h or width < patch_w:
        raise ValueError(
            f"x: an image of {height} x {width} is smaller than one patch of {patch_h} x {patch_w}; enlarge it"
        )
    if fixed is not None and (height, width) != tuple(fixed):
        raise ValueError(
            f"x: this model takes images of {tuple(fixed)}, got {(height, width)}; build it with dynamic_img_size=True "
            "or call set_input_size"
        )
    if (height % patch_h or width % patch_w) and not pads:
        raise ValueError(
            f"x: expected a height and width divisible by the patch size {(patch_h, patch_w)}, got {(height, width)}; "
            "crop or resize the images, or build a timm model with dynamic_img_pad=True"
        )


def check_video(x: Tensor, tubelet: tuple[int, int, int]) -> None:
    """Raise unless a batch of videos is made of whole tubelets."""
    if x.dim() != 5:
        raise ValueError(
            f"x: this model takes videos (B, channels, frames, height, width), got {tuple(x.shape)}; add an axis for "
            "the frames"
        )
    sizes = tuple(x.shape[-3:])
    if any(size < part or size % part for size, part in zip(sizes, tubelet, strict=True)):
        fitting = tuple(max(size // part, 1) * part for size, part in zip(sizes, tubelet, strict=True))
        raise ValueError(
            f"x: expected frames, height and width divisible by the tubelet {tubelet}, got {sizes}; for example "
            f"{fitting}"
        )


def positions_of(
    grid: tuple[int, ...], prefix: int, positions: Positions | None, device: torch.device | str
) -> Positions:
    """Positions of an image's patches: the caller's, checked against the image, or its whole raster."""
    if positions is None:
        return Positions.grid(*grid, num_prefix=prefix, device=device)
    if positions.num_prefix not in (0, prefix):
        raise ValueError(f"positions: this model has {prefix} prefix tokens, got num_prefix {positions.num_prefix}")
    if positions.grid_size is not None and tuple(positions.grid_size) != tuple(grid):
        raise ValueError(
            f"positions: the image has a grid of {tuple(grid)} patches, got positions of grid "
            f"{tuple(positions.grid_size)}; free places "
            "are given by Positions.points"
        )
    return positions.with_prefix(prefix)


def _add_prefix_and_table(vit: Any, patches: Tensor, grid: tuple[int, ...], positions: Positions) -> Tensor:
    """Prefix tokens in front, the model's own table where it is kept, and only the patches that have a position."""
    batch = patches.shape[0]
    tokens = [getattr(vit, name, None) for name in ("cls_token", "dist_token", "reg_token")]
    prefix = [token.expand(batch, -1, -1) for token in tokens if token is not None]
    if vit.pos_embed is not None:
        from timm.layers import resample_abs_pos_embed

        rows = 0 if vit.no_embed_class else vit.num_prefix_tokens
        table = vit.pos_embed
        if vit.dynamic_img_size:
            table = resample_abs_pos_embed(
                table, new_size=list(grid), old_size=vit.patch_embed.grid_size, num_prefix_tokens=rows
            )
        patches = patches + table[:, rows:]
        if rows:
            prefix = [torch.cat(prefix, dim=1) + table[:, :rows]]
    if positions.kept is not None:
        index = positions.kept.expand(batch, -1)[..., None].expand(-1, -1, patches.shape[-1])
        patches = patches.gather(1, index)
    return torch.cat([*prefix, patches], dim=1) if prefix else patches


def _drop_patches(vit: Any, tokens: Tensor, positions: Positions) -> tuple[Tensor, Positions]:
    """Patch dropout that tells which patches stayed; draws as timm does, so a seed gives the same choice."""
    probability = getattr(vit.patch_drop, "prob", 0.0)
    if probability == 0.0 or not vit.patch_drop.training:
        return tokens, positions
    prefix = positions.num_prefix
    batch, placed = tokens.shape[0], tokens.shape[1] - prefix
    count = max(1, int(placed * (1.0 - probability)))
    keep = torch.randn(batch, placed, device=tokens.device).argsort(dim=-1)[:, :count]
    if getattr(vit.patch_drop, "ordered", False):
        keep = keep.sort(dim=-1)[0]
    chosen = tokens[:, prefix:].gather(1, keep[..., None].expand(-1, -1, tokens.shape[-1]))
    return torch.cat([tokens[:, :prefix], chosen], dim=1), positions.take(keep)


def _own_rope_tables(vit: Any, grid: tuple[int, ...], positions: Positions) -> list[Tensor] | None:
    """Tables of the rotary encoding the model came with, one per block, when the attachment keeps it."""
    own = getattr(vit, "rope", None)
    if own is None:
        return None
    if positions.grid_size is None:
        raise ValueError(
            "positions: the model's own rotary encoding, kept by this attachment, knows only grids; attach "
            "with pos_embed='remove'"
        )
    fixed = not vit.dynamic_img_size and hasattr(own, "feat_shape")
    table = own.get_embed() if fixed else own.get_embed(shape=list(grid))
    mixed = getattr(vit, "rope_mixed", False)  # (depth, heads, N, 2d) instead of (N, 2d)
    if positions.kept is not None:
        table = table[..., positions.kept, :].movedim(-3, 1) if mixed else table[positions.kept][:, None]
    return list(table.unbind(0)) if mixed else [table] * len(vit.blocks)


def _masked_pool(vit: Any, x: Tensor, positions: Positions) -> Tensor:
    """Average or maximum over real tokens only."""
    if vit.attn_pool is not None:
        raise ValueError(
            f"positions.mask: pooling {vit.global_pool!r} cannot leave out padded tokens; use "
            "global_pool='avg', 'max', 'avgmax' or 'token'"
        )
    mask = positions.mask
    assert mask is not None
    if getattr(vit, "pool_include_prefix", False):
        mask = F.pad(mask, (positions.num_prefix, 0), value=True)
    else:
        x = x[:, positions.num_prefix :]
    mask = mask[..., None]
    mean = x.masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp_min(1).to(x.dtype)
    if vit.global_pool == "avg":
        return mean
    largest = x.masked_fill(~mask, float("-inf")).amax(1)
    return largest if vit.global_pool == "max" else 0.5 * (largest + mean)
