"""A run that gives a memory to another run's model and trains nothing else, stopped and gone on with."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from rich.console import Console

from tests.training.tiny import MODEL, tiny_config
from titans_jax.config import ConfigError
from titans_jax.inference.reading import named_leaves
from titans_jax.models.retrofit import FIRST_SHARE, Retrofit
from titans_jax.training import load_run, train
from titans_jax.training.metrics import read_metrics

WINDOW, RETROFIT = (dataclasses.replace(MODEL, pattern=(kind,)) for kind in ("window", "retrofit"))


def config(steps, before, **fields):
    plain = tiny_config(RETROFIT, steps=steps, sample_tokens=0, checkpoint_every=2, init_from=str(before))
    return dataclasses.replace(plain, optimizer=dataclasses.replace(plain.optimizer, **fields))


@pytest.mark.slow
def test_the_memory_of_a_finished_run_is_trained_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before, after, said = tmp_path / "before", tmp_path / "after", io.StringIO()
    train(tiny_config(WINDOW, steps=2, sample_tokens=0), before, Console(quiet=True))
    for steps in (2, 4):  # the second goes on from the first's checkpoint
        train(config(steps, before, train_only=Retrofit.added), after, Console(file=said, width=1000))
    assert said.getvalue().count("not there, and drawn: ") == 1 and "not trained" not in said.getvalue()
    runs = [load_run(folder) for folder in (before, after)]
    assert [run.step for run in runs] == [2, 4]
    first, now = (named_leaves(jax.tree.map(np.asarray, run.params)) for run in runs)
    for name, value in first.items():
        np.testing.assert_array_equal(now[name], value)
    assert (now["cycles.blocks.0.share"] != np.float32(FIRST_SHARE)).all()
    losses = [line["loss"] for line in read_metrics(after) if line["kind"] == "train"]
    assert len(losses) == 4 and all(np.isfinite(losses))
    with pytest.raises(ConfigError, match=r"optimizer.train_only is \(\), but the checkpoint in .* was trained with"):
        train(config(6, before), after, Console(quiet=True))
