"""The evaluations that ``evaluation.name`` chooses from, and how each gets a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmpos.evaluation.checkpoint import check_classes, evaluate_checkpoint
from mmpos.evaluation.weights import load_weights, model_state, read_checkpoint

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
    """

    config: Mapping[str, Any]
    data: Any
    checkpoint: Path
    folder: Path
    sizes: Sequence[int] | None
    device: str
    command: str | None
    options: dict[str, Any]

    @property
    def encoding_name(self) -> str:
        """Name of the encoding in tables."""
        return str(self.config["encoding"]["name"])

    def model(self) -> nn.Module:
        """The model of the configuration with the weights of the checkpoint."""
        from mmpos.training.build import build_model

        model = build_model(self.config, self.data, start=False)
        check_classes(model_state(read_checkpoint(self.checkpoint)), self.data, self.checkpoint)
        load_weights(model, self.checkpoint)
        return model


def _resolution(request: Request) -> None:
    from mmpos.evaluation.resolution import run_resolution

    _expect(request, "resolution")
    options = dict(request.options)
    own_sizes = options.pop("sizes", None)
    common: dict[str, Any] = {
        "output_dir": request.folder,
        "device": request.device,
        "config": request.config,
        "command": request.command,
        **options,
    }
    sizes = request.sizes or own_sizes
    if request.encoding_name != "own":
        run_resolution(request.model(), request.data, sizes, encoding_name=request.encoding_name, **common)
        return
    model = request.config["model"]
    patch = {} if model.get("patch_size") is None else {"patch_size": model["patch_size"]}
    evaluate_checkpoint(
        request.checkpoint,
        model=model["name"],
        data=request.data,
        sizes=sizes,
        model_options={**patch, **dict(model.get("options") or {})},
        **common,
    )


def _frames(request: Request) -> None:
    from mmpos.evaluation.frames import run_frames

    _expect(request, "frames")
    options = dict(request.options)
    own_frames = options.pop("frames", None)
    run_frames(
        request.model(),
        request.data,
        request.sizes or own_frames,
        encoding_name=request.encoding_name,
        output_dir=request.folder,
        device=request.device,
        config=request.config,
        **{"command": request.command, **options},
    )


def _three_cell(request: Request) -> None:
    from mmpos.evaluation.three_cell import run_three_cell

    _expect(request, "three_cell")
    if request.sizes:
        raise ValueError(
            f"sizes: evaluation three_cell tests at the size of the training pictures, got {list(request.sizes)}; "
            "leave sizes out"
        )
    run_three_cell(
        request.model(),
        request.data,
        encoding_name=request.encoding_name,
        output_dir=request.folder,
        device=request.device,
        config=request.config,
        **{"command": request.command, **request.options},
    )


def _points(request: Request) -> None:
    from mmpos.evaluation.points import run_points

    _expect(request, "points")
    if request.sizes:
        raise ValueError(
            f"sizes: evaluation points tests in the frames of its own options, got {list(request.sizes)}; leave sizes "
            "out and set evaluation.smaller, evaluation.larger, evaluation.fewer or evaluation.more"
        )
    run_points(
        request.model(),
        request.data,
        encoding_name=request.encoding_name,
        output_dir=request.folder,
        device=request.device,
        config=request.config,
        **{"command": request.command, **request.options},
    )


def _expect(request: Request, evaluation: str) -> None:
    """Raise where the data of a run are not what its evaluation tests."""
    made_for = request.data.evaluation
    if made_for != evaluation:
        holds = {
            "resolution": "labelled images",
            "frames": "videos",
            "three_cell": "questions about three cells",
            "points": "point clouds",
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
    sizes = sizes or config.get("sizes")
    EVALUATIONS[name](Request(config, data, checkpoint, folder, sizes, device, command, options))
