"""Shared by all tests: one thread per process, a fixed seed before each test, and no Hydra state left behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # tests run in parallel processes; more threads would only fight


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_global_state() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    hydra = sys.modules.get("hydra.core.global_hydra")
    if hydra is not None:
        hydra.GlobalHydra.instance().clear()


@pytest.fixture
def data_dir() -> Path:
    """Folder of optional real data, named by the environment variable MMPOS_DATA."""
    root = os.environ.get("MMPOS_DATA")
    if not root:
        pytest.skip("needs real data: set MMPOS_DATA to the folder that holds it")
    if not Path(root).is_dir():
        pytest.skip(f"needs real data: MMPOS_DATA={root} is not a folder")
    return Path(root)
