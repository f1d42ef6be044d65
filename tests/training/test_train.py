"""The loop: what a run writes, and that stopping anywhere and going on changes nothing."""

import dataclasses
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from tests.training.tiny import JSON_SOURCES, MODEL, tiny_config
from titans_jax.config import Config, ConfigError, MeshConfig, OptimizerConfig, from_saved, step_size_bound
from titans_jax.data import DataError
from titans_jax.evaluation import evaluate_run
from titans_jax.models import without_writes
from titans_jax.training import load_run, train
from titans_jax.training.checkpoint import CheckpointError
from titans_jax.training.diagnostics import MEANS
from titans_jax.training.lock import RunInUse, RunLock
from titans_jax.training.loop import Trainer
from titans_jax.training.metrics import read_metrics
from titans_jax.training.report import TrainingStopped

TIMING = {"goodput", "tokens_per_second", "flops_per_second", "share_of_peak_flops"}


def run(config: Config, run_dir: Path) -> str:
    """Train; returns what was said."""
    console = Console(file=io.StringIO(), width=200)
    train(config, run_dir, console)
    return console.file.getvalue()


def numbers(run_dir: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    return [{k: v for k, v in line.items() if k not in TIMING} for line in read_metrics(run_dir)]


def params(run_dir: Path) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(load_run(run_dir).params)]


def assert_same_run(run_dir: Path, other: Path) -> None:
    assert numbers(run_dir) == numbers(other)
    for ours, theirs in zip(params(run_dir), params(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    run(tiny_config(), run_dir)
    return run_dir


def test_run_folder(uninterrupted):
    train_lines = [line for line in read_metrics(uninterrupted) if line["kind"] == "train"]
    validation = [line for line in read_metrics(uninterrupted) if line["kind"] == "validation"]
    assert [line["step"] for line in train_lines] == list(range(1, 13))
    assert [line["step"] for line in validation] == [6, 12]
    # An untrained model knows nothing: ln(vocab) nats. Twelve steps teach it that bytes are not uniform.
    assert abs(train_lines[0]["loss"] - math.log(MODEL.vocab_size)) < 0.2
    assert validation[-1]["loss"] < validation[0]["loss"] < train_lines[0]["loss"]
    assert validation[-1]["bits_per_byte"] == pytest.approx(validation[-1]["loss"] / math.log(2), rel=0.01)
    assert from_saved(json.loads((uninterrupted / "config.json").read_text())) == tiny_config()
    assert not any("memory_gain" in line for line in validation) and not (uninterrupted / "memory.png").exists()
    assert (uninterrupted / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (uninterrupted / "sample.txt").read_text().split("\n", 1)[1].startswith("def ")
    assert any((uninterrupted / "tensorboard").iterdir())


def test_a_run_goes_on_elsewhere_with_other_fields_and_other_text(uninterrupted, tmp_path):
    """It is finished, so nothing is trained; another text must be accepted, and what changed is said."""
    run_dir, texts = (
        shutil.copytree(uninterrupted, tmp_path / "moved"),
        shutil.copytree(JSON_SOURCES, tmp_path / "text"),
    )
    config = tiny_config(accept_changed_data=False)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=str(texts)),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-4),
    )
    with (texts / "decoder.py").open("a") as file:
        file.write("# another line\n")
    with pytest.raises(DataError, match="the .* text of data.path=.* is not the one that the checkpoint was trained"):
        run(config, run_dir)
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, accept_changed_data=True))
    said = run(config, run_dir)
    assert "finished step 12" in said and "changed since then: optimizer.learning_rate is 0.0001, was 0.003\n" in said
    assert numbers(run_dir) == numbers(uninterrupted)
    assert not (run_dir / "lock.json").exists()


def test_a_second_training_in_the_folder_is_refused(uninterrupted):
    files = sorted(uninterrupted.rglob("*"))
    with RunLock(uninterrupted):
        with pytest.raises(RunInUse, match=f"process {os.getpid()} on .* trains in {uninterrupted} since"):
            run(tiny_config(), uninterrupted)
    assert sorted(uninterrupted.rglob("*")) == files


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [4, 6, 9])
def test_stop_and_go_on(uninterrupted, tmp_path, monkeypatch, stop_at):
    """4 is a checkpoint's step, 6 an evaluation's (which is then cut short), 9 neither."""
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_stopping", lambda self: self.step == stop_at)
        assert f"stopped and saved at step {stop_at}" in run(tiny_config(), run_dir)
    assert f"going on from the checkpoint of step {stop_at}" in run(tiny_config(), run_dir)
    assert_same_run(run_dir, uninterrupted)


@pytest.mark.slow
def test_an_evaluation_that_is_stopped_behind_its_loss_is_done_again(uninterrupted, tmp_path, monkeypatch):
    """Or the sample and the tasks of its step would be lost."""
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_stopping", lambda self: self.stop.requested() or hasattr(self, "asked"))
        patch.setattr(Trainer, "_evaluate_tasks", lambda self: setattr(self, "asked", True))
        said = run(tiny_config(), run_dir)
    assert "step 6  validation loss" in said and "stopped and saved at step 6" in said
    assert [line for line in read_metrics(run_dir) if line["kind"] == "validation"] == []
    run(tiny_config(), run_dir)
    assert_same_run(run_dir, uninterrupted)


class Killed(Exception):
    """Stands for a process that is gone."""


def kill_at(monkeypatch, step: int) -> None:
    due = Trainer._due

    def killing(self, every):
        if self.step == step:
            self.report.flush()
            raise Killed
        return due(self, every)

    monkeypatch.setattr(Trainer, "_due", killing)


def killed_run(run_dir: Path, monkeypatch, step: int) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            run(tiny_config(), run_dir)


@pytest.mark.slow
def test_killed_run_repeats_steps_without_repeating_lines(uninterrupted, tmp_path, monkeypatch):
    killed_run(tmp_path / "run", monkeypatch, 7)
    assert numbers(tmp_path / "run")[-1]["step"] == 7
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # the line that was being written
    assert "going on from the checkpoint of step 4" in run(tiny_config(), tmp_path / "run")
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_damaged_and_unfinished_checkpoints(uninterrupted, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    killed_run(run_dir, monkeypatch, 9)
    checkpoints = run_dir / "checkpoints"
    for file in (checkpoints / "8" / "params").rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    (checkpoints / "9.orbax-checkpoint-tmp-123").mkdir()
    said = run(tiny_config(), run_dir)
    assert "the checkpoint of step 9 was not finished; using the one of step 8" in said
    assert "the checkpoint of step 8 cannot be read" in said and "; using the one of step 4" in said
    assert "going on from the checkpoint of step 4" in said
    assert (run_dir / "checkpoints_set_aside" / "8").is_dir()  # set aside, not deleted
    assert_same_run(run_dir, uninterrupted)


@pytest.mark.slow
def test_no_readable_checkpoint(tmp_path):
    run(tiny_config(steps=4), tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / "4" / "params").rglob("*"):
        if file.is_file():
            os.truncate(file, 0)
    with pytest.raises(CheckpointError, match="none of the checkpoints in .* can be read; start in another run folder"):
        run(tiny_config(steps=4), tmp_path / "run")
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        load_run(tmp_path / "run", say=lambda sentence: None)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": dataclasses.replace(MODEL, hidden_dim=48)}, r"model.hidden_dim is 48, but .* trained with None"),
        ({"data": dataclasses.replace(tiny_config().data, seed=1)}, r"data.seed is 1, but .* trained with 0; use 0,"),
    ],
)
def test_checkpoint_of_another_run_is_refused(uninterrupted, change, message):
    files = sorted(uninterrupted.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        run(dataclasses.replace(tiny_config(), **change), uninterrupted)
    assert sorted(uninterrupted.rglob("*")) == files


def test_wrong_input_writes_nothing(tmp_path):
    config = tiny_config()
    small = dataclasses.replace(config, model=dataclasses.replace(MODEL, vocab_size=256))
    with pytest.raises(ConfigError, match="model.vocab_size is 256, but the tokenizer byte has 257 tokens; use .* 320"):
        run(small, tmp_path / "run")
    with pytest.raises(DataError, match="does not exist"):
        run(dataclasses.replace(config, data=dataclasses.replace(config.data, path="/nowhere")), tmp_path / "run")
    devices = 3 * jax.device_count()
    with pytest.raises(ConfigError, match=f"mesh data={devices}, .* does not fit"):
        run(dataclasses.replace(config, mesh=MeshConfig(data=devices)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_divergence_stops_and_keeps_the_last_checkpoint(tmp_path):
    config = tiny_config(steps=12, checkpoint_every=1)
    # A step this large makes weights whose products overflow: the next loss is not finite.
    config = dataclasses.replace(config, optimizer=OptimizerConfig(learning_rate=1e30, warmup_steps=0))
    with pytest.raises(TrainingStopped, match="the loss of step 2 is nan, so the step was not applied .*; try a"):
        run(config, tmp_path / "run")
    assert load_run(tmp_path / "run").step == 1
    assert all(np.isfinite(x).all() for x in params(tmp_path / "run"))
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, evaluate_every=1))
    with pytest.raises(TrainingStopped, match="the validation loss of step 1 is nan, .*; there is no checkpoint to go"):
        run(config, tmp_path / "evaluated")
    assert not any((tmp_path / "evaluated" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_model_with_memory_reports_on_it(tmp_path):
    model = dataclasses.replace(MODEL, pattern=("lmm",), depth=1)
    said = run(tiny_config(model, steps=6, evaluate_every=3, diagnostics_every=2), tmp_path / "run")
    lines = list(read_metrics(tmp_path / "run"))
    *_, line = reports = [line for line in lines if line["kind"] == "memory"]
    assert [line["step"] for line in reports] == [2, 4, 6]
    for name in (
        "retention", "momentum", "step_size", "inner_loss", "explained_share", "update_norm", "weight_norm"
    ):  # fmt: skip
        assert len(line[name]) == 1 and np.isfinite(line[name][0])
    gains = [line["memory_gain"] for line in lines if line["kind"] == "validation"]
    assert len(gains) == 2 and all(np.isfinite(gains)) and any(gains)
    assert f"memory gain: {gains[0]:.4f} bits per byte" in said and "explained share of the memories: " in said
    assert all(f"{words} " in said.split("means of the memories: ")[1] for words in MEANS.values())
    assert f"gain {gains[0]:.4f}" in next(line for line in said.splitlines() if line[9:].startswith("step 4/"))
    unwritten = dataclasses.replace(load := load_run(tmp_path / "run"), graphdef=without_writes(load.graphdef))
    losses = [evaluate_run(some, batches=2).bits_per_byte for some in (load, unwritten)]
    assert losses[1] - losses[0] == pytest.approx(gains[-1], abs=1e-4)
    assert (tmp_path / "run" / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert 0 < line["retention"][0] < 1 and 0 < line["step_size"][0] < step_size_bound(model)


def command(run_dir: Path, *overrides: str) -> list[str]:
    """`titans train` on the tiny experiment, in a process of its own."""
    file = run_dir.with_suffix(".py")
    file.write_text("from tests.training.tiny import tiny_config\nconfig = tiny_config()\n")
    return [sys.executable, "-m", "titans_jax.cli", "train", str(file), "--training.run_dir", str(run_dir), *overrides]


def environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


@pytest.mark.processes
@pytest.mark.slow
def test_sigterm_saves_and_exits_0(tmp_path):
    long = command(tmp_path / "run", "--training.steps", "100000", "--training.checkpoint_every", "100000")
    process = subprocess.Popen(long, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line[9:].startswith("step 2/"):
            process.send_signal(signal.SIGTERM)
            break
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "stopped and saved at step" in rest
    assert load_run(tmp_path / "run").step >= 2


@pytest.mark.processes
@pytest.mark.slow
def test_full_disk_ends_in_a_sentence_and_loses_nothing(tmp_path):
    """A limit on the size of files stands for the full disk: writes fail in the same places."""
    short = tiny_config(steps=4, sample_tokens=0)
    run(short, tmp_path / "run")
    limited = [
        "sh", "-c", 'ulimit -f 32 && exec "$@"', "sh", *command(tmp_path / "run", "--training.evaluate_every", "1000")
    ]  # fmt: skip
    own_cache = environment() | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(limited, env=own_cache, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert last.startswith("titans: the checkpoint of step 8 could not be written") and "(File too large)" in last
    assert "the checkpoint of step 4 is whole; free some space and run the same command again" in last
    assert "going on from the checkpoint of step 4" in run(tiny_config(), tmp_path / "run")
