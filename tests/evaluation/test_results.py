import math

import pytest

from mmpos.evaluation import COLUMNS, Row, read_results, wilson_interval, write_results


@pytest.mark.parametrize(
    ("successes", "n", "expected"),
    [  # the worked example of Newcombe (1998), table I, method 3, and limits that are known in closed form
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilson_against_published_values(successes, n, expected):
    assert wilson_interval(successes, n) == pytest.approx(expected, abs=5e-5)


def test_wilson_is_the_inverse_of_the_score_test():
    z = 1.959963984540054
    for successes, n in ((3, 17), (50, 100), (999, 1000)):
        for end in wilson_interval(successes, n):
            assert abs(successes / n - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n), rel=1e-9)


def test_wilson_is_symmetric_and_stays_inside():
    low, high = wilson_interval(7, 40)
    assert wilson_interval(33, 40) == pytest.approx((1 - high, 1 - low), rel=1e-12)
    assert wilson_interval(0, 9)[0] == 0.0
    assert wilson_interval(9, 9)[1] == 1.0


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 4), (5, 4)])
def test_wilson_refuses_what_is_no_proportion(successes, n):
    with pytest.raises(ValueError, match="successes, n"):
        wilson_interval(successes, n)


def test_table_comes_back_as_written(tmp_path):
    rows = [
        Row("rope_mixed", 28, "index", "accuracy", 0.97, 0.95, 0.98, 1000),
        Row("rope_mixed", 28, "index", "images_per_second", 512.25, n=1000),
        Row("a+b", 42, "rescaled", "encoding_parameters", 576.0),
    ]
    path = tmp_path / "results.csv"
    write_results(path, rows)
    assert read_results(path) == rows
    lines = path.read_text().splitlines()
    assert lines[0] == "encoding,size,coordinates,metric,value,ci_low,ci_high,n" == ",".join(COLUMNS)
    assert lines[2] == "rope_mixed,28,index,images_per_second,512.25,,,1000"
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.csv"]


def test_another_table_is_refused(tmp_path):
    (tmp_path / "results.csv").write_text("encoding,size,value\nx,1,2\n")
    with pytest.raises(ValueError, match="expected the columns encoding,size,coordinates"):
        read_results(tmp_path / "results.csv")
