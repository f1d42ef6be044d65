"""Text to batches: documents -> tokens -> rows -> batches.

    tokenizer = data.load_tokenizer(config.data.tokenizer)
    batches = data.train_batches(config.data, tokenizer, align=chunk_size)
    batch = next(batches)          # {"tokens", "targets", "segment_ids"}, each int32 [batch_size, sequence_length]
    state = batches.get_state()    # {"next_row": 8}: one number for all processes, to save with the model

`targets` is the next token, -1 where there is none; `segment_ids` counts a row's documents from 1, 0 is padding. All of
it is numpy, and never TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titans_jax.data import huggingface as huggingface  # registers the source "parquet"
from titans_jax.data.errors import DataError
from titans_jax.data.identity import check_same_text, identify
from titans_jax.data.packing import Corpus, Rows, pack, tokenize
from titans_jax.data.pipeline import Batch, Share, Statistics, TrainBatches, ValidationBatches
from titans_jax.data.prepare import prepare, require_text
from titans_jax.data.sources import SOURCES, Documents, Split, describe_source, open_documents, register_source
from titans_jax.data.stored import StoredRows, names, open_indexes, parts, stored_rows
from titans_jax.data.tfds_text import build_tfds
from titans_jax.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_files,
)

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "DataError",
    "Documents",
    "HuggingFaceTokenizer",
    "Rows",
    "SOURCES",
    "SentencePieceTokenizer",
    "Split",
    "Statistics",
    "Tokenizer",
    "TrainBatches",
    "ValidationBatches",
    "build_tfds",
    "check_same_text",
    "identify",
    "load_tokenizer",
    "open_documents",
    "pack",
    "prepare",
    "register_source",
    "require_text",
    "tokenize",
    "tokenizer_files",
    "train_batches",
    "validation_batches",
    "validation_by_source",
]

if TYPE_CHECKING:
    from titans_jax.config import DataConfig


def train_batches(
    config: DataConfig, tokenizer: Tokenizer, *, align: int = 1, process_index: int = 0, process_count: int = 1
) -> TrainBatches:
    """Endless shuffled batches of the training split, resumable; `.statistics` counts what is in it.

    Args:
      config: `batch_size` counts the rows of all processes together.
      align: documents start at multiples of this many positions of a row, padding between them.
      process_index, process_count: which contiguous block of each batch is this process's.

    Raises:
      DataError: the data is missing, empty, undecodable or less than one batch, or fields do not fit together.
    """
    share = _share(config, process_index, process_count)
    rows, statistics = _rows(config, tokenizer, "train", align, share)
    if len(rows) < config.batch_size:
        raise DataError(
            f"data.batch_size={config.batch_size} is more than the {len(rows)} rows of {config.sequence_length} tokens "
            f"that {describe_source(config)} gives: use {len(rows)} or less, shorter rows or more data"
        )
    if not 0 <= config.seed < 1 << 32:
        raise DataError(f"data.seed={config.seed} cannot seed the order of rows: use 0 to {(1 << 32) - 1}")
    weights = [weight for _, weight in parts(config)] if config.mixture else None
    return TrainBatches(rows, statistics, share, seed=config.seed, weights=weights)


def validation_batches(
    config: DataConfig, tokenizer: Tokenizer, *, align: int = 1, process_index: int = 0, process_count: int = 1
) -> ValidationBatches:
    """The validation split, each row once, as often as it is iterated over; arguments and errors of `train_batches`."""
    share = _share(config, process_index, process_count)
    rows, statistics = _rows(config, tokenizer, "validation", align, share)
    return ValidationBatches(rows, statistics, share)


def validation_by_source(
    config: DataConfig, tokenizer: Tokenizer, *, align: int = 1, process_index: int = 0, process_count: int = 1
) -> dict[str, ValidationBatches]:
    """The validation split of each part of `data.mixture` by its name, {} without one; as `validation_batches`."""
    if not config.mixture:
        return {}
    share = _share(config, process_index, process_count)
    indexes = open_indexes(config, tokenizer, align)
    return {
        name: ValidationBatches(StoredRows(index, "validation"), index.statistics("validation"), share)
        for name, index in zip(names(config), indexes, strict=True)
    }


def _share(config: DataConfig, process_index: int, process_count: int) -> Share:
    if config.batch_size < 1 or config.batch_size % process_count:
        raise DataError(
            f"data.batch_size={config.batch_size} cannot be shared by {process_count} processes: "
            f"use a multiple of {process_count}"
        )
    return Share(config.batch_size, process_index, process_count)


def _rows(
    config: DataConfig, tokenizer: Tokenizer, split: Split, align: int, share: Share
) -> tuple[Sequence[Batch], Statistics]:
    """The packed rows of a split, and counts over it."""
    if config.source == "tokens":
        return stored_rows(config, tokenizer, split, align, share)
    if config.mixture:
        raise DataError(
            f"data.mixture has no use with data.source={config.source!r}: prepare each source (titans data prepare) "
            "and set data.source='tokens'"
        )
    corpus = tokenize(open_documents(config, split), tokenizer, show_progress=share.process == 0)
    require_text(corpus.num_bytes, split, config)
    rows = pack(corpus, sequence_length=config.sequence_length, packing=config.packing, align=align)
    return rows, Statistics.count(corpus, rows)
