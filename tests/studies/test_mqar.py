"""`titans study mqar` from the command line to its files, on models too small to learn much."""

import csv
import dataclasses
import json
import math

import numpy as np
import pytest
from tiny_studies import RECALL_OPTIONS

from titans_jax import cli, sharding
from titans_jax.config import ConfigError
from titans_jax.data.recall import RecallTask, recall_sequences
from titans_jax.studies import models, mqar, run
from titans_jax.studies.generated import Answers, Recall, make_answer_step
from titans_jax.studies.mqar import MqarOptions, MqarStudy
from titans_jax.studies.results import Result
from titans_jax.studies.table import make_rows
from titans_jax.training.run import count_params, init_model

TINY = MqarOptions(
    presets=("titans",), head_dims=(4,), num_pairs=(2,), sequence_lengths=(8,), vocab_size=10, dims=(8,), depth=1,
    steps=3, attention_steps=4, batch_size=4, seeds=2, test_sequences=8, equal_parameters=False, learning_rates=(3e-3,),
    validation_sequences=0,
)  # fmt: skip


def kinds(options):
    return {tuple(labels.values()): model for labels, model in mqar.kinds(options, options.dims[0])}


def read(folder, name="mqar.csv"):
    with open(folder / name, newline="") as file:
        return list(csv.DictReader(file))


def test_from_the_command_line_to_the_files(tmp_path, capsys):
    arguments = [*RECALL_OPTIONS, "--seeds", "2", "--output", str(tmp_path / "out")]
    assert cli.main(["study", "mqar", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "chance is 0.50" in printed and "accuracy" in printed
    row, baseline = read(tmp_path / "out")
    command = f"titans study mqar {' '.join(arguments)}"
    assert row["command"] == baseline["command"] == command
    assert row["preset"] == "attention" and row["models"] == "2" and row["tokens"] == str(2 * 4 * 8)
    assert baseline["preset"] == "baseline: one of 2 values at random" and baseline["accuracy"] == "0.5"
    saved = json.loads((tmp_path / "out" / "mqar.json").read_text())
    assert saved["command"] == command and saved["options"]["vocab_size"] == 10
    accuracies = []
    for seed, model in enumerate(saved["models"], 1):
        accuracies.append(model["numbers"]["accuracy"])
        assert model["seed"] == seed and model["status"] == "finite"
        assert accuracies[-1] * 16 == round(accuracies[-1] * 16)  # of 8 sequences, 2 queries each
        assert 0 < model["numbers"]["loss"] < 2 * math.log(10)
    assert float(row["accuracy"]) == pytest.approx(np.mean(accuracies))
    assert float(row["accuracy_sd"]) == pytest.approx(np.std(accuracies, ddof=1))
    png = (tmp_path / "out" / "mqar.png").read_bytes()
    assert png.startswith(b"\x89PNG") and command.encode() in png


def test_one_model_per_preset_block_and_head_dim_and_one_attention():
    options = dataclasses.replace(
        TINY, presets=("titans", "attention", "titans"), head_dims=(8, 4, 8), blocks=("lmm", "mac")
    )
    found = kinds(options)
    assert list(found) == [
        ("titans", "lmm", 8, 8, 3.0), ("titans", "lmm", 8, 4, 3.0), ("attention", "", 8, 8, None),
        ("titans", "mac", 8, 8, 3.0), ("titans", "mac", 8, 4, 3.0),
    ]  # fmt: skip
    assert all(model.num_heads * model.head_dim == 8 for model in found.values())
    assert [model.pattern for model in found.values()] == [("lmm",), ("lmm",), ("attention",), ("mac",), ("mac",)]
    assert all(model.segment == model.window == 8 for model in found.values())


def test_step_sizes_are_tried_where_there_are_any():
    found = kinds(dataclasses.replace(TINY, presets=("titans", "deltanet"), max_step_sizes=(0.25, 1.0)))
    assert list(found) == [("titans", "lmm", 8, 4, 0.25), ("titans", "lmm", 8, 4, 1.0), ("deltanet", "lmm", 8, 4, None)]
    assert [model.memory.max_step_size for model in found.values()][:2] == [0.25, 1.0]


def test_all_models_have_as_many_parameters_as_the_largest():
    options = dataclasses.replace(TINY, dims=(32,), presets=("titans", "deltanet", "attention"))
    counts = [count_params(model) for model in models.same_size(kinds(options).values()).values()]
    plain = [count_params(model) for model in kinds(options).values()]
    one = 3 * 32  # a unit of one feed-forward layer
    assert max(counts) - max(count for count in counts if count <= max(counts)) == 0
    assert max(counts) - min(counts) <= one < max(plain) - min(plain)


def test_the_sweep_of_figure_2_and_its_easy_case():
    study = MqarStudy()
    options = study.defaults(MqarOptions())
    assert [(task.length, task.num_pairs) for task in mqar.tasks(options)] == [(64, 4), (128, 8), (256, 16)]
    assert options.vocab_size == 8192 and options.presets == MqarOptions().presets and not options.random_fill
    assert [task.batch_size for task in mqar.tasks(options)] == [512, 512, 256]
    assert options.dims == (64, 128, 256, 512)
    np.testing.assert_allclose(options.learning_rates, [1e-4, 10**-3.3333333333, 10**-2.6666666667, 1e-2], rtol=1e-9)
    optimizer = mqar.tasks(options)[0].optimizer
    assert (optimizer.warmup_steps, optimizer.final_learning_rate_ratio, optimizer.beta2) == (0, 0, 0.999)
    quick = study.defaults(MqarOptions(quick=True))
    assert [(task.length, task.num_pairs) for task in mqar.tasks(quick)] == [(64, 4), (128, 8)]
    assert len(study.cells(quick)) == 4 * 2 * 2 and quick.vocab_size == 256
    easy = study.defaults(MqarOptions(easy=True))
    assert [(task.length, task.num_pairs) for task in mqar.tasks(easy)] == [(32, 4)]


def rows_of(*measured):
    cells = MqarStudy().cells(dataclasses.replace(TINY, seeds=1))
    done = []
    for preset, size, rate, floats, validation, accuracy in measured:
        labels = {"preset": preset, "block": "lmm", "head_dim": floats, "max_step_size": size, "learning_rate": rate}
        numbers = {"accuracy": accuracy, "validation": validation, "loss": 1.0}
        cell = dataclasses.replace(cells[0], labels=labels | {"pairs": 2, "length": 8})
        done.append((cell, Result("finite", 10, floats, 5, 0.1, "", numbers)))
    return make_rows(done)


def test_learning_rate_and_step_size_are_chosen_on_validation_and_told_on_test(tmp_path):
    rows = rows_of(("titans", 0.1, 0.01, 100, 0.3, 0.9), ("titans", 1.0, 0.01, 100, 0.4, 0.2),
                   ("titans", 1.0, 0.1, 100, 0.8, 0.7), ("titans", 2.0, 0.1, 50, None, 0.1),
                   ("attention", None, 0.1, 7, 0.5, 0.5))  # fmt: skip
    _, _, better, smaller, other = rows
    chosen = MqarStudy().finish(TINY, rows)
    assert chosen == [better, smaller, other]
    assert mqar.lines(chosen) == {"titans": [smaller, better], "attention": [other]}
    MqarStudy().draw(TINY, chosen, tmp_path / "mqar.png", "a note")
    assert (tmp_path / "mqar.png").read_bytes().startswith(b"\x89PNG")


def test_state_floats_by_hand():
    """Two matrices of head_dim x expansion head_dim, each as weights, momentum and anchor, for every head."""
    found = kinds(dataclasses.replace(TINY, presets=("titans", "attention"), depth=2))
    assert models.state_floats(found["titans", "lmm", 8, 4, 3.0], 8) == 2 * 3 * 2 * (4 * 8)
    assert models.state_floats(found["attention", "", 8, 4, None], 8) == 2 * 8 * 8  # keys, values of 8 tokens, width 8


def test_mamba_and_samba_come_once_beside_the_blocks():
    """Mamba with twice as many blocks, 16 entries for each of 16 channels, and the steps of a memory."""
    options = dataclasses.replace(TINY, presets=("mamba", "samba", "window"), blocks=("lmm", "mac"), depth=2, seeds=1)
    found = kinds(options)
    mamba, samba, _ = found.values()
    assert list(found) == [(name, "", 8, 4, None) for name in ("mamba", "samba", "window")]
    assert (mamba.pattern, mamba.depth, samba.pattern, samba.depth) == (("mamba",), 4, ("samba", "window"), 2)
    assert models.state_floats(mamba, 8) == 16 * 16 and models.state_floats(samba, 8) == 16 * 16 // 2
    assert [cell.task.steps for cell in MqarStudy().cells(options)] == [3, 3, 4]


def test_a_matrix_memory_of_single_token_chunks_counts_once():
    """Its anchor is its weights."""
    (model,) = kinds(dataclasses.replace(TINY, presets=("deltanet",))).values()
    assert models.state_floats(model, 8) == 2 * 4 * 4


def test_a_value_at_random_is_right_once_in_num_pairs():
    """The level drawn as chance: always the value shown first."""
    task = RecallTask(num_pairs=4, sequence_length=32, vocab_size=32)
    sequences = recall_sequences(task, 100, seed=0)
    targets = sequences["targets"]
    assert np.sum(targets == sequences["tokens"][:, 1:2]) / np.sum(targets != -1) == 1 / task.num_pairs


def test_training_sequences_differ_between_seeds_steps_and_from_those_asked():
    (task,) = mqar.tasks(dataclasses.replace(TINY, steps=300, num_pairs=(4,), sequence_lengths=(32,), vocab_size=64))
    batches = {seed: [batch["tokens"] for batch in task.batches(seed)] for seed in (1, 2)}
    assert [len(one) for one in batches.values()] == [300, 300]
    asked = recall_sequences(task.sequences, task.test_sequences, 0)["tokens"]
    rows = np.concatenate([*batches[1], *batches[2], asked])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_what_is_counted_as_right():
    """Against the logits, query by query."""
    (task,), (model,) = mqar.tasks(TINY), kinds(dataclasses.replace(TINY, presets=("attention",))).values()
    graphdef, params = init_model(task.fit_to(model), seed=0)
    sequences = recall_sequences(task.sequences, 8, seed=0)
    batch = sequences | {"segment_ids": None}
    sums = Answers(*make_answer_step(graphdef)(params, sharding.spread(batch, None)[0]))
    logits = np.asarray(recall_logits(graphdef, params, sequences), np.float64)
    asked = [(b, t) for b in range(8) for t in range(8) if sequences["targets"][b, t] >= 0]
    answers = [int(sequences["targets"][place]) for place in asked]
    logits = [logits[place] for place in asked]
    guesses = [row.argmax() for row in logits]
    assert sums.sequences == 8 and np.sum(sums.asked) == len(asked) == 16
    assert np.asarray(sums.asked).tolist() == list(np.bincount(answers, minlength=10))
    assert np.asarray(sums.answered).tolist() == list(np.bincount(guesses, minlength=10))
    hits = [guess == answer for guess, answer in zip(guesses, answers, strict=True)]
    assert np.array_equal(np.asarray(sums.right), np.bincount(answers, hits, minlength=10))
    by_row = [[h for (b, _), h in zip(asked, hits, strict=True) if b == row] for row in range(8)]
    assert sums.whole == sum(map(all, by_row))
    assert sums.before_mistake == sum((*row, False).index(False) for row in by_row)
    expected = sum(np.log(np.exp(row).sum()) - row[answer] for row, answer in zip(logits, answers, strict=True))
    assert float(sums.nats) == pytest.approx(expected, rel=1e-5)


def recall_logits(graphdef, params, sequences):
    from flax import nnx

    return nnx.merge(graphdef, params)(sequences["tokens"])


def test_answers_before_the_first_mistake():
    """Targets are the model's own answers but at two places: 3 before the first, 3 before the second, 8 without."""
    (task,), (model,) = mqar.tasks(TINY), kinds(dataclasses.replace(TINY, presets=("attention",))).values()
    graphdef, params = init_model(task.fit_to(model), seed=0)
    tokens = recall_sequences(task.sequences, 4, seed=0)["tokens"]
    targets = np.array(np.argmax(recall_logits(graphdef, params, {"tokens": tokens}), axis=-1), np.int32)
    targets[0, 3], targets[1, 5] = 9 - targets[0, 3], 9 - targets[1, 5]
    targets[1, :2], targets[3] = -1, -1
    sums = task.ask(graphdef, params, {"tokens": tokens, "targets": targets})
    assert (sums.before_mistake, sums.whole, sums.asked.sum()) == (3 + 3 + 8, 2, 8 + 6 + 8)
    assert sums.numbers["cumulative_accuracy"] == pytest.approx(14 / 22)


def test_macro_accuracy_by_hand():
    """Class 0 right in 1 of 2, class 1 in 0 of 1; class 2 was never asked for but answered; class 3 neither."""
    answers = Answers(3.0, *(np.array(x, float) for x in ([1, 0, 0, 0], [2, 1, 0, 0], [1, 1, 1, 0])), 1.5, 1.0, 2.0)
    assert answers.numbers == {
        "accuracy": pytest.approx(1 / 3), "macro_accuracy": pytest.approx((1 / 2 + 0 + 0) / 3),
        "cumulative_accuracy": 0.5, "sequence_accuracy": 0.5, "loss": 1.0,
    }  # fmt: skip


def test_a_finite_training_set_is_read_again_in_another_order():
    task = Recall(steps=5, batch_size=4, train_sequences=8, length=8, num_pairs=2, vocab_size=10)
    rows = np.concatenate([batch["tokens"] for batch in task.batches(1)]).reshape(5, 4, 8)
    epochs = [np.concatenate(rows[first : first + 2]) for first in (0, 2)]
    assert not np.array_equal(*epochs)
    assert np.array_equal(*(np.sort(epoch.view("i4,i4,i4,i4,i4,i4,i4,i4"), axis=0) for epoch in epochs))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--presets titanz", "there is no preset 'titanz' in presets; did you mean titans?"),
        ("--presets atention", "there is no preset 'atention' in presets; did you mean attention?"),
        ("--presets titans qqqq", "there is no preset 'qqqq' in presets; use retnet, "),
        ("--blocks window", "blocks has 'window'; use lmm, mac, mag"),
        ("--head_dims 8 24", "head_dims has 24; use divisors of dim 64"),
        ("--learning_rates 0.1 0.2", "validation_sequences is 0; use some to choose among 2 learning_rates, such as"),
        ("--seeds 0", "seeds is 0; use 1 to 10000"),
        ("--seeds 1000000000000", "seeds is 1000000000000; use 1 to 10000"),
        ("--test_sequences 20", "test_sequences is 20; use a multiple of batch_size 16, such as 32"),
        ("--sequence_lengths 12", "sequence_length is 12; use at least 16"),
        ("--num_pairs 4 8", "sequence_lengths has 1 and num_pairs 2 entries; use one of each for every task"),
        ("--learning_rates 0", "optimizer.learning_rate is 0.0; use a positive number"),
        ("--quick maybe", "quick is 'maybe'; use True or False"),
        ("--sequence_lengths 33", "sequence_length is 33; use an even number, such as 34"),
        ("--sequence_lengths 0", "sequence_length is 0; use at least 16"),
        ("--easy False --vocab_size 256", "vocab_size is 256; use more than 256, the longest of sequence_lengths"),
    ],
)
def test_a_mistake_ends_in_one_sentence(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setattr(run, "run_cell", None)  # nothing is compiled
    easy = [] if "--easy" in arguments else ["--easy"]
    assert cli.main(["study", "mqar", *easy, *arguments.split(), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_preset_at_all_is_refused():
    with pytest.raises(ConfigError, match="presets is empty; name at least one"):
        MqarStudy().cells(dataclasses.replace(TINY, presets=()))
