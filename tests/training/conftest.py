"""Small runs: one block of width 24 on 16-pixel images, a few steps."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mmpos.config import compose

ROOT = Path(__file__).parents[2]
SMALL = [
    "data=fake",
    "data.train_count=48",
    "data.test_count=16",
    "logger=csv",
    "trainer=cpu",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
    "evaluation=none",
    "+model.options.depth=1",
    "+model.options.embed_dim=24",
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small() -> Callable[..., dict[str, Any]]:
    """Configuration of a small run, with further overrides."""

    def make(*overrides: str) -> dict[str, Any]:
        config = compose([*SMALL, *overrides])
        config.pop("resume")
        config.pop("ckpt_path")
        return config

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """State of the inner network in the last checkpoint of a run."""
    from mmpos.evaluation.weights import model_state, read_checkpoint

    return model_state(read_checkpoint(folder / "checkpoints" / "last.ckpt"))


def losses(folder: Path) -> dict[int, float]:
    """Loss of every step in ``metrics.csv``."""
    with (folder / "metrics.csv").open(newline="") as file:
        return {
            int(row["step"]): float(row["train/loss_step"]) for row in csv.DictReader(file) if row["train/loss_step"]
        }


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``train.py`` in a process of its own, from ``folder``, as a user does."""
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    for name in ("MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "PL_GLOBAL_SEED"):
        environment.pop(name, None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
