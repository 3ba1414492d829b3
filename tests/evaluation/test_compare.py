import csv

import pytest

from mmpos.evaluation import Row, write_results
from mmpos.evaluation.compare import compare, compare_study, comparison_figure, find_runs, main

pytest.importorskip("matplotlib")


def run(folder, encoding, accuracies, config="", **extra):
    """A run folder with accuracies by (size, rule), 100 images each."""
    folder.mkdir(parents=True)
    rows = [Row(encoding, s, c, "accuracy", v, v - 0.1, min(1.0, v + 0.1), 100) for (s, c), v in accuracies.items()]
    rows += [Row(encoding, 28, "index", metric, value) for metric, value in extra.items()]
    write_results(folder / "results.csv", rows)
    if config:
        (folder / "config.yaml").write_text(config)


def table(folder):
    with (folder / "comparison.csv").open(newline="") as file:
        return {(r["label"], int(r["size"]), r["coordinates"], r["metric"]): r for r in csv.DictReader(file)}


@pytest.fixture
def study(tmp_path):
    axes = ((28, "index"), (28, "rescaled"), (56, "index"), (56, "rescaled"))
    for seed, values in enumerate(((0.9, 0.9, 0.2, 0.7), (0.8, 0.8, 0.4, 0.9))):
        run(
            tmp_path / f"mixed/seed{seed}",
            "rope_mixed",
            dict(zip(axes, values, strict=True)),
            f"seed: {seed}\ndata: {{seed: {seed}}}\n",
            time_over_none=1.1,
        )
    run(
        tmp_path / "learned",
        "learned",
        {(28, "interpolated"): 0.95, (56, "interpolated"): 0.6},
        encoding_parameters=4704.0,
    )
    return tmp_path


def test_mean_and_spread_over_seeds(study):
    comparison = compare([study], study)
    rows = table(study)
    row = rows["rope_mixed", 56, "rescaled", "accuracy"]
    assert [float(row[c]) for c in ("mean", "std", "low", "high", "runs")] == pytest.approx(
        [0.8, 0.141421, 0.7, 0.9, 2]
    )
    assert rows["learned", 56, "interpolated", "accuracy"]["std"] == ""
    assert len(rows) == 4 + 1 + 2 + 1
    assert comparison.cells["rope_mixed", 56, "index", "accuracy"].mean == pytest.approx(0.3)
    assert list(next(iter(rows.values()))) == [
        "label",
        "encoding",
        "size",
        "coordinates",
        "metric",
        "mean",
        "std",
        "low",
        "high",
        "runs",
    ]


def test_order_is_by_the_best_rule_at_the_chosen_size(study):
    assert compare([study], study).labels == ["rope_mixed", "learned"]  # at 56 px: 0.8 and 0.6
    assert compare([study], study, size=28).labels == ["learned", "rope_mixed"]  # 0.95 and 0.85
    with pytest.raises(ValueError, match=r"size: no run was tested at 42 px; tested were \[28, 56\]"):
        compare([study], study, size=42)


def test_index_and_rescaled_stand_side_by_side(study):
    compare([study], study)
    lines = [line for line in (study / "comparison.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header = next(row for row in cells if row[0] == "encoding")
    columns = ["index", "rescaled", "other"]
    assert header == ["encoding", "runs", *(f"28 px {c}" for c in columns), *(f"56 px {c}" for c in columns)]
    mixed = next(row for row in cells if row[0] == "rope_mixed")
    assert mixed == ["rope_mixed", "2", "85.0 ± 7.1", "85.0 ± 7.1", "–", "30.0 ± 14.1", "80.0 ± 14.1", "–"]
    learned = next(row for row in cells if row[0] == "learned")
    assert learned[2:5] == ["–", "–", "95.0 [85.0, 100.0] interpolated"]
    assert learned[7] == "60.0 [50.0, 70.0] interpolated"


def test_other_is_the_best_of_the_other_rules(tmp_path):
    run(tmp_path / "a", "x", {(56, "index"): 0.1, (56, "ntk"): 0.3, (56, "yarn"): 0.6})
    compare([tmp_path], tmp_path)
    assert "60.0 [50.0, 70.0] yarn" in (tmp_path / "comparison.md").read_text()


def test_files_and_page(study):
    compare([study], study / "out")
    assert {p.name for p in (study / "out").iterdir()} == {
        "comparison.csv",
        "comparison.md",
        "comparison.html",
        "comparison.png",
    }
    page = (study / "out" / "comparison.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert "x 1.10" in page
    assert "4,704" in page


def test_marks_stay_in_the_row_of_their_group_and_the_legend_on_the_page(tmp_path):
    rules = [
        "index",
        "rescaled",
        "ntk",
        "yarn",
        "linear",
        "interpolated",
        "bicubic",
        "offset",
        "normalised",
        "geometric",
    ]
    run(tmp_path / "a", "rope_mixed", {(28, rule): 0.9 for rule in rules})
    run(tmp_path / "b", "learned", {(28, "geometric"): 0.5})
    run(tmp_path / "c", "none", {(28, "index"): 0.3})
    comparison = compare([tmp_path], tmp_path / "out")
    figure = comparison_figure(comparison)
    lines = [line for line in figure.axes[0].lines if line.get_marker() in "os^DvPX*"]
    marks = [mark for line in lines for mark in zip(line.get_xdata(), line.get_ydata(), strict=True)]
    for accuracy, row in ((90, 0), (50, 1), (30, 2)):
        heights = [y for x, y in marks if x == pytest.approx(accuracy)]
        assert heights, accuracy
        assert all(abs(y - row) < 0.5 for y in heights)
    assert len({round(y, 3) for x, y in marks if x == pytest.approx(90)}) == len(rules)  # beside each other
    assert next(y for x, y in marks if x == pytest.approx(30)) == 2  # a rule alone sits on its row
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width


def test_settings_that_differ_become_part_of_the_label(tmp_path):
    for theta in (10, 100):
        for seed in (0, 1):
            config = (
                f"seed: {seed}\nencoding: {{name: rope_axial, options: {{theta: {theta}}}}}\noptimizer: {{lr: 0.1}}\n"
            )
            run(tmp_path / f"{theta}_{seed}", "rope_axial", {(28, "index"): theta / 1000 + seed / 10}, config)
    comparison = compare([tmp_path], tmp_path)
    assert comparison.labels == ["rope_axial encoding.options.theta=100", "rope_axial encoding.options.theta=10"]
    cell = comparison.cells["rope_axial encoding.options.theta=10", 28, "index", "accuracy"]
    assert cell.values == pytest.approx((0.01, 0.11))


def test_encodings_may_differ_in_their_options(tmp_path):
    run(tmp_path / "a", "rope_axial", {(28, "index"): 0.5}, "encoding: {name: rope_axial, options: {theta: 100}}\n")
    run(tmp_path / "b", "sincos", {(28, "index"): 0.4}, "encoding: {name: sincos, options: {base: 10000}}\n")
    assert compare([tmp_path], tmp_path).labels == ["rope_axial", "sincos"]


def test_a_folder_given_twice_counts_once(study):
    assert len(find_runs([study, study / "mixed"])) == 3


def test_nothing_to_compare(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        find_runs([tmp_path / "gone"])
    with pytest.raises(ValueError, match=r"no results\.csv with numbers"):
        find_runs([tmp_path])


def test_text_and_command_line(study, capsys):
    text = compare_study(study)
    assert text.splitlines()[1].split()[:3] == ["rope_mixed", "2", "85.0"]
    main([str(study), "--size", "28", "--output", str(study / "cli")])
    assert "2 groups" in capsys.readouterr().out
    assert (study / "cli" / "comparison.html").is_file()
