"""LookHere: every head looks into one direction and prefers what is near.

Fuller, Kyrollos, Yassin, Green, *LookHere: Vision Transformers with Directed Attention Generalize and Extrapolate*,
NeurIPS 2024, arXiv 2405.13985. Reference: GreenCUBIC/lookhere (MIT). The reference works for 6, 12 and 16 heads,
keeps a bias for each layer and rounds it to bfloat16; here any number of heads works, one base serves all layers and
is multiplied by the slope of the layer where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmpos.encodings._bias import BY_OFFSET, offset_coordinates
from mmpos.encodings.base import Facts, PositionEncoding
from mmpos.encodings.registry import register
from mmpos.functional.bias import VIEWS, distances, pad_prefix, pair_offsets, view_mask
from mmpos.positions import Positions

#: penalty outside the field of view: the weight is exactly zero, and sums and differences of logits stay numbers
HIDDEN = 1e30
DISTANCE = ("euclidean", "sqrt", "square")


@dataclass(frozen=True, eq=False)
class Directed:
    """Penalties ``(B or 1, heads, L, L)``, ``HIDDEN`` outside the view, and the slope of the layer."""

    penalty: Tensor
    slope: float


@register("lookhere")
class LookHere(PositionEncoding):
    """Directed heads: ``bias = -g l_k m_h distance`` inside the field of view of a head, nothing outside of it.

    Args:
        dim: model width ``D``.
        num_heads: attention heads ``h``.
        directions: sets of four fields of view joined by ``-``: ``halves`` (180 degrees), ``corners`` (90),
            ``triangles`` (90), ``eighths1``, ``eighths2`` (45), and last ``none`` for unrestricted heads. LH-180,
            LH-90 and LH-45 name the angle.
        global_slope: ``g``, the one number to change for another resolution.
        layer_slopes: ``l_k`` of the first and the last layer, linear in between.
        distance: ``euclidean``, or its ``sqrt`` or ``square``.
        common: arguments of :class:`~mmpos.encodings.base.PositionEncoding`; ``resolution="rescaled"`` measures
            distances in patches of the training grid, fields of view do not depend on it.

    Example:
        >>> from mmpos import create_encoding
        >>> [view for view, _ in create_encoding("lookhere", 96, 6).shared["lookhere"].heads][-3:]
        [('down', 'right'), (), ()]
    """

    facts = Facts(
        title="LookHere",
        source="Fuller et al. 2024, arXiv 2405.13985",
        plugs_into=("bias",),
        axes=(2, 2),
        resolution_rules=BY_OFFSET,
        relative=True,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        directions: str = "corners-none",
        global_slope: float = 1.0,
        layer_slopes: tuple[float, float] = (1.5, 0.5),
        distance: str = "euclidean",
        **common: Any,
    ) -> None:
        super().__init__(dim, num_heads, **common)
        if distance not in DISTANCE:
            raise ValueError(f"distance: expected one of {DISTANCE}, got {distance!r}")
        first, last = (float(slope) for slope in layer_slopes)
        if not (global_slope > 0 and first > 0 and last > 0):
            raise ValueError(
                f"global_slope, layer_slopes: expected positive numbers, got {global_slope} and {layer_slopes}"
            )
        self.directions = directions
        self.global_slope = float(global_slope)
        self.layer_slopes = (first, last)
        self.distance = distance
        self.heads = head_layout(num_heads, directions)

    def prepare(self, positions: Positions) -> Directed:
        """Penalties before the slope of the layer, once for all layers."""
        distance = distances(offset_coordinates(self, positions))
        if self.distance != "euclidean":
            distance = distance.sqrt() if self.distance == "sqrt" else distance.square()
        offsets = pair_offsets(positions.coords)
        hidden = {view: ~view_mask(offsets, view) for view in {view for view, _ in self.heads} if view}
        penalties = []
        for view, slope in self.heads:
            penalty = distance * (slope * self.global_slope)
            penalties.append(penalty.masked_fill(hidden[view], HIDDEN) if view else penalty)
        batch = max(penalty.shape[0] for penalty in penalties)
        stacked = torch.stack([penalty.expand(batch, -1, -1) for penalty in penalties], 1)
        return Directed(pad_prefix(stacked, positions.num_prefix), self.layer_slopes[0])

    def at_layer(self, prepared: Directed, layer: int, depth: int) -> Directed:
        """The same penalties with the slope of one layer."""
        first, last = self.layer_slopes
        share = layer / (depth - 1) if depth > 1 else 0.0
        return replace(prepared, slope=first + (last - first) * share)

    def logit_bias(self, q: Tensor, k: Tensor, prepared: Directed) -> Tensor:
        """The bias; zero from and to prefix tokens."""
        return prepared.penalty * -prepared.slope


def head_layout(num_heads: int, directions: str) -> tuple[tuple[tuple[str, ...], float], ...]:
    """Field of view and slope of each head; no field means unrestricted.

    Directed heads come in groups of four with slopes 1/2, 1/4, .. that start again with every new set. Groups are
    dealt to the sets in order, earlier sets first. With ``none``, heads that do not fill a group are unrestricted,
    and the last group too when all are filled and every set still has one. Fewer than four heads see the first
    directions of the first set.
    """
    names = directions.split("-")
    unknown = [name for name in names if name not in VIEWS and name != "none"]
    if unknown or "none" in names[:-1]:
        raise ValueError(
            f"directions: expected sets of {sorted(VIEWS)} joined by '-', with 'none' only at the end, got "
            f"{directions!r}"
        )
    sets = [name for name in names if name != "none"]
    free = "none" in names
    if not sets:
        return tuple(((), slope) for slope in _free_slopes(num_heads))
    groups, rest = divmod(num_heads, 4)
    if rest and num_heads > 4 and not free:
        raise ValueError(
            f"directions: {num_heads} heads do not divide into groups of four; add '-none' so that {rest} are "
            "unrestricted"
        )
    if free and not rest and groups > len(sets):
        groups -= 1
    if num_heads < 4:
        groups = 1
    if groups < len(sets):
        raise ValueError(
            f"directions: {len(sets)} sets of four need at least {4 * len(sets)} heads, got {num_heads}; name "
            "fewer sets"
        )
    share, extra = divmod(groups, len(sets))
    layout: list[tuple[tuple[str, ...], float]] = []
    slope, previous = 0.5, ""
    for place, name in enumerate(sets):
        slope = slope if name == previous else 0.5
        for _ in range(share + (place < extra)):
            layout += [(view, slope) for view in VIEWS[name]]
            slope /= 2
        previous = name
    layout = layout[:num_heads]
    return (*layout, *(((), free_slope) for free_slope in _free_slopes(num_heads - len(layout))))


def _free_slopes(count: int) -> list[float]:
    """1/4, 1/16, 1/64, 1/256, each repeated when there are more than four heads."""
    return [0.25 ** (1 + (head if count <= 4 else head * 4 // count)) for head in range(count)]
