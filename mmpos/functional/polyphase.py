"""Polyphase anchoring: shift an image so that cutting it into patches does not depend on where it started."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["polyphase_anchor", "polyphase_index"]


TIES = ("picture", "first")


def polyphase_index(x: Tensor, stride: int, p: float = 2.0, ties: str = "picture") -> Tensor:
    """Offset ``(i, j)`` of the component ``x[:, i::s, j::s]`` with the largest p-norm.

    Norms are taken in float64, and components within rounding of the largest count as equal, so that rounding does not
    decide.

    Args:
        x: images.
        stride: distance of the pixels of a component.
        p: order of the norm, ``inf`` for the largest value.
        ties: between equal components, as mirrored images and icons have them, ``picture`` takes the one from which the
            image, cut at multiples of the stride, reads largest (pixel by pixel, whatever multiple it starts at): no
            shift changes this choice. ``first`` takes the first in row-major order, as the published code does, and
            loses the equivariance for such images.

    Shape:
        x ``(B, C, H, W)`` with ``H`` and ``W`` multiples of the stride; returns ``(B, 2)`` int64.
    """
    if x.dim() != 4 or x.shape[-2] % stride or x.shape[-1] % stride:
        raise ValueError(
            f"x: expected (B, C, H, W) with H and W multiples of the stride {stride}, got {tuple(x.shape)}; pad "
            "or resize it"
        )
    if not p > 0:
        raise ValueError(f"p: expected a positive number, got {p}")
    if ties not in TIES:
        raise ValueError(f"ties: expected one of {', '.join(TIES)}, got {ties!r}")
    pixels = x.detach().double()
    parts = pixels.unflatten(-1, (-1, stride)).unflatten(-3, (-1, stride))  # (B, C, H / s, s, W / s, s)
    # the root does not change which is largest
    energy = parts.abs().pow(p).sum((1, 2, 4)) if p != float("inf") else parts.abs().amax((1, 2, 4))
    energy = energy.flatten(1)
    largest = energy.amax(1, keepdim=True)
    best = energy >= largest - 1e-12 * largest.abs()
    first = best.to(torch.uint8).argmax(1)
    if ties == "picture" and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        for number in (best.sum(1) > 1).nonzero()[:, 0].tolist():
            first[number] = _largest_reading(x.detach()[number], best[number].nonzero()[:, 0], stride)
    return torch.stack([first // stride, first % stride], 1)


def _largest_reading(image: Tensor, among: Tensor, stride: int) -> Tensor:
    """The component whose readings of an image, from any multiple of the stride, hold the lexicographically largest.

    Shape:
        image ``(C, H, W)``, among ``(K,)`` components as ``i * stride + j``; returns a number of these.
    """
    height, width = image.shape[1:]
    shifts = [(int(c) // stride - int(among[0]) // stride, int(c) % stride - int(among[0]) % stride) for c in among]
    if all(torch.equal(image.roll((-down, -right), (1, 2)), image) for down, right in shifts):
        return among[0]  # one pattern repeated, such as a blank image: they read the same
    steps = [torch.arange(0, size, stride, device=image.device) for size in (height, width)]
    top = (among // stride)[:, None, None] + steps[0][:, None]
    left = (among % stride)[:, None, None] + steps[1]
    owner = among[:, None, None].expand(-1, len(steps[0]), len(steps[1])).flatten()
    top, left = (edge.expand(-1, len(steps[0]), len(steps[1])).flatten() for edge in (top, left))
    for channel in image:
        for row in range(height):
            for column in range(width):
                value = channel[(top + row) % height, (left + column) % width]
                keep = value == value.max()
                owner, top, left = owner[keep], top[keep], left[keep]
                if bool((owner == owner[0]).all()):
                    return owner[0]
    return owner[0]


def polyphase_anchor(x: Tensor, stride: int, p: float = 2.0, ties: str = "picture") -> tuple[Tensor, Tensor]:
    """Shift each image circularly so that its strongest polyphase component starts at the origin.

    ``anchor(shift(x))`` equals ``anchor(x)`` up to a circular shift by multiples of the stride. Exact for circular
    shifts; a crop changes what is at the border. ``ties`` as in :func:`polyphase_index`.

    Shape:
        x ``(B, C, H, W)``; returns the shifted x and the offsets ``(B, 2)``.

    Example:
        >>> x = torch.zeros(1, 1, 4, 6)
        >>> x[0, 0, 1, 3] = 1.0
        >>> polyphase_anchor(x, 2)[1].tolist()
        [[1, 1]]
    """
    index = polyphase_index(x, stride, p, ties)
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device) + index[:, :1]) % height
    columns = (torch.arange(width, device=x.device) + index[:, 1:]) % width
    batch = torch.arange(len(x), device=x.device)[:, None, None]
    shifted = x.movedim(1, -1)[batch, rows[:, :, None], columns[:, None, :]]
    return shifted.movedim(-1, 1), index
