"""Text as a tensorflow_datasets dataset in ArrayRecord format: random access on disk, no TensorFlow.

Worth it for text that is slow to parse or too large to hold, and to share one prepared folder between machines; read it
with data.source="tfds", data.path=<the folder build_tfds returns>.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titans_jax.data.errors import DataError
from titans_jax.data.sources import open_documents

if TYPE_CHECKING:
    from collections.abc import Iterator

    import tensorflow_datasets as tfds

    from titans_jax.config import DataConfig


def build_tfds(config: DataConfig, folder: str | Path, *, name: str = "text", version: str = "1.0.0") -> Path:
    """Write the documents of `config` as a dataset with splits "train" and "validation".

    Returns its folder, <folder>/<name>/<version>. Records keep their order and have one field, "text". Nothing is left
    there when writing fails.

    Raises:
      DataError: that folder exists (tensorflow_datasets would silently keep what is in it), or as `open_documents`.
    """
    import tensorflow_datasets as tfds
    from etils import epath

    target = Path(folder).expanduser() / name / version
    if target.exists():
        raise DataError(f"{target} exists: remove it, or write another version or name")
    splits = {split: open_documents(config, split) for split in ("train", "validation")}

    class Text(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)
        # tfds would look for files next to this code; there are none, and looking needs a package that tfds does not
        # install.
        pkg_dir_path = epath.Path(folder)
        code_path = None

        def _info(self) -> tfds.core.DatasetInfo:
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(
            self, dl_manager: tfds.download.DownloadManager
        ) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
            return {split: self._generate_examples(documents) for split, documents in splits.items()}

        def _generate_examples(self, documents: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
            for index in range(len(documents)):
                yield index, {"text": documents[index]}

    Text.name = name
    Text(data_dir=str(Path(folder).expanduser()), file_format="array_record").download_and_prepare()
    return target
