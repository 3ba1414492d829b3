"""What the two STRING variants share: learned frequencies in a basis that does not depend on the position.

Schenck et al., *Learning the RoPEs: Better 2D and 3D Position Encodings with STRING*, ICML 2025, arXiv 2502.02562; no
official code. The group element is ``P^T RoPE(r) P``; its outer factor cancels between queries and keys and is left
out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmpos.encodings._fold import FoldableEncoding
from mmpos.encodings._rotary import RotaryEncoding
from mmpos.functional.rotary import mixed_angles
from mmpos.positions import Positions


class StringEncoding(FoldableEncoding, RotaryEncoding):
    """Base of the STRING variants; a subclass has ``theta``, :meth:`frequencies` and :meth:`orthogonal`."""

    theta: float

    def frequencies(self) -> Tensor:
        """Frequencies of all pairs. Shape: ``(A, heads or 1, d/2)``."""
        raise NotImplementedError

    def orthogonal(self) -> Tensor:
        """The basis ``P``, which acts on prefix tokens too. Shape: ``(heads or 1, d, d)``."""
        raise NotImplementedError

    def basis(self) -> Tensor | None:
        return self.orthogonal() if self.folded_freqs is None else None

    def angles(self, positions: Positions) -> tuple[Tensor, Tensor | None]:
        freqs = self.frequencies() if self.folded_freqs is None else self.folded_freqs
        if self.resolution == "linear":  # each axis has its own scale
            axes = range(self.axes)
            scaled = [self.scaled(freqs[axis], positions, axis, self.head_dim, self.theta)[0] for axis in axes]
            freqs = torch.stack(scaled, dim=1)
        return mixed_angles(self.coordinate_values(positions), freqs), None

    @torch.no_grad()
    def rotary_form(self) -> tuple[Tensor, Tensor]:
        return self.frequencies(), self.orthogonal()
