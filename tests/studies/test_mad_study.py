"""`titans study mad`: its settings, its averages, and a model of every task for two steps."""

import dataclasses
import json

import numpy as np
import pytest

from titans_jax import cli
from titans_jax.data.mad import SETTINGS
from titans_jax.studies import generated
from titans_jax.studies.mad import Mad, MadOptions, MadStudy, answers_of
from titans_jax.studies.results import Result
from titans_jax.studies.table import baselines_of, make_rows
from titans_jax.training.optimizer import learning_rate_schedule


def test_all_settings_at_every_rate_and_decay():
    options = MadOptions(models=("attention",), seeds=2, learning_rates=(1e-4, 5e-4, 1e-3), weight_decays=(0.0, 0.1))
    every = MadStudy().trained(options)
    assert len(every) == 66 * 6
    task, names = every[-1]
    assert names == ("train sequences 800", 1e-3, 0.1) and task.steps == 40 * (800 // 128)
    assert task.optimizer.weight_decay == 0.1 and task.optimizer.warmup_steps == 0


def test_answers_at_random():
    """Of 16 tokens, 15 beside padding, 16 beside noise, 255 beside the insert token, 16, and 14 beside two others."""
    assert [answers_of(setting) for setting in SETTINGS.values()] == [8, 8, 8, 127, 16, 14]


def test_the_chance_of_a_task_is_the_mean_over_its_settings():
    """Selective copying of 16 tokens and of others; memorization of 255, 511, .. tokens beside the insert token."""
    options = MadOptions(models=("attention",), seeds=1, learning_rates=(1e-4,))
    for task in ("selective-copying", "memorization"):
        cells = MadStudy().cells(dataclasses.replace(options, tasks=(task,)))
        chances = [1 / answers_of(cell.task.setting) for cell in cells]
        assert len(chances) > 5 and len(set(chances)) > 3
        assert baselines_of(cells) == [(f"an answer of {task} at random", {task: pytest.approx(np.mean(chances))})]


def test_accuracy_over_classes_is_the_mean_of_batches_of_128(monkeypatch):
    """In the first 128 sequences every answer is right, in the second the only one of class 1 is not: 1 and 0.5; and of
    another 64, which count half as much, all are of class 2 and wrong."""
    targets = np.array([0, 1] * 64 + [0] * 127 + [1] + [2] * 64)[:, None]
    said = np.array([0, 1] * 64 + [0] * 128 + [1] * 64)[:, None]

    def step(params, batch):
        asked, answered = np.asarray(batch["targets"])[:, 0], np.asarray(batch["tokens"])[:, 0]
        right = asked[asked == answered]
        counts = [np.bincount(values, minlength=3) for values in (right, asked, answered)]
        return 0.0, *counts, len(right), len(right), len(asked)

    monkeypatch.setattr(generated, "make_answer_step", lambda graphdef: step)
    task = Mad(batch_size=32)
    numbers = task.answered(None, None, {"tokens": said, "targets": targets})
    assert numbers["macro_accuracy"] == pytest.approx((1 + 0.5 + 0 / 2) / 2.5)
    assert numbers["accuracy"] == pytest.approx(255 / 320)


def test_the_cosine_ends_at_a_millionth_whatever_the_peak():
    for rate in (1e-4, 1e-3):
        task = Mad(steps=10, learning_rate=rate)
        assert learning_rate_schedule(task.optimizer, 10)(10) == pytest.approx(1e-6)


def test_tasks_and_models_are_averaged():
    """Seed 1: recall (0.4 + 0.6) / 2 at the rate that validation chose, copying 1.0; seed 2 has one that failed."""
    options = MadOptions(models=("attention",), tasks=("in-context-recall", "selective-copying"), seeds=2)
    study, done = MadStudy(), []
    model = study.cells(dataclasses.replace(options, changes=False, seeds=1))[0].model
    for task, change, rate, values in (
        ("in-context-recall", "baseline", 1, (0.4, 0.2)), ("in-context-recall", "baseline", 2, (0.9, 0.9)),
        ("in-context-recall", "length 256", 1, (0.6, None)), ("selective-copying", "baseline", 1, (1.0, 0.5)),
    ):  # fmt: skip
        for seed, value in enumerate(values, 1):
            from titans_jax.studies import Cell

            labels = {"model": "attention", "task": task, "change": change, "learning_rate": rate, "weight_decay": 0}
            numbers = None if value is None else {"macro_accuracy": value, "validation": 1 / rate}
            result = Result("failed" if value is None else "finite", 10, 20, 30, 0.1, "", numbers)
            done.append((Cell(labels, model, Mad(), seed), result))
    (row,) = study.finish(options, make_rows(done))
    assert row.labels == {"model": "attention"} and row.models == 6 and row.failed == 1
    assert row.parameters == [10, 10] and row.state_floats == [20, 20] and row.seconds == pytest.approx(0.1)
    assert row.numbers["in-context-recall"] == [pytest.approx(0.5), None]
    assert row.numbers["selective-copying"] == [1.0, 0.5] and row.numbers["mad"] == [pytest.approx(0.75), None]


@pytest.mark.exhaustive  # test_one_task_end_to_end sees the same of one task
@pytest.mark.slow
def test_end_to_end(tmp_path):
    arguments = """--models gated_deltanet --nochanges --seeds 1 --epochs 1 --batch_size 4 --train_sequences 8
        --longest 40 --held_out 4 --dim 8 --head_dim 4 --depth 1 --learning_rates 0.001""".split()
    arguments[2:3] = ["--changes", "False"]
    assert cli.main(["study", "mad", *arguments, "--output", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "mad.json").read_text())
    (row,) = saved["rows"]
    assert set(row["numbers"]) == {*SETTINGS, "mad"} and len(saved["models"]) == 6
    assert row["numbers"]["mad"]["mean"] == pytest.approx(sum(row["numbers"][t]["mean"] for t in SETTINGS) / 6)
    assert len(saved["baselines"]) == 6 and (tmp_path / "mad.png").exists()


def test_one_task_end_to_end(tmp_path):
    arguments = """--models gated_deltanet --tasks compression --changes False --seeds 1 --epochs 1 --batch_size 4
        --train_sequences 8 --longest 12 --held_out 4 --dim 8 --head_dim 4 --depth 1 --learning_rates 0.001""".split()
    assert cli.main(["study", "mad", *arguments, "--output", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "mad.json").read_text())["rows"]
    assert row["tokens"] == [96, 96] and 0 <= row["numbers"]["compression"]["mean"] <= 1


def test_the_memory_of_a_block_that_is_named():
    """Hope reads with its own block, MAC in the segments asked for."""
    hope = MadOptions(models=("hope",), block="hope", tasks=("memorization",), changes=False, seeds=1)
    mac = dataclasses.replace(hope, models=("titans",), block="mac", segment=4)
    models = [MadStudy().cells(options)[0].model for options in (hope, mac)]
    assert [model.pattern for model in models] == [("hope",), ("mac",)] and models[1].segment == 4


def test_printed_scores_say_how_they_were_trained():
    words = [words for words, _ in MadStudy().published(MadOptions())]
    assert words[2] == "Titans LMM, as printed (200 epochs, best of six settings by test)" and len(words) == 3
    for other in ({"changes": False}, {"longest": 64}, {"train_sequences": 800}):
        assert MadStudy().published(MadOptions(**other)) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--block attention", "blocks has 'attention'; use lmm, mac, mag"),
        ("--segment 0", "segment is 0; use at least 1"),
        ("--tasks copying", "tasks has 'copying'; use in-context-recall, "),
        ("--quick --train_sequences 8", "train_sequences is 8; use at least 16, one batch of batch_size"),
        ("--train_sequences 0", "train_sequences is 0; use at least 128, one batch of batch_size"),
        ("--batch_size 512", "batch_size is 512; use at most 256, the training sequences of memorization"),
        ("--longest 0", "longest is 0; use at least 193, which selective-copying needs"),
        ("--quick --longest 32", "longest is 32; use at least 33, which selective-copying needs"),
        ("--quick --longest 5 --tasks compression fuzzy-in-context-recall", "longest is 5; use at least 18, which"),
    ],
)
def test_a_mistake_ends_in_one_sentence(capsys, tmp_path, arguments, message):
    assert cli.main(["study", "mad", *arguments.split(), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
