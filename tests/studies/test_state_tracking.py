"""`titans study state_tracking`: its groups, what theory is said to predict, and one model from end to end."""

import dataclasses
import json

import numpy as np
import pytest

from titans_jax import cli
from titans_jax.config import ConfigError
from titans_jax.data import DataError
from titans_jax.data.word_problems import group, word_problems
from titans_jax.memory.rule.presets import PRESETS
from titans_jax.studies.generated import VALIDATION_SEED
from titans_jax.studies.models import ATTENTION
from titans_jax.studies.state_tracking import RULES, StateTrackingOptions, StateTrackingStudy, WordProblem, theory
from titans_jax.studies.table import Row


@pytest.mark.parametrize("name, order", [("Z2", 2), ("S3", 6), ("A5", 60), ("S5", 120), ("A4_x_Z5", 60), ("Z60", 60)])
def test_a_group_is_one(name, order):
    table = group(name).table
    assert table.shape == (order, order) and group(name).order == order
    assert np.array_equal(table[0], np.arange(order)) and np.array_equal(table[:, 0], np.arange(order))
    assert np.all(np.sort(table, axis=0) == np.arange(order)[:, None])
    a, b, c = np.random.default_rng(0).integers(order, size=(3, 500))
    assert np.array_equal(table[table[a, b], c], table[a, table[b, c]])
    assert np.array_equal(table, table.T) == (name in ("Z2", "Z60"))


def test_a5_is_simple_and_a4_is_not():
    """Commutators generate all of A5, and a part of A4 x Z5: the first is not solvable."""

    def derived(name):
        table = group(name).table
        inverse = np.argmin(table, axis=1)  # the column of the identity, 0
        numbers = np.arange(len(table))
        a, b = np.meshgrid(numbers, numbers)
        reached = np.unique(table[table[table[inverse[a], inverse[b]], a], b])
        while len(more := np.unique(table[reached][:, reached])) > len(reached):
            reached = more
        return len(reached)

    assert derived("A5") == 60 and derived("A4_x_Z5") == 4 and derived("Z60") == 1


def test_parity_is_the_running_sum_of_bits():
    sequences = word_problems(group("Z2"), 50, 20, seed=3)
    assert np.array_equal(sequences["targets"], np.cumsum(sequences["tokens"], axis=1) % 2)
    assert set(np.unique(sequences["tokens"])) == {0, 1}


def test_products_are_of_permutations():
    """S3's elements in order of their permutations of (0, 1, 2): 1 swaps the last two, 2 the first two."""
    table = group("S3").table
    assert table[1, 1] == table[2, 2] == 0
    assert {int(table[1, 2]), int(table[2, 1])} == {3, 4}  # the two rotations


def test_distinct_rows_are_all_there_are():
    """The 27 sequences of three elements of Z3: ten of them, the other 17, and not one more."""
    ten = word_problems(group("Z3"), 3, 10, seed=1, distinct=True)["tokens"]
    others = word_problems(group("Z3"), 3, 17, seed=1, apart=ten, distinct=True)
    rows = np.concatenate([ten, others["tokens"]])
    assert len(np.unique(rows, axis=0)) == 27
    assert np.array_equal(others["targets"], np.cumsum(others["tokens"], axis=1) % 3)
    again = word_problems(group("Z3"), 3, 500, seed=2, apart=ten)["tokens"]
    assert np.array_equal(np.unique(again, axis=0), np.unique(others["tokens"], axis=0))
    with pytest.raises(DataError, match="count is 18; use at most 17, as many as Z3 has others of length 3"):
        word_problems(group("Z3"), 3, 18, seed=1, apart=ten, distinct=True)


def test_no_test_row_is_trained_on():
    """Parity of 6 elements has 64 rows: 16 of test, 8 of validation, and only the other 40 are trained on."""
    task = WordProblem(
        group="Z2", length=6, test_lengths=(6, 9), steps=50, batch_size=8, test_sequences=16, validation_sequences=8
    )
    tested, validated = task.tested(6)["tokens"], task.held_out(VALIDATION_SEED)["tokens"]
    trained = np.concatenate([batch["tokens"] for batch in task.batches(1)])
    assert len(trained) == 400
    parts = [{row.tobytes() for row in rows} for rows in (tested, validated, trained)]
    assert [len(part) for part in parts] == [16, 8, 40] and len(set.union(*parts)) == 64
    assert len(np.unique(task.tested(9)["tokens"], axis=0)) == 16


@pytest.mark.parametrize("name", ["Q8", "S", "S0", "S3x Z2", "S7"])
def test_what_is_no_group_is_refused(name):
    with pytest.raises(DataError, match=f"group is '{name}'; use "):
        group(name)


SHIPPED = set(PRESETS)  # tests of outside parts register more while they run


def test_theory():
    table = {rule: "".join(theory(rule, name, 1)[0] for name in ("Z2", "S3", "A5", "S5")) for rule in RULES}
    assert table["mamba2"] == table["deltanet"] == table["gated_deltanet"] == "nnnn"
    assert table["delta_product 1"] == table["titans linear"] == "ynnn"
    assert table["delta_product 2"] == "yyyn" and table["delta_product 4"] == "yyyy"
    assert table["titans"] == table["moneta"] == table["rwkv7"] == "oooo"
    assert [theory(ATTENTION, name, 1) for name in ("Z2", "S5")] == ["open", "no"]
    assert [theory("mamba", name, 1) for name in ("Z2", "S5")] == ["no", "no"]
    assert theory("delta_product 1", "S5", 4) == theory("delta_product 2", "S5", 3) == "yes"
    assert {fields["preset"] for fields in RULES.values()} == SHIPPED


def rows(**accuracies):
    labels = {"group": "S3", "rule": "titans", "theory": "open"}
    return [Row(labels, [1], [1], [1], 0.1, 1, 0, 0, {name: [value] for name, value in accuracies.items()})]


def test_what_counts_as_found(tmp_path):
    study = StateTrackingStudy()
    options = StateTrackingOptions(task=WordProblem(test_lengths=(8, 16)))
    for numbers, found in (((1.0, 0.995), "yes"), ((0.99, 0.9), "to 8"), ((0.9, 1.0), "no"), ((None, None), "no")):
        (row,) = study.finish(options, rows(accuracy_8=numbers[0], accuracy_16=numbers[1]))
        assert row.labels["found"] == found


def test_end_to_end(tmp_path):
    arguments = """--rules mamba2 --groups S3 --dim 8 --head_dim 4 --seeds 1 --task.steps 2 --task.batch_size 4
        --task.length 6 --task.test_lengths 6 9 --task.test_sequences 8 --task.validation_sequences 4""".split()
    assert cli.main(["study", "state_tracking", *arguments, "--output", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "state_tracking.json").read_text())
    (row,) = saved["rows"]
    assert row["labels"] == {"group": "S3", "rule": "mamba2", "theory": "no", "found": "no"}
    shares = [row["numbers"][f"accuracy_{length}"]["mean"] * 8 * length for length in (6, 9)]
    assert all(share == pytest.approx(round(share)) for share in shares)
    accuracies = [row["numbers"][f"{name}accuracy_9"]["mean"] for name in ("", "cumulative_", "sequence_")]
    assert accuracies == sorted(accuracies, reverse=True)
    assert saved["baselines"][0]["accuracy_9"] == 1 / 6
    assert (tmp_path / "state_tracking.png").read_bytes().startswith(b"\x89PNG")


def test_the_memory_of_a_block_that_is_named():
    (cell,) = StateTrackingStudy().cells(StateTrackingOptions(rules=("hope",), block="hope", groups=("Z2",), seeds=1))
    assert cell.model.pattern == ("hope",) and cell.model.memory.preset == "hope"


def test_mistakes_are_refused():
    study, options = StateTrackingStudy(), StateTrackingOptions(groups=("S3",))
    with pytest.raises(ConfigError, match="blocks has 'window'; use lmm, mac, mag"):
        study.cells(dataclasses.replace(options, block="window"))
    with pytest.raises(ConfigError, match="rules has 'titan'; use .*; did you mean titans"):
        study.cells(dataclasses.replace(options, rules=("titan",)))
    with pytest.raises(ConfigError, match="task.test_lengths is empty"):
        study.cells(dataclasses.replace(options, task=WordProblem(test_lengths=())))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"length": 0}, "^length has 0; use at least 1"),
        ({"test_lengths": (8, 0)}, "^test_lengths has 0; use at least 1"),
        ({"length": 3, "test_lengths": (8,)}, "^length has 3, of which S3 has 216 rows; use a greater length or group"),
        ({"length": 8, "test_lengths": (3,)}, "^test_lengths has 3, of which S3 has 216 rows; .* the 512 of test_seq"),
    ],
)
def test_lengths_without_enough_rows_are_refused(fields, message):
    (cell,) = StateTrackingStudy().cells(StateTrackingOptions(groups=("S3",), rules=("mamba2",), seeds=1))
    with pytest.raises(ConfigError, match=message):
        WordProblem(**fields).check(cell.model)
