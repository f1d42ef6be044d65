from pathlib import Path

import pytest

from titans_jax.config import DataConfig
from titans_jax.data import DataError


@pytest.fixture
def documents_folder(tmp_path):
    """A function that writes texts as 000.txt, 001.txt, ... and returns their folder."""

    def write(texts):
        folder = tmp_path / "documents"
        folder.mkdir()
        for number, text in enumerate(texts):
            (folder / f"{number:03}.txt").write_bytes(text.encode())
        return str(folder)

    return write


@pytest.fixture
def text_config(documents_folder):
    """A function from texts and fields to the DataConfig that reads them; every third document is for validation."""

    def make(texts, **fields):
        fields = {"sequence_length": 16, "batch_size": 4, "validation_every": 3, **fields}
        return DataConfig(source="text", path=documents_folder(texts), **fields)

    return make


@pytest.fixture(scope="session")
def shared_data():
    folder = Path(__file__).parents[2].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real data in {folder}")
    return folder


@pytest.fixture
def refused():
    """A context that expects a DataError of one sentence with all of `words` in it."""

    class Refused:
        def __init__(self, *words):
            self.words = words

        def __enter__(self):
            pass

        def __exit__(self, kind, error, traceback):
            assert kind is DataError, f"expected a DataError, not {kind}: {error}"
            assert "\n" not in str(error)
            for word in self.words:
                assert word in str(error), f"{word!r} is not in: {error}"
            return True

    return Refused
