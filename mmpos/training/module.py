"""LightningModules: what every objective shares, and classification. Checkpoints hold plain containers only."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from mmpos.config import ObjectiveConfig, check_keys
from mmpos.training.optim import create_optimizer, learning_rate_factor

__all__ = ["Classifier", "TrainingModule", "seed_step"]


def seed_step(seed: int, epoch: int, batch_idx: int, rank: int) -> None:
    """Seed every global generator for one training step.

    Dropout, drop path and mixup draw from global generators. Seeding them by the place in the run, rather than carrying
    their state, makes a step a function of (seed, epoch, batch, rank): a resumed run needs no generator state of any
    rank or device.
    """
    value = int(np.random.SeedSequence((seed, epoch, batch_idx, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    torch.manual_seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002  timm's Mixup draws from numpy's global generator
    random.seed(value)


def total_steps(trainer: pl.Trainer) -> int:
    """Optimizer steps of the whole run.

    Not ``trainer.estimated_stepping_batches``: that makes the loader before the state of a resumed run is there, and
    Lightning then never gives the loader its place in the epoch.
    """
    source: Any = trainer
    batches = len(source.datamodule.train_dataloader())
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    steps = math.ceil(batches / trainer.accumulate_grad_batches) * (trainer.max_epochs or 0)
    limits = [count for count in (steps, trainer.max_steps) if count > 0]
    if not limits:
        raise ValueError(f"trainer: nothing to train with max_epochs={trainer.max_epochs}, limit_train_batches={limit}")
    return min(limits)


class Objective(nn.Module):
    """Loss on logits and labels, with mixup and cutmix before the model when asked for.

    Args:
        num_classes: number of classes.
        options: fields of :class:`mmpos.config.ObjectiveConfig`.
        tasks: the questions about a sample and the number of answers to each; ``None`` for plain classification.
    """

    def __init__(self, num_classes: int, options: Mapping[str, Any], tasks: Mapping[str, int] | None = None) -> None:
        super().__init__()
        check_keys("objective", options, ObjectiveConfig)
        config = ObjectiveConfig(**options)
        if config.loss not in ("ce", "bce"):
            raise ValueError(f"objective.loss: expected 'ce' or 'bce', got {config.loss!r}")
        if not 0 <= config.label_smoothing < 1:
            raise ValueError(f"objective.label_smoothing: expected 0 <= value < 1, got {config.label_smoothing}")
        self.config = config
        self.num_classes = num_classes
        self.tasks = [*(tasks or {}).values()]
        if self.tasks and (config.loss != "ce" or config.mixup > 0 or config.cutmix > 0):
            raise ValueError(
                f"objective: several questions about one sample ({', '.join(tasks or {})}) are learned with loss 'ce' "
                "and without mixup and cutmix; set objective.loss=ce objective.mixup=0 objective.cutmix=0"
            )
        self.mix: Any = None
        if config.mixup > 0 or config.cutmix > 0:
            from timm.data import Mixup

            self.mix = Mixup(
                mixup_alpha=config.mixup,
                cutmix_alpha=config.cutmix,
                prob=config.mixup_prob,
                switch_prob=config.mixup_switch_prob,
                label_smoothing=config.label_smoothing,
                num_classes=num_classes,
            )

    def prepare(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mixed images and soft targets, or the inputs as they are."""
        if self.mix is None:
            return images, labels
        if len(images) % 2:
            raise ValueError(
                f"data.batch_size: mixup and cutmix mix pairs and need an even batch, got {len(images)} images"
            )
        mixed, targets = self.mix(images.clone(), labels)  # timm mixes in place; the batch may be the data set itself
        return mixed, targets

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean loss, summed over several questions.

        Shape: logits ``(B, C)``, targets ``(B,)`` labels, ``(B, C)`` soft or ``(B, tasks)`` labels.
        """
        smoothing = self.config.label_smoothing if self.mix is None else 0.0  # Mixup smooths its targets itself
        logits = logits.float()
        if self.tasks:
            return sum_of_losses(logits, targets, self.tasks, smoothing)
        if self.config.loss == "ce":
            return F.cross_entropy(logits, targets, label_smoothing=smoothing)
        if targets.ndim == 1:
            targets = F.one_hot(targets, self.num_classes).to(logits.dtype)
            targets = targets * (1 - smoothing) + smoothing / self.num_classes
        elif self.config.label_smoothing == 0:
            targets = targets.gt(0).to(logits.dtype)  # DeiT-III: every class that was mixed in is present
        return F.binary_cross_entropy_with_logits(logits, targets)


def sum_of_losses(logits: Tensor, answers: Tensor, counts: Sequence[int], smoothing: float = 0.0) -> Tensor:
    """Cross-entropies of several questions, added up. Shape: logits ``(B, sum of counts)``, answers ``(B, tasks)``."""
    parts = zip(logits.split(list(counts), dim=-1), answers.unbind(-1), strict=True)
    return torch.stack([F.cross_entropy(part, answer, label_smoothing=smoothing) for part, answer in parts]).sum()


class TrainingModule(pl.LightningModule):
    """What the training of any model shares: reproducible steps, the optimizer and its schedule, clipping.

    Args:
        model: the model that trains.
        optimizer: fields of :class:`mmpos.config.OptimizerConfig`.
        seed: seed of the run.
        config: the resolved configuration as plain containers; stored in every checkpoint.
    """

    def __init__(
        self, model: nn.Module, *, optimizer: Mapping[str, Any], seed: int = 0, config: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer_options = dict(optimizer)
        self.seed = seed
        if config is not None:
            self.save_hyperparameters({"config": dict(config)})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Make the step reproducible on its own."""
        seed_step(self.seed, self.current_epoch, batch_idx, self.global_rank)

    def log_loss(self, loss: Tensor, count: int) -> None:
        """Log the training loss of ``count`` samples."""
        many = self.trainer.world_size > 1
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=many, batch_size=count)

    def trained(self) -> nn.Module:
        """What the optimizer gets: the model, or also what an objective trains next to it."""
        return self.model

    def configure_optimizers(self) -> Any:
        """Optimizer and a schedule that moves with every optimizer step."""
        optimizer = create_optimizer(self.trained(), self.optimizer_options)
        factor = learning_rate_factor(total_steps(self.trainer), self.optimizer_options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """As Lightning does it, except that FSDP computes the norm over the shards, which Lightning refuses to do."""
        if gradient_clip_val and type(self.trainer.strategy).__name__ == "FSDPStrategy":
            sharded: Any = self.trainer.strategy.model
            sharded.clip_grad_norm_(gradient_clip_val)
            return
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class Classifier(TrainingModule):
    """A ViT that classifies images, or answers several questions about videos.

    Args:
        model: images to logits.
        num_classes: number of classes.
        optimizer: fields of :class:`mmpos.config.OptimizerConfig`.
        objective: fields of :class:`mmpos.config.ObjectiveConfig`.
        seed: seed of the run.
        config: the resolved configuration as plain containers; stored in every checkpoint.
        tasks: the questions about a sample and the number of answers to each; ``None`` for plain classification.
            Logits of all questions follow each other, labels are ``(B, tasks)``, and a sample counts as right in
            ``val/accuracy`` when every answer is.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_classes: int,
        optimizer: Mapping[str, Any],
        objective: Mapping[str, Any],
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        tasks: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(model, optimizer=optimizer, seed=seed, config=config)
        self.tasks = dict(tasks or {})
        self.objective = Objective(num_classes, objective, tasks)
        self.accuracy: Metric = MeanMetric() if self.tasks else MulticlassAccuracy(num_classes, average="micro")
        self.task_accuracy = nn.ModuleDict({task: MeanMetric() for task in self.tasks})

    def forward(self, images: Tensor) -> Tensor:
        """Logits. Shape: images ``(B, C, H, W)`` or videos ``(B, C, T, H, W)``; returns ``(B, classes)``."""
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch."""
        images, targets = self.objective.prepare(*batch)
        loss = self.objective(self.model(images), targets)
        self.log_loss(loss, len(images))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Accuracy and loss of one batch."""
        images, labels = batch
        logits = self.model(images).float()
        if self.tasks:
            loss = self._update_accuracies(logits, labels)
        else:
            self.accuracy.update(logits, labels)
            loss = F.cross_entropy(logits, labels)
        self.log("val/loss", loss, sync_dist=True, batch_size=len(images))
        self.log("val/accuracy", self.accuracy, prog_bar=True, batch_size=len(images))

    def _update_accuracies(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Count right answers to each question and samples with all answers right; returns the loss."""
        counts = list(self.tasks.values())
        answers = torch.stack([part.argmax(-1) for part in logits.split(counts, dim=-1)], dim=-1)
        right = answers == labels
        for (task, metric), of_task in zip(self.task_accuracy.items(), right.float().unbind(-1), strict=True):
            counter: Any = metric
            counter.update(of_task)
            self.log(f"val/{task}_accuracy", counter, batch_size=len(labels))
        self.accuracy.update(right.all(-1).float())
        return sum_of_losses(logits, labels, counts)
