"""What is around a training: a start from other weights, a dry run, a comparison of runs, where scalars go."""

import csv
import dataclasses
import io
import json
import sys
import types

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

from tests.training.tiny import MODEL, tiny_config
from titans_jax import cli, sharding
from titans_jax.config import ConfigError, OptimizerConfig
from titans_jax.training import metrics
from titans_jax.training.metrics import MetricsWriter, read_metrics
from titans_jax.training.optimizer import groups, learning_rate_schedule, make_optimizer, muon_dimensions
from titans_jax.training.run import abstract_model, init_model, initial_weights

SMALL = (
    "from tests.training.tiny import tiny_config\nconfig = tiny_config(steps=2, sample_tokens=0, evaluate_every=2)\n"
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


def test_a_trapezoid_is_flat_and_comes_down_at_the_end():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, final_learning_rate_ratio=0.1, schedule="trapezoid")
    rates = [float(learning_rate_schedule(config, 110)(step)) for step in range(111)]
    assert rates[0] == pytest.approx(0.1) and rates[10:91] == [1.0] * 81
    assert rates[100] == pytest.approx(0.55) and rates[110] == pytest.approx(0.1)


@pytest.mark.parametrize("name, middle, last", [("linear", 0.55, 0.1), ("constant", 1.0, 1.0), ("cosine", 0.55, 0.1)])
def test_other_schedules(name, middle, last):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, final_learning_rate_ratio=0.1, schedule=name)
    schedule = learning_rate_schedule(config, 100)
    assert float(schedule(50)) == pytest.approx(middle) and float(schedule(100)) == pytest.approx(last)


def test_muon_makes_steps_of_matrices_orthogonal():
    """Of two stacked matrices each; of the head and of norms it is AdamW, sign-like at the first step."""
    params = {
        "cycles": {
            "query": {"kernel": jax.random.normal(jax.random.key(0), (2, 8, 8))},
            "norm": {"scale": np.ones((2, 8))},
        },
        "head": {"kernel": jax.random.normal(jax.random.key(1), (8, 16))},
    }
    params = jax.tree.map(lambda x: jax.numpy.asarray(x, np.float32), params)
    config = OptimizerConfig(name="muon", learning_rate=1.0, warmup_steps=0, weight_decay=0.0, clip_norm=1e9)
    optimizer = make_optimizer(config, 10)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, _ = optimizer.update(params, optimizer.init(params), params)
    spectra = np.linalg.svd(np.asarray(updates["cycles"]["query"]["kernel"]), compute_uv=False)
    # Newton-Schulz brings singular values near each other, not to one number.
    assert (spectra.max(axis=1) / spectra.min(axis=1) < 2.5).all()
    before = np.linalg.svd(np.asarray(params["cycles"]["query"]["kernel"]), compute_uv=False)
    assert (before.max(axis=1) / before.min(axis=1) > 5).all()
    for adam in (updates["head"]["kernel"], updates["cycles"]["norm"]["scale"]):
        np.testing.assert_allclose(np.abs(adam), np.abs(adam).max(), rtol=1e-3)


def test_with_muon_only_matrices_decay():
    """Without gradients, a step multiplies matrices, the head among them, by 1 - 0.1 x 0.5, and leaves all else."""
    ones = {name: jax.numpy.ones((4, 4)) for name in ("kernel", "scale", "embedding", "bias")}
    params = {"cycles": {"query": ones, "convolution": {"kernel": jax.numpy.ones((4, 4))}}, "head": ones}
    config = OptimizerConfig(name="muon", learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    optimizer = make_optimizer(config, 10)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(jax.tree.map(jax.numpy.zeros_like, params), optimizer.init(params), params)
    new = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(optax.apply_updates(params, updates))}
    for name, x in new.items():
        matrix = "'kernel'" in name and "convolution" not in name
        np.testing.assert_allclose(x, 0.95 if matrix else 1.0, rtol=1e-6, err_msg=name)


def test_muon_takes_every_matrix_of_a_model_but_the_head():
    params = abstract_model(MODEL)[1]
    found = jax.tree_util.tree_leaves_with_path(
        muon_dimensions(params), is_leaf=lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)
    )
    names = {jax.tree_util.keystr(path, simple=True, separator=".") for path, leaf in found if leaf is not None}
    assert "cycles.blocks.0.attention.query.kernel" in names and "cycles.blocks.0.feed_forward.down.kernel" in names
    assert not any("embedding" in name or "scale" in name or name.startswith("head") for name in names)


def test_every_parameter_is_in_one_group_of_the_optimizer():
    """Muon's are the ones that it has axes for; what is decayed does not depend on the rule."""
    params = abstract_model(MODEL)[1]
    muon, adamw = (groups(OptimizerConfig(name=name), params) for name in ("muon", "adamw"))
    is_axes = lambda x: x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)  # noqa: E731
    size = lambda axes, leaf: leaf.size if axes else 0  # noqa: E731
    of_muon = jax.tree.map(size, muon_dimensions(params), params, is_leaf=is_axes)
    assert muon["muon, decayed"] == sum(jax.tree.leaves(of_muon)) and "muon, not decayed" not in muon
    assert sum(muon.values()) == sum(adamw.values()) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert adamw["adamw, not decayed"] == muon["adamw, not decayed"] > 0


def test_where_scalars_go(tmp_path, monkeypatch):
    class Run:
        id, lines, done = "abc", [], False

        def log(self, values, step):
            self.lines.append((step, values))

        def finish(self):
            Run.done = True

    started = []
    wandb = types.SimpleNamespace(init=lambda **fields: started.append(fields) or Run())
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for start in (0, 1):
        with MetricsWriter(tmp_path, start, "wandb") as writer:
            writer.write("memory", start + 1, {"loss": 1.5, "share": [0.5, 0.25]})
    assert [fields["id"] for fields in started] == [None, "abc"] and started[1]["resume"] == "allow" and Run.done
    assert Run.lines[0] == (1, {"memory/loss": 1.5, "memory/share/0": 0.5, "memory/share/1": 0.25})
    with MetricsWriter(tmp_path, 2, "none") as writer:
        writer.write("train", 3, {"loss": 1.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    assert not (tmp_path / "tensorboard").exists()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="training.logger is wandb, which is not installed"):
        metrics.import_wandb()


def test_runs_are_compared(tmp_path, capsys):
    from titans_jax.config import to_dict

    for name, steps, bits in (("one", 12, 2.5), ("two", 20, 2.25)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(to_dict(tiny_config(steps=steps))))
        lines = [
            {"kind": "validation", "step": step, "bits_per_byte": bits + 1 / step, "loss": 1.0} for step in (5, 10)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "two" / "config.json.tmp").write_text("{")
    assert cli.main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "one" in out and "two: training.steps=20\n" in out
    with (tmp_path / "runs.csv").open() as opened:
        rows = list(csv.DictReader(opened))
    assert [row["run"] for row in rows] == ["one", "two"] and rows[1]["differs"] == "training.steps=20"
    assert float(rows[0]["bits_per_byte"]) == 2.6 and int(rows[0]["parameters"]) > 10_000
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["runs", str(tmp_path / "one" / "nothing")]) == 2
    assert "below which there is no run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_writes_nothing(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    ran = []
    monkeypatch.setattr(sharding, "use_cores", ran.append)  # as many devices as the test has
    assert cli.main(["train", str(file), "--dry-run", "--optimizer.ema", "0.9"]) == 0
    assert ran == [tiny_config().data.batch_size]  # those of the training
    out = capsys.readouterr().out
    for line in (
        "training.steps",
        "parameters  ",
        " adamw, not decayed",
        "text  ",
        "2 steps of 256: 512",
        "memory of a step",
        "tokens/s; all",
    ):
        assert line in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_training_begins_with_the_weights_of_another_run(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from titans_jax.training import load_run, train

    said = io.StringIO()

    def metrics_of(name, **fields):
        config = tiny_config(steps=2, sample_tokens=0, evaluate_every=2, run_dir=str(tmp_path / name), **fields)
        train(config, tmp_path / name, Console(file=said, width=1000))
        return [line for line in read_metrics(tmp_path / name) if line["kind"] == "train"]

    first = metrics_of("first")
    second = metrics_of("second", init_from=str(tmp_path / "first"), z_loss=1e-3)
    assert said.getvalue().count(f"beginning with the weights of {tmp_path / 'first'}, step 2") == 1
    assert said.getvalue().count("not as there: ") == said.getvalue().count("training.z_loss is 0.001, was 0.0") == 1
    assert "z_loss" not in first[0] and all(line["z_loss"] > 0 for line in second)
    assert second[0]["loss"] < first[0]["loss"] and second[0]["loss"] == pytest.approx(first[1]["loss"], abs=0.3)
    third = load_run(tmp_path / "first")
    nowhere = tiny_config(init_from=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="^training.init_from: .*/nowhere is not a run folder: it does not exist"):
        initial_weights(nowhere)
    config = tiny_config(init_from=str(tmp_path / "first"))
    for ours, theirs in zip(
        jax.tree.leaves(initial_weights(config).params), jax.tree.leaves(third.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden_dim=192))
    with pytest.raises(ConfigError, match="whose cycles.blocks.0.feed_forward.* is .*, and this model's is .*; use"):
        initial_weights(wider)
    assert jax.tree.structure(init_model(config.model, 0)[1]) == jax.tree.structure(initial_weights(config).params)
