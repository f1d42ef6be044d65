import os
import subprocess
import sys

import numpy as np
import pytest

from titans_jax.config import DataConfig
from titans_jax.data import build_tfds, load_tokenizer, open_documents, train_batches, validation_batches

TEXTS = [f"document {number} é\n" * 3 for number in range(7)]


@pytest.fixture
def dataset(text_config, tmp_path):
    return build_tfds(text_config(TEXTS), tmp_path / "prepared")


def test_documents_survive_in_their_order(dataset, tmp_path):
    assert dataset == tmp_path / "prepared" / "text" / "1.0.0"
    config = DataConfig(source="tfds", path=str(dataset))
    train, validation = open_documents(config, "train"), open_documents(config, "validation")
    assert list(validation) == [TEXTS[2], TEXTS[5]]
    assert list(train) == [text for text in TEXTS if text not in list(validation)]
    assert train[4] == TEXTS[6]


def test_batches_equal_those_of_the_text(dataset, text_config, tmp_path):
    fields = {"sequence_length": 16, "batch_size": 4, "validation_every": 3}
    prepared = DataConfig(source="tfds", path=str(dataset), **fields)
    text = DataConfig(source="text", path=str(tmp_path / "documents"), **fields)
    iterators = [train_batches(config, load_tokenizer("byte")) for config in (prepared, text)]
    for _ in range(3):
        batch, other = map(next, iterators)
        assert all((batch[name] == other[name]).all() for name in batch)
    for iterator in iterators:
        iterator.close()
    statistics = [validation_batches(config, load_tokenizer("byte")).statistics for config in (prepared, text)]
    assert statistics[0] == statistics[1]


def test_a_dataset_without_a_validation_split_is_split(tmp_path):
    import tensorflow_datasets as tfds
    from etils import epath

    class Verses(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("2.0.0")
        pkg_dir_path, code_path = epath.Path(tmp_path), None

        def _info(self):
            features = tfds.features.FeaturesDict({"verse": tfds.features.Text(), "number": np.int64})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for number in range(5):
                yield number, {"verse": b"\xff" if number == 4 else f"verse {number}", "number": number}

    builder = Verses(data_dir=str(tmp_path), file_format="array_record")
    builder.download_and_prepare()
    config = DataConfig(source="tfds", path=builder.data_dir, text_field="verse", validation_every=2, errors="replace")
    assert list(open_documents(config, "train")) == ["verse 0", "verse 2", "\N{REPLACEMENT CHARACTER}"]
    assert list(open_documents(config, "validation")) == ["verse 1", "verse 3"]


def test_what_is_no_array_record_dataset_is_refused(dataset, refused, tmp_path):
    with refused("data.path", str(dataset), "dataset_info.json"):  # names the folder that would work
        open_documents(DataConfig(source="tfds", path=str(tmp_path / "prepared")), "train")
    with refused("data.path", "nowhere"):
        open_documents(DataConfig(source="tfds", path=str(tmp_path / "nowhere")), "train")
    with refused("data.text_field='body'", "['text']"):
        open_documents(DataConfig(source="tfds", path=str(dataset), text_field="body"), "train")
    info = dataset / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with refused("data.path", "tfrecord", "file_format='array_record'"):
        open_documents(DataConfig(source="tfds", path=str(dataset)), "train")


def test_features_of_a_module_of_somebodys_own_are_not_imported(dataset, refused, tmp_path, monkeypatch):
    (tmp_path / "own_features.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    features = dataset / "features.json"
    whole = features.read_text()
    assert "tensorflow_datasets.core.features.text_feature.Text" in whole
    features.write_text(whole.replace("tensorflow_datasets.core.features.text_feature.Text", "own_features.Text"))
    with refused(str(features), "'own_features.Text'", "tfds.features.Text"):
        open_documents(DataConfig(source="tfds", path=str(dataset)), "train")


@pytest.mark.parametrize("file", ["features.json", "dataset_info.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"type": 3}', '{"splits": 3}'])
def test_damaged_descriptions_are_refused(dataset, refused, file, content):
    (dataset / file).write_text(content)
    with refused(str(dataset), "prepare"):
        open_documents(DataConfig(source="tfds", path=str(dataset)), "train")


def test_a_damaged_record_is_refused(dataset, refused):
    (file,) = dataset.glob("*train*array_record*")
    file.write_bytes(file.read_bytes()[:60] + b"x" * (file.stat().st_size - 60))
    with refused("damaged"):
        list(open_documents(DataConfig(source="tfds", path=str(dataset)), "train"))


def test_an_existing_dataset_is_not_overwritten(dataset, refused, tmp_path):
    config = DataConfig(source="text", path=str(tmp_path / "documents"), validation_every=3)
    with refused(str(dataset), "exists"):
        build_tfds(config, tmp_path / "prepared")
    assert build_tfds(config, tmp_path / "prepared", version="1.0.1").is_dir()


def test_a_failed_build_leaves_nothing_that_looks_prepared(text_config, refused, tmp_path):
    config = text_config(TEXTS)
    (tmp_path / "documents" / "999.txt").write_bytes(b"\xff")
    with refused("999.txt", "byte 0"):
        build_tfds(config, tmp_path / "prepared")
    assert not list((tmp_path / "prepared").rglob("dataset_info.json"))
    (tmp_path / "documents" / "999.txt").unlink()
    prepared = DataConfig(source="tfds", path=str(build_tfds(config, tmp_path / "prepared")))
    assert len(open_documents(prepared, "train")) == 5


PROGRAM = """
import sys
from titans_jax import data
from titans_jax.config import DataConfig
fields = {"sequence_length": 16, "batch_size": 2, "validation_every": 3}
text = DataConfig(source="text", path=sys.argv[1], **fields)
tfds = DataConfig(source="tfds", path=str(data.build_tfds(text, sys.argv[2])), **fields)
for config in (DataConfig(), text, tfds):
    batches = data.train_batches(config, data.load_tokenizer("byte"))
    next(batches)
    batches.close()
    next(iter(data.validation_batches(config, data.load_tokenizer("byte"))))
assert "tensorflow" not in sys.modules
"""


@pytest.mark.processes
@pytest.mark.slow
def test_tensorflow_is_never_imported(text_config, tmp_path):
    """Not even where it is installed: the one on this program's path ends the program."""
    (tmp_path / "path" / "tensorflow").mkdir(parents=True)
    (tmp_path / "path" / "tensorflow" / "__init__.py").write_text("raise SystemExit('tensorflow was imported')")
    path = os.pathsep.join([str(tmp_path / "path"), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, text_config(TEXTS).path, str(tmp_path / "prepared")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
