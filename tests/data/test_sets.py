"""Data sets by name: what is there, and what is fetched from a local server or file, whole or not at all."""

import gzip
import hashlib
import http.server
import io
import json
import threading
import zipfile

import pytest

from titans_jax import cli
from titans_jax.data import DataError, sets

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
    assert all("http" in line or "tensorflow_datasets" in line for line in lines.values())
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
