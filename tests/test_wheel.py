"""The wheel holds what the checkout has: installed elsewhere it lists encodings and composes every recipe."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mmpos import list_encodings

ROOT = Path(__file__).parent.parent

COMPOSE = """
import sys
from pathlib import Path
import mmpos.config
from mmpos.training.build import check_config
folder = mmpos.config.config_dir()
assert folder == Path(mmpos.config.__file__).parent / "_configs", folder
for recipe in sorted(folder.glob("recipe/*.yaml")):
    check_config(mmpos.config.compose([f"recipe={recipe.stem}"]))
    print(recipe.stem)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel of this checkout and nothing else in it."""
    pytest.importorskip("hatchling", reason='building the wheel needs hatchling: pip install "mmpos[dev]"')
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    target = folder / "site"
    # a wheel of pure Python is installed by unpacking it; the dependencies are those of the running environment
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run(installed: Path, *arguments: str) -> str:
    """Run Python in an empty folder with the unpacked wheel before everything else."""
    work = installed.parent / "work"
    work.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    out = subprocess.run(
        [sys.executable, *arguments], cwd=work, env=environment, capture_output=True, text=True, timeout=900
    )
    assert out.returncode == 0, out.stderr[-3000:]
    return out.stdout


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_wheel_holds_package_and_configs_only(installed: Path) -> None:
    top = {path.name for path in installed.iterdir()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"mmpos"}
    assert (installed / "mmpos" / "py.typed").is_file()
    files = lambda folder: {path.relative_to(folder) for path in folder.rglob("*.yaml")}  # noqa: E731
    assert files(installed / "mmpos" / "_configs") == {
        path for path in files(ROOT / "configs") if path.parts[0] != "local"
    }
    (info,) = installed.glob("*.dist-info")
    assert "mmpos-train = mmpos.cli:train_command" in (info / "entry_points.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_wheel_lists_encodings_and_composes_every_recipe(installed: Path) -> None:
    listed = run(installed, "-m", "mmpos.cli", "list")
    assert str(installed) in run(installed, "-c", "import mmpos; print(mmpos.__file__)")
    assert all(name in listed for name in list_encodings())
    recipes = run(installed, "-c", COMPOSE).split()
    assert recipes == sorted(path.stem for path in (ROOT / "configs" / "recipe").glob("*.yaml"))
    script = "import sys; sys.argv[1:] = ['--help']; from mmpos.cli import train_command; train_command()"
    assert "vit_ropemixed" in run(installed, "-c", script)
