"""Text to batches: documents -> tokens -> rows -> batches.

    tokenizer = data.load_tokenizer(config.data.tokenizer)
    batches = data.train_batches(config.data, tokenizer, align=chunk_size)
    batch = next(batches)          # {"tokens", "targets", "segment_ids"}, each int32 [batch_size, sequence_length]
    state = batches.get_state()    # {"next_row": 8}: one number for all processes, to save beside the model

`targets` is the next token, -1 where there is none; `segment_ids` counts a row's documents from 1, 0 is padding. A
`config` is a titans_jax.config.DataConfig, or anything with its fields. All of it is numpy, and never TensorFlow.
"""

from typing import Any

from titans_jax.data.errors import DataError
from titans_jax.data.packing import Corpus, Rows, pack, tokenize
from titans_jax.data.pipeline import Batch, Statistics, TrainBatches, ValidationBatches
from titans_jax.data.sources import Split, describe_source, open_documents
from titans_jax.data.tfds_text import build_tfds
from titans_jax.data.tokenizers import ByteTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Batch", "ByteTokenizer", "Corpus", "DataError", "Rows", "SentencePieceTokenizer", "Statistics", "Tokenizer",
    "TrainBatches", "ValidationBatches", "build_tfds", "load_tokenizer", "open_documents", "pack", "tokenize",
    "train_batches", "validation_batches",
]  # fmt: skip


def train_batches(
    config: Any, tokenizer: Tokenizer, *, align: int = 1, process_index: int = 0, process_count: int = 1
) -> TrainBatches:
    """Endless shuffled batches of the training split, resumable; `.statistics` counts what is in it.

    Args:
      config: the fields of DataConfig; `batch_size` counts the rows of all processes together.
      align: documents start at multiples of this many positions of a row, padding between them.
      process_index, process_count: which contiguous block of each batch is this process's.

    Raises DataError, one sentence, for data that is missing, empty, undecodable or less than one batch, and for fields
    that do not fit together.
    """
    rows, statistics = _rows(config, tokenizer, "train", align, process_index, process_count)
    if len(rows) < config.batch_size:
        raise DataError(
            f"data.batch_size={config.batch_size} is more than the {len(rows)} rows of {config.sequence_length} tokens "
            f"that {describe_source(config)} gives: use {len(rows)} or less, shorter rows or more data"
        )
    if not 0 <= config.seed < 1 << 32:
        raise DataError(f"data.seed={config.seed} cannot seed the order of rows: use 0 to {(1 << 32) - 1}")
    return TrainBatches(
        rows, statistics, batch_size=config.batch_size, seed=config.seed, process=process_index, processes=process_count
    )


def validation_batches(
    config: Any, tokenizer: Tokenizer, *, align: int = 1, process_index: int = 0, process_count: int = 1
) -> ValidationBatches:
    """The validation split, each row once; make it once, iterate for every evaluation. Otherwise as train_batches."""
    rows, statistics = _rows(config, tokenizer, "validation", align, process_index, process_count)
    return ValidationBatches(
        rows, statistics, batch_size=config.batch_size, process=process_index, processes=process_count
    )


def _rows(
    config: Any, tokenizer: Tokenizer, split: Split, align: int, process_index: int, process_count: int
) -> tuple[Rows, Statistics]:
    if config.batch_size < 1 or config.batch_size % process_count:
        raise DataError(
            f"data.batch_size={config.batch_size} cannot be shared by {process_count} processes: "
            f"use a multiple of {process_count}"
        )
    corpus = tokenize(open_documents(config, split), tokenizer, show_progress=process_index == 0)
    if not corpus.num_bytes:
        raise DataError(f"the {split} documents of {describe_source(config)} hold no text: give more of it")
    rows = pack(corpus, sequence_length=config.sequence_length, packing=config.packing, align=align)
    return rows, Statistics.of(corpus, rows)
