"""Learned functions of the patch distance: KERPLE and FIRE in two and more dimensions.

Chi, Fan, Ramadge, Rudnicky, *KERPLE*, NeurIPS 2022, arXiv 2205.09921; Li, You, Guruganesh, Ainslie, Ontanon, Zaheer,
Sanghai, Yang, Kumar, Bhojanapalli, *FIRE: Functional Interpolation for Relative Positions*, ICLR 2024, arXiv
2310.04418. Both are about text. The step to images is ours: the distance of two tokens takes the place of ``|m -
n|``, and the largest distance of a query to any token takes the place of the query position in FIRE. Shared by all
layers by default; the text models have one per layer (``per_layer=True``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.encodings._bias import BY_OFFSET, offset_coordinates
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.bias import DISTANCES, distances, kerple, lengths, log_ratio, pad_prefix
from mmpos.positions import Positions

KINDS = ("kerple_log", "kerple_power", "fire")


@register("functional_bias")
class FunctionalBias(PositionEncoding):
    """``-p ln(1 + a d)`` (KERPLE log), ``-a d ** p`` (KERPLE power), or a network of ``psi(d) / psi(reach)`` (FIRE).

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        kind: ``kerple_log``, ``kerple_power`` or ``fire``.
        distance: ``euclidean``, ``manhattan``, ``chebyshev``, or ``per_axis``: a function for each axis and each
            direction, summed, so that left and right differ.
        hidden: width of the network of FIRE.
        threshold: reach below which FIRE counts in patches; default the diagonal of the training grid.
        prefix_value: whether pairs with a prefix token have a learned value for each head instead of 0.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`.

    Shape:
        KERPLE ``p``, ``a``: ``(functions, heads)``; FIRE ``c``, ``threshold``: scalars, ``fc1``: 1 (per function) to
        hidden, ``fc2`` to heads; ``functions`` is 1, or 2 A for ``per_axis``.

    Example:
        >>> from mmpos import Positions, create_encoding
        >>> stack = create_encoding("functional_bias", 64, 4, kind="kerple_log")
        >>> stack.prepare(Positions.grid(2, 3))[0].prepared[0].shape
        torch.Size([1, 4, 6, 6])
    """

    facts = Facts(
        title="KERPLE / FIRE",
        source="Chi et al. 2022, arXiv 2205.09921; Li et al. 2024, arXiv 2310.04418",
        plugs_into=("bias",),
        resolution_rules=BY_OFFSET,
        relative=True,
        learned=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        kind: str = "fire",
        distance: str = "euclidean",
        hidden: int = 32,
        threshold: float | None = None,
        prefix_value: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
        if distance not in (*DISTANCES, "per_axis"):
            raise ValueError(f"distance: expected one of {(*DISTANCES, 'per_axis')}, got {distance!r}")
        if kind == "fire" and threshold is None:
            if self.train_grid is None:
                raise ValueError(
                    "train_grid: FIRE starts its threshold at the diagonal of the training grid; give "
                    "train_grid= or threshold="
                )
            threshold = math.hypot(*(size - 1 for size in self.train_grid))
        self.kind = kind
        self.distance = distance
        self.initial_threshold = threshold
        functions = 2 * self.axes if distance == "per_axis" else 1
        if kind == "fire":
            self.c = nn.Parameter(torch.empty(()))
            self.threshold = nn.Parameter(torch.empty(()))
            self.fc1 = nn.Linear(functions, hidden)
            self.fc2 = nn.Linear(hidden, num_heads)
        else:
            self.p = nn.Parameter(torch.empty(functions, num_heads))
            self.a = nn.Parameter(torch.empty(functions, num_heads))
        self.prefix_value = nn.Parameter(torch.empty(num_heads)) if prefix_value else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """KERPLE: ``p`` uniform in (0, 2), ``a`` in (0, 1); FIRE: ``c`` 0.1, threshold as given."""
        if self.kind == "fire":
            nn.init.constant_(self.c, 0.1)
            nn.init.constant_(self.threshold, float(self.initial_threshold or 0.0))
            self.fc1.reset_parameters()
            self.fc2.reset_parameters()
        else:
            nn.init.uniform_(self.p, 0.0, 2.0)
            nn.init.uniform_(self.a, 0.0, 1.0)
        if self.prefix_value is not None:
            nn.init.zeros_(self.prefix_value)

    def distance_maps(self, positions: Positions) -> list[Tensor]:
        """One map ``(B or 1, N, N)`` per function: the distance, or the part of it along each axis and direction."""
        coords = offset_coordinates(self, positions)
        if self.distance != "per_axis":
            return [distances(coords, self.distance)]
        offsets = [c[:, :, None] - c[:, None, :] for c in coords.unbind(-1)]
        return [part for offset in offsets for part in (offset.clamp_min(0), (-offset).clamp_min(0))]

    def prepare(self, positions: Positions) -> Tensor:
        """The bias, ``(B or 1, heads, L, L)``."""
        maps = self.distance_maps(positions)
        if self.kind == "fire":
            reaches = self._reaches(maps, positions)
            ratios = [log_ratio(d, reach, self.c) for d, reach in zip(maps, reaches, strict=True)]
            with torch.autocast(positions.coords.device.type, enabled=False):
                values = torch.stack(ratios, -1).to(self.fc1.weight.dtype)
                bias = self.fc2(torch.relu(self.fc1(values))).movedim(-1, 1).contiguous()
        else:
            # the lower bound keeps the bias a penalty; a power above 2 is no longer a valid kernel
            high = 2.0 if self.kind == "kerple_power" else None
            p, a = self.p.clamp(1e-2, high), self.a.clamp_min(1e-2)
            kind = self.kind.removeprefix("kerple_")
            bias = torch.stack([kerple(d, p[i], a[i], kind) for i, d in enumerate(maps)]).sum(0)
        bias = pad_prefix(bias, positions.num_prefix)
        if self.prefix_value is not None and positions.num_prefix:
            placed = torch.ones(positions.num_placed, positions.num_placed, dtype=torch.bool, device=bias.device)
            outside = ~torch.nn.functional.pad(placed, (positions.num_prefix, 0, positions.num_prefix, 0))
            bias = bias + outside * self.prefix_value[:, None, None]
        return bias

    def _reaches(self, maps: list[Tensor], positions: Positions) -> list[Tensor]:
        """For each map the largest distance of each query to any place of its field, at least the threshold.

        Where the field is known it does not matter which of its tokens are there; free points without one reach as far
        as the furthest real token.
        """
        real = None if positions.mask is None else positions.mask[:, None]
        found = [(d if real is None else d.masked_fill(~real, 0.0)).amax(-1) for d in maps]
        if positions.extent is not None and not positions.moved:  # the furthest place of a field is one of its corners
            which = torch.cartesian_prod(*[torch.arange(2, device=positions.extent.device)] * self.axes)
            corners = which.reshape(-1, self.axes) * (positions.extent[:, None] - 1)
            there = replace(positions, coords=corners.to(positions.coords), kept=None, mask=None, grid_size=None)
            offset = offset_coordinates(self, positions)[:, :, None] - offset_coordinates(self, there)[:, None]
            if self.distance == "per_axis":
                parts = [part for c in offset.unbind(-1) for part in (c.clamp_min(0), (-c).clamp_min(0))]
            else:
                parts = [lengths(offset, self.distance)]
            found = [torch.maximum(reach, part.amax(-1)) for reach, part in zip(found, parts, strict=True)]
        return [torch.maximum(reach, self.threshold.to(reach.dtype)) for reach in found]

    def logit_bias(self, q: Tensor, k: Tensor, prepared: Tensor) -> Tensor:
        """The bias."""
        return prepared
