"""Positional embedding dropout: some images are shown to the encoder without places.

Kim, Angelova, Kuo, *Contrastive Feature Masking Open-Vocabulary Vision Transformer*, ICCV 2023, arXiv 2309.00775. The
whole embedding of an image is left out, not single channels or tokens (which is what ``pos_drop`` of timm does), and
what stays is not rescaled. The rate is not stated where we could read it; 0.5 is the default here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmpos.encodings.registry import EncodingStack
from mmpos.positions import Positions

__all__ = ["EmbeddingDropout", "drop_embedding"]


def drop_embedding(
    x: Tensor, with_places: Tensor, keep: Tensor, num_prefix: int = 0, drop_prefix: bool = False
) -> Tensor:
    """Tokens with places where ``keep`` says so, without elsewhere.

    Args:
        x: tokens before the encoding was added.
        with_places: tokens after it was added.
        keep: which samples keep it.
        num_prefix: tokens in front without a place.
        drop_prefix: whether these lose their vectors as well.

    Shape:
        x and with_places ``(B, P + N, D)``, keep ``(B,)`` or ``(1,)`` bool.
    """
    kept = keep[:, None, None]
    if num_prefix and not drop_prefix:
        kept = kept | (torch.arange(x.shape[1], device=x.device) < num_prefix)[:, None]
    return torch.where(kept, with_places, x)


class EmbeddingDropout(nn.Module):
    """Drops what a stack adds to the tokens, for whole images, in training.

    Args:
        stack: the encodings. What they do in attention is not touched.
        rate: probability that an image loses its places.
        per_sample: whether each sample is decided on its own; ``False`` decides once for the batch.
        drop_prefix: whether prefix tokens lose their vectors as well.

    It stands between the two halves of an encoder, in a training step of one's own; no configuration switches it on.

    Example:
        >>> from mmpos.adapters.trunk import VitTrunk
        >>> from mmpos.models import create_vit
        >>> vit = create_vit(encoding="sincos", image_size=(8, 12), in_chans=1, depth=1)
        >>> trunk = VitTrunk(vit)
        >>> dropout = EmbeddingDropout(trunk.stack, rate=0.5).train()
        >>> tokens, positions = trunk.embed(torch.zeros(4, 1, 8, 12))
        >>> trunk(dropout.add_to_tokens(tokens, positions), positions).shape
        torch.Size([4, 6, 96])
    """

    def __init__(
        self, stack: EncodingStack, rate: float = 0.5, *, per_sample: bool = True, drop_prefix: bool = False
    ) -> None:
        super().__init__()
        if not 0 <= rate <= 1:
            raise ValueError(f"rate: expected a probability, got {rate}")
        self.stack = stack
        self.rate = rate
        self.per_sample = per_sample
        self.drop_prefix = drop_prefix

    def add_to_tokens(
        self,
        x: Tensor,
        positions: Positions,
        image: Tensor | None = None,
        *,
        keep: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The token hook of the stack, for the samples that keep their places.

        Args:
            x: tokens.
            positions: where they are.
            image: for encodings that read it.
            keep: samples that keep their places, instead of a random choice; used in evaluation as well.
            generator: source of randomness.

        Shape:
            x ``(B, P + N, D)`` in and out, keep ``(B,)`` bool.
        """
        with_places = self.stack.add_to_tokens(x, positions, image=image)
        if keep is None:
            if not self.training or self.rate == 0:
                return with_places
            rows = x.shape[0] if self.per_sample else 1
            keep = torch.rand(rows, device=x.device, generator=generator) >= self.rate
        return drop_embedding(x, with_places, keep, positions.num_prefix, self.drop_prefix)
