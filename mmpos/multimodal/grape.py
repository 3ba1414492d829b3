"""GRAPE for multimodal decoders: rotations in learned planes (openreview itoNJ3gJl2; form of the peer
JJJYmmm/Multimodal-RoPEs, MIT).

The canonical form is ordinary rotary with a warped ladder. In the learned forms each plane is made orthonormal on its
own but planes are not kept orthogonal to each other, so a trained map is in general not a rotation: norms change and
scores are no longer relative. That is how the method is defined; the initial planes are adjacent channel pairs, where
it is exact rotary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmpos.functional.rotary import inverse_frequencies

__all__ = ["Grape", "warp_ladder"]

MODES = ("axis", "mixed", "block_mixed")


def warp_ladder(frequencies: Tensor, scale: float) -> Tensor:
    """Canonical GRAPE: ``exp(log(f) / scale)``, a ladder stretched or squeezed in the logarithm. Shape: unchanged."""
    if scale <= 0:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    return (frequencies.log() / scale).exp()


class Grape(nn.Module):
    """Learned in-plane rotations of queries and keys.

    Args:
        width: rotated channels ``r`` of a head.
        mode: ``axis`` applies one bank of planes per axis, in the order t, h, w; ``mixed`` turns every plane by a
            learned mixture of the axes; ``block_mixed`` does so inside blocks of channels.
        base: base of the ladder.
        axes: number of id axes.
        planes: planes of a bank, default ``width / 2``.
        block_size: channels of a block in ``block_mixed``.
        planes_per_block: planes of a block, default ``block_size / 2``.

    Shape:
        ``a``, ``b``: ``(banks, planes, channels)`` with one bank per axis, one, or one per block; ``mixture``
        ``(banks, planes, axes)``.
    """

    def __init__(
        self,
        width: int,
        mode: str = "mixed",
        *,
        base: float = 10000.0,
        axes: int = 3,
        planes: int | None = None,
        block_size: int = 16,
        planes_per_block: int | None = None,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
        if width % 2 or (mode == "block_mixed" and (width % block_size or block_size % 2)):
            raise ValueError(f"width: expected an even width that block_size {block_size} divides, got {width}")
        self.width, self.mode, self.base, self.axes = width, mode, base, axes
        banks, channels = {
            "axis": (axes, width),
            "mixed": (1, width),
            "block_mixed": (width // block_size, block_size),
        }[mode]
        count = (planes_per_block if mode == "block_mixed" else planes) or channels // 2
        if not 1 <= count <= channels // 2:
            raise ValueError(f"planes: expected 1 to {channels // 2} planes of {channels} channels, got {count}")
        self.a = nn.Parameter(torch.empty(banks, count, channels))
        self.b = nn.Parameter(torch.empty(banks, count, channels))
        self.mixture = None if mode == "axis" else nn.Parameter(torch.empty(banks, count, axes))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Planes of adjacent channels, each reading one axis in turn."""
        banks, count, channels = self.a.shape
        pair = self._spread(count, channels // 2)
        eye = torch.eye(channels, device=self.a.device)
        self.a.copy_(eye[2 * pair].expand(banks, -1, -1))
        self.b.copy_(eye[2 * pair + 1].expand(banks, -1, -1))
        if self.mixture is not None:
            turn = torch.arange(banks * count, device=self.a.device) % self.axes
            self.mixture.copy_(torch.eye(self.axes, device=self.a.device)[turn].view(banks, count, self.axes))

    @staticmethod
    def _spread(count: int, available: int) -> Tensor:
        """``count`` indices over the ladder, rounded from an even spread."""
        return torch.linspace(0, available - 1, count).round().long()

    def ladder(self) -> Tensor:
        """Frequency of every plane. Shape: ``(banks, planes)``."""
        banks, count, channels = self.a.shape
        full = inverse_frequencies(self.width // 2, self.base, device=self.a.device)
        if self.mode == "block_mixed":
            return full.view(banks, channels // 2)[:, self._spread(count, channels // 2)]
        return full[self._spread(count, channels // 2)].expand(banks, -1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Turn queries or keys.

        Shape: x ``(B, heads, L, d)`` with ``d >= width``, ids ``(A, B, L)``; returns the shape of x.
        """
        if ids.shape[0] != self.axes or x.shape[-1] < self.width:
            raise ValueError(
                f"x, ids: expected at least {self.width} channels and {self.axes} axes, got {tuple(x.shape)} and "
                f"{tuple(ids.shape)}"
            )
        places = ids.to(torch.float32).movedim(0, -1)  # (B, L, A)
        ladder = self.ladder()
        u = nn.functional.normalize(self.a.float(), dim=-1)
        v = nn.functional.normalize(self.b.float() - (self.b.float() * u).sum(-1, keepdim=True) * u, dim=-1)
        out = x[..., : self.width].float()
        banks, _, channels = self.a.shape
        parts = []
        for bank in range(banks):
            if self.mixture is None:
                angle = places[..., bank : bank + 1] * ladder[bank]
            else:
                weight = nn.functional.normalize(self.mixture[bank].float(), dim=-1)
                # summed axis by axis: a matmul would run in half precision under autocast
                angle = sum(places[..., axis : axis + 1] * weight[:, axis] for axis in range(self.axes)) * ladder[bank]
            block = out[..., bank * channels : (bank + 1) * channels] if self.mode == "block_mixed" else out
            block = _turn(block, u[bank], v[bank], angle[:, None])
            if self.mode == "block_mixed":
                parts.append(block)
            else:
                out = block
        out = torch.cat(parts, dim=-1) if parts else out
        return torch.cat([out.to(x.dtype), x[..., self.width :]], dim=-1)


def _turn(x: Tensor, u: Tensor, v: Tensor, angle: Tensor) -> Tensor:
    """Add the change that a turn by ``angle`` makes inside each plane.

    Shape: x ``(B, heads, L, c)``, u, v ``(planes, c)``.
    """
    along, across = (x[..., None, :] * u).sum(-1), (x[..., None, :] * v).sum(-1)
    cos, sin = angle.cos(), angle.sin()
    d_along, d_across = along * cos - across * sin - along, along * sin + across * cos - across
    return x + (d_along[..., None] * u + d_across[..., None] * v).sum(-2)
