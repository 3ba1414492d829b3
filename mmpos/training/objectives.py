"""The objectives that ``objective.name`` chooses from, and the LightningModule of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mmpos.training.module import Classifier, TrainingModule
from mmpos.training.position_objectives import build_droppos, build_flexpredict, build_mp3
from mmpos.training.seqpe import build_seqpe
from mmpos.training.vlm import build_answers, build_dense, build_names

__all__ = ["OBJECTIVES", "build_module"]


def _classification(config: Mapping[str, Any], model: nn.Module, data: Any) -> TrainingModule:
    objective = dict(config["objective"])
    if objective.get("options"):
        raise ValueError(
            f"objective.options: classification takes none, got {objective['options']}; its settings are the other "
            "fields of objective"
        )
    return Classifier(
        model,
        num_classes=data.num_classes,
        optimizer=config["optimizer"],
        objective=objective,
        seed=config["seed"],
        config=config,
        tasks=getattr(data, "tasks", None),
    )


#: objectives by ``objective.name``
OBJECTIVES: dict[str, Callable[[Mapping[str, Any], nn.Module, Any], TrainingModule]] = {
    "classification": _classification,
    "seqpe": build_seqpe,
    "droppos": build_droppos,
    "mp3": build_mp3,
    "flexpredict": build_flexpredict,
    "dense": build_dense,
    "names": build_names,
    "answers": build_answers,
}


def build_module(config: Mapping[str, Any], model: nn.Module, data: Any) -> TrainingModule:
    """The module that trains ``model`` on ``data`` by the objective of a configuration."""
    return OBJECTIVES[config["objective"].get("name", "classification")](config, model, data)
