"""What is kept of an evaluation: a line for every task, as soon as it is measured."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest

from tests.evaluation.test_positions import run_of
from tests.training.tiny import tiny_config
from titans_jax.config import ConfigError
from titans_jax.evaluation import EVALUATORS, EvaluationError, EvaluationOptions, evaluators_of, measure
from titans_jax.evaluation.measure import describe
from titans_jax.training import train


@pytest.fixture
def run(tmp_path):
    return run_of(tmp_path, "lmm")


def lines(run):
    return [json.loads(line) for line in (run.folder / "evaluations.jsonl").read_text().splitlines()]


def test_every_result_is_appended_with_its_step_and_what_was_asked(run):
    tasks = {"one": lambda run, options: {"x": 1.5, "rows": [{"length": 2, "y": math.nan}]}, "two": lambda *_: {"z": 2}}
    options = EvaluationOptions(samples=3, text=Path("a.txt"))
    assert measure(run, tasks, options)["two/z"] == 2
    measure(run, {"two": tasks["two"]}, EvaluationOptions())
    first, second, third = lines(run)
    assert (first["step"], first["task"], first["options"]) == (7, "one", {"samples": 3, "text": "a.txt"})
    assert first["results"] == {"x": 1.5, "rows": [{"length": 2, "y": None}]} and first["seconds"] >= 0
    assert second["results"] == third["results"] == {"z": 2} and third["options"] == {}


def test_a_task_that_fails_loses_nothing_of_those_before(run):
    def fails(run, options):
        raise EvaluationError("no text")

    with pytest.raises(EvaluationError, match="no text; the results of one are in .*evaluations.jsonl"):
        measure(run, {"one": lambda *_: {"x": 1}, "two": fails}, EvaluationOptions())
    assert [line["task"] for line in lines(run)] == ["one"]


def test_a_line_that_was_cut_off_does_not_swallow_the_next_result(run):
    history = run.folder / "evaluations.jsonl"
    measure(run, {"one": lambda *_: {"x": 1}}, EvaluationOptions())
    whole = history.read_text()
    history.write_text(whole + whole[:20])
    measure(run, {"two": lambda *_: {"x": 2}}, EvaluationOptions())
    first, second, third = history.read_text().splitlines()
    assert (first + "\n", second) == (whole, whole[:20]) and json.loads(third)["task"] == "two"


def test_nothing_is_measured_where_results_cannot_be_kept(run, monkeypatch):
    measured = []
    monkeypatch.setattr("os.access", lambda *_: False)  # of a read-only disk, which refuses root too
    with pytest.raises(EvaluationError, match="run is '.*', where results cannot be written; use a copy"):
        measure(run, {"one": lambda *_: measured.append(1) or {"x": 1}}, EvaluationOptions())
    assert not measured


def test_a_name_of_no_task_is_refused():
    with pytest.raises(ConfigError, match="nothing"):
        evaluators_of(["nothing"])


def test_a_line_says_what_was_found():
    numbers = {"niah": [{"length": 1024, "accuracy": 1.0}, {"length": 2048, "accuracy": 3.5}], "loss": 2.25}
    assert describe("x", numbers) == "x: niah 3.5 (length 2048), loss 2.25"
    assert describe("y", {"results": [{"task": "piqa", "score": 51.0, "chance": ""}]}) == "y: results 51 (task piqa)"


@pytest.mark.slow
def test_training_measures_tasks_and_goes_on_where_one_cannot(tmp_path, monkeypatch, capsys):
    """At every evaluation, with its step; an unknown name is refused before anything is written."""
    counted = []

    def count(run, options):
        counted.append((run.step, options.samples, options.length, len(jax.tree.leaves(run.params))))
        return {"seen": len(counted)}

    def cannot(run, options):
        raise EvaluationError("there is no text")

    monkeypatch.setitem(EVALUATORS._parts, "count", count)
    monkeypatch.setitem(EVALUATORS._parts, "cannot", cannot)
    config = tiny_config(steps=4, evaluate_every=2, sample_tokens=0, evaluate_tasks=("cannot", "count"))
    train(config, tmp_path / "run")
    assert [each[:3] for each in counted] == [(2, 16, 4096), (4, 16, 4096)] and counted[0][3] > 5
    history = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["task"], line["results"]) for line in history] == [
        (2, "count", {"seen": 1}), (4, "count", {"seen": 2}),
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "warning at step 2: there is no text" in printed and "step 4  count: seen 2" in printed
    wrong = dataclasses.replace(config, training=dataclasses.replace(config.training, evaluate_tasks=("nia",)))
    with pytest.raises(ConfigError, match="training.evaluate_tasks is 'nia'; use .*did you mean niah"):
        train(wrong, tmp_path / "other")
    assert not (tmp_path / "other").exists()
