"""Forward passes over test data, and their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

__all__ = ["CPU_TOKENS", "logits_of", "now", "time_ratio"]

#: tokens of one forward pass on a CPU, which is fastest while the activations stay in its cache
CPU_TOKENS = 8192


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def logits_of(
    model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    autocast: torch.dtype | None,
    tokens: int,
) -> tuple[Tensor, Tensor, float]:
    """Logits and labels of all samples of a loader, and the seconds of the forward passes.

    Args:
        model: samples to logits.
        loader: batches of samples and labels.
        device: where the model is.
        autocast: reduced precision, or ``None``.
        tokens: tokens of a sample, which decides how many go through at once on a CPU.

    Shape:
        Logits ``(M, classes)`` float64 and labels ``(M, ...)``, both on the CPU.
    """
    logits, labels, seconds = [], [], 0.0
    for samples, answers in loader:
        samples = samples.to(device)
        part = max(1, CPU_TOKENS // tokens) if device.type == "cpu" else len(samples)
        start = now(device)
        with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
            logits.append(torch.cat([model(few) for few in samples.split(part)]))
        seconds += now(device) - start
        labels.append(answers)
    return torch.cat(logits).double().cpu(), torch.cat(labels), seconds


def time_ratio(
    model: Callable[[Tensor], Tensor], bare: Callable[[Tensor], Tensor], samples: Tensor, device: torch.device
) -> tuple[float, int]:
    """Time of a forward pass of one model over that of another: the median over rounds, and how many there were.

    The two take turns, so that a busy machine slows both.
    """
    pair = (model, bare)
    ratios: list[float] = []
    spent = 0.0
    for each in pair:
        each(samples)
    while len(ratios) < 5 or (len(ratios) < 25 and spent < 3.0):
        ticks = [now(device)]
        for each in pair if len(ratios) % 2 else pair[::-1]:
            each(samples)
            ticks.append(now(device))
        first, second = ticks[1] - ticks[0], ticks[2] - ticks[1]
        ratios.append(first / second if len(ratios) % 2 else second / first)
        spent += first + second
    return statistics.median(ratios), len(ratios)
