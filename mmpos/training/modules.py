"""The Lightning modules that ``objective.name`` chooses from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mmpos.training.module import Classifier, TrainingModule

__all__ = ["MODULES", "create_module"]


def _classification(config: Mapping[str, Any], model: nn.Module, data: Any) -> TrainingModule:
    return Classifier(
        model,
        num_classes=data.num_classes,
        optimizer=config["optimizer"],
        objective=config["objective"],
        seed=config["seed"],
        config=config,
        tasks=getattr(data, "tasks", None),
    )


#: modules by ``objective.name``: configuration, model and data to the module that trains
MODULES: dict[str, Callable[[Mapping[str, Any], nn.Module, Any], TrainingModule]] = {"classification": _classification}


def create_module(config: Mapping[str, Any], model: nn.Module, data: Any) -> TrainingModule:
    """The module of a configuration."""
    name = config["objective"].get("name", "classification")
    if name not in MODULES:
        raise ValueError(f"objective.name: expected one of {', '.join(MODULES)}, got {name!r}")
    return MODULES[name](config, model, data)
