"""Every recipe composes, every value it sets is what a run gets, and what a user types wins over both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from mmpos import list_encodings
from mmpos.config import compose, config_dir, difference, encoding_yaml, job_folder, overlay, recipe_lines, run_folder
from mmpos.data import data_options, list_data
from mmpos.training.build import check_config

ROOT = Path(__file__).parent.parent
RECIPES = sorted(path.stem for path in (config_dir() / "recipe").glob("*.yaml"))
GROUPS = [
    (path.parent.name, path.stem)
    for path in sorted(config_dir().glob("*/*.yaml"))
    if path.parent.name not in ("recipe", "local")
]


def leaves(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict):
            out |= leaves(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def look_up(config: dict[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node[part]
    return node


def test_the_recipes_are_there() -> None:
    expected = {"vit_ropemixed", "vit_ropeaxial", "vit_learned", "vit_sincos", "vit_none", "vit_ropemixed_imagenet"}
    assert expected <= set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_composes_and_its_values_arrive(recipe: str) -> None:
    config = compose([f"recipe={recipe}"])
    check_config(config)
    source = yaml.safe_load((config_dir() / "recipe" / f"{recipe}.yaml").read_text())
    entries = source.pop("defaults")
    parents = [entry for entry in entries if isinstance(entry, str)]  # a recipe may change another one
    assert all((config_dir() / f"{parent.lstrip('/')}.yaml").is_file() for parent in parents)
    for entry in entries:
        for group, choice in () if entry in parents else entry.items():
            group = group.removeprefix("override /")
            chosen = leaves(yaml.safe_load((config_dir() / group / f"{choice}.yaml").read_text()))
            for key, value in chosen.items():
                if not str(value).startswith("${") and key != "defaults" and f"{group}.{key}" not in leaves(source):
                    assert look_up(config, f"{group}.{key}") == value, f"{group}.{key}"
    values = leaves(source)
    assert len(values) >= (1 if parents else 5)
    for key, value in values.items():
        assert look_up(config, key) == value, key


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_file_begins_with_its_command(recipe: str) -> None:
    header, command, line, *_ = (config_dir() / "recipe" / f"{recipe}.yaml").read_text().splitlines()
    assert header == "# @package _global_"
    assert f"train.py recipe={recipe}" in command
    assert line.startswith("# ")
    assert f"{recipe} " in recipe_lines()
    assert line[2:] in recipe_lines()
    assert (ROOT / "recipes" / recipe / "README.md").is_file()


#: encodings without a recipe of the extrapolation study: of videos, and of places on the earth
NOT_IN_THE_STUDY = {"rope_3d", "geoclip", "spherical"}


def test_the_extrapolation_study_holds_every_encoding_of_images() -> None:
    found = {path.stem for path in (config_dir() / "recipe" / "extrapolation").glob("*.yaml")}
    assert found == set(list_encodings()) - NOT_IN_THE_STUDY


@pytest.mark.parametrize("name", sorted(set(list_encodings()) - NOT_IN_THE_STUDY))
def test_the_extrapolation_study_tests_the_recipe_of_an_encoding_at_four_sizes(name: str) -> None:
    config = compose([f"recipe=extrapolation/{name}"])
    check_config(config)
    assert (config["encoding"]["name"], config["sizes"]) == (name, [28, 42, 56, 84])
    source = yaml.safe_load((config_dir() / "recipe" / "extrapolation" / f"{name}.yaml").read_text())
    recipe = source["defaults"][0].removeprefix("/recipe/")
    if len(source["defaults"]) == 1:  # the recipe of this encoding: one set of runs serves both
        assert [line.split(":")[0] for line in difference(compose([f"recipe={recipe}"]), config)] == ["sizes"]


@pytest.mark.parametrize(("group", "choice"), GROUPS)
def test_every_choice_composes(group: str, choice: str) -> None:
    check_config(compose([f"{group}={choice}"]))


def test_what_the_user_types_wins() -> None:
    config = compose(["recipe=vit_ropemixed", "encoding=sincos", "optimizer.lr=0.5", "trainer=gpu"])
    assert config["encoding"]["name"] == "sincos"
    assert config["optimizer"]["lr"] == 0.5
    assert config["trainer"]["accelerator"] == "gpu"
    assert config["trainer"]["max_epochs"] == 12  # the recipe's own values stay


@pytest.mark.parametrize("name", list_encodings())
def test_every_encoding_has_its_file(name: str) -> None:
    path = config_dir() / "encoding" / f"{name}.yaml"
    assert path.is_file(), "run `mmpos configs`"
    assert path.read_text() == encoding_yaml(name), "run `mmpos configs`"


@pytest.mark.parametrize("name", list_data())
def test_every_data_set_has_its_file_with_its_options(name: str) -> None:
    options = yaml.safe_load((config_dir() / "data" / f"{name}.yaml").read_text())
    assert options.pop("name") == name
    assert set(options) <= set(data_options(name))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_epoch=3", "trainer.max_epoch"),
        ("optimiser=adamw", "optimiser"),
        ("optimizer.lr=fast", "fast"),
        ("recipe=vit_ropemixd", "vit_ropemixd"),
        ("encoding=rope_mixd", "rope_mixd"),
        ("encoding.options.thetta=3", "thetta"),
        ("data.batchsize=3", "batchsize"),
        ("trainer.max_epochs=3.5", "max_epochs"),
    ],
)
def test_misspelt_keys_fail_before_anything_is_built(override: str, message: str) -> None:
    from hydra.errors import HydraException

    with pytest.raises(HydraException, match=message):
        compose([override])


def test_unknown_recipe_lists_the_recipes() -> None:
    from hydra.errors import MissingConfigException

    with pytest.raises(MissingConfigException) as error:
        compose(["recipe=vit_ropemixd"])
    assert all(recipe in str(error.value) for recipe in RECIPES)


def test_composed_configuration_is_plain() -> None:
    def plain(node: object) -> bool:
        if type(node) is dict:
            return all(type(key) is str and plain(value) for key, value in node.items())
        if type(node) is list:
            return all(map(plain, node))
        return node is None or type(node) in (str, int, float, bool)

    assert plain(compose(["recipe=vit_ropemixed"]))


def test_folders_of_runs() -> None:
    assert run_folder(None, "vit_none", "now") == "runs/vit_none/now"
    assert run_folder("runs/old", "vit_none", "now") == "runs/old"
    assert run_folder(None, None, "now") == "runs/custom/now"
    assert job_folder("vit_none", 3, "") == "vit_none/seed3"
    assert job_folder(None, 0, "optimizer.lr-0.1_+a.b-[1,2]") == "custom/optimizer.lr-0.1_-a.b--1-2/seed0"


def test_saved_configuration_with_changes() -> None:
    saved = compose(["recipe=vit_ropemixed", "seed=3"])
    now = compose(["trainer=gpu", "optimizer.lr=0.5", "data.batch_size=7"])
    got = overlay(saved, now, ["trainer", "optimizer.lr", "+data.batch_size"])
    assert got["trainer"] == now["trainer"]
    assert (got["optimizer"]["lr"], got["data"]["batch_size"], got["seed"]) == (0.5, 7, 3)
    assert saved["optimizer"]["lr"] == 1e-3
    assert "optimizer.lr: 0.001 -> 0.5" in difference(saved, got)
    assert difference(saved, saved) == []
    with pytest.raises(ValueError, match="recipe: cannot change in a run that exists"):
        overlay(saved, now, ["recipe"])


def test_help_shows_recipes_and_groups(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert out.returncode == 0, out.stderr
    assert recipe_lines() in out.stdout
    assert "encoding: " in out.stdout
    assert list(tmp_path.iterdir()) == []
