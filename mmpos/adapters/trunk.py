"""An attached timm model in two halves: patch embeddings without places, and the blocks around the encodings.

This is what training objectives about position need: between the halves they hide, exchange or drop places.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmpos.adapters._timm_attention import AttentionInput
from mmpos.adapters._timm_forward import _add_prefix_and_table, _patches, _run_block, positions_of
from mmpos.adapters.timm import stack_of
from mmpos.encodings import EncodingStack
from mmpos.encodings.registry import LayerState
from mmpos.positions import Positions

__all__ = ["VitTrunk"]


class VitTrunk:
    """The blocks of an attached model, as :class:`mmpos.objectives.Trunk` describes them. Holds no parameters.

    Args:
        vit: a timm model with an attached encoding; the encoding it came with must be set aside.
        places: whether the encodings act; ``False`` runs the blocks as if the encoding were ``none``.

    Example:
        >>> import torch
        >>> from mmpos.models import create_vit
        >>> vit = create_vit(encoding="rope_mixed", image_size=(8, 12), in_chans=1, depth=1).eval()
        >>> trunk, image = VitTrunk(vit), torch.randn(2, 1, 8, 12)
        >>> tokens, positions = trunk.embed(image)
        >>> features = trunk(trunk.stack.add_to_tokens(tokens, positions), positions)
        >>> bool(torch.equal(features, vit.forward_features(image)))
        True
    """

    def __init__(self, vit: Any, *, places: bool = True) -> None:
        self.stack: EncodingStack = stack_of(vit)
        kept = [name for name in ("pos_embed", "rope") if getattr(vit, name, None) is not None]
        if kept:
            raise ValueError(
                f"vit: the model's own encoding ({', '.join(kept)}) acts next to {self.stack.title!r} and would tell "
                "places that an objective hides; attach with pos_embed='remove'"
            )
        self.vit = vit
        self.places = places

    def embed(self, images: Tensor) -> tuple[Tensor, Positions]:
        """Prefix tokens and patch embeddings, and their raster. Shape: returns ``(B, P + N, D)``."""
        patches, grid = _patches(self.vit, images)
        positions = positions_of(grid, self.vit.num_prefix_tokens, None, patches.device)
        return _add_prefix_and_table(self.vit, patches, grid, positions), positions

    def __call__(self, tokens: Tensor, positions: Positions, mask: Tensor | None = None) -> Tensor:
        """All blocks and the final norm.

        Args:
            tokens: the sequence, after the token hook of the stack.
            positions: where its tokens are. More prefix tokens than the model has are allowed: they have no place.
            mask: keys that may be attended, ``(B, 1, 1, P + N)`` bool; all by default.

        Shape:
            tokens ``(B, P + N, D)`` in and out.
        """
        vit = self.vit
        tokens = vit.norm_pre(vit.pos_drop(tokens))
        for index, (block, state) in enumerate(zip(vit.blocks, self._states(positions), strict=True)):
            tokens = _run_block(vit, block, tokens, AttentionInput(state, mask), None)
            if self.places:
                tokens = self.stack.mix_tokens(index, tokens, positions)
        return vit.norm(tokens)

    def _states(self, positions: Positions) -> tuple[LayerState, ...]:
        if self.places:
            return self.stack.prepare(positions)
        mask = positions.token_mask()
        return (LayerState((), (), None if mask is None else mask[:, None, None]),) * len(self.vit.blocks)
