"""The one reader of documents: files of every kind, and what cannot be read."""

import dataclasses
import gzip
import json
import lzma

import numpy as np
import pytest

from tests.evaluation.test_positions import run_of
from titans_jax.evaluation import EvaluationError, niah, positions
from titans_jax.evaluation.documents import read_documents

RECORDS = "".join(json.dumps({"text": text, "title": "t"}) + "\n" for text in ("The sea.", "The wind."))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("run"), "lmm")


@pytest.mark.parametrize(
    "name, pack", [("a.jsonl", bytes), ("a.jsonl.xz", lzma.compress), ("a.jsonl.gz", gzip.compress)]
)
def test_records_are_documents_for_needles_and_positions_alike(run, tmp_path, name, pack):
    file = tmp_path / name
    file.write_bytes(pack(RECORDS.encode()))
    assert read_documents(run, file) == ["The sea.", "The wind."]
    assert niah.read_essay(run, file).first_sentences(4) == ["The sea.", "The wind."]
    stream = positions.read_corpus(run, file).tokens
    between = run.tokenizer.bos_id
    np.testing.assert_array_equal(stream, [between, *b"The sea.", between, *b"The wind.", between])
    assert read_documents(run, tmp_path) == ["The sea.", "The wind."]


def test_a_text_file_is_one_document_and_a_folder_as_many_as_it_has(run, tmp_path):
    (tmp_path / "a.txt").write_text("One.")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"Two."))
    assert read_documents(run, tmp_path / "b.txt.xz") == ["Two."]
    assert read_documents(run, tmp_path) == ["One.", "Two."]


def test_bytes_that_are_no_text_are_read_as_in_training(run, tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"One\xff.")
    config = dataclasses.replace(run.config, data=dataclasses.replace(run.config.data, errors="replace"))
    assert read_documents(dataclasses.replace(run, config=config), file) == ["One\ufffd."]


def test_no_file_is_the_held_out_documents(run):
    assert read_documents(run, None) and read_documents(run, None) == read_documents(run, None)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("gone.txt", None, "does not exist"),
        ("bytes.txt", b"\xff\xfe\xfa", "is not UTF-8 at byte 0"),
        (
            "other.jsonl",
            b'{"body": "x"}\n',
            r"data.text_field='text' is no text in .*other.jsonl, line 1,.* \['body'\]",
        ),
        ("cut.txt.xz", b"\xfd7zXZ", "cannot be unpacked"),
    ],
)
@pytest.mark.parametrize("read", [niah.read_essay, positions.read_corpus], ids=lambda read: read.__name__)
def test_what_cannot_be_read_is_refused_in_a_sentence(run, tmp_path, name, content, words, read):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(EvaluationError, match=rf"text is '.*{name}', which cannot be used: .*{words}") as refused:
        read(run, tmp_path / name)
    assert "\n" not in str(refused.value)


def test_an_essay_without_words_is_refused(run, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(EvaluationError, match="has no words"):
        niah.read_essay(run, tmp_path / "empty.txt")
