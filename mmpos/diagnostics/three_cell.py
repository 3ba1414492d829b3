"""The Three-Cell Experiment: three coloured cells on an empty image, and questions that only positions can answer.

Chowdhury, Rahman, Taki, arXiv 2504.14386. A 224-pixel image has 14 x 14 cells; three distinct ones are pure red, green
and blue. Six yes-or-no targets ask for distances, orientation, areas and the sum of the three places. Cells are drawn
so that greater, smaller and equal are equally likely for the two distances and, independently, for the two areas: the
pair of answers is drawn first, and triples are rejected until they give it. All comparisons are made on whole numbers
(squared distances, doubled areas), so that equality is exact. Flips, rotations and shifts change the answers and must
be off. The background colour is not stated in the paper; it is black here unless told otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = [
    "TARGETS",
    "ThreeCell",
    "three_cell_columns",
    "three_cell_images",
    "three_cell_relations",
    "three_cell_sample",
    "three_cell_targets",
]

TARGETS = ("RG > RB", "RB > RG", "orientation", "area RG > RB", "area RB > RG", "vector sum")


def three_cell_targets(places: Tensor, cells: int = 14) -> Tensor:
    """Answers to the six questions :data:`TARGETS`.

    Args:
        places: (row, column) of the red, the green and the blue cell.
        cells: cells along a side; a sum counts as large above ``cells - 1``.

    Shape:
        places ``(..., 3, 2)`` whole; returns ``(..., 6)`` bool.

    Example:
        >>> three_cell_targets(torch.tensor([[0, 0], [0, 3], [2, 0]])).int().tolist()
        [1, 0, 1, 0, 0, 0]
    """
    distance, area, orientation = _quantities(places)
    total = places.sum(-2)
    answers = [
        distance > 0,
        distance < 0,
        orientation > 0,
        area > 0,
        area < 0,
        (total > cells - 1).all(-1),
    ]
    return torch.stack(answers, dim=-1)


def three_cell_relations(places: Tensor) -> Tensor:
    """Signs of the comparisons RG with RB of distance and of area.

    Shape:
        ``(..., 3, 2)`` to ``(..., 2)`` of -1, 0, 1.
    """
    distance, area, _ = _quantities(places)
    return torch.stack([distance.sign(), area.sign()], dim=-1)


def _quantities(places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Differences of squared distances and of doubled areas (RG minus RB), signed doubled area of the triple."""
    y, x = places.long().unbind(-1)
    (yr, yg, yb), (xr, xg, xb) = y.unbind(-1), x.unbind(-1)
    distance = (xg - xr) ** 2 + (yg - yr) ** 2 - (xb - xr) ** 2 - (yb - yr) ** 2
    # area between the segment and the x axis, doubled
    area = ((yr + yg) * (xg - xr)).abs() - ((yr + yb) * (xb - xr)).abs()
    return distance, area, (xg - xr) * (yb - yr) - (yg - yr) * (xb - xr)


def three_cell_sample(
    count: int, *, cells: int = 14, generator: torch.Generator | None = None, exclude: Tensor | None = None
) -> Tensor:
    """Triples of distinct cells, not on a line, with balanced relations.

    Args:
        count: number of triples.
        cells: cells along a side.
        generator: source of randomness.
        exclude: triples that are rejected too. Triples with two equalities are few (18,296 of 14 x 14 cells), so that
            two independent draws share many of them.

    Shape:
        exclude ``(M, 3, 2)``; returns ``(count, 3, 2)`` int64, (row, column) of red, green, blue.
    """
    if cells < 4:
        raise ValueError(f"cells: expected at least 4, got {cells}; smaller grids cannot give every pair of relations")
    if count < 0:
        raise ValueError(f"count: expected 0 or more, got {count}")
    wanted = torch.randint(3, (count, 2), generator=generator) - 1
    wanted_kind = (wanted[:, 0] + 1) * 3 + wanted[:, 1] + 1
    slots = [(wanted_kind == kind).nonzero()[:, 0] for kind in range(9)]
    filled = [0] * 9
    out = torch.zeros(count, 3, 2, dtype=torch.int64)
    banned = None if exclude is None else _number(exclude[..., 0] * cells + exclude[..., 1], cells)
    while any(done < len(slot) for done, slot in zip(filled, slots, strict=True)):
        flat = torch.randint(cells * cells, (65536, 3), generator=generator)
        places = torch.stack([flat // cells, flat % cells], dim=-1)
        # equal cells lie on a line as well
        keep = _quantities(places)[2] != 0
        if banned is not None:
            keep &= ~torch.isin(_number(flat, cells), banned)
        places = places[keep]
        relation = three_cell_relations(places) + 1
        kind = relation[:, 0] * 3 + relation[:, 1]
        for k, slot in enumerate(slots):
            take = places[kind == k][: len(slot) - filled[k]]
            out[slot[filled[k] : filled[k] + len(take)]] = take
            filled[k] += len(take)
    return out


def _number(flat: Tensor, cells: int) -> Tensor:
    """A number of its own for every triple of cells. Shape: ``(B, 3)`` to ``(B,)``."""
    red, green, blue = flat.unbind(-1)
    return (red * cells**2 + green) * cells**2 + blue


def three_cell_images(places: Tensor, *, cells: int = 14, pixels: int = 16, background: float = 0.0) -> Tensor:
    """Pictures of triples, values in [0, 1].

    Args:
        places: (row, column) of the red, the green and the blue cell.
        cells: cells along a side.
        pixels: side of a cell.
        background: value of all channels elsewhere.

    Shape:
        places ``(B, 3, 2)``; returns ``(B, 3, cells * pixels, cells * pixels)`` float32.
    """
    if places.dim() != 3 or places.shape[1:] != (3, 2):
        raise ValueError(f"places: expected (B, 3, 2), got {tuple(places.shape)}")
    batch = places.shape[0]
    small = torch.full((batch, 3, cells, cells), float(background), device=places.device)
    rows = torch.arange(batch, device=places.device)
    for colour in range(3):
        row, column = places[:, colour].unbind(-1)
        small[rows, :, row, column] = torch.eye(3, device=places.device)[colour]
    return small.repeat_interleave(pixels, -2).repeat_interleave(pixels, -1)


class ThreeCell(Dataset[tuple[Tensor, Tensor]]):
    """Pictures and targets, all drawn when the data set is made; pictures are painted when asked for.

    Args:
        count: number of pictures. The paper's main text does not say.
        seed: of the draw; use another one for evaluation.
        cells: cells along a side.
        pixels: side of a cell.
        background: value of all channels of the rest.

    Example:
        >>> image, target = ThreeCell(8, seed=1)[0]
        >>> image.shape, target.shape
        (torch.Size([3, 224, 224]), torch.Size([6]))
    """

    def __init__(
        self, count: int, *, seed: int = 0, cells: int = 14, pixels: int = 16, background: float = 0.0
    ) -> None:
        self.cells = cells
        self.pixels = pixels
        self.background = background
        self.places = three_cell_sample(count, cells=cells, generator=torch.Generator().manual_seed(seed))
        self.targets = three_cell_targets(self.places, cells).float()

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index: expected below {len(self)}, got {index}")
        places = self.places[index][None]
        image = three_cell_images(places, cells=self.cells, pixels=self.pixels, background=self.background)[0]
        return image, self.targets[index]


def three_cell_columns(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Accuracies in per cent under the paper's headings; the average is over the four columns, not the six targets.

    Shape:
        logits and targets ``(B, 6)``.
    """
    if logits.shape != targets.shape or logits.shape[-1] != len(TARGETS):
        raise ValueError(
            f"logits, targets: expected (B, 6) twice, got {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    right = 100 * ((logits > 0) == (targets > 0.5)).double().mean(0)
    columns = {
        "distance": float(right[:2].mean()),
        "orientation": float(right[2]),
        "area": float(right[3:5].mean()),
        "vector_sum": float(right[5]),
    }
    return columns | {"average": sum(columns.values()) / len(columns)}
