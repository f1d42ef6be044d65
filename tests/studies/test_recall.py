"""`titans bench recall` from the command line to its files, on models too small to learn much."""

import csv
import dataclasses
import math

import jax
import numpy as np
import pytest

from titans_jax import cli, plots
from titans_jax.bench import recall
from titans_jax.config import ConfigError
from titans_jax.data.recall import RecallTask, recall_sequences

TINY = recall.Options(
    presets=("titans",), head_dims=(4,), num_pairs=2, sequence_length=8, vocab_size=8, dim=8, depth=1, steps=3,
    attention_steps=4, batch_size=4, seeds=2, test_sequences=8, max_step_sizes=(0.1,),
)  # fmt: skip
ATTENTION = dataclasses.replace(TINY, presets=("attention",))  # compiles in a moment


def read(folder):
    with open(folder / "recall.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_from_the_command_line_to_the_files(tmp_path, capsys):
    arguments = (
        "--presets linear_attention attention --head_dims 4 --num_pairs 2 --sequence_length 8 --vocab_size 8 --dim 8"
    )
    arguments += " --depth 1 --steps 2 --attention_steps 3 --batch_size 4 --seeds 2 --test_sequences 8"
    assert cli.main(["bench", "recall", *arguments.split(), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "chance is 0.50" in printed and "accuracy" in printed
    rows = read(tmp_path / "out")
    assert [(row["preset"], row["head_dim"], row["seed"], row["steps"]) for row in rows] == [
        *(("linear_attention", "4", seed, "2") for seed in ("1", "2")),
        *(("attention", "4", seed, "3") for seed in ("1", "2")),
    ]
    for row in rows:
        accuracy = float(row["accuracy"]) * 16  # of 8 sequences, 2 queries each
        assert 0 <= accuracy <= 16 and accuracy == round(accuracy)
        assert 0 < float(row["loss"]) < 2 * math.log(8) and row["finite"] == "True"
    assert (tmp_path / "out" / "recall.png").read_bytes().startswith(b"\x89PNG")


def test_one_model_per_preset_and_head_dim_and_one_attention():
    options = dataclasses.replace(TINY, presets=("titans", "attention", "titans"), head_dims=(8, 4, 8))
    _, models = recall.task_and_models(options)
    assert list(models) == [("titans", 8, 0.1), ("titans", 4, 0.1), ("attention", 8, None)]
    assert all(model.num_heads * model.head_dim == 8 for model in models.values())
    assert [model.pattern for model in models.values()] == [("lmm",), ("lmm",), ("attention",)]


def test_step_sizes_are_tried_where_there_are_any():
    options = dataclasses.replace(TINY, presets=("titans", "deltanet"), max_step_sizes=(0.1, 1.0))
    _, models = recall.task_and_models(options)
    assert list(models) == [("titans", 4, 0.1), ("titans", 4, 1.0), ("deltanet", 4, None)]
    assert [model.memory.max_step_size for model in models.values()][:2] == [0.1, 1.0]


def test_the_plot_shows_the_most_accurate_step_size():
    row = recall.Measurement("titans", 4, 0.1, 100, 1, 0.3, 1.0, 3, 0.1, True)
    better = [dataclasses.replace(row, max_step_size=1.0, seed=seed, accuracy=0.4 * seed) for seed in (1, 2)]
    wider = dataclasses.replace(row, head_dim=2, state_floats=50)
    other = dataclasses.replace(row, preset="attention", max_step_size=None)
    lines = recall.lines([row, *better, wider, other])
    assert lines == {"titans": [[wider], better], "attention": [[other]]}


def test_state_floats_by_hand():
    """Two matrices of head_dim x expansion head_dim, each as weights, momentum and anchor, for every head."""
    models = recall.task_and_models(dataclasses.replace(TINY, presets=("titans", "attention"), depth=2))[1]
    assert recall.state_floats(models["titans", 4, 0.1], 8) == 2 * 3 * 2 * (4 * 8)
    assert recall.state_floats(models["attention", 4, None], 8) == 2 * 8 * 8  # keys and values of 8 tokens, width 8


def test_a_matrix_memory_of_single_token_chunks_counts_once():
    """Its anchor is its weights."""
    model = recall.task_and_models(dataclasses.replace(TINY, presets=("deltanet",)))[1]["deltanet", 4, None]
    assert recall.state_floats(model, 8) == 2 * 4 * 4


def test_a_value_at_random_is_right_once_in_num_pairs():
    """The level drawn as chance: always the value shown first."""
    task = RecallTask(num_pairs=4, sequence_length=32, vocab_size=32)
    sequences = recall_sequences(task, 100, seed=0)
    targets = sequences["targets"]
    assert np.sum(targets == sequences["tokens"][:, 1:2]) / np.sum(targets != -1) == 1 / task.num_pairs


def test_what_is_counted_as_right():
    """Against the logits, query by query."""
    task, models = recall.task_and_models(ATTENTION)
    graphdef, params = recall.init_model(models["attention", 4, None], seed=0)
    sequences = recall_sequences(task, 8, seed=0)
    batch = next(recall.batches(sequences, 8))
    nats, right, queries = recall.make_recall_step(graphdef)(params, batch)
    logits = np.asarray(recall.nnx.merge(graphdef, params)(batch["tokens"]), np.float64)
    asked = [(b, t) for b in range(8) for t in range(8) if sequences["targets"][b, t] >= 0]
    answers = [int(sequences["targets"][place]) for place in asked]
    logits = [logits[place] for place in asked]
    assert queries == len(asked) == 16
    assert right == sum(row.argmax() == answer for row, answer in zip(logits, answers, strict=True))
    expected = sum(np.log(np.exp(row).sum()) - row[answer] for row, answer in zip(logits, answers, strict=True))
    assert float(nats) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_run_that_is_not_finite_is_recorded(tmp_path, monkeypatch):
    options = dataclasses.replace(ATTENTION, seeds=1)
    task, models = recall.task_and_models(options)

    def broken(model, seed):
        graphdef, params = init_model(model, seed)
        return graphdef, jax.tree.map(lambda x: x * np.float32("nan"), params)

    init_model = recall.init_model
    monkeypatch.setattr(recall, "init_model", broken)
    ((kind, model),) = models.items()
    (row,) = recall.measure(options, task, kind, model, lambda: None)
    assert row.finite is False and row.accuracy == 0 and math.isnan(row.loss)
    plots.save_csv([row], tmp_path / "recall.csv")
    recall.save_plot([row], 0.5, tmp_path)
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")
    assert read(tmp_path)[0]["finite"] == "False"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--presets titanz", "there is no preset 'titanz' in presets; did you mean titans?"),
        ("--presets atention", "there is no preset 'atention' in presets; did you mean attention?"),
        ("--presets titans qqqq", "there is no preset 'qqqq' in presets; use retnet, "),
        ("--head_dims 8 24", "head_dims has 24; use divisors of dim 64"),
        ("--seeds 0", "seeds is 0; use at least 1"),
        ("--test_sequences 20", "test_sequences is 20; use a multiple of batch_size 16, such as 32"),
        ("--sequence_length 12", "sequence_length is 12; use at least 16"),
        ("--learning_rate 0", "optimizer.learning_rate is 0.0; use a positive number"),
    ],
)
def test_a_mistake_ends_in_one_sentence(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setattr(recall, "measure", None)  # nothing is compiled
    assert cli.main(["bench", "recall", *arguments.split(), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_preset_at_all_is_refused():
    with pytest.raises(ConfigError, match="presets is empty; name at least one"):
        recall.task_and_models(dataclasses.replace(TINY, presets=()))
