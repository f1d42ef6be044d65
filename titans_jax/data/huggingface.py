"""Hugging Face datasets on disk: the parquet or arrow files of a folder, by pyarrow.

The extra `titans-jax[huggingface]` installs pyarrow. `datasets` downloads such folders, and `save_to_disk` writes them.
Files whose names begin with "validation" are the validation documents, unless `data.validation_path` has others, and
those with "test" are left out; where there are none, some documents are held out as from any source. Copies that
`Dataset.map` leaves in a folder (cache-*.arrow) are not read. Rows have random access: in an arrow file each row is
read from the memory-mapped file, in a parquet file with the whole group of rows that it is in.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_jax.data.errors import DataError
from titans_jax.data.sources import Documents, Split, decode, files_of_split, register_source

if TYPE_CHECKING:
    import pyarrow

    from titans_jax.config import DataConfig

SUFFIXES = [".parquet", ".arrow"]


@register_source("parquet")
def _parquet_rows(config: DataConfig, split: Split) -> Documents:
    """One document per row."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError("data.source='parquet' needs pyarrow: pip install 'titans-jax[huggingface]'") from error

    files, of_split = files_of_split(config, split, SUFFIXES)
    files = [file for file in files if not file.name.startswith("cache-")]
    if not of_split or split == "train":
        # As `datasets` names files: validation-00000-of-00001.parquet, or validation/data-00000-of-00001.arrow.
        named = {file: _named(file, Path(config.path).expanduser()) for file in files}
        of_split = of_split or "validation" in named.values()
        files = [file for file in files if named[file] == (split if of_split else "train")]
    places: list[tuple[Path, int, int]] = []  # (file, group of rows, row in it)
    for file in files:
        try:
            for group, rows in enumerate(_group_sizes(file, config)):
                places += [(file, group, row) for row in range(rows)]
        except (pyarrow.ArrowException, OSError) as error:
            cause = str(error).splitlines()[0][:200]
            raise DataError(f"{file} cannot be read ({cause}): the file is damaged, fetch it again") from error
    if not places:
        raise DataError(f"data.path={str(config.path)!r} holds no row for {split}: give files with rows of text")

    def read(place: tuple[Path, int, int]) -> str:
        file, group, row = place
        value = _texts(file, group, config.text_field)[row]
        if isinstance(value, pyarrow.DictionaryScalar):
            value = value.value
        if not isinstance(value, pyarrow.StringScalar) or not value.is_valid:
            raise DataError(
                f"{file}, row {row} of group {group}, has no text in {config.text_field!r} but {value.as_py()!r}"
            )
        # The bytes, as a file may claim to hold text and hold other bytes, which as_py refuses.
        return decode(value.as_buffer().to_pybytes(), f"{file}, row {row}", 0, config.errors)

    return Documents(places, read, of_split)


def _named(file: Path, folder: Path) -> str:
    """The split that a file's path below the folder names: "train" unless it names another."""
    below = file.relative_to(folder).parts if folder.is_dir() else (file.name,)
    for split in ("validation", "valid", "test"):
        if any(part.startswith(split) for part in below):
            return "validation" if split == "valid" else split
    return "train"


def _group_sizes(file: Path, config: DataConfig) -> list[int]:
    """Number of rows in each group of a file; raises DataError where the file has no column for the text."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        found = pyarrow.parquet.ParquetFile(file)
        names, sizes = (
            found.schema_arrow.names,
            [found.metadata.row_group(i).num_rows for i in range(found.num_row_groups)],
        )
    else:
        table = _arrow_table(file)
        names, sizes = table.column_names, [table.num_rows]
    if config.text_field not in names:
        raise DataError(f"data.text_field={config.text_field!r} is no column of {file}, which has these: {names}")
    return sizes


@functools.lru_cache(maxsize=4)
def _texts(file: Path, group: int, field: str) -> Any:
    """The texts of a group of rows; the last few groups are kept, as rows are read in order."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(file).read_row_group(group, columns=[field])[field]
    return _arrow_table(file)[field]


@functools.lru_cache(maxsize=64)
def _arrow_table(file: Path) -> pyarrow.Table:
    """An arrow file, memory-mapped: in the streaming format, which `datasets` writes, or the random-access format."""
    import pyarrow

    source = pyarrow.memory_map(str(file))
    try:
        return pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.ArrowInvalid:
        return pyarrow.ipc.open_file(source).read_all()
