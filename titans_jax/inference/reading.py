"""A memory that can be kept: the state of a model after reading a text of any length, to be saved and used later.

    reader = Reader(run.graphdef, run.params, run.tokenizer)
    memory, loss = reader.read(reader.start(), reader.encode("a long text"))
    memory.save("book.memory")
    memory = Memory.load("book.memory", reader)

A memory is the model's state (fast weights, momentum, anchors, convolution tails, windows of attention, positions),
whose size does not depend on the text, and the last token, which the state has not read yet: the next token is
predicted from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from titans_jax.config import ModelConfig, memory_rule, to_dict
from titans_jax.config.saved import earlier_retentions
from titans_jax.data.packing import encode_after, stretches
from titans_jax.data.tokenizers import Tokenizer
from titans_jax.errors import TitansError
from titans_jax.models import empty_state, granularity

FORMAT = "1"
LATER = {
    "attention_conv": False,
    "embedding_scale": 1.0,
    "mac_long_term": None,
    "merge": "product",
    "memory.mimo_rank": 4,
    "memory.omega_window": None,
    "memory.caching": None,
    "memory.cache_segment": 256,
    "memory.cache_segmentation": "constant",
    "memory.cache_restart": False,
    "memory.cache_counted": False,
    "memory.continuum_chunks": (16, 64, 256),
    "memory.continuum_order": "sequential",
    "memory.local_chunks": (),
    "memory.shard": 2048,
    "memory.normalize_values": False,
    "memory.value_skip": False,
    "memory.shared_gates": False,
    "memory.channel_steps": None,
    "memory.gate_maps": "shared",
    "memory.start": None,
    "memory.tie_keys": False,
    "memory.skip_projection": False,
    "memory.prediction_gate": False,
    "memory.scale_keys": False,
    "memory.orthogonal_start": False,
    "memory.log_linear_levels": 0,
}
"""Fields of the model's configuration that were added after the first memory files, each with the value at which it has
no effect. At this value a field is left out of the fingerprint, so that older files still fit their model."""
LONG = 1 << 30
"""A length at which any part of a state that grows with the text is larger; only shapes are computed for it."""
PIECE = 1024
"""Tokens read at once, or the next whole number of segments."""
SMALL_PIECES = (256, 16, 1)
"""Sizes of pieces where a segment has begun already, or fewer tokens are left."""


class MemoryFileError(TitansError, ValueError):
    """A memory that cannot be kept, read or used with a model. The message says why."""


@dataclass(frozen=True)
class Memory:
    """The state of a model after reading a text.

    state: the pytree that `LanguageModel.init_state` makes, with one row. last: the last token of the text, which the
    state has yet to read. tokens: how many the state has read. fingerprint: of the model (function `fingerprint`).
    """

    state: Any
    last: int
    tokens: int
    fingerprint: str

    def save(self, file: str | Path) -> None:
        """Write the memory as safetensors, each array named by its path in the state.

        The file is written under another name first and then renamed, so that it is there whole or not at all.

        Raises:
          OSError: it cannot be written; an earlier file of this name is left whole.
          MemoryFileError: an array holds NaN; an earlier file is left whole.
        """
        arrays = {name: np.array(leaf, order="C") for name, leaf in named_leaves(self.state).items()}
        if unknown := [name for name, array in arrays.items() if np.isnan(array).any()]:
            raise MemoryFileError(
                f"memory is {str(file)!r}, and {unknown[0]} of what was read is NaN, so it was not written; a text too "
                "long for an unstable memory makes it so, read less of it"
            )
        about = {"format": FORMAT, "fingerprint": self.fingerprint, "tokens": str(self.tokens), "last": str(self.last)}
        target = Path(file)
        writing = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        save_arrays(arrays, writing, {"titans_jax_memory": json.dumps(about)})
        writing.replace(target)

    @classmethod
    def load(cls, file: str | Path, reader: Reader) -> Memory:
        """The memory that `save` wrote, for the model of `reader`.

        Raises:
          MemoryFileError: there is no such file, it holds no memory, or the memory is another model's.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(file).is_file():
            raise MemoryFileError(f"memory is {str(file)!r}, which is no file; titans read RUN TEXT --memory makes one")
        try:
            with safe_open(file, framework="np") as stored:
                about = json.loads((stored.metadata() or {})["titans_jax_memory"])
                arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (no dictionary)
            last, tokens = int(about["last"]), int(about["tokens"])
            version, made_by = about["format"], about["fingerprint"]
        except (SafetensorError, KeyError, ValueError, TypeError) as error:
            raise MemoryFileError(
                f"memory is {str(file)!r}, which is damaged or no memory's file; read it anew"
            ) from error
        if version != FORMAT:
            raise MemoryFileError(
                f"memory is {str(file)!r}, a file of format {version}, and this version reads format {FORMAT}; "
                "use the version that wrote it, or read the text anew"
            )
        if made_by not in reader.fingerprints:
            raise MemoryFileError(
                f"memory is {str(file)!r}, which another model has read (its fingerprint is {made_by}, "
                f"this model's {reader.fingerprint}); use that model, or read the text with this one"
            )
        abstract = reader.abstract_state
        names = named_leaves(abstract)
        if {n: (a.shape, a.dtype) for n, a in arrays.items()} != {n: (a.shape, a.dtype) for n, a in names.items()}:
            raise MemoryFileError(
                f"memory is {str(file)!r}, which does not hold this model's state; read the text anew"
            )
        leaves = [jnp.asarray(arrays[name]) for name in names]
        return cls(jax.tree.unflatten(jax.tree.structure(abstract), leaves), last, tokens, reader.fingerprint)


@dataclass(frozen=True)
class Loss:
    """Summed cross entropy of the tokens of a reading, and their number."""

    nats: float = 0.0
    tokens: int = 0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.nats + other.nats, self.tokens + other.tokens)


class Reader:
    """Reads tokens into memories of one model.

    Args:
      graphdef, params: the model. tokenizer: the one it was trained with.

    Raises:
      MemoryFileError: the model keeps every token (full attention) or more and more memories (caching), so that its
        state has no constant size.
    """

    def __init__(self, graphdef: nnx.GraphDef, params: Any, tokenizer: Tokenizer):
        self._graphdef, self._params, self._tokenizer = graphdef, params, tokenizer
        self.abstract_state = self._shapes(8)
        if jax.tree.map(lambda x: x.shape, self.abstract_state) != jax.tree.map(lambda x: x.shape, self._shapes(LONG)):
            raise MemoryFileError(
                "the model has full attention, which keeps every token, or caching, which keeps more and more "
                "memories; use one of lmm, mac, mag, mal, hope or window blocks, with model.memory.caching None"
            )
        config = nnx.merge(graphdef, params).config
        self.fingerprint = fingerprint(config, params)
        self.fingerprints = {self.fingerprint, *earlier_fingerprints(config, params)}
        self._grain = granularity(config)
        self._piece = -(-PIECE // self._grain) * self._grain
        self._read = jax.jit(self._read_tokens)

    def start(self) -> Memory:
        """The memory before the first token of a document."""
        state = jax.jit(lambda params: empty_state(self._graphdef, params, 1, 8))(self._params)
        return Memory(state, self._tokenizer.bos_id, 0, self.fingerprint)

    def encode(self, text: str | Iterable[str], memory: Memory | None = None) -> Iterator[np.ndarray]:
        """The tokens of a text, or of its parts, stretch by stretch, int32 [any]; `memory`: the one it continues."""
        for preceding, stretch in stretches([text] if isinstance(text, str) else text):
            if not preceding and memory is not None and memory.tokens:
                preceding = self._tokenizer.decode([memory.last])[-1:].replace("\ufffd", "")
            yield encode_after(self._tokenizer, preceding, stretch)

    def read(
        self, memory: Memory, tokens: Iterable[np.ndarray], told: Callable[[Loss], None] = lambda _: None
    ) -> tuple[Memory, Loss]:
        """The memory after tokens, given in stretches of any length, and their loss; `memory` is not changed.

        told: called with the loss so far after every piece.
        """
        state, last, count, loss = memory.state, memory.last, memory.tokens, Loss()
        waiting = np.array([last], np.int32)
        for stretch in tokens:
            waiting = np.concatenate([waiting, stretch.astype(np.int32)])
            while (size := self._next_piece(count, len(waiting) - 1)) == self._piece:
                state, loss = self._piece_read(state, waiting[: size + 1], loss)
                waiting, count = waiting[size:], count + size
                told(loss)
        while size := self._next_piece(count, len(waiting) - 1):
            state, loss = self._piece_read(state, waiting[: size + 1], loss)
            waiting, count = waiting[size:], count + size
            told(loss)
        return Memory(state, int(waiting[0]), count, self.fingerprint), loss

    def _next_piece(self, count: int, available: int) -> int:
        """How many tokens to read next: a whole piece at the start of a segment, else the largest of SMALL_PIECES that
        fits the tokens available and the rest of a segment that has begun."""
        behind = count % self._grain
        if not behind and available >= self._piece:
            return self._piece
        room = min(available, self._grain - behind) if behind else available
        return next((size for size in SMALL_PIECES if size <= room), 0)

    def _piece_read(self, state: Any, tokens: np.ndarray, loss: Loss) -> tuple[Any, Loss]:
        state, nats = self._read(self._params, state, tokens[None, :-1], tokens[1:])
        return state, loss + Loss(float(nats), len(tokens) - 1)

    def _read_tokens(self, params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        logits, state = nnx.merge(self._graphdef, params).extend(tokens, state)
        return state, jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits[0], targets))

    def _shapes(self, length: int) -> Any:
        return jax.eval_shape(lambda params: empty_state(self._graphdef, params, 1, length), self._params)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Arrays of a pytree by their path, as "0.memory.memory.weights.1"."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(tree)}


def save_arrays(arrays: dict[str, np.ndarray], file: Path, metadata: dict[str, str]) -> None:
    """Write safetensors with the permissions of other new files; the library gives them to the owner alone."""
    from safetensors.numpy import save_file

    file.touch()
    mode = file.stat().st_mode
    save_file(arrays, file, metadata)
    file.chmod(mode)


def fingerprint(config: ModelConfig, params: Any) -> str:
    """16 hexadecimal digits that change with any parameter, and with any setting that changes the model's results."""
    settings = to_dict(config)
    del settings["remat"], settings["memory"]["form"]  # how the same numbers are computed
    del settings["memory"]["key_start"]  # how training began
    for name, silent in LATER.items():
        *path, field = name.split(".")
        section = settings["memory"] if path else settings
        if section[field] == silent:
            del section[field]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, leaf in named_leaves(params).items():
        digest.update(name.encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def earlier_fingerprints(config: ModelConfig, params: Any) -> list[str]:
    """Those that earlier versions wrote for the same model: in memories whose weights are made of logits, None once
    stood for values as projected (`normalize_values`), before that for no skip (`value_skip`), and nothing was said of
    where the logits start (`retention`); Moneta's bias was as it is where it is named."""
    fields = ("normalize_values", "value_skip", "retention", "bias")
    said = tuple(getattr(config.memory, field) for field in fields)
    sized, skip, retention, bias = said
    meant = [{sized}, {skip}, {retention}, {bias}]
    if memory_rule(config.memory).retention.positive:
        meant[:3] = {sized, sized or None}, {skip, skip or None}, {retention} | earlier_retentions(config.memory)
    if (config.memory.preset, bias) == ("moneta", "lp"):
        meant[3] = {bias, None}
    changes = (dict(zip(fields, each, strict=True)) for each in itertools.product(*meant) if each != said)
    memories = (dataclasses.replace(config.memory, **change) for change in changes)
    return [fingerprint(dataclasses.replace(config, memory=memory), params) for memory in memories]
