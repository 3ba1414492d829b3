"""The evaluations that ``evaluation.name`` chooses from, and how each gets a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmpos.evaluation.checkpoint import check_classes, checkpoint_model, evaluate_checkpoint
from mmpos.evaluation.weights import load_state, model_state, read_checkpoint

__all__ = ["EVALUATIONS", "Request", "evaluate"]


@dataclass(frozen=True)
class Request:
    """What an evaluation is asked to do.

    Args:
        config: plain configuration of the run.
        data: its data module.
        checkpoint: weights to test.
        folder: where tables and reports go.
        sizes: image sizes, frame counts or canvas sizes to test at; ``None`` for those of the evaluation.
        device: where to run.
        command: the command that made the run, for the report.
        options: ``evaluation.*`` of the configuration, without its name.
        asked: the sizes of this command, not those of the recipe.
    """

    config: Mapping[str, Any]
    data: Any
    checkpoint: Path
    folder: Path
    sizes: Sequence[int] | None
    device: str
    command: str | None
    options: dict[str, Any]
    asked: Sequence[int] | None = None

    @property
    def encoding_name(self) -> str:
        """Name of the encoding in tables."""
        return str(self.config["encoding"]["name"])

    def model(self) -> nn.Module:
        """The model of the configuration with the weights of the checkpoint."""
        from mmpos.training.build import build_model

        model = build_model(self.config, self.data, start=False)
        state = model_state(read_checkpoint(self.checkpoint))
        check_classes(state, self.data, self.checkpoint)
        load_state(model, state, self.checkpoint)
        return model

    def arguments(self) -> dict[str, Any]:
        """What every evaluation takes, and its own options."""
        return {
            "output_dir": self.folder,
            "device": self.device,
            "config": self.config,
            "command": self.command,
            **self.options,
        }

    def tested(self, evaluation: str) -> dict[str, Any]:
        """The arguments, the model and the data, which must be of the kind that an evaluation tests."""
        _expect(self, evaluation)
        return {
            "model": self.model(),
            "data": self.data,
            "encoding_name": self.encoding_name,
            **self.arguments(),
        }


def _resolution(request: Request) -> None:
    from mmpos.evaluation.resolution import run_resolution

    own_sizes = request.options.pop("sizes", None)
    sizes = request.sizes or own_sizes
    if request.encoding_name != "own":
        run_resolution(sizes=sizes, **request.tested("resolution"))
        return
    _expect(request, "resolution")
    evaluate_checkpoint(request.checkpoint, data=request.data, sizes=sizes, **_timm(request), **request.arguments())


def _shift(request: Request) -> None:
    from mmpos.evaluation.shift import run_shift

    _expect(request, "resolution")
    if request.asked:
        raise ValueError(
            f"sizes: evaluation shift tests at the size of the training images, got {list(request.asked)}; leave sizes "
            "out and set evaluation.shifts"
        )
    own = request.encoding_name == "own"
    model = checkpoint_model(request.checkpoint, data=request.data, **_timm(request)) if own else request.model()
    run_shift(model, request.data, encoding_name=request.encoding_name, **request.arguments())


def _timm(request: Request) -> dict[str, Any]:
    """Name and options of a timm model with the encoding it comes with."""
    model = request.config["model"]
    patch = {} if model.get("patch_size") is None else {"patch_size": model["patch_size"]}
    return {"model": model["name"], "model_options": {**patch, **dict(model.get("options") or {})}}


def _frames(request: Request) -> None:
    from mmpos.evaluation.frames import run_frames

    own_frames = request.options.pop("frames", None)
    run_frames(frames=request.sizes or own_frames, **request.tested("frames"))


def _three_cell(request: Request) -> None:
    from mmpos.evaluation.three_cell import run_three_cell

    _expect(request, "three_cell")
    if request.sizes:
        raise ValueError(
            f"sizes: evaluation three_cell tests at the size of the training pictures, got {list(request.sizes)}; "
            "leave sizes out"
        )
    run_three_cell(**request.tested("three_cell"))


def _points(request: Request) -> None:
    from mmpos.evaluation.points import run_points

    _expect(request, "points")
    if request.sizes:
        raise ValueError(
            f"sizes: evaluation points tests in the frames of its own options, got {list(request.sizes)}; leave sizes "
            "out and set evaluation.smaller, evaluation.larger, evaluation.fewer or evaluation.more"
        )
    run_points(**request.tested("points"))


def _vlm(request: Request) -> None:
    from mmpos.evaluation.vlm import run_vlm

    if request.sizes:
        raise ValueError(
            f"sizes: evaluation vlm tests forms, not sizes, got {list(request.sizes)}; leave sizes out and set "
            "evaluation.images, evaluation.several or evaluation.videos"
        )
    run_vlm(**request.tested("vlm"))


def _expect(request: Request, evaluation: str) -> None:
    """Raise where the data of a run are not what its evaluation tests."""
    made_for = request.data.evaluation
    if made_for != evaluation:
        holds = {
            "resolution": "labelled images",
            "frames": "videos",
            "three_cell": "questions about three cells",
            "points": "point clouds",
            "vlm": "questions about images",
        }
        raise ValueError(
            f"evaluation: {request.config['data']['name']} holds {holds.get(made_for, made_for)}; use "
            f"evaluation={made_for}"
        )


#: evaluations by ``evaluation.name``
EVALUATIONS: dict[str, Callable[[Request], None]] = {
    "resolution": _resolution,
    "frames": _frames,
    "three_cell": _three_cell,
    "points": _points,
    "shift": _shift,
    "vlm": _vlm,
}


def evaluate(
    config: Mapping[str, Any],
    data: Any,
    checkpoint: Path,
    folder: Path,
    *,
    sizes: Sequence[int] | None = None,
    device: str = "auto",
    command: str | None = None,
) -> None:
    """The evaluation of a configuration on the weights of a checkpoint; writes results and report into ``folder``."""
    options = dict(config["evaluation"])
    name = options.pop("name", None)
    if name in (None, "none"):
        return
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    command = options.pop("command", command)
    EVALUATIONS[name](
        Request(config, data, checkpoint, folder, sizes or config.get("sizes"), device, command, options, sizes)
    )
