import gzip
import json
import lzma
import os
import sysconfig

import pytest

from titans_jax.config import DataConfig
from titans_jax.data import open_documents

OPEN = {"": open, ".xz": lzma.open, ".gz": gzip.open}
BOTH = ("train", "validation")


def write_records(path, records):
    with OPEN[path.suffix if path.suffix in OPEN else ""](path, "wb") as stream:
        stream.write("".join(json.dumps(record) + "\n" for record in records).encode())


def test_every_nth_document_is_held_out(text_config):
    texts = [f"document {number}" for number in range(10)]
    config = text_config(texts, validation_every=4)
    train, validation = (open_documents(config, split) for split in BOTH)
    assert list(validation) == [texts[3], texts[7]]
    assert list(train) == [text for text in texts if text not in list(validation)]
    assert len(train) == 8 and train[7] == texts[9]


def test_the_standard_library_is_read_without_what_is_not_its_own(monkeypatch, tmp_path):
    for name in ["b.py", "a/z.py", "site-packages/x.py", "a/dist-packages/y.py", "a/__pycache__/c.py", "note.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")  # Python's own tests have such files
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    config = DataConfig(validation_every=3)
    assert list(open_documents(config, "train")) == ["# a/z.py\n", "# b.py\n"]
    assert list(open_documents(config, "validation")) == [""]  # latin.py, the third: an empty document drops out


def test_the_running_standard_library_is_enough_to_train_on():
    train, validation = (open_documents(DataConfig(), split) for split in BOTH)
    assert len(train) > 40 * len(validation) > 0
    # 12 MB of source are in every distribution, with or without the tests (another 19 MB); one file in 50 is held out.
    assert sum(len(text) for text in validation) > 1e5
    assert not set(validation.items) & set(train.items)


def test_no_standard_library_is_refused(monkeypatch, tmp_path, refused):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with refused("data.source='python'", "python311.zip", "data.source='text'"):
        open_documents(DataConfig(), "train")


def test_a_folder_is_read_recursively_in_the_order_of_names(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ["c.txt", "b/a.py", "a.md", "image.png", ".hidden.txt", ".git/x.txt"]:
        (tmp_path / name).write_text(name)
    with lzma.open(tmp_path / "b" / "packed.txt.xz", "wt") as stream:
        stream.write("b/packed.txt.xz")
    config = DataConfig(source="text", path=str(tmp_path))
    assert list(open_documents(config, "train")) == ["a.md", "b/a.py", "b/packed.txt.xz", "c.txt"]


def test_links_to_folders_are_followed_and_not_in_circles(tmp_path):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for name in (folder, elsewhere):
        name.mkdir()
        (name / f"{name.name}.txt").write_text(name.name)
    (folder / "link").symlink_to(elsewhere)
    (folder / "itself").symlink_to(folder)
    (folder / "above").symlink_to(tmp_path)
    (elsewhere / "back").symlink_to(folder)
    config = DataConfig(source="text", path=str(folder), validation_every=9)
    assert list(open_documents(config, "train")) == ["folder", "elsewhere"]


@pytest.mark.parametrize("inside", [True, False])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, refused, inside):
    os.mkfifo(tmp_path / "a.txt")
    with refused("data.path has", "a.txt", "which is no regular file"):
        open_documents(DataConfig(source="text", path=str(tmp_path if inside else tmp_path / "a.txt")), "train")


def test_line_ends_and_odd_characters_are_kept(text_config):
    texts = ["a\r\nb\n\n", "\ufeffbom\x00é", "c"]
    assert list(open_documents(text_config(texts, validation_every=3), "train")) == texts[:2]


def test_of_a_single_file_the_end_is_held_out(tmp_path):
    path = tmp_path / "any.name"
    path.write_text("0123456789" * 10)
    config = DataConfig(source="text", path=str(path), validation_every=10)
    (train,), (validation,) = (open_documents(config, split) for split in BOTH)
    assert (train + validation, validation) == ("0123456789" * 10, "0123456789")


@pytest.mark.parametrize("packed", ["", ".xz", ".gz"])
def test_json_lines(tmp_path, packed):
    path = tmp_path / f"data.jsonl{packed}"
    write_records(path, [{"body": f"text {number}\n", "id": number} for number in range(4)])
    config = DataConfig(source="jsonl", path=str(path), text_field="body", validation_every=2)
    assert list(open_documents(config, "train")) == ["text 0\n", "text 2\n"]
    assert list(open_documents(config, "validation")) == ["text 1\n", "text 3\n"]


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    config = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"), validation_every=2)
    assert list(open_documents(config, "train")) == ["one"]


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_validation_files_within_the_folder_are_not_trained_on(tmp_path, source):
    suffix = ".txt" if source == "text" else ".jsonl"
    for name in ["a", "b", "valid"]:
        path = tmp_path / f"{name}{suffix}"
        path.write_text(name) if source == "text" else write_records(path, [{"text": name}])
    fields = {"path": str(tmp_path), "validation_path": str(tmp_path / f"valid{suffix}")}
    config = DataConfig(source=source, validation_every=0, **fields)
    assert list(open_documents(config, "train")) == ["a", "b"]
    assert list(open_documents(config, "validation")) == ["valid"]


def test_real_json_lines_with_a_validation_file(shared_data):
    """1,000 and 200 documents, as shared/data/README.md states."""
    folder = shared_data / "c4-sample"
    config = DataConfig(
        source="jsonl", path=str(folder / "train.jsonl.xz"), validation_path=str(folder / "validation.jsonl.xz")
    )
    assert [len(open_documents(config, split)) for split in BOTH] == [1000, 200]


def test_real_text_in_one_packed_file(shared_data):
    """tinyshakespeare has 1,115,394 characters, and its train split is the first 90 %."""
    path = shared_data / "tinyshakespeare" / "input.txt.xz"
    config = DataConfig(source="text", path=str(path), validation_every=10)
    assert [len(open_documents(config, split)[0]) for split in BOTH] == [1_115_394 - 111_539, 111_539]


def test_undecodable_text_is_refused_or_replaced(tmp_path, refused):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9!")
    config = DataConfig(source="text", path=str(tmp_path))
    with refused(str(tmp_path / "b.txt"), "byte 3", "data.errors='replace'"):
        list(open_documents(config, "train"))
    replaced = DataConfig(source="text", path=str(tmp_path), errors="replace")
    assert list(open_documents(replaced, "train")) == ["fine", "caf\N{REPLACEMENT CHARACTER}!"]


def test_undecodable_json_lines_are_refused_or_replaced(tmp_path, refused):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n{"text": "caf\xe9!"}\n')
    offset = path.read_bytes().index(b"\xe9")
    with refused(str(path), "line 3", f"byte {offset}", "data.errors='replace'"):
        open_documents(DataConfig(source="jsonl", path=str(path)), "train")
    replaced = DataConfig(source="jsonl", path=str(path), errors="replace", validation_every=2)
    assert list(open_documents(replaced, "validation")) == ["caf\N{REPLACEMENT CHARACTER}!"]


def test_half_a_surrogate_pair_in_json_is_refused_or_replaced(tmp_path, refused):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "a\\ud83d"}\n')
    with refused(str(path), "line 2", "data.errors='replace'"):
        open_documents(DataConfig(source="jsonl", path=str(path)), "train")
    replaced = DataConfig(source="jsonl", path=str(path), errors="replace", validation_every=2)
    open_documents(replaced, "validation")[0].encode()


@pytest.mark.parametrize(
    "line, words",
    [
        ('{"text": 3}', ["data.text_field='text'", "line 2"]),
        ('{"body": "x"}', ["data.text_field='text'", "['body']"]),
        ('["text"]', ["data.text_field='text'"]),
        ('{"text": ', ["not JSON", "line 2"]),
    ],
)
def test_wrong_json_lines_are_refused(tmp_path, refused, line, words):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with refused(*words, "a.jsonl"):
        open_documents(DataConfig(source="jsonl", path=str(tmp_path)), "train")


@pytest.mark.parametrize("suffix, pack", [(".xz", lzma.compress), (".gz", gzip.compress)])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_damaged_files_are_refused(tmp_path, refused, suffix, pack, damage):
    path = tmp_path / f"a.jsonl{suffix}"
    whole = pack(json.dumps({"text": "long enough to be cut " * 100}).encode())
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"not packed at all")
    with refused(str(path), "cannot be unpacked"):
        open_documents(DataConfig(source="jsonl", path=str(path)), "train")


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_missing_and_empty_data_are_refused(tmp_path, refused, source):
    with refused("data.path", "nowhere", "does not exist"):
        open_documents(DataConfig(source=source, path=str(tmp_path / "nowhere")), "train")
    (tmp_path / "image.png").touch()
    with refused("data.path", str(tmp_path), f"data.source='{source}'"):
        open_documents(DataConfig(source=source, path=str(tmp_path)), "train")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    with refused("data.validation_path", "nowhere", "does not exist"):
        open_documents(DataConfig(source=source, path=str(tmp_path), validation_path="nowhere"), "train")


def test_json_lines_without_a_record_are_refused(tmp_path, refused):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with refused("data.path", "holds no record"):
        open_documents(DataConfig(source="jsonl", path=str(tmp_path)), "train")


def test_too_few_documents_to_hold_one_out_are_refused(text_config, refused):
    with refused("data.validation_every=50", "4 documents", "from 2 to 4"):
        open_documents(text_config(list("abcd"), validation_every=50), "validation")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"source": "csv"}, ["data.source='csv'", "'jsonl'"]),
        ({"path": "x"}, ["data.path='x'", "data.source='python'"]),
        ({"source": "text"}, ["data.path", "data.source='text'"]),
        ({"source": "tfds", "path": "x", "validation_path": "y"}, ["data.validation_path='y'", "data.source='tfds'"]),
        ({"validation_every": 1}, ["data.validation_every=1", "2 or more"]),
        ({"errors": "ignore"}, ["data.errors='ignore'", "'replace'"]),
    ],
)
def test_contradictory_fields_are_refused(refused, fields, words):
    with refused(*words):
        open_documents(DataConfig(**fields), "train")


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000], ids=["digits", "nesting"])
def test_json_beyond_what_python_reads_is_refused(tmp_path, refused, value):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": ' + value + "}\n")
    with refused("not JSON", "line 2", "a.jsonl"):
        open_documents(DataConfig(source="jsonl", path=str(tmp_path)), "train")
