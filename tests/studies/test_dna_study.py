"""`titans study dna`: what is scored, what chooses, and one model of two steps, pre-trained and not."""

import json

import numpy as np
import pytest

from tests.data.test_dna import write
from titans_jax import cli
from titans_jax.studies.dna import PUBLISHED, SETS, Dna, DnaOptions, DnaStudy, next_bases
from titans_jax.studies.run import run_cell


@pytest.fixture
def folder(tmp_path):
    """A set whose class is the first base, A or C, of 12 and 6 and 6 sequences."""
    generator = np.random.default_rng(0)

    def pairs(count):
        return [("AC"[n % 2] + "".join(generator.choice(list("ACGT"), 4)), n % 2) for n in range(count)]

    write(tmp_path / "set", train=pairs(12), dev=pairs(6), test=pairs(6))
    return tmp_path


ARGUMENTS = """--data set --models gated_deltanet --epochs 1 --batch_size 6 --seeds 1 --dim 8 --head_dim 4 --depth 1
    --equal_parameters False""".split()


def test_end_to_end(folder, tmp_path):
    out = tmp_path / "out"
    assert cli.main(["study", "dna", *ARGUMENTS, "--folder", str(folder), "--output", str(out)]) == 0
    saved = json.loads((out / "dna.json").read_text())
    (row,) = saved["rows"]
    assert row["tokens"] == [2 * 6 * 5] and -1 <= row["numbers"]["mcc"]["mean"] <= 1
    assert round(6 * row["numbers"]["accuracy"]["mean"], 6) in range(7)
    assert saved["baselines"] == [{"what": "the most frequent class of set", "mcc": 0.0, "accuracy": 0.5}]
    assert (out / "dna.png").exists()


@pytest.mark.slow
def test_pre_training_is_where_it_starts(folder):
    options = DnaOptions(data=("set",), models=("attention",), folder=str(folder), seeds=1, epochs=1, batch_size=6,
                         dim=8, head_dim=4, depth=1, pretrain_epochs=2)  # fmt: skip
    (cell,) = DnaStudy().cells(options)
    assert cell.task.pretrain_steps == 4 and cell.model.head == "classifier(classes=2)"
    start = cell.task.start(cell.model, 1)
    assert start["head"]["kernel"].shape == (8, 6) and run_cell(cell).status == "finite"


def test_next_bases():
    batch = {"tokens": np.array([[0, 1, 2], [3, 4, 1]], np.int32)}
    assert next_bases(batch)["targets"].tolist() == [[-1, 2, -1], [4, 1, -1]]


def test_every_epoch_reads_all_once(folder):
    task = Dna(steps=4, batch_size=5, data="set", folder=str(folder))
    batches = task.batches(1)
    rows = np.concatenate([next(batches)["tokens"] for _ in range(12)])
    _, counts = np.unique(rows, axis=0, return_counts=True)
    assert counts.sum() == 60 and np.all(counts % 5 == 0)


def test_sets_and_printed_figures():
    assert set(PUBLISHED) == set(SETS) and PUBLISHED["mouse/2"] == 0.7932
    assert [words for words, _ in DnaStudy().published(DnaOptions(data=("tf/0", "own")))] == [
        "DNABERT-2 (117M, pre-trained) as printed, tf/0"
    ]
    benchmark = dict(DnaStudy().published(DnaOptions(data=("human_ocr_ensembl", "human_nontata_promoters"))))
    assert [numbers["accuracy"] for numbers in benchmark.values()] == [0.809, 0.795, 0.799, 0.966, 0.944, 0.966, 0.966]
    assert all("chosen on the test set there" in words for words in benchmark)
