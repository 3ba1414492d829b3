"""``import mmpos`` needs torch, einops and numpy, and nothing that belongs to an extra."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import mmpos

EXTRAS = {
    *("timm", "torchvision", "open_clip", "lightning", "pytorch_lightning", "hydra", "omegaconf", "matplotlib"),
    *("mlxtend", "sklearn", "pandas", "torchmetrics", "rich", "safetensors", "onnx", "onnxruntime", "onnxscript"),
    *("transformers", "webdataset", "tensorboard", "wandb", "scipy", "PIL", "hypothesis", "pytest"),
}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    code = (
        "import sys, json, torch; before = set(sys.modules); import mmpos\n"
        "mmpos.create_encoding('rope_mixed', 32, 2).prepare(mmpos.Positions.grid(2, 3))\n"
        "print(json.dumps({'before': sorted(before), 'after': sorted(set(sys.modules) - before)}))"
    )
    return json.loads(python(code))


def test_no_optional_package_is_imported(loaded: dict[str, list[str]]) -> None:
    tops = {name.split(".")[0] for name in loaded["after"]}
    assert sorted(tops & EXTRAS) == []


def test_import_stays_small(loaded: dict[str, list[str]]) -> None:
    """Modules beyond torch, counted because time depends on the machine; our own are a few kilobytes each."""
    others = [name for name in loaded["after"] if not name.startswith("mmpos")]
    assert len(others) < 60, others


def test_every_registered_encoding_is_there_after_import() -> None:
    names = python("import mmpos; print(*mmpos.list_encodings())").split()
    assert names == mmpos.list_encodings()


def test_training_is_not_imported(loaded: dict[str, list[str]]) -> None:
    heavy = ("mmpos.training", "mmpos.evaluation", "mmpos.cli", "mmpos.adapters", "mmpos.models", "mmpos.data")
    assert [name for name in loaded["after"] if name.startswith(heavy)] == []


def test_version_and_typing_marker() -> None:
    assert mmpos.__version__ == metadata.version("mmpos")
    assert (Path(mmpos.__file__).parent / "py.typed").is_file()


def test_public_names_exist() -> None:
    assert sorted(mmpos.__all__) == sorted(set(mmpos.__all__))
    assert [name for name in mmpos.__all__ if not hasattr(mmpos, name)] == []


SKIPPED = tuple(f"mmpos.{part}" for part in ["training", "evaluation", "cli", "adapters", "data", "models", "plotting"])
MODULES = [
    module.name
    for module in pkgutil.walk_packages(mmpos.__path__, "mmpos.", onerror=lambda name: None)
    if not module.name.startswith(SKIPPED) and not module.name.endswith("__main__") and "_configs" not in module.name
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    """Doctests of every module that imports without an extra."""
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.testmod(importlib.import_module(name), optionflags=flags).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    examples = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(examples) > 20
