"""Prepared rows: every token once, whatever stopped the preparing and whoever reads; what is damaged is refused."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from titans_jax.config import DataConfig
from titans_jax.data import (
    load_tokenizer,
    open_documents,
    packing,
    prepare,
    sources,
    train_batches,
    validation_batches,
    validation_by_source,
)
from titans_jax.data import prepare as preparing
from titans_jax.data.errors import DataError
from titans_jax.data.stored import INDEX, StoredRows, decode_row, encode_row, read_index

TOKENIZER = load_tokenizer("byte")
# Documents of 10 to 49 characters: some longer than a row of 16.
TEXTS = ["".join(np.random.default_rng(number).choice(list("abcdefg \n"), 10 + number)) for number in range(40)]
MODULE = sys.modules[preparing.__module__]


@pytest.fixture
def config(text_config):
    return text_config(TEXTS, validation_every=4)


@pytest.fixture
def prepared(config, tmp_path):
    """The config that reads what was prepared, a few shards of it."""
    folder = str(tmp_path / "prepared")
    prepare(config, folder, workers=1, shard_bytes=200)
    return dataclasses.replace(config, source="tokens", path=folder)


def targets_of(rows):
    return np.concatenate([row["targets"][row["targets"] >= 0] for row in rows])


def expected_targets(config, split):
    return sorted(token for text in open_documents(config, split) for token in [*text.encode(), 256])


@pytest.mark.parametrize("packed", ["documents", "stream"])
def test_every_token_is_predicted_once(config, tmp_path, packed):
    config = dataclasses.replace(config, packing=packed)
    index = prepare(config, str(tmp_path / "rows"), workers=1, shard_bytes=200)
    for split in ("train", "validation"):
        rows = StoredRows(index, split)
        assert len(index.splits[split]) > 1
        assert sorted(targets_of(rows)) == expected_targets(config, split)
        counts = index.statistics(split)
        assert counts.num_rows == len(rows) and counts.num_tokens == len(targets_of(rows))
        assert counts.num_documents == len(open_documents(config, split))
        assert counts.num_bytes == sum(len(text.encode()) for text in open_documents(config, split))


def test_a_document_longer_than_a_portion_goes_on_in_the_next(tmp_path, monkeypatch):
    """Its inputs are the tokens before its targets, across shards too."""
    for module in (sources, packing):
        monkeypatch.setattr(module, "PART", 64)
    text = "".join(np.random.default_rng(0).choice(list("abcdé \n"), 1000))
    (tmp_path / "a.txt").write_text(text)
    config = DataConfig(
        source="text", path=str(tmp_path / "a.txt"), sequence_length=32, validation_every=10, packing="stream"
    )
    index = prepare(config, str(tmp_path / "rows"), workers=1, shard_bytes=200)
    assert len(index.splits["train"]) > 3
    rows = StoredRows(index, "train")
    inputs = np.concatenate([row["tokens"][row["targets"] >= 0] for row in rows])
    assert [*targets_of(rows)] == [*text[:900].encode(), 256]
    assert [*inputs] == [256, *text[:900].encode()]


def test_a_record_is_its_row(config):
    corpus = packing.tokenize(open_documents(config, "train"), TOKENIZER, show_progress=False)
    rows = packing.pack(corpus, sequence_length=16, packing="documents", align=4)
    for index in range(len(rows)):
        again = decode_row(encode_row(rows, index), np.dtype("<u2"), 16)
        for name, values in rows[index].items():
            np.testing.assert_array_equal(again[name], values)


@pytest.mark.parametrize("count", [2, 4])
def test_batches_are_the_same_for_any_number_of_processes_and_from_any_step(prepared, count):
    whole = train_batches(prepared, TOKENIZER)
    parts = [train_batches(prepared, TOKENIZER, process_index=i, process_count=count) for i in range(count)]
    late = train_batches(prepared, TOKENIZER)
    late.set_state({"next_row": 4 * 9})
    expected = list(islice(whole, 20))
    for number, batch in enumerate(expected):
        shares = [next(part) for part in parts]
        for name, values in batch.items():
            np.testing.assert_array_equal(values, np.concatenate([share[name] for share in shares]))
        if number >= 9:
            again = next(late)
            assert all((again[name] == values).all() for name, values in batch.items())
    for iterator in (whole, late, *parts):
        iterator.close()


def test_validation_is_padded(prepared, config):
    batches = list(validation_batches(prepared, TOKENIZER))
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    assert sorted(targets[targets >= 0]) == expected_targets(config, "validation")


def test_a_stop_costs_what_was_being_written(config, tmp_path, monkeypatch):
    """The folder is the one of an undisturbed run, and no shard is written twice."""
    undisturbed = tmp_path / "undisturbed"
    prepare(config, str(undisturbed), workers=1, shard_bytes=200)
    whole = MODULE.write_shard
    written = []

    def stops(folder, tokenizer, settings, portion):
        if len(written) == 3:
            written.append("stop")
            raise KeyboardInterrupt
        written.append(portion.name)
        return whole(folder, tokenizer, settings, portion)

    monkeypatch.setattr(MODULE, "write_shard", stops)
    folder = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        prepare(config, str(folder), workers=1, shard_bytes=200)
    assert not (folder / INDEX).exists()
    (folder / "train-00003.array_record.77.tmp").write_bytes(b"what a killed process leaves")
    prepare(config, str(folder), workers=1, shard_bytes=200)
    names = [name for name in written if name != "stop"]
    assert len(names) == len({*names})
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        file.name: file.read_bytes() for file in undisturbed.iterdir()
    }


def test_two_preparations_in_one_folder_are_told_apart(config, tmp_path, monkeypatch):
    """What the other one's end removes is what a first one is still writing."""
    from array_record.python import array_record_module

    class Removed(array_record_module.ArrayRecordWriter):
        def __init__(self, file, options):
            super().__init__(file, options)
            self.file = Path(file)

        def close(self):
            super().close()
            self.file.unlink()

    monkeypatch.setattr(array_record_module, "ArrayRecordWriter", Removed)
    with pytest.raises(DataError, match="was removed while it was written: another preparation in the same folder"):
        prepare(config, str(tmp_path / "rows"), workers=1, shard_bytes=200)


def stopped_before_the_index(config, tmp_path, monkeypatch):
    """A folder with all shards and no index."""
    folder = tmp_path / "rows"
    monkeypatch.setattr(MODULE, "write_index", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(config, str(folder), workers=1, shard_bytes=200)
    monkeypatch.undo()
    return folder


def test_a_changed_text_is_tokenized_again(config, tmp_path, monkeypatch):
    folder = stopped_before_the_index(config, tmp_path, monkeypatch)
    first = Path(config.path) / "000.txt"
    first.write_text(first.read_text().upper())
    index = prepare(config, str(folder), workers=1, shard_bytes=200)
    assert sorted(targets_of(StoredRows(index, "train"))) == expected_targets(config, "train")


def test_shards_that_are_not_as_they_were_written_are_written_again(config, tmp_path, monkeypatch):
    """One is gone and one was cut between two starts."""
    folder = stopped_before_the_index(config, tmp_path, monkeypatch)
    (folder / "train-00000.array_record").unlink()
    cut = folder / "train-00001.array_record"
    cut.write_bytes(cut.read_bytes()[:-5])
    index = prepare(config, str(folder), workers=1, shard_bytes=200)
    assert sorted(targets_of(StoredRows(index, "train"))) == expected_targets(config, "train")


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_preparation_goes_on(config, tmp_path):
    """With workers of its own, and SIGKILL: nothing is left running, and the same folder comes out."""
    expected = tmp_path / "expected"
    prepare(config, str(expected), workers=1, shard_bytes=100)
    folder = tmp_path / "rows"
    code = (
        "import sys; from titans_jax.config import DataConfig; from titans_jax.data import prepare\n"
        f"fields, folder = {vars(config)!r}, {str(folder)!r}\n"
        "if __name__ == '__main__': prepare(DataConfig(**fields), folder, workers=2, shard_bytes=100)"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    process = subprocess.Popen([sys.executable, script], start_new_session=True)
    deadline = time.monotonic() + 60
    while not list(folder.glob("*.array_record.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("workers outlived the process that started them")
    if not (folder / INDEX).exists():
        subprocess.run([sys.executable, script], check=True)
    assert (folder / INDEX).read_bytes() == (expected / INDEX).read_bytes()


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda file: file.unlink(), ["train-00001.array_record", "is missing"]),
        (
            lambda file: file.write_bytes(file.read_bytes()[:-100]),
            ["train-00001.array_record", "bytes and was written"],
        ),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"), ["train-00001.array_record", "not what was"]),
    ],
    ids=["missing", "cut", "altered"],
)
def test_damaged_shards_are_refused(prepared, refused, damage, words):
    damage(Path(prepared.path) / "train-00001.array_record")
    with refused(*words, "prepare the data again"):
        train_batches(prepared, TOKENIZER)


def test_every_process_looks_at_its_share_of_the_shards(prepared, refused):
    file = Path(prepared.path) / "train-00001.array_record"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    train_batches(prepared, TOKENIZER, process_index=0, process_count=2).close()
    with refused("train-00001.array_record"):
        train_batches(prepared, TOKENIZER, process_index=1, process_count=2)


def test_a_damaged_index_is_refused(prepared, refused):
    file = Path(prepared.path) / INDEX
    content = json.loads(file.read_text())
    content["splits"]["train"][0]["rows"] += 1
    for wrong in (json.dumps(content), "{", "[]"):
        file.write_text(wrong)
        with refused("data.path=", "damaged", "prepare it again"):
            train_batches(prepared, TOKENIZER)
    file.unlink()
    with refused("data.path=", "has no index.json", "titans data prepare"):
        train_batches(prepared, TOKENIZER)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"sequence_length": 32}, ["data.sequence_length is 32", "prepared with 16"]),
        ({"packing": "stream"}, ["data.packing is stream", "prepared with documents"]),
        ({"path": None}, ["data.path is missing"]),
        ({"path": "/nowhere"}, ["'/nowhere' has no index.json"]),
        ({"path": "ftp://x/y"}, ["ftp://", "use a local folder, gs://"]),
        ({"validation_path": "x"}, ["data.validation_path='x'", "no use"]),
        ({"mixture": ("a=1",)}, ["data.path=", "data.mixture"]),
        ({"path": None, "mixture": ("a",)}, ["data.mixture has 'a'", "FOLDER=WEIGHT"]),
        ({"path": None, "mixture": ("a=0",)}, ["data.mixture has 'a=0'"]),
        ({"source": "text", "mixture": ("a=1",)}, ["data.mixture has no use", "data.source='text'"]),
    ],
)
def test_what_does_not_fit_is_refused(prepared, refused, fields, words):
    with refused(*words):
        train_batches(dataclasses.replace(prepared, **fields), TOKENIZER)


def test_other_chunks_and_another_tokenizer_are_refused(prepared, refused, shared_data):
    with refused("multiples of 8", "prepared with 1"):
        train_batches(prepared, TOKENIZER, align=8)
    name = str(shared_data / "tokenizers/mistral-v1/tokenizer.model")
    with refused("data.tokenizer=", "not the one", "use 'byte'"):
        train_batches(dataclasses.replace(prepared, tokenizer=name), load_tokenizer(name))


def test_folders_that_are_taken_are_refused(config, prepared, tmp_path, refused):
    with refused("output=", "holds prepared data already"):
        prepare(config, prepared.path, workers=1)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").touch()
    with refused("output=", "holds dear.txt", "an empty folder"):
        prepare(config, str(tmp_path / "letters"), workers=1)
    with refused("data.source='tokens'", "prepared already"):
        prepare(prepared, str(tmp_path / "again"), workers=1)
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "prepare.json").write_text(json.dumps({"sequence_length": 8}))
    with refused("output=", "begun with sequence_length 8, not 16"):
        prepare(config, str(begun), workers=1)


def test_a_mixture_has_its_weights_in_every_batch_and_goes_on(text_config, tmp_path):
    """Three rows in four are from the one source and one from the other, each of whose rows comes once an epoch."""
    folders = {}
    for letter, number in (("a", 30), ("b", 6)):
        texts = tmp_path / f"texts_{letter}"
        texts.mkdir()
        for i in range(number):
            (texts / f"{i:02}.txt").write_text(letter * 10 + chr(ord("A") + i))
        config = DataConfig(source="text", path=str(texts), sequence_length=12, batch_size=8, validation_every=3)
        folders[letter] = str(tmp_path / letter)
        prepare(config, folders[letter], workers=1)
    mixture = (f"{folders['a']}=3", f"{folders['b']}=1")
    config = dataclasses.replace(config, source="tokens", path=None, mixture=mixture)
    batches = train_batches(config, TOKENIZER)
    found = list(islice(batches, 12))
    for batch in found:
        assert (batch["tokens"][:, 1] == ord("a")).sum() == 6
    fresh = train_batches(config, TOKENIZER)
    fresh.set_state({"next_row": 8 * 5})
    for batch, again in zip(found[5:], fresh, strict=False):
        np.testing.assert_array_equal(batch["tokens"], again["tokens"])
    of_b = [chr(row[11]) for batch in found for row in batch["tokens"] if row[1] == ord("b")]
    assert len(of_b) == 24 and all(sorted(of_b[i : i + 4]) == ["A", "B", "D", "E"] for i in range(0, 24, 4))
    batches.close(), fresh.close()
    by_source = validation_by_source(config, TOKENIZER)
    assert {name: part.statistics.num_documents for name, part in by_source.items()} == {"a": 10, "b": 2}


def test_a_bucket_is_written_to_and_read_from(config, tmp_path, monkeypatch):
    """gs:// by etils.epath, here over a file system in memory."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    fsspec.register_implementation("gcs", MemoryFileSystem, clobber=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = "gs://bucket/rows"
    index = prepare(config, address, workers=1, shard_bytes=200)
    local = prepare(config, str(tmp_path / "local"), workers=1, shard_bytes=200)
    assert index.splits == local.splits
    read = read_index(address)
    assert sorted(targets_of(StoredRows(read, "train"))) == expected_targets(config, "train")
    assert len(list((tmp_path / "cache").rglob("*.array_record"))) == len(index.splits["train"])


def test_rows_can_be_read_as_text(prepared, config):
    joined = "".join(open_documents(prepared, "validation"))
    assert sorted(joined) == sorted("".join(open_documents(config, "validation")))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_hugging_face_folders(tmp_path, refused, kind):
    import pyarrow
    import pyarrow.parquet

    def write(name, texts):
        table = pyarrow.table({"text": texts, "id": list(range(len(texts)))})
        file = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            return pyarrow.parquet.write_table(table, file, row_group_size=2)
        with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)

    write("train-00000-of-00001", ["one", "zwei", "trois", "🐍"])
    config = DataConfig(source="parquet", path=str(tmp_path), validation_every=2)
    assert list(open_documents(config, "train")) == ["one", "trois"]
    assert list(open_documents(config, "validation")) == ["zwei", "🐍"]
    write("test-00000-of-00001", ["not read"])
    write("validation-00000-of-00001", ["held out"])
    assert list(open_documents(config, "train")) == ["one", "zwei", "trois", "🐍"]
    assert list(open_documents(config, "validation")) == ["held out"]
    with refused("data.text_field='body'", "['text', 'id']"):
        open_documents(dataclasses.replace(config, text_field="body"), "train")
    (tmp_path / f"train-00001.{kind}").write_bytes(b"nothing of the kind")
    with refused(f"train-00001.{kind}", "cannot be read"):
        open_documents(config, "train")


def test_texts_of_parquet_that_are_none(tmp_path, refused):
    """Bytes that are not UTF-8 are treated as in any file, though the column's type says text; texts in a dictionary
    are texts; what is absent or a number is refused."""
    import pyarrow
    import pyarrow.parquet

    claimed = pyarrow.array([b"one", b"z\xffwei"], pyarrow.binary()).view(pyarrow.string())
    columns = {"text": claimed, "coded": pyarrow.array(["a", "b"]).dictionary_encode(), "missing": ["a", None]}
    for split in ("train", "validation"):
        pyarrow.parquet.write_table(pyarrow.table(columns | {"id": [1, 2]}), tmp_path / f"{split}.parquet")
    config = DataConfig(source="parquet", path=str(tmp_path))

    def texts(**fields):
        return list(open_documents(dataclasses.replace(config, **fields), "train"))

    with refused("train.parquet, row 1 is not UTF-8 at byte 1", "data.errors='replace'"):
        texts()
    assert texts(errors="replace") == ["one", "z\ufffdwei"]
    assert texts(text_field="coded") == ["a", "b"]
    with refused("row 1 of group 0, has no text in 'missing' but None"):
        texts(text_field="missing")
    with refused("row 0 of group 0, has no text in 'id' but 1"):
        texts(text_field="id")


@pytest.fixture(scope="module")
def blank_tokenizer(tmp_path_factory):
    """A SentencePiece model to which a line end, as all blanks at an end, is no token: SentencePiece's default."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "words.txt").write_text("\n".join(" ".join(text.split()) for text in TEXTS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "words.txt"), model_prefix=str(folder / "t"), vocab_size=30, minloglevel=2
    )
    return str(folder / "t.model")


def test_prepared_rows_have_the_targets_of_unprepared_ones_where_blanks_are_no_tokens(
    blank_tokenizer, text_config, tmp_path
):
    """Shards end behind line ends, and documents of blanks are left out, with their bytes."""
    texts = ["\n".join(["abc def", "gab cde", "fed"] * 9), "   ", "\n\n", "fade cab", "bead"] * 3
    config = dataclasses.replace(text_config(texts, validation_every=4), tokenizer=blank_tokenizer, packing="stream")
    tokenizer = load_tokenizer(blank_tokenizer)
    assert len(tokenizer.encode("\n")) == 0
    prepare(config, str(tmp_path / "prepared"), workers=1, shard_bytes=40)
    prepared = dataclasses.replace(config, source="tokens", path=str(tmp_path / "prepared"))
    direct, stored = (train_batches(each, tokenizer).statistics for each in (config, prepared))
    for name in ("num_documents", "num_bytes", "num_tokens"):
        assert getattr(direct, name) == getattr(stored, name), name
    corpus = packing.tokenize(open_documents(config, "train"), tokenizer, show_progress=False)
    assert sorted(targets_of(StoredRows(read_index(prepared.path), "train"))) == sorted(corpus.tokens[1:])


def test_the_bytes_a_token_of_a_mixture_are_those_of_its_batches(tmp_path):
    """Of documents of one letter, each with an end, half of the tokens are bytes; of long ones nearly all."""
    folders = []
    for name, texts in (("short", ["a", "b", "c", "d"] * 40), ("long", ["abcdefg" * 80, "gfedcba" * 80] * 4)):
        folders.append(str(tmp_path / name))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        path = str(tmp_path / f"{name}.jsonl")
        config = DataConfig(source="jsonl", path=path, packing="stream", sequence_length=16, validation_every=4)
        prepare(config, folders[-1], workers=1)
    weights = (9, 1)
    mixture = tuple(f"{folder}={weight}" for folder, weight in zip(folders, weights, strict=True))
    config = dataclasses.replace(config, source="tokens", path=None, mixture=mixture, batch_size=10)
    batches = train_batches(config, TOKENIZER)
    targets = np.concatenate([next(batches)["targets"].ravel() for _ in range(40)])
    batches.close()
    seen = np.mean(targets[targets >= 0] < 256)
    assert batches.statistics.bytes_per_token == pytest.approx(seen, abs=0.01)
    assert seen < 0.6 < batches.statistics.num_bytes / batches.statistics.num_tokens


def test_a_folder_is_in_a_mixture_once(prepared, refused):
    twice = dataclasses.replace(prepared, path=None, mixture=(f"{prepared.path}=1", f"{prepared.path}/=3"))
    with refused("data.mixture has", "twice", "the sum of both"):
        train_batches(twice, TOKENIZER)


def test_hugging_face_files_of_other_splits_are_not_trained_on(tmp_path):
    import pyarrow.parquet

    def write(file, texts):
        file.parent.mkdir(exist_ok=True)
        table = pyarrow.table({"text": texts})
        if file.suffix == ".parquet":
            return pyarrow.parquet.write_table(table, file)
        with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)

    for split in ("train", "validation", "test"):
        write(tmp_path / "set" / f"{split}-00000-of-00001.parquet", [f"{split} 0", f"{split} 1"])
    write(tmp_path / "own" / "held.parquet", ["own"])
    config = DataConfig(source="parquet", path=str(tmp_path / "set"), validation_path=str(tmp_path / "own"))
    assert list(open_documents(config, "train")) == ["train 0", "train 1"]
    assert list(open_documents(config, "validation")) == ["own"]
    write(tmp_path / "saved" / "data-00000-of-00001.arrow", ["a", "b", "c", "d"])
    write(tmp_path / "saved" / "cache-1f3a.arrow", ["a", "b", "c", "d"])
    config = DataConfig(source="parquet", path=str(tmp_path / "saved"), validation_every=2)
    assert [*open_documents(config, "train"), *open_documents(config, "validation")] == ["a", "c", "b", "d"]
