"""What is kept of an evaluation: a line for every task, as soon as it is measured."""

import json
import math
from pathlib import Path

import pytest

from tests.evaluation.test_positions import run_of
from titans_jax.config import ConfigError
from titans_jax.evaluation import EvaluationError, EvaluationOptions, evaluators_of, measure


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

    with pytest.raises(EvaluationError, match="no text"):
        measure(run, {"one": lambda *_: {"x": 1}, "two": fails}, EvaluationOptions())
    assert [line["task"] for line in lines(run)] == ["one"]


def test_a_name_of_no_task_is_refused():
    with pytest.raises(ConfigError, match="nothing"):
        evaluators_of(["nothing"])
