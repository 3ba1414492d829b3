"""The commands: ``mmpos`` in this process, ``train.py`` and ``evaluate.py`` as a user calls them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from mmpos import list_encodings
from mmpos.cli import _described, main
from mmpos.encodings import encoding_class, encoding_options
from mmpos.multimodal import list_schemes, published_rules
from tests.training.conftest import SMALL, launch

ROOT = Path(__file__).parent.parent


def test_list_names_every_encoding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name in list_encodings():
        assert re.search(rf"\b{name}\b", out), name


def test_list_names_every_scheme_with_its_four_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--kind", "scheme"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in list_schemes():
        assert any(re.match(rf"\W*{name}\b", line) for line in lines), name
    reset = next(line for line in lines if re.match(r"\W*mrope_interleave_reset\b", line))
    assert re.search(r"grid.*all.*extent, space reset.*interleaved.*schemes\.scheme.*2510\.23095", reset)
    for rule in published_rules():
        line = next(line for line in lines if re.match(rf"\W*{rule.name}\b", line))
        choices = (rule.block, rule.text, rule.cursor, rule.allocation, rule.made_by)
        assert re.search(".*".join(re.escape(part) for part in choices), line), line


def test_show_tells_facts_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "rope_axial"]) == 0
    out = capsys.readouterr().out
    assert "arXiv 2403.13298" in out
    assert "a multiple of 2 x axes" in out
    for option, default in encoding_options("rope_axial").items():
        assert re.search(rf"\b{option}\b.*{re.escape(repr(default))}", out), option
    assert "base of the ladder" in out
    assert "rescaled" in out


@pytest.mark.parametrize("name", list_encodings())
def test_show_works_for_every_encoding_and_describes_every_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", name]) == 0
    assert encoding_class(name).facts.title in capsys.readouterr().out.replace("\n", " ")
    missing = set(encoding_options(name)) - set(_described(encoding_class(name)))
    assert not missing, f"options of {name} without a line in the Args of its docstring: {missing}"


def test_tables_work_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["show", "none"]) == 0
    assert "control" in capsys.readouterr().out


def test_plot_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "picture.png"
    assert main(["plot", "rope_axial", "--grid", "5x7", "--output", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == str(path)


def test_pesi_prints_the_numbers_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pesi", "sincos", "alibi_2d", "--grid", "14x14"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match(r"\W*sincos\W+all\W+1\.9991\W+1\.5318\W+0\.0281\b", line) for line in lines)
    assert any(re.match(r"\W*alibi_2d\W+all\W+2\.0000\b", line) for line in lines)
    raster = ["pesi", "loope", "--option", "context=none", "--option", "curve=raster", "--option", "base=10000"]
    assert main([*raster, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["encoding"], row["grid"]) == ("loope", [14, 14])
    numbers = [row[key] for key in ("undirected", "directed", "asymmetry")]
    assert numbers == pytest.approx([1.9567, 1.4905, 0.1243], abs=5e-5)


def test_pesi_of_a_run_uses_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from mmpos.adapters.timm import stack_of
    from mmpos.config import compose
    from mmpos.diagnostics import pesi
    from mmpos.training.build import build_data, build_model

    config = compose([*SMALL, "encoding=rope_mixed", "+model.options.num_heads=2", "model.options.depth=2"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["pesi", "--run", str(tmp_path)]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err
    torch.manual_seed(3)
    model = build_model(config, build_data(config))
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": model.state_dict()}, tmp_path / "checkpoints" / "last.ckpt")
    assert main(["pesi", "--run", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["layer"], row["grid"]) for row in rows] == [("0", [4, 4]), ("1", [4, 4])]
    expected = [pesi(stack_of(model), (4, 4), layer=layer).asymmetry for layer in (0, 1)]
    assert [row["asymmetry"] for row in rows] == expected
    assert expected[0] != expected[1]
    assert main(["pesi", "--run", str(tmp_path), "--grid", "3x5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["grid"] == [3, 5]
    assert main(["pesi", "--run", str(tmp_path), "--option", "theta=3"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "rope_mixd"], "did you mean 'rope_mixed'"),
        (["plot", "rope_mixed", "--grid", "14by14"], "--grid: expected sizes such as 14x14, got '14by14'"),
        (["readme", "nowhere"], "holds no finished run"),
        (["pesi"], "expected names of encodings, or --run"),
        (["pesi", "sincos", "--run", "x"], "expected names of encodings, or --run"),
        (["pesi", "none"], "none neither adds vectors"),
        (["pesi", "sincos", "--grid", "3x4x5"], "expected rows x columns"),
        (["pesi", "sincos", "--option", "base"], "expected KEY=VALUE, got 'base'"),
    ],
)
def test_wrong_arguments_end_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert "vit_ropemixed " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_study_compares_skips_what_is_done_and_refreshes_readmes(tmp_path: Path) -> None:
    study = ("hydra.sweep.dir=study", "evaluation=resolution", "sizes=[16,24]", "trainer.max_epochs=1")
    out = launch(tmp_path, "-m", *SMALL, *study, "encoding=none,sincos", "seed=0,1")
    assert out.returncode == 0, out.stderr[-3000:]
    summaries = sorted((tmp_path / "study").rglob("summary.json"))
    assert len(summaries) == 4
    assert list((tmp_path / "study").glob("comparison*"))
    before = [path.stat().st_mtime_ns for path in summaries]
    summaries[0].unlink()
    again = launch(tmp_path, "-m", *SMALL, *study, "encoding=none,sincos", "seed=0,1")
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stdout.count("is finished already; skipped") == 3
    assert summaries[0].is_file()
    assert [path.stat().st_mtime_ns for path in summaries[1:]] == before[1:]
    other = launch(
        tmp_path, "-m", *SMALL, *study, "encoding=none", "seed=0", "optimizer.lr=0.1", "hydra.sweep.subdir=x"
    )
    assert other.returncode == 0, other.stderr[-3000:]
    clash = launch(tmp_path, "-m", *SMALL, *study, "encoding=none", "seed=0", "hydra.sweep.subdir=x")
    assert clash.returncode != 0
    assert "optimizer.lr: 0.1 -> 0.001" in clash.stderr


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_train_evaluate_and_resume_from_another_directory(tmp_path: Path) -> None:
    out = launch(tmp_path, *SMALL, "trainer.max_epochs=1", "hydra.run.dir=run", "evaluation=resolution", "sizes=[16]")
    assert out.returncode == 0, out.stderr[-3000:]
    evaluated = subprocess.run(
        [sys.executable, str(ROOT / "evaluate.py"), "run=run", "evaluation=resolution", "sizes=[16,24]"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert evaluated.returncode == 0, evaluated.stderr[-3000:]
    assert ",24,rescaled,accuracy," in (tmp_path / "run" / "results.csv").read_text()
    longer = launch(tmp_path, "resume=run", "trainer.max_epochs=2")
    assert longer.returncode == 0, longer.stderr[-3000:]
    assert "trainer.max_epochs: 1 -> 2" in longer.stdout
    assert "epoch   2/2" in longer.stdout
    for arguments, message in (
        (("resume=nowhere",), "nowhere holds no config.yaml"),
        (("resume=run", "recipe=vit_none"), "recipe: cannot change"),
    ):
        failed = launch(tmp_path, *arguments)
        assert failed.returncode != 0
        assert message in failed.stderr
