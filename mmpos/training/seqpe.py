"""Classification with the two losses that SeqPE trains its digit encoder with (:mod:`mmpos.objectives.seqpe`).

In each step: pivots anywhere in the range of the digits must be nearest to the nearest of their candidates, and the
training grid moved somewhere must keep the similarities it has in place. In a tenth of the steps the images themselves
stand at moved coordinates, and the second loss rests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.adapters.timm import stack_of
from mmpos.config import check_keys
from mmpos.encodings.seqpe import SeqPE
from mmpos.objectives.seqpe import (
    contrastive_candidates,
    contrastive_loss,
    nearest_candidate,
    random_shift,
    transfer_loss,
)
from mmpos.positions import Positions
from mmpos.training.module import Classifier, TrainingModule

__all__ = ["SeqPEClassifier", "SeqPEOptions", "build_seqpe"]


@dataclass
class SeqPEOptions:
    """Options of ``objective.name: seqpe``.

    Weights of the losses, ``pivots`` and their ``candidates``, ``cells`` of the grid whose similarities are compared,
    the probability of a ``shift`` of the images, ``beta`` of :func:`mmpos.objectives.seqpe.transfer_loss`, the
    ``window`` of close candidates (default: the longest side of the training grid, as released), and the ``reach``:
    coordinates below it are practised (default: all that the encoding writes, seven training grids as released).
    """

    contrastive: float = 0.1
    transfer: float = 0.1
    pivots: int = 32
    candidates: int = 64
    cells: int = 64
    shift: float = 0.1
    beta: float = 1.0
    window: int | None = None
    reach: int | None = None


class SeqPEClassifier(Classifier):
    """A classifier with encoding ``seqpe`` and its losses.

    Args:
        model: a timm model with the encoding ``seqpe``.
        options: options of the objective.
        common: arguments of :class:`~mmpos.training.module.Classifier`.
    """

    def __init__(self, model: nn.Module, options: SeqPEOptions, **common: Any) -> None:
        super().__init__(model, **common)
        encoding = dict(stack_of(model).shared.items()).get("seqpe")
        if not isinstance(encoding, SeqPE):
            raise ValueError(
                f"objective.name: seqpe trains the digit encoder of encoding seqpe, got {stack_of(model).title}; use "
                "encoding=seqpe or objective.name=classification"
            )
        if min(options.contrastive, options.transfer) < 0 or not 0 <= options.shift <= 1:
            raise ValueError(
                "objective.options: expected contrastive and transfer of 0 or more and a probability shift, got "
                f"{options.contrastive}, {options.transfer} and {options.shift}"
            )
        if min(options.pivots, options.candidates, options.cells) < 2:
            raise ValueError(
                "objective.options: expected at least 2 pivots, candidates and cells, got "
                f"{options.pivots}, {options.candidates} and {options.cells}"
            )
        vit: Any = model
        self.options = options
        self.grid = tuple(int(size) for size in vit.patch_embed.grid_size)
        self.window = max(self.grid) if options.window is None else options.window
        self.reach = encoding.max_index if options.reach is None else options.reach
        if not max(self.grid) <= self.reach <= encoding.max_index:
            raise ValueError(
                f"objective.options.reach: expected {max(self.grid)} (the longest side of the grid) to "
                f"{encoding.max_index} (encoding.options.max_index), got {self.reach}"
            )
        # one encoder, reached by two names: kept out of the sub-modules, so that checkpoints hold it once
        self._encoding = (encoding,)

    @property
    def encoding(self) -> SeqPE:
        """The encoding whose encoder learns."""
        return self._encoding[0]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch: classification, order, and geometry elsewhere."""
        images, targets = self.objective.prepare(*batch)
        moved = bool(torch.rand(()) < self.options.shift)
        logits = self.model(images, positions=self.moved_grid(images.device)) if moved else self.model(images)
        loss = self.objective(logits, targets)
        many = self.trainer.world_size > 1
        for name, weight, part in (
            ("contrastive", self.options.contrastive, self.order_loss),
            ("transfer", 0.0 if moved else self.options.transfer, self.geometry_loss),
        ):
            if weight:
                value = part(images.device)
                loss = loss + weight * value
                self.log(f"train/{name}", value, on_step=False, on_epoch=True, sync_dist=many, batch_size=len(images))
        self.log_loss(loss, len(images))
        return loss

    def moved_grid(self, device: torch.device) -> Positions:
        """The training grid somewhere else in the range of the digits."""
        positions = Positions.grid(*self.grid, num_prefix=self.encoding.num_prefix, device=device)
        return positions.with_coords(positions.coords + random_shift(self.grid, self.reach).to(device))

    def order_loss(self, device: torch.device) -> Tensor:
        """Contrastive loss of random pivots."""
        limit, options = self.reach, self.options
        pivot = torch.randint(limit, (options.pivots, self.encoding.axes), device=device)
        candidates = contrastive_candidates(pivot, options.candidates, limit, window=self.window)
        vectors = self.encoding.vectors(torch.cat([pivot[:, None], candidates], dim=1))
        return contrastive_loss(vectors[:, 0], vectors[:, 1:], nearest_candidate(pivot, candidates))

    def geometry_loss(self, device: torch.device) -> Tensor:
        """Transfer loss of random cells of the training grid under a random shift."""
        cells = Positions.grid(*self.grid, device=device).coords[0].long()
        cells = cells[torch.randperm(len(cells), device=device)[: self.options.cells]]
        shift = random_shift(self.grid, self.reach).to(device)
        in_range, shifted = self.encoding.vectors(torch.stack([cells, cells + shift])).split(1)
        return transfer_loss(in_range, shifted, num_heads=self.heads, beta=self.options.beta)

    @property
    def heads(self) -> int:
        """Heads whose parts of a vector are compared separately."""
        return self.encoding.num_heads if self.encoding.out_dim % self.encoding.num_heads == 0 else 1


def build_seqpe(config: Mapping[str, Any], model: nn.Module, data: Any) -> TrainingModule:
    """The module of ``objective.name: seqpe``."""
    objective = dict(config["objective"])
    options = dict(objective.pop("options", None) or {})
    check_keys("objective.options", options, SeqPEOptions)
    return SeqPEClassifier(
        model,
        SeqPEOptions(**options),
        num_classes=data.num_classes,
        optimizer=config["optimizer"],
        objective=objective,
        seed=config["seed"],
        config=config,
        tasks=getattr(data, "tasks", None),
    )
