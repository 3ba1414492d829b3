"""A small encoder as the objectives expect it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mmpos import Positions, attend
from mmpos.testing import TinyTransformer


class SmallTrunk(TinyTransformer):
    """Attention blocks around a stack, without its token hook."""

    def forward(self, tokens: Tensor, positions: Positions, mask: Tensor | None = None) -> Tensor:
        x = tokens
        for layer, state in enumerate(self.stack.prepare(positions)):
            h = F.layer_norm(x, (self.dim,))
            q, k, v = F.linear(h, self.qkv[layer]).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            out = attend(q, k, v, state, x=h, mask=mask)
            x = x + F.linear(out.transpose(1, 2).flatten(2), self.proj[layer])
        return F.layer_norm(x, (self.dim,))
