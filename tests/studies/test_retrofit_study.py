"""`titans study retrofit`: what is compared, from which weights, and one pair of models from end to end."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny_studies import LANGUAGE

from titans_jax import cli
from titans_jax.models.retrofit import Retrofit
from titans_jax.studies import STUDIES, retrofit, run
from titans_jax.studies.retrofit import RetrofitOptions, RetrofitStudy, Retrofitted
from titans_jax.training.run import count_params, init_model

FIELDS = {field.name: getattr(LANGUAGE, field.name) for field in dataclasses.fields(LANGUAGE)}
OPTIONS = RetrofitOptions(
    presets=("titans",), head_dim=4, dim=8, depth=1, window=4, seeds=1, language=Retrofitted(**FIELDS, before_steps=3)
)


def test_what_is_compared():
    cells = {tuple(cell.labels.values()): cell for cell in RetrofitStudy().cells(OPTIONS)}
    assert list(cells) == [
        ("attention", "all"), ("window", "all"), ("titans", "all"), ("titans", "the memory"),
        ("titans", "all, never written"), ("titans", "all, from the first step"),
    ]  # fmt: skip
    memory, alone, never, anew = list(cells.values())[2:]
    assert {cell.model.pattern for cell in (memory, alone, never, anew)} == {("retrofit",)}
    assert memory.model == alone.model == anew.model and alone.task.optimizer.train_only == Retrofit.added
    assert memory.task.optimizer.train_only == () and never.model.memory.max_step_size == retrofit.NEVER
    assert (anew.task.before_steps, anew.task.steps) == (0, 3 + LANGUAGE.steps)
    linear = dataclasses.replace(OPTIONS, presets=("gated_deltanet",))  # its steps have no bound that could be near 0
    assert "all, never written" not in {cell.labels["trained"] for cell in RetrofitStudy().cells(linear)}


def test_every_model_of_a_seed_begins_with_one_transformer(monkeypatch):
    """Trained once a seed, on rows in another order than what comes after."""
    cells = RetrofitStudy().cells(dataclasses.replace(OPTIONS, seeds=2))
    made = []

    def fit(model, optimizer, batches, steps, seed):
        made.append((model, steps, seed, next(batches)["tokens"]))
        return type("Fit", (), {"params": init_model(model, seed)[1]})

    monkeypatch.setattr(retrofit, "fit", fit)
    retrofit._transformer.cache_clear()
    starts = {(cell.labels["trained"], cell.seed): cell.task.start(cell.model, cell.seed) for cell in cells[2:]}
    retrofit._transformer.cache_clear()
    assert [(model.pattern, steps, seed) for model, steps, seed, _ in made] == [(("attention",), 3, s) for s in (1, 2)]
    assert starts["all, from the first step", 1] is None
    for seed in (1, 2):
        assert starts["all", seed] is starts["the memory", seed]
    for cell in cells[2:4]:
        rows = next(cell.task.batches(cell.seed))["tokens"]
        assert not np.array_equal(rows, made[cell.seed - 1][3])


@pytest.mark.slow
def test_the_memory_alone_is_trained(tmp_path, monkeypatch):
    found, begun = [], []
    plain, start = run.fit, Retrofitted.start

    def recorded(*arguments, **named):
        found.append(plain(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(run, "fit", recorded)
    monkeypatch.setattr(Retrofitted, "start", lambda *said: begun.append(start(*said)) or begun[-1])
    options = dataclasses.replace(OPTIONS, language=dataclasses.replace(OPTIONS.language, positions=32))
    cells = RetrofitStudy().cells(options)
    run.run(run.Plan("retrofit", RetrofitStudy(), options, [cells[1], cells[3]], tmp_path, "titans study retrofit"))
    assert (tmp_path / "retrofit.png").read_bytes().startswith(b"\x89PNG")
    window, memory = json.loads((tmp_path / "retrofit.json").read_text())["rows"]
    assert window["parameters"][0] == count_params(cells[1].model) < memory["parameters"][0]
    assert "memory_gain" not in window["numbers"] and np.isfinite(memory["numbers"]["memory_gain"]["mean"])
    trained, before = dict(jax.tree_util.tree_leaves_with_path(found[1].params)), begun[1]
    for path, value in jax.tree_util.tree_leaves_with_path(before):
        np.testing.assert_array_equal(trained[path], value)
    moved = dict(jax.tree_util.tree_leaves_with_path(found[0].params))
    assert any(not np.array_equal(moved[path], x) for path, x in jax.tree_util.tree_leaves_with_path(begun[0]))


def test_tokens_of_the_transformer_count():
    """A model from the first step and one from a trained Transformer have read as much."""
    study = STUDIES["retrofit"]()
    quick = study.defaults(study.options(quick=True))
    read = {cell.task.steps * cell.task.batch_size * cell.task.sequence_length + cell.task.tokens_before
            for cell in study.cells(quick)}  # fmt: skip
    assert len(read) == 1


def test_the_quick_version_is_smaller():
    study = STUDIES["retrofit"]()
    default, quick = (study.defaults(RetrofitOptions(quick=quick)) for quick in (False, True))
    steps = [sum(cell.task.steps for cell in study.cells(options)) for options in (default, quick)]
    assert default.seeds == 3 and quick.seeds == 1 and 10 * steps[1] < steps[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--presets titan", "there is no preset 'titan' in presets; did you mean titans?"),
        ("--language.before_steps -1", "before_steps is -1; use at least 0"),
        ("--quick --language.train_only foo", "optimizer.train_only has 'foo', which is in no parameter's path; use"),
        ("--window 0", "window is 0; use at least 1"),
    ],
)
def test_a_mistake_ends_in_one_sentence(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setattr(run, "run_cell", None)  # nothing is compiled
    assert cli.main(["study", "retrofit", *arguments.split(), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
