"""Which text a run learns from: what changes it, what does not, and the sentence."""

import dataclasses
from pathlib import Path

import pytest

from titans_jax import data
from titans_jax.config import DataConfig

TEXTS = [f"document {number}, of some length" for number in range(9)]


def identity(config):
    tokenizer = data.load_tokenizer("byte")
    with_rows = data.train_batches(config, tokenizer)
    with_rows.close()
    return data.identify(config, with_rows.statistics, data.validation_batches(config, tokenizer).statistics)


def test_the_same_text_elsewhere_is_the_same(text_config, tmp_path):
    config = text_config(TEXTS)
    moved = Path(config.path).rename(tmp_path / "moved")
    for number, file in enumerate(sorted(moved.iterdir())):
        file.rename(moved / f"other_{number}.md")
    found = identity(dataclasses.replace(config, path=str(moved)))
    assert found["train"]["documents"] == 6 and found["validation"]["documents"] == 3
    assert "python" not in found
    again = identity(dataclasses.replace(config, path=str(moved), sequence_length=8))
    data.check_same_text(config, found, again)


@pytest.mark.parametrize("number, split", [(0, "train"), (2, "validation")])
@pytest.mark.parametrize("change", [lambda text: text.upper(), lambda text: text + "."])
def test_another_text_is_refused(text_config, refused, number, split, change):
    config = text_config(TEXTS)
    before = identity(config)
    file = Path(config.path) / f"{number:03}.txt"
    file.write_text(change(file.read_text()))
    with refused(f"the {split} text of data.path='{config.path}' is not the one", "training.accept_changed_data"):
        data.check_same_text(config, before, identity(config))


def test_where_a_document_ends_counts(text_config, tmp_path, refused):
    """As many documents, as many bytes, and the same letters in the same order."""
    config = text_config(["ab", "cd", "x", "e"], batch_size=1)
    before = identity(config)
    (Path(config.path) / "000.txt").write_text("a")
    (Path(config.path) / "001.txt").write_text("bcd")
    with refused("the train text"):
        data.check_same_text(config, before, identity(config))


def test_the_standard_library_of_another_python_is_said(refused):
    split = {"documents": 3, "bytes": 1000, "fingerprint": "a"}
    saved = {"train": split, "validation": split, "python": "3.11.1"}
    now = {"train": {**split, "bytes": 1001, "fingerprint": "b"}, "validation": split, "python": "3.12.9"}
    with refused("then Python 3.11.1's, 3 documents, 1,000 bytes; now Python 3.12.9's, 3 documents, 1,001 bytes"):
        data.check_same_text(DataConfig(), saved, now)
