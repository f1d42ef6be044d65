"""Prefill, decode step, and a generator of text that uses them.

The state is explicit: `model.init_state(...)` makes it, both functions take it and return the next one. Its size does
not depend on how much has been read, so one compiled step serves any context length.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax import sharding
from titans_jax.config import ConfigError
from titans_jax.data.packing import encode_after
from titans_jax.data.tokenizers import Tokenizer
from titans_jax.errors import TitansError
from titans_jax.inference.decoding import decoding_parts, decoding_state
from titans_jax.inference.reading import Memory
from titans_jax.inference.rows import RowStates
from titans_jax.inference.sampling import Sampling, sample

PIECES = (256, 16)
"""Sizes of the pieces in which a prompt is read; the rest is read token by token. `extend` is exact at any split."""

CACHE_MULTIPLE = 512
NOT_FINITE = -1
"""In place of a token, where logits are infinite or NaN."""
CAUSE = "a learning rate that was too high, or a text too long for an unstable memory, makes them so"


class NotFiniteLogits(TitansError, ValueError):
    """A model whose logits are infinite or NaN."""


def prefill(model: nnx.Module, tokens: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """Read a prompt; return the logits of the token after it, and the next state.

    Args:
      model: a titans_jax.models.LanguageModel.
      tokens: int32 [batch, time].
      state: from `model.init_state` or an earlier call.

    Returns:
      logits [batch, vocab], and the state after the prompt.
    """
    logits, state = model.extend(tokens, state)
    return logits[:, -1], state


def decode_step(model: nnx.Module, token: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """`prefill` of one token, int32 [batch]."""
    return prefill(model, token[:, None], state)


class Generator:
    """Continues prompts with a model given as (graphdef, params), so that one compilation serves changing parameters.

    Args:
      graphdef: the structure of a titans_jax.models.LanguageModel.
      tokenizer: the one of the data that the model was trained on.
      sampling: how tokens are drawn, default `Sampling()`.
    """

    def __init__(self, graphdef: nnx.GraphDef, tokenizer: Tokenizer, sampling: Sampling | None = None) -> None:
        self._graphdef, self._tokenizer = graphdef, tokenizer
        self._sampling, self._states = sampling or Sampling(), RowStates(graphdef)
        self._read, self._copy = jax.jit(self._read_piece), jax.jit(self._states.copy)
        self._separate = jax.jit(lambda params, state: decoding_state(self._states.separate(params, state), axis=1))
        self._step = jax.jit(self._read_and_sample, static_argnums=0, donate_argnums=3)

    def stream(
        self,
        params: Any,
        prompt: str,
        max_tokens: int,
        seed: int = 0,
        *,
        until: Sequence[str] = (),
        memory: Memory | None = None,
    ) -> Iterator[str]:
        """Yield the text of the continuation as it becomes known, until the document ends or after `max_tokens`.

        until: texts that end it too, and are not yielded. memory: the memory of a text read before the prompt.

        Raises:
          NotFiniteLogits: the model's logits are not finite.
          ConfigError: `max_tokens` is negative, or one of `until` is empty.
        """
        check_ends(max_tokens, until)
        pieces = stream_text(self.tokens(params, prompt, max_tokens, seed, memory), self._tokenizer)
        return stream_before(pieces, until) if until else pieces

    def tokens(
        self, params: Any, prompt: str, max_tokens: int, seed: int = 0, memory: Memory | None = None
    ) -> Iterator[int]:
        """Yield the token ids of the continuation, without the end of document.

        Raises:
          NotFiniteLogits: as `stream`.
        """
        for ((_, token),) in self._side_by_side(params, [prompt], max_tokens, seed, memory):
            if token == self._tokenizer.eos_id:
                return
            yield token

    def complete(
        self,
        params: Any,
        prompts: Sequence[str],
        max_tokens: int,
        until: Sequence[str] = (),
        seed: int = 0,
    ) -> list[str]:
        """The continuations of several prompts, read side by side: each is the same as if its prompt were alone.

        A continuation ends with the document, before the first of the texts `until`, or after `max_tokens`. Prompts of
        similar length are read fastest.

        Raises:
          NotFiniteLogits, ConfigError: as `stream`.
        """
        check_ends(max_tokens, until)
        if not prompts:
            return []
        said: list[list[int]] = [[] for _ in prompts]
        going = set(range(len(prompts)))
        for step in self._side_by_side(params, prompts, max_tokens, seed):
            for row, token in step:
                if row in going and token != self._tokenizer.eos_id:
                    said[row].append(token)
                    if not (until and any(text in self._tokenizer.decode(said[row]) for text in until)):
                        continue
                going.discard(row)
            if not going:
                break
        return [cut_before(self._tokenizer.decode(row), until) for row in said]

    def encode(self, prompt: str, memory: Memory | None = None) -> np.ndarray:
        """The tokens to read for a prompt, int32 [tokens]; with a memory, the prompt continues the memory's text."""
        # As in training, a document has the token between documents in front, so an empty prompt has a token too.
        last = self._tokenizer.bos_id if memory is None else memory.last
        preceding = "" if memory is None else self._tokenizer.decode([last])[-1:].replace("\ufffd", "")
        return np.concatenate([[last], encode_after(self._tokenizer, preceding, prompt)]).astype(np.int32)

    def _side_by_side(
        self, params: Any, prompts: Sequence[str], max_tokens: int, seed: int, memory: Memory | None = None
    ) -> Iterator[list[tuple[int, int]]]:
        """Yield lists of (row, next token of its continuation), until each row has `max_tokens` tokens.

        Up to nearly the length of the shortest prompt, all prompts are read in pieces. From there each row reads token
        by token, first the rest of its own prompt and then its continuation, so that short prompts are continued while
        long ones are still being read.
        """
        ids = [self.encode(prompt, memory) for prompt in prompts]
        ends, out = np.array([len(row) for row in ids]), np.zeros(len(ids), np.int32)
        # Only full attention and caching use the length; rounded, so that similar lengths share a compilation.
        length = -(-(max(ends) + max_tokens) // CACHE_MULTIPLE) * CACHE_MULTIPLE
        state, read = self._states.empty(params, len(ids), int(length)), 0
        if memory is not None:
            state = self._copy(params, memory.state, np.zeros(len(ids), np.int32))
        *pieces, _ = split_prompt(np.arange(min(ends)))
        for piece in pieces:
            state, read = self._read(params, np.stack([row[piece] for row in ids]), state), read + len(piece)
        state, key = self._separate(params, state), jax.random.key(seed)
        structure, leaves = decoding_parts(self._graphdef, params)
        seen = np.zeros((len(ids), nnx.merge(self._graphdef, params).config.vocab_size), bool)
        for row, prompt_ids in enumerate(ids):
            seen[row, prompt_ids] = True
        for place in range(read, max(ends) + max_tokens - 1):
            fed = [row[place] if place < len(row) else said for row, said in zip(ids, out, strict=True)]
            number = place + 1 - ends  # of the token that follows, in the row's continuation
            seen[np.arange(len(ids)), fed] = True
            following, state = self._step(
                structure, leaves, np.array(fed, np.int32), state, key, np.maximum(number, 0), seen
            )
            out = np.asarray(following)
            speaking = (number >= 0) & (number < max_tokens)
            if (out[speaking] == NOT_FINITE).any():
                raise NotFiniteLogits(f"the model's logits after {place + 1:,} tokens are not finite; {CAUSE}")
            if speaking.any():
                yield [(int(row), int(out[row])) for row in np.flatnonzero(speaking)]

    def _read_piece(self, params: Any, tokens: jax.Array, state: Any) -> Any:
        return prefill(nnx.merge(self._graphdef, params), tokens, state)[1]

    def _read_and_sample(
        self,
        structure: jax.tree_util.PyTreeDef,
        leaves: list[jax.Array],
        tokens: jax.Array,
        state: Any,
        key: jax.Array,
        number: jax.Array,
        seen: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """Read one token per row [rows] into a `separate` `decoding_state`; return the tokens drawn next [rows] and the
        new state.

        structure, leaves: of `decoding_parts`. number: int32 [rows], how many tokens the row has drawn so far: it seeds
        the draw, which therefore does not depend on other rows. seen: bool [rows, vocab], the tokens of a row's prompt
        and continuation so far.
        """
        model = jax.tree.unflatten(structure, leaves)

        def one_row(token: jax.Array, state: Any, number: jax.Array, seen: jax.Array) -> tuple[jax.Array, Any]:
            logits, state = decode_step(model, token[None], state)
            drawing = jax.random.fold_in(key, number)
            drawn = sample(logits, drawing, self._sampling, self._tokenizer.vocab_size, seen[None])[0]
            return jnp.where(jnp.all(jnp.isfinite(logits)), drawn, NOT_FINITE), state

        following, state = jax.vmap(one_row)(tokens, state, number, seen)
        return sharding.replicate(following), state


def check_ends(max_tokens: int, until: Sequence[str]) -> None:
    """Refuse ends of a continuation with which there is none.

    Raises:
      ConfigError: `max_tokens` is negative, or one of `until` is empty.
    """
    if max_tokens < 0:
        raise ConfigError(f"max_tokens is {max_tokens}; use at least 0")
    if "" in until:
        raise ConfigError("until has ''; use texts of at least one letter, or none")


def cut_before(text: str, until: Sequence[str]) -> str:
    """The part of `text` before the first occurrence of any of these texts; all of it where there is none."""
    return text[: min((place for place in map(text.find, until) if place >= 0), default=len(text))]


def stream_before(pieces: Iterable[str], until: Sequence[str]) -> Iterator[str]:
    """`cut_before` for a text that comes in pieces: what may be the beginning of one of the texts is held back."""
    held = ""
    for piece in pieces:
        held += piece
        cut = cut_before(held, until)
        if len(cut) < len(held):
            if cut:
                yield cut
            return
        waiting = max((size for text in until for size in range(1, len(text)) if held.endswith(text[:size])), default=0)
        if len(held) > waiting:
            yield held[: len(held) - waiting]
            held = held[len(held) - waiting :]
    if held:
        yield held


def split_prompt(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Cut `ids` [tokens] into pieces of the lengths in `PIECES`, the largest first; the rest has at least one token."""
    start = 0
    for size in PIECES:
        while len(ids) - start > size:
            yield ids[start : start + size]
            start += size
    yield ids[start:]


def stream_text(ids: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Decode ids as they come; a character whose bytes are not all there yet is held back until they are.

    The text of all pieces together is the text of all ids. Each piece is decoded from the last few ids only.
    """
    context: list[int] = []  # ids whose text is out; the next ids' text may depend on them (a leading space)
    waiting: list[int] = []  # ids whose text may still change
    out = 0  # characters of the text of `waiting` that are out
    for token in ids:
        waiting.append(token)
        known = len(tokenizer.decode(context))
        text = tokenizer.decode(context + waiting)[known:]
        stable = text.rstrip("\ufffd")
        if len(stable) > out:
            yield stable[out:]
            out = len(stable)
        if stable == text:
            context, waiting, out = waiting, [], 0
    if waiting:
        yield tokenizer.decode(context + waiting)[len(tokenizer.decode(context)) + out :]
