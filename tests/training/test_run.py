"""Whole small runs: what is left in the folder, what fails and with which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from mmpos.config import compose, config_dir
from mmpos.evaluation.weights import load_weights, newest_checkpoint, read_checkpoint
from mmpos.training.build import build_data, build_model, check_config
from mmpos.training.run import changes, evaluate_run, read_config, train
from tests.data.boxed_files import write_bccd, write_nlvr
from tests.training.conftest import weights

Make = Callable[..., dict[str, Any]]
RECIPES = sorted(path.stem for path in (config_dir() / "recipe").glob("*.yaml"))
SMALL_MODEL = ["+model.options.depth=1", "+model.options.embed_dim=24", "+model.options.num_heads=2"]


def image_folder(root: Path) -> None:
    """Four training and two validation photographs of noise, laid out as ImageNet-1k is."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0)
    for split, count in (("train", 2), ("val", 1)):
        for name in ("n01440764", "n01443537"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 256, (260, 300, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.jpg")


def test_run_leaves_everything_a_user_needs(small: Make, tmp_path: Path) -> None:
    config = small("evaluation=resolution", "sizes=[16,24]", "encoding=rope_axial")
    metric = train(config, tmp_path)
    assert 0 <= metric <= 1
    assert read_config(tmp_path) == config
    for name in ("metrics.csv", "results.csv", "report.md", "report.html", "resolution.png", "checkpoints/last.ckpt"):
        assert (tmp_path / name).stat().st_size > 0, name
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["val/accuracy"] == metric
    assert (summary["steps"], summary["epochs"]) == (12, 2)
    content = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")  # weights_only: holds no objects of ours
    assert content["hyper_parameters"]["config"] == config
    assert not [path.name for path in (tmp_path / "checkpoints").iterdir() if "=" in path.name]
    header, *rows = (tmp_path / "results.csv").read_text().splitlines()
    assert header == "encoding,size,coordinates,metric,value,ci_low,ci_high,n"
    assert {row.split(",")[2] for row in rows} >= {"index", "rescaled", "ntk", "yarn"}


def test_evaluate_reads_a_run_and_repeats_its_numbers(small: Make, tmp_path: Path) -> None:
    train(small("evaluation=resolution", "sizes=[16,24]"), tmp_path / "run")
    accuracy = lambda folder: [  # noqa: E731
        row for row in (folder / "results.csv").read_text().splitlines() if ",accuracy," in row
    ]
    config = compose([f"run={tmp_path / 'run'}", "sizes=[16,24]"], "evaluate")
    evaluate_run(config, tmp_path / "again", read_config(tmp_path / "run"))
    assert len(accuracy(tmp_path / "again")) >= 8
    assert accuracy(tmp_path / "again") == accuracy(tmp_path / "run")


def test_shifts_of_a_run_at_its_end_and_afterwards(small: Make, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    settings = ("evaluation=shift", "evaluation.shifts=[1,4]", "sizes=[16,24]", "encoding=rope_axial")
    train(small(*settings, "trainer.max_epochs=1"), tmp_path / "run")  # sizes belong to other evaluations
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"] == "shift"
    config = compose([f"run={tmp_path / 'run'}", *settings[:2]], "evaluate")
    evaluate_run(config, tmp_path / "again", read_config(tmp_path / "run"))
    tables = [(tmp_path / name / "results.csv").read_text().splitlines() for name in ("run", "again")]
    measured = [[row for row in table if "images_per_second" not in row] for table in tables]
    assert measured[0] == measured[1]
    assert any(",circular_always," in row for row in measured[0])
    kept = read_config(tmp_path / "again")
    assert kept["evaluation"]["name"] == "shift"
    assert kept["encoding"]["name"] == "rope_axial"


WRITERS = {"vlm_nlvr": write_nlvr, "vlm_bccd": write_bccd}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_two_steps(recipe: str, tmp_path: Path) -> None:
    overrides = [f"recipe={recipe}", "trainer=cpu", "debug=fast"]
    if "imagenet" in recipe:
        image_folder(tmp_path / "images")
        overrides += [f"data.root={tmp_path / 'images'}", "data.batch_size=2", "data.num_workers=0", *SMALL_MODEL]
    if recipe in WRITERS:
        (tmp_path / "files").mkdir()
        WRITERS[recipe](tmp_path / "files")
        overrides += [f"data.root={tmp_path / 'files'}"]
    config = compose(overrides)
    config.pop("resume")
    config.pop("ckpt_path")
    assert config["trainer"]["fast_dev_run"] == 2
    assert 0 <= train(config, tmp_path) <= 1


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(small: Make, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(3)
        train(small(f"seed={seed}", "trainer.max_epochs=1"), tmp_path / name)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["head.weight"], c["head.weight"])


def test_ema_checkpoint_holds_the_average(small: Make, tmp_path: Path) -> None:
    train(small("callbacks.ema_decay=0.9"), tmp_path / "ema")
    train(small(), tmp_path / "plain")
    content = read_checkpoint(newest_checkpoint(tmp_path / "ema" / "checkpoints") or "")
    plain = weights(tmp_path / "plain")["head.weight"]
    assert not torch.allclose(weights(tmp_path / "ema")["head.weight"], plain, atol=1e-4)
    assert "current_model_state" in content


def test_loss_that_is_not_a_number_stops_the_run(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmpos.training.module import Objective

    original, calls = Objective.forward, []

    def forward(self: Objective, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return original(self, logits, targets) * (float("nan") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(Objective, "forward", forward)
    with pytest.raises(FloatingPointError, match=r"loss: nan at epoch 0, step 3; lower optimizer.lr"):
        train(small(), tmp_path)
    assert len(calls) == 3
    assert not (tmp_path / "summary.json").exists()


def test_compiled_model_keeps_its_names(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(self))
    train(small("model.compile=true", "trainer.max_epochs=1"), tmp_path)
    assert len(compiled) == 1
    assert not [name for name in weights(tmp_path) if "_orig_mod" in name]


def test_encodings_compose_with_options_by_name(small: Make) -> None:
    config = small("encoding=learned_rope_mixed", "encoding.options.rope_mixed.theta=20.0")
    model = build_model(config, build_data(config))
    encodings = model.position_encoding.encodings_of(0)  # type: ignore[union-attr, operator]
    assert [encoding.name for encoding in encodings] == ["learned", "rope_mixed"]
    assert encodings[1].theta == 20.0


# -- errors -------------------------------------------------------------------------------------------------------


def test_all_faults_of_a_configuration_are_reported_together(small: Make) -> None:
    config = small()
    config["encoding"] = {"name": "rope_mixed", "options": {"thetta": 3}}
    config["data"]["batchsize"] = 4
    config["optimizer"]["learning_rate"] = 1
    with pytest.raises(ValueError, match="several faults") as error:
        check_config(config)
    for part in ("no option thetta", "theta", "data: fake has no option batchsize", "optimizer: unknown learning_rate"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("encoding.name=rope_mixd",), "did you mean 'rope_mixed'"),
        (("+data.shuffle=true",), "data: fake has no option shuffle; its options are"),
        (("+encoding.options.thetta=1",), "rope_mixed has no option thetta"),
        (("+trainer.max_epoch=3",), "trainer: unknown max_epoch"),
        (("model.options.embed_dim=30",), r"head_dim: rope_mixed needs a multiple of 4 for 2 axes, got 10"),
        (("callbacks.ema_decay=1.5",), "callbacks.ema_decay"),
        (("callbacks.checkpoint_every_n_steps=0",), "callbacks.checkpoint_every_n_steps: expected 1 or more"),
        (("logger.names=[mlflow]",), "logger.names: expected csv, tensorboard or wandb, got 'mlflow'"),
        (("evaluation.name=resolutoin",), "evaluation.name: expected one of none, resolution, frames"),
        (("objective.name=clasification",), "objective.name: expected one of classification"),
        (("+objective.options.mask=1",), "objective.options: classification takes none"),
        (("data.image_size=2",), "smaller than one patch"),
    ],
)
def test_wrong_settings_are_named(small: Make, tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(small("trainer.max_epochs=1", *overrides), tmp_path)


def test_wandb_names_its_extra(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch.loggers as loggers

    def missing(**_: object) -> None:
        raise ModuleNotFoundError("wandb")

    monkeypatch.setattr(loggers, "WandbLogger", missing)
    with pytest.raises(ImportError, match=r'pip install "mmpos\[wandb\]"'):
        train(small("logger=wandb"), tmp_path)


def test_data_that_are_not_there_say_where_they_were_looked_for(tmp_path: Path) -> None:
    config = compose(["recipe=vit_ropemixed_imagenet", "trainer=cpu", f"data.root={tmp_path / 'nowhere'}"])
    with pytest.raises((ValueError, FileNotFoundError), match="nowhere") as error:
        train({key: value for key, value in config.items() if key not in ("resume", "ckpt_path")}, tmp_path / "run")
    assert "data.root" in str(error.value)


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "text"])
def test_damaged_checkpoint_is_named(small: Make, tmp_path: Path, damage: str) -> None:
    config = small("trainer.max_epochs=1", "callbacks.checkpoint_every_n_steps=2")
    train(config, tmp_path)
    path = tmp_path / "checkpoints" / "last.ckpt"
    content = path.read_bytes()
    damaged = {"cut": content[: len(content) // 2], "noise": bytes(range(256)) * 40, "empty": b"", "text": b"hello"}
    path.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read.*the folder also holds 000-000006\.ckpt"):
        train(config, tmp_path, ckpt_path=path)
    evaluation = compose([f"run={tmp_path}", "sizes=[16]"], "evaluate")
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read"):
        evaluate_run(evaluation, tmp_path / "evaluation", read_config(tmp_path))


def test_pickled_code_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return Path.touch, (str(tmp_path / "ran"),)  # type: ignore[return-value]

    torch.save({"state_dict": Trap()}, tmp_path / "bad.ckpt")
    with pytest.raises(ValueError, match=r"bad\.ckpt cannot be read"):
        read_checkpoint(tmp_path / "bad.ckpt")
    assert not (tmp_path / "ran").exists()


def test_weights_that_do_not_fit_are_listed(small: Make, tmp_path: Path) -> None:
    config = small()
    data = build_data(config)
    model = build_model(config, data)
    torch.save({"model": {f"module.{name}": value for name, value in model.state_dict().items()}}, tmp_path / "a.pth")
    load_weights(model, tmp_path / "a.pth")  # wrapper prefixes are no hindrance
    other = build_model(small("encoding=rope_axial", "model.patch_size=8"), data)
    with pytest.raises(ValueError, match="does not fit") as error:
        load_weights(other, tmp_path / "a.pth")
    assert "unknown position_encoding.layers.0.rope_mixed.freqs" in str(error.value)
    assert "shape patch_embed.proj.weight (24, 1, 4, 4) instead of (24, 1, 8, 8)" in str(error.value)


def test_evaluate_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to evaluate; give run="):
        evaluate_run(compose(["data=fake"], "evaluate"), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no config\.yaml"):
        read_config(tmp_path)


def test_a_run_of_an_earlier_version_is_not_another_configuration(small: Make, tmp_path: Path) -> None:
    config = small()
    saved = {key: value for key, value in config.items() if key != "stages"}
    saved["model"] = {key: value for key, value in saved["model"].items() if key not in ("fresh", "frozen")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    assert changes(tmp_path, config) == []
    frozen = {**config, "model": {**config["model"], "frozen": ["head.*"]}}
    assert changes(tmp_path, frozen) == ["model.frozen: [] -> ['head.*']"]
