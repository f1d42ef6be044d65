"""A trained model for lm-evaluation-harness: `titans_jax` in its registry.

    import lm_eval, titans_jax.evaluation.lm_eval_model
    lm_eval.simple_evaluate(model="titans_jax", model_args="run=runs/quickstart", tasks=["piqa"])

lm-eval has no plug-ins: a model is in its registry once its module is imported. To use lm-eval's own command line, with
all of its tasks and its data sets from the network, with this model in the registry:

    python -m titans_jax.evaluation.lm_eval_model --model titans_jax --model_args run=runs/quickstart --tasks piqa

Needs the extra `eval` (lm-eval 0.4.10 or newer, which brings no torch). All devices share the rows. With several
processes, each makes the same requests and gets all answers, so that to the harness it is the only one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.console import Console
from rich.progress import track

from titans_jax.config import ProcessesConfig
from titans_jax.evaluation.evaluators import on_all_devices
from titans_jax.evaluation.scoring import Request, Scorer
from titans_jax.inference import Generator, NotFiniteLogits, Sampling
from titans_jax.inference.generate import CAUSE
from titans_jax.sharding import processes
from titans_jax.training import Run, load_run

SIDE_BY_SIDE = 16
"""Prompts that are continued at a time."""


@register_model("titans_jax")
class TitansLM(TemplateLM):
    """Likelihoods and continuations of a run.

    Args:
      run: a trained model, or its folder.
      window: for rolling likelihoods, tokens of a window, each read from an empty state; None: a text is one window.
      max_gen_toks: tokens of a continuation, where the task does not set them.

    Other arguments of the harness (batch_size, device, ..) are ignored.
    """

    def __init__(self, run: Run | str, window: int | None = None, max_gen_toks: int = 256, **_: Any) -> None:
        super().__init__()
        self.run = run if isinstance(run, Run) else load_run(run)
        self.window = None if window is None else int(window)
        self._max_tokens = int(max_gen_toks)
        self._scorer, self._generators = None, {}
        self._console = Console(stderr=True)
        self.empty, self.long = 0, 0
        """How many continuations had no tokens, and how many texts were longer than a row of training."""

    @property
    def eot_token_id(self) -> int:
        """The token between documents."""
        return self.run.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """The name by which cached requests of different tokenizers are kept apart."""
        return str(self.run.config.data.tokenizer)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text; the token between documents is put in front of every context when it is read."""
        return self.run.tokenizer.encode(string).tolist()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log likelihood of the continuation of every (context, continuation), in nats, and whether each of its tokens
        is the likeliest; -inf for an empty continuation, which would otherwise be the likeliest of all.

        Raises:
          NotFiniteLogits: the model's logits are not finite.
        """
        pairs = []
        for context, continuation in (request.args for request in requests):
            before, after = self._encode_pair(context, continuation) if context else ([], self.tok_encode(continuation))
            pairs.append(((context, continuation), before, after))
        return self._loglikelihood_tokens(pairs, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        pairs = [self._request(before, after) for _, before, after in requests]
        found = []
        for (texts, _, after), (nats, greedy) in zip(requests, self._score(pairs, disable_tqdm), strict=True):
            self.empty += not after
            found.append((nats, greedy) if after else (-float("inf"), False))
            self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log likelihood of every text, in nats, summed over its tokens.

        Raises:
          NotFiniteLogits: the model's logits are not finite.
        """
        pairs: list[Request] = []
        owners = []
        for number, (text,) in enumerate(request.args for request in requests):
            for pair in self._windows(self.tok_encode(text)):
                pairs.append(pair)
                owners.append(number)
        found = np.zeros(len(requests))
        for owner, (nats, _) in zip(owners, self._score(pairs, disable_tqdm), strict=True):
            found[owner] += nats
        for request, nats in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, float(nats))
        return found.tolist()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of every context, up to the first of the texts `until`, by greedy decoding or sampling.

        Raises:
          NotFiniteLogits: the model's logits are not finite.
        """
        found = [""] * len(requests)
        alike: dict[tuple, list[int]] = {}
        for number, (_, asked) in enumerate(request.args for request in requests):
            until = asked.get("until") or ()
            until = (until,) if isinstance(until, str) else until
            until = tuple(filter(None, until))  # lm-eval's own models leave out empty texts too
            count = int(asked.get("max_gen_toks", asked.get("max_new_tokens", self._max_tokens)))
            warm = float(asked.get("temperature", 1.0 if asked.get("do_sample") else 0.0))
            alike.setdefault((until, count, warm if asked.get("do_sample", warm > 0) else 0.0), []).append(number)
        groups = [
            (how, numbers[start : start + SIDE_BY_SIDE])
            for how, numbers in alike.items()
            for numbers in [sorted(numbers, key=lambda number: len(requests[number].args[0]))]
            for start in range(0, len(numbers), SIDE_BY_SIDE)
        ]
        with on_all_devices(self.run) as self.run:
            for (until, count, warm), numbers in self._track(groups, len(groups), disable_tqdm):
                generator = self._generators.setdefault(
                    warm, Generator(self.run.graphdef, self.run.tokenizer, Sampling(temperature=warm))
                )
                contexts = [requests[number].args[0] for number in numbers]
                texts = generator.complete(self.run.params, contexts, count, until)
                for number, text in zip(numbers, texts, strict=True):
                    found[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found

    def _request(self, before: Sequence[int], after: Sequence[int]) -> Request:
        # In training every document has the token between documents in front.
        return np.array([self.eot_token_id, *before], np.int32), np.array(after, np.int32)

    def _windows(self, ids: list[int]) -> Iterator[Request]:
        """A text as one request, or as one for each window."""
        if self.window is None:
            yield self._request([], ids)
            return
        for pair in get_rolling_token_windows(ids, self.eot_token_id, self.window, context_len=1):
            before, after = make_disjoint_window(pair)
            yield np.array(before, np.int32), np.array(after, np.int32)

    def _score(self, pairs: list[Request], quiet: bool) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        with on_all_devices(self.run) as self.run:
            self._scorer = self._scorer or Scorer(self.run)
            for number, score in self._track(self._scorer.score(pairs), len(pairs), quiet):
                if not score.finite:
                    tokens = sum(map(len, pairs[number]))
                    raise NotFiniteLogits(f"the model's logits are not finite in a text of {tokens:,} tokens; {CAUSE}")
                found[number] = score.log_likelihood, score.greedy
        row = self.run.config.data.sequence_length
        self.long += sum(sum(map(len, pair)) - 1 > row for pair in pairs)
        return [found[number] for number in range(len(pairs))]

    def _track(self, what: Any, count: int, quiet: bool) -> Any:
        return track(what, "lm-eval", count, console=self._console, transient=True, disable=quiet)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    processes.start(ProcessesConfig())
    cli_evaluate()
