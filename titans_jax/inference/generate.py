"""Prefill, decode step, and a generator of text that uses them.

The state is explicit: `model.init_state(...)` makes it, both functions take it and return the next one. Its size does
not depend on how much has been read, so one compiled step serves any context length.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from titans_jax.data.tokenizers import Tokenizer
from titans_jax.inference.sampling import Sampling, sample

PIECES = (256, 16)
"""Prompt lengths that are compiled; what is left is read token by token. `extend` is exact at any split."""

CACHE_MULTIPLE = 512


def prefill(model: nnx.Module, tokens: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """Read a prompt; the logits of the token after it, and the next state.

    Args:
      model: a titans_jax.models.LanguageModel.
      tokens: int32 [batch, time].
      state: of `model.init_state`, or what an earlier call returned.

    Returns:
      logits [batch, vocab], and the state after the prompt.
    """
    logits, state = model.extend(tokens, state)
    return logits[:, -1], state


def decode_step(model: nnx.Module, token: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """`prefill` of one token, int32 [batch]."""
    return prefill(model, token[:, None], state)


class Generator:
    """Continues a prompt with a model given as (graphdef, params), so that one compilation serves changing parameters.

    Args:
      graphdef: the structure of a titans_jax.models.LanguageModel.
      tokenizer: the one of the data that the model was trained on.
      sampling: how tokens are drawn, default `Sampling()`.
    """

    def __init__(self, graphdef: nnx.GraphDef, tokenizer: Tokenizer, sampling: Sampling | None = None) -> None:
        self._graphdef, self._tokenizer = graphdef, tokenizer
        self._sampling = sampling or Sampling()
        self._init_state = jax.jit(lambda params, n: nnx.merge(graphdef, params).init_state(1, n), static_argnums=1)
        self._read = jax.jit(self._read_piece)
        self._step = jax.jit(self._read_and_sample)

    def stream(self, params: Any, prompt: str, max_tokens: int, seed: int = 0) -> Iterator[str]:
        """Yield the text of the continuation as it becomes known, until the document ends or after `max_tokens`."""
        return stream_text(self.tokens(params, prompt, max_tokens, seed), self._tokenizer)

    def tokens(self, params: Any, prompt: str, max_tokens: int, seed: int = 0) -> Iterator[int]:
        """Yield the token ids of the continuation, without the end of document."""
        # Documents are trained with the token between documents in front, so an empty prompt is a prompt too.
        ids = np.concatenate([[self._tokenizer.bos_id], self._tokenizer.encode(prompt)]).astype(np.int32)
        # Only full attention asks for the length; rounded, so that prompts of similar length share a compilation.
        length = -(-(len(ids) + max_tokens) // CACHE_MULTIPLE) * CACHE_MULTIPLE
        state = self._init_state(params, length)
        *pieces, rest = split_prompt(ids)
        for piece in pieces:
            state = self._read(params, piece[None], state)
        key = jax.random.key(seed)
        for token in rest:
            token, state = self._step(params, token[None], state, key)
        for i in range(max_tokens):
            if int(token[0]) == self._tokenizer.eos_id:
                return
            yield int(token[0])
            if i + 1 < max_tokens:
                token, state = self._step(params, token, state, jax.random.fold_in(key, i + 1))

    def _read_piece(self, params: Any, tokens: jax.Array, state: Any) -> Any:
        return prefill(nnx.merge(self._graphdef, params), tokens, state)[1]

    def _read_and_sample(self, params: Any, token: jax.Array, state: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        """Read a token [1]; the token drawn after it [1], and the next state."""
        logits, state = decode_step(nnx.merge(self._graphdef, params), token, state)
        return sample(logits, key, self._sampling, self._tokenizer.vocab_size), state


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
