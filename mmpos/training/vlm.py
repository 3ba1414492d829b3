"""Training of small vision-language models: what lies where for the tower, then answers for the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from mmpos.data.vlm import IGNORED, DenseBatch, Places, VlmBatch
from mmpos.evaluation.answers import greedy_answers, right_answers
from mmpos.training.module import TrainingModule

__all__ = ["AnswerModule", "DenseModule", "NameModule", "answer_loss", "build_answers", "build_dense", "build_names"]


class CellModule(TrainingModule):
    """A model learns what lies in each cell of an image; ``val/accuracy`` is the share of right cells."""

    def __init__(self, model: nn.Module, **common: Any) -> None:
        super().__init__(model, **common)
        self.accuracy = MeanMetric()

    def loss(self, batch: DenseBatch) -> tuple[Tensor, Tensor]:
        """Loss, and which cells were right."""
        raise NotImplementedError

    def training_step(self, batch: DenseBatch, batch_idx: int) -> Tensor:
        """Loss of one batch."""
        loss, _ = self.loss(batch)
        self.log_loss(loss, len(batch))
        return loss

    def validation_step(self, batch: DenseBatch, batch_idx: int) -> None:
        """Loss and share of right cells."""
        loss, right = self.loss(batch)
        self.accuracy.update(right)
        self.log("val/loss", loss, sync_dist=True, batch_size=len(batch))
        self.log("val/accuracy", self.accuracy, prog_bar=True, batch_size=len(batch))


class DenseModule(CellModule):
    """A tower learns the class and the edges of what lies in each cell.

    Args:
        model: a :class:`~mmpos.models.vlm.DenseTower`.
        edge_weight: weight of the edges, whose loss is smooth L1 in cells.
        common: arguments of :class:`TrainingModule`.
    """

    def __init__(self, model: nn.Module, *, edge_weight: float = 1.0, **common: Any) -> None:
        super().__init__(model, **common)
        if edge_weight < 0:
            raise ValueError(f"objective.options.edge_weight: expected 0 or more, got {edge_weight}")
        self.edge_weight = edge_weight

    def loss(self, batch: DenseBatch) -> tuple[Tensor, Tensor]:
        """Loss, and which cells were right."""
        logits, edges = self.model(batch.pixels)
        covered = batch.labels < logits.shape[-1] - 1
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten())
        wrong = F.smooth_l1_loss(edges.float(), batch.edges, beta=0.25, reduction="none").mean(-1)
        loss = loss + self.edge_weight * (wrong * covered).sum() / covered.sum().clamp_min(1)
        return loss, (logits.argmax(-1) == batch.labels).float()


class NameModule(CellModule):
    """Visual tokens learn to name what lies in their cell: the projector finds the words of the decoder.

    The logits are products with the embeddings of words, without the decoder: the alignment that LLaVA gets from
    captions, from dense labels.

    Args:
        model: a :class:`~mmpos.models.vlm.Vlm`.
        words: token numbers of the objects, and last of none.
        common: arguments of :class:`TrainingModule`.
    """

    def __init__(self, model: nn.Module, *, words: tuple[int, ...], **common: Any) -> None:
        super().__init__(model, **common)
        self.words = words

    def loss(self, batch: DenseBatch) -> tuple[Tensor, Tensor]:
        """Loss, and which cells were right."""
        named = torch.tensor(self.words, device=batch.labels.device)[batch.labels].flatten()
        model: Any = self.model
        logits = model.logits(model.project(batch.pixels)).flatten(0, 1).float()
        return F.cross_entropy(logits, named), (logits.argmax(-1) == named).float()


class AnswerModule(TrainingModule):
    """A vision-language model learns to answer; only the tokens of answers count.

    Args:
        model: a :class:`~mmpos.models.vlm.Vlm`.
        kinds: kinds of question, for the accuracy of each.
        place_sigma: places next to the right one count too, by a Gaussian of this many places; 0 counts the right one
            alone.
        name_weight: weight of the loss of :class:`NameModule`, where the data tell what lies in each visual token.
        common: arguments of :class:`TrainingModule`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        kinds: tuple[str, ...],
        place_sigma: float = 1.5,
        name_weight: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(model, **common)
        if min(place_sigma, name_weight) < 0:
            raise ValueError(
                f"objective.options: expected place_sigma and name_weight of 0 or more, got {place_sigma} and "
                f"{name_weight}"
            )
        self.place_sigma = place_sigma
        self.name_weight = name_weight
        self.accuracy = MeanMetric()
        self.kind_accuracy = nn.ModuleDict({kind.replace(" ", "_"): MeanMetric() for kind in kinds})

    def training_step(self, batch: VlmBatch, batch_idx: int) -> Tensor:
        """Loss of one batch."""
        model: Any = self.model
        plain, visual = model.see_twice(batch.pixels)
        logits = model(batch.tokens, batch.pixels, [batch.segments], branch=batch.branch, visual=visual)
        loss = answer_loss(logits, batch.labels, batch.places, self.place_sigma)
        if batch.names is not None and self.name_weight > 0:
            loss = loss + self.name_weight * F.cross_entropy(model.logits(plain).float(), batch.names.flatten())
        self.log_loss(loss, len(batch))
        return loss

    def validation_step(self, batch: VlmBatch, batch_idx: int) -> None:
        """Share of right answers, greedy."""
        right = right_answers(batch, greedy_answers(self.model, batch))
        for question, of_question in zip(batch.questions, right.float().unbind(-1), strict=True):
            name = question.kind.replace(" ", "_")
            counter: Any = self.kind_accuracy[name]
            counter.update(of_question)
            self.log(f"val/{name}_accuracy", counter, batch_size=len(batch))
        self.accuracy.update(right.float())
        self.log("val/accuracy", self.accuracy, prog_bar=True, batch_size=len(batch))


def answer_loss(logits: Tensor, labels: Tensor, places: Places | None = None, sigma: float = 0.0) -> Tensor:
    """Cross-entropy of the tokens of answers, each predicted from the slot before it.

    Args:
        logits: of the next token at every slot.
        labels: tokens, :data:`~mmpos.data.vlm.IGNORED` where nothing counts.
        places: words for places, whose targets are Gaussians of ``sigma`` places around the right one; the entropy of
            the target is taken off, so that the loss of a perfect answer is 0.
        sigma: 0 for the right place alone.

    Shape: logits ``(B, L, words)``, labels ``(B, L)``.
    """
    counts = labels[:, 1:] != IGNORED
    wanted, log_p = labels[:, 1:][counts], logits[:, :-1][counts].float().log_softmax(-1)
    loss = -log_p.gather(-1, wanted[:, None])[:, 0]
    if places is not None and sigma > 0:
        steps = torch.arange(places.count, device=labels.device)
        target = torch.softmax(-0.5 * ((steps - (wanted - places.first)[:, None]) / sigma) ** 2, dim=-1)
        of_places = log_p[:, places.first : places.first + places.count]
        soft = (target * (target.clamp_min(1e-12).log() - of_places)).sum(-1)
        loss = torch.where(places.holds(wanted), soft, loss)
    return loss.mean()


def build_dense(config: Mapping[str, Any], model: nn.Module, data: Any) -> TrainingModule:
    """The module of ``objective.name: dense``."""
    if not getattr(data, "dense", False):
        raise ValueError(
            f"objective.name: dense learns what lies in each cell, which {config['data']['name']} does not tell; set "
            "data=mnist_grounding data.dense=true"
        )
    return DenseModule(model, **_options(config, "edge_weight"), **_common(config))


def build_answers(config: Mapping[str, Any], model: nn.Module, data: Any) -> TrainingModule:
    """The module of ``objective.name: answers``."""
    if data.evaluation != "vlm" or getattr(data, "dense", False):
        raise ValueError(
            f"objective.name: answers needs questions, which {config['data']['name']} does not ask; set "
            "data=mnist_grounding data.dense=false"
        )
    return AnswerModule(model, kinds=data.kinds, **_options(config, "place_sigma", "name_weight"), **_common(config))


def build_names(config: Mapping[str, Any], model: nn.Module, data: Any) -> TrainingModule:
    """The module of ``objective.name: names``."""
    if not getattr(data, "dense", False) or not hasattr(model, "project"):
        raise ValueError(
            f"objective.name: names needs model=vlm_micro and data that tell what lies in each cell (data.dense=true), "
            f"got {config['model']['name']} on {config['data']['name']}"
        )
    _options(config)
    return NameModule(model, words=data.object_words, **_common(config))


def _options(config: Mapping[str, Any], *known: str) -> dict[str, Any]:
    given = dict(config["objective"].get("options") or {})
    unknown = sorted(set(given) - set(known))
    if unknown:
        name = config["objective"]["name"]
        raise ValueError(
            f"objective.options: {name} has no option {', '.join(unknown)}; its options are {sorted(known) or 'none'}"
        )
    return given


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"optimizer": config["optimizer"], "seed": config["seed"], "config": config}
