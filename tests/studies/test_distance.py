"""`titans study distance`: its sequences, and one model from end to end."""

import dataclasses
import json

import numpy as np
import pytest

from titans_jax import cli, plots
from titans_jax.config import ConfigError
from titans_jax.data import DataError
from titans_jax.data.distant_recall import DistantRecall, distant_recall_sequences
from titans_jax.studies.distance import DistanceOptions, DistanceStudy, FarRecall
from titans_jax.studies.table import draw_spreads, spread

TASK = DistantRecall(num_pairs=3, sequence_length=20, pool_size=5, noise_size=4)


def test_what_is_asked_stands_in_the_sequence():
    """Every key once and its value behind it, among noise, at places that differ; every key is asked for once."""
    drawn = distant_recall_sequences(TASK, 400, seed=1)
    assert drawn["tokens"].dtype == drawn["targets"].dtype == np.int32
    places, orders = set(), set()
    for tokens, targets in zip(drawn["tokens"], drawn["targets"], strict=True):
        context, queries = tokens[:17], tokens[17:]
        assert (targets[:17] == -1).all()
        keys = np.flatnonzero((context >= 4) & (context < 9))
        assert len(keys) == 3 and set(context[keys]) == set(queries) and len(set(queries)) == 3
        values = dict(zip(context[keys].tolist(), context[keys + 1].tolist(), strict=True))
        assert [values[key] for key in queries.tolist()] == targets[17:].tolist()
        assert len(set(values.values())) == 3 and all(9 <= value < TASK.vocab_size for value in values.values())
        assert np.sum(context < 4) == 17 - 6
        places.add(tuple(keys))
        orders.add(tuple(np.argsort(np.argsort([context.tolist().index(key) for key in queries]))))
    # Pairs that do not overlap in 17 places: as many ways as to choose 3 of 14.
    assert len(places) > 200 and max(place[-1] for place in places) == 15 and min(place[0] for place in places) == 0
    assert len(orders) == 6


def test_sequences_are_those_of_their_seed():
    same, other = (distant_recall_sequences(TASK, 8, seed)["tokens"] for seed in (1, 2))
    assert np.array_equal(same, distant_recall_sequences(TASK, 8, 1)["tokens"]) and not np.array_equal(same, other)


def test_a_sequence_of_pairs_and_queries_alone_is_the_shortest():
    shortest = dataclasses.replace(TASK, sequence_length=9)
    assert (distant_recall_sequences(shortest, 50, seed=0)["tokens"] >= 4).all()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"sequence_length": 8}, "^sequence_length is 8; use at least 9: a key, a value and a query for each of num_p"),
        ({"pool_size": 2}, "^pool_size is 2; use at least 3$"),
        ({"noise_size": 0}, "^noise_size is 0; use at least 1$"),
        ({"num_pairs": 0}, "^num_pairs is 0; use at least 1$"),
    ],
)
def test_sizes_that_have_no_sequence_are_refused(fields, message):
    with pytest.raises(DataError, match=message):
        dataclasses.replace(TASK, **fields)


def test_a_length_that_is_asked_about_and_has_no_sequence_is_refused_before_training():
    (cell,) = DistanceStudy().cells(DistanceOptions(presets=("mamba2",), blocks=("lmm",), seeds=1))
    with pytest.raises(DataError, match="^sequence_length is 11; use at least 12"):
        FarRecall(batch_size=8, test_lengths=(256, 11)).check(cell.model)


def test_end_to_end(tmp_path):
    arguments = """--presets gated_deltanet window --blocks lmm --dim 8 --head_dim 4 --depth 1 --segment 4 --seeds 1
        --task.steps 2 --task.batch_size 4 --task.length 12 --task.test_lengths 12 40 --task.num_pairs 2
        --task.test_sequences 8""".split()
    assert cli.main(["study", "distance", *arguments, "--output", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "distance.json").read_text())
    memory, window = saved["rows"]
    assert [row["labels"] for row in (memory, window)] == [
        {"preset": "gated_deltanet", "block": "lmm"}, {"preset": "window", "block": ""},
    ]  # fmt: skip
    assert abs(memory["parameters"][0] - window["parameters"][0]) < 0.05 * memory["parameters"][0]
    for row in (memory, window):
        shares = [row["numbers"][f"accuracy_{length}"]["mean"] * 16 for length in (12, 40)]
        assert all(share == pytest.approx(round(share)) for share in shares)
    assert saved["baselines"][0]["accuracy_40"] == 1 / 2
    assert (tmp_path / "distance.png").read_bytes().startswith(b"\x89PNG")


def test_no_lengths_are_refused():
    options = DistanceOptions(task=FarRecall(test_lengths=()))
    with pytest.raises(ConfigError, match="^task.test_lengths is empty; name at least one, such as 1024$"):
        DistanceStudy().cells(options)


def test_a_line_leaves_out_what_has_no_value(tmp_path):
    """Means of the seeds where there are some, with their standard deviation; one seed has none."""
    with plots.figure(tmp_path / "line.png") as axes:
        draw_spreads(axes, {1: spread([1.0, 3.0]), 2: spread([None, None]), 4: spread([5.0])}, label="a")
        (line, _, (bars,)) = axes.containers[0]
        assert line.get_xydata().tolist() == [[1, 2], [4, 5]]
        (low, high), (alone, same) = (segment[:, 1] for segment in bars.get_segments())
    assert high - low == pytest.approx(2 * 2**0.5) and alone == same == 5
