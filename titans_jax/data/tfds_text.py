"""Text as a tensorflow_datasets dataset in ArrayRecord format: random access on disk, no TensorFlow.

Worth it for text that is slow to parse or too large to hold, and to share one prepared folder between machines; read it
with data.source="tfds", data.path=<the folder build_tfds returns>.
"""

from pathlib import Path
from typing import Any

from titans_jax.data.errors import DataError
from titans_jax.data.sources import open_documents


def build_tfds(config: Any, folder: str | Path, *, name: str = "text", version: str = "1.0.0") -> Path:
    """Writes the documents of `config` (a DataConfig) as a dataset with splits "train" and "validation".

    Returns its folder, <folder>/<name>/<version>. Records keep their order and have one field, "text". Nothing is left
    there when writing fails. Raises DataError if that folder exists (tensorflow_datasets would silently keep what is in
    it), and what open_documents raises.
    """
    import tensorflow_datasets as tfds
    from etils import epath

    target = Path(folder).expanduser() / name / version
    if target.exists():
        raise DataError(f"{target} exists: remove it, or write another version or name")
    splits = {split: open_documents(config, split) for split in ("train", "validation")}

    class Text(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)
        # Nothing lies beside this code for tfds to find; looking would need a package that it does not ask for.
        pkg_dir_path = epath.Path(folder)
        code_path = None

        def _info(self) -> tfds.core.DatasetInfo:
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(documents) for split, documents in splits.items()}

        def _generate_examples(self, documents):
            for index in range(len(documents)):
                yield index, {"text": documents[index]}

    Text.name = name
    Text(data_dir=str(Path(folder).expanduser()), file_format="array_record").download_and_prepare()
    return target
