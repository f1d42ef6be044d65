"""Data sets by name: what is there, and what is fetched from a local server or file, whole or not at all."""

import dataclasses
import gzip
import hashlib
import http.server
import io
import json
import lzma
import threading
import zipfile
from pathlib import Path

import pytest

from titans_jax import cli
from titans_jax.data import DataError, sets

SHARED = Path(__file__).parents[3] / "shared" / "data"
LINES = b'{"goal": "a"}\n{"goal": "b"}\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Serves a folder on this machine: (its address, the folder)."""
    folder = tmp_path_factory.mktemp("served")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", folder
        running.shutdown()
        thread.join()


def serve(monkeypatch, address, content, **fields):
    known = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(sets.SETS, "own", sets.DataSet("a/own.jsonl", "ours", address, **({"sha256": known} | fields)))


def test_a_file_is_fetched_checked_and_found_again(server, tmp_path, monkeypatch):
    address, folder = server
    (folder / "own.jsonl").write_bytes(LINES)
    serve(monkeypatch, f"{address}/own.jsonl", LINES)
    assert sets.find_file(tmp_path, "a/own.jsonl") is None
    file = sets.fetch("own", tmp_path)
    assert file == tmp_path / "a" / "own.jsonl" and file.read_bytes() == LINES
    (folder / "own.jsonl").unlink()
    assert sets.fetch("own", tmp_path) == file == sets.find_file(tmp_path, "a/own.jsonl")  # not fetched again


def test_an_archive_gives_its_member_with_the_labels_of_another(server, tmp_path, monkeypatch):
    address, folder = server
    for number, (labels, expected) in enumerate([("1\n0\n", [1, 0]), ("3\n1\n", ["3", "1"])]):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("dev/dev.jsonl", LINES)
            archive.writestr("dev/labels.lst", labels)
        (folder / "own.zip").write_bytes(packed.getvalue())
        serve(monkeypatch, f"{address}/own.zip", packed.getvalue(), member="dev/dev.jsonl", labels="dev/labels.lst")
        records = [json.loads(line) for line in sets.fetch("own", tmp_path / str(number)).read_text().splitlines()]
        assert records == [{"goal": "a", "label": expected[0]}, {"goal": "b", "label": expected[1]}]


def test_a_path_takes_the_place_of_the_address(server, tmp_path, monkeypatch):
    address, folder = server
    serve(monkeypatch, "http://127.0.0.1:9/none", b"")
    (folder / "mine.jsonl").write_bytes(LINES)
    assert sets.fetch("own", tmp_path / "x", f"{address}/mine.jsonl").read_bytes() == LINES
    own = tmp_path / "own.jsonl.gz"
    own.write_bytes(gzip.compress(LINES))
    file = sets.fetch("own", tmp_path / "y", str(own))
    assert file.name == "own.jsonl.gz" and file.read_bytes() == own.read_bytes()


def test_a_packed_file_stays_packed(server, tmp_path, monkeypatch):
    address, folder = server
    packed = gzip.compress(LINES)
    (folder / "own.jsonl.gz").write_bytes(packed)
    serve(monkeypatch, f"{address}/own.jsonl.gz", packed)
    file = sets.fetch("own", tmp_path)
    assert file == tmp_path / "a" / "own.jsonl.gz" and gzip.decompress(file.read_bytes()) == LINES
    assert sets.find_file(tmp_path, "a/own.jsonl") == file


def test_a_set_is_not_brought_beside_one_with_another_compression(server, tmp_path, monkeypatch):
    """`find_file` might give the other one, and a folder of training text would have both."""
    address, folder = server
    (folder / "b.jsonl").write_bytes(LINES)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    serve(monkeypatch, f"{address}/b.jsonl", LINES)
    first = sets.fetch("own", tmp_path, str(folder / "b.jsonl.gz"))
    with pytest.raises(DataError, match="own is in .*/own.jsonl.gz already; remove that to bring another"):
        sets.fetch("own", tmp_path, str(folder / "b.jsonl"))
    assert sets.fetch("own", tmp_path, str(folder / "b.jsonl.gz")) == first == sets.find_file(tmp_path, "a/own.jsonl")


def test_a_set_of_several_files_is_a_folder_that_is_there_whole_or_not_at_all(server, tmp_path, monkeypatch):
    address, folder = server
    (folder / "many" / "x").mkdir(parents=True)
    (folder / "many" / "x" / "train.csv").write_bytes(b"one")
    (folder / "many" / "test.csv").write_bytes(b"two")
    known = hashlib.sha256(b"onetwo").hexdigest()
    several = sets.DataSet("own/many", "ours", f"{address}/many", known, parts=("x/train.csv", "test.csv"))
    monkeypatch.setitem(sets.SETS, "own", several)
    made = sets.fetch("own", tmp_path)
    assert made == tmp_path / "own" / "many" == sets.find_file(tmp_path, "own/many")
    assert (made / "x" / "train.csv").read_bytes() == b"one" and (made / "test.csv").read_bytes() == b"two"
    monkeypatch.setitem(sets.SETS, "own", dataclasses.replace(several, sha256="0" * 64))
    with pytest.raises(DataError, match=f"sha256 {known}, not 000"):
        sets.fetch("own", tmp_path / "wrong")
    monkeypatch.setitem(sets.SETS, "own", dataclasses.replace(several, parts=("test.csv", "gone.csv")))
    with pytest.raises(DataError, match="own cannot be fetched from http.*/many/gone.csv"):
        sets.fetch("own", tmp_path / "wrong")
    assert list((tmp_path / "wrong" / "own").iterdir()) == []
    with pytest.raises(DataError, match="own cannot be taken from .*/many, which has no gone.csv; give a folder that"):
        sets.fetch("own", tmp_path / "wrong", str(folder / "many"))
    assert list((tmp_path / "wrong" / "own").iterdir()) == []
    monkeypatch.setitem(sets.SETS, "own", several)
    assert (sets.fetch("own", tmp_path / "mine", str(folder / "many")) / "x" / "train.csv").read_bytes() == b"one"
    with pytest.raises(DataError, match="own is in .*many already; remove that to bring another"):
        sets.fetch("own", tmp_path / "mine", str(folder / "many"))
    with pytest.raises(
        DataError, match="own cannot be taken from /nowhere .*; give a folder with x/train.csv and the like"
    ):
        sets.fetch("own", tmp_path / "other", "/nowhere")


def test_a_set_without_an_address_says_where_it_goes(tmp_path):
    with pytest.raises(
        DataError, match=r"haystack has no address that gives .*: bring it with --path, and it is kept as "
    ):
        sets.fetch("haystack", tmp_path)
    assert not list(tmp_path.iterdir()) and not sets.SETS["haystack"].has_source
    own = tmp_path / "own.jsonl.gz"
    own.write_bytes(gzip.compress(LINES))
    assert sets.fetch("haystack", tmp_path / "data", str(own)) == tmp_path / "data" / "haystack" / "nonfiction.jsonl.gz"


def test_pieces_of_a_set_are_found_by_the_first(tmp_path):
    assert sets.find_file(tmp_path, "books/train*.jsonl") is None
    (tmp_path / "books").mkdir()
    for number in (1, 0):
        (tmp_path / "books" / f"train-{number}.jsonl.xz").write_bytes(b"")
    assert sets.find_file(tmp_path, "books/train*.jsonl") == tmp_path / "books" / "train-0.jsonl.xz"


def test_every_set_of_the_project_s_own_data_is_known_and_is_what_its_sha256_says():
    """Those whose files lie in shared/data as their addresses give them."""
    if not SHARED.is_dir():
        pytest.skip(f"there is no {SHARED}")
    there = {name for name, one in sets.SETS.items() if sets.find_file(SHARED, one.file) is not None}
    assert there == set(sets.SETS) - {"lambada_openai", "squad", "hotpotqa", "human_nontata_promoters"}
    for name in ("wikitext_valid", "ETTh1", "ETTh2", "ETTm1"):
        assert (
            hashlib.sha256(unpacked(sets.find_file(SHARED, sets.SETS[name].file))).hexdigest() == sets.SETS[name].sha256
        )
    gue = sets.SETS["GUE"]
    found = b"".join(unpacked(sets.find_file(SHARED / gue.file, part)) for part in gue.parts)
    assert hashlib.sha256(found).hexdigest() == gue.sha256


def unpacked(file):
    return {".gz": gzip.open, ".xz": lzma.open}[file.suffix](file).read()


@pytest.mark.parametrize(
    "file, fields, words",
    [
        (
            "gone",
            {},
            "own cannot be fetched from {address}/gone (File not found); fetch it yourself and give it with --path",
        ),
        ("other", {"sha256": "0" * 64}, "own from {address}/other has sha256"),
        ("other", {"sha256": None, "member": "x"}, None),
    ],
)
def test_what_fails_is_a_sentence_with_the_address_and_leaves_nothing(
    server, tmp_path, monkeypatch, file, fields, words
):
    address, folder = server
    (folder / "other").write_bytes(b"another file")
    serve(monkeypatch, f"{address}/{file}", b"", **fields)
    if words is None:  # no archive: taken as it is
        assert sets.fetch("own", tmp_path).read_bytes() == b"another file"
        return
    with pytest.raises(DataError) as refused:
        sets.fetch("own", tmp_path)
    assert str(refused.value).startswith(words.format(address=address)) and "\n" not in str(refused.value)
    assert list((tmp_path / "a").iterdir()) == []


def test_no_server_no_file_and_no_such_set_are_sentences(tmp_path, monkeypatch, capsys):
    serve(monkeypatch, "http://127.0.0.1:9/none", b"")
    with pytest.raises(DataError, match=r"own cannot be fetched from http://127.0.0.1:9/none \(.*refused"):
        sets.fetch("own", tmp_path)
    with pytest.raises(DataError, match="own cannot be fetched from nowhere.jsonl"):
        sets.fetch("own", tmp_path, "nowhere.jsonl")
    assert cli.main(["data", "fetch", "piqq", "--data", str(tmp_path)]) == 2
    assert "there is no data set 'piqq'" in (error := capsys.readouterr().err) and "did you mean piqa?" in error
    assert cli.main(["data", "fetch", "piqa", "boolq", "--path", "x"]) == 2
    assert "path is 'x', but there are 2 names" in capsys.readouterr().err


def test_the_list_says_what_is_there(tmp_path, capsys):
    (tmp_path / "commonsense").mkdir()
    (tmp_path / "commonsense" / "piqa.val.jsonl.gz").write_bytes(gzip.compress(LINES))
    assert cli.main(["data", "list", "--data", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(sets.SETS) <= set(lines) and "0.0 MB" in lines["piqa"] and "not there" in lines["boolq"]
    assert all("http" in line or "tensorflow_datasets" in line or "--path" in sets.SETS[name].source
               for name, line in lines.items())  # fmt: skip
    assert cli.main(["evaluate", "--list", "--data", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["piqa"].endswith(f"All in {tmp_path}.")
    assert lines["boolq"].endswith(f"Not in {tmp_path}: boolq (titans data fetch boolq).")


def test_a_set_of_tensorflow_datasets_is_built_and_written_as_records(tmp_path, monkeypatch):
    """By a builder that stands in for ARC's: its features, three records."""
    import numpy as np

    asked = []

    class Builder:
        def download_and_prepare(self):
            asked.append("prepared")

        def as_data_source(self, split):
            assert split == "test"
            choices = {"text": np.array([b"this", b"that"]), "label": np.array([0, 1])}
            return [{"id": b"q1", "question": b"Which?", "choices": choices, "answerKey": np.int64(1)}]

    import tensorflow_datasets as tfds

    monkeypatch.setattr(tfds, "builder", lambda name, **how: asked.append((name, how["file_format"])) or Builder())
    (record,) = map(json.loads, sets.fetch("arc_easy", tmp_path).read_text().splitlines())
    assert record == {"id": "q1", "question": "Which?", "choices": ["this", "that"], "gold": 1}
    assert asked == [("ai2_arc/ARC-Easy", "array_record"), "prepared"]

    def fails(*_, **__):
        raise RuntimeError("no connection\nand more")

    monkeypatch.setattr(tfds, "builder", fails)
    with pytest.raises(
        DataError, match=r"books cannot be built by tensorflow_datasets from pg19 \(no connection\); fetch"
    ):
        sets.fetch("books", tmp_path)
