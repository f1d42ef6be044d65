"""`titans study forecasting`: errors over every window, the means over horizons, and a model of each kind."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.data.test_series import write
from titans_jax import cli
from titans_jax.config import MemoryConfig
from titans_jax.models.heads import DLinear
from titans_jax.studies import forecasting
from titans_jax.studies.forecasting import PUBLISHED, Forecast, ForecastingOptions, ForecastingStudy
from titans_jax.studies.models import small_model
from titans_jax.training.run import init_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of data with a table of 120 rows and two channels."""
    write(tmp_path / "own.csv", 120)
    monkeypatch.setattr(forecasting, "FILES", {"own": "own.csv"})
    return tmp_path


def task(folder, **fields):
    return Forecast(data="own", path=str(folder / "own.csv"), look_back=16, horizon=3, steps=2, batch_size=3, **fields)


def test_errors_are_over_every_window(folder):
    """22 test windows in batches of 12: against all of them at once."""
    one = task(folder)
    model = one.fit_to(small_model("attention", "lmm", 8, 1, 4, MemoryConfig()))
    graphdef, params = init_model(model, 0)
    windows = one.windows("test")
    assert windows.count == 22
    values, ahead = windows.take(np.arange(22))
    error = np.asarray(nnx.merge(graphdef, params)(jnp.asarray(values)), np.float64) - ahead
    found = one.errors(graphdef, params, "test")
    assert found == {"mse": pytest.approx(np.mean(error**2)), "mae": pytest.approx(np.mean(np.abs(error)))}
    repeated = np.repeat(values[:, -1:], 3, axis=1) - ahead
    _, numbers = one.baseline()
    assert numbers == {"mse": pytest.approx(np.mean(repeated**2)), "mae": pytest.approx(np.mean(np.abs(repeated)))}


def test_an_epoch_reads_every_training_window_once(folder):
    one = dataclasses.replace(task(folder), batch_size=6)
    assert one.windows("train").count == 66 and one.epoch == 11
    batches = one.batches(1)
    rows = np.concatenate([next(batches)["tokens"] for _ in range(11)])
    assert len(np.unique(rows[:, 0, 0])) == 66


def test_dlinear_by_hand():
    """The moving average repeats the ends; both matrices start as means."""
    config = dataclasses.replace(small_model("attention", "lmm", 8, 1, 4, MemoryConfig()))
    model = DLinear(config, look_back=30, horizon=4, rngs=nnx.Rngs(0))
    values = np.random.default_rng(0).normal(size=(2, 30, 3))
    padded = np.concatenate([np.repeat(values[:, :1], 12, 1), values, np.repeat(values[:, -1:], 12, 1)], axis=1)
    trend = np.stack([padded[:, t : t + 25].mean(axis=1) for t in range(30)], axis=1)
    trend_matrix, rest_matrix = (np.random.default_rng(n).normal(size=(30, 4)) for n in (1, 2))
    model.trend.kernel[...], model.rest.kernel[...] = (jnp.asarray(m, jnp.float32) for m in (trend_matrix, rest_matrix))
    expected = np.einsum("bti,th->bhi", trend, trend_matrix) + np.einsum("bti,th->bhi", values - trend, rest_matrix)
    np.testing.assert_allclose(model(jnp.asarray(values, jnp.float32)), expected, rtol=1e-3, atol=1e-4)


def test_end_to_end(folder):
    arguments = """--models gated_deltanet dlinear --data own --look_backs 16 --horizons 2 4 --epochs 1 --batch_size 22
        --seeds 1 --dim 8 --head_dim 4 --depth 1""".split()
    out = folder / "out"
    assert cli.main(["study", "forecasting", *arguments, "--folder", str(folder), "--output", str(out)]) == 0
    saved = json.loads((out / "forecasting.json").read_text())
    rows = {(row["labels"]["model"], row["labels"]["horizon"]): row["numbers"] for row in saved["rows"]}
    assert len(rows) == 6 and (out / "forecasting.png").exists()
    for model in ("gated_deltanet", "dlinear"):
        mean = (rows[model, 2]["mse"]["mean"] + rows[model, 4]["mse"]["mean"]) / 2
        assert rows[model, "mean"]["mse"]["mean"] == pytest.approx(mean)
    assert [baseline["what"] for baseline in saved["baselines"]] == [
        "the last value repeated, own 16/2", "the last value repeated, own 16/4"
    ]  # fmt: skip


def test_published_figures_stand_beside_the_same_protocol_only():
    study, options = ForecastingStudy(), ForecastingOptions()
    printed = dict(study.published(options))
    assert len(printed) == 16 and printed["Titans LMM as printed, ETTh1 96, mean"] == {"mse": 0.420, "mae": 0.421}
    assert [PUBLISHED["Titans LMM"][name] for name in ("ETTm1", "ETTh2", "Weather")] == [
        (0.358, 0.387), (0.336, 0.382), (0.231, 0.265)
    ]  # fmt: skip
    for other in ({"horizons": (96,)}, {"look_backs": (336,)}):
        assert study.published(dataclasses.replace(options, **other)) == []


def test_notes_say_how_training_differs():
    said = ForecastingStudy().notes(ForecastingOptions())
    for words in ("Adam, 0.001 (DLinear 0.005)", "clipped at 1 ", "not an exact reproduction"):
        assert words in said


def test_a_mistake_ends_in_one_sentence(capsys, tmp_path):
    for arguments, message in (
        ("--data ETTh3", "data has 'ETTh3'; use ETTh1, "),
        ("--folder /nowhere", "is '/nowhere/ett/ETTh1.csv', which is no file"),
    ):
        assert cli.main(["study", "forecasting", *arguments.split(), "--output", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
