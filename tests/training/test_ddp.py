"""Two processes with half the batch each take the steps of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmpos.training.run import train
from tests.training.conftest import SMALL, launch, losses


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    # 44 images: the last global batch of the epoch is incomplete and left out
    common = (*SMALL, "data.train_count=44", "data.num_classes=3")
    one = launch(tmp_path, *common, "hydra.run.dir=one", "data.batch_size=8")
    two = launch(
        tmp_path, *common, "hydra.run.dir=two", "data.batch_size=4", "trainer.strategy=ddp", "trainer.devices=2"
    )
    assert one.returncode == 0, one.stderr[-3000:]
    assert two.returncode == 0, two.stderr[-3000:]
    expected, got = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(expected) == 10
    assert expected.keys() == got.keys()
    assert list(got.values()) == pytest.approx(list(expected.values()), abs=2e-5)
    assert max(expected.values()) - min(expected.values()) > 1e-3  # the curve moves, so equality says something


def test_multirun_with_processes_is_refused(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    config = small("trainer.devices=2", "trainer.strategy=ddp")
    with pytest.raises(ValueError, match=r"trainer.devices: 2 processes in a multi-run.*torchrun"):
        train(config, tmp_path / "run", single_process=True)
    assert not (tmp_path / "run" / "config.yaml").exists()
