"""DropPos: hide the places of most visible patches and ask where they are.

Wang et al., *DropPos: Pre-Training Vision Transformers by Reconstructing Dropped Positions*, NeurIPS 2023, arXiv
2309.03576. Reference: Haochen-Wang409/DropPos (Apache-2.0). The encoder sees a quarter of the patches; three quarters
of these carry no place. Two faults of the reference are not repeated: its soft targets divide column ``j`` by the sum
of row ``j`` (``reference_quirk=True`` gives that map), and its script builds them for a 16-wide grid where the model
has 14.

Places are hidden from any encoding: what it adds to the tokens is taken back, and in attention the hidden tokens stand
with the prefix tokens, which have no place by definition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpos.objectives._common import PlainDecoder, Trunk, gather_tokens, random_subset
from mmpos.positions import Positions

__all__ = [
    "DropPos",
    "DropPosOutput",
    "attentive_weights",
    "position_accuracy",
    "position_loss",
    "smoothing_sigma",
    "smoothing_targets",
]

MODES = ("learned", "zeros", "shuffle")


def smoothing_targets(
    grid: tuple[int, ...],
    sigma: float,
    *,
    reference_quirk: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Soft labels: row ``i`` spreads cell ``i`` over its neighbours as ``exp(-distance^2 / sigma^2)`` and sums to 1.

    Args:
        grid: true sizes of the grid, height before width.
        sigma: width in cells; 0 gives hard labels.
        reference_quirk: divide columns by the sums of rows, as the released code does; rows then sum to 0.89 to 1.11.
        device: where the result lives.
        dtype: of the result.

    Shape:
        Returns ``(L, L)`` with ``L`` the number of cells.

    Example:
        >>> smoothing_targets((1, 3), 1.0).sum(1).round(decimals=5).tolist()
        [1.0, 1.0, 1.0]
    """
    if sigma < 0:
        raise ValueError(f"sigma: expected 0 or more cells, got {sigma}")
    places = Positions.grid(*grid, device=device, dtype=torch.float64).coords[0]
    if sigma == 0:
        return torch.eye(len(places), device=device, dtype=dtype)
    square = ((places[:, None] - places) ** 2).sum(-1)
    spread = (-square / sigma**2).exp()
    total = spread.sum(0 if reference_quirk else 1, keepdim=True)
    return (spread / total).to(dtype)


def smoothing_sigma(progress: float, start: float = 1.0) -> float:
    """Width of the soft labels, from ``start`` straight down to 0 at the end of training (``progress`` 0 to 1)."""
    return start * (1 - min(max(progress, 0.0), 1.0))


def position_loss(logits: Tensor, cells: Tensor, counted: Tensor, targets: Tensor | None = None) -> Tensor:
    """Weighted cross entropy of position logits, 0 when nothing counts.

    Args:
        logits: scores of the cells for each token.
        cells: true cell of each token.
        counted: weight of each token: the tokens whose place was hidden, times attentive weights if any.
        targets: soft labels of each cell, see :func:`smoothing_targets`; hard labels by default.

    Shape:
        logits ``(B, K, L)``, cells ``(B, K)``, counted ``(B, K)``, targets ``(L, L)``; returns a scalar.
    """
    if targets is not None and tuple(targets.shape) != (logits.shape[-1],) * 2:
        raise ValueError(
            f"targets: expected ({logits.shape[-1]}, {logits.shape[-1]}) for logits {tuple(logits.shape)}, got "
            f"{tuple(targets.shape)}; build "
            "them for the grid of the model"
        )
    log = F.log_softmax(logits, dim=-1)
    each = (
        -log.gather(-1, cells[..., None])[..., 0] if targets is None else -(targets.to(log.dtype)[cells] * log).sum(-1)
    )
    weight = counted.to(each.dtype)
    return (each * weight).sum() / weight.sum().clamp_min(torch.finfo(weight.dtype).tiny)


def position_accuracy(logits: Tensor, cells: Tensor, counted: Tensor) -> Tensor:
    """Weighted share of tokens whose best cell is the true one. Shapes as :func:`position_loss`."""
    weight = counted.to(logits.dtype)
    return ((logits.argmax(-1) == cells) * weight).sum() / weight.sum().clamp_min(torch.finfo(weight.dtype).tiny)


def attentive_weights(cls: Tensor, patches: Tensor, visible: Tensor, temperature: float = 0.1) -> Tensor:
    """How much the CLS token of a pass with all places resembles each patch: softmax over the image, renormalised on
    the visible ones.

    Shape:
        cls ``(B, D)``, patches ``(B, N, D)``, visible ``(B, K)`` indices; returns ``(B, K)`` with rows that sum to 1.
    """
    weight = (F.cosine_similarity(patches, cls[:, None], dim=-1) / temperature).softmax(-1).gather(1, visible)
    return weight / weight.sum(1, keepdim=True)


class DropPosOutput(NamedTuple):
    """Logits ``(B, K, L)`` of the visible tokens, their true cells ``(B, K)``, and whether their place was hidden."""

    logits: Tensor
    cells: Tensor
    hidden: Tensor


class DropPos(nn.Module):
    """The objective around any encoder.

    Args:
        dim: width ``D`` of the encoder.
        grid: sizes of the grid; one class for each cell.
        keep: share of patches the encoder sees.
        drop: share of these whose place is hidden.
        mode: what takes the place's vector: a ``learned`` one, ``zeros`` (nothing), or ``shuffle``: the hidden tokens
            exchange their places.
        width: width of the decoder.
        depth: blocks of the decoder.
        heads: attention heads of the decoder.
    """

    def __init__(
        self,
        dim: int,
        grid: tuple[int, ...],
        *,
        keep: float = 0.25,
        drop: float = 0.75,
        mode: str = "learned",
        width: int = 512,
        depth: int = 2,
        heads: int = 16,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
        for name, value in (("keep", keep), ("drop", drop)):
            if not 0 < value <= 1:
                raise ValueError(f"{name}: expected a share above 0 and up to 1, got {value}")
        self.grid = tuple(grid)
        self.keep = keep
        self.drop = drop
        self.mode = mode
        self.unknown = nn.Parameter(torch.zeros(dim)) if mode == "learned" else None
        if self.unknown is not None:
            nn.init.trunc_normal_(self.unknown, std=0.02)
        count = 1
        for size in self.grid:
            count *= size
        self.decoder = PlainDecoder(dim, width, count, depth=depth, heads=heads)

    def forward(
        self,
        trunk: Trunk,
        tokens: Tensor,
        positions: Positions,
        *,
        image: Tensor | None = None,
        visible: Tensor | None = None,
        hidden: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> DropPosOutput:
        """Choose, hide, encode, classify.

        Args:
            trunk: the encoder.
            tokens: prefix and patch embeddings, without places.
            positions: a complete raster over ``grid``.
            image: for encodings that read it.
            visible: indices of the visible patches; random by default.
            hidden: which of them lose their place, equally many in each sample; random by default.
            generator: source of randomness.

        Shape:
            tokens ``(B, P + L, D)``, visible ``(B, K)``, hidden ``(B, K)`` bool.
        """
        if positions.grid_size is None or tuple(positions.grid_size) != self.grid or not positions.is_raster:
            raise ValueError(
                f"positions: expected the complete grid {self.grid}, got {positions.grid_size}; create DropPos with "
                "the grid of the model"
            )
        batch, count, start = tokens.shape[0], positions.num_placed, positions.num_prefix
        mask = None if positions.mask is None else positions.mask.expand(batch, -1)
        if visible is None:
            size = max(1, round(count * self.keep))
            visible = random_subset(batch, count, size, mask=mask, device=tokens.device, generator=generator)
        if hidden is None:
            size = max(1, round(visible.shape[1] * self.drop))
            chosen = random_subset(batch, visible.shape[1], size, device=tokens.device, generator=generator)
            hidden = torch.zeros_like(visible, dtype=torch.bool).scatter_(1, chosen, True)
        placed_first, split = self.order(hidden)
        inverse = placed_first.argsort(1)
        ids = visible.gather(1, placed_first)
        if self.mode == "shuffle":
            out = self.shuffled(trunk, tokens, positions, image, ids, split, generator)
        else:
            out = self.unplaced(trunk, tokens, positions, image, ids, split)
        logits = self.decoder(torch.cat([out[:, :start], gather_tokens(out[:, start:], inverse)], dim=1))[:, start:]
        return DropPosOutput(logits, visible, hidden)

    @staticmethod
    def order(hidden: Tensor) -> tuple[Tensor, int]:
        """Order that puts hidden tokens first, and how many they are."""
        counts = hidden.sum(1)
        if bool((counts != counts[0]).any()):
            raise ValueError(f"hidden: expected equally many hidden tokens in every sample, got {counts.tolist()}")
        return hidden.int().argsort(dim=1, descending=True, stable=True), int(counts[0])

    def unplaced(
        self, trunk: Trunk, tokens: Tensor, positions: Positions, image: Tensor | None, ids: Tensor, split: int
    ) -> Tensor:
        """Encode with the first ``split`` of the visible tokens among the prefix tokens."""
        start = positions.num_prefix
        with_places = trunk.stack.add_to_tokens(tokens, positions, image=image)
        bare = gather_tokens(tokens[:, start:], ids[:, :split])
        if self.unknown is not None:
            bare = bare + self.unknown.to(bare.dtype)
        seen = gather_tokens(with_places[:, start:], ids[:, split:])
        sequence = torch.cat([with_places[:, :start], bare, seen], dim=1)
        return trunk(sequence, positions.take(ids[:, split:]).with_prefix(start + split))

    def shuffled(
        self,
        trunk: Trunk,
        tokens: Tensor,
        positions: Positions,
        image: Tensor | None,
        ids: Tensor,
        split: int,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Encode with the first ``split`` of the visible tokens at each other's places."""
        start = positions.num_prefix
        exchange = random_subset(len(ids), split, split, device=ids.device, generator=generator)
        places = torch.cat([ids[:, :split].gather(1, exchange), ids[:, split:]], dim=1)
        added = trunk.stack.add_to_tokens(tokens, positions, image=image) - tokens
        content = gather_tokens(tokens[:, start:], ids) + gather_tokens(added[:, start:], places)
        sequence = torch.cat([tokens[:, :start] + added[:, :start], content], dim=1)
        return trunk(sequence, positions.take(places))
