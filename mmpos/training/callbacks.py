"""Callbacks: checkpoints to resume from exactly, a stop on a loss that is not a number, progress with images/s."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, EMAWeightAveraging, ModelCheckpoint, RichProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from mmpos.config import CallbacksConfig

__all__ = ["Epochs", "FiniteLoss", "LastCheckpoint", "Progress", "Throughput", "create_callbacks"]


class LastCheckpoint(Checkpoint):
    """Keep ``last.ckpt`` up to date: every few optimizer steps and at the end. The file is replaced in one move.

    It also carries what a run that is restarted after its last step can no longer see: ``metric`` of the last
    validation, the step it was ``measured_at``, and the ``seconds`` spent in training, interruptions apart.

    Args:
        folder: where ``last.ckpt`` goes.
        every_n_steps: optimizer steps between two writes.
        monitor: name of the metric.
    """

    def __init__(self, folder: Path, every_n_steps: int, monitor: str) -> None:
        if every_n_steps < 1:
            raise ValueError(f"callbacks.checkpoint_every_n_steps: expected 1 or more, got {every_n_steps}")
        self.path = folder / "last.ckpt"
        self.every_n_steps = every_n_steps
        self.monitor = monitor
        self.metric = math.nan
        self.measured_at = -1
        self._seconds = 0.0
        self._started: float | None = None
        self._saved = -1

    @property
    def seconds(self) -> float:
        """Time in training so far."""
        return self._seconds + (0.0 if self._started is None else time.perf_counter() - self._started)

    def state_dict(self) -> dict[str, float]:
        return {"metric": self.metric, "measured_at": self.measured_at, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.metric, self.measured_at, self._seconds = state["metric"], int(state["measured_at"]), state["seconds"]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._started = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        value = trainer.callback_metrics.get(self.monitor)
        if value is not None:
            self.metric, self.measured_at = float(value), trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        # inside an accumulation window gradients would be lost; the step counter only moves when they were used
        if step % self.every_n_steps == 0 and step != self._saved and not trainer.fit_loop._should_accumulate():
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._save(trainer)
        self._seconds, self._started = self.seconds, None

    def _save(self, trainer: pl.Trainer) -> None:
        if not getattr(trainer, "fast_dev_run", False):
            self._saved = trainer.global_step
            trainer.save_checkpoint(self.path)


class FiniteLoss(Callback):
    """Fail the run when the loss is not a finite number, instead of training on."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # reading the loss waits for the device, so on accelerators it is read only now and then
        if module.device.type != "cpu" and batch_idx % 50 and not trainer.is_last_batch:
            return
        loss = float(outputs["loss"])
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"loss: {loss} at epoch {trainer.current_epoch}, step {trainer.global_step}; lower optimizer.lr, set "
                "trainer.gradient_clip_val=1.0 or use trainer.precision=32-true. Earlier weights: checkpoints/"
            )


class Throughput(Callback):
    """Images per second over all processes, and the mean loss, of the training part of an epoch.

    ``recent`` follows the last steps, for the progress bar.
    """

    def __init__(self) -> None:
        self.recent = 0.0
        self.epoch_rate = 0.0
        self._images = 0
        self._seconds = 0.0
        self._mark = 0.0
        self._losses: list[torch.Tensor] = []

    @property
    def loss(self) -> float:
        """Mean loss of this process since the epoch began (or went on, after resuming)."""
        return float(torch.stack(self._losses).mean()) if self._losses else math.nan

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._images, self._seconds, self._mark = 0, 0.0, time.perf_counter()
        self._losses = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(outputs["loss"].detach())
        now = time.perf_counter()
        count, seconds = (
            len(batch[0] if isinstance(batch, (tuple, list)) else batch) * trainer.world_size,
            now - (self._mark or now),
        )
        self._mark = now
        if seconds <= 0:  # the first batch after resuming has no start time
            return
        self._images, self._seconds = self._images + count, self._seconds + seconds
        self.epoch_rate = self._images / self._seconds
        rate = count / seconds
        self.recent = rate if not self.recent else 0.95 * self.recent + 0.05 * rate

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._mark = 0.0


class Epochs(Callback):
    """One line per epoch, and images/s in the logs; what remains readable when the output goes to a file.

    Args:
        throughput: source of the rate.
    """

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput

    @rank_zero_only
    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        metrics = trainer.callback_metrics
        accuracy = 100 * float(metrics.get("val/accuracy", torch.nan))
        print(
            f"epoch {trainer.current_epoch + 1:>3}/{trainer.max_epochs}  loss {self.throughput.loss:.3f}  "
            f"val accuracy {accuracy:.2f} %  {self.throughput.epoch_rate:.0f} images/s",
            flush=True,
        )
        for logger in trainer.loggers:
            logger.log_metrics({"images_per_second": self.throughput.epoch_rate}, step=trainer.global_step - 1)


class Progress(RichProgressBar):
    """Rich progress bar that also shows images/s.

    Args:
        throughput: source of the rate.
    """

    def __init__(self, throughput: Throughput) -> None:
        super().__init__()
        self.throughput = throughput

    def get_metrics(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
        """Metrics of the bar."""
        items = super().get_metrics(trainer, module)
        items.pop("v_num", None)
        if self.throughput.recent:
            items["images/s"] = f"{self.throughput.recent:.0f}"
        return items


def create_callbacks(options: CallbacksConfig, folder: Path) -> list[Callback]:
    """The callbacks of a run; checkpoints go to ``folder``."""
    if options.mode not in ("min", "max"):
        raise ValueError(f"callbacks.mode: expected 'min' or 'max', got {options.mode!r}")
    throughput = Throughput()
    callbacks: list[Callback] = [throughput, FiniteLoss(), Epochs(throughput)]
    if options.ema_decay is not None:
        if not 0 < options.ema_decay < 1:
            raise ValueError(f"callbacks.ema_decay: expected a value between 0 and 1, got {options.ema_decay}")
        callbacks.append(EMAWeightAveraging(decay=options.ema_decay, update_starting_at_step=options.ema_start_step))
    if options.progress and sys.stdout.isatty():  # a bar in a log file is noise; the line per epoch remains
        callbacks.append(Progress(throughput))
    # always a monitor: without one Lightning keeps the newest file only, and resuming deletes the older
    best = ModelCheckpoint(
        dirpath=folder,
        filename="{epoch:03d}-{step:06d}",
        auto_insert_metric_name=False,
        monitor=options.monitor,
        mode=options.mode,
        save_top_k=1,
        save_on_train_epoch_end=False,
    )
    return [*callbacks, best, LastCheckpoint(folder, options.checkpoint_every_n_steps, options.monitor)]
