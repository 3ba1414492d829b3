"""Circulant-STRING: generators ``C - C^T`` with ``C`` circulant, one per axis and head.

Schenck et al., *Learning the RoPEs: Better 2D and 3D Position Encodings with STRING*, ICML 2025, arXiv 2502.02562;
no official code. All circulant matrices share the Fourier basis, so the method is exactly a rotary encoding with
frequencies ``2 Im fft(c)`` in the fixed real Fourier basis, and that is how it is computed; the FFT and the dense
form are kept as oracles in :mod:`mmpos.functional.string`. Some channels never turn: one of each block, two when the
block size is even.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.encodings._string import StringEncoding
from mmpos.encodings.base import Facts, wide_dtype
from mmpos.encodings.registry import register
from mmpos.functional.rotary import axial_frames, directed_frequencies, random_frames
from mmpos.functional.string import circulant_basis, circulant_frequencies, circulant_from_frequencies


@register("string_circulant")
class StringCirculant(StringEncoding):
    """Circulant-STRING for any number of real coordinates.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        block_size: size of the circulant blocks; ``None`` is ``head_dim``, the equations of the paper. The authors
            are said to have tried 4 to 64, often with the best result near 16.
        init: ``ladder`` starts with the frequencies of RoPE-Mixed (random directions); ``axial`` with those of
            RoPE-Axial; ``normal`` draws ``c`` with ``init_std``, which gives all bins the same spread ``init_std
            sqrt(2 block_size)``.
        init_std: standard deviation for ``init="normal"``.
        theta: base of the ladder of initial magnitudes.
        per_head: whether each head owns its generators.
        rotary: arguments of :class:`~mmpos.encodings._rotary.RotaryEncoding`.

    Shape:
        ``c (A, heads or 1, head_dim / b, b)``, the first column of each circulant block. Only its odd part acts.

    Example:
        >>> from mmpos import create_encoding
        >>> create_encoding("string_circulant", dim=32, num_heads=2, block_size=8).layers[0]["string_circulant"].c.shape
        torch.Size([2, 2, 2, 8])
    """

    facts = Facts(
        title="Circulant-STRING",
        source="Schenck et al. 2025, arXiv 2502.02562",
        plugs_into=("qk",),
        scope="layer",
        resolution_rules=("index", "rescaled", "linear"),
        head_dim_rule="even, a multiple of block_size (head_dim)",
        relative=True,
        learned=True,
    )
    fp32_parameters = ("c", "folded_freqs")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        block_size: int | None = None,
        init: str = "ladder",
        init_std: float = 0.01,
        theta: float = 10.0,
        per_head: bool = True,
        **rotary: Any,
    ) -> None:
        super().__init__(dim, num_heads, **rotary)
        block_size = self.head_dim if block_size is None else block_size
        if block_size < 3 or self.head_dim % block_size:
            raise ValueError(
                f"block_size: expected a divisor of head_dim {self.head_dim} of at least 3 (smaller "
                f"blocks do not turn), got {block_size}"
            )
        if init not in ("ladder", "axial", "normal"):
            raise ValueError(f"init: expected 'ladder', 'axial' or 'normal', got {init!r}")
        if not theta > 0 or not init_std >= 0:
            raise ValueError(f"theta, init_std: expected a positive base and 0 or more, got {theta} and {init_std}")
        self.block_size = block_size
        self.init = init
        self.init_std = init_std
        self.theta = theta
        heads = num_heads if per_head else 1
        shape = (self.axes, heads, self.head_dim // block_size, block_size)
        self.c = nn.Parameter(torch.empty(shape, dtype=wide_dtype()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A ladder of frequencies brought back through the Fourier transform, or normal entries."""
        if self.init == "normal":
            self.c.normal_(0, self.init_std)
            return
        _, heads, blocks, size = self.c.shape
        frames = random_frames if self.init == "ladder" else axial_frames
        frame = frames(heads, self.axes, device=self.c.device)
        # bin k of block n takes the place its pair has among all pairs of the head
        slots = blocks * (size // 2)
        freqs = directed_frequencies(frame, slots, self.theta).unflatten(-1, (blocks, -1))[..., : (size - 1) // 2]
        self.c.copy_(circulant_from_frequencies(freqs, size))

    def frequencies(self) -> Tensor:
        """Frequencies of all pairs, zero for channels that never turn. Shape: ``(A, heads or 1, d/2)``."""
        freqs = circulant_frequencies(self.c).flatten(-2)
        return F.pad(freqs, (0, self.head_dim // 2 - freqs.shape[-1]))

    def orthogonal(self) -> Tensor:
        """Real Fourier basis of all blocks, turning pairs of every block first. Shape: ``(1, d, d)``."""
        size, blocks = self.block_size, self.head_dim // self.block_size
        one = circulant_basis(size, device=self.c.device, dtype=self.c.dtype)
        basis = torch.block_diag(*[one] * blocks)
        turning = 2 * ((size - 1) // 2)
        row = torch.arange(self.head_dim, device=self.c.device).view(blocks, size)
        return basis[torch.cat([row[:, :turning].flatten(), row[:, turning:].flatten()])][None]
