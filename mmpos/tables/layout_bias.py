"""Attention biases from bounding boxes: LayoutLMv2 and v3, UDOP, BROS.

LayoutLMv2: Xu et al., ACL 2021, arXiv 2012.14740. LayoutLMv3: Huang et al., MM 2022, arXiv 2204.08387. UDOP: Tang et
al., CVPR 2023, arXiv 2212.02623. BROS: Hong et al., AAAI 2022, arXiv 2108.04539. Reference of all: transformers 5.24
(Apache-2.0). Since huggingface/transformers#30988 it reads the tables of LayoutLM without gradient, so fine-tuning
never changes them; here they train.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.functional.sincos import sincos

__all__ = ["BrosBias", "LayoutBias", "UdopBias", "bros_bias", "layout_bias", "pair_differences", "t5_bucket"]


def t5_bucket(offset: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Bucket of key minus query: the upper half for offsets above 0; in each half the first half exact, then
    logarithmic, everything from ``max_distance`` in the last.

    Args:
        offset: whole offsets.
        num_buckets: buckets of both signs, a multiple of 4.
        max_distance: where the last bucket begins.

    Shape:
        Any shape, int64 out. The logarithm is float32, as in the reference; half precision would move buckets.

    Source: Raffel et al. 2020, arXiv 1910.10683, section 2.1.

    Example:
        >>> t5_bucket(torch.tensor([-300, -1, 0, 1, 300]), 32, 128).tolist()
        [15, 1, 0, 17, 31]
    """
    if offset.is_floating_point():
        raise ValueError(f"offset: expected integers, got {offset.dtype}; round the coordinates first")
    exact = num_buckets // 4
    if num_buckets < 4 or num_buckets % 4 or max_distance <= exact:
        raise ValueError(
            f"num_buckets, max_distance: expected a multiple of 4 and a distance above a quarter of it, got "
            f"{num_buckets} and {max_distance}; raise max_distance or take fewer buckets"
        )
    half, size = num_buckets // 2, offset.abs()
    ratio = (size.clamp_min(1).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (ratio * (half - exact)).long()).clamp_max(half - 1)
    return torch.where(size < exact, size, far) + half * (offset > 0)


def pair_differences(places: Tensor) -> Tensor:
    """Key minus query. Shape: ``(B, N)`` to ``(B, N, N)``, queries in rows."""
    return places[:, None, :] - places[:, :, None]


def _read(table: Tensor, offset: Tensor, max_distance: int) -> Tensor:
    """Rows of a table by bucket. Shape: table ``(heads, bins)``, offset ``(B, N, N)``; ``(B, heads, N, N)``."""
    return F.embedding(t5_bucket(offset, table.shape[1], max_distance), table.t()).movedim(-1, 1)


def layout_bias(
    positions: Tensor,
    boxes: Tensor,
    text: Tensor,
    left: Tensor,
    bottom: Tensor,
    *,
    max_distance: int = 128,
    max_box_distance: int = 256,
) -> Tensor:
    """``text[pos_k - pos_q] + left[x0_k - x0_q] + bottom[y1_k - y1_q]`` by bucket: the left edge, and the bottom edge.

    Args:
        positions: 1-D position ids.
        boxes: (x0, y0, x1, y1), whole numbers of 0 to 1000.
        text: values of the 1-D buckets.
        left: values of the buckets of x0.
        bottom: values of the buckets of y1.
        max_distance: see :func:`t5_bucket`.
        max_box_distance: the same for boxes.

    Shape:
        positions ``(B, N)``, boxes ``(B, N, 4)``, tables ``(heads, bins)``; returns ``(B, heads, N, N)``.

    Source: arXiv 2012.14740; arXiv 2204.08387
    """
    if boxes.dim() != 3 or boxes.shape[-1] != 4 or boxes.shape[:2] != positions.shape:
        raise ValueError(
            f"positions, boxes: expected (B, N) and (B, N, 4), got {tuple(positions.shape)} and {tuple(boxes.shape)}; "
            "give every token a box, (0, 0, 0, 0) for CLS"
        )
    return (
        _read(text, pair_differences(positions), max_distance)
        + _read(left, pair_differences(boxes[..., 0]), max_box_distance)
        + _read(bottom, pair_differences(boxes[..., 3]), max_box_distance)
    )


class LayoutBias(nn.Module):
    """The bias of LayoutLMv2 or v3, one module for all layers.

    Args:
        num_heads: heads.
        head_dim: channels of a head; v3 divides the bias by its root as it does the logits, v2 does not, so that tables
            of one are not those of the other. ``None`` is v2.
        bins: 1-D buckets.
        box_bins: buckets of x and of y.
        max_distance: see :func:`t5_bucket`.
        max_box_distance: the same for boxes.

    Shape:
        positions ``(B, N)``, boxes ``(B, N, 4)``; returns ``(B, heads, N, N)``, to be added to ``q k / sqrt(d)``.

    Example:
        >>> bias = LayoutBias(3, head_dim=8)
        >>> bias(torch.arange(5)[None], torch.zeros(1, 5, 4, dtype=torch.long)).shape
        torch.Size([1, 3, 5, 5])
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int | None = None,
        *,
        bins: int = 32,
        box_bins: int = 64,
        max_distance: int = 128,
        max_box_distance: int = 256,
    ) -> None:
        super().__init__()
        self.scale = 1.0 if head_dim is None else head_dim**-0.5
        self.max_distance, self.max_box_distance = max_distance, max_box_distance
        self.text = nn.Parameter(torch.empty(num_heads, bins))
        self.left = nn.Parameter(torch.empty(num_heads, box_bins))
        self.bottom = nn.Parameter(torch.empty(num_heads, box_bins))
        for table in self.parameters():
            nn.init.normal_(table, std=0.02)

    def forward(self, positions: Tensor, boxes: Tensor) -> Tensor:
        """The bias."""
        limits = {"max_distance": self.max_distance, "max_box_distance": self.max_box_distance}
        return self.scale * layout_bias(positions, boxes, self.text, self.left, self.bottom, **limits)


class UdopBias(nn.Module):
    """T5 buckets of the 1-D position and of the centre of the box, each axis in hundredths of the page.

    Offsets are float32 whatever the dtype of the model: half precision moves buckets. The random scaling of distances
    in training is not here.

    Args:
        num_heads: heads.
        bins: buckets of each table.
        max_distance: where the last bucket of the 1-D table begins; that of the centres is 100.

    Shape:
        positions ``(B, N)``, boxes ``(B, N, 4)`` as parts of the page, 0 to 1; returns ``(B, heads, N, N)``.

    Source: arXiv 2212.02623; transformers ``models/udop``.
    """

    def __init__(self, num_heads: int, bins: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.text, self.across, self.down = (nn.Parameter(torch.empty(num_heads, bins)) for _ in range(3))
        for table in self.parameters():
            nn.init.normal_(table, std=0.02)

    def forward(self, positions: Tensor, boxes: Tensor) -> Tensor:
        """The bias."""
        if not boxes.is_floating_point() or boxes.shape != (*positions.shape, 4):
            raise ValueError(
                f"boxes: expected parts of the page as floats (B, N, 4), got {boxes.dtype} {tuple(boxes.shape)}; "
                "divide coordinates of 0 to 1000 by 1000"
            )
        corners = boxes.float().unflatten(-1, (2, 2)).mean(-2)  # centres (B, N, 2)
        x, y = ((pair_differences(centre) * 100).long() for centre in corners.unbind(-1))
        text = _read(self.text, pair_differences(positions), self.max_distance)
        return text + _read(self.across, x, 100) + _read(self.down, y, 100)


def bros_bias(q: Tensor, corners: Tensor, projection: Tensor, base: float = 10000.0) -> Tensor:
    """``q_i . W e(c_j - c_i)``, with e the sines and cosines of the differences of all corner coordinates.

    A difference of angles splits into products, so the term is one product of ``N x width`` matrices; the reference
    makes an ``N x N x width`` tensor.

    Args:
        q: queries, as they meet the keys; divide by ``sqrt(d)`` together with the logits.
        corners: corner coordinates of each box, scaled.
        projection: the map ``W`` from features to the head, shared by heads.
        base: base of the ladder.

    Shape:
        q ``(B, heads, N, d)``, corners ``(B, N, C)``, projection ``(d, C width)``, each coordinate ``[sin, cos]`` of
        ``width / 2`` frequencies; returns ``(B, heads, N, N)``.

    Source: arXiv 2108.04539
    """
    count = corners.shape[-1]
    width, rest = divmod(projection.shape[1], count)
    if rest or width % 2 or projection.shape[0] != q.shape[-1]:
        raise ValueError(
            f"projection: expected ({q.shape[-1]}, even width for each of {count} coordinates), got "
            f"{tuple(projection.shape)}"
        )
    waves = sincos(corners, count * width, base).to(q.dtype).unflatten(-1, (count, 2, width // 2))[:, None]
    weight = (q @ projection).unflatten(-1, (count, 2, width // 2))
    sin, cos = waves.unbind(-2)
    along, across = weight.unbind(-2)  # of the sine and of the cosine of the difference
    query = torch.stack([along * cos + across * sin, across * cos - along * sin], -2).flatten(-3)
    return query @ waves.flatten(-3).mT


class BrosBias(nn.Module):
    """The term of BROS with its map; boxes count as four corners with eight coordinates.

    Args:
        head_dim: channels of a head.
        width: features of each coordinate, even.
        scale: factor on boxes that are parts of the page.

    Shape:
        q ``(B, heads, N, d)``, boxes ``(B, N, 4)`` in parts of the page; returns ``(B, heads, N, N)``.
    """

    def __init__(self, head_dim: int, width: int = 24, scale: float = 100.0) -> None:
        super().__init__()
        self.scale = scale
        self.projection = nn.Linear(8 * width, head_dim, bias=False)

    def forward(self, q: Tensor, boxes: Tensor) -> Tensor:
        """The term, before the division by ``sqrt(d)``."""
        corners = boxes[..., [0, 1, 2, 1, 2, 3, 0, 3]] * self.scale
        return bros_bias(q, corners, self.projection.weight)
