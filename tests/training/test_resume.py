"""A run that is cut off and resumed ends with the weights of a run that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmpos.evaluation.weights import newest_checkpoint
from mmpos.training import run as run_module
from mmpos.training.module import Classifier
from mmpos.training.run import train
from tests.training.conftest import ROOT, SMALL, launch, losses, weights


class Killed(BaseException):
    """Not an Exception: nothing on the way may handle it and tidy up, as nothing can after a kill."""


def train_until(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], folder: Path, step: int) -> None:
    """Run until a training step begins, then stop without any ceremony."""
    original = Classifier.training_step

    def training_step(self: Classifier, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.fit_loop.total_batch_idx >= step:
            raise Killed
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "training_step", training_step)
        with pytest.raises(Killed):
            train(config, folder)


@pytest.mark.parametrize(
    ("overrides", "killed_at"),
    [
        ((), 4),  # inside the first epoch, checkpoint at step 4
        ((), 11),  # inside the second epoch, two steps after the checkpoint at step 8
        ((), 6),  # between two epochs
        (("+model.options.drop_path_rate=0.5", "+model.options.proj_drop_rate=0.3"), 5),
        (("objective.mixup=0.8", "objective.cutmix=1.0", "objective.label_smoothing=0.1"), 9),
        (("callbacks.ema_decay=0.8",), 9),
        (("trainer.accumulate_grad_batches=2",), 11),
    ],
)
def test_resumed_run_ends_like_an_uninterrupted_one(
    small: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    killed_at: int,
) -> None:
    config = small("callbacks.checkpoint_every_n_steps=2", *overrides)
    whole = train(config, tmp_path / "whole")
    train_until(monkeypatch, config, tmp_path / "cut", killed_at)
    torch.rand(17)  # the new process has other generator states
    resumed = train(config, tmp_path / "cut", ckpt_path=newest_checkpoint(tmp_path / "cut" / "checkpoints"))
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert expected.keys() == got.keys()
    for name in expected:
        assert torch.equal(expected[name], got[name]), name
    assert resumed == whole
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_other_batches_cannot_continue_an_epoch(
    small: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = "callbacks.checkpoint_every_n_steps=2"
    train_until(monkeypatch, small(every), tmp_path, 4)
    last = newest_checkpoint(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="had global_batch 8, this one has 4"):
        train(small(every, "data.batch_size=4"), tmp_path, ckpt_path=last)


@pytest.mark.parametrize("place", ["validation", "evaluation"])
def test_run_that_is_cut_off_after_its_last_step_keeps_metric_and_time(
    small: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    config = small("callbacks.checkpoint_every_n_steps=4", "data.test_count=32")
    expected = train(config, tmp_path / "whole")

    def stop(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if place == "evaluation":
            patch.setattr(run_module, "evaluate", stop)
        else:
            original = Classifier.validation_step
            patch.setattr(
                Classifier,
                "validation_step",
                lambda self, *batch: original(self, *batch) if self.current_epoch == 0 else stop(),
            )
        with pytest.raises(Killed):
            train(config, tmp_path / "cut")
    before = losses(tmp_path / "cut")
    last = newest_checkpoint(tmp_path / "cut" / "checkpoints")
    got = train(config, tmp_path / "cut", ckpt_path=last)
    assert got == expected
    summary = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert summary["val/accuracy"] == expected
    assert summary["steps"] == 12
    assert summary["train_seconds"] > 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert before.items() <= losses(tmp_path / "cut").items()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_killed_process_resumes_exactly(tmp_path: Path) -> None:
    """The same with a real process and SIGKILL in the middle of an epoch, through the command line."""
    every = (*SMALL, "trainer.max_epochs=3", "callbacks.checkpoint_every_n_steps=2", "data.train_count=400")
    whole = launch(tmp_path, *every, "hydra.run.dir=whole")
    assert whole.returncode == 0, whole.stderr[-3000:]
    command = [sys.executable, str(ROOT / "train.py"), *every, f"hydra.run.dir={tmp_path / 'cut'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    while process.poll() is None:
        if checkpoint.is_file() and read_step(checkpoint) >= 60:  # 50 steps an epoch
            process.kill()
            break
        time.sleep(0.01)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    resumed = launch(tmp_path, "resume=cut")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "nothing changed" in resumed.stdout
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    for name in expected:
        assert torch.equal(expected[name], got[name]), name
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def read_step(checkpoint: Path) -> int:
    """Optimizer steps behind a checkpoint; it is replaced in one move, so it can be read at any time."""
    return int(torch.load(checkpoint, weights_only=True)["global_step"])
