"""LOOPE: a sinusoid of the place along a Hilbert-like curve, which the image may shift by less than one cell.

Chowdhury, Rahman, Taki, *LOOPE: Learnable Optimal Patch Order in Positional Embeddings for Vision Transformers*, arXiv
2504.14386. No code was released. The text leaves open the activation, the scale of pixel coordinates and of the
position, CLS and the initialisation: these are options here. Its dense layer joins all cells and so knows one grid
only. On another grid the context is computed on the training grid and resized (``context="dense"``), or the dense layer
is replaced by a 1 x 1 convolution (``context="conv"``); the rank along the curve runs on (``resolution="index"``) or is
stretched onto the training range (``"rescaled"``).

The method reads the image, which no other encoding does: ``facts.needs_image`` says so, and :meth:`Loope.add_to_tokens`
takes ``image``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.encodings._table import add_to_placed
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.curves import CURVES, curve_rank
from mmpos.functional.resample import resample_grid
from mmpos.functional.sincos import sincos
from mmpos.positions import Positions

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


@register("loope")
class Loope(PositionEncoding):
    """Sinusoid of a learned, image-dependent order of the patches.

    Args:
        dim: model width ``D``, even.
        num_heads: attention heads ``h``.
        context: ``dense`` (the paper; needs ``train_grid``), ``conv`` (any grid) or ``none`` (the plain curve, no image
            needed).
        curve: order of the cells, see :data:`mmpos.functional.curves.CURVES`.
        base: base of the sinusoid.
        patch_size: pixels of a patch, one number or (height, width).
        channels: channels of the image.
        widths: channels between the five convolutions.
        kernel: side of all kernels but the first, odd.
        act: activation after each convolution, one of ``relu``, ``gelu``, ``silu``, ``tanh``. Not stated in the paper;
            the last map has one channel, where a ReLU can die for good.
        coord_scale: factor on the two planes of pixel indices, 1 for the raw numbers of the text. The default brings
            them to the range of the colours at 224 pixels; raw, they saturate the tanh of an untrained model.
        position_scale: factor on the position before the sinusoid.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.

    Example:
        >>> from mmpos import create_encoding
        >>> loope = create_encoding("loope", dim=8, num_heads=2, train_grid=(2, 3), patch_size=4).shared["loope"]
        >>> loope.embed(Positions.grid(2, 3), torch.rand(1, 3, 8, 12)).shape
        torch.Size([1, 6, 8])
    """

    facts = Facts(
        title="LOOPE",
        source="Chowdhury et al. 2025, arXiv 2504.14386",
        plugs_into=("tokens",),
        axes=(2, 2),
        needs_grid=True,
        fractional=False,
        needs_image=True,
        resolution_rules=("index", "rescaled"),
        learned=True,
        exportable=False,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        context: str = "dense",
        curve: str = "gilbert",
        base: float = 10000.0,
        patch_size: int | Sequence[int] = 16,
        channels: int = 3,
        widths: Sequence[int] = (32, 16, 8, 4),
        kernel: int = 5,
        act: str = "gelu",
        coord_scale: float = 1 / 224,
        position_scale: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if context not in ("dense", "conv", "none"):
            raise ValueError(f"context: expected 'dense', 'conv' or 'none', got {context!r}")
        if curve not in CURVES:
            raise ValueError(f"curve: expected one of {CURVES}, got {curve!r}")
        if act not in ACTIVATIONS:
            raise ValueError(f"act: expected one of {sorted(ACTIVATIONS)}, got {act!r}")
        if dim % 2:
            raise ValueError(f"dim: sine and cosine need an even width, got {dim}")
        if kernel % 2 == 0:
            raise ValueError(f"kernel: expected an odd number, which keeps the size of the map, got {kernel}")
        if context == "dense" and self.train_grid is None:
            raise ValueError(
                "train_grid: the dense layer of loope joins all cells of one grid; give train_grid=(height, width) in "
                "patches, or "
                "context='conv' or 'none'"
            )
        self.context = context
        self.curve = curve
        self.base = base
        height, width = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        self.channels = channels
        self.patch_size = (int(height), int(width))
        self.act = act
        self.coord_scale = coord_scale
        self.position_scale = position_scale
        self.convs = nn.ModuleList()
        if context != "none":
            sizes = (2 + channels, *widths, 1)
            self.convs.append(nn.Conv2d(sizes[0], sizes[1], self.patch_size, stride=self.patch_size))
            self.convs.extend(
                nn.Conv2d(a, b, kernel, padding=kernel // 2) for a, b in zip(sizes[1:-1], sizes[2:], strict=True)
            )
            self.norm = nn.BatchNorm2d(1)
        if context == "dense":
            assert self.train_grid is not None
            self.mix = nn.Linear(math.prod(self.train_grid), math.prod(self.train_grid))
        elif context == "conv":
            self.mix_conv = nn.Conv2d(1, 1, 1)

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear, nn.BatchNorm2d)):
                module.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Biases and normalisation; the convolutions are features of the image."""
        return {name for name, p in self.named_parameters() if p.dim() < 2}

    @property
    def needs_image(self) -> bool:
        """Whether this instance reads the image: not without context."""
        return self.context != "none"

    # -- the position ---------------------------------------------------------------------------------------------

    def ranks(self, positions: Positions) -> Tensor:
        """Rank of each placed token along the curve of its own grid, under the resolution rule.

        Shape:
            ``(B or 1, N)``.
        """
        self.check_axes(positions)
        if positions.moved or (positions.grid_size is None and positions.extent is None):
            raise ValueError(
                "positions: a curve visits the cells of a grid, and these are free or moved points; use Positions.grid "
                "or "
                "Positions.grids"
            )
        device = positions.coords.device
        if positions.grid_size is not None:
            height, width = positions.grid_size
            table = curve_rank(height, width, self.curve, device).flatten()
            rank = table[None] if positions.kept is None else table[positions.kept]
        else:
            rows = []
            sizes = positions.sizes(self.name).long().tolist()
            for (height, width), cell in zip(sizes, positions.coords.long().expand(len(sizes), -1, -1), strict=True):
                rows.append(curve_rank(height, width, self.curve, device)[cell[:, 0], cell[:, 1]])
            rank = torch.stack(rows)
        out = rank.to(positions.coords.dtype)
        if self.resolution == "rescaled":
            count = positions.sizes(self.name).prod(-1, keepdim=True)
            out = out * (math.prod(self.training_grid(positions)) / count)
        return out

    def bias(self, positions: Positions, image: Tensor | None) -> Tensor | None:
        """How far the image moves each placed token along the curve, in (-1, 1).

        Shape:
            ``(B, N)``, or ``None`` without context.
        """
        if self.context == "none":
            return None
        if image is None:
            raise ValueError(
                "image: loope computes its order from the image; call stack.add_to_tokens(x, positions, image=image), "
                "or create the "
                "encoding with context='none'"
            )
        grid = positions.grid_size
        if grid is None:
            raise ValueError(
                "positions: the context of loope needs one grid for the batch; use Positions.grid or context='none'"
            )
        if image.shape[1] != self.channels:
            raise ValueError(
                f"image: expected {self.channels} channels, got {image.shape[1]} in {tuple(image.shape)}; create loope "
                f"with channels={image.shape[1]}"
            )
        expected = tuple(cells * pixels for cells, pixels in zip(grid, self.patch_size, strict=True))
        if tuple(image.shape[-2:]) != expected:
            raise ValueError(
                f"image: expected {expected} pixels for a grid of {tuple(grid)} patches of {self.patch_size}, got "
                f"{tuple(image.shape)}; change the image or patch_size"
            )
        mask = (
            None if positions.mask is None or positions.kept is not None else positions.mask.unflatten(1, grid)[:, None]
        )
        features = self._features(image, mask, positions)
        if self.context == "conv":
            shift = torch.tanh(self.mix_conv(features))[:, 0]
        else:
            assert self.train_grid is not None
            # on another grid: down to the cells of training, and the result back up
            fitted = resample_grid(features[:, 0].permute(1, 2, 0), self.train_grid, "bilinear").permute(2, 0, 1)
            mixed = torch.tanh(self.mix(fitted.flatten(1))).unflatten(1, self.train_grid)
            shift = resample_grid(mixed.permute(1, 2, 0), grid, "bilinear").permute(2, 0, 1)
        rows = shift.flatten(1)
        if positions.kept is None:
            return rows
        count = max(rows.shape[0], positions.kept.shape[0])
        return rows.expand(count, -1).gather(1, positions.kept.expand(count, -1))

    def _features(self, image: Tensor, mask: Tensor | None, positions: Positions) -> Tensor:
        """Convolutions over (row index, column index, image).

        Padded cells are zero throughout. Shape: ``(B, 1, h, w)``.
        """
        first = self.convs[0]
        assert isinstance(first, nn.Conv2d)
        height, width = image.shape[-2:]
        scale = [self.coord_scale, self.coord_scale]
        if self.resolution == "rescaled":
            seen = [
                cells * pixels for cells, pixels in zip(self.training_grid(positions), self.patch_size, strict=True)
            ]
            scale = [self.coord_scale * trained / size for trained, size in zip(seen, (height, width), strict=True)]
        rows = torch.arange(height, device=image.device, dtype=torch.float32) * scale[0]
        columns = torch.arange(width, device=image.device, dtype=torch.float32) * scale[1]
        planes = torch.stack(torch.meshgrid(rows, columns, indexing="ij")).expand(image.shape[0], -1, -1, -1)
        x = torch.cat([planes.to(first.weight.dtype), image.to(first.weight.dtype)], dim=1)
        if mask is not None:
            pixels = mask.repeat_interleave(self.patch_size[0], -2).repeat_interleave(self.patch_size[1], -1)
            x = x.masked_fill(~pixels, 0.0)
        for conv in self.convs:
            x = ACTIVATIONS[self.act](conv(x))
            if mask is not None:
                x = x.masked_fill(~mask, 0.0)
        x = self.norm(x)
        return x if mask is None else x.masked_fill(~mask, 0.0)

    def embed(self, positions: Positions, image: Tensor | None = None) -> Tensor:
        """The vectors of the placed tokens. Shape: ``(B or 1, N, D)``."""
        place = self.ranks(positions)
        with torch.autocast(place.device.type, enabled=False):  # it would round pixel indices to eight bits
            shift = self.bias(positions, image)
        if shift is not None:
            place = place + shift.to(place.dtype)
        return sincos((place * self.position_scale)[..., None], self.dim, self.base)

    def add_to_tokens(self, x: Tensor, positions: Positions, image: Tensor | None = None) -> Tensor:
        """Add the sinusoid of the learned order; prefix tokens get nothing."""
        return add_to_placed(x, self.embed(positions, image), positions)
