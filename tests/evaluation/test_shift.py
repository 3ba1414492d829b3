"""Shifted images as an evaluation: what moves where, counts, table, report, comparison, commands."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmpos.config import compose
from mmpos.data import create_data
from mmpos.evaluation import run_shift, wilson_interval
from mmpos.evaluation.compare import compare, find_runs
from mmpos.evaluation.results import read_results
from mmpos.evaluation.shift import DIRECTIONS, SHIFT_COLUMNS, WAYS, shift_images
from mmpos.training.evaluations import evaluate
from mmpos.training.studies import BEGIN, END, refresh_readmes

pytest.importorskip("matplotlib")

PATCH = 4


@pytest.fixture(scope="module")
def data():
    return create_data("fake", image_size=16, test_count=40, eval_batch_size=40)


class ByPlace(nn.Module):
    """Its answer is where in a patch the brightest pixel lies: it changes with every shift but that of a patch."""

    patch_size = PATCH

    def __init__(self, modulo: int = PATCH) -> None:
        super().__init__()
        self.modulo = modulo
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        grey = images.mean(1)
        grey = grey + 0.3 * grey.roll(1, -1) + 0.2 * grey.roll(1, -2)  # no two places are equally bright
        place = grey.flatten(1).argmax(1)
        row, column = place // grey.shape[-1] % self.modulo, place % grey.shape[-1] % self.modulo
        return nn.functional.one_hot((row * self.modulo + column) % 10, 10).float() + self.weight


def test_what_moves_where():
    image = torch.arange(12.0).view(1, 3, 4)
    array = image[0].numpy()
    assert np.array_equal(shift_images(image, 1, 2, way="circular")[0], np.roll(array, (1, 2), (0, 1)))
    # the definition: a window over a canvas that repeats the outermost pixels
    for down, right in ((1, 2), (2, 0), (0, 3), (-1, -2)):
        canvas = np.pad(array, 3, mode="edge")
        window = canvas[3 - down : 6 - down, 3 - right : 7 - right]
        assert np.array_equal(shift_images(image, down, right, way="cropped")[0], window)
    with pytest.raises(ValueError, match="way: expected one of"):
        shift_images(image, 1, 1, way="zoom")


def test_an_empty_border_makes_both_ways_equal():
    image = torch.zeros(2, 1, 8, 10)
    image[:, :, 3:5, 3:6] = torch.rand(2, 1, 2, 3)
    for down, right in ((1, 0), (0, 3), (3, 3)):
        circular, cropped = (shift_images(image, down, right, way=way) for way in WAYS)
        assert torch.equal(circular, cropped)
    assert not torch.equal(*(shift_images(image, 6, 0, way=way) for way in WAYS))


def test_counts_of_a_model_that_sees_where_patches_are_cut(data, tmp_path, capsys):
    model = ByPlace().train()
    result = run_shift(model, data, encoding_name="place", output_dir=tmp_path)
    assert model.training
    assert result.shifts == [1, 2, 3, 4]
    images, labels = next(iter(data.test_dataloader()))
    model.eval()
    before = model(images).argmax(-1)
    unchanged, right = [], []
    for name, (down, side) in DIRECTIONS.items():
        for shift in result.shifts:
            row = result.row("consistency", shift, f"circular {name}")
            answer = model(images.roll((down * shift, side * shift), (2, 3))).argmax(-1)
            assert row.value == pytest.approx(float((answer == before).double().mean()))
            logits = model(images.roll((down * shift, side * shift), (2, 3)))
            change = (logits - model(images)).abs().double() / model(images).double().std()
            for metric, wanted in (("mean_logit_change", change.mean()), ("largest_logit_change", change.max())):
                found = result.row(metric, shift, f"circular {name}")
                assert found.value == pytest.approx(float(wanted.detach()), rel=1e-5)
            assert (row.ci_low, row.ci_high) == pytest.approx(wilson_interval(int((answer == before).sum()), 40))
            accuracy = result.row("shifted_accuracy", shift, f"circular {name}")
            assert accuracy.value == pytest.approx(float((answer == labels).double().mean()))
            unchanged.append(answer == before)
            right.append(answer == labels)
    assert result.row("consistency", 4, "circular down").value == 1  # a whole patch
    assert result.row("consistency", 1, "circular right").value == 0  # one column further, always another number
    assert result.row("circular_consistency").value == pytest.approx(float(torch.stack(unchanged).double().mean()))
    assert result.row("circular_always").value == pytest.approx(float(torch.stack(unchanged).all(0).double().mean()))
    assert result.row("circular_accuracy").value == pytest.approx(float(torch.stack(right).double().mean()))
    assert result.row("accuracy").value == pytest.approx(float((before == labels).double().mean()))
    assert "A circular shift by whole patches changes nothing" in (tmp_path / "report.md").read_text()
    assert "place: unshifted" in capsys.readouterr().out


def test_table_report_and_picture(data, tmp_path):
    run_shift(ByPlace(1), data, encoding_name="blind", output_dir=tmp_path, shifts=[3, 1, 3], command="python x.py")
    rows = read_results(tmp_path / "results.csv")
    assert len({row.key for row in rows}) == len(rows)
    assert {row.size for row in rows} == {0, 1, 3}
    assert {row.metric for row in rows if row.size == 0} == {*SHIFT_COLUMNS.values(), "images_per_second"}
    places = {f"{way} {name}" for way in WAYS for name in DIRECTIONS}
    assert {row.coordinates for row in rows if row.size == 3} == places
    assert all(row.value == 1 and row.n == 40 for row in rows if "consistency" in row.metric)
    report = (tmp_path / "report.md").read_text()
    for text in (
        "No circular shift changes the answer to any of the 40 images",
        "python x.py",
        "| cropped right | 3 px |",
    ):
        assert text in report
    assert "<img" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "shift.png").stat().st_size > 10_000


@pytest.mark.parametrize("shifts", [[0, 1], [16], []])
def test_shifts_stay_inside_the_image(shifts, data, tmp_path):
    with pytest.raises(ValueError, match="shifts: expected pixels from 1 to 15"):
        run_shift(ByPlace(), data, encoding_name="x", output_dir=tmp_path, shifts=shifts)


def test_a_model_without_patches_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match="or a model with patch_size, got Linear"):
        run_shift(nn.Linear(1, 1), data, encoding_name="x", output_dir=tmp_path)


@pytest.mark.parametrize(
    ("overrides", "sizes", "message"),
    [
        (["data=three_cell", "evaluation=shift"], None, "questions about three cells; use evaluation=three_cell"),
        (["data=fake", "evaluation=shift"], [1, 2], "leave sizes out and set evaluation.shifts"),
    ],
)
def test_wrong_requests_fail_before_weights_are_read(overrides, sizes, message, tmp_path):
    config = compose(overrides)
    chosen = create_data(config["data"]["name"])
    with pytest.raises(ValueError, match=message):
        evaluate(config, chosen, tmp_path / "last.ckpt", tmp_path, sizes=sizes)


# -- comparison and README --------------------------------------------------------------------------------------------


def settings(name: str, **options: object) -> str:
    return json.dumps({"evaluation": {"name": "shift"}, "encoding": {"name": name, "options": options}})  # is YAML


def test_comparison_by_question(data, tmp_path):
    for name, modulo in (("blind", 1), ("place", 4)):
        folder = tmp_path / name
        run_shift(ByPlace(modulo), data, encoding_name=name, output_dir=folder, progress=False)
    (tmp_path / "place" / "config.yaml").write_text(settings("place"))  # the other is known by its table
    comparison = compare([tmp_path], tmp_path / "out")
    assert comparison.sizes == [0]
    lines = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    header = next(line for line in lines if line.startswith("| encoding | runs |"))
    assert [cell.strip() for cell in header.strip("| ").split("|")][2:] == list(SHIFT_COLUMNS)
    blind = next(line for line in lines if line.startswith("| blind |"))
    assert blind.count("100.0") >= 4
    assert "on shifted images" in lines[2]
    assert (tmp_path / "out" / "comparison.png").is_file()
    assert len(find_runs([tmp_path / "blind"])) == 1


def test_readme_of_a_recipe(data, tmp_path):
    study, recipes = tmp_path / "study", tmp_path / "recipes"
    for seed in (0, 1):
        folder = study / f"seed{seed}"
        run_shift(ByPlace(1), data, encoding_name="blind", output_dir=folder, progress=False)
        summary = {"recipe": "r", "encoding": "blind", "evaluation": "shift", "seed": seed, "parameters": 1}
        (folder / "summary.json").write_text(json.dumps({**summary, "train_seconds": None, "evaluate_seconds": None}))
    (recipes / "r").mkdir(parents=True)
    (recipes / "r" / "README.md").write_text(f"# r\n\n{BEGIN}\n{END}\n")
    refresh_readmes(study, recipes)
    text = (recipes / "r" / "README.md").read_text()
    assert f"| encoding | {' | '.join(SHIFT_COLUMNS)} |" in text
    assert "100.0 ± 0.0" in text
