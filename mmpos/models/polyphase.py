"""Polyphase anchoring in front of a model.

*Reviving Shift Equivariance in Vision Transformers*, arXiv 2306.07470 (no reference code).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmpos.encodings import EncodingStack
from mmpos.functional.polyphase import polyphase_anchor

__all__ = ["PolyphaseAnchored", "anchor_patches"]


class PolyphaseAnchored(nn.Module):
    """A model whose images are anchored first, so that circular shifts only permute its patches.

    The answer is invariant when what follows is: a position encoding that does not see the border (``cpe`` with
    circular padding, or none) and average pooling.

    Args:
        model: takes images first.
        stride: patch size.
        p: norm that picks the component.
    """

    def __init__(self, model: nn.Module, stride: int, p: float = 2.0) -> None:
        super().__init__()
        self.model = model
        self.stride = stride
        self.p = p

    def forward(self, images: Tensor, *arguments: Any, **keywords: Any) -> Any:
        return self.model(polyphase_anchor(images, self.stride, self.p)[0], *arguments, **keywords)


class _Anchor:
    """Hook in front of a patch embedding."""

    def __init__(self, stride: int, p: float) -> None:
        self.stride = stride
        self.p = p

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (polyphase_anchor(inputs[0], self.stride, self.p)[0], *inputs[1:])


def anchor_patches(vit: Any, stack: EncodingStack, p: float = 2.0) -> Any:
    """Anchor what the patch embedding of a timm ViT receives, so that no circular shift changes an answer.

    Three conditions make this exact, and the first two are checked: patches that do not overlap, so that a shift by
    whole patches permutes tokens; an encoding that only moves with them (``none``, or ``cpe`` with circular padding,
    ``PositionEncoding.circular``); and a head that does not care for the order of patches, as average pooling, a CLS
    token, and attention pooling are. Images must be whole patches in both directions.

    Args:
        vit: a model with ``patch_embed``; it keeps its weights and their names.
        stack: its encoding.
        p: norm that picks the component.

    Returns: the same model.
    """
    convolution = getattr(vit.patch_embed, "proj", None)
    size = tuple(vit.patch_embed.patch_size)
    plain = isinstance(convolution, nn.Conv2d) and convolution.kernel_size == convolution.stride == size
    if not plain or convolution.padding != (0, 0):  # type: ignore[union-attr]
        raise ValueError(
            f"polyphase: patches must not overlap, got {type(vit.patch_embed).__name__} with {convolution}; use a ViT "
            "whose patch embedding is one convolution with a stride of its size"
        )
    if size[0] != size[1]:
        raise ValueError(f"polyphase: expected square patches, got {size}; set patch_size to one number")
    tied = [name for name, module in zip(stack.names, stack.encodings_of(0), strict=True) if not module.circular]
    if tied:
        raise ValueError(
            f"polyphase: {', '.join(tied)} tells where a patch lies, or where the border is, so a circular shift would "
            "still change answers; use encoding=none, or encoding=cpe with encoding.options.padding=circular"
        )
    if getattr(vit, "pos_embed", None) is not None or getattr(vit, "rope", None) is not None:
        raise ValueError(
            "polyphase: the model keeps the position encoding it came with; attach it with pos_embed='remove'"
        )
    vit.patch_embed.register_forward_pre_hook(_Anchor(size[0], p))
    return vit
