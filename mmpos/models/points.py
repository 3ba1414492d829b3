"""A transformer over point clouds: tokens are groups of neighbouring points, places are the centres of the groups.

Groups of nearest neighbours around farthest-point centres are those of Point-BERT (arXiv 2111.14819, MIT) and Point-MAE
(arXiv 2203.06604, MIT), of which nothing is here. These add an MLP of the centre to the tokens, and Point-BERT's
neighbours keep their direction; here a token holds nothing but local geometry, by default distances alone, so where a
group is and how the cloud is turned reaches the model only through the position encoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.attention import attend
from mmpos.encodings import EncodingStack, LayerState, create_encoding, encoding_class
from mmpos.functional.points import LOCAL_WIDTHS, farthest_points, gather_points, local_geometry, nearest_points
from mmpos.positions import Positions

__all__ = ["PointEmbed", "PointTransformer", "create_point_transformer"]

AXES = 3


class PointEmbed(nn.Module):
    """From points to tokens: groups around centres, and the mean and the largest of many features of their points.

    Args:
        embed_dim: model width ``D``.
        num_groups: tokens of a cloud ``G``.
        group_part: points of a group ``k``, as a part of those of the cloud: groups of a denser cloud are as large.
        local: ``distances`` (the same for a turned cloud) or ``relative`` offsets (the same for a shifted one).
        features: numbers that every point carries besides its place.
        hidden: features of a point.
    """

    def __init__(
        self, embed_dim: int, num_groups: int, group_part: float, *, local: str, features: int, hidden: int
    ) -> None:
        super().__init__()
        if min(num_groups, hidden) < 1 or features < 0:
            raise ValueError(
                f"num_groups, hidden, features: expected positive numbers (features 0 or more), got {num_groups}, "
                f"{hidden}, {features}"
            )
        if not 0 < group_part <= 1:
            raise ValueError(f"group_part: expected a part of the points of a cloud in (0, 1], got {group_part}")
        if local not in LOCAL_WIDTHS:
            raise ValueError(f"local: expected one of {sorted(LOCAL_WIDTHS)}, got {local!r}")
        self.num_groups = num_groups
        self.group_part = group_part
        self.local = local
        self.features = features
        self.hidden = nn.Linear(LOCAL_WIDTHS[local] + features, hidden)
        self.norm = nn.LayerNorm(2 * hidden)
        self.out = nn.Linear(2 * hidden, embed_dim)

    def forward(
        self, points: Tensor, features: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, their centres, and which tokens are real.

        Shape:
            points ``(B, N, 3)``, features ``(B, N, C)``, mask ``(B, N)``; returns ``(B, G, D)``, ``(B, G, 3)`` and
            ``(B, G)`` or ``None``.
        """
        short = self.num_groups - points.shape[1]
        if short > 0:  # a cloud smaller than its groups is a padded one
            mask = torch.ones_like(points[..., 0], dtype=torch.bool) if mask is None else mask
            points, mask = F.pad(points, (0, 0, 0, short)), F.pad(mask, (0, short))
            features = None if features is None else F.pad(features, (0, 0, 0, short))
        if mask is not None:  # whatever padding holds, not a number included
            points = points.masked_fill(~mask[..., None], 0.0)
            features = None if features is None else features.masked_fill(~mask[..., None], 0.0)
        chosen = farthest_points(points.detach(), self.num_groups, mask)
        centres = gather_points(points, chosen)
        index, real = self._groups(points.detach(), centres.detach(), mask)
        described = local_geometry(gather_points(points, index), centres, real, self.local)
        if features is not None:
            described = torch.cat([described, gather_points(features, index).to(described.dtype)], dim=-1)
        hidden = F.relu(self.hidden(described.to(self.hidden.weight.dtype)))
        if real is None:
            largest, mean = hidden.amax(-2), hidden.mean(-2)
        else:
            largest = hidden.masked_fill(~real[..., None], float("-inf")).amax(-2)
            mean = (hidden * real[..., None]).sum(-2) / real.sum(-1, keepdim=True)
        kept = None
        if mask is not None:
            kept = torch.arange(self.num_groups, device=points.device) < mask.sum(1, keepdim=True)
        return self.out(self.norm(torch.cat([largest, mean], dim=-1))), centres, kept

    def _groups(self, points: Tensor, centres: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Indices of the points of every group, and which of them belong to it. Shape: ``(B, G, k)`` twice."""
        if mask is None:
            return nearest_points(points, centres, math.ceil(self.group_part * points.shape[1])), None
        # in double precision, as above: a padded cloud has the groups of the cloud without its padding
        sizes = (self.group_part * mask.sum(1).double()).ceil().long()
        longest = int(sizes.max())
        belongs = torch.arange(longest, device=points.device) < sizes[:, None, None]
        return nearest_points(points, centres, longest, mask), belongs.expand(-1, centres.shape[1], -1)


class Block(nn.Module):
    """A pre-norm transformer block whose attention takes the state of its layer.

    Args:
        dim: width ``D``.
        num_heads: heads ``h``.
        mlp_ratio: width of the MLP over ``D``.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, round(mlp_ratio * dim))
        self.fc2 = nn.Linear(round(mlp_ratio * dim), dim)

    def forward(self, x: Tensor, layer: LayerState) -> Tensor:
        """Shape: ``(B, G, D)`` in and out."""
        normed = self.norm1(x)
        q, k, v = self.qkv(normed).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = attend(q, k, v, layer, x=normed)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class PointTransformer(nn.Module):
    """Classifies point clouds; made by :func:`create_point_transformer`.

    Args:
        embed: points to tokens.
        encoding: a stack of three axes and as many layers as there are blocks.
        num_classes: classes; 0 leaves out the classifier.
        mlp_ratio: width of the MLPs over ``D``.
        field: side of the cube that the encoding takes for its training grid; the origin of the points is its middle.
    """

    def __init__(
        self, embed: PointEmbed, encoding: EncodingStack, *, num_classes: int, mlp_ratio: float, field: int
    ) -> None:
        super().__init__()
        first = encoding.encodings_of(0)[0]
        self.field = field
        self.embed = embed
        self.position_encoding = encoding
        self.blocks = nn.ModuleList(Block(first.dim, first.num_heads, mlp_ratio) for _ in range(encoding.depth))
        self.norm = nn.LayerNorm(first.dim)
        self.head = nn.Linear(first.dim, num_classes) if num_classes else nn.Identity()

    def positions(self, centres: Tensor, mask: Tensor | None = None) -> Positions:
        """Places of tokens. Shape: centres ``(B, G, 3)``, mask ``(B, G)``."""
        grid = (self.field,) * AXES
        wide = centres if centres.dtype == torch.float64 else centres.float()
        return Positions.points(wide + (self.field - 1) / 2, mask=mask, extent=grid, train_grid=grid)

    def forward(self, points: Tensor, features: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits.

        Args:
            points: places of the points, and their features behind them unless these come apart.
            features: what every point carries besides its place.
            mask: ``True`` for real points, ``False`` for padding.

        Shape:
            points ``(B, N, 3)`` or ``(B, N, 3 + C)``, features ``(B, N, C)``, mask ``(B, N)``; returns
            ``(B, classes)``.
        """
        if features is None and points.dim() == 3 and points.shape[-1] > AXES:
            points, features = points[..., :AXES], points[..., AXES:]
        self._check(points, features, mask)
        x, centres, kept = self.embed(points, features, mask)
        positions = self.positions(centres, kept)
        stack = self.position_encoding
        x = stack.add_to_tokens(x, positions)
        for number, (block, layer) in enumerate(zip(self.blocks, stack.prepare(positions), strict=True)):
            x = stack.mix_tokens(number, block(x, layer), positions)
        x = self.norm(x)
        if kept is None:
            return self.head(x.mean(1))
        weight = kept[..., None].to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1).clamp_min(1))

    def _check(self, points: Tensor, features: Tensor | None, mask: Tensor | None) -> None:
        if points.dim() != 3 or points.shape[-1] != AXES or not points.is_floating_point() or not points.shape[1]:
            raise ValueError(
                f"points: expected real numbers (B, N, {AXES}) with N >= 1, got {points.dtype} {tuple(points.shape)}"
            )
        carried = 0 if features is None else features.shape[-1]
        if carried != self.embed.features or (features is not None and features.shape[:-1] != points.shape[:-1]):
            raise ValueError(
                f"features: expected (B, N, {self.embed.features}) for points {tuple(points.shape)}, got "
                f"{None if features is None else tuple(features.shape)}; give features={carried} to the model"
            )
        if mask is not None and (mask.dtype != torch.bool or mask.shape != points.shape[:2]):
            raise ValueError(
                f"mask: expected bool {tuple(points.shape[:2])} (True = real point), got {mask.dtype} "
                f"{tuple(mask.shape)}"
            )
        if mask is not None and not bool(mask.any(1).all()):
            raise ValueError("mask: every cloud needs at least one real point")


def create_point_transformer(
    *,
    encoding: Any = "pape",
    encoding_options: Mapping[str, Any] | None = None,
    num_classes: int = 10,
    features: int = 0,
    embed_dim: int = 96,
    depth: int = 4,
    num_heads: int = 4,
    mlp_ratio: float = 4.0,
    num_groups: int = 48,
    group_part: float = 0.1875,
    local: str = "distances",
    hidden: int = 64,
    field: int = 14,
) -> PointTransformer:
    """Build a transformer over point clouds with an encoding of real places in three axes.

    Args:
        encoding: registry name, pair ``(name, options)``, or a list of these.
        encoding_options: options of a single encoding.
        num_classes: classes; 0 leaves out the classifier.
        features: numbers that every point carries besides its place.
        embed_dim: model width ``D``.
        depth: blocks.
        num_heads: heads; three axes share 24 channels equally, so 96 wide with 4 heads.
        mlp_ratio: width of the MLPs over ``D``.
        num_groups: tokens of a cloud.
        group_part: points of a group, as a part of those of the cloud.
        local: what tokens hold: ``distances`` (nothing of place or direction) or ``relative`` offsets (no place, but
            directions).
        hidden: features of a point, whose mean and maximum over a group make its token.
        field: side of the cube of training clouds in their unit, the training grid of the encoding. Distances of about
            one unit between neighbouring groups are what defaults of encodings are made for.

    Example:
        >>> model = create_point_transformer(encoding="rope_3d", num_groups=6, group_part=0.2, depth=1)
        >>> model(torch.randn(2, 30, 3)).shape
        torch.Size([2, 10])
    """
    if field < 1:
        raise ValueError(f"field: expected a positive whole number of units, got {field}")
    grid = (field,) * AXES
    options = dict(encoding_options or {})
    _refuse(encoding)
    stack = create_encoding(encoding, embed_dim, num_heads, depth, axes=AXES, train_grid=grid, **options)
    embed = PointEmbed(embed_dim, num_groups, group_part, local=local, features=features, hidden=hidden)
    model = PointTransformer(embed, stack, num_classes=num_classes, mlp_ratio=mlp_ratio, field=field)
    _initialise(model)
    return model


def _refuse(encoding: Any) -> None:
    """Raise for encodings that cannot place free points in three axes."""
    pair = isinstance(encoding, tuple) and len(encoding) == 2 and isinstance(encoding[1], Mapping)
    entries = [encoding] if isinstance(encoding, str) or pair else list(encoding)
    for name in (entry if isinstance(entry, str) else entry[0] for entry in entries):
        facts = encoding_class(name).facts
        low, high = facts.axes
        reasons = [
            reason
            for wrong, reason in (
                (facts.needs_grid, "works on a raster only"),
                (not facts.fractional, "reads whole numbers only"),
                (not low <= AXES <= high, f"has {low} to {high} axes" if low != high else f"has {low} axes"),
                (facts.needs_image, "reads an image"),
            )
            if wrong
        ]
        if reasons:
            raise ValueError(
                f"encoding: {name} {' and '.join(reasons)}, and centres of points are real places in {AXES} axes; "
                "choose one that `mmpos list` shows with any points, such as pape, pape_ri, rope_3d or none"
            )


@torch.no_grad()
def _initialise(model: PointTransformer) -> None:
    """Xavier-uniform weights and zero biases, as in the image models; the encoding initialises itself."""
    own = set(model.position_encoding.modules())
    for module in model.modules():
        if isinstance(module, nn.Linear) and module not in own:
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
