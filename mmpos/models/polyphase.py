"""Polyphase anchoring in front of a model.

*Reviving Shift Equivariance in Vision Transformers*, arXiv 2306.07470 (no reference code).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmpos.functional.polyphase import polyphase_anchor

__all__ = ["PolyphaseAnchored"]


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
