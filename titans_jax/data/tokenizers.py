"""Tokenizers: text to token ids and back. A tokenizer of your own implements `Tokenizer`."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from titans_jax.data.errors import DataError

BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files that lie beside a tokenizer.json."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
"""Names of the token that ends a document, where nothing beside tokenizer.json says which it is."""


class Tokenizer(Protocol):
    """The interface through which the pipeline, the trainer and generation use a tokenizer."""

    vocab_size: int
    """Ids are 0 to vocab_size - 1."""
    eos_id: int
    """The token between documents."""
    bos_id: int
    """The same id: as in GPT-2, the token that ends a document begins the next one. So the first token of every
    document is predicted too, and generation without a prompt starts from it."""

    def encode(self, text: str) -> np.ndarray:
        """The token ids of `text`, np.int32 [tokens], without `eos_id`; every string can be encoded."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids [tokens]; `eos_id`, and ids that a padded vocabulary adds, are left out.

        Bytes that are no character, or not yet a whole one, become U+FFFD. For streaming: the text of a longer prefix
        begins with that of a shorter one, less its trailing U+FFFD.
        """
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: "byte", or the path of a SentencePiece model or a tokenizer.json.

    Raises:
      DataError: the file is missing, is no tokenizer's, or has no token that ends a document.
    """
    if name == "byte":
        return ByteTokenizer()
    return (HuggingFaceTokenizer if Path(name).suffix == ".json" else SentencePieceTokenizer)(name)


def tokenizer_file(name: str) -> Path | None:
    """The file that `data.tokenizer` names; None for "byte"."""
    return None if name == "byte" else Path(name).expanduser()


def tokenizer_files(name: str) -> list[Path]:
    """The files to copy for a tokenizer: its own, and those beside it with its special tokens and its chat template."""
    file = tokenizer_file(name)
    if file is None:
        return []
    beside = [file.with_name(other) for other in BESIDE] if file.suffix == ".json" else []
    return [file, *(other for other in beside if other.is_file())]


class ByteTokenizer:
    """UTF-8 bytes: ids 0 .. 255 are the bytes, 256 stands between documents."""

    vocab_size = 257
    bos_id = eos_id = 256

    def encode(self, text: str) -> np.ndarray:
        """The bytes of `text`, np.int32 [bytes]; lone surrogates, which UTF-8 does not have, become "?"."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; ids above 255 are left out and bytes that are no (or not yet a whole) character give U+FFFD.

        For streaming: the text of a longer prefix begins with that of a shorter one, less its trailing U+FFFD.
        """
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model (BPE or unigram), for example the file `tokenizer.model` of Llama or Mistral.

    Its end-of-sentence token stands between documents; its own begin-of-sentence token is not used.

    Raises:
      DataError: see `load_tokenizer`.
    """

    def __init__(self, path: str | Path):
        import sentencepiece  # only runs that use such a model need the package

        if not Path(path).expanduser().is_file():
            raise DataError(
                f"data.tokenizer={str(path)!r} is no file: use 'byte', or the path of a SentencePiece model or of a "
                "tokenizer.json"
            )
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(Path(path).expanduser()))
        except RuntimeError as error:
            raise DataError(
                f"data.tokenizer={str(path)!r} is not a SentencePiece model: use 'byte', or the path of one or of a "
                "tokenizer.json, whose name ends in .json"
            ) from error
        if self._model.eos_id() < 0:
            raise DataError(
                f"data.tokenizer={str(path)!r} has no end-of-sentence token to put between documents: "
                "use a model trained with one (SentencePiece's default)"
            )
        self.vocab_size: int = self._model.vocab_size()
        self.bos_id = self.eos_id = int(self._model.eos_id())

    def encode(self, text: str) -> np.ndarray:
        """The pieces of `text`, np.int32 [tokens]; lone surrogates become "?"."""
        return np.asarray(self._model.encode(text.encode("utf-8", errors="replace").decode()), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; ids beyond the vocabulary are left out, byte pieces that are no whole character give U+FFFD.

        For streaming: the text of a longer prefix begins with that of a shorter one, less its trailing U+FFFD.
        """
        return self._model.decode([i for i in map(int, ids) if i < self.vocab_size])


class HuggingFaceTokenizer:
    """A tokenizer.json of Hugging Face, by the package `tokenizers` (the extra `titans-jax[huggingface]`).

    The token between documents is `eos_token` of the tokenizer_config.json beside it, or a special token with a usual
    name. The spelling of a special token in a text is encoded as ordinary text, never as that special token.

    Raises:
      DataError: see `load_tokenizer`.
    """

    def __init__(self, path: str | Path):
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                f"data.tokenizer={str(path)!r} needs the package tokenizers: pip install 'titans-jax[huggingface]'"
            ) from error
        file = Path(path).expanduser()
        if not file.is_file():
            raise DataError(f"data.tokenizer={str(path)!r} is no file: use 'byte' or the path of a tokenizer.json")
        try:
            self._model = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises Exception itself
            raise DataError(
                f"data.tokenizer={str(path)!r} is not a tokenizer.json: use 'byte' or the path of one"
            ) from error
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        vocabulary = self._model.get_vocab()
        self.vocab_size: int = max(vocabulary.values()) + 1
        names = [name for name in (_said_end(file), *ENDS) if name in vocabulary]
        if not names:
            raise DataError(
                f"data.tokenizer={str(path)!r} has no token to put between documents: give it one of {', '.join(ENDS)} "
                "or name its eos_token in a tokenizer_config.json beside it"
            )
        self.bos_id = self.eos_id = int(vocabulary[names[0]])

    def encode(self, text: str) -> np.ndarray:
        """The tokens of `text`, np.int32 [tokens]; lone surrogates become "?"."""
        text = text.encode("utf-8", errors="replace").decode()
        return np.asarray(self._model.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, as `Tokenizer.decode`; special tokens and ids beyond the vocabulary are left out."""
        return self._model.decode([i for i in map(int, ids) if i < self.vocab_size], skip_special_tokens=True)


def _said_end(file: Path) -> str | None:
    """The `eos_token` that the file beside a tokenizer.json names."""
    try:
        said = json.loads(file.with_name(BESIDE[0]).read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return said.get("content") if isinstance(said, dict) else said
