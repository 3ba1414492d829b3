"""Pre-training by questions about places: DropPos, MP3 and FlexPredict on the images of any data set, without labels.

The encoder trains as the sub-module ``model`` and what else learns as ``objective``, so that a checkpoint hands the
encoder on to a later stage under the names it has there. Parameters that an objective does not reach (the classifier;
with MP3 the encodings) are held.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from mmpos.adapters.trunk import VitTrunk
from mmpos.config import ObjectiveConfig, check_keys
from mmpos.objectives import (
    MP3,
    DropPos,
    FlexPredict,
    attentive_weights,
    position_accuracy,
    position_loss,
    smoothing_sigma,
    smoothing_targets,
)
from mmpos.positions import Positions
from mmpos.training.module import TrainingModule, total_steps

__all__ = [
    "DropPosModule",
    "DropPosOptions",
    "FlexPredictModule",
    "FlexPredictOptions",
    "Mp3Module",
    "Mp3Options",
    "build_droppos",
    "build_flexpredict",
    "build_mp3",
]

#: what comes after the last norm of a timm model
_HEAD = ("head", "head_dist", "fc_norm", "attn_pool")


@dataclass
class DropPosOptions:
    """Options of ``objective.name: droppos``.

    ``keep``, ``drop``, ``mode``, ``width``, ``depth`` and ``heads`` are those of :class:`mmpos.objectives.DropPos`.
    Soft labels start ``sigma`` cells wide and are hard at the end of training. ``attentive`` weighs patches by how much
    they resemble the CLS token (without one, their mean) in a pass with all places, with this ``temperature``.
    """

    keep: float = 0.25
    drop: float = 0.75
    mode: str = "learned"
    sigma: float = 1.0
    attentive: bool = True
    temperature: float = 0.1
    width: int = 512
    depth: int = 2
    heads: int = 16


@dataclass
class Mp3Options:
    """Options of ``objective.name: mp3``, those of :class:`mmpos.objectives.MP3`."""

    share: float = 0.25
    loss_on: str = "all"


@dataclass
class FlexPredictOptions:
    """Options of ``objective.name: flexpredict``.

    ``momentum`` of the slow copy rises straight to 1; the rest is that of :class:`mmpos.objectives.FlexPredict`.
    """

    sigma: float = 0.25
    momentum: float = 0.996
    width: int = 384
    depth: int = 6
    heads: int = 12
    blocks: int = 4
    share: tuple[float, float] = (0.15, 0.2)
    aspect: tuple[float, float] = (0.75, 1.5)
    context: tuple[float, float] = (0.85, 1.0)


@dataclass
class Answer:
    """Loss of a batch, how much of it was right, and how many answers that is about."""

    loss: Tensor
    accuracy: Tensor
    count: int


class PositionModule(TrainingModule):
    """What the three share: steps over images, metrics, and which parameters train.

    Args:
        model: a timm model with an attached encoding.
        objective: what else trains.
        places: whether the encodings of the model act.
        common: arguments of :class:`TrainingModule`.
    """

    def __init__(self, model: nn.Module, objective: nn.Module, *, places: bool = True, **common: Any) -> None:
        super().__init__(model, **common)
        self.objective = objective
        self.trunk = VitTrunk(model, places=places)
        self.accuracy = MeanMetric()
        held = (*_HEAD, *(() if places else ("position_encoding",)))
        for name, parameter in model.named_parameters():
            if name.partition(".")[0] in held:
                parameter.requires_grad_(False)

    def ask(self, images: Tensor, generator: torch.Generator | None = None) -> Answer:
        """Ask about a batch of images. In training random choices come from the global generators."""
        raise NotImplementedError

    def trained(self) -> nn.Module:
        """Encoder and objective."""
        return nn.ModuleDict({"model": self.model, "objective": self.objective})

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of one batch; labels are not looked at."""
        images, _ = batch
        answer = self.ask(images)
        self.log_loss(answer.loss, len(images))
        return answer.loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """The same questions in every epoch."""
        images, _ = batch
        generator = torch.Generator(device=images.device).manual_seed(batch_idx)
        answer = self.ask(images, generator)
        self.accuracy.update(answer.accuracy, answer.count)
        self.log("val/loss", answer.loss, sync_dist=True, batch_size=len(images))
        self.log("val/accuracy", self.accuracy, prog_bar=True, batch_size=len(images))

    def progress(self) -> float:
        """Part of the training that is done, 0 to 1."""
        return self.trainer.global_step / max(1, total_steps(self.trainer) - 1)

    def rehearse(self, image: Tensor) -> None:
        """Ask about one image, so that an encoding or a grid that does not fit is told before training."""
        training = self.training
        self.eval()
        with torch.no_grad():
            self.ask(image, torch.Generator(device=image.device).manual_seed(0))
        self.train(training)


class DropPosModule(PositionModule):
    """Where are the visible patches whose place was hidden? ``val/accuracy`` is the share that is found.

    Args:
        model: a timm model with an attached encoding.
        grid: patches of the training images.
        options: options of the objective.
        common: arguments of :class:`TrainingModule`.
    """

    objective: DropPos

    def __init__(self, model: nn.Module, grid: tuple[int, ...], options: DropPosOptions, **common: Any) -> None:
        own = {"sigma", "attentive", "temperature"}
        given = {key: value for key, value in asdict(options).items() if key not in own}
        super().__init__(model, DropPos(width_of(model), grid, **given), **common)
        if options.sigma < 0 or options.temperature <= 0:
            raise ValueError(
                f"objective.options: expected sigma >= 0 and temperature > 0, got {options.sigma} and "
                f"{options.temperature}"
            )
        self.options = options

    def ask(self, images: Tensor, generator: torch.Generator | None = None) -> Answer:
        tokens, positions = self.trunk.embed(images)
        logits, cells, hidden = self.objective(self.trunk, tokens, positions, image=images, generator=generator)
        logits = logits.float()
        weight = hidden.to(logits.dtype)
        targets = None
        if self.training:
            if self.options.attentive:
                weight = weight * self.attention(images, tokens.detach(), positions, cells)
            targets = smoothing_targets(
                self.objective.grid, smoothing_sigma(self.progress(), self.options.sigma), device=images.device
            )
        loss = position_loss(logits, cells, weight, targets)
        return Answer(loss, position_accuracy(logits.detach(), cells, hidden), int(hidden.sum()))

    @torch.no_grad()
    def attention(self, images: Tensor, tokens: Tensor, positions: Positions, cells: Tensor) -> Tensor:
        """Weights of the visible patches from a pass with all places.

        Shape: tokens ``(B, P + L, D)`` without places, cells ``(B, K)``; returns ``(B, K)``.
        """
        tokens = self.trunk.stack.add_to_tokens(tokens, positions, image=images)
        features = self.trunk(tokens, positions).float()
        patches = features[:, positions.num_prefix :]
        whole = features[:, 0] if positions.num_prefix else patches.mean(1)
        return attentive_weights(whole, patches, cells, self.options.temperature)


class Mp3Module(PositionModule):
    """Where is every patch, told from a few others and without any place? ``val/accuracy`` is the share found.

    The blocks run without the encodings of the model, which keep their initialisation for the next stage.

    Args:
        model: a timm model with an attached encoding.
        grid: patches of the training images.
        options: options of the objective.
        common: arguments of :class:`TrainingModule`.
    """

    objective: MP3

    def __init__(self, model: nn.Module, grid: tuple[int, ...], options: Mp3Options, **common: Any) -> None:
        super().__init__(model, MP3(width_of(model), grid, **asdict(options)), places=False, **common)

    def ask(self, images: Tensor, generator: torch.Generator | None = None) -> Answer:
        tokens, positions = self.trunk.embed(images)
        logits, loss, context = self.objective(self.trunk, tokens, positions, generator=generator)
        counted = torch.ones_like(context) if self.objective.loss_on == "all" else ~context
        cells = torch.arange(logits.shape[1], device=logits.device).expand(len(logits), -1)
        return Answer(loss, position_accuracy(logits.detach().float(), cells, counted), int(counted.sum()))


class FlexPredictModule(PositionModule):
    """What does a slow copy of the encoder see at places that are not quite certain?

    ``val/accuracy`` is the share of predictions that resemble the features of their own cell more than those of any
    other cell of the image.

    Args:
        model: a timm model with an attached encoding.
        grid: patches of the training images.
        options: options of the objective.
        common: arguments of :class:`TrainingModule`.
    """

    objective: FlexPredict

    def __init__(self, model: nn.Module, grid: tuple[int, ...], options: FlexPredictOptions, **common: Any) -> None:
        given = {key: value for key, value in asdict(options).items() if key != "momentum"}
        super().__init__(model, FlexPredict(width_of(model), grid, **given), **common)
        if not 0 <= options.momentum <= 1:
            raise ValueError(f"objective.options.momentum: expected 0 to 1, got {options.momentum}")
        self.momentum = options.momentum
        self.slow = copy.deepcopy(model).requires_grad_(False)
        self.teacher = VitTrunk(self.slow)

    def ask(self, images: Tensor, generator: torch.Generator | None = None) -> Answer:
        tokens, positions = self.trunk.embed(images)
        self.slow.eval()  # what is predicted has no dropout
        with torch.no_grad():
            wanted_of, _ = self.teacher.embed(images)
        out = self.objective(self.trunk, self.teacher, tokens, wanted_of, positions, image=images, generator=generator)
        return Answer(out.loss, out.accuracy.detach(), out.cells.numel())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """A step of the optimizer, and of the slow copy after it, before any checkpoint is written."""
        keep = self.momentum + (1 - self.momentum) * min(1.0, self.progress())
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast.detach().to(slow.dtype), 1 - keep)
            for old, new in zip(self.slow.buffers(), self.model.buffers(), strict=True):
                old.copy_(new)


def width_of(model: Any) -> int:
    """Width ``D`` of a timm model."""
    return int(model.embed_dim)


# -- from a configuration ---------------------------------------------------------------------------------------------


def build_droppos(config: Mapping[str, Any], model: nn.Module, data: Any) -> TrainingModule:
    """The module of ``objective.name: droppos``."""
    if config["encoding"]["name"] == "none":
        raise ValueError(
            "objective.name: droppos hides the places that an encoding gives, and encoding none gives none; use "
            "objective.name=mp3, or another encoding"
        )
    return _build(config, model, data, DropPosModule, DropPosOptions)


def build_mp3(config: Mapping[str, Any], model: nn.Module, data: Any) -> TrainingModule:
    """The module of ``objective.name: mp3``."""
    return _build(config, model, data, Mp3Module, Mp3Options)


def build_flexpredict(config: Mapping[str, Any], model: nn.Module, data: Any) -> TrainingModule:
    """The module of ``objective.name: flexpredict``."""
    return _build(config, model, data, FlexPredictModule, FlexPredictOptions)


def _build(config: Mapping[str, Any], model: nn.Module, data: Any, module: Any, schema: type) -> TrainingModule:
    objective = dict(config["objective"])
    check_keys("objective", objective, ObjectiveConfig)
    name, options = objective.pop("name"), dict(objective.pop("options", None) or {})
    unused = [key for key, value in asdict(ObjectiveConfig()).items() if objective.get(key, value) != value]
    unused = [key for key in unused if key not in ("name", "options")]
    if unused:
        raise ValueError(f"objective: {name} learns without labels and does not read {', '.join(unused)}; leave it out")
    check_keys("objective.options", options, schema)
    if not hasattr(model, "patch_embed"):
        raise ValueError(
            f"objective.name: {name} runs on a ViT over images or videos, got model.name={config['model']['name']!r}"
        )
    vit: Any = model
    grid = tuple(int(size) for size in vit.patch_embed.grid_size)
    sizes = [cells * pixels for cells, pixels in zip(grid, vit.patch_embed.patch_size, strict=True)]
    built: PositionModule = module(
        model,
        grid,
        schema(**options),
        optimizer=config["optimizer"],
        seed=config["seed"],
        config=config,
    )
    encoding = config["encoding"]["name"]
    try:
        built.rehearse(torch.zeros(1, data.in_chans, *sizes))
    except ValueError as error:
        hint = (
            "; with objective.options.mode=shuffle no token is without a place"
            if name == "droppos" and options.get("mode") != "shuffle"
            else ""
        )
        raise ValueError(f"objective.name: {name} cannot run on encoding {encoding}: {error}{hint}") from error
    return built
