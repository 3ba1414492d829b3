"""Optimizer and schedule: positions do not decay, and the learning rate is a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mmpos.config import OptimizerConfig, check_keys
from mmpos.evaluation.weights import plain_name

__all__ = ["create_optimizer", "learning_rate_factor", "no_weight_decay_names", "parameter_groups"]


def no_weight_decay_names(model: nn.Module) -> set[str]:
    """Names of the parameters that any sub-module declares in its ``no_weight_decay()``, as full plain names."""
    names = set()
    for prefix, module in model.named_modules():
        declare = getattr(module, "no_weight_decay", None)
        if callable(declare):
            names |= {plain_name(f"{prefix}.{name}" if prefix else name) for name in declare()}
    return names


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, with and without decay. Vectors, scalars and declared parameters do not decay."""
    spared = no_weight_decay_names(model)
    decay: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (rest if parameter.ndim <= 1 or plain_name(name) in spared else decay).append(parameter)
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]
    return [group for group in groups if group["params"]]


def create_optimizer(model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The timm optimizer of :class:`mmpos.config.OptimizerConfig`."""
    import timm.optim

    check_keys("optimizer", options, OptimizerConfig)
    config = OptimizerConfig(**options)
    known = [str(name) for name in timm.optim.list_optimizers()]
    if config.name not in known:
        raise ValueError(
            f"optimizer.name: expected a timm optimizer, got {config.name!r}; known are {', '.join(sorted(known))}"
        )
    if config.schedule not in ("cosine", "constant"):
        raise ValueError(f"optimizer.schedule: expected 'cosine' or 'constant', got {config.schedule!r}")
    if config.lr <= 0 or config.weight_decay < 0 or config.warmup < 0:
        raise ValueError(
            f"optimizer: expected lr > 0, weight_decay >= 0 and warmup >= 0, got {config.lr}, {config.weight_decay}, "
            f"{config.warmup}"
        )
    extra = dict(config.options)
    if config.betas is not None:
        extra["betas"] = tuple(config.betas)
    if config.eps is not None:
        extra["eps"] = config.eps
    try:
        return timm.optim.create_optimizer_v2(
            parameter_groups(model, config.weight_decay), opt=config.name, lr=config.lr, **extra
        )
    except TypeError as error:
        raise ValueError(f"optimizer: {config.name} does not take these options {sorted(extra)}: {error}") from error


def learning_rate_factor(total_steps: int, options: Mapping[str, Any]) -> Callable[[int], float]:
    """Factor on the learning rate at a step: linear from ``warmup_lr``, then constant or half a cosine to ``min_lr``.

    Example:
        >>> factor = learning_rate_factor(100, {"name": "adamw", "lr": 1.0, "warmup": 10})
        >>> [round(factor(step), 2) for step in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    config = OptimizerConfig(**options)
    warmup = round(config.warmup * total_steps) if config.warmup < 1 else round(config.warmup)
    start, end = config.warmup_lr / config.lr, config.min_lr / config.lr

    def factor(step: int) -> float:
        if step < warmup:
            return start + (1 - start) * (step + 1) / warmup
        if config.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * done))

    return factor
