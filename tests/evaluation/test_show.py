"""What is printed of evaluations: tables below their headers, and the data sets that are missing."""

import pytest

from titans_jax.data.sets import DataSet
from titans_jax.evaluation import show
from titans_jax.evaluation.results import Table


def rows(header, *accuracies):
    return Table([{"length": 1024, "accuracy": accuracy} for accuracy in accuracies], header)


def test_headers_stand_above_the_first_of_their_tables(capsys):
    first, other = {"tokenizer": "byte", "drawn_by": "number"}, {"tokenizer": "mistral"}
    show.print_numbers({
        "loss": 1.5, "niah/one": rows(first, 12.5), "niah/two": rows(dict(first), 25.0, 50.0),
        "mean": [{"length": 1024, "accuracy": 75.0}], "babilong/qa1": rows(other, 100.0),
    })  # fmt: skip
    said = ["loss", "tokenizer", "byte", "drawn by", "number", "niah/one", "12.5", "niah/two", "25.0", "50.0", "mean",
            "75.0", "tokenizer", "mistral", "babilong/qa1", "100.0"]  # fmt: skip
    printed = capsys.readouterr().out
    for text in said:
        assert text in printed
        printed = printed[printed.index(text) + len(text) :]
    assert "tokenizer" not in printed


@pytest.mark.parametrize("name", ["niah", "ruler"])
def test_essays_that_are_missing_are_named(tmp_path, capsys, name):
    def listed():
        show.list_evaluators(tmp_path)
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{name} "))

    assert "haystack" in listed()
    (tmp_path / "haystack").mkdir()
    (tmp_path / "haystack" / "nonfiction.jsonl.xz").touch()
    assert "haystack" not in listed()


def test_a_set_has_the_size_of_its_files(tmp_path, monkeypatch, capsys):
    sets = {
        "file": DataSet("a.txt", "words", "https://a.b/c"), "folder": DataSet("b", "more words", "https://a.b/d"),
        "none": DataSet("c", "no words", "https://a.b/e"),
    }  # fmt: skip
    monkeypatch.setattr(show, "SETS", sets)
    (tmp_path / "a.txt.xz").write_bytes(b"x" * 1_500_000)
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name in ("d", "c/e"):
        (tmp_path / "b" / name).write_bytes(b"x" * 1_000_000)
    show.list_sets(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:3]) for line in lines] == ["file 1.5 MB", "folder 2.0 MB", "none not there"]
    assert lines[0].endswith("a.txt: words; from https://a.b/c")
