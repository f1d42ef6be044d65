"""DNA sequences: the character tokenizer, the three parts of a set, and Matthews' correlation."""

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

from titans_jax.data import DataError
from titans_jax.data.dna import load_dataset, matthews_correlation, tokenize

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "genomics"


def test_a_token_a_base_with_padding_on_the_left():
    assert tokenize("ACGTNacgtX", 12).tolist() == [0, 0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "name, length, sizes", [("mouse/2", 101, [2620, 328, 328]), ("prom/prom_core_notata", 70, [42452, 5307, 5307])]
)
def test_the_sets_of_gue_have_their_published_sizes(name, length, sizes):
    if not SHARED.is_dir():
        pytest.skip("the shared data is not here")
    dataset = load_dataset(name, str(SHARED))
    assert [len(dataset.rows(split)["targets"]) for split in ("train", "validation", "test")] == sizes
    assert dataset.classes == 2 and dataset.length == length
    assert np.all(dataset.rows("test")["segment_ids"] == 1)


def write(folder, **parts):
    folder.mkdir(parents=True)
    for name, pairs in parts.items():
        (folder / f"{name}.csv").write_text("\n".join(["sequence,label", *(f"{s},{c}" for s, c in pairs)]) + "\n")


def test_dev_chooses_where_there_is_one(tmp_path):
    write(tmp_path / "gue" / "a", train=[("AC", 0), ("GTA", 1)], dev=[("A", 1)], test=[("C", 0)])
    dataset = load_dataset("a", str(tmp_path))
    assert dataset.rows("train")["tokens"].tolist() == [[0, 1, 2], [3, 4, 1]]
    assert dataset.rows("train")["segment_ids"].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert [dataset.rows(split)["targets"].tolist() for split in ("train", "validation", "test")] == [[0, 1], [1], [0]]


def test_a_tenth_of_train_chooses_where_there_is_no_dev(tmp_path):
    """GenomicsBenchmarks: tab-separated, columns seq and label; the test part is never looked at."""
    folder = tmp_path / "genomic_benchmarks" / "b"
    folder.mkdir(parents=True)
    sequences = ["ACGT"[n // 16] + "ACGT"[n // 4 % 4] + "ACGT"[n % 4] for n in range(40)]
    lines = ["seq\tlabel", *(f"{sequence}\t{number % 3}" for number, sequence in enumerate(sequences))]
    with gzip.open(folder / "train.tsv.gz", "wt") as out:
        out.write("\n".join(lines))
    with lzma.open(folder / "test.tsv.xz", "wt") as out:
        out.write("seq\tlabel\nTTT\t0\n")
    dataset = load_dataset("b", str(tmp_path))
    kept, held = (dataset.rows(split)["tokens"] for split in ("train", "validation"))
    assert dataset.classes == 3 and len(held) == 4 and len(kept) == 36
    assert len(np.unique(np.concatenate([kept, held]), axis=0)) == 40


def test_matthews_correlation():
    """The two-class formula by hand, and its ends."""
    hits, misses, false, rejected = 30, 10, 5, 55
    product = (hits + false) * (hits + misses) * (rejected + false) * (rejected + misses)
    expected = (hits * rejected - false * misses) / product**0.5
    assert matthews_correlation(np.array([[rejected, false], [misses, hits]])) == pytest.approx(expected)
    assert matthews_correlation(np.diag([3, 4, 5])) == pytest.approx(1)
    assert matthews_correlation(np.array([[0, 7], [5, 0]])) == pytest.approx(-1)
    assert matthews_correlation(np.array([[5, 0], [7, 0]])) == 0


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(DataError, match="none is not in .*; give the folder that holds it"):
        load_dataset("none", str(tmp_path))
    write(tmp_path / "c", train=[("AC", 0)])
    with pytest.raises(DataError, match="has no test file; add test.csv"):
        load_dataset("c", str(tmp_path))
    write(tmp_path / "d", train=[("AC", 0)], test=[("", 0)])
    with pytest.raises(DataError, match="has an empty sequence"):
        load_dataset("d", str(tmp_path))
    write(tmp_path / "e", train=[("AC", 0)])
    (tmp_path / "e" / "test.csv").write_text("bases,class\nA,0\n")
    with pytest.raises(DataError, match="use sequence and label"):
        load_dataset("e", str(tmp_path))


def test_damage_is_said_and_long_sequences_are_read(tmp_path):
    write(tmp_path / "a", train=[("A" * 140_000, 0), ("C", 1)], dev=[("A", 1)], test=[("C", 0)])
    assert load_dataset("a", str(tmp_path)).length == 140_000
    write(tmp_path / "b", train=[("A", 0), ("C", 1)], test=[("C", 0)])
    (tmp_path / "b" / "train.csv").write_text("\ufeffsequence,label\nA,0\nC,1\n\n", encoding="utf-8")
    assert len(load_dataset("b", str(tmp_path)).rows("train")["targets"]) == 1
    for name, content, words in (
        ("c", b"sequence,label\nA,0\n", "train.csv has 1 sequence; use 2 or more"),
        ("d", b"sequence,label\nA,0\nC\n", "train.csv, line 3, has no label; use"),
    ):
        write(tmp_path / name, test=[("C", 0)])
        (tmp_path / name / "train.csv").write_bytes(content)
        with pytest.raises(DataError, match=words):
            load_dataset(name, str(tmp_path))
    write(tmp_path / "e", test=[("C", 0)])
    (tmp_path / "e" / "train.csv.xz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="train.csv.xz cannot be unpacked .*: the file is damaged"):
        load_dataset("e", str(tmp_path))


def test_the_fingerprint_changes_with_any_label(tmp_path):
    for name, label in (("a", 0), ("b", 1), ("c", 0)):
        write(tmp_path / name, train=[("AC", 0), ("GTA", 1)], dev=[("A", label)], test=[("C", 0)])
    one, other, same = (load_dataset(name, str(tmp_path)).fingerprint for name in ("a", "b", "c"))
    assert one == same != other
