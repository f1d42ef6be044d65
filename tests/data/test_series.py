"""Tables of time series: borders, scaling and windows as the field counts them."""

from pathlib import Path

import numpy as np
import pytest

from titans_jax.data import DataError
from titans_jax.data.series import load_series

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def write(file, rows, channels=2, seed=0):
    values = np.random.default_rng(seed).normal(3, 5, size=(rows, channels))
    lines = [",".join(["date", *(f"c{n}" for n in range(channels))])]
    lines += [",".join(["2020-01-01 00:00:00", *map(repr, map(float, row))]) for row in values]
    file.write_text("\n".join(lines) + "\n")
    return values


def counts(series, look_back, horizon):
    return [series.windows(split, look_back, horizon).count for split in ("train", "validation", "test")]


@pytest.mark.parametrize(
    "name, file, expected",
    [
        ("ETTh1", "ett/ETTh1.csv.gz", [8449, 2785, 2785]),
        ("ETTh2", "ett/ETTh2.csv.gz", [8449, 2785, 2785]),
        ("ETTm1", "ett/ETTm1.csv.gz", [34369, 11425, 11425]),
        ("Weather", "weather/weather.csv.gz", [36696, 5175, 10444]),
    ],
)
def test_windows_of_the_published_tables(name, file, expected):
    if not (SHARED / file).is_file():
        pytest.skip("the shared data is not here")
    series = load_series(name, str(SHARED / file))
    assert counts(series, 96, 96) == expected
    first, end = series.borders["train"]
    np.testing.assert_allclose(series.values[first:end].mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(series.values[first:end].std(axis=0), 1, atol=1e-3)


def test_borders_and_scaling_of_a_table_of_one_s_own(tmp_path):
    """100 rows: 70 to train, 20 to test, 10 to validate; the scale is of the first 70."""
    values = write(tmp_path / "own.csv", 100)
    series = load_series("own", str(tmp_path / "own.csv"))
    assert series.borders == {"train": (0, 70), "validation": (70, 80), "test": (80, 100)}
    expected = (values - values[:70].mean(axis=0)) / values[:70].std(axis=0)
    np.testing.assert_allclose(series.values, expected, rtol=1e-5, atol=1e-6)
    assert counts(series, 8, 4) == [70 - 12 + 1, 10 - 4 + 1, 20 - 4 + 1]
    test = series.windows("test", 8, 4)
    read, ahead = test.take(np.array([0, test.count - 1]))
    assert read.shape == (2, 8, 2) and ahead.shape == (2, 4, 2)
    np.testing.assert_array_equal(read[0], series.values[72:80])
    np.testing.assert_array_equal(ahead[0], series.values[80:84])
    np.testing.assert_array_equal(ahead[1], series.values[96:100])


def test_borders_of_ett_are_months(tmp_path):
    write(tmp_path / "h.csv", 20 * 720 + 5, channels=1)
    assert load_series("ETTh9", str(tmp_path / "h.csv")).borders == {
        "train": (0, 8640), "validation": (8640, 11520), "test": (11520, 14400)
    }  # fmt: skip
    with pytest.raises(DataError, match="ETTm9 has 14,405 rows; use a whole one, of at least 57,600"):
        load_series("ETTm9", str(tmp_path / "h.csv"))


def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(DataError, match="which is no file; give the folder of ETTh1 with --folder"):
        load_series("ETTh1", str(tmp_path / "none.csv"))
    (tmp_path / "text.csv").write_text("date,a\n2020,word\n")
    with pytest.raises(DataError, match="which is no table of a date and numbers"):
        load_series("text", str(tmp_path / "text.csv"))
    write(tmp_path / "short.csv", 20)
    with pytest.raises(DataError, match="horizon is 9 and look_back 8; use at most 4 for horizon"):
        load_series("short", str(tmp_path / "short.csv")).windows("test", 8, 9)
    with pytest.raises(DataError, match="look_back is 20; use at most 13, fewer than the rows that short has to train"):
        load_series("short", str(tmp_path / "short.csv")).windows("train", 20, 1)
    (tmp_path / "one.csv").write_text("date\n2020\n")
    with pytest.raises(DataError, match="which is no table .*: its header has one column"):
        load_series("one", str(tmp_path / "one.csv"))
    (tmp_path / "nan.csv").write_text("date,a\n2020,1\n2021,nan\n")
    with pytest.raises(DataError, match="row 3 has a value that is not finite"):
        load_series("nan", str(tmp_path / "nan.csv"))


def test_a_number_sign_begins_no_comment(tmp_path):
    (tmp_path / "sign.csv").write_text("date,a#x,b\n#1,1,2\n" + "2020,3,4\n" * 9)
    assert load_series("sign", str(tmp_path / "sign.csv")).values.shape == (10, 2)
