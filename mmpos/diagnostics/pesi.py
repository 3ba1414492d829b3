"""PESI metrics: how well the similarity of position vectors follows the plane they describe.

Chowdhury, Rahman, Taki, arXiv 2504.14386, equations 14 to 25 (no code released). What the text leaves open was fixed by
reproducing its Table 5 for a raster sinusoid, a Gilbert order and 2-D sine and cosine (14 x 14, D = 768) to four
digits: rings are rounded distances, the centre is a ring, deviations are those of the population, and a direction with
fewer than two cells counts with correlation zero. The last rule caps the directed monotonicity well below its ideal of
2. All of it can be switched; the defaults are the paper's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmpos.encodings.base import overrides
from mmpos.encodings.registry import EncodingStack, create_encoding
from mmpos.positions import Positions

__all__ = ["Pesi", "attention_kernel", "cosine_kernel", "pesi", "pesi_metrics"]

KERNELS = ("auto", "cosine", "odds", "logits")


@dataclass(frozen=True)
class Pesi:
    """The three metrics and their values at each centre.

    Args:
        undirected: monotonicity over rings, 2 when similarity falls with every ring.
        directed: monotonicity within directions, 2 in theory.
        asymmetry: relative spread of similarity within rings, 0 when the kernel is round. It explodes when ring means
            come near zero.
        undirected_map: ``undirected`` of each centre.
        directed_map: ``directed`` of each centre.
        asymmetry_map: ``asymmetry`` of each centre.

    Shape:
        maps ``(height, width)`` float64.
    """

    undirected: float
    directed: float
    asymmetry: float
    undirected_map: Tensor
    directed_map: Tensor
    asymmetry_map: Tensor

    def __str__(self) -> str:
        return f"M_U {self.undirected:.4f}  M_D {self.directed:.4f}  A_SU {self.asymmetry:.4f}"


def cosine_kernel(table: Tensor) -> Tensor:
    """Cosines between all vectors of a table. Shape: ``(height, width, D)`` to ``(N, N)`` float64."""
    rows = F.normalize(table.double().flatten(0, 1), dim=-1)
    return rows @ rows.T


def pesi_metrics(
    similarity: Tensor,
    grid: tuple[int, int],
    *,
    buckets: int = 60,
    ring: str = "round",
    include_self: bool = True,
    empty_bucket: str = "zero",
    tie: float = 1e-12,
) -> Pesi:
    """PESI metrics of a similarity between all cells of a grid.

    Args:
        similarity: row ``c`` is the similarity of the centre ``c`` with every cell, row-major.
        grid: (height, width).
        buckets: directions of the directed monotonicity.
        ring: ``round`` to whole radii (half to even), or ``exact`` distances.
        include_self: whether the centre is a ring of its own and lies in the first direction.
        empty_bucket: directions with fewer than two cells count as ``zero`` or are left out (``skip``).
        tie: similarities no further apart than this are tied. A sinusoid ties often, and with 0 the last bit of the
            machine decides (up to 1e-4 in the directed monotonicity).

    Shape:
        similarity ``(N, N)`` with ``N = height * width``.

    Example:
        >>> cells = torch.stack(torch.meshgrid(torch.arange(3.0), torch.arange(4.0), indexing="ij"), -1).reshape(-1, 2)
        >>> round(pesi_metrics(-torch.cdist(cells, cells).round(), (3, 4)).undirected, 6)
        2.0
    """
    height, width = grid
    count = height * width
    if tuple(similarity.shape) != (count, count):
        raise ValueError(
            f"similarity: expected ({count}, {count}) for a grid {tuple(grid)}, got {tuple(similarity.shape)}"
        )
    if count < 2:
        raise ValueError(f"grid: expected at least two cells, got {tuple(grid)}")
    if ring not in ("round", "exact"):
        raise ValueError(f"ring: expected 'round' or 'exact', got {ring!r}")
    if empty_bucket not in ("zero", "skip"):
        raise ValueError(f"empty_bucket: expected 'zero' or 'skip', got {empty_bucket!r}")
    if buckets < 1:
        raise ValueError(f"buckets: expected at least 1 direction, got {buckets}")
    similarity = similarity.detach().double().cpu()
    rows = torch.arange(count) // width
    columns = torch.arange(count) % width
    down, right = rows[None] - rows[:, None], columns[None] - columns[:, None]  # (centre, cell)
    square = down**2 + right**2
    counted = torch.ones_like(square, dtype=torch.bool) if include_self else square > 0

    # rings: a number for each radius that occurs anywhere, in increasing order
    radius = square.double().sqrt().round().long() if ring == "round" else square
    ring_index = torch.unique(radius, return_inverse=True)[1]
    rings = int(ring_index.max()) + 1
    size = _scatter(counted.double(), ring_index, rings)
    present = size > 0
    share = size.clamp_min(1)
    masked = torch.where(counted, similarity, 0.0)
    mean = _scatter(masked, ring_index, rings) / share
    deviation = torch.where(counted, similarity - mean.gather(1, ring_index), 0.0)
    spread = (_scatter(deviation**2, ring_index, rings) / share).sqrt()
    asymmetry = torch.where(present & (spread > 0), spread / mean, 0.0).sum(1) / present.sum(1)
    order = torch.arange(rings).double().expand(count, -1)
    rho, _ = _grouped_spearman(order, mean, torch.zeros_like(order, dtype=torch.long), present, 1, tie)
    undirected = 1 - rho[:, 0]

    direction = _directions(height, width, buckets)[down + height - 1, right + width - 1]
    rho, cells = _grouped_spearman(square.double(), similarity, direction, counted, buckets, tie)
    filled = (cells >= 2).sum(1).clamp_min(1)
    directed = 1 - rho.sum(1) / (buckets if empty_bucket == "zero" else filled)
    maps = [value.reshape(height, width) for value in (undirected, directed, asymmetry)]
    return Pesi(float(undirected.mean()), float(directed.mean()), float(asymmetry.mean()), *maps)


def _scatter(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sums of each row by index. Shape: ``(centre, n)`` to ``(centre, size)``."""
    return torch.zeros(values.shape[0], size, dtype=values.dtype).scatter_add_(1, index, values)


def _directions(height: int, width: int, buckets: int) -> Tensor:
    """Direction of every offset ``(down, right)``; downwards is the first. Shape: ``(2 height - 1, 2 width - 1)``."""
    # plain floats: an angle on the border between two directions must not depend on the vector width of the machine
    step = 2 * math.pi / buckets
    table = [
        [math.floor(math.atan2(right, down) / step) % buckets for right in range(1 - width, width)]
        for down in range(1 - height, height)
    ]
    return torch.tensor(table)


def _grouped_spearman(
    x: Tensor, y: Tensor, group: Tensor, counted: Tensor, groups: int, tie: float
) -> tuple[Tensor, Tensor]:
    """Spearman's rho within groups of each row, 0 for groups of fewer than two, and the sizes of the groups.

    ``rho = 1 - 6 sum d^2 / (n (n^2 - 1))`` on average ranks, also where ties make that differ from a correlation of
    ranks.

    Shape:
        all ``(rows, n)``; returns ``(rows, groups)`` twice.
    """
    rows = x.shape[0]
    key = torch.where(counted, group, groups) + torch.arange(rows)[:, None] * (groups + 1)
    key, total = key.flatten(), rows * (groups + 1)
    gap = _ranks(x.flatten(), key, 0.0) - _ranks(y.flatten(), key, tie)
    squares = torch.zeros(total, dtype=x.dtype).scatter_add_(0, key, gap**2)
    size = torch.zeros(total, dtype=x.dtype).scatter_add_(0, key, torch.ones_like(gap))
    rho = torch.where(size >= 2, 1 - 6 * squares / (size * (size**2 - 1)).clamp_min(1), 0.0)
    return rho.reshape(rows, groups + 1)[:, :groups], size.reshape(rows, groups + 1)[:, :groups]


def _ranks(values: Tensor, key: Tensor, tie: float) -> Tensor:
    """Average rank of each value among those with the same key, from 0; steps of at most ``tie`` share a rank."""
    order = values.argsort(stable=True)
    order = order[key[order].argsort(stable=True)]
    sorted_values, sorted_key = values[order], key[order]
    new = torch.ones_like(sorted_key, dtype=torch.bool)
    new[1:] = (sorted_values[1:] - sorted_values[:-1] > tie) | (sorted_key[1:] != sorted_key[:-1])
    run = new.cumsum(0) - 1
    place = torch.arange(len(values), dtype=values.dtype)
    length = torch.zeros(int(run[-1]) + 1, dtype=values.dtype).scatter_add_(0, run, torch.ones_like(place))
    mean = torch.zeros_like(length).scatter_add_(0, run, place) / length
    # places count on over all keys: start again at each one
    first = torch.full((int(key.max()) + 1,), float(len(values)), dtype=values.dtype).scatter_reduce_(
        0, sorted_key, place, "amin"
    )
    return torch.empty_like(values).index_copy_(0, order, mean[run] - first[sorted_key])


# -- encodings --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def attention_kernel(
    stack: EncodingStack,
    positions: Positions,
    *,
    kernel: str = "auto",
    layer: int = 0,
    samples: int = 64,
    seed: int = 0,
) -> Tensor:
    """Similarity of places as attention sees it: logits between tokens of equal content, mean over contents and heads.

    All tokens carry the same random vector as query, key and layer input, so that only their places tell them apart.

    Args:
        stack: the encoding, any that acts on queries, keys or logits.
        positions: where the tokens are.
        kernel: ``logits`` as they are; ``cosine``, divided by the logit of a token with itself, for rotations;
            ``odds``, exponential of the difference to that logit, for biases; ``auto`` takes ``cosine`` for methods
            that keep the length of q and k and add no bias.
        layer: which layer.
        samples: contents.
        seed: of the contents.

    Shape:
        Returns ``(N, N)`` float64 over placed tokens.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel: expected one of {KERNELS}, got {kernel!r}")
    generator = torch.Generator().manual_seed(seed)
    state = stack.prepare(positions)[layer]
    first = state.encodings[0]
    place, count = positions.coords, positions.num_tokens
    width, heads, dim = first.head_dim, first.num_heads, first.dim
    dtype = next((p.dtype for p in stack.parameters() if p.dim() > 1), place.dtype)
    content = torch.randn(samples, heads, 1, width, generator=generator).to(place.device, dtype)
    x = torch.randn(samples, 1, dim, generator=generator).to(place.device, dtype).expand(-1, count, -1)
    total = torch.zeros(count, count, dtype=torch.float64, device=place.device)
    bias = False
    for sample in range(samples):  # one at a time: a few hundred tokens squared, times heads, is enough memory
        q = k = v = content[sample : sample + 1].expand(-1, -1, count, -1)
        for encoding, prepared in zip(state.encodings, state.prepared, strict=True):
            q, k, v = encoding.transform_qkv(q, k, v, prepared, x[sample : sample + 1])
        logits = torch.matmul(q.double(), k.double().mT) * width**-0.5
        bias = bias or q.shape[-1] != width
        for encoding, prepared in zip(state.encodings, state.prepared, strict=True):
            term = encoding.logit_bias(q, k, prepared)
            if term is not None:
                logits, bias = logits + term.double(), True
        total += logits.mean((0, 1))
    mean = (total / samples)[positions.num_prefix :, positions.num_prefix :]
    own = mean.diagonal()
    if kernel == "logits":
        return mean
    if kernel == "odds" or (kernel == "auto" and bias):
        return (mean - own[:, None]).exp()
    return mean / (own[:, None] * own).clamp_min(0).sqrt()


def pesi(
    encoding: str | EncodingStack,
    grid: tuple[int, int] = (14, 14),
    *,
    dim: int = 768,
    num_heads: int = 12,
    kernel: str = "auto",
    buckets: int = 60,
    ring: str = "round",
    include_self: bool = True,
    empty_bucket: str = "zero",
    tie: float = 1e-12,
    layer: int = 0,
    image: Tensor | None = None,
    **options: Any,
) -> Pesi:
    """PESI metrics of an encoding: of the vectors it adds to tokens, or else of its attention kernel.

    Args:
        encoding: a registry name, built untrained with ``options``, or a stack with its weights.
        grid: (height, width) in patches.
        dim: width, when a name is given.
        num_heads: heads, when a name is given.
        kernel: see :func:`attention_kernel`; for vectors added to tokens it is always the cosine.
        buckets: see :func:`pesi_metrics`.
        ring: see :func:`pesi_metrics`.
        include_self: see :func:`pesi_metrics`.
        empty_bucket: see :func:`pesi_metrics`.
        tie: see :func:`pesi_metrics`.
        layer: whose attention kernel is measured; vectors added to tokens belong to no layer.
        image: picture for encodings that read one, ``(1, channels, height, width)``; default an empty one.
        options: options of the encoding, when a name is given.

    Example:
        >>> print(pesi("sincos", (14, 14), dim=768))
        M_U 1.9991  M_D 1.5318  A_SU 0.0281
    """
    if isinstance(encoding, str):
        options.setdefault("train_grid", tuple(grid))
        stack = create_encoding(encoding, dim, num_heads, **options)
    else:
        if options:
            raise ValueError(f"options: {sorted(options)} build an encoding from its name; this one exists already")
        stack = encoding
    training = stack.training
    stack.eval()
    try:
        similarity = _similarity(stack, grid, kernel, layer, image)
    finally:
        stack.train(training)
    return pesi_metrics(
        similarity,
        grid,
        buckets=buckets,
        ring=ring,
        include_self=include_self,
        empty_bucket=empty_bucket,
        tie=tie,
    )


@torch.no_grad()
def _similarity(stack: EncodingStack, grid: tuple[int, int], kernel: str, layer: int, image: Tensor | None) -> Tensor:
    if not 0 <= layer < stack.depth:
        raise ValueError(f"layer: expected 0 to {stack.depth - 1}, got {layer}")
    first = stack.encodings_of(0)[0]
    where = next((p.device for p in stack.parameters()), torch.device("cpu"))
    positions = Positions.grid(*grid, num_prefix=first.num_prefix, device=where, dtype=torch.float64)
    zeros = torch.zeros(1, positions.num_tokens, first.dim, device=where, dtype=torch.float64)
    if image is None:
        image = _empty_image(stack, grid)
    added = stack.add_to_tokens(zeros, positions, image=image)[0, positions.num_prefix :]
    if added.abs().amax() > 0:
        return cosine_kernel(added.reshape(*grid, -1))
    if not any(overrides(e, "transform_qkv") or overrides(e, "logit_bias") for e in stack.encodings_of(0)):
        raise ValueError(
            f"encoding: {stack.title} neither adds vectors to the tokens nor changes attention logits, so there is no "
            "similarity of places to measure"
        )
    return attention_kernel(stack, positions, kernel=kernel, layer=layer)


def _empty_image(stack: EncodingStack, grid: tuple[int, int]) -> Tensor | None:
    """A picture without content where an encoding reads one and says its patch size and channels."""
    for encoding in stack.encodings_of(0):
        if encoding.needs_image:
            patch, channels = getattr(encoding, "patch_size", (16, 16)), getattr(encoding, "channels", 3)
            height, width = (size * side for size, side in zip(grid, patch, strict=True))
            where = next((p.device for p in stack.parameters()), torch.device("cpu"))
            return torch.zeros(1, channels, height, width, device=where)
    return None
